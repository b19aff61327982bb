"""A KV cache with a window: only the last tokens, in a ring that never grows."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import Cache, whole_number, zeros


class SlidingCache(Cache):
    """The keys and values of the last `window` tokens: each token sees itself and the window - 1 before it.

    This changes the model's answers, once the text is longer than the window: what is outside is out of sight.
    Position p lies in slot p % window of a ring [layers, batch, kv_heads, window, head_dim], where it replaces
    p - window. The slots are not in order, so the mask goes by the position that each slot holds.

    New keys wait beside the ring until `advance`: the first queries of a chunk still need the keys that its last tokens
    will replace, and a pass that fails half-way must not have replaced anything.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, window: int):
        super().__init__(layers, kv_heads, head_dim, capacity, batch, dtype, device)
        self.window = whole_number("window", window)
        slots = min(self.window, self.capacity)
        shape = layers, batch, kv_heads, slots, head_dim
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.positions = zeros((batch, slots), torch.long, device).sub_(1)  # which position lies in each slot; -1: none
        self._whole = True  # False while tokens are moved into the ring
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> the new keys and values

    @property
    def nbytes(self) -> int:
        waiting = sum(k.nbytes + v.nbytes for k, v in self._waiting.values())
        return self.keys.nbytes + self.values.nbytes + waiting

    def _make_room(self, new: list[int]) -> None:
        self._waiting.clear()  # of a pass that failed half-way
        if not self._whole:
            raise ValueError("this cache was interrupted while tokens were written: truncate(0), then prefill")

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Copies: k and v may be slices of a larger tensor (all queries, keys and values), which would stay alive.
        self._waiting[layer] = k.clone(), v.clone()
        return torch.cat((self.keys[layer], k), dim=2), torch.cat((self.values[layer], v), dim=2)

    def mask(self, n: int) -> Tensor:
        """[batch, 1, n, slots + n]: a query sees the keys at its own position and the window - 1 before it."""
        if self._new is None:
            self.reserve([n] * len(self.lengths))
        query = self._positions(n)
        # A slot may hold a position that no longer counts: truncate cuts the lengths first, and may be interrupted.
        held = self.positions.where(self.positions < query[:, :1], -1)
        key = torch.cat((held, query), dim=1)[:, None]  # [batch, 1, slots + n]
        query = query[..., None]  # [batch, n, 1]
        return ((key >= 0) & (key <= query) & (key > query - min(self.window, self.capacity)))[:, None]

    def _commit(self) -> None:
        if len(self._waiting) < self.layers:
            raise ValueError(f"cannot count {self._new} new tokens: some layers were given no keys for them")
        keys, values = zip(*(self._waiting[layer] for layer in range(self.layers)))
        slots, self._whole = self.keys.shape[3], False
        for row, (start, new) in enumerate(zip(self.lengths, self._new)):
            first = max(0, new - slots)  # a chunk longer than the ring: its first tokens are outside already
            position = torch.arange(start + first, start + new, device=self.device)
            self.keys[:, row][:, :, position % slots] = torch.stack([k[row, :, first:new] for k in keys])
            self.values[:, row][:, :, position % slots] = torch.stack([v[row, :, first:new] for v in values])
            self.positions[row, position % slots] = position
        self._waiting.clear()

    def advance(self, new: int | list[int]) -> None:
        super().advance(new)
        self._whole = True

    def can_keep(self, n: int) -> bool:
        """Position n looks back at positions n - window + 1 to n - 1: are they all in the ring, in every longer row?"""
        if not super().can_keep(n) or not (self._whole or n == 0):
            return False
        seen = (self.positions >= max(0, n - self.window + 1)) & (self.positions < n)
        return all(length <= n or int(count) == min(n, self.window - 1)
                   for length, count in zip(self.lengths, seen.sum(dim=1)))

    def _drop(self, n: int, held: int) -> None:
        gone = self.positions >= n  # [batch, slots]
        for tensor in (self.keys, self.values):
            tensor.masked_fill_(gone[:, None, :, None], 0)
        self.positions.masked_fill_(gone, -1)
        self._waiting.clear()
        self._whole = self._whole or n == 0
