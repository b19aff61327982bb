"""KV caches: what attention remembers of the tokens before.

Every cache answers to the same few names, and the model knows no others:

- `capacity` tokens fit in each row; `lengths` says how many each row holds (`length`, when there is one row);
  `nbytes` is the memory that its keys and values take now.
- `reserve(new)` is called before a forward pass: is there room for new[row] more tokens? If not, ValueError.
- `update(layer, k, v)` stores the new keys and values of one layer and returns all that attention may look at.
- `mask(n)` says which of those keys each of the n new queries may see, by absolute position.
- `advance(new)` is called once, after the last layer: now the new tokens count. `update` never moves anything, so a
  forward pass that fails half-way leaves nothing behind that is ever seen.
- `truncate(n)` forgets all but the first n tokens, if `can_keep(n)`; n = 0 always works.
- `remember(ids)` notes which tokens they were, and `reuse(ids)` finds what is known of a new prompt.

`Cache` keeps the books. The kinds differ in where the keys and values lie:

- `KVCache`: in one block of memory, allocated once. The one to use unless you need another.
- `GrowingCache`: in a tensor that is copied into a longer one at every step, as much teaching code does it.
- `SlidingCache` (sliding_cache.py): only the last `window` tokens, in a ring. Its memory never grows.
- `PagedCache` (paged_cache.py): in small blocks of a pool that many sequences share.
- `QuantizedCache` (quantized_cache.py): in 8 or 4 bits each, which takes less memory and changes the answers a little.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ROWS = 10**6  # of a cache; whoever asks for more has mixed up the arguments


def whole_number(name: str, value, least: int = 1) -> int:
    """`value` as an int (numpy's are welcome), or a ValueError that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for keys or values. Zeros: a masked key has weight 0, and 0 times a leftover NaN would still be NaN.

    Also within inference mode an ordinary tensor: others could not be written to outside of it. `shape[1]` is a number
    of rows or blocks, for the MemoryError that names the bytes.
    """
    torch.empty(0, dtype=dtype, device=device)  # one that is not there is told in torch's words
    try:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # TypeError: a size beyond 64 bits
        nbytes = math.prod(shape) * dtype.itemsize
        raise MemoryError(f"there is no memory for {nbytes:,} bytes on {device}, {nbytes // shape[1]:,} for each of "
                          f"{shape[1]:,} rows or blocks (keys and values take as much each): ask for fewer") from error


class Cache:
    """The books of every cache. A kind of cache adds `nbytes`, `_store`, `_drop`, and what else it does differently."""

    model: weakref.ref | None = None  # whose keys and values these are; another model's would be nonsense

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.capacity, batch = whole_number("capacity", capacity), whole_number("batch", batch)
        if batch > MOST_ROWS:
            nbytes = 2 * layers * kv_heads * head_dim * self.capacity * dtype.itemsize
            raise ValueError(f"batch must be at most {MOST_ROWS:,} rows, not {batch:,}: {nbytes:,} bytes each would be "
                             f"{batch * nbytes:,} bytes")
        self.layers, self.kv_heads, self.head_dim, self.dtype = layers, kv_heads, head_dim, dtype
        self.device = torch.empty(0, device=device).device
        self.lengths = [0] * batch
        self.tokens: list[int] = []  # the ids behind the first positions of a single row, as far as they are known
        self._new: list[int] | None = None  # tokens announced by reserve, not yet counted by advance

    @property
    def length(self) -> int:
        if len(self.lengths) != 1:
            raise ValueError(f"this cache has {len(self.lengths)} rows: read .lengths")
        return self.lengths[0]

    def reserve(self, new: list[int]) -> None:
        """Announce new[row] tokens for each row. Raises ValueError, with nothing written, when a row has no room."""
        self._new = None
        if not isinstance(new, (list, tuple)):
            raise ValueError(f"give the number of new tokens of each row in a list, not {new!r}")
        if len(new) != len(self.lengths):
            raise ValueError(f"this cache holds {len(self.lengths)} sequences, and {len(new)} were given")
        new = [whole_number("the number of new tokens in a row", more, 0) for more in new]
        for row, (length, more) in enumerate(zip(self.lengths, new)):
            if length + more > self.capacity:
                raise ValueError(f"row {row} of the cache holds {length} tokens, and {more} more do not fit in its "
                                 f"capacity of {self.capacity}: make a larger one with model.new_cache(capacity)")
        self._make_room(new)
        self._new = new
        self._total = max(length + more for length, more in zip(self.lengths, new))  # the longest row, then
        self._alike = len(set(self.lengths)) == len(set(new)) == 1  # all rows are as long: the usual, fast case

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [batch, kv_heads, n, head_dim] of a layer -> all its keys and values, [.., total, head_dim].

        Only the announced tokens of a row are stored (all n when nothing was announced); padding is not.
        """
        layer = whole_number("layer", layer, 0)
        if not (isinstance(k, Tensor) and isinstance(v, Tensor) and k.dim() == 4):
            raise ValueError(f"k and v must be tensors [batch, kv_heads, n, head_dim], not {str(k)[:40]!r} and "
                             f"{str(v)[:40]!r}")
        batch, kv_heads, n, head_dim = k.shape
        ours = (len(self.lengths), self.kv_heads, self.head_dim, self.dtype)
        if layer >= self.layers or ours != (batch, kv_heads, head_dim, k.dtype):
            raise ValueError(f"keys {list(k.shape)} of {k.dtype} for layer {layer} do not fit this cache of "
                             f"{self.layers} layers, {ours[0]} rows, {ours[1]} heads of {ours[2]} numbers, {ours[3]}: "
                             f"make one with model.new_cache(capacity)")
        if self._new is None:
            self.reserve([n] * batch)
        if v.shape != k.shape or v.dtype != k.dtype or n < max(self._new):
            raise ValueError(f"keys {list(k.shape)} of {k.dtype} and values {list(v.shape)} of {v.dtype} must be "
                             f"alike, and hold the {max(self._new)} tokens that were announced")
        return self._store(layer, k, v)

    def mask(self, n: int) -> Tensor | None:
        """Which of the `total` keys each of n new queries may see: [batch, 1, n, total].

        Query i of a row stands at position length + i, and sees the keys at positions up to its own. None where query i
        simply sees the first i + 1 keys (an empty cache), or all of them (one query, rows of the same length).
        """
        if self._new is None:
            self.reserve([n] * len(self.lengths))
        if max(self.lengths) == 0 or n == 1 and len(set(self.lengths)) == 1:
            return None
        return (torch.arange(self._total, device=self.device) <= self._positions(n)[..., None])[:, None]

    def advance(self, new: int | list[int]) -> None:
        """Count the new tokens: `new` for every row, or new[row]."""
        new = list(new) if isinstance(new, (list, tuple)) else [new] * len(self.lengths)
        if new != self._new:
            self.reserve(new)
        self._commit()
        self.lengths = [length + more for length, more in zip(self.lengths, self._new)]
        self._new = None

    def can_keep(self, n: int) -> bool:
        """Does the cache still hold all that a token after the first n would look at?"""
        return 0 <= n <= max(self.lengths)

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens of every row that has more; nothing of the others is left in memory."""
        n, held = whole_number("the number of tokens to keep", n, 0), max(self.lengths)
        if n > held:
            raise ValueError(f"cannot keep {n} tokens of a cache that holds {held}")
        if not self.can_keep(n):
            raise ValueError(f"cannot keep {n} of {held} tokens: of those that token {n} looks at, some have left the "
                             f"window. Begin anew: truncate(0), then prefill")
        del self.tokens[n:]
        self.lengths = [min(length, n) for length in self.lengths]
        self._new = None
        self._drop(n, held)

    def remember(self, ids: list[int]) -> None:
        """Note the ids of the tokens that were just added, unless something unknown was put in before them."""
        if len(self.tokens) == self.length - len(ids):
            self.tokens += ids

    def reuse(self, ids: Sequence[int]) -> int:
        """Adopt what is known elsewhere of a prompt that begins with our tokens -> tokens that need no prefill."""
        if self.tokens != list(ids[: self.length]):
            raise ValueError("this cache holds other tokens than the prompt begins with: truncate(0) first")
        return self.length  # only a paged cache can look elsewhere

    def _positions(self, n: int) -> Tensor:
        """The absolute positions of n new tokens: [batch, n]."""
        return torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(n, device=self.device)

    def _make_room(self, new: list[int]) -> None:
        """A forward pass is to begin that adds new[row] tokens, which the capacity allows."""

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The part of `update` in which kinds differ. self._new says how many tokens of each row are real."""
        raise NotImplementedError

    def _commit(self) -> None:
        """All layers are stored, and self._new is about to count."""

    def _drop(self, n: int, held: int) -> None:
        """The lengths are cut to n: positions n to `held` are to be forgotten."""
        raise NotImplementedError


class KVCache(Cache):
    """A block of memory for keys and one for values, allocated once: [layers, batch, kv_heads, capacity, head_dim]."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__(layers, kv_heads, head_dim, capacity, batch, dtype, device)
        shape = layers, batch, kv_heads, self.capacity, head_dim
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        if self._alike:  # one slice for all rows
            start, new = self.lengths[0], self._new[0]
            keys[:, :, start : start + new] = k[:, :, :new]
            values[:, :, start : start + new] = v[:, :, :new]
        else:
            for row, (start, new) in enumerate(zip(self.lengths, self._new)):
                keys[row, :, start : start + new] = k[row, :, :new]
                values[row, :, start : start + new] = v[row, :, :new]
        return keys[:, :, : self._total], values[:, :, : self._total]

    def _drop(self, n: int, held: int) -> None:
        self.keys[:, :, :, n:held] = 0
        self.values[:, :, :, n:held] = 0


class GrowingCache(Cache):
    """One tensor of keys and one of values for each layer, replaced by a longer copy whenever tokens are added.

    No memory waits for tokens that may never come. The price: every step copies all that is held, so writing T tokens
    moves about T²/2 of them, and for a moment a layer is there twice.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__(layers, kv_heads, head_dim, capacity, batch, dtype, device)
        nothing = zeros((batch, kv_heads, 0, head_dim), dtype, device)
        self.keys, self.values = [nothing] * layers, [nothing] * layers

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer] = self._longer(self.keys[layer], k)
        self.values[layer] = self._longer(self.values[layer], v)
        return self.keys[layer], self.values[layer]

    def _longer(self, old: Tensor, new: Tensor) -> Tensor:
        held = max(self.lengths)
        old = old[:, :, :held]  # without what a pass that failed half-way may have added
        if self._alike:
            return torch.cat((old, new[:, :, : self._new[0]]), dim=2)
        more = old.new_zeros(*old.shape[:2], self._total - held, old.shape[3])
        longer = torch.cat((old, more), dim=2)
        for row, (start, count) in enumerate(zip(self.lengths, self._new)):
            longer[row, :, start : start + count] = new[row, :, :count]
        return longer

    def _commit(self) -> None:
        if any(keys.shape[2] < self._total for keys in self.keys):
            raise ValueError(f"cannot count {self._new} new tokens: some layers were given no keys for them")

    def _drop(self, n: int, held: int) -> None:
        for tensors in (self.keys, self.values):
            tensors[:] = [tensor[:, :, :n].clone() for tensor in tensors]  # a mere slice would keep the memory
