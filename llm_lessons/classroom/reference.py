"""Stored measurements that a picture shows beside the learner's own: the benchmark's run, with its machine and date."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..kv_cache import whole_number

ENGINES = Path(__file__).parent.parent / "data" / "engines.json"
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
        for name in ("machine", "date", "command"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} must be a text, not {getattr(self, name)!r}")
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
    path = ENGINES if path is None else path
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StoredRun(**{**found, "results": tuple(Result(**result) for result in found["results"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a stored run of benchmarks/engines.py ({error}): remove it, or store the run "
                         f"anew") from error
