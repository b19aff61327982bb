"""Quantization: numbers on a grid of 2^bits steps, packed into bytes.

    symmetric       value = code · scale              codes -7 to 7 for 4 bits, -127 to 127 for 8: zero stays zero
    asymmetric      value = code · scale + minimum    codes 0 to 15, or 0 to 255: the grid spans what is really there

Each group of neighbours in a row has a scale of its own (and a minimum). Without groups a row is one group: in a weight
[out, in] that is one output channel. A whole tensor with one scale is `quantize(weight.reshape(1, -1))`.

Conventions, where libraries differ: the symmetric grid leaves out the lowest code (-128, -8), so that it has as many
steps on either side; a value half-way between two steps goes to the even one, as torch.round has it; the minimum is
stored as a number, not as a whole "zero point", so a grid need not contain zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_cache import whole_number

LARGEST, TINY = torch.finfo(torch.float32).max, 2 * torch.finfo(torch.float32).tiny  # half of it is not yet 0


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor [..., columns] as codes and scales; `quantize` makes them.

    `packed`: uint8 [..., bytes], several codes in a byte (see `pack`). `scale`, and `minimum` on an asymmetric grid:
    float32 [..., groups].
    """

    packed: Tensor
    scale: Tensor
    minimum: Tensor | None
    columns: int
    bits: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.columns))

    @property
    def symmetric(self) -> bool:
        return self.minimum is None

    @property
    def group_size(self) -> int:
        """How many neighbours share a scale; all columns of a row where there are no smaller groups."""
        return self.columns // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, what pads the last byte of a row included, of the scales and of the minima."""
        return sum(part.nbytes for part in (self.packed, self.scale, self.minimum) if part is not None)

    @property
    def codes(self) -> Tensor:
        """The whole numbers on the grid, one for each value, int16: around 0 where symmetric, else from 0 on."""
        codes = unpack(self.packed, self.columns, self.bits).to(torch.int16)
        return codes - 2 ** (self.bits - 1) if self.symmetric else codes

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same on another device."""
        parts = (None if part is None else part.to(device) for part in (self.packed, self.scale, self.minimum))
        return QuantizedTensor(*parts, self.columns, self.bits)

    def dequantize(self) -> Tensor:
        """The values on the grid, float32: each at most half a step, scale / 2, from the one that was quantized."""
        groups = self.codes.unflatten(-1, (-1, self.group_size)).float()
        scale = self.scale[..., None]
        if self.symmetric:
            values = groups * scale
        else:  # by halves: the whole distance between minimum and maximum may lie beyond float32
            values = (groups * (scale / 2) + self.minimum[..., None] / 2) * 2
        return values.clamp_(-LARGEST, LARGEST).flatten(-2)


def quantize(weight: Tensor, bits: int = 8, group_size: int | None = None, symmetric: bool = True) -> QuantizedTensor:
    """The nearest codes for `weight` [..., columns], 2 to 8 bits each, on a grid for each row or group of columns.

    The scale is chosen so that the largest value of a group lies on the last step: nothing is clipped. ValueError for
    values that are not finite (or not in float32), for an empty tensor, and for a group size that does not divide the
    columns.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() == 0 or weight.numel() == 0:
        what = f"{list(weight.shape)} of {weight.dtype}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(f"quantize takes a tensor [..., columns] of floating-point numbers, not {what}")
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric must be True or False, not {symmetric!r}")
    bits, columns = check_bits(bits), weight.shape[-1]
    group_size = columns if group_size is None else whole_number("group_size", group_size)
    if columns % group_size:
        raise ValueError(f"{columns} columns do not divide into groups of {group_size}: choose a divisor of {columns}, "
                         f"or None for one group a row")
    groups = weight.detach().float().unflatten(-1, (-1, group_size))  # [..., groups, group_size]
    if not groups.isfinite().all():
        raise ValueError("the values to quantize hold NaN or infinity: no grid has a place for them")
    # In float32, also for float16 weights: a small scale would be 0 there. TINY: a row of zeros needs a scale, too.
    if symmetric:
        last = 2 ** (bits - 1) - 1
        scale, minimum = (groups.abs().amax(-1) / last).clamp_min(TINY), None
        codes = (groups / scale[..., None]).round().clamp(-last, last) + 2 ** (bits - 1)
    else:
        last, (minimum, maximum) = 2**bits - 1, groups.aminmax(dim=-1)
        scale = ((maximum / 2 - minimum / 2) / (last / 2)).clamp_min(TINY)
        above = groups / 2 - minimum[..., None] / 2
        codes = (above / (scale[..., None] / 2)).round().clamp(0, last)
    padding = 2 ** (bits - 1) if symmetric else 0  # stands for zero, or for the minimum
    return QuantizedTensor(_pack(codes.flatten(-2), bits, padding), scale, minimum, columns, bits)


def concatenate(parts: list[QuantizedTensor]) -> QuantizedTensor:
    """Quantized matrices of the same columns, bits and groups, one below the other."""
    kinds = {(part.columns, part.bits, part.scale.shape[-1], part.symmetric) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"these matrices are quantized in different ways (columns, bits, groups, symmetric): {kinds}")
    if len(parts) == 1:
        return parts[0]
    packed, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("packed", "scale"))
    minimum = None if parts[0].symmetric else torch.cat([part.minimum for part in parts])
    return QuantizedTensor(packed, scale, minimum, parts[0].columns, parts[0].bits)


def regroup(weight: QuantizedTensor, group_size: int) -> QuantizedTensor:
    """8 bits with one scale for each `group_size` columns, from other bits or groups; loses a little.

    Some rows at a time: the whole matrix in float32 would be four times as large.
    """
    packed = weight.packed.new_empty(weight.shape)
    scale = weight.scale.new_empty(len(packed), weight.columns // group_size)
    for start in range(0, len(packed), 1024):
        rows = slice(start, start + 1024)
        minimum = None if weight.symmetric else weight.minimum[rows]
        some = QuantizedTensor(weight.packed[rows], weight.scale[rows], minimum, weight.columns, weight.bits)
        new = quantize(some.dequantize(), 8, group_size)
        packed[rows], scale[rows] = new.packed, new.scale
    return QuantizedTensor(packed, scale, None, weight.columns, 8)


def check_bits(bits: int) -> int:
    number = whole_number("bits", bits, 2)
    if number > 8:
        raise ValueError(f"bits must be 2 to 8, not {bits!r}")
    return number


def pack(codes: Tensor, bits: int, padding: int = 0) -> Tensor:
    """Codes [..., columns], whole numbers from 0 to 2^bits - 1 -> uint8 [..., bytes].

    8 // bits codes share a byte, the first in its lowest bits: two of 4 or 3 bits, four of 2, one of 5 and more. Each
    row begins with a byte of its own; `padding` fills up its last one. ValueError for codes that do not fit.
    """
    bits = check_bits(bits)
    if not isinstance(codes, Tensor) or codes.dim() == 0 or codes.is_complex():
        raise ValueError(f"codes must be a tensor [..., columns] of whole numbers, not {codes!r}")
    if codes.numel() and not (0 <= codes.min() and codes.max() < 2**bits and (codes == codes.to(torch.uint8)).all()):
        raise ValueError(f"codes of {bits} bits are whole numbers from 0 to {2**bits - 1}, not from {codes.min()} to "
                         f"{codes.max()}: on a symmetric grid, add {2**(bits - 1)}")
    if whole_number("padding", padding, 0) >= 2**bits:
        raise ValueError(f"padding must be a code of {bits} bits, 0 to {2**bits - 1}, not {padding}")
    return _pack(codes, bits, padding)


def _pack(codes: Tensor, bits: int, padding: int) -> Tensor:
    """`pack` without its checks, for which a GPU would have to be waited for."""
    share = 8 // bits
    codes = codes.to(torch.uint8)
    missing = -codes.shape[-1] % share
    codes = torch.cat((codes, codes.new_full((*codes.shape[:-1], missing), padding)), dim=-1)
    packed = codes[..., 0::share].clone()
    for place in range(1, share):
        packed |= codes[..., place::share] << place * bits
    return packed


def unpack(packed: Tensor, columns: int, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., bytes] -> codes, uint8 [..., columns]. ValueError for other bytes."""
    bits, columns = check_bits(bits), whole_number("columns", columns, 0)
    if not isinstance(packed, Tensor) or packed.dim() == 0 or packed.dtype != torch.uint8:
        raise ValueError(f"packed must be a tensor [..., bytes] of torch.uint8, as pack gives it, not {packed!r}")
    share = 8 // bits
    if packed.shape[-1] != -(-columns // share):
        raise ValueError(f"{columns} codes of {bits} bits fill {-(-columns // share)} bytes, not {packed.shape[-1]}")
    codes = torch.stack([packed >> place * bits & 2**bits - 1 for place in range(share)], dim=-1)
    return codes.flatten(-2)[..., :columns]
