"""Grids and bytes: values land on the nearest step and come back, whatever the weights are.

Expected codes are worked out by hand; what holds for all weights is recomputed in float64 from codes and scales.
"""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from llm_lessons import QuantizedTensor, pack, quantize, unpack
from llm_lessons.quantize import concatenate, regroup

LARGEST = torch.finfo(torch.float32).max

pytestmark = pytest.mark.filterwarnings("error")


def values(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_grid(q):
    """The values in float64, from the parts of a quantized tensor."""
    codes = q.codes.double().unflatten(-1, (q.scale.shape[-1], -1))
    grid = codes * q.scale.double()[..., None]
    return (grid if q.minimum is None else grid + q.minimum.double()[..., None]).flatten(-2)


def check_nearest(weight, q):
    """Every value is at most half a step from the grid's and from what comes back, but for float32's own rounding."""
    step = q.scale.double().repeat_interleave(q.group_size, dim=-1)
    rounding = 2.0**-22 * weight.double().abs().unflatten(-1, (-1, q.group_size)).amax(-1)
    for grid in (on_grid(q), q.dequantize().double()):
        assert grid.isfinite().all()
        error = (grid - weight.double()).abs()
        assert (error <= step / 2 * (1 + 1e-5) + rounding.repeat_interleave(q.group_size, dim=-1)).all()


# --- E1: weights that leave no grid -----------------------------------------------------------------------------------

def test_a_row_of_zeros_stays_zero_and_its_scale_is_finite_E1():
    q = quantize(values([0, 0, 0], [1, -2, .5]))
    assert q.codes.tolist() == [[0, 0, 0], [64, -127, 32]]
    torch.testing.assert_close(q.dequantize(), values([0, 0, 0], [1.00787, -2, .503937]), rtol=0, atol=1e-5)
    assert q.scale.isfinite().all() and (q.scale > 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_float16_weights_whose_scale_would_be_zero_in_float16_E1(symmetric):
    tiny = torch.full((2, 4), 1e-6, dtype=torch.float16)  # 1e-6 / 127 rounds to 0 in float16
    q = quantize(tiny, symmetric=symmetric)
    assert q.scale.dtype == torch.float32 and (q.scale > 0).all()
    torch.testing.assert_close(q.dequantize(), tiny.float())


@pytest.mark.parametrize("flush", [False, True], ids=["", "tiny numbers become 0"])
def test_a_constant_row_comes_back_on_an_asymmetric_grid_E1(flush):
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        q = quantize(values([5, 5, 5, 5], [0, 0, 0, 0], [-3, -3, -3, -3]), symmetric=False)
        assert q.codes.tolist() == [[0] * 4] * 3 and q.scale.isfinite().all()
        assert q.dequantize().tolist() == [[5.0] * 4, [0.0] * 4, [-3.0] * 4]
        check_nearest(values([0, 2.4e-38]), quantize(values([0, 2.4e-38]), symmetric=False))  # half a step is not yet 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bits", range(2, 9))
def test_one_sided_weights_use_every_step_of_an_asymmetric_grid(bits):
    last = 2**bits - 1
    for sign in (1, -1):
        steps = torch.arange(last + 1.0)[None]
        weight = 10 * sign + steps * 2
        q = quantize(weight, bits, symmetric=False)
        assert torch.equal(q.codes, steps.to(torch.int16)) and torch.equal(q.dequantize(), weight)
        assert (q.scale.item(), q.minimum.item()) == (2, 10 * sign)


@pytest.mark.parametrize("weight", [
    [LARGEST, -LARGEST, 0], [LARGEST, LARGEST], [-LARGEST, 1], [1e38, -3e38, 2e38], [1e-40, -1e-40, 0], [1e-45, 0],
    [2e-38, 1e-38], [1e-20, 1e20], [LARGEST, 1e-45], [0.0, -0.0]], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_and_the_smallest_numbers_stay_on_a_finite_grid(weight, symmetric):
    for bits in range(2, 9):
        q = quantize(values(weight), bits, symmetric=symmetric)
        assert q.scale.isfinite().all() and (q.scale > 0).all()
        check_nearest(values(weight), q)


# --- E3, S4: the end of the grid and the middle between two steps -----------------------------------------------------

def test_the_symmetric_grid_has_as_many_steps_on_either_side_E3():
    q = quantize(values([-1, 1, .5]))
    assert q.codes.tolist() == [[-127, 127, 64]]  # 63.5 is half-way: the even one
    assert q.scale.item() == pytest.approx(1 / 127) and q.dequantize()[0, :2].tolist() == pytest.approx([-1, 1])
    for bits in range(2, 9):  # 2 bits: -1, 0, 1
        codes = quantize(values([-3, 3, -3, 0]), bits).codes[0].tolist()
        assert codes == [1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1, 1 - 2 ** (bits - 1), 0]


def test_no_value_wraps_around_to_the_other_sign_E3():
    for weight in (values([128, 127.6, -128, -127.6]), values([127.6, 127.5]), values([1, 1 - 2**-24, -1])):
        for bits in range(2, 9):
            back = quantize(weight, bits).dequantize()
            assert torch.equal(back.sign(), weight.sign())


def test_weights_that_lay_on_a_grid_of_16_steps_need_its_minimum_to_come_back_E3():
    weight = torch.arange(-8.0, 8)[None] * 0.1
    torch.testing.assert_close(quantize(weight, 4, symmetric=False).dequantize(), weight)
    changed = (quantize(weight, 4).dequantize() - weight).abs()  # steps of .8 / 7 instead of .1
    assert (changed > 1e-6).sum() == 14 and changed.max().item() == pytest.approx(0.0571, abs=1e-4)


def test_codes_are_numbers_that_absolute_values_and_errors_can_be_taken_of_E3():
    lowest = QuantizedTensor(torch.zeros(1, 2, dtype=torch.uint8), values([0.5]), None, 2, 8)  # as files may have it
    assert lowest.codes.abs().tolist() == [[128, 128]] and lowest.dequantize().tolist() == [[-64, -64]]


def test_half_way_between_two_steps_the_even_one_is_taken_S4():
    halves = [.5, 1.5, 2.5, -.5, -1.5, -2.5]
    assert quantize(values([*halves, 127])).codes.tolist() == [[0, 2, 2, 0, -2, -2, 127]]
    assert quantize(values([*halves, 7]), 4).codes.tolist() == [[0, 2, 2, 0, -2, -2, 7]]
    above = quantize(values([0, .5, 1.5, 2.5, 255]), symmetric=False)
    assert above.codes.tolist() == [[0, 0, 2, 2, 255]]


# --- All weights ------------------------------------------------------------------------------------------------------

finite = st.one_of(st.floats(-end, end, width=32) for end in (LARGEST, 10, 2.0**-130))
grids = dict(bits=st.integers(2, 8), symmetric=st.booleans())


@given(st.lists(st.tuples(*[finite] * 6), min_size=1, max_size=4), st.sampled_from([None, 1, 2, 3, 6]),
       grids["bits"], grids["symmetric"])
def test_every_error_is_at_most_half_a_step(rows, group_size, bits, symmetric):
    weight = torch.tensor(rows)
    before = weight.clone()
    q = quantize(weight, bits, group_size, symmetric)
    assert torch.equal(weight, before) and q.shape == weight.shape and q.group_size == (group_size or 6)
    assert q.symmetric == symmetric and q.scale.shape == (len(rows), 6 // q.group_size)
    check_nearest(weight, q)
    if symmetric:  # the scale is as small as can be
        largest = weight.unflatten(-1, (-1, q.group_size)).abs().amax(-1).double()
        assert (q.scale.double() * (2 ** (bits - 1) - 1) <= largest * (1 + 1e-6) + 1e-35).all()


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=9), grids["bits"], grids["symmetric"])
def test_what_came_from_a_grid_is_quantized_to_the_same_codes(row, bits, symmetric):
    assume(max(row) - min(row) > 1e-4)  # else float32 has no room for the steps beside the minimum
    first = quantize(values(row), bits, symmetric=symmetric)
    again = quantize(first.dequantize(), bits, symmetric=symmetric)
    assert torch.equal(first.codes, again.codes)
    torch.testing.assert_close(first.dequantize(), again.dequantize())


@given(st.integers(2, 8), st.integers(0, 3), st.integers(0, 9), st.data())
def test_packed_codes_are_unpacked_exactly(bits, rows, columns, data):
    drawn = st.lists(st.integers(0, 2**bits - 1), min_size=rows * columns, max_size=rows * columns)
    codes = torch.tensor(data.draw(drawn), dtype=torch.int64).reshape(rows, columns)
    packed = pack(codes, bits, data.draw(st.integers(0, 2**bits - 1)))
    share = {2: 4, 3: 2, 4: 2}.get(bits, 1)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, math.ceil(columns / share))
    assert unpack(packed, columns, bits).tolist() == codes.tolist()


# --- E4: bytes --------------------------------------------------------------------------------------------------------

def test_each_row_of_odd_length_ends_in_a_padded_byte_of_its_own_E4():
    weight = torch.tensor([[1, -2, 3], [4, -5, 6]])
    packed = pack(weight + 8, 4, padding=8)
    assert packed.tolist() == [[0x69, 0x8B], [0x3C, 0x8E]]
    assert (unpack(packed, 3, 4).int() - 8).tolist() == weight.tolist()
    q = QuantizedTensor(packed, torch.ones(2, 1), None, 3, 4)
    assert q.codes.tolist() == q.dequantize().tolist() == weight.tolist()  # 0xE is 6, neither -2 nor 14


def test_quantize_pads_with_the_code_of_zero_or_of_the_minimum_and_counts_it_E4():
    q = quantize(values([1, -7, 3], [4, -5, 7]), 4)  # the step is 1
    assert q.packed.tolist() == [[0x19, 0x8B], [0x3C, 0x8F]] and q.nbytes == 2 * 2 + 2 * 4
    assert quantize(values([0, 15, 3]), 4, symmetric=False).packed.tolist() == [[0xF0, 0x03]]
    one = quantize(values([7.0], [-3.0]), 4)
    assert one.packed.tolist() == [[0x8F], [0x81]] and one.dequantize().tolist() == [[7], [-3]]


@pytest.mark.parametrize("bits, codes, packed", [
    (2, [3, 2, 1, 0, 1], [0b00_01_10_11, 0b01]), (3, [7, 1, 2], [0b001_111, 0b010]), (4, [0xA, 0xB], [0xBA]),
    (5, [31, 1], [31, 1]), (8, [255, 0], [255, 0])])
def test_the_first_code_is_in_the_lowest_bits(bits, codes, packed):
    assert pack(torch.tensor(codes), bits).tolist() == packed


def test_bytes_are_those_of_codes_scales_and_minima():
    weight = random(6, 64)
    assert quantize(weight).nbytes == 6 * 64 + 6 * 4
    assert quantize(weight, 4, 32).nbytes == 6 * 32 + 6 * 2 * 4
    assert quantize(weight, 4, 32, symmetric=False).nbytes == 6 * 32 + 6 * 2 * 4 * 2
    assert quantize(weight.reshape(1, -1), 2).nbytes == 6 * 16 + 4  # a whole tensor with one scale
    assert quantize(weight, 3).nbytes == 6 * 32 + 6 * 4  # two of 3 bits in a byte
    assert quantize(weight, 6).nbytes == 6 * 64 + 6 * 4


def test_codes_that_do_not_fit_and_bytes_that_are_not_theirs_are_refused():
    for codes in (torch.tensor([-7, 7]), torch.tensor([16]), torch.tensor([[float("nan")]])):
        with pytest.raises(ValueError, match="codes of 4 bits are whole numbers from 0 to 15.*add 8"):
            pack(codes, 4)
    for codes in (torch.tensor([[1.5, 2.9]]), torch.tensor([1, 15.5])):
        with pytest.raises(ValueError, match="codes of 4 bits are whole numbers from 0 to 15, not from 1"):
            pack(codes, 4)
    for codes in ([1, 2], torch.tensor(3), torch.ones(2, dtype=torch.complex64), None):
        with pytest.raises(ValueError, match="codes must be a tensor"):
            pack(codes, 4)
    for packed in (torch.zeros(3, 2), torch.ones(3, 2).to(torch.int8), torch.tensor(3, dtype=torch.uint8), [[1, 2]]):
        with pytest.raises(ValueError, match="packed must be a tensor .* of torch.uint8"):
            unpack(packed, 4, 4)
    for columns in (-1, 2.0, "4", None):
        with pytest.raises(ValueError, match=f"columns must be a whole number of at least 0, not {columns!r}"):
            unpack(torch.zeros(3, 0, dtype=torch.uint8), columns, 4)
    for columns in (2, 5):
        with pytest.raises(ValueError, match=f"{columns} codes of 4 bits fill {(columns + 1) // 2} bytes, not 2"):
            unpack(torch.zeros(3, 2, dtype=torch.uint8), columns, 4)


# --- Groups, layouts, refusals ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_group_is_quantized_as_if_it_were_alone(bits, symmetric):
    weight = random(2, 3, 12)
    q = quantize(weight, bits, 4, symmetric)
    assert q.shape == (2, 3, 12) and q.scale.shape == (2, 3, 3)
    for group in range(3):
        alone = quantize(weight[..., 4 * group:4 * group + 4].contiguous(), bits, None, symmetric)
        assert torch.equal(q.codes[..., 4 * group:4 * group + 4], alone.codes)
        assert torch.equal(q.scale[..., group], alone.scale[..., 0])


def test_any_layout_and_precision_is_read():
    weight = random(6, 8)
    expected = quantize(weight).codes
    for same in (weight.double(), weight.T.contiguous().T, weight.clone().requires_grad_()):
        q = quantize(same)
        assert torch.equal(q.codes, expected) and not q.scale.requires_grad
    for half in (weight.half(), weight.bfloat16()):
        assert torch.equal(quantize(half).codes, quantize(half.float()).codes)
    assert quantize(weight[0]).codes.tolist() == expected[0].tolist() and quantize(weight[0]).shape == (8,)
    assert torch.equal(quantize(weight, 4, 4, False).to("cpu").dequantize(), quantize(weight, 4, 4, False).dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_without_a_place_on_any_grid_are_refused(bad):
    for symmetric in (True, False):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(values([1, 2], [3, bad]), symmetric=symmetric)
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(values([1, 1e300], dtype=torch.float64))  # beyond float32


@pytest.mark.parametrize("weight, what", [
    (torch.ones(2, 0), r"\[2, 0\] of torch.float32"), (torch.ones(0, 2), r"\[0, 2\]"), (torch.tensor(1.0), r"\[\]"),
    (torch.ones(2, dtype=torch.int8), r"\[2\] of torch.int8"), (torch.ones(2) > 0, r"\[2\] of torch.bool"),
    (torch.ones(2, dtype=torch.complex64), r"\[2\] of torch.complex64"), ([[1.0]], r"\[\[1.0\]\]")], ids=str)
def test_what_is_no_tensor_of_numbers_is_refused(weight, what):
    with pytest.raises(ValueError, match=f"takes a tensor .* of floating-point numbers, not {what}"):
        quantize(weight)
    for symmetric in ("no", None, 1):
        with pytest.raises(ValueError, match=f"symmetric must be True or False, not {symmetric!r}"):
            quantize(torch.ones(2, 2), symmetric=symmetric)


@pytest.mark.parametrize("bits", [1, 0, -4, 9, 16, "4", 4.0, True, None])
def test_bits_that_no_byte_holds_are_refused(bits):
    for call in (lambda: quantize(torch.ones(2, 2), bits), lambda: pack(torch.ones(2, 2), bits),
                 lambda: unpack(torch.ones(2, 2, dtype=torch.uint8), 2, bits)):
        with pytest.raises(ValueError, match="bits must be"):
            call()


def test_groups_that_do_not_divide_the_columns_are_refused():
    for size in (32, 5, 37, 72):
        with pytest.raises(ValueError, match=f"36 columns do not divide into groups of {size}: choose a divisor of 36"):
            quantize(torch.ones(2, 36), group_size=size)
    for size in (0, -1, 2.0, "32", True):
        with pytest.raises(ValueError, match="group_size must be a whole number"):
            quantize(torch.ones(2, 36), group_size=size)


@pytest.mark.parametrize("kind", [dict(), dict(bits=4, group_size=3), dict(bits=4, group_size=3, symmetric=False)])
def test_matrices_are_joined_row_by_row(kind):
    parts = [random(rows, 9, seed=rows) for rows in (1, 4, 2)]
    whole = concatenate([quantize(part, **kind) for part in parts])
    expected = quantize(torch.cat(parts), **kind)
    assert whole.shape == (7, 9) and torch.equal(whole.dequantize(), expected.dequantize())
    for other in (quantize(random(1, 9), bits=5), quantize(random(1, 8)), quantize(random(1, 9), 8, 1)):
        with pytest.raises(ValueError, match="quantized in different ways"):
            concatenate([whole, other])


@pytest.mark.parametrize("kind", [dict(group_size=2), dict(bits=4, group_size=2, symmetric=False), dict(bits=3)])
@pytest.mark.parametrize("rows", [1, 1023, 1025])
def test_other_groups_lose_at_most_half_a_step_of_theirs(kind, rows):
    weight = quantize(random(rows, 6), **kind)
    new = regroup(weight, 3)
    assert (new.bits, new.symmetric, new.group_size, new.shape) == (8, True, 3, (rows, 6))
    check_nearest(weight.dequantize(), new)
