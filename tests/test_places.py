"""Where the course is opened and tested: mybinder.org, Colab, and the machines of a GitHub workflow."""

import ast
import os
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import nbformat
import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
sys.path.insert(0, str(ROOT / "tools"))
import notebooks as tool  # noqa: E402

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SUPPORTED = ["3.10", "3.11", "3.12", "3.13"]
WANTED = [Requirement(line) for line in requires("llm-lessons")] + [
    Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1].isalpha()]


def lines(name: str) -> list[str]:
    found = (ROOT / "binder" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in found if line and not line.startswith("#")]


def pinned() -> dict[str, Version]:
    """The packages of binder/requirements.txt, each with its one version."""
    found = {}
    for line in lines("requirements.txt"):
        if not line.startswith("-"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = Version(version)
    return found


# --- Binder: repo2docker copies the repository, installs binder/requirements.txt in it, and runs postBuild ------------

def test_binder_has_the_files_that_repo2docker_reads_and_no_others():
    """With a Dockerfile, an environment.yml or a setup.py there, it would leave requirements.txt out."""
    assert {path.name for path in (ROOT / "binder").iterdir()} == {"requirements.txt", "runtime.txt", "postBuild"}


def test_binder_installs_the_package_itself_and_the_cpu_build_of_torch():
    options = [line for line in lines("requirements.txt") if line.startswith("-")]
    assert options == ["--extra-index-url https://download.pytorch.org/whl/cpu", "-e ."]
    assert pinned()["torch"].local == "cpu"


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.name)
def test_binder_pins_whatever_the_course_asks_for_within_its_range(wanted):
    version = pinned().get(canonicalize_name(wanted.name))
    assert version is not None, f"pin {wanted.name} in binder/requirements.txt"
    assert wanted.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_binder_has_every_package_that_a_lesson_imports(path):
    owners, known = packages_distributions(), set(pinned()) | {"llm-lessons"}
    for cell in nbformat.read(path, as_version=4).cells:
        for node in ast.parse(re.sub("%pip.*", "pass", cell.source)).body if cell.cell_type == "code" else []:
            names = [node.module] if isinstance(node, ast.ImportFrom) else \
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (name.split(".")[0] for name in names):
                found = owners.get(name, [name])  # Python 3.10 reads top_level.txt alone: gguf has none
                assert name in sys.stdlib_module_names or {canonicalize_name(n) for n in found} & known, name


def test_binder_runs_a_python_that_the_course_supports():
    version = re.fullmatch(r"python-(3\.\d+)", lines("runtime.txt")[0])[1]
    assert version in SUPPORTED
    assert SpecifierSet(re.search(r'requires-python = "(.+)"', PROJECT)[1]).contains(version)


def test_binder_fetches_the_model_when_it_builds():
    """repo2docker makes postBuild executable and runs it by its first line: no carriage returns; stop on errors."""
    path = ROOT / "binder" / "postBuild"
    assert path.read_bytes().splitlines(keepends=True) == [
        b"#!/usr/bin/env bash\n", b"set -e\n", b"python -m llm_lessons --fetch\n"]
    assert os.name == "nt" or os.access(path, os.X_OK)


def test_every_link_to_binder_and_colab_opens_a_lesson_that_exists():
    texts = [path.read_text(encoding="utf-8") for path in [*PATHS, ROOT / "README.md"]]
    link = re.compile(r"https://(?:mybinder\.org/v2|colab\.)[^)\"\\\s]+")
    addresses = [address for text in texts for address in link.findall(text)]
    assert len(addresses) >= 2 * len(PATHS)
    slug = tool.repository().removeprefix("https://github.com/")
    for address in addresses:
        found = re.fullmatch(rf"https://(?:mybinder\.org/v2/gh/{slug}/main\?urlpath=lab/tree/|"
                             rf"colab\.research\.google\.com/github/{slug}/blob/main/)(notebooks/\w+\.ipynb)", address)
        assert found and (ROOT / found[1]).exists(), address


# --- Colab: the notebook comes alone, beside a torch and a numpy that must stay as they are ---------------------------

@pytest.fixture
def set_up(monkeypatch):
    """Runs the set-up cell, with the package there or not; gives what was asked of %pip."""
    shell, asked = InteractiveShell(), []
    shell.register_magic_function(asked.append, "line", "pip")

    def run(there: bool) -> list[str]:
        asked.clear()
        found = {"llm_lessons": object() if there else None}
        monkeypatch.setattr("importlib.util.find_spec", found.__getitem__)
        shell.run_cell(tool.set_up()).raise_error()
        return list(asked)

    return run


def test_the_set_up_cell_does_nothing_where_the_package_is(set_up):
    assert set_up(there=True) == []


def test_the_set_up_cell_fetches_the_package_with_what_the_lessons_draw_with(set_up):
    (line,) = set_up(there=False)
    install, quiet, requirement = line.split(" ", 2)
    wanted = Requirement(requirement.strip('"'))
    assert (install, quiet) == ("install", "-q")
    assert (wanted.name, wanted.extras, wanted.url) == ("llm-lessons", {"classroom"}, f"git+{tool.repository()}")


def test_what_colab_fetches_brings_no_part_of_jupyter_that_runs_already():
    """ipykernel, IPython and jupyter are up while %pip works; ipywidgets 7.7.1, which Colab has, must be enough."""
    brought = [Requirement(line) for line in requires("llm-lessons")]
    assert not [wanted.name for wanted in brought if re.search("jupyter|ipykernel|ipython|nbval|notebook", wanted.name)]
    assert next(wanted for wanted in brought if wanted.name == "ipywidgets").specifier.contains("7.7.1")


# --- GitHub's machines ------------------------------------------------------------------------------------------------

def test_the_workflow_runs_the_readmes_command_on_every_system_and_python():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["newest"]["strategy"]["matrix"]
    assert matrix["python"] == SUPPORTED
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    for job in jobs.values():
        assert "python course.py test" in [step.get("run") for step in job["steps"]]
    assert "python3 course.py test" in (ROOT / "README.md").read_text(encoding="utf-8")
