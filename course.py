"""Set the course up and start it: `python3 course.py`. Set it up and test it: `python3 course.py test`.

Everything goes into the folder .venv beside this file; your own Python environment is left as it is. The second time,
nothing is installed that is already there. Works on Linux, macOS and Windows with Python 3.10 or newer.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(*command) -> None:
    """Run a command in the course's folder and end with its exit code if it fails."""
    code = subprocess.call([str(part) for part in command], cwd=ROOT)
    if code:
        sys.exit(code)


def install(requirements: str) -> None:
    """Make the environment and install what the file lists; skipped when that was done for this very list."""
    done = ENVIRONMENT / f"installed-{requirements.replace('/', '-')}"
    wanted = "".join((ROOT / name).read_text() for name in ("requirements.txt", "pyproject.toml", requirements))
    if done.exists() and done.read_text() == wanted:
        return
    if not PYTHON.exists():
        print(f"making {ENVIRONMENT}", flush=True)
        try:
            venv.create(ENVIRONMENT, with_pip=True)
        except subprocess.CalledProcessError:
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)  # without pip it is of no use, and would pass for finished
            sys.exit("this Python cannot make virtual environments: on Debian and Ubuntu, apt install python3-venv")
    print(f"installing {requirements} (a few minutes the first time; PyTorch is large)", flush=True)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements)
    done.write_text(wanted)


def main(arguments: list) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - this file may be started with any Python
        sys.exit(f"the course needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
    if arguments == ["test"]:
        install("tests/requirements.txt")
        run(PYTHON, "-m", "llm_lessons", "--fetch")
        run(PYTHON, "-m", "pytest")
    elif arguments in (["-h"], ["--help"]):
        print(__doc__)
    elif not arguments:
        install("requirements.txt")
        run(PYTHON, "-m", "llm_lessons", "--fetch")
        # Served from the course's folder, not from notebooks/: links to the package and the README then work.
        run(PYTHON, "-m", "jupyterlab", "--LabApp.default_url=/lab/tree/notebooks/00_two_jobs.ipynb")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
