"""A quantized cache: keys and values in 8 or 4 bits. It saves memory, costs time, and changes the answers a little.

    cache = model.new_cache(512, kind=ll.QuantizedCache, bits=4)

A few channels of the keys are large for every token. On a grid that spans the channels of one token, they make the
steps of all others long, so each channel of the keys gets a grid of its own. Values get one for each token: those of
the first token are small, and it has much of the attention, so its error must stay small, too. This is KIVI's choice
(Liu et al. 2024, https://arxiv.org/abs/2402.02750).

The grid of a channel spans several tokens: 32 of them are a block, and a block is put on the grid when the next one is
full. So the last 32 to 63 tokens are exact; KIVI keeps a window of exact tokens, too. Values wait for their block, too,
because one rule for both is simpler.

What it costs the course's model on its prose: four rows of 512 tokens, float32, token by token, beside a `KVCache`.

                                     KL, nats a token    the largest    perplexity    same most probable token
    8 bits                           0.00001             0.0002         + 0.0 %       99.7 %
    4 bits                           0.0032              0.10           + 0.5 %       97.1 %
    4 bits, keys on grids of tokens  0.0096              0.28           + 0.7 %       93.6 %
    4 bits, last full block as well  0.0093              8.7            + 1.2 %       95.8 %
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import Cache, whole_number, zeros
from .quantize import pack, quantize, unpack

BLOCK = 32  # tokens
RING = 2 * BLOCK  # the last full block and the one that fills
LARGEST = torch.finfo(torch.float16).max


def on_grid(length: int) -> int:
    """How many blocks of so many tokens are on the grid: all that are full, but for the last."""
    return max(0, length // BLOCK - 1)


class QuantizedBlocks:
    """The keys, or the values, of all layers and rows: old blocks on a grid, the open tokens of each row as they are.

    `packed` [layers, batch, kv_heads, blocks, 32, bytes] holds the codes; `scale` and `minimum` are [.., blocks, 1,
    head_dim] if each channel of a block has a grid of its own (`per_channel`), and [.., blocks, 32, 1] if each token.
    `open` [layers, batch, kv_heads, 64, head_dim] is a ring: the open token at position p lies in slot p % 64, where
    it replaces one that is on the grid by then.

    Scales and minima are float16, rounded from float32. On the course's model float32 gives no better answers, and a
    token on the grid of 4 bits takes 16 % more memory; bfloat16 takes the same, and with 8 bits its KL is four times as
    large.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device | str, bits: int, per_channel: bool):
        self.bits, self.per_channel, self.head_dim = bits, per_channel, head_dim
        shape = layers, batch, kv_heads, on_grid(capacity)
        self.packed = zeros((*shape, BLOCK, -(-head_dim * bits // 8)), torch.uint8, device)
        grids = (1, head_dim) if per_channel else (BLOCK, 1)
        self.scale, self.minimum = (zeros((*shape, *grids), torch.float16, device) for _ in range(2))
        self.open = zeros((layers, batch, kv_heads, min(capacity, RING), head_dim), dtype, device)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes + self.open.nbytes

    def read(self, layer: int | slice, rows: slice, first: int, last: int) -> Tensor:
        """The tokens of the blocks `first` to `last` - 1, off the grid: float32 [.., kv_heads, tokens, head_dim]."""
        packed, scale, minimum = (part[layer, rows, :, first:last] for part in (self.packed, self.scale, self.minimum))
        codes = unpack(packed, self.head_dim, self.bits).float()
        return codes.mul_(scale).add_(minimum).flatten(-3, -2)

    def write(self, layer: int, rows: slice, first: int, tokens: Tensor) -> None:
        """Put full blocks on the grid, the first of them in place `first`: tokens [rows, kv_heads, tokens, head_dim].

        A line with NaN, infinity or a number beyond 65504, float16's largest, becomes NaN: its row's logits will be
        NaN, as those of a `KVCache` with NaN in it, and no other row notices. What `truncate` keeps of it is NaN, too.
        """
        blocks = tokens.float().unflatten(2, (-1, BLOCK))  # of bfloat16, 65536 counts as no more than 65504
        lines = blocks.mT if self.per_channel else blocks
        fits = (lines.abs() <= LARGEST).all(dim=-1, keepdim=True)
        grid = quantize(lines.masked_fill(~fits, 0), self.bits, symmetric=False)
        parts = grid.codes, grid.scale.masked_fill(~fits, torch.nan), grid.minimum
        codes, scale, minimum = (part.mT if self.per_channel else part for part in parts)
        place = layer, rows, slice(None), slice(first, first + blocks.shape[2])
        self.packed[place], self.scale[place], self.minimum[place] = pack(codes, self.bits), scale, minimum

    def add(self, layer: int, new: Tensor, groups: list[tuple], total: int) -> tuple[Tensor, list[Tensor]]:
        """All tokens of a layer, the new ones included [batch, kv_heads, total, head_dim]; and, for each group of rows,
        those of the new ones that will be open. Blocks whose next one becomes full are written."""
        tokens, rest = new.new_zeros(*new.shape[:2], total, new.shape[3]), []
        for rows, blocks, length, count in groups:
            start, end = blocks * BLOCK, length + count
            in_order = self.open[layer, rows].roll(-(start % RING), dims=2)
            tokens[rows, :, :start] = self.read(layer, rows, 0, blocks)
            tokens[rows, :, start:length] = in_order[:, :, : length - start]
            tokens[rows, :, length:end] = new[rows, :, :count]
            new_start = on_grid(end) * BLOCK
            if new_start > start:
                self.write(layer, rows, blocks, tokens[rows, :, start:new_start])
            rest.append(tokens[rows, :, max(length, new_start) : end].clone())  # a slice would keep them all
        return tokens, rest

    def slots(self, first: int, last: int) -> Tensor:
        """Where in the ring the open tokens at positions `first` to `last` - 1 lie."""
        return torch.arange(first, last, device=self.open.device) % RING

    def reopen(self, row: int, length: int) -> None:
        """Take the first tokens of the block that `length` cuts off its grid, back among the open ones."""
        cut, kept = length // BLOCK, length % BLOCK
        block = self.read(slice(None), slice(row, row + 1), cut, cut + 1)[..., :kept, :]
        self.open[:, row : row + 1][..., self.slots(length - kept, length), :] = block.to(self.open.dtype)

    def clear(self, row: int, blocks: int, length: int) -> None:
        """Zero all memory of a row but that of its first `length` tokens, of which `blocks` blocks are on the grid."""
        self.open[:, row][:, :, self.slots(length, blocks * BLOCK + self.open.shape[3])] = 0
        for part in (self.packed, self.scale, self.minimum):
            part[:, row, :, blocks:] = 0


class QuantizedCache(Cache):
    """Keys and values on a grid of 255 steps (`bits` = 8) or 15 (`bits` = 4), in blocks of 32 tokens.

    A row's last full block and the tokens behind it, 63 at most, stay in the model's type. A pass sees its own tokens
    exactly, and of those before it, older blocks as they are on the grid. So a prompt that is read in one pass gets
    exact logits, and read in chunks it gets others, which differ by the error of the grid only. A number is off by at
    most half a step (a step is 1/15 or 1/255 of its line's range), and 1/600 of the line's largest number, for the
    float16 scale and minimum.

    A token of the course's model takes 12,600 bytes on the grid of 8 bits, 6,840 on that of 4, and 23,040 in bfloat16,
    as do the 64 places for exact tokens. A row for 512 tokens has 15 blocks on the grid: 7.5 or 4.8 MB, not 11.8.

    `update` takes all tokens of a layer off the grid, at every step: the memory of one layer, in the model's type, and
    time that grows with the length. On two CPU threads a step in bfloat16 at 512 tokens takes 22 ms with 8 bits and
    24 ms with 4, where a `KVCache` takes 18. `truncate` inside a block that is on the grid takes its first tokens off,
    so they will be rounded once more.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, bits: int):
        super().__init__(layers, kv_heads, head_dim, capacity, batch, dtype, device)
        self.bits = whole_number("bits", bits)
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, not {bits!r}")
        shape = layers, len(self.lengths), kv_heads, self.capacity, head_dim, dtype, device, self.bits
        self.keys, self.values = QuantizedBlocks(*shape, per_channel=True), QuantizedBlocks(*shape, per_channel=False)
        self._blocks = [0] * len(self.lengths)  # how many blocks of each row are on the grid
        self._waiting: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # layer -> new tokens that will be open

    @property
    def nbytes(self) -> int:
        waiting = sum(rest.nbytes for pair in self._waiting.values() for rests in pair for rest in rests)
        return self.keys.nbytes + self.values.nbytes + waiting

    def _groups(self) -> list[tuple[slice, int, int, int]]:
        """Rows that are treated together, with their blocks on the grid, the tokens that they hold, and new ones."""
        if self._alike and len(set(self._blocks)) == 1:
            return [(slice(None), self._blocks[0], self.lengths[0], self._new[0])]
        return [(slice(row, row + 1), *counts) for row, counts in enumerate(zip(self._blocks, self.lengths, self._new))]

    def _make_room(self, new: list[int]) -> None:
        self._waiting.clear()  # of a pass that failed half-way
        self._reopen()

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups = self._groups()
        keys, new_keys = self.keys.add(layer, k, groups, self._total)
        values, new_values = self.values.add(layer, v, groups, self._total)
        self._waiting[layer] = new_keys, new_values
        return keys, values

    def _commit(self) -> None:
        if len(self._waiting) < self.layers:
            raise ValueError(f"cannot count {self._new} new tokens: some layers were given no keys for them")
        groups = self._groups()
        # First this. If what follows is interrupted, all tokens held are still on the grid or in the ring: see _reopen.
        self._blocks = [max(blocks, on_grid(length + new))
                      for blocks, length, new in zip(self._blocks, self.lengths, self._new)]
        for group, (rows, _, length, new) in enumerate(groups):
            for which, half in enumerate((self.keys, self.values)):
                rest = torch.stack([self._waiting[layer][which][group] for layer in range(self.layers)])
                end = length + new
                half.open[:, rows][..., half.slots(end - rest.shape[3], end), :] = rest
        self._waiting.clear()

    def _reopen(self) -> None:
        """Where the length ends within a block on the grid, take the block's first tokens back among the open ones."""
        for row, (blocks, length) in enumerate(zip(self._blocks, self.lengths)):
            if blocks > length // BLOCK:
                self.keys.reopen(row, length)
                self.values.reopen(row, length)
        self._blocks = [min(blocks, length // BLOCK) for blocks, length in zip(self._blocks, self.lengths)]

    def _drop(self, n: int, held: int) -> None:
        self._waiting.clear()
        self._reopen()
        for row, (blocks, length) in enumerate(zip(self._blocks, self.lengths)):
            self.keys.clear(row, blocks, length)
            self.values.clear(row, blocks, length)
