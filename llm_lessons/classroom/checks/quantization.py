"""Lesson 08: a grid for each row, a block of a real file, two codes in a byte, and a product of whole numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from .core import Wrong, as_tensor, compare, exercise

# --- A grid for each row ----------------------------------------------------------------------------------------------

ROWS = (  # bits, weight [rows, columns]; no value lies half-way between two steps
    (8, [[0.9, -2.0, 0.6, 0.2], [0.0, 0.0, 0.0, 0.0], [0.3, 0.1, -0.05, 0.2]]),
    (4, [[0.42, -1.4, 0.05, 0.85], [7.0, 3.2, -6.9, 0.4]]),
    (4, [[0.0, 0.0]]),
    (2, [[-0.9, 0.2, 0.7], [3.0, -1.0, 2.0]]),
    (4, [[2e-4, -9e-5, 5e-5, 1.5e-4], [0.42, -1.4, 0.05, 0.85]]),  # a row of small numbers has small steps
)


@exercise
def quantize_rows(answer: Callable) -> None:
    """`answer(weight, bits)`: [rows, columns] -> codes [rows, columns], -(2^(bits-1) - 1) and up, and scale [rows]."""
    for bits, rows in ROWS:
        weight, last = torch.tensor(rows), 2 ** (bits - 1) - 1
        case = f"for {rows} and {bits} bits:"
        got = answer(weight, bits)
        if isinstance(got, (Tensor, dict)) or not hasattr(got, "__len__") or len(got) != 2:
            raise Wrong("return two things, the codes and the scales: `return codes, scale`")
        codes, scale = as_tensor(got[0], "the codes"), as_tensor(got[1], "the scales")
        largest = weight.double().abs().amax(1)
        if codes.shape != weight.shape and scale.shape == weight.shape:
            raise Wrong(f"{case} codes and scales are exchanged: return the codes first")
        if codes.shape != weight.shape:
            raise Wrong(f"{case} the codes should have the shape {list(weight.shape)}, not {list(codes.shape)}")
        _scales(case, scale, largest, last, weight)
        _codes(case, codes, weight.double(), (largest / last)[:, None], last)


def _scales(case: str, scale: Tensor, largest: Tensor, last: int, weight: Tensor) -> None:
    """Are these one scale a row, largest / last, and above 0 where the row is all zeros?"""
    rows, zero = len(largest), largest == 0
    if scale.numel() == 1 and rows > 1:
        raise Wrong(f"{case} there is one scale for all rows: give each row its own, .amax(dim=1) instead of .max()")
    if scale.numel() == weight.shape[1] and scale.numel() != rows:
        raise Wrong(f"{case} these are scales of columns: a row is weight[i], so its largest is .amax(dim=1)")
    if scale.numel() != rows:
        raise Wrong(f"{case} there should be {rows} scales, one for each row, not {list(scale.shape)}")
    scale = scale.reshape(rows)
    if not scale.isfinite().all():
        raise Wrong(f"{case} a scale is not finite: what is the scale of a row of zeros?")
    if (scale[zero] <= 0).any():
        raise Wrong(f"{case} the scale of the row of zeros is {scale[zero][0]:g}: it must be above 0, or dividing by "
                    f"it gives NaN. Any number above 0 will do: .clamp_min(1e-12)")
    got, want = scale[~zero], (largest / last)[~zero]
    signed = weight.double().amax(1)[~zero] / last
    for words, other in {
            "they are upside down: value = code · scale, so scale = largest / last code": 1 / want,
            "the largest value lies on step 2^(bits-1), and the last code is one less: divide by 2^(bits-1) - 1":
                want * last / (last + 1),
            "they divide by the number of all steps: the codes run to either side of 0, to ±(2^(bits-1) - 1)":
                want * last / (2 * last + 1),
            "this is the largest |value| itself: divide it by the last code, 2^(bits-1) - 1": want * last}.items():
        if torch.allclose(got, other, rtol=1e-3, atol=0) and not torch.allclose(other, want, rtol=1e-3, atol=0):
            raise Wrong(f"{case} the scales are wrong: {words}")
    if torch.allclose(got, signed, rtol=1e-3) and not torch.allclose(signed, want, rtol=1e-3):
        raise Wrong(f"{case} the scales come from the largest value: a negative one may be larger in size. Take .abs()")
    if not torch.allclose(got, want, rtol=1e-3, atol=0):
        at = int((got / want - 1).abs().argmax())
        if largest[~zero][at] < 1e-3 and got[at] > want[at]:
            raise Wrong(f"{case} the scale of the row of small numbers is {got[at]:.4g}, and should be {want[at]:.4g}: "
                        f"what you keep it above is too large, and flattens the row. .clamp_min(1e-12)")
        raise Wrong(f"{case} a scale is {got[at]:.4g}, and should be {want[at]:.4g}: the row's largest |value| lies on "
                    f"the last code, {last}")


def _codes(case: str, codes: Tensor, weight: Tensor, scale: Tensor, last: int) -> None:
    if codes.isnan().any():
        raise Wrong(f"{case} the codes of the row of zeros are NaN, 0 / 0: make its scale larger than 0 before you "
                    f"divide")
    on_grid = (weight / scale.clamp_min(1e-30)).round() * scale
    if not torch.equal(codes, codes.round()) and torch.allclose(codes, on_grid, atol=1e-4):
        raise Wrong(f"{case} these are the values on the grid: return the codes, before you multiply by the scale")
    if not torch.equal(codes, codes.round()):
        raise Wrong(f"{case} the codes should be whole numbers: round them")
    ratio = weight / scale.clamp_min(1e-30)
    if (codes.abs() > last).any():
        if torch.equal(codes, ratio.round() + last + 1) or torch.equal(codes, ratio.round() + last):
            raise Wrong(f"{case} the codes are all above 0: here they run to either side of 0, from {-last} to {last}")
        raise Wrong(f"{case} code {codes[codes.abs() > last][0]:.0f} is off the grid: the codes run from {-last} to "
                    f"{last}")
    off = (codes - ratio).abs()
    if (off > 0.501).any():
        row, column = map(int, (off > 0.501).nonzero()[0])
        cut = torch.equal(codes, ratio.trunc()) or torch.equal(codes, ratio.floor())
        raise Wrong(f"{case} {weight[row, column]:.4g} is {ratio[row, column]:.2f} steps, and its code is "
                    f"{codes[row, column]:.0f}"
                    + (": you cut off what stands behind the point. Round to the nearest" if cut else
                       f": the nearest is {ratio[row, column].round():.0f}"))


# --- A block of the file ----------------------------------------------------------------------------------------------

def _block(scale: float, minimum: float, codes: list[int]) -> bytes:
    """32 codes as the file has them: d, m, then byte i with code i (low) and code i + 16 (high)."""
    return struct.pack("<ee", scale, minimum) + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))


@exercise
def q4_1_block(answer: Callable) -> None:
    """`answer(block)`: 20 bytes of a Q4_1 tensor -> its 32 weights."""
    for scale, minimum, codes in ((0.25, -2.0, [*range(16), *range(15, -1, -1)]),
                                  (0.404052734375, -5.78125, [(7 * i * i + i) % 16 for i in range(32)])):
        block, grid = _block(scale, minimum, codes), torch.tensor(codes, dtype=torch.float64)
        right = grid * scale + minimum
        told = f"for a block with d = {scale:g}, m = {minimum:g}: the weights"
        got = answer(block)
        if hasattr(got, "__len__") and len(got) in (16, 64):
            raise Wrong(f"{told} are {len(got)}, and should be 32: each of the 16 bytes holds two codes of 4 bits")
        low, high = grid[:16], grid[16:]
        neighbours = torch.stack((low, high), 1).flatten() * scale + minimum
        signed = torch.where(grid > 7, grid - 16, grid)
        compare(got, right, told, {
            "are in the wrong order: byte i holds weight i in its low bits and weight i + 16 in its high ones. So all "
            "low ones come first": neighbours,
            "are in the wrong order: the high four bits of byte i are weight i + 16, not weight i":
                torch.cat((high, low)) * scale + minimum,
            "are shifted by 8 steps: these codes run from 0, and code 0 is the minimum m": (grid - 8) * scale + minimum,
            "lack the minimum: a weight is code · d + m": grid * scale,
            "have d and m exchanged: d comes first, and multiplies": grid * minimum + scale,
            "have the minimum subtracted: it is stored with its sign, and added": grid * scale - minimum,
            "are those of codes with a sign: four bits count from 0 to 15 here": signed * scale + minimum,
            "are the codes: a weight is code · d + m": grid,
            "have a high half 16 times too large: shift the byte right by 4, `byte >> 4`":
                torch.cat((low, high * 16)) * scale + minimum,
            "have a high half that still holds the low bits: shift the byte right by 4, `byte >> 4`":
                torch.cat((low, high * 16 + low)) * scale + minimum}, tolerance=1e-6)


# --- Two codes in a byte ----------------------------------------------------------------------------------------------

CODES = (  # codes [rows, columns], -8 to 7
    [[-7, 7, 0, -1, 5, 2], [-8, 1, -3, 4, -5, 6]],
    [[1, -2, 3], [4, -5, 6]],
    [[3], [-7], [0]],
    [[7, -7, 1, 2, -3], [0, 6, -6, 5, -4], [-1, 1, 4, -2, 3]],
)


def _pack(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [rows, even columns] -> bytes, the first of two neighbours low."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


@exercise
def pack_nibbles(answer: Callable) -> None:
    """`answer(codes)`: whole numbers -8 to 7 [rows, columns] -> uint8 [rows, columns / 2, rounded up]."""
    for rows in CODES:
        codes = torch.tensor(rows)
        (count, columns), case = codes.shape, f"for the codes {rows}:"
        shape, odd = [count, -(-columns // 2)], columns % 2 == 1
        got = answer(codes)
        packed = as_tensor(got, f"{case} the bytes")
        padded = torch.cat((codes, codes.new_zeros(count, int(odd))), 1)
        shifted = padded + 8
        if packed.numel() == codes.numel() and columns > 1:
            raise Wrong(f"{case} there is a byte for each code: two of them fit into one")
        if list(packed.shape) == [count, columns // 2] and odd:
            raise Wrong(f"{case} the last code of each row is lost: {columns} codes need {shape[1]} bytes, the last of "
                        f"them half filled")
        if packed.numel() == -(-codes.numel() // 2) != count * shape[1]:
            raise Wrong(f"{case} {packed.numel()} bytes in all: the second row begins in the middle of a byte. Give "
                        f"each row bytes of its own, {shape[1]} of them")
        if list(packed.shape) != shape:
            raise Wrong(f"{case} the bytes should have the shape {shape}, not {list(packed.shape)}")
        whole, halves = _pack(shifted), shifted.view(count, 2, -1)
        seen = torch.full(shape, 255)  # what stands in the half that is left over does not matter
        seen[:, -1] = 15 if odd else 255
        if not ((packed == packed.round()) & (packed >= 0) & (packed < 256)).all():
            raise Wrong(f"{case} {packed[(packed < 0) | (packed > 255) | (packed != packed.round())][0]:g} is no byte: "
                        f"add 8 to the codes first, so that they run from 0 to 15")
        if _same_bits(packed, whole, seen):
            if isinstance(got, Tensor) and got.dtype != torch.uint8:
                raise Wrong(f"{case} the numbers are right, but each takes the memory of {got.dtype}: call "
                            f".to(torch.uint8)")
            continue
        for words, mistake in {
                "the first code of two belongs into the low four bits, and the second into the high ones":
                    shifted[:, 1::2] | shifted[:, 0::2] << 4,
                "these are codes with a sign, cut to 4 bits (-2 became 14): add 8 instead, so that 0 to 15 remain":
                    _pack(padded & 15),
                "code i shares a byte with code i + columns / 2, as in the file's blocks: here it is neighbours":
                    halves[:, 0] | halves[:, 1] << 4}.items():
            if _same_bits(packed, mistake, seen):
                raise Wrong(f"{case} {words}")
        at = tuple(map(int, ((packed.long() ^ whole) & seen).nonzero()[0]))
        raise Wrong(f"{case} byte {list(at)} is 0x{int(packed[at]):02X}, and should be 0x{int(whole[at]):02X}"
                    + (" (or any with the same low four bits)" if seen[at] == 15 else ""))


def _same_bits(got: Tensor, want: Tensor, seen: Tensor) -> bool:
    return torch.equal(got.long() & seen, want & seen)


# --- A product of whole numbers ---------------------------------------------------------------------------------------

@exercise
def int8_product(answer: Callable) -> None:
    """`answer(x, codes, scale)`: x [tokens, in], codes int8 [out, in] and their scale [out] -> [tokens, out]."""
    generator = torch.Generator().manual_seed(8)
    for tokens, inputs, outputs in ((3, 8, 4), (5, 16, 2), (4, 6, 4)):
        x = torch.randn(tokens, inputs, generator=generator)
        x[0] *= 40  # one token is much larger than the others
        if tokens == 5:
            x[2] = 0
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(outputs, generator=generator) / 20 + 0.01
        size = x.double().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        whole = (x.double() / size).round()
        sums, by_row = whole @ codes.double().T, scale.double()
        right = sums * size * by_row
        one = x.double().abs().max() / 127
        cut = (x / size.float()).trunc().double() @ codes.double().T * size * by_row
        wrapped = ((sums + 128) % 256 - 128) * size * by_row
        case = f"for x {list(x.shape)}, codes {list(codes.shape)}: the product"
        mistakes = {
            "has one scale for all tokens: the large token 0 takes the steps from the others. Give each token its own":
                (x.double() / one).round() @ codes.double().T * one * by_row,
            "has overflowed: the sum of int8 products needs 32 bits. Turn both into .int() first, or use "
            "torch._int_mm": wrapped,
            "lacks the scale of the weights": sums * size, "lacks the scale of the tokens": sums * by_row,
            "is of whole numbers still: multiply by both scales": sums,
            "was computed without rounding x: make whole numbers of it first": x.double() @ codes.double().T * by_row,
            "has x cut off instead of rounded: round first, then make whole numbers of it": cut,
            "has x divided by its largest number, so that only -1, 0 and 1 are left: divide by largest / 127":
                (x.double() / (size * 127)).round() @ codes.double().T * size * 127 * by_row}
        if outputs == tokens:
            mistakes["has the scales of tokens along the outputs: keep the dimension, .amax(1, keepdim=True)"] = (
                (x.double() / size).round() @ codes.double().T * size.T * by_row)
        got = answer(x, codes, scale)
        result = as_tensor(got, case)
        if list(result.shape) == [outputs, tokens] and outputs != tokens:
            raise Wrong(f"{case} should have the shape {[tokens, outputs]}, a row for each token, not its transpose")
        if result.shape == right.shape and result.isnan().any():
            raise Wrong(f"{case} contains NaN: token 2 is all zeros, and so is its scale. .clamp_min(1e-12)")
        compare(result, right, case, mistakes, tolerance=2e-4)
