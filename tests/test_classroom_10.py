"""Lesson 10's pictures, its planner and its checks: the right numbers reach the reader."""

import base64
import itertools
import math

import ipywidgets
import matplotlib
import numpy as np
import pytest
from tiny import one_thread as one_thread

from llm_lessons import DEVICES, SHAPES, plan
from llm_lessons.classroom import check, plots, style, widgets
from llm_lessons.classroom.checks import sizing
from llm_lessons.classroom.plots.sizing import both_units, verdict

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"
PARTS = {"weights": 16e9, "cache": 4e9, "activations": 0.2e9, "reserve": 2.4e9}


def color(patch) -> str:
    return matplotlib.colors.to_hex(patch.get_facecolor()).upper()


# --- Sizes in words -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("nbytes", "words"), [
    (6_710_886_400, "6.71 GB (6.25 GiB)"), (24e9, "24 GB (22.4 GiB)"), (47_185_920, "47.2 MB (45 MiB)"),
    (2 * 2**30, "2.15 GB (2 GiB)"), (0, "0 GB (0 GiB)"), (1536, "0.00154 MB (0.00146 MiB)")])
def test_a_size_is_told_in_both_units(nbytes, words):
    assert both_units(nbytes) == words


def test_the_verdict_names_what_is_left_or_missing():
    assert verdict(PARTS, 24e9) == "needs 22.6 GB (21 GiB) of 24 GB (22.4 GiB): 1.4 GB (1.3 GiB) free"
    assert verdict(PARTS, 20e9) == "needs 22.6 GB (21 GiB) of 20 GB (18.6 GiB): 2.6 GB (2.42 GiB) too much"
    assert verdict({"weights": 24e9}, 24e9).endswith("0 GB (0 GiB) free"), "what fits exactly, fits"


# --- Memory ---------------------------------------------------------------------------------------------------------

def test_parts_are_stacked_in_per_cent_of_their_own_memory():
    shown = plots.memory_bars({"large": (dict(reversed(PARTS.items())), 40e9), "small": ({"weights": 1e9}, 2e9)}, "$a$")
    axis = shown.axes[0]
    bars = [bar for bar in axis.patches if bar.get_width()]
    assert [round(bar.get_width(), 9) for bar in bars] == [40, 10, 0.5, 6, 50]  # 16, 4, 0.2, 2.4 of 40; 1 of 2
    assert [round(bar.get_x(), 9) for bar in bars] == [0, 40, 50, 50.5, 0]
    assert [color(bar) for bar in bars[:2]] == [style.COLORS["weights"], style.COLORS["kv_cache"]]
    assert [list(line.get_xdata()) for line in axis.lines] == [[100, 100]] * 2
    assert axis.get_xlim()[0] == 0 and axis.get_xlim()[1] > 100
    written = [text.get_text() for text in axis.texts]
    assert [words for words in written if "needs" not in words] == ["16", "4", "1"], "0.2 and 2.4 have too little room"
    assert [label.get_text() for label in axis.get_yticklabels()] == ["large", "small"]
    assert "small needs 1 GB (0.931 GiB) of 2 GB (1.86 GiB): 1 GB (0.931 GiB) free (weights 1 GB)" in shown.alt
    assert [text.get_text() for text in shown.legends[0].get_texts()] == ["all the memory there is", *PARTS]


def test_what_does_not_fit_is_hatched_from_the_end_of_the_memory_on():
    axis = plots.memory_bars({"a": (PARTS, 20e9)}).axes[0]
    over = [bar for bar in axis.patches if bar.get_hatch() == "xx"]
    assert [(bar.get_x(), round(bar.get_width(), 9)) for bar in over] == [(100, 13)]  # 22.6 of 20
    assert matplotlib.colors.to_hex(axis.texts[-1].get_color()).upper() == style.COLORS["mistake"]
    assert axis.get_xlim()[1] > 113
    assert not [bar for bar in plots.memory_bars({"a": (PARTS, 22.6e9)}).axes[0].patches if bar.get_hatch() == "xx"]


def test_a_bar_without_end_is_cut_and_says_how_long_it_is():
    axis = plots.memory_bars({"a": ({"weights": 2e9, "cache": 458e9}, 1e9), "b": (PARTS, 24e9)}).axes[0]
    assert axis.get_xlim() == (0, pytest.approx(416))
    written = {text.get_text(): text.get_position()[0] for text in axis.texts}
    assert written["460 times the memory →"] == 400
    assert written["2"] == 100 and written["458"] == 300, "in the middle of what is seen"
    longest = plots.memory_bars({"a": ({"weights": 4e9}, 1e9)}).axes[0]
    assert not [text for text in longest.texts if "times" in text.get_text()]


@pytest.mark.parametrize(("rows", "words"), [
    ({}, "nothing to draw"), ({"a": ({}, 1e9)}, "parts of 'a' must be named weights, cache, .* not nothing"),
    ({"a": ({"weight": 1}, 1e9)}, r"not \['weight'\]"), ({"a": ({"weights": -1}, 1e9)}, "weights of 'a' .* not -1"),
    ({"a": ({"weights": math.nan}, 1e9)}, "not nan"), ({"a": ({"weights": 1}, 0)}, "memory of 'a' .* above 0, not 0")])
def test_bars_of_nothing_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        plots.memory_bars(rows)


def test_users_are_drawn_where_somebody_fits():
    shown = plots.users_by_context([512, 1024, 2048], {"16 bits": [4, 2, 0], "4 bits": [16, 8, 4]}, window=1024)
    axis = shown.axes[0]
    lines = {line.get_label(): list(zip(*line.get_data())) for line in axis.lines if line.get_label()[0] != "_"}
    assert lines == {"16 bits": [(512, 4), (1024, 2)], "4 bits": [(512, 16), (1024, 8), (2048, 4)]}
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert "log scale" in axis.get_xlabel() and "log scale" in axis.get_ylabel()
    assert [1024, 1024] in [list(line.get_xdata()) for line in axis.lines]
    assert shown.alt == ("users that fit; 16 bits: 4 at 512 tokens, 2 at 1,024 tokens, 0 at 2,048 tokens; 4 bits: "
                         "16 at 512 tokens, 8 at 1,024 tokens, 4 at 2,048 tokens; context window 1,024 tokens")


@pytest.mark.parametrize(("contexts", "users", "words"), [
    ([512], {}, "as many numbers"), ([512, 1024], {"a": [1]}, "as many numbers"),
    ([512, 1024], {"a": [1, 1], "b": [0, 0]}, "'b': nobody fits")])
def test_lines_without_users_are_refused(contexts, users, words):
    with pytest.raises(ValueError, match=words):
        plots.users_by_context(contexts, users)


# --- Time -----------------------------------------------------------------------------------------------------------

def test_batches_become_latency_and_throughput():
    shown = plots.latency_throughput({"short": plots.Batches([1, 8, 64], [0.01, 0.02, 0.04], 2)}, critical=64)
    axis = shown.axes[0]
    whole, hollow = axis.lines[:2]
    assert list(whole.get_xdata()) == pytest.approx([10, 20, 40])  # ms
    assert list(whole.get_ydata()) == pytest.approx([100, 400, 1600])  # tokens/s: batch / seconds
    assert list(hollow.get_xdata()) == pytest.approx([40]) and hollow.get_markerfacecolor() == "white"
    assert [note.get_text() for note in axis.texts] == ["1", "8", "64"]
    assert list(axis.lines[2].get_xdata()) == pytest.approx([40]) and axis.lines[2].get_fillstyle() == "none"
    assert "batch 8 20 ms 400 tokens/s, batch 64 40 ms 1,600 tokens/s (does not fit); multiplying the" in shown.alt
    assert "from a batch of 64" in shown.alt
    assert "multiplying" not in plots.latency_throughput({"a": plots.Batches([1], [0.01], 1)}).alt


@pytest.mark.parametrize(("curves", "words"), [
    ({}, "nothing to draw"), ({"a": plots.Batches([1, 2], [0.1], 1)}, "as many seconds as batch sizes"),
    ({"a": plots.Batches([], [], 0)}, "as many seconds"), ({"a": plots.Batches([1], [0.1], 2)}, "`fit` among them"),
    ({"a": plots.Batches([1], [0.0], 1)}, "a time of 'a' must be a number above 0")])
def test_curves_of_nothing_are_refused(curves, words):
    with pytest.raises(ValueError, match=words):
        plots.latency_throughput(curves)


def test_the_plans_part_of_a_measured_time():
    shown = plots.plan_and_measured({"TTFT, 512 tokens": (0.2, 0.4), "TPOT, 1 user": (0.005, 0.02)}, "a machine")
    axis = shown.axes[0]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([100, 50, 100, 25])
    assert [color(bar) for bar in axis.patches[1::2]] == [style.COLORS["prefill"], style.COLORS["decode"]]
    assert [text.get_text() for text in axis.texts] == ["at least 200 ms, measured 400 ms",
                                                        "at least 5 ms, measured 20 ms"]
    assert shown.alt.endswith("TPOT, 1 user: at least 5 ms, measured 20 ms: 25%")
    assert shown.get_supxlabel() == "a machine"
    broken = plots.plan_and_measured({"TPOT": (0.4, 0.2)}).axes[0]  # a roofline measured in a busy moment
    assert broken.get_xlim()[1] >= 200


@pytest.mark.parametrize(("rows", "words"), [
    ({}, "nothing to draw"), ({"a": (0, 1)}, "planned time of 'a' .* not 0"), ({"a": (1, math.inf)}, "measured time")])
def test_times_that_are_none_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        plots.plan_and_measured(rows)


def test_training_keeps_more_than_inference():
    shown = plots.training_and_inference(
        {"forward": {"weights": 30e6}, "training": {"weights": 30e6, "gradients": 30e6, "optimizer": 60e6,
                                                    "activations": 40e6}}, {"operations": 3, "time": 3.5}, "a machine")
    left, right = shown.axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([30, 30, 40, 30, 60])  # MB, in the legend's order
    assert [bar.get_height() for bar in right.patches] == [3, 3.5]
    assert left.texts[-1].get_text() == "a machine"
    assert "training: weights 30 MB, gradients 30 MB, optimizer 60 MB, activations 40 MB. A training" in shown.alt
    assert shown.alt.endswith("operations 3.0, time 3.5")


@pytest.mark.parametrize(("memory", "ratios", "words"), [
    ({}, {"a": 1}, "nothing to draw"), ({"a": {"weights": 1}}, {}, "nothing to draw"),
    ({"a": {"momentum": 1}}, {"a": 1}, r"not \['momentum'\]"), ({"a": {"weights": 1}}, {"time": 0}, "'time' must be")])
def test_training_of_nothing_is_refused(memory, ratios, words):
    with pytest.raises(ValueError, match=words):
        plots.training_and_inference(memory, ratios)


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(recwarn):
    before = dict(matplotlib.rcParams)
    for picture in (plots.memory_bars({"$a$ <b> 你": (PARTS, 1e9)}, "$t"),
                    plots.memory_bars({"a": ({"cache": 0}, 1e9)}),
                    plots.users_by_context([512, 1024], {"$a": [1, 0]}),
                    plots.latency_throughput({"$a": plots.Batches([1], [1.0], 0)}, title="$"),
                    plots.plan_and_measured({"$a": (1e-9, 3.0)}, "$"),
                    plots.training_and_inference({"$a": {"weights": 1}}, {"$": 1}, "$")):
        assert picture.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- The planner ----------------------------------------------------------------------------------------------------

@pytest.fixture
def shown():
    return widgets.planner()


def test_the_planner_begins_with_its_twin_and_follows_every_control(shown):
    words, controls = shown.words, shown.controls
    # Llama-3-8B: 8,030,261,248 parameters; 131,072 bytes of cache a token; 8 users of 4,096 tokens: 4.29 GB
    assert "llama-3-8b on NVIDIA L4: needs 23 GB" in words.value and "of 24 GB (22.4 GiB): 1.03 GB" in words.value
    assert "room for 9 users of 4,096 tokens" in words.value
    # (15.009 + 4.295) GB / 300 GB/s; 8 tokens in that time
    assert "TPOT at least 64.3 ms, bound by the weights; at most 124 tokens/s in all" in words.value
    assert "weights 16.1 GB, cache 4.29 GB," in shown.twin.alt
    assert shown.picture.value == shown.twin.png()
    for name, value, part in (("users", 16, "too much"), ("kv_bits", 8, "free"), ("context", 8192, "too much"),
                              ("weight_bits", 8, "free"), ("count", 2, "on 2 x NVIDIA L4"),
                              ("device", "h100-sxm", "of 160 GB (149 GiB)"),
                              ("model", "llama-3-70b", "llama-3-70b on")):
        controls[name].value = value
        assert part in words.value, name
    assert shown.picture.value != shown.twin.png()
    for name, value in dict(model="llama-3-8b", device="l4", count=1, weight_bits=16, kv_bits=16, context=4096,
                            users=8).items():
        controls[name].value = value
    assert shown.picture.value == shown.twin.png()


def test_bits_go_where_they_belong(shown):
    shown.controls["weight_bits"].value = 8  # 8.03 GB instead of 16.1; TPOT (7.5046 + 4.295) / 300
    assert "needs 14.9 GB" in shown.words.value and "TPOT at least 39.3 ms" in shown.words.value
    shown.controls["weight_bits"].value, shown.controls["kv_bits"].value = 16, 8  # 2.15 GB of cache instead of 4.29
    assert "needs 20.8 GB" in shown.words.value and "TPOT at least 57.2 ms" in shown.words.value


def test_the_planner_says_when_nobody_fits(shown):
    shown.controls["model"].value = "llama-3-70b"
    assert "not even one user fits" in shown.words.value
    shown.controls["model"].value, shown.controls["context"].value = "llama-3-8b", 32768
    assert "room for 1 user of 32,768 tokens" in shown.words.value


@pytest.mark.parametrize(("setting", "value"), [("model", "gpt-5"), ("device", "abacus"), ("count", 3),
                                                ("weight_bits", 2), ("kv_bits", 4), ("context", 1000), ("users", 0)])
def test_the_planner_names_the_choices(setting, value):
    with pytest.raises(ValueError, match=f"{setting}={value!r}: choose one of "):
        widgets.planner(**{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("count", True), ("context", 4096.0), ("users", 8.0)])
def test_the_planner_takes_whole_numbers(setting, value):
    with pytest.raises(ValueError, match=f"{setting} must be a whole number of at least 1, not {value!r}"):
        widgets.planner(**{setting: value})


def test_the_planner_and_its_twin_travel_together(shown):
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]) == shown.twin.png()
    assert bundle["text/plain"].startswith("Interactive: llama-3-8b on NVIDIA L4")
    assert all(isinstance(control, (ipywidgets.Dropdown, ipywidgets.SelectionSlider)) for control
               in shown.controls.values())


def test_every_model_and_every_device_can_be_planned(shown):
    for name, options in (("model", SHAPES), ("device", DEVICES)):
        for option in options:
            shown.controls[name].value = option
            assert {"model": option, "device": DEVICES[option].name if name == "device" else ""}[name] in \
                shown.words.value
            assert bytes(shown.picture.value).startswith(PNG)


# --- What the checks hold for right ---------------------------------------------------------------------------------

def test_the_checks_users_are_those_of_arithmetic_by_hand():
    # Llama-3-8B on 24 GB: (21.6e9 - 2 * 8,030,261,248) / (4096 * 131,072) = 10.3
    # SmolLM2, one byte for each of 2 * 30 * 3 * 64 numbers a token: 11,520 bytes
    by_hand = {("smollm2-135m", 24): (21.6e9 - 2 * 134_515_008) / (1024 * 11_520),
               ("llama-3-8b", 24): (21.6e9 - 16_060_522_496) / (4096 * 131_072),
               ("llama-3-8b", 80): (72e9 - 8_030_261_248) / (8192 * 131_072),  # 8-bit weights: 59.6
               ("qwen3-4b", 24): (21.6e9 - 2 * 4_022_458_880) / (4096 * 73_728),  # 4,022,272,000 streamed, 73 norms
               ("llama-2-13b", 80): (72e9 - 2 * 13_015_864_320) / (2048 * 819_200)}
    for name, *case in sizing.CASES[:-1]:
        assert sizing._users(SHAPES[name], *case) == pytest.approx(by_hand[name, case[0]], rel=1e-12)
    assert sizing._users(SHAPES["llama-3-70b"], *sizing.CASES[-1][1:]) < 0


def in_floats(shape, gigabytes, context, weight_bits, kv_bits):
    left = gigabytes * 1e9 - gigabytes * 1e8 - weight_bits / 8 * shape.parameters
    return max(0.0, float(int(left / shape.kv_bytes_per_token(kv_bits / 8) / context)))


def one_by_one(shape, gigabytes, context, weight_bits, kv_bits):
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_bits / 8
    users = 0
    while shape.parameters * weight_bits / 8 + (users + 1) * context * token <= 0.9e9 * gigabytes:
        users += 1
    return users


def in_an_array(*case):
    return np.array(one_by_one(*case))


def choice_in_an_array(*case):
    return np.array(least_time_by_hand(*case))


def sorted_choices(shape, device, context, users, seconds, share):
    choices = itertools.product((1, 2, 4, 8), (16, 8, 4.5), (16, 8))
    plans = [(c, plan(shape, device.several(c[0]), *c[1:], context=context, users=users)) for c in choices]
    return list(min((c for c, p in plans if p.fits and p.tpot <= share * seconds), key=lambda c: (c[0], -c[1], -c[2])))


def least_time_by_hand(shape, device, context, users, seconds, share):
    for count, weight_bits, kv_bits in itertools.product((1, 2, 4, 8), (16, 8, 4.5), (16, 8)):
        p = plan(shape, device.several(count), weight_bits, kv_bits, context=context, users=users)
        if p.free >= 0 and users / p.tokens_per_second <= seconds * share:
            return count, weight_bits, kv_bits


def in_one_line(plan, measured, limit, share):
    return "memory" if plan.free < 0 else "fine" if measured <= limit else "program" if plan.tpot <= limit * share \
        else "device"


@pytest.mark.parametrize(("name", "fn"), [
    ("users_that_fit", in_floats), ("users_that_fit", one_by_one), ("users_that_fit", in_an_array),
    ("cheapest", sorted_choices), ("cheapest", least_time_by_hand), ("cheapest", choice_in_an_array),
    ("diagnose", in_one_line)])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


def test_the_cases_tell_the_answers_apart():
    assert {verdict for *_, verdict in sizing._deployments()} == set(sizing.VERDICTS)
    users = [math.floor(max(0, sizing._users(SHAPES[name], *case))) for name, *case in sizing.CASES]
    assert users == [1808, 10, 59, 44, 27, 0]


def test_a_plan_is_named_in_few_words():
    assert sizing.diagnose.verdict(lambda plan, measured, limit, share: None).startswith(
        "not right yet: for a plan of 8 users, 0.09, 0.1, 0.8 your function returned None")
