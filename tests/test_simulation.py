"""The simulation: costs that are found again, schedules worked out by hand, and a queue from the textbook."""

import math

import pytest
import torch
from cache_kinds import MODEL
from tiny import one_thread as one_thread
from tiny import tiny_model

import llm_lessons as ll
from llm_lessons.simulation import Call, StandIn, VirtualClock

COST = ll.CostModel(decode_call=0.03, decode_row=0.002, decode_cached=4e-6, prefill_call=0.04, prefill_token=8e-4,
                    prefill_pair=5e-7)
NAMES = ["decode_call", "decode_row", "decode_cached", "prefill_call", "prefill_token", "prefill_pair"]


def coefficients(cost):
    return [getattr(cost, name) for name in NAMES]


def times(requests):
    return [request.times for request in requests]


# --- What a call costs ------------------------------------------------------------------------------------------------

def test_a_call_by_hand():
    assert COST.decode(8, 1000) == pytest.approx(0.03 + 0.016 + 0.004)
    assert COST.prefill(10) == pytest.approx(0.04 + 0.008 + 55 * 5e-7)  # 1 + 2 + … + 10 pairs
    assert COST.prefill(3, 100) == pytest.approx(0.04 + 0.0024 + (101 + 102 + 103) * 5e-7)


def calls_of(cost, noise=lambda number: 1.0):
    sizes = [("decode", rows, rows * context) for rows in (1, 3, 8) for context in (10, 900)]
    sizes += [("prefill", tokens, past) for tokens in (5, 60, 500) for past in (0, 300)]
    return [Call(kind, tokens, cached, getattr(cost, kind)(tokens, cached) * noise(number))
            for number, (kind, tokens, cached) in enumerate(sizes)]


@pytest.mark.parametrize("changed", [{}, {"decode_call": 0.0}, {"decode_row": 0.0, "decode_cached": 0.0},
                                     {"prefill_call": 0.0, "prefill_pair": 0.0}, {"prefill_token": 1.0}], ids=str)
def test_coefficients_are_found_again(changed):
    known = ll.CostModel(**dict(zip(NAMES, coefficients(COST))) | changed)
    fitted = ll.CostModel.fit(calls_of(known))
    assert coefficients(fitted) == pytest.approx(coefficients(known), rel=1e-6, abs=1e-12)
    assert fitted.errors == pytest.approx([0] * 12, abs=1e-9)


def test_calls_that_do_not_say_enough_are_fitted_all_the_same():
    fitted = ll.CostModel.fit([Call("decode", 2, 0, 0.5)] * 3 + [Call("prefill", 4, 0, 0.25)] * 3)
    assert fitted.decode(2, 0) == pytest.approx(0.5) and fitted.prefill(4) == pytest.approx(0.25)


def test_errors_are_relative_and_the_largest_calls_do_not_rule():
    fitted = ll.CostModel.fit(calls_of(COST, noise=lambda number: 0.9 if number % 2 else 1.1))
    assert len(fitted.errors) == 12 and all(abs(error) < 0.3 for error in fitted.errors)
    call = fitted.calls[7]
    assert fitted.errors[7] == pytest.approx(fitted.prefill(call.tokens, call.cached) / call.seconds - 1)
    best = sum(error**2 for error in fitted.errors)
    for name in NAMES:  # no other coefficients are better
        for factor in (0.98, 1.02):
            other = ll.CostModel(**dict(zip(NAMES, coefficients(fitted))) | {name: getattr(fitted, name) * factor},
                                 calls=fitted.calls)
            assert sum(error**2 for error in other.errors) >= best


def test_a_coefficient_below_zero_is_left_out():
    """Seconds that fall with rows and with cached tokens: only a constant is left, the c of least (c/1 - 1)² + ….

    Its derivative is 0 at c = (1/1 + 1/2 + 1/4) / (1/1 + 1/4 + 1/16) = 4/3.
    """
    prefills = [Call("prefill", tokens, 0, 1.0) for tokens in (1, 2, 3)]
    falling = [Call("decode", rows, rows**3, seconds) for rows, seconds in ((1, 4.0), (2, 2.0), (3, 1.0))]
    fitted = ll.CostModel.fit(falling + prefills)
    assert coefficients(fitted) == pytest.approx([4 / 3, 0, 0, 1, 0, 0], abs=1e-9)


def test_measuring_a_model_of_known_cost_finds_it(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr("time.perf_counter", clock)
    fitted = ll.CostModel.measure(StandIn(COST, clock, context=2048))
    monkeypatch.undo()
    assert coefficients(fitted) == pytest.approx(coefficients(COST), rel=1e-6)
    assert max(map(abs, fitted.errors)) < 1e-6
    assert {call.tokens for call in fitted.calls if call.kind == "decode"} == {1, 2, 4, 8}


@pytest.mark.parametrize("context", [50, 1024])
def test_any_model_can_be_measured(context):
    fitted = ll.CostModel.measure(tiny_model(layers=1, context=context))
    assert all(call.seconds > 0 and call.cached < 8 * context for call in fitted.calls)
    assert fitted.decode(1, 10) > 0 and fitted.prefill(10) > 0


@pytest.mark.parametrize("make, message", [
    (lambda: ll.CostModel(-1), "decode_call .*-1"), (lambda: ll.CostModel(1, math.nan), "decode_row .*nan"),
    (lambda: ll.CostModel(1, prefill_pair=math.inf), "prefill_pair .*inf"),
    (lambda: ll.CostModel.fit(calls_of(COST)[:6]), "3 timed prefill calls, not 0"),
    (lambda: ll.CostModel.fit([Call("decode", 1, 1, 0.0)] * 3), "above 0.*seconds=0.0"),
    (lambda: VirtualClock().sleep(-1), "-1 seconds"), (lambda: VirtualClock().sleep(math.nan), "nan seconds"),
    (lambda: ll.simulated_engine(COST, context=0), "context .*0"),
    (lambda: ll.simulated_engine(COST, max_batch=0), "max_batch .*0")])
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- A GPU that is not here -------------------------------------------------------------------------------------------

H100 = ll.Roofline({"bfloat16": 989e12}, 3.35e12, {})


def test_the_roofline_of_llama_3_8b_by_hand():
    """Per layer 4096 · 128 · (2 · 32 + 2 · 8) + 3 · 4096 · 14336 weights, 32 layers; the head 4096 · 128256."""
    blocks, head = 32 * (41_943_040 + 176_160_768), 525_336_576
    cache = 2 * 32 * 8 * 128 * 2  # bytes a token
    cost = ll.RooflineCost(ll.SHAPES["llama-3-8b"], H100)
    assert cost.decode(1, 999) == pytest.approx((2 * (blocks + head) + 1000 * cache) / 3.35e12)  # bytes decide
    assert cost.decode(16, 16 * 999) == pytest.approx((2 * (blocks + head) + 16_000 * cache) / 3.35e12)
    flops = 1024 * 2 * (blocks + head) + 4 * 32 * 32 * 128 * 1024 * 2  # each row sees one cached token and itself
    assert cost.decode(1024, 1024) == pytest.approx(flops / 989e12)  # arithmetic decides
    pairs = 2048 * 500 + 2048 * 2049 / 2
    assert cost.prefill(2048, 500) == pytest.approx(
        (2 * 2048 * blocks + 4 * 32 * 32 * 128 * pairs + 2 * head) / 989e12)
    assert cost.prefill(1) == pytest.approx((2 * (blocks + head) + cache) / 3.35e12)
    int4 = ll.RooflineCost(ll.SHAPES["llama-3-8b"], H100, bytes_per_weight=0.5, bytes_per_value=1)
    assert int4.decode(1, 999) == pytest.approx(((blocks + head) / 2 + 1000 * cache / 2) / 3.35e12)
    with pytest.raises(ValueError, match="no peak for 'float32'"):
        ll.RooflineCost(ll.SHAPES["llama-3-8b"], H100, "float32")
    with pytest.raises(ValueError, match="bytes_per_value .*16"):
        ll.RooflineCost(ll.SHAPES["llama-3-8b"], H100, bytes_per_value=16)


# --- Schedules: every time by hand ------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy, expected", [
    # read A 2, B 3; both 2; B 1.5, 1.5; only then read C 2
    ("static", [[2, 7], [5, 7, 8.5, 10], [12]]),
    # C is read in the step in which A is done
    ("continuous", [[2, 7], [5, 7, 10.5, 12], [9]])])
def test_two_places_for_three_requests(policy, expected):
    cost = ll.CostModel(decode_call=1, decode_row=0.5, prefill_call=1, prefill_token=0.25)
    engine = ll.simulated_engine(cost, max_batch=2, policy=policy)
    requests = ll.serve(engine, [ll.Arrival(0, 4, 2), ll.Arrival(0, 8, 4), ll.Arrival(0, 4, 1)])
    assert times(requests) == expected
    assert engine.clock() == expected[1 if policy == "continuous" else 2][-1]


def test_a_prompt_in_chunks():
    """A budget of 4 tokens: A reads 2, B 2; then A writes one in each step, and B reads 3, and 2.

    read A: 1 + 2/4 + 3/8; B: the same. decode A: 1.5 + 2/16. B, 3 behind 2: 1 + 3/4 + 12/8. decode A: 1.5 + 3/16.
    B, 2 behind 5: 1 + 2/4 + 13/8. Decode both, with 4 + 7 tokens cached: 2 + 11/16.
    """
    cost = ll.CostModel(1, 0.5, 1 / 16, 1, 0.25, 1 / 8)
    engine = ll.simulated_engine(cost, max_batch=2, token_budget=4)
    requests = ll.serve(engine, [ll.Arrival(0, 2, 4), ll.Arrival(0, 7, 2)])
    assert times(requests) == [[1.875, 5.375, 10.3125, 16.125], [13.4375, 16.125]]


def test_an_idle_engine_skips_to_the_next_arrival():
    engine = ll.simulated_engine(ll.CostModel(1, prefill_call=2))
    requests = ll.serve(engine, [ll.Arrival(0.5, 3, 1), ll.Arrival(86400, 3, 2)])
    assert times(requests) == [[2.5], [86402, 86403]]
    assert [request.ttft for request in requests] == [2, 2] and requests[1].tpot == 1


@pytest.mark.parametrize("settings", [
    dict(max_batch=4, token_budget=40), dict(max_batch=3, policy="static"), dict(max_batch=6, kv_blocks=16),
    dict(max_batch=4, kv_blocks=16, policy="static"), dict(max_batch=1, token_budget=5)], ids=str)
@pytest.mark.parametrize("rate", [2, 20])
def test_the_simulation_is_the_engine_with_another_clock(monkeypatch, settings, rate):
    """A real model, whose calls cost what goes into them and comes out of them, and the one that computes nothing."""
    clock, body, preempted = VirtualClock(), MODEL.body, []

    def timed(ids, cache, *rest):
        ids, rows = torch.as_tensor(ids), list(cache.lengths)
        hidden = body(ids, cache, *rest)
        clock.sleep(COST.prefill(len(ids), rows[0]) if hidden.dim() == 2 else COST.decode(len(hidden), sum(rows)))
        return hidden

    monkeypatch.setattr(MODEL, "body", timed)
    options = dict(block_size=4, kv_blocks=200) | settings
    load = ll.arrivals(ll.Scenario("mixed", 8, 8, 0.9, 30, 30), rate, 20, seed=3)
    real, simulated = ll.Engine(MODEL, clock=clock, **options), ll.simulated_engine(COST, 1024, **options)
    preempt = simulated._preempt
    monkeypatch.setattr(simulated, "_preempt", lambda request: (preempted.append(request), preempt(request)))
    expected, requests = ll.serve(real, load), ll.serve(simulated, load)
    assert times(requests) == times(expected)
    assert ll.Report.of(requests) == ll.Report.of(expected)
    assert bool(preempted) == (options["kv_blocks"] == 16 and rate == 20)


# --- A queue from the textbook ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("load, tolerance", [(0.5, 0.12), (0.8, 0.18)])  # two standard deviations, over seeds
def test_one_place_and_equal_requests_are_an_m_d_1_queue(load, tolerance):
    """Pollaczek and Khinchine: random arrivals, each served in a time D, wait for load · D / (2 (1 - load)) on average.

    And Lindley's recursion says how long each of them waits: wait' = max(0, wait + D - gap).
    """
    service = 0.25
    engine = ll.simulated_engine(ll.CostModel(1, prefill_call=service), max_batch=1, kv_blocks=1)
    arrivals = ll.arrivals(ll.Scenario("one token", 1, 1, 0, 1, 1), load / service, 4000)
    waits = [request.ttft - service for request in ll.serve(engine, arrivals)]
    assert sum(waits) / len(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=tolerance)
    wait = 0.0
    for earlier, later, found in zip(arrivals, arrivals[1:], waits[1:]):
        wait = max(0.0, wait + service - (later.at - earlier.at))
        assert found == pytest.approx(wait, abs=1e-6)
