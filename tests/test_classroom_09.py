"""Lesson 09's pictures, its widget and its checks, and the scheduler that the learner builds."""

import base64
import types
from pathlib import Path

import ipywidgets
import matplotlib
import nbformat
import numpy as np
import pytest
import torch
from cache_kinds import MODEL
from tiny import as_transformers, random_ids
from tiny import one_thread as one_thread

import llm_lessons as ll
from llm_lessons.classroom import check, plots, style, widgets
from llm_lessons.classroom.plots.batching import LOOKS, occupancy, spans
from llm_lessons.classroom.widgets.batching import ANSWERS, COST, LOADS

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"
BOOK = Path(__file__).parent.parent / "notebooks" / "09_batching.ipynb"
ONE_AND_TWO = ll.CostModel(decode_call=1.0, prefill_call=2.0)  # seconds of any decode call, and of any prefill call


def served(lengths, cost=ONE_AND_TWO, **options):
    """Requests (tokens of the prompt, of the answer) that are all there at 0 s, and the steps of their engine."""
    engine = ll.simulated_engine(cost, **options)
    requests = [engine.submit(random_ids(prompt, seed=n), answer) for n, (prompt, answer) in enumerate(lengths)]
    return requests, engine.run()


# --- The timeline: every number by hand -----------------------------------------------------------------------------

def test_static_places_stay_empty_until_the_batch_is_done():
    requests, steps = served([(3, 2), (3, 4), (3, 3)], max_batch=2, policy="static")
    assert spans(requests, steps) == [
        [("prefill", 0, 2), ("stalled", 2, 4), ("decode", 4, 5), ("idle", 5, 7)],
        [("waiting", 0, 2), ("prefill", 2, 4), ("decode", 4, 7)],
        [("waiting", 0, 7), ("prefill", 7, 9), ("decode", 9, 11)]]
    assert occupancy(steps, 2) == pytest.approx(6 / 10)  # 2 + 1 + 1 + 1 + 1 tokens in five steps of two places


def test_a_free_place_is_filled_at_once_and_the_others_pause_meanwhile():
    requests, steps = served([(3, 2), (3, 4), (3, 3)], max_batch=2)
    assert spans(requests, steps) == [
        [("prefill", 0, 2), ("stalled", 2, 4), ("decode", 4, 5)],
        [("waiting", 0, 2), ("prefill", 2, 4), ("decode", 4, 5), ("stalled", 5, 7), ("decode", 7, 9)],
        [("waiting", 0, 5), ("prefill", 5, 7), ("decode", 7, 9)]]
    assert occupancy(steps, 2) == 1


def test_a_prompt_in_chunks_is_read_between_the_tokens_of_the_others():
    requests, steps = served([(3, 4), (6, 2)], max_batch=2, token_budget=4)
    assert spans(requests, steps) == [
        [("prefill", 0, 2), ("stalled", 2, 4), ("decode", 4, 5), ("stalled", 5, 7), ("decode", 7, 8),
         ("stalled", 8, 10), ("decode", 10, 11)],
        [("waiting", 0, 2), ("prefill", 2, 4), ("waiting", 4, 5), ("prefill", 5, 7), ("waiting", 7, 8),
         ("prefill", 8, 10), ("decode", 10, 11)]]


def test_who_is_preempted_waits_again():
    requests, steps = served([(3, 6), (2, 6)], kv_blocks=3, block_size=4)
    assert spans(requests, steps)[1] == [
        ("waiting", 0, 2), ("prefill", 2, 4), ("decode", 4, 6), ("preempted", 6, 9), ("prefill", 9, 11),
        ("decode", 11, 13)]
    # seven steps with one or two of eight places at work: 2 + 2 + 1 + 1 + 1 + 1 + 1 of 56, 16 %
    assert "13.00 s, 16% of 8 places at work, 1 preempted" in plots.request_timeline({"a": (requests, steps)}).alt


def test_a_request_that_is_still_running_ends_where_the_steps_end():
    engine = ll.simulated_engine(ONE_AND_TWO)
    first, second = engine.submit([1, 2], 9), engine.submit([3], 9)
    steps = [engine.step(), engine.step()]
    second.cancel()
    assert spans([first, second], steps) == [
        [("prefill", 0, 2), ("stalled", 2, 4), ("decode", 4, 5)],
        [("waiting", 0, 2), ("prefill", 2, 4), ("decode", 4, 5)]]
    assert occupancy([], 4) == 0


def test_bars_stand_where_the_time_went_in_the_colours_of_their_job():
    runs = {policy: served([(3, 2), (3, 4), (3, 3)], max_batch=2, policy=policy)
            for policy in ("static", "continuous")}
    shown = plots.request_timeline(runs, note="here")
    assert shown.alt == ("static: 11.00 s, 60% of 2 places at work; continuous: 9.00 s, 100% of 2 places at work")
    top = [(round(bar.get_x(), 6), round(bar.get_width(), 6), round(bar.get_y() + bar.get_height() / 2, 6))
           for bar in shown.axes[0].patches]
    assert top[:4] == [(0, 2, 0), (2, 2, 0), (4, 1, 0), (5, 2, 0)] and top[4:6] == [(0, 2, 1), (2, 2, 1)]
    colors = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in shown.axes[0].patches[:4]]
    assert colors[0] == style.COLORS["prefill"] and colors[2] == style.COLORS["decode"]
    words = {text.get_text() for text in shown.legends[0].get_texts()}
    assert words == {LOOKS[kind][2] for kind in ("waiting", "prefill", "decode", "stalled", "idle")}
    assert shown.axes[1].get_xlabel() == "time (s)"


@pytest.mark.parametrize("runs", [{}, {"a": ([], [])}])
def test_a_timeline_of_nothing_is_refused(runs):
    with pytest.raises(ValueError, match="at least one run"):
        plots.request_timeline(runs)


# --- The other pictures ---------------------------------------------------------------------------------------------

def test_a_gain_is_tokens_per_second_against_one_request():
    shown = plots.batch_gain({"short": {1: 0.02, 8: 0.04}}, {"short": {1: 1, 8: 7.5}}, note="here")
    left, right = shown.axes
    assert list(left.lines[2].get_ydata()) == pytest.approx([1, 4])  # 8 tokens in twice the time
    assert list(left.lines[1].get_ydata()) == [1, 7.5] and list(right.lines[0].get_ydata()) == pytest.approx([20, 40])
    assert "8 requests 40 ms a token, 4.0 times the tokens/s of one (predicted 7.5)" in shown.alt
    with pytest.raises(ValueError, match="step for 1 request"):
        plots.batch_gain({"short": {8: 0.04}}, {})


def request(submitted, *times):
    return types.SimpleNamespace(submitted=submitted, times=list(times), ttft=times[0] - submitted if times else None)


def test_gaps_are_drawn_where_they_end_and_the_newcomers_wait_is_shaded():
    shown = plots.token_gaps({"whole": ([request(10, 10.5, 10.6, 11.6), request(10, 11.0, 11.1)],
                                        request(10.7, 11.5))})
    x, y = shown.axes[0].lines[0].get_data()
    assert list(x) == pytest.approx([0.6, 1.6, 1.1]) and list(y) == pytest.approx([100, 1000, 100])
    [shade] = shown.axes[0].patches
    assert (shade.get_x(), shade.get_width()) == (pytest.approx(0.7), pytest.approx(0.8))
    assert shown.alt == ("whole: median gap 100 ms, longest 1000 ms; first token of the long prompt after 800 ms")
    for runs in ({}, {"a": ([request(0, 1)], request(0, 1))}, {"a": ([request(0, 1, 2)], request(0))}):
        with pytest.raises(ValueError, match="at least two tokens, and a newcomer"):
            plots.token_gaps(runs)


def report(*times, tpots=(0.05, 0.05)):
    return ll.Report(10.0, 100, tuple(times), tpots)


def test_the_load_curve_has_medians_95_of_100_points_and_the_knee():
    curve = {2.0: report(0.2, 0.4), 1.0: report(0.1, 0.1)}
    shown = plots.load_curve(curve, {1.5: (report(0.1, 0.3), report(0.5, 0.7))}, knee=1.25, note="here")
    left, right = shown.axes
    assert list(left.lines[0].get_xdata()) == [1, 2] and list(left.lines[0].get_ydata()) == pytest.approx([100, 300])
    assert list(left.lines[1].get_ydata()) == pytest.approx([100, 390])  # 0.2 + 0.95 · 0.2
    real, simulated, line = left.lines[2:]
    assert (real.get_xdata()[0], real.get_ydata()[0]) == (1.5, pytest.approx(200)) and line.get_xdata()[0] == 1.25
    assert simulated.get_ydata()[0] == pytest.approx(600) and simulated.get_markerfacecolor() == "white"
    assert list(right.lines[0].get_ydata()) == pytest.approx([50, 50]) and left.get_yscale() == "log"
    assert shown.alt == (
        "1 requests/s: TTFT 100 ms (95 of 100 below 100), TPOT 50 ms (95 of 100 below 50); "
        "2 requests/s: TTFT 300 ms (95 of 100 below 390), TPOT 50 ms (95 of 100 below 50). "
        "The real model at 1.5 requests/s: TTFT 200 ms (simulated 600), TPOT 50 ms (simulated 50). "
        "The promise is kept up to 1.25 requests/s")
    alone = plots.load_curve(curve)
    assert len(alone.axes[0].lines) == 2 and "real" not in alone.alt and "promise" not in alone.alt
    for reports in ({}, {1.0: report(0.1, tpots=(None,))}):
        with pytest.raises(ValueError, match="answers of two tokens"):
            plots.load_curve(reports)


def test_needs_are_stacked_seconds_and_three_gains():
    shown = plots.scenario_needs({"chat": (0.2, 0.3, {"bandwidth": 1.2, "arithmetic": 1.4, "memory": 1.1})})
    left, right = shown.axes
    assert [(bar.get_y(), bar.get_height()) for bar in left.patches] == [(0, 0.2), (0.2, 0.3)]
    assert [bar.get_height() for bar in right.patches] == [1.2, 1.4, 1.1]
    assert "twice the bandwidth 1.20 times as many requests, arithmetic 1.40" in shown.alt
    with pytest.raises(ValueError, match="at least one use"):
        plots.scenario_needs({})


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(recwarn):
    before = dict(matplotlib.rcParams)
    pictures = [plots.batch_gain({"$x_1$": {1: 0.02}}, {}), plots.load_curve({1.0: report(0.1, 0.1)}),
                plots.token_gaps({"a": ([request(0, 1, 2)], request(0, 1))}),
                plots.request_timeline({"你好": served([(3, 6), (2, 6)], kv_blocks=3, block_size=4)}),
                plots.scenario_needs({"a": (1, 0, {"bandwidth": 1, "arithmetic": 1, "memory": 1})})]
    assert all(picture.png().startswith(PNG) for picture in pictures)
    assert dict(matplotlib.rcParams) == before and not recwarn.list


# --- The widget -----------------------------------------------------------------------------------------------------

@pytest.fixture
def shown():
    return widgets.timeline()


def test_the_widget_begins_with_its_twin_and_follows_every_control(shown):
    assert shown.picture.value == shown.twin.png() and shown.twin.alt.startswith(shown.words.value[:-1])
    tokens = sum(answer - 1 for answer in ANSWERS)  # the first of each comes with its prompt
    assert (tokens, 23 + 29 + 11) == (118, 63) and f"{tokens / (4 * 63):.0%} of 4 places" in shown.twin.alt
    shown.controls["policy"].value = "continuous"
    continuous = shown.words.value
    assert shown.picture.value != shown.twin.png() and continuous != shown.twin.alt
    shown.controls["max_batch"].value = 8
    assert shown.words.value != continuous
    shown.controls["load"].value = "a long prompt among short ones"
    whole = longest_gap(shown)
    # all of the prompt, in two calls, and then a step for four: three answers, and the newcomer behind 800 tokens
    reading = 2 * COST.prefill_call + 800 * COST.prefill_token
    assert whole == pytest.approx(1e3 * (reading + COST.decode(4, 3 * 30 + 800)), abs=2)
    shown.controls["token_budget"].value = 64
    assert longest_gap(shown) < whole / 4
    for name, value in (("load", "answers of unequal length"), ("policy", "static"), ("max_batch", 4),
                        ("token_budget", 2048)):
        shown.controls[name].value = value
    assert shown.picture.value == shown.twin.png()


def longest_gap(shown) -> float:
    return float(shown.words.value.split("longest gap between two tokens ")[1].split(" ms")[0])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("settings", [dict(max_batch=1, token_budget=16), dict(policy="static", max_batch=8)], ids=str)
def test_every_load_can_be_shown_at_the_ends_of_the_controls(load, settings):
    assert widgets.timeline(load, **settings).twin.png().startswith(PNG)


@pytest.mark.parametrize(("start", "words"), [
    (dict(load="none"), "load='none'.*a long prompt among"), (dict(policy="best"), "policy='best'.*static, continuous"),
    (dict(max_batch=3), "max_batch=3.*1, 2, 4, 8"), (dict(token_budget=100), "token_budget=100.*16, 32")])
def test_what_no_control_can_show_is_refused(start, words):
    with pytest.raises(ValueError, match=words):
        widgets.timeline(**start)


def test_f1_the_widget_travels_with_its_picture_and_is_made_of_what_colab_has(shown):
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {WIDGET, "image/png", "text/plain"} and "0x" not in bundle["text/plain"]
    assert base64.b64decode(bundle["image/png"]).startswith(PNG)
    assert {type(control) for control in shown.controls.values()} == {ipywidgets.Dropdown, ipywidgets.SelectionSlider}


# --- What the learner builds in the notebook ------------------------------------------------------------------------

@pytest.fixture(scope="module")
def built():
    """The scheduler of the notebook, as it stands in its cells, over the tiny model."""
    space = {"torch": torch, "ll": ll, "model": MODEL, "prose": random_ids(500)}
    for cell in nbformat.read(BOOK, as_version=4).cells:
        if cell.cell_type == "code" and any(f"def {name}(" in cell.source
                                            for name in ("read", "decode", "static", "continuous")):
            exec(cell.source, space)
    return types.SimpleNamespace(**space)


def alone(ids, count):
    """Greedy ids of transformers, each from a pass over the whole text."""
    oracle, answer = as_transformers(MODEL), []
    for _ in range(count):
        with torch.no_grad():
            answer.append(int(oracle(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


@pytest.mark.parametrize("policy", ["static", "continuous"])
@pytest.mark.parametrize("places", [1, 3, 8])
def test_the_lessons_schedulers_write_what_transformers_writes_alone(built, policy, places):
    wanted = (2, 7, 3, 2, 5)
    users = [built.User(random_ids(length, seed=length), n) for length, n in zip((5, 1, 9, 18, 3), wanted)]
    log = getattr(built, policy)(users, places)
    assert [user.tokens for user in users] == [alone(user.ids, user.wanted) for user in users]
    assert built.pool.free_blocks == built.pool.blocks
    steps = {("static", 1): 14, ("continuous", 1): 14, ("static", 3): 6 + 4, ("continuous", 3): 6, ("static", 8): 6,
             ("continuous", 8): 6}  # a token of each comes with its prompt: 1, 6, 2, 1, 4 steps
    assert len(log) == steps[policy, places] and sum(map(len, log)) == sum(wanted) - 5


# --- The checks take every right answer -------------------------------------------------------------------------------

def admit_with_tensors(waiting, free_blocks, free_places, block_size):
    needs = torch.tensor([-(-(tokens + 1) // block_size) for tokens in waiting[:free_places]])
    return (needs.cumsum(0) <= free_blocks).sum()


def admit_one_by_one(waiting, free_blocks, free_places, block_size):
    started = 0
    while waiting and started < free_places and (waiting[0] + block_size) // block_size <= free_blocks:
        free_blocks -= (waiting.pop(0) + block_size) // block_size  # (n + size) // size is (n + 1), rounded up
        started += 1
    return np.int64(started)


def plan_by_cumulative_sum(decoding, unread, budget):
    ends = np.minimum(np.cumsum(np.array(unread, dtype=int)), budget - decoding)
    return np.diff(ends, prepend=0)


def plan_in_a_tuple(decoding, unread, budget):
    left = budget - decoding
    return tuple(min(tokens, max(0, left - sum(unread[:n]))) for n, tokens in enumerate(unread))


def within_in_numpy(requests, ttft_limit, tpot_limit):
    kept = [len(times) > 0 and times[0] - start <= ttft_limit and
            (len(times) == 1 or np.diff(times).mean() <= tpot_limit) for start, times in requests]
    return np.mean(kept)


@pytest.mark.parametrize(("name", "fn"), [
    ("admit", admit_with_tensors), ("plan_step", plan_by_cumulative_sum), ("plan_step", plan_in_a_tuple),
    ("within_limits", within_in_numpy),
    ("block_key", lambda tenant, before, tokens: (tokens, (type(tenant), tenant), before)),
    ("block_key", lambda tenant, before, tokens: repr((tenant, before, tokens)))])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


def test_an_answer_that_empties_its_list_is_told_so(capsys):
    check.admit(admit_one_by_one)
    assert "changed its input" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "fn", "words"), [
    ("admit", lambda *_: "all", "should be a whole number, not all"),
    ("plan_step", lambda *_: ["x"], "a chunk should be a whole number"),
    ("plan_step", lambda decoding, unread, budget: [1] * len(unread), "it should be"),
    ("plan_step", lambda decoding, unread, budget: [budget] * len(unread), "are more than 32 tokens"),
    ("within_limits", lambda *_: "half", "should be numbers")])
def test_odd_answers_are_told_what_is_missing(name, fn, words, capsys):
    getattr(check, name)(fn)
    assert words in capsys.readouterr().out
