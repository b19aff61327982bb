"""For teachers: what pytest does with the notebooks beside nbval's strict comparison.

Another processor adds up in another order, and now and then a number falls on the other side of a rounding: 53.90 for
53.91. Where an output differs in nothing but the last printed digit after a decimal point, by one, the cell passes, and
the end of the run says so. Whole numbers, words, and how many numbers there are must be equal.

After the tests, how long each notebook took and how much memory. More than Binder grants fails.
"""

import re
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from nbformat import NotebookNode

# GiB of resident memory: Binder promises 2, and JupyterLab takes its part. torch's build for CUDA, which Binder does
# not have, maps 0.3 (2.9) to 0.5 GiB (2.14) of libraries more.
LIMIT = 2.0 if torch.version.cuda else 1.5
DECIMAL = re.compile(r"(?<![\d.])( *-?\d+\.\d+)(?!\.?\d)")  # with sign and padding; no part of a version like 2.13.0
started: dict[Path, float] = {}
lines: list[str] = []
rounded: list[str] = []


# --- The last digit -------------------------------------------------------------------------------------------------

def alike(stored: str, found: str) -> bool:
    """Do two texts differ only by numbers with a decimal point that are one unit of their last place apart?"""
    ours, theirs = DECIMAL.split(found), DECIMAL.split(stored)  # words and numbers in turns
    return len(ours) == len(theirs) and all(a == b or place % 2 == 1 and _one_apart(a, b)
                                            for place, (a, b) in enumerate(zip(ours, theirs)))


def _one_apart(a: str, b: str) -> bool:
    """Are two numbers one unit of the last place apart? The shorter may have lost a zero at its end: 53.9 for 53.90."""
    spaces = len(a) == len(b) or len(a) - len(a.strip()) == len(b) - len(b.strip())  # padded alike
    places = max(len(number.split(".")[1]) for number in (a, b))
    return spaces and abs(Decimal(a) - Decimal(b)) <= Decimal(1).scaleb(-places)


def _as_stored(found, stored):
    """What a cell gave, with the stored text in the place of a text that is alike."""
    if isinstance(found, dict) and isinstance(stored, dict):
        return NotebookNode({key: _as_stored(value, stored.get(key)) for key, value in found.items()})
    return stored if isinstance(found, str) and isinstance(stored, str) and alike(stored, found) else found


def _compare(item):
    """nbval's comparison, and where that fails, once more without the last digit."""
    strictly = item.compare_outputs

    def compare(test, ref, skip_compare=None):
        if strictly(test, ref, skip_compare):
            return True
        if len(test) != len(ref) or not strictly([_as_stored(*pair) for pair in zip(test, ref)], ref, skip_compare):
            return strictly(test, ref, skip_compare)  # the difference as it is, for the report
        rounded.append(f"{item.path.name}, {item.name}")
        return True

    return compare


# --- Time and memory ------------------------------------------------------------------------------------------------

def peak_gib(pid: int) -> float | None:
    """The most memory that a process has had at a time; None where the system does not tell (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def pytest_runtest_setup(item):
    started.setdefault(item.path, time.perf_counter())
    if hasattr(item, "compare_outputs"):
        item.compare_outputs = _compare(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last cell of a notebook, while its kernel still runs; it fails when all is torn down."""
    kernel, peak = getattr(item.parent, "kernel", None), None
    if kernel is not None and (nextitem is None or nextitem.path != item.path):
        seconds, peak = time.perf_counter() - started[item.path], peak_gib(kernel.km.provisioner.pid)
        lines.append(f"{item.path.stem:20} {seconds:4.0f} s" + ("" if peak is None else f"   {peak:.2f} GiB"))
    result = yield
    if peak is not None and peak >= LIMIT:
        pytest.fail(f"{item.path.name} took {peak:.2f} GiB of memory, and {LIMIT} is the limit", pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter):
    if lines:
        terminalreporter.section("time and most memory of each notebook")
        for line in lines:
            terminalreporter.write_line(line)
    if rounded:
        terminalreporter.section("passed, but for the last digit of a number")
        for cell in rounded:
            terminalreporter.write_line(cell)
