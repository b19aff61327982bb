"""Lesson 08's pictures and its grid explorer: the right numbers reach the reader."""

import base64
import math
import types

import ipywidgets
import matplotlib
import numpy as np
import pytest
import torch
from tiny import one_thread as one_thread

from llm_lessons.classroom import plots, style, widgets
from llm_lessons.quantize import quantize

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"


def grid(values, bits=4, group_size=None, symmetric=True, clamp=math.inf):
    values = torch.tensor(values)
    return plots.grid_view(values, quantize(values.clamp(-clamp, clamp).reshape(1, -1), bits, group_size, symmetric))


def points(line):
    return [(float(x), pytest.approx(float(y), abs=1e-5)) for x, y in zip(*line.get_data())]


def ladder(axis) -> list[tuple[float, float, float]]:
    """The lines of the grid: height, left end, right end."""
    return [(round(a[1], 5), a[0], b[0]) for a, b in axis.collections[0].get_segments()]


# --- values on their grid -------------------------------------------------------------------------------------------

def test_values_stand_over_the_steps_and_errors_below_in_steps():
    # step 0.7 / 7 = 0.1: -0.32 goes to -0.3, 0.12 to 0.1, -0.02 to 0
    shown = grid([0.7, -0.32, 0.12, -0.02])
    top, below = shown.axes
    assert [(0, 0.7), (1, -0.32), (2, 0.12), (3, -0.02)] == points(top.lines[0])
    assert [(0, 0), (1, -0.2), (2, 0.2), (3, -0.2)] == points(below.lines[0])
    assert [height for height, *_ in ladder(top)] == [round(-0.7 + 0.1 * n, 5) for n in range(15)]
    assert {tuple(line.get_ydata()) for line in below.lines[-3:]} == {(-0.5, -0.5), (0, 0), (0.5, 0.5)}
    # relative error: 0.02·√3 / √(0.49 + 0.1024 + 0.0144 + 0.0004)
    assert shown.alt == ("4 values from -0.32 to 0.7; 4 bits, symmetric, one group: step 0.1, largest error 0.02 "
                         "(0.20 steps), relative error 0.0445")
    assert top.get_title(loc="left") == "4 bits, symmetric, one group: step 0.1"


def test_each_group_has_the_steps_of_its_own():
    # 2 bits, 4 steps: 0 to 6 is steps of 2; 10 to 10.6 steps of 0.2; the middle ones lie 3 = 1.5 and 10.25 = 1.25 steps
    shown = grid([0.0, 2.5, 6.0, 10.0, 10.25, 10.6], bits=2, group_size=3, symmetric=False)
    lines = ladder(shown.axes[0])
    assert [height for height, *_ in lines] == [0, 2, 4, 6, 10, 10.2, 10.4, 10.6]
    assert all(-0.5 <= left and right <= 2.5 for _, left, right in lines[:4])
    assert all(2.5 <= left and right <= 5.5 for _, left, right in lines[4:])
    assert [(0, 0), (1, 0.25), (2, 0), (3, 0), (4, 0.25), (5, 0)] == points(shown.axes[1].lines[0])
    assert [text.get_text() for text in shown.axes[0].texts] == ["2", "0.2"]
    assert "2 groups of 3: step 0.2 to 2, largest error 0.5 (0.25 steps)" in shown.alt


def test_an_outlier_makes_the_step_and_the_others_vanish():
    values = [0.4, -0.3] * 15 + [7.0, 0.1]
    shown = grid(values)  # step 1: all others go to 0, and their error is all of them
    assert "step 1, largest error 0.4 (0.40 steps)" in shown.alt
    assert shown.axes[1].lines[0].get_ydata().tolist() == pytest.approx([0.4, -0.3] * 15 + [0, 0.1], abs=1e-5)
    assert "step 0.0571 to 1," in grid(values, group_size=8).alt  # 0.4 / 7 where the outlier is not


def test_values_that_were_clipped_are_triangles_beyond_half_a_step():
    shown = grid([3.0, -0.6, 0.1, -1.4], clamp=0.7)  # steps of 0.1 up to 0.7: 3.0 is 23 steps too high, -1.4 7 too low
    top, below = shown.axes
    marks = {line.get_marker(): points(line) for line in top.lines}
    assert marks["o"] == [(1, -0.6), (2, 0.1)] and marks["^"] == [(0, 3)] and marks["v"] == [(3, -1.4)]
    marks = {line.get_marker(): line for line in below.lines}
    assert marks["^"].get_ydata()[0] > 0.5 and marks["v"].get_ydata()[0] < -0.5
    assert "clipped, up to 23 steps" in below.get_title(loc="left")
    assert "largest error 2.3 (23.00 steps)" in shown.alt and shown.alt.endswith("2 of 4 values clipped")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_no_error_is_beyond_half_a_step_and_the_lines_can_be_told_apart(bits, symmetric):
    values = torch.randn(576, generator=torch.Generator().manual_seed(bits)) + 3
    shown = grid(values.tolist(), bits, 96, symmetric)
    assert np.abs(shown.axes[1].lines[0].get_ydata()).max() <= 0.5001
    assert len(shown.axes[1].lines[0].get_ydata()) == 576 and "clipped" not in shown.alt
    every = {6: "every 2nd step", 7: "every 4th step", 8: "every 8th step"}.get(bits, "the steps")
    assert f"lines: {every} of the grid" in shown.axes[1].get_xlabel()
    lines = ladder(shown.axes[0])
    assert len(lines) / 6 == {True: min(2**bits - 1, 31), False: min(2**bits, 32)}[symmetric]
    assert not symmetric or [height for height, *_ in lines].count(0) == 6


@pytest.mark.parametrize("values", [[0.0] * 5, [2.5] * 3, [1e-30, -1e-30], [3e38, -3e38], [0.1]], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_any_kind_can_be_drawn(values, symmetric, recwarn):
    shown = grid(values, symmetric=symmetric)
    assert shown.png().startswith(PNG) and not recwarn.list
    assert "relative error nan" not in shown.alt


def test_half_precision_is_measured_against_its_own_values():
    values = torch.tensor([0.7, -0.32], dtype=torch.bfloat16)  # 0.69921875 and -0.3203125: step 0.099888
    shown = plots.grid_view(values, quantize(values.reshape(1, -1), 4))
    assert "largest error 0.0206 (0.21 steps)" in shown.alt


FOUR = torch.tensor([0.7, -0.32, 0.12, -0.02])


@pytest.mark.parametrize(("values", "quantized", "words"), [
    (FOUR.reshape(2, 2), quantize(FOUR.reshape(2, 2)), r"tensor \[columns\] .* not \[2, 2\] of torch.float32"),
    ([0.7], quantize(FOUR.reshape(1, -1)), r"not \[0.7\]"), (FOUR.int(), quantize(FOUR.reshape(1, -1)), "torch.int32"),
    (FOUR[:0], quantize(FOUR.reshape(1, -1)), r"not \[0\]"),
    (FOUR, quantize(FOUR), r"quantized is \[4\], not \[1, 4\]: make it with quantize\(values.reshape"),
    (FOUR, quantize(FOUR.flip(0).reshape(1, -1)), "of other values: number 0 is 0.7, on the grid -0.02"),
    (FOUR * float("nan"), quantize(FOUR.reshape(1, -1)), "other values: number 0 is nan")])
def test_a_picture_of_other_values_is_refused(values, quantized, words):
    with pytest.raises(ValueError, match=words):
        plots.grid_view(values, quantized)


# --- error, outliers, quality ---------------------------------------------------------------------------------------

def test_errors_are_drawn_against_bits_over_a_line_that_halves():
    shown = plots.error_by_bits({"per tensor": {8: 0.02, 4: 0.4}, "per row": {4: 0.2, 8: 0.01}})
    axis = shown.axes[0]
    assert points(axis.lines[0]) == [(4, 0.4), (8, 0.02)] and points(axis.lines[1]) == [(4, 0.2), (8, 0.01)]
    guide = axis.lines[2].get_ydata()
    assert guide[0] / guide[1] == pytest.approx(16) and guide[0] < 0.2 and guide[1] < 0.01
    assert axis.get_yscale() == "log" and "log scale" in axis.get_ylabel()
    assert shown.alt == "relative error; per tensor: 4 bits 0.4, 8 bits 0.02; per row: 4 bits 0.2, 8 bits 0.01"


@pytest.mark.parametrize(("errors", "words"), [
    ({}, "nothing to draw"), ({"a": {}}, "nothing to draw"), ({"a": {4: 0.0}}, "'a' at 4 bits is 0.0: only numbers"),
    ({"a": {4: math.nan}}, "is nan"), ({"a": {4: math.inf}}, "is inf")])
def test_errors_without_a_place_on_a_log_scale_are_refused(errors, words):
    with pytest.raises(ValueError, match=words):
        plots.error_by_bits(errors)


def test_the_largest_channels_are_named_beside_the_median():
    activations = torch.tensor([[1.0, -2, 3, 0.5, 5, 400], [0.0, 1, -4, 2000, 1, 3]])  # largest: 1, 2, 4, 2000, 5, 400
    shown = plots.outlier_channels(activations, "layer 3, 你好")
    left, right = shown.axes
    assert points(left.lines[0]) == list(enumerate([1, 2, 4, 2000, 5, 400]))
    assert sorted(points(left.lines[1])) == [(2, 4), (3, 2000), (4, 5), (5, 400)]
    assert left.lines[2].get_ydata()[0] == np.median([1, 2, 4, 2000, 5, 400]) == 4.5
    assert [bar.get_width() for bar in right.patches] == [2000, 400, 5, 4]
    assert [label.get_text() for label in right.get_yticklabels()] == [f"channel {n}" for n in (3, 5, 4, 2)]
    assert "over 2 tokens: median 4.5; channel 3: 2,000 (444 × median), channel 5: 400 (88.9 × median)" in shown.alt
    assert "log scale" in left.get_ylabel() and left.get_title(loc="left") == "layer 3, ⟨U+4F60⟩⟨U+597D⟩"


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (2, 1536)])
def test_activations_of_any_shape_can_be_drawn(shape, recwarn):
    activations = torch.randn(shape, dtype=torch.bfloat16)
    assert plots.outlier_channels(activations).png().startswith(PNG) and not recwarn.list


@pytest.mark.parametrize(("activations", "words"), [
    (torch.ones(3), r"activations must be a tensor \[tokens, channels\], not \[3\]"), ([1.0], r"not \[1.0\]"),
    (torch.ones(0, 3), r"not \[0, 3\]"), (torch.tensor([[1.0, math.nan]]), "NaN or infinity"),
    (torch.tensor([[1.0, 0, 0]]), "half of the channels or more are 0")])
def test_activations_without_a_picture_are_refused(activations, words):
    with pytest.raises(ValueError, match=words):
        plots.outlier_channels(activations)


def row(bits, ratio, low, high, group=None, symmetric=True, label="int"):
    return dict(bits_per_weight=bits, label=label, group=group, symmetric=symmetric, perplexity_ratio=ratio, low=low,
                high=high)


TABLE = [row(8.03, 1.01, 1.0, 1.02, label="int8"), row(3.03, 50, 40, 70), row(4.03, 2.0, 1.8, 2.3),
         row(4.5, 1.2, 1.1, 1.3, 32), row(5.0, 1.0, 0.99, 1.02, 32, False), row(32, 1, 1, 1, symmetric=None,
                                                                               label="float32")]


@pytest.mark.parametrize("form", [dict, lambda fields: types.SimpleNamespace(**fields)], ids=["dicts", "objects"])
def test_quality_is_drawn_by_grouping_with_its_intervals(form):
    shown = plots.quality_cliff([form(fields) for fields in TABLE])
    axis = shown.axes[0]
    lines = {box.get_label(): box for box in axis.containers}
    assert list(lines) == ["whole row, symmetric", "groups of 32, symmetric", "groups of 32, asymmetric"]
    line, _, (bars,) = lines["whole row, symmetric"]
    assert points(line) == [(3.03, 50), (4.03, 2), (8.03, 1.01)]
    assert [pytest.approx(bar[:, 1].tolist()) for bar in bars.get_segments()] == [[40, 70], [1.8, 2.3], [1, 1.02]]
    assert [1, 1] in [list(line.get_ydata()) for line in axis.lines]
    assert axis.get_yscale() == axis.get_xscale() == "log"
    assert "log scale" in axis.get_xlabel() and "log scale" in axis.get_ylabel()
    assert "int8, 8.03 bits per weight: 1.01 (1 to 1.02)" in shown.alt
    colors = [lines[name][0].get_color() for name in lines]
    assert colors[0].upper() == style.COLORS["weights"] and colors[1] == colors[2] != colors[0]
    assert "float32" not in shown.alt and axis.get_xlim()[1] < 16, "a row without a grid is left out"


def test_intervals_that_a_cliff_would_hide_have_a_panel_of_their_own():
    assert len(plots.quality_cliff(TABLE[3:]).axes) == 1
    left, right = plots.quality_cliff(TABLE).axes
    assert left.get_ylim()[1] > 70 and right.get_ylim()[0] < 0.99 and right.get_ylim()[1] < 1.5
    assert 4.03 < right.get_xlim()[0] < 4.5, "from the first row that lies so near on"
    assert len(plots.quality_cliff(TABLE[1:3]).axes) == 1, "no row lies near"


@pytest.mark.parametrize(("rows", "words"), [
    ([], "nothing to draw"), ([{"label": "int8"}], "row 0 is .* needs the fields bits_per_weight, label, group"),
    ([TABLE[0], None], "row 1 is None"), ([row(4, 1.2, 1.3, 1.4)], "row 0: perplexity_ratio 1.2 must lie between"),
    ([row(4, math.inf, 1, math.inf)], "perplexity_ratio of row 0 is inf"), ([row(0, 1, 1, 1)], "weight of row 0 is 0"),
    ([row(4, 1, 0, 1)], "low of row 0 is 0"), ([row(4, 1, 1, 1, symmetric="no")], "None, not 'no'"),
    ([TABLE[-1]], "that has a grid")])
def test_rows_that_are_none_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        plots.quality_cliff(rows)


def test_speeds_are_compared_with_float32_whatever_their_unit():
    shown = plots.size_and_speed({"float32": 20, "int4": 90, "int8": 50}, {"float32": 1, "int8": 4, "int4": 7}, "here")
    axis = shown.axes[0]
    bars = sorted(axis.patches, key=lambda bar: bar.get_x())
    assert [bar.get_height() for bar in bars] == [1, 1, 7, 4.5, 4, 2.5]
    assert all(bar.get_x() + bar.get_width() < other.get_x() for bar, other in zip(bars, bars[1:]))
    assert {matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars[1::2]} == {style.COLORS["decode"]}
    assert [label.get_text() for label in axis.get_xticklabels()] == ["float32", "int4", "int8"]
    assert shown.alt.endswith("int4 measured 4.5, predicted 7; int8 measured 2.5, predicted 4")
    assert shown.get_supxlabel() == "here" and axis.get_ylabel() == "times as fast as float32"


@pytest.mark.parametrize(("measured", "predicted", "words"), [
    ({"int8": 4}, {"int8": 4}, "'float32', to which"), ({"float32": 1, "int8": 4}, {"float32": 1}, "the same labels"),
    ({"float32": 0}, {"float32": 1}, r"measured\['float32'\] is 0"),
    ({"float32": 1}, {"float32": math.nan}, r"predicted\['float32'\] is nan")])
def test_speeds_that_cannot_be_compared_are_refused(measured, predicted, words):
    with pytest.raises(ValueError, match=words):
        plots.size_and_speed(measured, predicted)


def test_the_keys_errors_share_one_scale_S5():
    keys = np.random.default_rng(1).normal(size=(64, 8))
    keys[:, 3] = 50 + 0.5 * keys[:, 3]

    def error(axis):  # 15 steps between the least and the largest
        least, step = keys.min(axis, keepdims=True), np.ptp(keys, axis, keepdims=True) / 15
        return torch.tensor(np.abs(np.round((keys - least) / step) * step + least - keys))

    by_channel, by_token = error(0), error(1)
    shown = plots.key_channels(by_channel, by_token)
    left, right = (axis.images[0] for axis in shown.axes[:2])
    torch.testing.assert_close(torch.tensor(left.get_array()), by_channel.float())
    torch.testing.assert_close(torch.tensor(right.get_array()), by_token.float())
    assert left.get_clim() == right.get_clim() == (0, pytest.approx(float(by_token.max())))
    assert float(by_channel.max()) < 0.25 and float(by_token.max()) > 1.5
    assert f"one grid per token: mean {float(by_token.mean()):.2g}, largest 1.7" in shown.alt


@pytest.mark.parametrize(("maps", "words"), [
    ((torch.ones(2, 3), torch.ones(3, 2)), r"same keys are needed, not \[2, 3\] and \[3, 2\]"),
    ((torch.ones(2), torch.ones(2)), "per_channel_error must be"), ((-torch.ones(1, 1), torch.ones(1, 1)), "below 0"),
    ((torch.ones(1, 1), torch.tensor([[math.inf]])), "per_token_error must be finite")])
def test_maps_that_are_no_errors_are_refused(maps, words):
    with pytest.raises(ValueError, match=words):
        plots.key_channels(*maps)


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(recwarn):
    before = dict(matplotlib.rcParams)
    for picture in (grid([0.7, 0.1], clamp=0.5), plots.error_by_bits({"$a$ <b>": {4: 0.1}}),
                    plots.quality_cliff(TABLE), plots.quality_cliff(TABLE[:1]),
                    plots.size_and_speed({"float32": 1, "$x": 2}, {"float32": 1, "$x": 2}),
                    plots.key_channels(torch.zeros(1, 1), torch.zeros(1, 1))):
        assert picture.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- the explorer ---------------------------------------------------------------------------------------------------

OUTLIER = torch.tensor([7.0] + [0.45] * 63)  # ‖w‖² = 49 + 63·0.2025 = 61.7575
EVEN = torch.arange(-32, 32) / 32


@pytest.fixture
def shown():
    return widgets.grid_explorer({"down <b> & 507": OUTLIER, "even": EVEN})


def test_the_explorer_begins_with_its_twin_and_follows_every_control(shown):
    words, controls = shown.words, shown.controls
    # step 1: 0.45 goes to 0, relative error √(12.7575 / 61.7575); a scale of 16 bits for 64 weights
    assert words.value == ('<span style="overflow-wrap:anywhere">'
                           "down &lt;b&gt; &amp; 507: step 1, largest error 0.45 (0.45 steps), relative error 0.455; "
                           "4.25 bits per weight with 16-bit scales.</span>")
    assert shown.picture.value == shown.twin.png()
    controls["group"].value = 32  # the second group keeps its values: √(31·0.2025 / 61.7575)
    assert "step 0.0643 to 1," in words.value and "relative error 0.319; 4.5 bits" in words.value
    controls["group"].value, controls["kept"].value = 0, 75  # steps of 5.25 / 7 = 0.75: 0.45 goes to 0.75
    assert "step 0.75, largest error 1.75 (2.33 steps), relative error 0.376, 1 of 64 values clipped" in words.value
    assert shown.picture.value != shown.twin.png()
    controls["group"].value = 32  # each group's own 75 %: 1.75² + 31·0.3² and, all of them clipped, 32·0.1125²
    assert "relative error 0.318, 33 of 64 values clipped" in words.value
    for name, value in (("group", 0), ("kept", 100), ("symmetric", False)):  # from 0.45 to 7: both ends are met
        controls[name].value = value
    assert "step 0.437, largest error 0 (0.00 steps), relative error 0; 4.5 bits per weight with 16-bit scales and" \
        in words.value
    controls["bits"].value = 8
    assert "step 0.0257" in words.value and "8.5 bits per weight" in words.value  # 6.55 / 255
    controls["row"].value = "even"
    assert ">even: step 0.00772" in words.value  # (31/32 + 1) / 255
    for name, value in (("row", "down <b> & 507"), ("bits", 4), ("symmetric", True)):
        controls[name].value = value
    assert shown.picture.value == shown.twin.png()


def test_clipping_leaves_the_learners_row_as_it_is(shown):
    shown.controls["kept"].value = 50
    assert OUTLIER[0] == 7 and "from 0.45 to 7" in shown.twin.alt


@pytest.mark.parametrize(("lengths", "offered"), [
    ((576, 1536), [0, 192, 96, 32]), ((576, 64), [0, 32]), ((192,), [0, 96, 32]), ((32,), [0]), ((45, 576), [0]),
    ((1,), [0])], ids=str)
def test_groups_are_offered_where_they_divide_every_row(lengths, offered):
    control = widgets.grid_explorer({f"{n}": torch.linspace(-1, 1, n) for n in lengths}).controls["group"]
    assert [value for _, value in control.options] == offered and control.value == 0


@pytest.mark.parametrize(("rows", "words"), [
    ({}, "nothing to explore"), ({"a": [1.0]}, r"row 'a' must be a tensor \[columns\] .* not \[1.0\]"),
    ({"a": torch.ones(2, 2)}, r"not \[2, 2\]"), ({"a": torch.ones(2).int()}, "torch.int32"),
    ({"a": torch.ones(0)}, r"not \[0\]"), ({"a": torch.tensor([math.nan])}, "row 'a' holds NaN or infinity")])
def test_rows_without_a_grid_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        widgets.grid_explorer(rows)


def test_f1_the_explorer_travels_with_its_picture_and_is_made_of_what_colab_has(shown):
    data = shown._repr_mimebundle_()
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert "step 1, largest error 0.45" in data["text/plain"]
    kinds = {"row": ipywidgets.Dropdown, "bits": ipywidgets.IntSlider, "group": ipywidgets.Dropdown,
             "symmetric": ipywidgets.Dropdown, "kept": ipywidgets.IntSlider}
    assert {name: type(control) for name, control in shown.controls.items()} == kinds
    assert (shown.controls["bits"].min, shown.controls["bits"].max) == (2, 8)
    assert (shown.controls["kept"].min, shown.controls["kept"].max) == (50, 100)
