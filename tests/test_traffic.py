"""Traffic: what random arrivals are like, when each request is served, and what the report makes of it."""

import math
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cache_kinds import MODEL
from tiny import one_thread as one_thread

import llm_lessons as ll

CHAT = ll.SCENARIOS["chat"]
MANY = ll.arrivals(CHAT, rate=4, count=4000, seed=1)


class Clock:
    """A clock that stands still, except that each call of the model takes `seconds`, and that one may sleep."""

    def __init__(self, monkeypatch, seconds=1.0, model=MODEL):
        self.now, self.slept, self.read, body = 0.0, [], 0, model.body

        def timed(ids, *rest):
            self.now += seconds
            self.read += torch.as_tensor(ids).numel()
            return body(ids, *rest)

        monkeypatch.setattr(model, "body", timed)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def new_engine(clock, **settings):
    return ll.Engine(MODEL, clock=clock, **{"kv_blocks": 40, "block_size": 4} | settings)


# --- Arrivals -------------------------------------------------------------------------------------------------------

def gaps(load):
    times = [0.0] + [arrival.at for arrival in load]
    return [later - earlier for earlier, later in zip(times, times[1:])]


def test_gaps_are_exponential():
    values, rate = sorted(gaps(MANY)), 4
    assert statistics.mean(values) == pytest.approx(1 / rate, rel=0.04)  # 2.5 standard errors, 1 / sqrt(4000) each
    assert statistics.pvariance(values) == pytest.approx(1 / rate**2, rel=0.12)  # 2.7, sqrt(8 / 4000) each
    distance = max(max((number + 1) / 4000 - cdf, cdf - number / 4000)
                   for number, cdf in enumerate(1 - math.exp(-rate * gap) for gap in values))
    assert distance < 1.36 / math.sqrt(4000)  # Kolmogorov and Smirnov's table, 5 %


def test_counts_in_equal_times_are_poisson():
    seconds = int(MANY[-1].at)
    counts = [0] * seconds
    for arrival in MANY:
        if arrival.at < seconds:
            counts[int(arrival.at)] += 1
    assert statistics.mean(counts) == pytest.approx(4, rel=0.05)
    assert statistics.pvariance(counts) / statistics.mean(counts) == pytest.approx(1, abs=0.1)  # evenly spaced: near 0


@pytest.mark.parametrize("name, seed", [(name, seed) for name in ll.SCENARIOS for seed in (0, 1)])
def test_lengths_are_those_of_the_scenario(name, seed):
    scenario = ll.SCENARIOS[name]
    load = ll.arrivals(scenario, 1, 4000, seed)
    for median, longest, lengths in ((scenario.prompt, scenario.longest_prompt, [each.prompt for each in load]),
                                     (scenario.answer, scenario.longest_answer, [each.answer for each in load])):
        assert statistics.median(lengths) == pytest.approx(median, rel=0.07, abs=1)  # 1.25 spread / sqrt(4000): 0.02
        assert min(lengths) >= 1 and max(lengths) == longest
        quarter = sum(length <= median * math.exp(-0.6745 * scenario.spread) for length in lengths) / 4000
        assert quarter == pytest.approx(0.25, abs=0.04)  # a normal variable is 0.6745 sigma too low in 1 of 4 cases
    assert abs(np.corrcoef([math.log(each.prompt) for each in load], [math.log(each.answer) for each in load])[0, 1]
               ) < 0.05


def test_the_scenarios_are_the_recorded_ones():
    """Medians of the files that traffic.py names, as another program (numpy.median) found them."""
    assert {name: (each.prompt, each.answer) for name, each in ll.SCENARIOS.items()} == {
        "chat": (1020, 129), "long document": (2730, 167), "code completion": (1469, 13)}


def test_a_seed_says_all_and_the_rate_only_stretches_the_gaps():
    slow, fast, long = (ll.arrivals(CHAT, rate, count, seed=7) for rate, count in ((0.5, 50), (4, 50), (4, 80)))
    assert fast == ll.arrivals(CHAT, 4, 50, seed=7) == long[:50]
    assert [(each.prompt, each.answer) for each in slow] == [(each.prompt, each.answer) for each in fast]
    assert [each.at for each in slow] == pytest.approx([8 * each.at for each in fast])
    other = ll.arrivals(CHAT, 4, 50, seed=8)
    assert all(a.at != b.at for a, b in zip(fast, other)) and [a.prompt for a in fast] != [b.prompt for b in other]


def test_nobody_elses_dice_are_thrown(monkeypatch):
    states = random.getstate(), torch.get_rng_state()
    load = ll.arrivals(CHAT.scaled(1 / 64), 2, 5)
    ll.serve(new_engine(Clock(monkeypatch)), load)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_a_scenario_for_a_smaller_machine():
    assert CHAT.scaled(1 / 8) == ll.Scenario("chat", 128, 16, 0.9, 518, 75)  # 127.5, 16.125, 517.75, 75.125
    assert CHAT.scaled(1e-9) == ll.Scenario("chat", 1, 1, 0.9, 1, 1)
    assert {(each.prompt, each.answer) for each in ll.arrivals(ll.Scenario("all alike", 30, 4, 0, 40, 40), 1, 9)} == {
        (30, 4)}


# --- Serving: every time by hand --------------------------------------------------------------------------------------

LOAD = [ll.Arrival(0, 3, 3), ll.Arrival(0.5, 2, 2), ll.Arrival(10, 4, 1)]


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_each_request_is_served_from_its_time_on(monkeypatch, start):
    clock = Clock(monkeypatch)
    clock.now = start
    requests = ll.serve(new_engine(clock), LOAD)
    assert [request.times for request in requests] == [
        [start + 1, start + 2, start + 4],  # read; written; written beside the second, which was read from 2 to 3
        [start + 3, start + 4],
        [start + 11]]
    assert clock.slept == [6.0] and [request.submitted for request in requests] == [start, start + 0.5, start + 10]
    assert [request.ttft for request in requests] == [1, 2.5, 1]  # the second came at 0.5, in the middle of a call
    report = ll.Report.of(requests)
    assert (report.requests, report.tokens, report.seconds, report.tokens_per_second) == (3, 6, 11, 6 / 11)
    assert report.ttft == pytest.approx((1.5, 1, 2.35)) and report.tpot == pytest.approx((1.25, 1.25, 1.475))
    assert report.tpots == (1.5, 1.0, None)


def test_time_in_the_queue_counts_also_while_the_engine_is_deaf(monkeypatch):
    """One call of 20 seconds, in which ten requests become due: each has waited since then (coordinated omission)."""
    engine = new_engine(Clock(monkeypatch, seconds=20.0), max_batch=16)
    load = [ll.Arrival(0, 9, 1)] + [ll.Arrival(number, 1, 1) for number in range(1, 11)]
    requests = ll.serve(engine, load)
    assert [request.ttft for request in requests] == [20] + [20 + 20 * number - number for number in range(1, 11)]


def test_a_load_in_any_order_is_served_in_the_order_of_time(monkeypatch):
    requests = ll.serve(new_engine(Clock(monkeypatch)), LOAD[::-1])
    assert [(request.number, len(request.ids)) for request in requests] == [(0, 3), (1, 2), (2, 4)]
    assert ll.serve(new_engine(Clock(monkeypatch)), []) == []


def test_an_answer_is_that_of_the_prompt_and_has_its_length(monkeypatch):
    load = ll.arrivals(CHAT.scaled(1 / 64), 0.4, 12)
    requests = ll.serve(new_engine(Clock(monkeypatch), max_batch=3, token_budget=9), load)
    assert len({tuple(request.ids) for request in requests}) == 12
    for request, arrival in zip(requests, load):
        assert len(request.ids) == arrival.prompt
        assert request.tokens == list(ll.generate(MODEL, request.ids, arrival.answer))


def test_prompts_from_a_text_begin_at_several_places(monkeypatch):
    load = [ll.Arrival(0, 4, 1), ll.Arrival(1, 7, 1)]
    requests = ll.serve(new_engine(Clock(monkeypatch)), load, ids=range(10, 20))
    assert [request.ids for request in requests] == [[10, 11, 12, 13], [15, 16, 17, 18, 19, 10, 11]]


def test_no_prompt_is_known_already(monkeypatch):
    clock = Clock(monkeypatch)
    ll.serve(new_engine(clock), [ll.Arrival(number, 12, 1) for number in range(5)], ids=[7])
    assert clock.read == 5 * 12


def test_on_a_real_clock_nothing_is_served_before_its_time():
    requests = ll.serve(ll.Engine(MODEL, kv_blocks=8), [ll.Arrival(0, 2, 2), ll.Arrival(0.05, 2, 2)])
    assert requests[1].submitted - requests[0].submitted == pytest.approx(0.05)
    assert all(request.ttft > 0 for request in requests)


# --- The report -----------------------------------------------------------------------------------------------------

def answered(ttft, tpot=0.1, tokens=2, **changes):
    return SimpleNamespace(**dict(ttft=ttft, tpot=tpot, tokens=[0] * tokens, submitted=0.0, finished=5.0,
                                  finish_reason="length", error=None) | changes)


def test_percentiles_are_numpys():
    times = random.Random(3).sample(range(1000), 57)
    report = ll.Report.of([answered(time, time / 7) for time in times])
    assert report.ttft == pytest.approx((np.mean(times), np.median(times), np.percentile(times, 95)))
    assert report.tpot == pytest.approx(tuple(value / 7 for value in report.ttft))


def test_the_share_within_limits():
    report = ll.Report.of([answered(1.0, 0.1), answered(2.0, 0.1), answered(3.0, 0.3), answered(1.0, None, 1)])
    assert report.within() == 1 and report.within(ttft=2.0) == 0.75 and report.within(ttft=1.99) == 0.5
    assert report.within(tpot=0.1) == 0.75 and report.within(ttft=1.0, tpot=0.05) == 0.25
    assert ll.Report.of([answered(1.0, None, 1)]).tpot is None


@pytest.mark.parametrize("requests, message", [
    ([], "not none"), ([answered(1.0), answered(1.0, finish_reason=None)], "complete answers"),
    ([answered(1.0, finish_reason="cancelled")], "complete answers"),
    ([answered(None, finish_reason="stop")], "complete answers"),
    ([answered(1.0, finish_reason="error", error=KeyError("its own"))], "its own")])
def test_a_report_of_answers_that_are_not_there_is_refused(requests, message):
    with pytest.raises(ValueError, match=message):
        ll.Report.of(requests)


# --- What is refused ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, message", [
    (dict(rate=0), "rate .*0"), (dict(rate=-2.0), "rate .*-2.0"), (dict(rate=math.nan), "rate .*nan"),
    (dict(rate=math.inf), "rate .*inf"), (dict(rate="2"), "rate .*'2'"), (dict(rate=True), "rate .*True"),
    (dict(count=0), "count .*0"), (dict(count=2.5), "count .*2.5"), (dict(seed=-1), "seed .*-1")])
def test_arrivals_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ll.arrivals(**{"scenario": CHAT, "rate": 1.0, "count": 3} | settings)


@pytest.mark.parametrize("make, message", [
    (lambda: ll.Arrival(-0.1, 1, 1), "at least 0, not -0.1"), (lambda: ll.Arrival(math.nan, 1, 1), "nan"),
    (lambda: ll.Arrival(0, 0, 1), "prompt .*0"), (lambda: ll.Arrival(0, 1, 0), "answer .*0"),
    (lambda: ll.Scenario("x", 0, 1, 1, 1, 1), "prompt .*0"), (lambda: ll.Scenario("x", 1, 1, -1, 1, 1), "spread .*-1"),
    (lambda: ll.Scenario("x", 1, 1, 1, 1, 0), "longest_answer .*0"), (lambda: CHAT.scaled(0), "share .*0"),
    (lambda: CHAT.scaled(math.nan), "share .*nan"), (lambda: ll.SCENARIOS["code"], "'code' .*chat, long document"),
    (lambda: ll.Report.of([answered(1.0)]).within(ttft=-1), "ttft .*-1"),
    (lambda: ll.Report.of([answered(1.0)]).within(tpot=math.nan), "tpot .*nan")])
def test_numbers_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_load_that_does_not_fit_is_refused_before_anything_starts(monkeypatch):
    clock = Clock(monkeypatch)
    engine = new_engine(clock, kv_blocks=2)  # 8 tokens; the last token of an answer needs no place
    ll.serve(engine, [ll.Arrival(0, 6, 3), ll.Arrival(0, 8, 1)])
    now = clock.now
    for wrong in (ll.Arrival(1, 6, 4), ll.Arrival(1, 9, 1)):
        with pytest.raises(ValueError, match=rf"request 1 .* {wrong.prompt} \+ {wrong.answer} .* 8 .*kv_blocks"):
            ll.serve(engine, [ll.Arrival(0, 1, 1), wrong])
    assert clock.now == now and engine.submit([1], 1).number == 2  # the third that was ever submitted
    with pytest.raises(ValueError, match="still has requests"):
        ll.serve(engine, LOAD)
    with pytest.raises(ValueError, match="outside this model's vocabulary"):
        ll.serve(new_engine(clock), LOAD, ids=[97])


def test_a_second_load_on_the_same_engine_finds_nothing_read_already():
    engine, reading = ll.simulated_engine(ll.CostModel(0.01, prefill_call=0.1), kv_blocks=256), []
    engine.step = lambda step=engine.step: reading.append(step())
    for _ in range(2):
        ll.serve(engine, [ll.Arrival(0.0, 100, 2)])
    assert [count for step in reading for _, count in step.prefilled] == [100, 100]
