"""What the course does to the place where it runs: memory that Binder grants, packages that Colab brings along."""

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def run_notebook(folder, source: str, *stored: nbformat.NotebookNode) -> subprocess.CompletedProcess:
    """pytest over a notebook of one cell, beside the conftest.py of the lessons."""
    shutil.copy(ROOT / "notebooks" / "conftest.py", folder)
    cell = nbformat.v4.new_code_cell(source, execution_count=1, outputs=list(stored))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "short.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", folder / "short.ipynb"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


# --- What a teacher's test run lets pass ----------------------------------------------------------------------------

@pytest.mark.parametrize("stored, found, equal", [
    ("KL 0.30", "KL 0.30", True), ("53.9", "53.91", True), ("53.90", "53.91", True), ("53.89", "53.91", False),
    ("[0.2350, 0.3875]", "[0.2351, 0.3874]", True), ("[0.2350, 0.3875]", "[0.2351, 0.3877]", False),
    ("[0.2350, 0.3875]", "[0.2350]", False), ("9.99", "10.00", True), ("1.00", "1.01", True), ("3.0", "3.2", False),
    ("1.17e+06", "1.18e+06", True), ("1.17e+06", "1.17e+07", False), ("102 tokens", "103 tokens", False),
    ("69%", "70%", False), ("0.024, True", "0.025, True", True), ("0.024, True", "0.025, False", False),
    ("3.0", "3.000000238418579", False), ("0.5 -0.5", "0.5 0.5", False), ("", "1.0", False),
    ("torch 2.12.0", "torch 2.13.0", False), ("v1.2.3", "v1.3.3", False), ("-0.00", "0.00", True),
    ("|  9.99|", "| 10.00|", True), ("0.01 -0.01", "-0.01 0.01", False), ("a 0.5", "a0.5", False)])
def test_outputs_may_differ_in_the_last_digit_behind_a_point_and_in_nothing_else(stored, found, equal):
    spec = importlib.util.spec_from_file_location("notebooks_conftest", ROOT / "notebooks" / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    assert conftest.alike(stored, found) == conftest.alike(found, stored) == equal


@pytest.mark.parametrize("stored, code", [("KL 0.25", 0), ("KL 0.24", 0), ("KL 0.23", 1), ("kl 0.24", 1)])
def test_a_cell_that_differs_in_the_last_digit_passes_and_is_named(tmp_path, stored, code):
    text = nbformat.v4.new_output("stream", name="stdout", text=stored + "\n")
    value = nbformat.v4.new_output("execute_result", {"text/plain": stored}, execution_count=1)
    source = "from IPython.display import Pretty\nprint('KL 0.25')\nPretty('KL 0.25')"
    done = run_notebook(tmp_path, source, text, value)
    assert done.returncode == code, done.stdout
    assert ("passed, but for the last digit" in done.stdout) == (stored == "KL 0.24")
    assert bool(re.search("mismatch '(stdout|text/plain)'", done.stdout)) == bool(code)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of another process")
@pytest.mark.parametrize("gib, code", [(0.1, 0), (2.1, 1)])
def test_f3_a_notebook_that_takes_too_much_memory_fails(tmp_path, gib, code):
    """The lessons themselves are measured when their cells are tested, by notebooks/conftest.py."""
    done = run_notebook(tmp_path, f"taken = b'x' * int({gib} * 2**30)\ndel taken")
    assert done.returncode == code, done.stdout
    assert "GiB" in done.stdout.split("most memory of each notebook")[1]
    assert ("short.ipynb took 2." in done.stdout) == bool(code)


def test_f4_nothing_pins_or_caps_torch_or_numpy():
    found = {}
    for line in requires("llm-lessons"):
        requirement = Requirement(line)
        found[requirement.name] = {part.operator for part in requirement.specifier}
    assert found["torch"] == found["numpy"] == {">="}
    assert all(operators <= {">="} for operators in found.values())
    learner = (ROOT / "requirements.txt").read_text()
    assert not re.search(r"^(torch|numpy)\b", learner, re.M)


def test_f4_installing_it_again_changes_nothing():
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "llm-lessons[classroom]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout
    for name in ("numpy", "torch"):
        assert f"Requirement already satisfied: {name}" in done.stdout
