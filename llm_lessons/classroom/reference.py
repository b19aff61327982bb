"""Stored measurements that a lesson shows beside the learner's own: runs of benchmarks/, with machine and date."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..kv_cache import whole_number
from ..quality import Estimate

DATA = Path(__file__).parent.parent / "data"
ENGINES, QUALITY = DATA / "engines.json", DATA / "quality.json"
OPENING = 2048  # positions at the start of the text for which a row of the quality table has its figures a second time
T = TypeVar("T")
JOBS = ("decode", "prefill")


@dataclass(frozen=True)
class Result:
    """One line of the benchmark: `tokens` is the length of the prompt, or of the context that decode writes behind."""

    job: str
    tokens: int
    engine: str
    tokens_per_second: float

    def __post_init__(self):
        if self.job not in JOBS:
            raise ValueError(f"job must be one of {', '.join(JOBS)}, not {self.job!r}")
        whole_number("tokens", self.tokens)
        if not isinstance(self.engine, str) or not self.engine:
            raise ValueError(f"engine must be a name, not {self.engine!r}")
        rate = self.tokens_per_second
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not (0 < rate and math.isfinite(rate)):
            raise ValueError(f"tokens_per_second must be a number above 0, not {rate!r}")


@dataclass(frozen=True)
class StoredRun:
    """A run of benchmarks/engines.py: on which machine, when, by which command, and what it measured."""

    machine: str
    date: str
    command: str
    results: tuple[Result, ...]

    def __post_init__(self):
        _texts(self, ("machine", "date", "command"))
        datetime.date.fromisoformat(self.date)
        if not self.results:
            raise ValueError("results must hold at least one measurement")

    def decode(self, context: int) -> dict[str, float]:
        """Engine -> tokens per second of decode behind the longest context that is not above `context`; {} if none."""
        lengths = [result.tokens for result in self.results if result.job == "decode" and result.tokens <= context]
        return {result.engine: result.tokens_per_second for result in self.results
                if result.job == "decode" and result.tokens == max(lengths, default=0)}


def stored_run(path: Path | None = None) -> StoredRun | None:
    """The stored run of the benchmark, or None where there is none. ValueError for a file that cannot be read."""
    return _stored(path or ENGINES, "engines.py", lambda found: StoredRun(
        **{**found, "results": tuple(Result(**result) for result in found["results"])}))


def _stored(path: Path, script: str, make: Callable[[dict], T]) -> T | None:
    """What a script of benchmarks/ stored, made of the JSON file's content."""
    if not path.exists():
        return None
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a stored run of benchmarks/{script} ({error}): remove it, or store the run "
                         f"anew") from error


@dataclass(frozen=True)
class StoredRow:
    """One line of the quality table. A simulated grid has `bits`, `group` (None: a whole row) and `symmetric`; what
    `load_pretrained` gives, and the row of the head, have None for all three.

    `right`: of the questions. `opening`: perplexity, ratio and KL over the first 2,048 positions alone, for whoever
    computes a row again. The others as in `quality.Score` and `quality.Comparison`, each with its 95 % interval.
    """

    label: str
    bits_per_weight: float
    perplexity: Estimate
    ratio: Estimate
    kl: Estimate
    agreement: Estimate
    right: int
    opening: tuple[float, float, float]
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None

    def __post_init__(self):
        if not isinstance(self.label, str) or not self.label:
            raise ValueError(f"label must be a name, not {self.label!r}")
        _number("bits_per_weight", self.bits_per_weight, 1, 64)
        for name, lowest, highest in (("perplexity", 1, math.inf), ("ratio", 0, math.inf), ("kl", -1e-6, math.inf),
                                      ("agreement", 0, 1)):  # rounding may leave a KL of 0 just below it
            estimate = Estimate(*getattr(self, name))
            for number in estimate:
                _number(name, number, lowest, highest)
            if not estimate.low <= estimate.value <= estimate.high:
                raise ValueError(f"{name} {estimate.value!r} must lie between {estimate.low!r} and {estimate.high!r}")
            object.__setattr__(self, name, estimate)
        object.__setattr__(self, "opening", tuple(self.opening))
        for name, number in zip(("opening perplexity", "opening ratio", "opening KL"), self.opening, strict=True):
            _number(name, number, -1e-6, math.inf)
        whole_number("right", self.right, 0)
        for name in ("bits", "group"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.symmetric not in (None, True, False) or (self.bits is None) != (self.symmetric is None):
            raise ValueError(f"symmetric must be True or False where there are bits, and else None, not "
                             f"{self.symmetric!r}")

    @property
    def perplexity_ratio(self) -> float:
        return self.ratio.value

    @property
    def low(self) -> float:
        return self.ratio.low

    @property
    def high(self) -> float:
        return self.ratio.high


@dataclass(frozen=True)
class StoredQuality:
    """A run of benchmarks/quality.py: where, when and how it was made, the baseline it measures against, its table.

    `positions`: how many tokens of the text were predicted.
    """

    machine: str
    date: str
    command: str
    baseline: str
    text: str
    positions: int
    questions: int
    rows: tuple[StoredRow, ...]

    def __post_init__(self):
        _texts(self, ("machine", "date", "command", "baseline", "text"))
        datetime.date.fromisoformat(self.date)
        whole_number("positions", self.positions)
        whole_number("questions", self.questions)
        if not self.rows:
            raise ValueError("rows must hold at least one measurement")
        if over := next((row.label for row in self.rows if row.right > self.questions), None):
            raise ValueError(f"the row {over!r} has more right answers than there are questions")

    def row(self, bits: int, group: int | None = None, symmetric: bool = True) -> StoredRow:
        """The line of a simulated grid; ValueError where the table has none."""
        found = [row for row in self.rows if (row.bits, row.group, row.symmetric) == (bits, group, symmetric)]
        if not found:
            have = ", ".join(f"({row.bits}, {row.group}, {row.symmetric})" for row in self.rows if row.bits)
            raise ValueError(f"the stored table has no row ({bits}, {group}, {symmetric}); it has {have}")
        return found[0]

    def cheapest(self, tolerance: float) -> StoredRow:
        """The simulated grid of fewest bits that keeps perplexity within a tolerance, 0.03 for 3 %.

        The upper end of its interval does. Grids that changed nothing are left out: the file's weights already lay on
        them. ValueError if there is none.
        """
        found = [row for row in self.rows if row.bits and row.kl.value > 1e-6 and row.ratio.high <= 1 + tolerance]
        if not found:
            raise ValueError(f"no grid of the stored table keeps perplexity within {tolerance:.1%}")
        return min(found, key=lambda row: row.bits_per_weight)

    def record(self) -> dict:
        """As plain lists and numbers, six digits each, for JSON; `stored_quality` reads it back."""
        def short(value):
            if isinstance(value, tuple | list):
                return [short(number) for number in value]
            return float(f"{value:.6g}") if isinstance(value, float) else value

        rows = [{name: short(value) for name, value in vars(row).items()} for row in self.rows]
        return {**vars(self), "rows": rows}


def stored_quality(path: Path | None = None) -> StoredQuality | None:
    """The stored table of quality, or None where there is none. ValueError for a file that cannot be read."""
    return _stored(path or QUALITY, "quality.py", lambda found: StoredQuality(
        **{**found, "rows": tuple(StoredRow(**row) for row in found["rows"])}))


def _texts(record, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(record, name), str) or not getattr(record, name):
            raise ValueError(f"{name} must be a text, not {getattr(record, name)!r}")


def _number(name: str, value, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (lowest <= value <= highest
                                                                              and math.isfinite(value)):
        raise ValueError(f"{name} must be a number from {lowest} to {highest}, not {value!r}")
