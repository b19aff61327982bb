"""Lesson 05's pictures, its roofline explorer and its checks: the right numbers reach the reader."""

import base64

import matplotlib
import pytest
import torch
from tiny import SHAPE, tiny_model
from tiny import one_thread as one_thread
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import llm_lessons as ll
from llm_lessons.classroom import check, plots, widgets
from llm_lessons.classroom.checks import prefill as checks
from llm_lessons.classroom.plots.prefill import _named
from llm_lessons.classroom.widgets.prefill import MATRICES, TOKENS, cost, layer_matrices

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"
ROOF = ll.Roofline({"float32": 100e9, "bfloat16": 400e9}, 20e9, {"float32": 0.1, "bfloat16": 0.1, "memory": 0.1})
LENGTHS = [1, 5, 16, 64, 128, 256, 512, 1024]


def counted(fn) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


# --- the pictures -----------------------------------------------------------------------------------------------

def bounds(dtype="float32", tokens=(1, 10, 100)):
    return plots.time_and_bounds(tokens, [0.2, 0.3, 2.5], [1e9 * t for t in tokens], [2e9] * len(tokens), ROOF, dtype,
                                 note="here")


def test_measured_times_stand_beside_what_memory_and_arithmetic_allow():
    left, right = bounds().axes
    lines = {line.get_label(): line.get_ydata() for line in left.lines}
    assert lines["measured"] == pytest.approx([200, 300, 2500])
    assert lines["memory alone"] == pytest.approx([100, 100, 100])  # 2 GB at 20 GB/s
    assert lines["arithmetic alone"] == pytest.approx([10, 100, 1000])  # 1 GFLOP a token at 100 GFLOP/s
    assert right.lines[-1].get_ydata() == pytest.approx([1 / 0.2, 10 / 0.3, 100 / 2.5])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_peak_is_that_of_the_type(dtype):
    assert bounds(dtype).axes[0].lines[0].get_ydata() == pytest.approx([2.5, 25, 250])


def test_units_log_scales_and_numbers_are_said():
    shown = bounds()
    left, right = shown.axes
    for words in (left.get_xlabel(), left.get_ylabel(), right.get_xlabel(), right.get_ylabel()):
        assert "log scale" in words
    assert "ms" in left.get_ylabel()
    assert "measured 200.0 ms to 2,500.0 ms; memory allows 100.0 ms to 100.0 ms" in repr(shown)
    assert "tokens per second: 5 to 40" in repr(shown)


@pytest.mark.parametrize("tokens", [LENGTHS, [2**n for n in range(11)], [2**n for n in range(13)],
                                    [*LENGTHS, 2048, 4096]])
def test_labels_of_the_ticks_do_not_touch(tokens):
    same = [1e9] * len(tokens)
    shown = plots.time_and_bounds(tokens, [1.0] * len(tokens), same, same, ROOF, "float32")
    shown.png()
    for axis in shown.axes:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels()]
        assert len(boxes) >= 5
        for one, other in zip(sorted(boxes, key=lambda box: box.x0), sorted(boxes, key=lambda box: box.x0)[1:]):
            assert one.x1 < other.x0


POINTS = {"a": [(n, 0.5 * n, 1e9 * n) for n in (1, 4, 16, 64, 256)], "b": [(1, 0.5, 5e9)]}


def test_the_roof_rises_with_the_bandwidth_to_the_ridge_and_is_flat_behind_it():
    shown = plots.roofline(ROOF, "float32", POINTS)
    x, y = (line for line in shown.axes[0].lines[0].get_data())
    assert x[1] == pytest.approx(5) and y[1] == y[2] == pytest.approx(100)  # 100 GFLOP/s / 20 GB/s
    assert y[0] / x[0] == pytest.approx(20)
    assert "ridge at 5.0 FLOP per byte" in repr(shown)
    assert "a: 1 tokens at 0.5 FLOP per byte, 1.0 GFLOP/s, 16 tokens" in repr(shown)


def test_points_lie_at_their_intensity_and_speed_and_carry_their_tokens():
    axis = plots.roofline(ROOF, torch.float32, POINTS).axes[0]
    series = {line.get_label(): line for line in axis.lines}
    assert list(series["a"].get_xdata()) == [0.5, 2, 8, 32, 128]
    assert list(series["a"].get_ydata()) == [1, 4, 16, 64, 256]
    assert {"1", "16", "256"} <= {text.get_text() for text in axis.texts}
    low, high = axis.get_xlim()
    assert low < 0.5 and high > 128, "no point is outside"
    assert "log scale" in axis.get_xlabel() and "log scale" in axis.get_ylabel()


def test_a_chosen_point_alone_carries_its_number():
    assert _named(POINTS["a"], 64) == [(64, 32, 64e9)]
    assert [t for t, *_ in _named([(n, 0, 0) for n in LENGTHS], None)] == [1, 16, 256, 1024]


def test_pictures_leave_the_settings_alone(recwarn):
    before = dict(matplotlib.rcParams)
    rooflines = plots.roofline(ROOF, "bfloat16", POINTS), plots.roofline(ROOF, "float32", POINTS, chosen=4)
    for shown in (bounds(), *rooflines):
        assert shown.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- the explorer -----------------------------------------------------------------------------------------------

def test_flops_and_bytes_by_hand():
    # 2 tokens, 3 inputs, 5 outputs: 2·2·15 FLOP; 15 weights of half a byte, 2·8 inputs and outputs of 4 bytes
    assert cost([(3, 5)], 2, 0.5, 4) == (60, 15 * 0.5 + 16 * 4)
    assert cost([(3, 5), (3, 5)], 2, 0.5, 4) == (120, 2 * (15 * 0.5 + 16 * 4))


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3-8b"])
def test_the_matrices_of_a_layer_are_those_of_the_published_model(name):
    shape = ll.SHAPES[name]
    weights = sum(inputs * outputs for inputs, outputs in layer_matrices(name))
    assert weights == {"smollm2-135m": 3_538_944, "llama-3-8b": 218_103_808}[name]
    assert weights * shape.layers == shape.parts["attention"] + shape.parts["ffn"]


def test_the_flops_are_those_that_torch_counts():
    def layer():
        for inputs, outputs in layer_matrices("llama-3-8b"):
            torch.nn.functional.linear(torch.empty(7, inputs, device="meta"),
                                       torch.empty(outputs, inputs, device="meta"))

    assert cost(layer_matrices("llama-3-8b"), 7, 2, 2)[0] == counted(layer)


def test_moving_the_sliders_moves_the_point_and_says_what_bounds_it():
    explorer = widgets.roofline_explorer(ROOF, "float32", "Llama-3-8B, one matrix", tokens=1, width=4)
    first, controls = explorer.picture.value, explorer.controls
    # 4096·14336 weights of 4 bytes and 18,432 activations: 234.95 MB, 11.7 ms at 20 GB/s
    assert "1 token: 0.117 GFLOP, 235 MB, 0.5 FLOP per byte. Bound by memory bandwidth: at least 11.7 ms" \
        in explorer.words.value
    controls["tokens"].value = 1024  # 120.3 GFLOP at 100 GFLOP/s
    assert "1,024 tokens: 120 GFLOP" in explorer.words.value
    assert "Bound by arithmetic: at least 1,200 ms, at most 851 tokens/s" in explorer.words.value
    assert bytes(explorer.picture.value) != bytes(first) and bytes(explorer.picture.value).startswith(PNG)
    controls["tokens"].value, controls["width"].value = 1, 2  # half the weights' bytes
    assert "Bound by memory bandwidth: at least 5.88 ms" in explorer.words.value
    controls["matrices"].value = "SmolLM2-135M, one layer"
    assert explorer.words.value.startswith("SmolLM2-135M, one layer, 1 token: ")


@pytest.mark.parametrize("matrices", MATRICES)
@pytest.mark.parametrize("width", [4, 2, 1, 0.5])
def test_no_point_is_above_the_roof(matrices, width):
    explorer = widgets.roofline_explorer(ROOF, "float32", matrices, tokens=TOKENS[-1], width=width)
    axis = explorer.twin.axes[0]
    points = next(line for line in axis.lines if line.get_label().startswith(matrices))
    assert len(points.get_xdata()) == len(TOKENS)
    for x, y in zip(*points.get_data()):
        assert y == pytest.approx(min(100, 20 * x))


@pytest.mark.parametrize(("settings", "words"), [
    ({"dtype": "int8"}, "dtype='int8': choose one of float32, bfloat16"),
    ({"tokens": 3}, "tokens=3: choose one of 1, 2"), ({"width": 8}, "width=8: .* 0.5"),
    ({"matrices": "GPT"}, "matrices='GPT': choose one of SmolLM2-135M, one layer")])
def test_what_no_slider_can_show_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        widgets.roofline_explorer(ROOF, **settings)


def test_f1_view_picture_and_words_are_in_one_output():
    data = widgets.roofline_explorer(ROOF)._repr_mimebundle_()
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert "SmolLM2-135M, one layer, 4 tokens: " in data["text/plain"] and "Bound by memory" in data["text/plain"]


# --- what the checks hold for right --------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("change", [{}, {"kv_heads": 9}, {"kv_heads": 1}, {"head_dim": 10}])
def test_the_checks_count_is_torchs_where_both_count_all_pairs(tokens, change):
    model, shape = tiny_model(**change), {**SHAPE, **change}
    dense = counted(lambda: ll.prefill(model, list(range(tokens)), model.new_cache(16)))
    assert checks._flops(shape, tokens, pairs=tokens**2) == dense
    masked = tokens * (tokens - 1) // 2  # pairs that the mask takes away
    per_pair = 4 * shape["heads"] * shape["head_dim"]
    assert checks._flops(shape, tokens) == dense - shape["layers"] * per_pair * masked


def test_no_two_mistakes_of_the_first_case_give_the_same_count():
    shape, T, H, G = checks.SMALL, 4, checks.SMALL["heads"], checks.SMALL["kv_heads"]
    slips = [{}, {"kv": H}, {"kv": G / 2}, {"output": 0}, {"ffn": 2}, {"scores": 0}, {"scores": 2}, {"attend": G},
             {"pairs": T * T}, {"pairs": T * (T - 1) / 2}, {"pairs": T * T / 2}, {"layers": 1}, {"logits": 0},
             {"logits": T}, {"logits": shape["layers"]}, {"logits": T + 1}, {"scores": 0, "logits": T},
             {"width": shape["hidden"]}]
    counts = [checks._flops(shape, T, **slip) for slip in slips]
    assert len({*counts, counts[0] / 2}) == len(slips) + 1


def test_every_token_matters_to_the_small_model_of_the_check():
    model = checks._small_model()
    ids = [(7 * i + 3) % 20 for i in range(8)]
    whole = model(ids)[-1]
    assert (model(ids[4:])[-1] - whole).abs().max() > 0.05, "a prompt read without its first piece must be told apart"
    assert (model([ids[0] + 1, *ids[1:]])[-1] - whole).abs().max() > 1e-2


def in_a_loop(shape, tokens):
    total = 0
    for _ in range(shape["layers"]):
        for name in ("heads", "kv_heads", "kv_heads", "heads"):  # q, k, v, output
            total += 2 * tokens * shape["hidden"] * shape[name] * shape["head_dim"]
        for _ in ("gate", "up", "down"):
            total += 2 * tokens * shape["hidden"] * shape["ffn"]
        for query in range(tokens):
            total += 4 * shape["heads"] * shape["head_dim"] * (query + 1)
    return total + 2 * shape["hidden"] * shape["vocab"]


def from_the_package(shape, tokens):
    return float(ll.Shape(**shape).prefill_flops(tokens))


def as_a_tensor(inputs, outputs, tokens, width):
    moved = torch.tensor([inputs * outputs, tokens * inputs, tokens * outputs], dtype=torch.float64).sum() * width
    return 2 * inputs * outputs * tokens / moved


def by_the_ridge(flops, nbytes, peak, bandwidth):
    return [flops / peak] if flops / nbytes > peak / bandwidth else [nbytes / bandwidth]


def of_tensors(flops, nbytes, peak, bandwidth):
    return torch.tensor([flops / peak, nbytes / bandwidth]).max()


def by_the_package(model, ids, cache, chunk):
    return ll.prefill(model, ids, cache, chunk)


def by_splitting(model, ids, cache, chunk):
    for piece in torch.tensor(ids).split(chunk):
        hidden = model.body(piece, cache)
    return model.head(hidden[-1:])


def with_a_while_loop(model, ids, cache, chunk):
    rest = ids
    while rest:
        logits, rest = model(rest[:chunk], cache), rest[chunk:]
    return logits[-1].tolist()


@pytest.mark.parametrize(("name", "fn"), [
    ("prefill_flops", in_a_loop), ("prefill_flops", from_the_package), ("intensity", as_a_tensor),
    ("least_time", by_the_ridge), ("least_time", of_tensors), ("prefill_in_chunks", by_the_package),
    ("prefill_in_chunks", by_splitting), ("prefill_in_chunks", with_a_while_loop)])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


def test_verdicts_show_no_address_and_no_long_model(capsys):
    def breaks(model, ids, cache, chunk):
        raise KeyError("lost")

    check.prefill_in_chunks(breaks)
    said = capsys.readouterr().out
    assert "for a small model, [3, 10, 17, 4, 11, 18, 5], an empty cache, 3 your function raised KeyError" in said
