"""What the course does to the place where it runs: memory that Binder grants, packages that Colab brings along."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN_ONCE = """
import resource, sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=300, kernel_name="python3",
               resources={"metadata": {"path": sys.argv[2]}}).execute()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_f3_a_notebook_stays_under_one_and_a_half_gib(path):
    command = [sys.executable, "-c", RUN_ONCE, path, path.parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = int(done.stdout.split()[-1]) / 2**20
    assert 0.1 < peak < 1.5, f"{peak:.2f} GiB"


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
