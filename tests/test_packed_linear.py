"""Packed layers: the products of their weights, whichever kernel they use; no kernel gets what it does not take.

Expected products are computed in float64 from the de-quantized weights. Whole models: test_quantize_model.py.
"""

import importlib

import pytest
import torch
from tiny import one_thread as one_thread

from llm_lessons import Int4Linear, Int8Linear, PackedLinear, QuantizedTensor, quantize
from llm_lessons.packed_linear import PackedTable, packed_linear

packed = importlib.import_module("llm_lessons.packed_linear")

INT8, INT4 = dict(bits=8), dict(bits=4, group_size=32, symmetric=False)
KINDS = {
    "int8": INT8, "int8 by 32": dict(bits=8, group_size=32), "int8, asymmetric": dict(bits=8, symmetric=False),
    "int4": INT4, "int4, symmetric": dict(bits=4, group_size=32), "int4 by 64": INT4 | dict(group_size=64),
    "int4 by 64, symmetric": dict(bits=4, group_size=64), "3 bits": dict(bits=3)}
needs_kernels = pytest.mark.skipif(not all(packed._works(kind, "cpu") for kind in (Int4Linear, Int8Linear)),
                                   reason="this torch has no kernels for packed weights on this processor")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(*shape, seed=1):
    return random(*shape, seed=seed).to(torch.bfloat16)


@pytest.fixture
def plain(monkeypatch):
    """As if torch had no kernel."""
    monkeypatch.setattr(packed, "_works", lambda kind, device: False)


def check_product(layer, weight, x, dtype=torch.bfloat16):
    """bfloat16 rounds scales, weights and sums by 2^-9 each at most: that much of |x| |W| everywhere, less together."""
    y, x, weight = layer(x), x.double(), weight.dequantize().double()
    expected, size = x @ weight.T, (x.square() @ weight.square().T).sqrt()
    assert y.shape == expected.shape and y.dtype == dtype
    error = (y.double() - expected).abs()
    assert (error <= 2**-7 * (x.abs() @ weight.abs().T)).all() and error.norm() <= 2**-7 * size.norm()


# --- Layers -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 2, 5, 63, 64, 65, 513])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_weights(kind, rows):
    for outputs, inputs in ((16, 64), (48, 192), (96, 576)):
        weight = quantize(random(outputs, inputs), **KINDS[kind])
        layer = packed_linear(weight)
        assert layer.kernel in ("plain", kind[:4])
        check_product(layer, weight, vectors(rows, inputs))


@needs_kernels
def test_the_fastest_layer_that_fits_is_chosen():
    chosen = {kind: packed_linear(quantize(random(32, 64), **settings)).kernel for kind, settings in KINDS.items()}
    assert chosen == {"int8": "int8", "3 bits": "plain", "int8 by 32": "plain", "int8, asymmetric": "plain",
                      **dict.fromkeys(("int4", "int4, symmetric", "int4 by 64", "int4 by 64, symmetric"), "int4")}


@pytest.mark.parametrize("settings", [INT8, INT4, dict(bits=3)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 80])
def test_vectors_may_come_in_any_shape_and_layout(settings, rows):
    """The int8 kernel for CPUs ends the process where its rows do not begin at a multiple of 32 bytes."""
    weight = quantize(random(32, 64), **settings)
    layer, wide = packed_linear(weight), vectors(2 * rows, 3, 192)
    for x in (wide[0, 0, :64], wide[0, :, :64], wide[:, :, 64:128], wide[..., 1:65], wide[0, 0, 5:69],
              wide[::2, 1, ::3], wide[:, 1, 7:135:2], vectors(64, rows).T, vectors(3, 64, rows).mT,
              wide[:1, :1, :64].expand(2, rows, 64), wide[:0, 0, :64], vectors(2, rows, 2, 3, 64)):
        check_product(layer, weight, x)
        with torch.inference_mode():
            check_product(layer, weight, x)


@needs_kernels
@pytest.mark.parametrize("settings", [INT8, INT4], ids=str)
def test_vectors_of_another_length_or_precision_are_refused(settings):
    layer = packed_linear(quantize(random(32, 64), **settings))
    for x in (vectors(3, 128), vectors(3, 32), vectors(128), random(3, 64), random(3, 64).half(), random(80, 64)):
        with pytest.raises(ValueError, match=r"takes bfloat16 vectors \[\.\.\., 64\], not \["):
            layer(x)


@pytest.mark.parametrize("outputs, inputs", [(7, 36), (33, 36), (1, 1), (3, 16), (17, 32), (31, 48), (5, 32), (8, 80)])
@pytest.mark.parametrize("settings", [INT8, dict(bits=4), INT4], ids=str)
def test_shapes_that_no_kernel_takes_are_multiplied_the_plain_way(outputs, inputs, settings):
    """36 columns: the int8 kernel reads 16 at a time, beyond the end of the row."""
    if inputs % settings.get("group_size", 1):
        settings = settings | dict(group_size=None)
    weight = quantize(random(outputs, inputs), **settings)
    layer = packed_linear(weight)
    if inputs % 32 or settings["bits"] == 4:
        assert layer.kernel == "plain"
    for rows in (1, 2, 65):
        check_product(layer, weight, vectors(rows, inputs))


@pytest.mark.parametrize("settings", [INT8, INT4], ids=str)
@pytest.mark.parametrize("weight", [
    torch.zeros(32, 64), torch.full((32, 64), 5.0), random(32, 64) * 1e-20, random(32, 64) * 1e30,
    random(32, 64).abs(), torch.cat((random(31, 64), torch.zeros(1, 64)))],
    ids=["zeros", "constant", "tiny", "huge", "one-sided", "a row of zeros"])
def test_weights_of_any_size_are_multiplied(weight, settings):
    weight = quantize(weight, **settings)
    for rows in (2, 70):
        check_product(packed_linear(weight), weight, vectors(rows, 64))


@needs_kernels
def test_a_group_from_the_lowest_to_the_highest_number_has_a_finite_scale_and_offset():
    weight = quantize(torch.tensor([[-3.3e38, 3.3e38] * 16] * 16), **INT4)
    assert Int4Linear(weight).scale_and_offset.isfinite().all()  # 8 steps of 4.4e37 would be infinite


@pytest.mark.parametrize("bits", [4, 8])
def test_the_lowest_code_of_a_byte_is_multiplied_too_E3(bits):
    codes = torch.full((32, 64 * bits // 8), 0, dtype=torch.uint8)  # -128, or -8: other people's grids have them
    weight = QuantizedTensor(codes, torch.ones(32, 1 if bits == 8 else 2), None, 64, bits)
    for rows in (1, 64):
        y = packed_linear(weight)(torch.ones(rows, 64, dtype=torch.bfloat16))
        assert torch.equal(y, torch.full((rows, 32), -64.0 * 2 ** (bits - 1), dtype=torch.bfloat16))


@pytest.mark.parametrize("settings", [INT8, INT4, dict(bits=8, group_size=32)], ids=str)
def test_without_a_kernel_the_plain_way_gives_the_same(settings, plain):
    weight = quantize(random(48, 64), **settings)
    layer = packed_linear(weight)
    assert type(layer) is PackedLinear and layer.kernel == "plain"
    check_product(layer, weight, vectors(5, 64))
    ids = torch.tensor([[3, 47], [0, 3]])
    torch.testing.assert_close(layer.rows(ids).float(), weight.dequantize()[ids], rtol=2**-8, atol=0)


def test_rows_of_a_table_are_the_dequantized_ones():
    weight = quantize(random(97, 288), 8, 96)
    table = PackedTable(weight)
    ids = torch.tensor([[0, 96, 5], [5, 5, 1]])
    torch.testing.assert_close(table.rows(ids).float(), weight.dequantize()[ids], rtol=2**-7, atol=0)
    for x in (vectors(288), vectors(3, 288), vectors(2, 70, 288)):
        check_product(table, weight, x, torch.float32)


# --- Which kernels are used -------------------------------------------------------------------------------------------

@pytest.fixture
def ask_again():
    packed._works.cache_clear()
    yield
    packed._works.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, TypeError, AttributeError])
@pytest.mark.parametrize("name, settings", [("_weight_int8pack_mm", INT8), ("_weight_int4pack_mm_for_cpu", INT4),
                                            ("_convert_weight_to_int4pack_for_cpu", INT4)])
def test_a_kernel_that_is_absent_or_raises_is_not_used(name, settings, error, monkeypatch, ask_again):
    def raising(*arguments):
        raise error("no such kernel")

    if error is AttributeError:
        monkeypatch.delattr(torch, name, raising=False)
    else:
        monkeypatch.setattr(torch, name, raising, raising=False)
    weight = quantize(random(32, 64), **settings)
    assert packed_linear(weight).kernel == "plain"
    check_product(packed_linear(weight), weight, vectors(3, 64))


@pytest.mark.parametrize("wrong", [lambda y: y * 1.05, lambda y: y.roll(1, 0), lambda y: y.fill_(float("nan"))])
@pytest.mark.parametrize("name, settings", [("_weight_int8pack_mm", INT8), ("_weight_int4pack_mm_for_cpu", INT4)])
def test_a_kernel_that_gives_wrong_numbers_is_not_used(name, settings, wrong, monkeypatch, ask_again):
    weight = quantize(random(32, 64), **settings)
    right = getattr(torch, name, None)
    if right is None or packed_linear(weight).kernel == "plain":
        pytest.skip("this torch has no such kernel here")
    packed._works.cache_clear()
    monkeypatch.setattr(torch, name, lambda *arguments: wrong(right(*arguments)))
    assert packed_linear(weight).kernel == "plain"


class OnGPU:
    """Codes that say they are on a GPU."""

    device = torch.device("cuda")

    def __init__(self, codes):
        self.codes, self.shape = codes, codes.shape

    def __getitem__(self, key):
        return self.codes[key]


@pytest.mark.parametrize("columns, tiles", [(64, 4), (128, 4), (32, 2), (96, 2)])
def test_codes_for_a_gpu_are_packed_two_to_a_byte_the_first_in_the_high_bits(columns, tiles, monkeypatch):
    """What torch asks for: https://github.com/pytorch/pytorch/pull/129940, and 16 · tiles must divide the columns."""
    calls = []
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda *arguments: calls.append(arguments), raising=False)
    codes = torch.arange(16 * columns).reshape(16, columns).remainder(16).to(torch.uint8)
    packed._pack_int4(OnGPU(codes))
    (pairs, inner_tiles), = calls
    assert pairs.dtype == torch.uint8 and pairs.shape == (16, columns // 2) and inner_tiles == tiles
    assert pairs[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_a_layer_moves_as_a_whole_and_its_bytes_are_counted_once():
    weight = quantize(random(8, 6), 4, 3, symmetric=False)
    layer = packed_linear(weight)
    assert sum(part.nbytes for part in layer.buffers()) == weight.nbytes == 8 * 3 + 8 * 2 * 4 * 2
    away = layer.to("meta")  # a device that every machine has
    assert {part.device.type for part in (*away.buffers(), away.weight.packed, away.weight.scale)} == {"meta"}
    assert away(torch.ones(2, 6, dtype=torch.bfloat16, device="meta")).shape == (2, 8)
