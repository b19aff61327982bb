"""Time that can be trusted: a stopwatch that waits for the device, and as many threads as this process may use."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import torch

from .kv_cache import whole_number
from .linear import product

Key = TypeVar("Key", bound=Hashable)


def best_device() -> torch.device:
    """The fastest device that is here: a CUDA GPU, an Apple GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def check_device(device: torch.device | str) -> torch.device:
    """The device, or a ValueError that says which there are: "cuda" without a GPU fails late, and in other words."""
    try:
        if torch.empty(0, device=torch.device(device)).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ValueError(f"the device {device!r} is not here ({str(error).splitlines()[0][:80]}): use 'cpu', or leave "
                         f"it out for {best_device().type!r}, the fastest here") from None
    return torch.device(device)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all it was told to do. GPUs run behind the program; the CPU never does."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


class Timing(NamedTuple):
    """Seconds for one call: the median of `runs`, and the spread, half the distance between the quartiles."""

    median: float
    spread: float
    runs: int

    def __str__(self) -> str:
        scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if self.median * s >= 1 or u == "µs")
        return f"{self.median * scale:.3g} {unit} (± {self.spread * scale:.2g}, median of {self.runs})"


def stopwatch(fn: Callable[[], object], device: torch.device | str = "cpu", runs: int = 7, warmup: int = 1) -> Timing:
    """Time `fn()` several times. The clock starts and stops only when the device is idle; warm-up runs do not count."""
    if runs < 1 or warmup < 0:
        raise ValueError(f"runs must be at least 1 and warmup at least 0, not {runs} and {warmup}")
    check_device(device)
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(runs):
        synchronize(device)
        start = time.perf_counter()
        fn()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    quarter = statistics.quantiles(seconds, n=4) if runs > 1 else [seconds[0]] * 3
    return Timing(statistics.median(seconds), (quarter[2] - quarter[0]) / 2, runs)


def in_turns(work: Mapping[Key, Callable[[], object]], device: torch.device | str = "cpu",
             rounds: int = 5) -> dict[Key, float]:
    """Compare functions, name -> function: median seconds of a call of each, name -> seconds.

    Every round times each of them once, so that a busy moment of the machine meets all alike: their ratios can be
    trusted more than their times. A call before each timed one brings its own data back into the processor's caches.
    """
    rounds = whole_number("rounds", rounds)
    if not isinstance(work, Mapping) or not all(map(callable, work.values())):
        raise ValueError(f"work must hold functions without arguments, name -> function, not {work!r}")
    seconds = {name: [] for name in work}
    for _ in range(rounds):
        for name, fn in work.items():
            seconds[name].append(stopwatch(fn, device, runs=1, warmup=1).median)
    return {name: statistics.median(runs) for name, runs in seconds.items()}


def timed(tokens: Iterable[int], device: torch.device | str = "cpu") -> Iterator[tuple[int, float]]:
    """Pass tokens on as they come, each with the seconds it took: `for token, seconds in timed(generate(...))`.

    The first one's time is the time to first token, prefill included. Time that you spend between two is not counted.
    """
    check_device(device)
    tokens = iter(tokens)
    while True:
        synchronize(device)
        start = time.perf_counter()
        try:
            token = next(tokens)
        except StopIteration:
            return
        synchronize(device)
        yield token, time.perf_counter() - start


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, capped by the container's quota. Not the cores of the host.

    torch starts one thread for each core of the host; in a container with a quota of 1 CPU on a 64-core host that is
    many times slower than one thread.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, int(min(_cgroup_quotas(), default=cpus))))


def _cgroup_quotas(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[float]:
    """The CPU limits (in CPUs) of this process's control group and of every group around it (Linux, v2 and v1)."""
    quotas = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root  # a line without controllers is version 2
        for group in [PurePosixPath(path), *PurePosixPath(path).parents]:
            folder = base / str(group).lstrip("/")
            for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
                try:
                    quota, period = " ".join((folder / name).read_text() for name in files).split()
                    quotas.append(int(quota) / int(period))
                except (OSError, ValueError, ZeroDivisionError):  # not there, or "max": no limit
                    pass
    return [quota for quota in quotas if quota > 0]


def set_threads() -> int:
    """Give torch one thread for each available CPU, unless OMP_NUM_THREADS says how many. Returns the number."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cpus())
    return torch.get_num_threads()


class Roofline(NamedTuple):
    """What a device can do at most, as measured: `flops_per_second[dtype]` and `bytes_per_second`, each the best of
    several runs. `spread` says by how much the slowest of them fell behind, as a share (0.1: 10 %)."""

    flops_per_second: dict[str, float]
    bytes_per_second: float
    spread: dict[str, float]


def measure_roofline(device: torch.device | str = "cpu", seconds: float = 0.8) -> Roofline:
    """Peak arithmetic (square matrix products) and peak memory bandwidth (reading a large tensor), in under 5 s.

    A product of two n x n matrices takes 2 n³ operations; it is done as the model's layers do it. The tensor is
    larger than most caches, so that its bytes really come from memory; it is summed, and multiplied with one row, and
    the faster of the two counts. `seconds` is the time spent on each of the three.
    """
    on_cpu = check_device(device).type == "cpu"
    size, side = (1536, 8192) if on_cpu else (8192, 16384)  # side²: 256 MiB and 1 GiB of float32
    peaks, spread = {}, {}
    for name in ("float32", "bfloat16"):
        a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, getattr(torch, name))
        best, spread[name] = _best(lambda a=a: product(a, a), device, seconds)
        peaks[name] = 2 * size**3 / best
    block = torch.ones(side, side, device=device)
    row = block[:1].clone()
    readers = [_best(fn, device, seconds / 2) for fn in (block.sum, lambda: product(row, block))]
    best, spread["memory"] = min(readers)
    return Roofline(peaks, block.nbytes / best, spread)


def _best(fn: Callable[[], object], device: torch.device | str, seconds: float) -> tuple[float, float]:
    """The shortest of as many runs as fit into the time (at least 5), and how much longer the slowest took."""
    runs: list[float] = []
    with torch.inference_mode():  # as prefill and decode run
        fn()
        while len(runs) < 5 or sum(runs) < seconds:
            runs.append(stopwatch(fn, device, runs=1, warmup=0).median)
    return min(runs), max(runs) / min(runs) - 1
