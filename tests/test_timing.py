"""The stopwatch waits for the device, each token gets its own time, and torch as many threads as it may have."""

import os
import subprocess
import sys
import time

import pytest
import torch

import llm_lessons as ll
from llm_lessons import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.wait(seconds)` moves, and a record of all that is done with it and with the devices."""
    class Clock:
        def __init__(self):
            self.now, self.events = 100.0, []

        def wait(self, seconds):
            self.now += seconds
            self.events.append(f"work {seconds:g}")

        def read(self):
            self.events.append("clock")
            return self.now

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(timing, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: clock.events.append(f"wait for {device}"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: clock.events.append("wait for mps"))
    return clock


# --- The stopwatch --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", torch.device("cuda")])
def test_a_gpu_is_idle_when_the_clock_starts_and_when_it_stops(clock, device):
    ll.stopwatch(lambda: clock.wait(1), device, runs=2, warmup=1)
    one_run = [f"wait for {device}", "clock", "work 1", f"wait for {device}", "clock"]
    assert clock.events == ["work 1"] + one_run * 2  # the warm-up is not timed, and is waited for


def test_the_cpu_is_never_waited_for(clock):
    ll.stopwatch(lambda: clock.wait(1), "cpu", runs=1, warmup=0)
    assert clock.events == ["clock", "work 1", "clock"]


@pytest.mark.parametrize("seconds, median, spread", [
    ([3.0], 3, 0), ([1, 2, 9], 2, 4),  # with three runs the quartiles are the first and the last
    ([5, 1, 7, 3, 2, 6, 4], 4, 2),  # quartiles 2 and 6
    ([1, 1, 1, 1, 1, 1, 100], 1, 0)])  # one slow run moves neither
def test_median_and_half_the_distance_of_the_quartiles(clock, seconds, median, spread):
    waits = iter([50.0, 60.0, *seconds])  # two warm-up runs, which do not count
    timing_ = ll.stopwatch(lambda: clock.wait(next(waits)), runs=len(seconds), warmup=2)
    assert timing_ == pytest.approx((median, spread, len(seconds)))
    assert timing_.median == pytest.approx(median) and timing_.runs == len(seconds)


@pytest.mark.parametrize("runs, warmup", [(0, 1), (-1, 0), (1, -1)])
def test_a_stopwatch_needs_a_run(runs, warmup):
    with pytest.raises(ValueError, match=f"{runs} and {warmup}"):
        ll.stopwatch(lambda: None, runs=runs, warmup=warmup)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "nonsense", None, 5.5])
def test_a_device_that_is_not_here_is_refused_before_anything_runs(device):
    ran = []
    for call in (lambda: ll.stopwatch(lambda: ran.append(1), device),
                 lambda: list(ll.timed((ran.append(n) for n in range(3)), device)),
                 lambda: ll.in_turns({"a": lambda: ran.append(1)}, device)):
        with pytest.raises(ValueError, match="is not here"):
            call()
    assert ran == []


@pytest.mark.parametrize("median, spread, text", [
    (2.5, 0.25, "2.5 s (± 0.25, median of 7)"), (0.0123, 0.001, "12.3 ms (± 1, median of 7)"),
    (4.56e-6, 1e-7, "4.56 µs (± 0.1, median of 7)"), (3e-9, 0, "0.003 µs (± 0, median of 7)")])
def test_a_timing_prints_in_a_readable_unit(median, spread, text):
    assert str(ll.Timing(median, spread, 7)) == text


def test_a_real_sleep_is_measured():
    assert 0.01 <= ll.stopwatch(lambda: time.sleep(0.01), runs=3).median < 0.5


def test_in_turns_times_each_once_a_round_and_gives_medians(clock):
    waits = {"a": iter([9, 1, 9, 2, 9, 30]), "b": iter([9, 5, 9, 4, 9, 6])}  # 9: the warm-up, which does not count
    work = {name: lambda name=name: clock.wait(next(waits[name])) for name in waits}
    assert ll.in_turns(work, "cuda", rounds=3) == pytest.approx({"a": 2, "b": 5})
    turns = [event for event in clock.events if event.startswith("work")]
    assert turns == [f"work {n}" for n in (9, 1, 9, 5, 9, 2, 9, 4, 9, 30, 9, 6)]
    assert clock.events[1:6] == ["wait for cuda", "clock", "work 1", "wait for cuda", "clock"]
    with pytest.raises(ValueError, match="rounds must be .*at least 1, not 0"):
        ll.in_turns(work, rounds=0)


# --- Tokens and their times -----------------------------------------------------------------------------------------

def answer(clock, prefill, *steps):
    clock.wait(prefill)
    for token, seconds in enumerate(steps):
        yield token
        clock.wait(seconds)


def test_the_first_time_is_prefill_and_the_readers_own_time_is_not_counted(clock):
    seen = []
    for token, seconds in ll.timed(answer(clock, 5.0, 1.0, 2.0, 4.0)):
        seen.append((token, seconds))
        clock.wait(1000)  # what the reader does with a token
    assert seen == [(0, 5.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("device, wait", [("cuda", ["wait for cuda"]), ("mps", ["wait for mps"]), ("cpu", [])])
def test_each_token_is_timed_from_idle_to_idle(clock, device, wait):
    assert len(list(ll.timed(answer(clock, 5.0, 1.0), device))) == 1
    assert clock.events == wait + ["clock", "work 5"] + wait + ["clock"] + wait + ["clock", "work 1"]


def test_nothing_yields_nothing_and_errors_come_through(clock):
    assert list(ll.timed(iter(()))) == []
    with pytest.raises(ZeroDivisionError):
        list(ll.timed(1 / n for n in (1, 0)))


# --- CPUs -----------------------------------------------------------------------------------------------------------

def cgroup(tmp_path, membership, files):
    """A made-up /sys/fs/cgroup and /proc/self/cgroup -> the quotas read from them."""
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(membership)
    return timing._cgroup_quotas(tmp_path / "fs", tmp_path / "self")


@pytest.mark.parametrize("membership, files, expected", [
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    ("0::/\n", {"cpu.max": "25000 50000\n"}, 0.5),
    ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n", "cpu.max": "800000 100000"}, 3),
    ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "max 100000\n"}, 4),
    ("0::/a\n", {"other/cpu.max": "100000 100000\n"}, None),
    ("0::/not/mounted/here\n", {"cpu.max": "100000 100000\n"}, 1),  # a container that sees only its own part
    ("0::/\n", {}, None), ("", {"cpu.max": "100000 100000"}, None), ("0::/\n", {"cpu.max": "garbage"}, None),
    ("0::/\n", {"cpu.max": ""}, None), ("0::/\n", {"cpu.max": "100000 0"}, None)])
def test_quota_of_a_version_2_group_is_the_tightest_of_it_and_its_parents(tmp_path, membership, files, expected):
    assert min(cgroup(tmp_path, membership, files), default=None) == expected


V1 = "12:cpuset:/x\n4:cpu,cpuacct:/docker/abc\n3:memory:/m\n1:name=systemd:/s\n0::/\n"


def v1(folder, quota, period="100000"):
    return {f"cpu{folder}/cpu.cfs_quota_us": f"{quota}\n", f"cpu{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize("files, expected", [
    (v1("/docker/abc", 250000), 2.5), (v1("/docker/abc", -1), None), (v1("", 100000), 1), (v1("/x", 100000), None),
    (v1("/docker/abc", 400000) | v1("/docker", 300000) | v1("", -1), 3),
    ({"cpu/docker/abc/cpu.cfs_quota_us": "100000"}, None), ({}, None)])
def test_quota_of_a_version_1_group_is_the_tightest_of_it_and_its_parents(tmp_path, files, expected):
    assert min(cgroup(tmp_path, V1, files), default=None) == expected


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert timing._cgroup_quotas(tmp_path, tmp_path / "nothing") == []


@pytest.mark.parametrize("affinity, quotas, expected", [
    (8, [], 8), (8, [2.0], 2), (8, [3.9, 16.0], 3), (8, [0.5], 1), (2, [64.0], 2), (1, [], 1)])
def test_cpus_are_the_affinity_capped_by_the_quota_and_at_least_one(monkeypatch, affinity, quotas, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 256)  # the cores of the host
    monkeypatch.setattr(timing, "_cgroup_quotas", lambda: quotas)
    assert ll.available_cpus() == expected


def test_cpus_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(timing, "_cgroup_quotas", list)
    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert ll.available_cpus() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to a CPU")
def test_a_process_bound_to_one_cpu_runs_one_thread_unless_OMP_NUM_THREADS_says_otherwise():
    program = ("import os, torch, llm_lessons as ll; before = torch.get_num_threads();"
               "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
               "print(ll.available_cpus(), ll.set_threads(), before)")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def run(**extra):
        done = subprocess.run([sys.executable, "-c", program], env=environment | extra, capture_output=True, check=True)
        return [int(number) for number in done.stdout.split()]

    cpus, threads, _ = run()
    assert (cpus, threads) == (1, 1)
    cpus, threads, before = run(OMP_NUM_THREADS="2")
    assert (cpus, threads) == (1, before)


def test_set_threads_gives_torch_the_available_cpus_unless_OMP_NUM_THREADS_is_set(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1] if given else 17)
    monkeypatch.setattr(timing, "available_cpus", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ll.set_threads() == 17 and given == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ll.set_threads() == 5 and given == [5]


def test_best_device_prefers_cuda_then_mps(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert ll.best_device() == torch.device(expected)


# --- The roofline of a device -----------------------------------------------------------------------------------------

def test_the_peaks_are_work_divided_by_the_shortest_time(monkeypatch):
    sizes, clock = [], iter([0.5, 0.25, 1.0, 0.5, 0.5] * 3 + [0.4, 0.2, 0.3, 0.5, 0.4])  # the sum, and one row

    def fake_stopwatch(fn, device, runs, warmup):
        assert (device, runs, warmup) == ("cpu", 1, 0)
        sizes.append(fn().shape)
        return timing.Timing(next(clock), 0.0, 1)

    monkeypatch.setattr(timing, "stopwatch", fake_stopwatch)
    roof = timing.measure_roofline("cpu", seconds=2.0)
    assert sizes[0] == (1536, 1536) and sizes[10] == () and sizes[-1] == (1, 8192)
    assert roof.flops_per_second == {"float32": 2 * 1536**3 / 0.25, "bfloat16": 2 * 1536**3 / 0.25}
    assert roof.bytes_per_second == 256 * 2**20 / 0.2  # the faster way to read
    assert roof.spread == {"float32": 3.0, "bfloat16": 3.0, "memory": 1.5}


def test_runs_go_on_until_there_are_five_and_the_time_is_spent(monkeypatch):
    seen = []

    def fake_stopwatch(fn, device, runs, warmup):
        seen.append(1)
        return timing.Timing(0.1, 0.0, 1)

    monkeypatch.setattr(timing, "stopwatch", fake_stopwatch)
    timing._best(lambda: None, "cpu", 0.0)
    assert len(seen) == 5
    seen.clear()
    timing._best(lambda: None, "cpu", 0.75)
    assert len(seen) == 8


def test_the_real_roofline_leaves_the_random_state_alone_and_is_plausible():
    before = torch.get_rng_state()
    roof = ll.measure_roofline("cpu", seconds=0.05)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(1e8 < peak < 1e15 for peak in roof.flops_per_second.values())
    assert 1e8 < roof.bytes_per_second < 1e13
