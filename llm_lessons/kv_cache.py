"""KV caches: what attention remembers of the tokens before.

Every cache answers to the same few names, and the model knows no others:

- `capacity` tokens fit in each row; `lengths` says how many each row holds (`length`, when there is one row);
  `nbytes` is the memory it takes.
- `reserve(new)` is called before a forward pass: is there room for new[row] more tokens? If not, ValueError.
- `update(layer, k, v)` stores the new keys and values of one layer and returns all that attention may look at.
- `mask(n)` says which of those keys each of the n new queries may see, by absolute position.
- `advance(new)` is called once, after the last layer: now the new tokens count. `update` never moves anything.
- `truncate(n)` forgets all but the first n tokens.
"""

from __future__ import annotations

import operator
import weakref

import torch
from torch import Tensor


def whole_number(name: str, value, least: int = 1) -> int:
    """`value` as an int (numpy's are welcome), or a ValueError that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number


class KVCache:
    """A block of memory for keys and one for values, allocated once: [layers, batch, kv_heads, capacity, head_dim]."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.capacity, batch = whole_number("capacity", capacity), whole_number("batch", batch)
        # Zeros, not empty memory: a masked key has weight 0, and 0 times a leftover NaN would still be NaN.
        self.keys = torch.zeros(layers, batch, kv_heads, self.capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = [0] * batch
        self.tokens: list[int] = []  # the ids behind the first positions, as far as prefill and decode wrote them
        self.model: weakref.ref | None = None  # whose keys and values these are; another model's would be nonsense
        self._new: list[int] | None = None  # tokens announced by reserve, not yet counted by advance

    @property
    def length(self) -> int:
        if len(self.lengths) != 1:
            raise ValueError(f"this cache has {len(self.lengths)} rows: read .lengths")
        return self.lengths[0]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, new: list[int]) -> None:
        """Announce new[row] tokens for each row. Raises ValueError, with nothing written, when a row has no room."""
        if len(new) != len(self.lengths):
            raise ValueError(f"this cache holds {len(self.lengths)} sequences, and {len(new)} were given")
        new = [whole_number("the number of new tokens in a row", more, 0) for more in new]
        for row, (length, more) in enumerate(zip(self.lengths, new)):
            if length + more > self.capacity:
                raise ValueError(f"row {row} of the cache holds {length} tokens, and {more} more do not fit in its "
                                 f"capacity of {self.capacity}: make a larger one with model.new_cache(capacity)")
        self._new = new

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [batch, kv_heads, n, head_dim] of a layer -> all its keys and values, [.., total, head_dim].

        Only the announced tokens of a row are stored (all n when nothing was announced); padding is not.
        """
        ours = (self.keys.shape[1], self.keys.shape[2], self.keys.shape[4], self.keys.dtype)
        if layer >= len(self.keys) or ours != (k.shape[0], k.shape[1], k.shape[3], k.dtype):
            raise ValueError(f"keys {list(k.shape)} of {k.dtype} for layer {layer} do not fit this cache of "
                             f"{list(self.keys.shape)}, {self.keys.dtype}: make one with model.new_cache(capacity)")
        if self._new is None:
            self.reserve([k.shape[2]] * k.shape[0])
        if len(set(self.lengths)) == len(set(self._new)) == 1:  # all rows alike: one slice
            start, new = self.lengths[0], self._new[0]
            self.keys[layer, :, :, start : start + new] = k[:, :, :new]
            self.values[layer, :, :, start : start + new] = v[:, :, :new]
        else:
            for row, (start, new) in enumerate(zip(self.lengths, self._new)):
                self.keys[layer, row, :, start : start + new] = k[row, :, :new]
                self.values[layer, row, :, start : start + new] = v[row, :, :new]
        total = self._total()
        return self.keys[layer, :, :, :total], self.values[layer, :, :, :total]

    def mask(self, n: int) -> Tensor | None:
        """Which of the `total` keys each of n new queries may see: [batch, 1, n, total], or None for all of them.

        Query i of a row stands at position length + i, and sees the keys at positions up to its own.
        """
        if self._new is None:
            self.reserve([n] * len(self.lengths))
        if n == 1 and len(set(self.lengths)) == 1:
            return None
        device = self.keys.device
        position = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(n, device=device)  # [batch, n]
        return (torch.arange(self._total(), device=device) <= position[..., None])[:, None]

    def advance(self, new: int | list[int]) -> None:
        """Count the new tokens: `new` for every row, or new[row]."""
        self.reserve(list(new) if isinstance(new, (list, tuple)) else [new] * len(self.lengths))
        self.lengths = [length + more for length, more in zip(self.lengths, self._new)]
        self._new = None

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens of every row that has more; nothing of the others is left in memory."""
        n, held = whole_number("the number of tokens to keep", n, 0), max(self.lengths)
        if n > held:
            raise ValueError(f"cannot keep {n} tokens of a cache that holds {held}")
        del self.tokens[n:]
        self.lengths = [min(length, n) for length in self.lengths]
        self.keys[:, :, :, n:held] = 0
        self.values[:, :, :, n:held] = 0
        self._new = None

    def _total(self) -> int:
        return max(length + new for length, new in zip(self.lengths, self._new))
