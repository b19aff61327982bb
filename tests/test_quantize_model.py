"""Models on packed weights: the logits of their de-quantized weights, as transformers computes them in float32."""

import copy
import importlib

import pytest
import torch
from tiny import as_transformers, feed, ragged, random_ids, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll
from llm_lessons import quantize, quantize_model

packed = importlib.import_module("llm_lessons.packed_linear")

INT8, INT4 = dict(bits=8), dict(bits=4, group_size=32, symmetric=False)
WIDE = dict(hidden=288, head_dim=32, ffn=96)  # 9 query heads on 3 KV heads, in shapes that kernels take
HAS_KERNELS = all(packed._works(kind, "cpu") for kind in (ll.Int4Linear, ll.Int8Linear))
SHAPES = [dict(), dict(tied=False), WIDE, WIDE | dict(tied=False)]
IDS = random_ids(70)  # beyond 64 rows int8 is multiplied in another way


def dequantized(model, **settings):
    """The same model in float32, its weights put on the grid one by one; the table in groups of 96, or one a row."""
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if name in ("embedding.weight", "head.weight"):
            weight.copy_(quantize(weight, 8, {288: 96, 36: 36}[weight.shape[1]]).dequantize())
        elif "norm" not in name:
            weight.copy_(quantize(weight, **settings).dequantize())
    return model


def logits(model, ids):
    with torch.no_grad():
        return as_transformers(model)(torch.tensor([ids])).logits[0]


def distance(ours, expected):
    return float((ours - expected).norm() / expected.norm())


@pytest.fixture(params=["kernels", "plain"])
def kernels(request, monkeypatch):
    """With the kernels that torch has here, and as if it had none."""
    if request.param == "plain":
        monkeypatch.setattr(packed, "_works", lambda kind, device: False)
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=["", "untied", "wide", "wide, untied"])
@pytest.mark.parametrize("settings", [INT8, INT4, dict(bits=4), dict(bits=3), dict(bits=6), dict(bits=8, group_size=4)],
                         ids=str)
def test_logits_are_those_of_the_dequantized_weights(shape, settings, kernels):
    model = tiny_model(**shape)
    if settings.get("group_size") == 32 and "hidden" not in shape:
        settings = settings | dict(group_size=4)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    small = quantize_model(model, **settings)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())

    expected, ours = logits(dequantized(model, **settings), IDS), small(IDS)
    assert ours.shape == expected.shape and ours.dtype == torch.float32
    assert distance(ours, expected) < 0.03  # the tiny model in bfloat16 is 0.015 to 0.02 away
    if settings["bits"] < 8:
        assert distance(logits(model, IDS), expected) > 0.08  # what the grid changed is far more
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 1
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear]) and clear.sum() > 10


@pytest.mark.parametrize("settings, shape, kernel, head", [
    (INT8, WIDE, "int8", "int8"), (INT4, WIDE, "int4", "int8"), (dict(bits=3), WIDE, "plain", "int8"),
    (dict(bits=6), WIDE, "plain", "int8"), (dict(bits=4), WIDE, "plain", "int8"), (INT8, {}, "plain", "plain")])
@pytest.mark.skipif(not HAS_KERNELS, reason="this torch has no kernels for packed weights on this processor")
def test_each_layer_has_the_kernel_for_it(settings, shape, kernel, head):
    small = quantize_model(tiny_model(**shape), **settings)
    for block in small.blocks:
        layers = block.attention.qkv, block.attention.output, block.ffn.gate_up, block.ffn.down
        assert [layer.kernel for layer in layers] == [kernel] * 4
    assert small.head.kernel == head


def test_a_bfloat16_model_is_quantized_too_and_shares_no_memory_with_the_packed_one():
    model = tiny_model(dtype=torch.bfloat16)
    small = quantize_model(model)
    ours, theirs = ({part.data_ptr() for part in (*m.parameters(), *m.buffers())} for m in (small, model))
    assert not ours & theirs
    assert distance(small(IDS), logits(dequantized(copy.deepcopy(model).float(), bits=8), IDS)) < 0.03


# Weights of one layer: qkv (9 + 2·3)·32 · 288, output 288 · 288, gate and up 2·96 · 288, down 288 · 96.
ROWS, WEIGHTS = 480 + 288 + 192 + 288, 480 * 288 + 288 * 288 + 192 * 288 + 288 * 96
NORMS, TABLE = 2 * 7 * 288, 97 * 288


@pytest.mark.parametrize("settings, kernels, expected", [
    (INT8, "kernels", 3 * (WEIGHTS + 2 * ROWS) + TABLE + 2 * 97 * 3 + NORMS),  # scales in bfloat16
    (INT4, "kernels", 3 * (WEIGHTS // 2 + WEIGHTS // 32 * 4) + TABLE + 2 * 97 * 3 + NORMS),
    (INT8, "plain", 3 * (WEIGHTS + 4 * ROWS) + TABLE + 4 * 97 * 3 + NORMS),  # in float32
    (INT4, "plain", 3 * (WEIGHTS // 2 + WEIGHTS // 32 * 8) + TABLE + 4 * 97 * 3 + NORMS),
    (dict(bits=2), "plain", 3 * (WEIGHTS // 4 + 4 * ROWS) + TABLE + 4 * 97 * 3 + NORMS),
    (dict(bits=6), "plain", 3 * (WEIGHTS + 4 * ROWS) + TABLE + 4 * 97 * 3 + NORMS),
], indirect=["kernels"], ids=str)
def test_bytes_are_counted_as_they_are_stored_and_a_tied_table_once_B6(settings, kernels, expected):
    if kernels == "kernels" and not HAS_KERNELS:
        pytest.skip("this torch has no kernels for packed weights on this processor")
    assert quantize_model(tiny_model(**WIDE), **settings).nbytes == expected
    assert (quantize_model(tiny_model(**WIDE, tied=False), **settings).nbytes - expected
            == TABLE + 97 * 3 * (2 if kernels == "kernels" else 4))


def test_float_models_are_counted_by_their_parameters():
    model = tiny_model()  # 3 layers of 60·36 + 36·36 + 80·36 + 36·40 and 2·36, 97·36 and 36
    numbers = 3 * (60 * 36 + 36 * 36 + 80 * 36 + 36 * 40 + 2 * 36) + 97 * 36 + 36
    assert model.nbytes == 4 * numbers and tiny_model(dtype=torch.bfloat16).nbytes == 2 * numbers
    assert tiny_model(tied=False).nbytes == 4 * (numbers + 97 * 36)


# --- A packed model is a model ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [INT8, INT4], ids=str)
@pytest.mark.parametrize("kind", [ll.KVCache, ll.GrowingCache, ll.PagedCache])
def test_reading_in_pieces_with_a_cache_equals_reading_at_once(settings, kind):
    small = quantize_model(tiny_model(**WIDE), **settings)
    expected = small(IDS)
    for sizes in (1, 7, [65, 5], [69, 1]):
        assert distance(feed(small, IDS, sizes, small.new_cache(80, kind=kind)), expected) < 0.03


@pytest.mark.parametrize("settings", [INT8, INT4], ids=str)
def test_rows_of_a_batch_have_the_logits_of_each_alone_D7(settings):
    small = quantize_model(tiny_model(**WIDE), **settings)
    rows = [random_ids(length, seed=length) for length in (2, 5, 9)]
    for starts, lengths, ours in ragged(small, small.new_cache(16, 3), rows, [(1, 3, 8), (1, 2, 0), (0, 0, 1)], 2, 0):
        for row, (start, new) in enumerate(zip(starts, lengths)):
            expected = small(rows[row])[start:start + new]
            assert new == 0 or distance(ours[row, :new], expected) < 0.03


@pytest.mark.parametrize("settings", [INT8, INT4, dict(bits=3)], ids=str)
def test_prefill_decode_and_generate_run_in_and_out_of_inference_mode(settings):
    with torch.inference_mode():
        inside = quantize_model(tiny_model(**WIDE), **settings)
    for small in (quantize_model(tiny_model(**WIDE), **settings), inside):
        cache = small.new_cache(32)
        first = ll.prefill(small, IDS[:9], cache)
        then = ll.decode(small, int(first.argmax()), cache)
        expected = small([*IDS[:9], int(first.argmax())])
        assert distance(first, expected[8]) < 0.03 and distance(then, expected[9]) < 0.03
        written = list(ll.generate(small, IDS[:9], max_new_tokens=6))
        with torch.inference_mode():
            assert len(written) == 6 and list(ll.generate(small, IDS[:9], max_new_tokens=6)) == written
            assert distance(small(IDS), small(IDS).clone()) == 0


@pytest.mark.parametrize("settings", [INT8, INT4, dict(bits=3)], ids=str)
def test_a_packed_model_can_be_traced_copied_listed_and_moved(settings):
    small = quantize_model(tiny_model(**WIDE), **settings)
    expected = small(IDS[:20])
    seen = ll.trace(small, IDS[:20])
    torch.testing.assert_close(seen.logits, expected, rtol=0.05, atol=0.3)
    torch.testing.assert_close(seen.attention(2).sum(-1), torch.ones(9, 20), rtol=0, atol=0.02)
    assert small.to("cpu") is small and small.device.type == "cpu"
    other = copy.deepcopy(small)
    assert other.nbytes == small.nbytes and other.head is other.embedding.table  # still in memory once
    other.load_state_dict({name: part.clone() for name, part in small.state_dict().items()})
    for model in (small, other):
        torch.testing.assert_close(model(IDS[:20]), expected, rtol=0.05, atol=0.3)
    small.to("meta")
    assert {part.device.type for part in (*small.parameters(), *small.buffers())} == {"meta"}


def test_the_shape_of_a_packed_model_is_that_of_the_model():
    model = tiny_model(**WIDE)
    small = quantize_model(model, **INT4)
    assert ll.Shape.of(small) == ll.Shape.of(model) and small.config == model.config
    assert ll.Shape.of(small).parameters == 3 * WEIGHTS + TABLE + NORMS // 2
    assert not any(weight.requires_grad for weight in (*small.parameters(), *small.buffers()))


# --- Refusals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["blocks.1.ffn.down", "blocks.0.attention.qkv", "embedding", "head"])
def test_weights_without_a_place_on_a_grid_are_refused_by_the_layers_name(name, bad):
    model = tiny_model(tied=name != "head")
    model.get_submodule(name).weight[-1, -1] = bad
    for settings in (INT8, INT4 | dict(group_size=4), dict(bits=3)):
        with pytest.raises(ValueError, match=f"^{name}: the values to quantize hold NaN or infinity"):
            quantize_model(model, **settings)


def test_groups_that_do_not_divide_are_refused_by_the_layers_name():
    with pytest.raises(ValueError, match="^blocks.0.attention.qkv: 36 columns do not divide into groups of 32"):
        quantize_model(tiny_model(), **INT4)
    with pytest.raises(ValueError, match="^blocks.0.ffn.down: 40 columns do not divide into groups of 9"):
        quantize_model(tiny_model(), group_size=9)


@pytest.mark.parametrize("bits", [1, 0, 9, "4", 4.0, None, True])
def test_bits_that_no_byte_holds_are_refused_before_any_work(bits, monkeypatch):
    monkeypatch.setattr(packed, "quantize", None)
    with pytest.raises(ValueError, match="^bits must be"):
        quantize_model(tiny_model(), bits)


def test_what_is_no_float_model_is_refused():
    model = tiny_model()
    for given in (quantize_model(model), as_transformers(model), model.head, None, "smollm2-135m"):
        with pytest.raises(ValueError, match="quantize_model takes a model with float weights"):
            quantize_model(given)
