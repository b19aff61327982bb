"""For teachers: after the notebooks' tests, how long each took and how much memory. More than Binder grants fails."""

import sys
import time
from pathlib import Path

import pytest

LIMIT = 1.5  # GiB of resident memory: Binder promises 2, and JupyterLab takes its part
started: dict[Path, float] = {}
lines: list[str] = []


def peak_gib(pid: int) -> float | None:
    """The most memory that a process has had at a time; None where the system does not tell (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def pytest_runtest_setup(item):
    started.setdefault(item.path, time.perf_counter())


def pytest_runtest_teardown(item, nextitem):
    """After the last cell of a notebook, while its kernel still runs."""
    kernel = getattr(item.parent, "kernel", None)
    if kernel is None or nextitem is not None and nextitem.path == item.path:
        return
    seconds, peak = time.perf_counter() - started[item.path], peak_gib(kernel.km.provisioner.pid)
    lines.append(f"{item.path.stem:20} {seconds:4.0f} s" + ("" if peak is None else f"   {peak:.2f} GiB"))
    if peak is not None and peak >= LIMIT:
        pytest.fail(f"{item.path.name} took {peak:.2f} GiB of memory, and {LIMIT} is the limit", pytrace=False)


def pytest_terminal_summary(terminalreporter):
    if lines:
        terminalreporter.section("time and most memory of each notebook")
        for line in lines:
            terminalreporter.write_line(line)
