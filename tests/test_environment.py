"""What the course does to the place where it runs: memory that Binder grants, packages that Colab brings along."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of another process")
@pytest.mark.parametrize("gib, code", [(0.1, 0), (1.6, 1)])
def test_f3_a_notebook_that_takes_too_much_memory_fails(tmp_path, gib, code):
    """The lessons themselves are measured when their cells are tested, by notebooks/conftest.py."""
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    cell = nbformat.v4.new_code_cell(f"taken = b'x' * int({gib} * 2**30)\ndel taken", execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "greedy.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", tmp_path / "greedy.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == code, done.stdout
    assert "GiB" in done.stdout.split("most memory of each notebook")[1]
    assert ("greedy.ipynb took 1." in done.stdout) == bool(code)


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
