"""A paged cache: keys and values lie in small blocks of one pool, and a table for each row says in which.

Like the pages of an operating system. A row takes a block when it needs one, from anywhere in the pool, so no memory is
set aside for tokens that may never come, and rows that begin with the same tokens can read the same blocks.

    pool = ll.BlockPool.of(model, blocks=64)
    cache = model.new_cache(512, kind=ll.PagedCache, pool=pool, tenant="alice")

From bottom to top: `BlockPool` owns the memory and knows what lies in it; a `BlockTable` lists the blocks of one
sequence; a `PagedCache` is a batch of such tables, which the model uses like any other cache.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice

import torch
from torch import Tensor

from .kv_cache import Cache, whole_number, zeros


class BlockPool:
    """The memory of all blocks, allocated once: keys and values [layers, blocks + 1, block_size, kv_heads, head_dim].

    A block holds `block_size` tokens of one sequence, in every layer. Tokens come before heads, so that the blocks of a
    row, gathered one behind the other, are its keys in order. Block 0 stays zero and is never handed out: it stands for
    "nothing" where a row is shorter than its neighbours.

    A block may have several users. When the last one lets go, it is free, but what was in it stays findable until it is
    handed out again; those that nobody has used for longest go first.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, blocks: int, block_size: int = 16,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.blocks, self.block_size = whole_number("blocks", blocks), whole_number("block_size", block_size)
        shape = layers, self.blocks + 1, self.block_size, kv_heads, head_dim
        self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.users = [0] * (self.blocks + 1)  # how many tables hold each block
        self.model: weakref.ref | None = None  # whose keys and values these are
        self._free = OrderedDict.fromkeys(range(1, self.blocks + 1))  # in the order in which they are handed out
        self._block_of: dict[tuple, int] = {}  # (tenant, name of the block before, its tokens) -> block
        self._key_of: dict[int, tuple] = {}  # block -> its key in _block_of
        self._name_of: dict[int, int] = {}  # block -> its name: see `learn`
        self._last_name = 0

    @classmethod
    def of(cls, model, blocks: int, block_size: int = 16) -> BlockPool:
        """A pool for the caches of one model."""
        c = model.config
        pool = cls(c.layers, c.kv_heads, c.head_dim, blocks, block_size, model.norm.weight.dtype, model.device)
        pool.model = weakref.ref(model)
        return pool

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody uses."""
        return len(self._free)

    # --- Who uses a block ---

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks, filled with zeros: whatever was in them is gone, and so is its name."""
        if count > self.free_blocks:
            raise ValueError(f"{count} more blocks of {self.block_size} tokens are needed, and {self.free_blocks} of "
                             f"{self.blocks} are free: give back what another sequence holds (close, free, or "
                             f"truncate its cache), or make a pool of more blocks")
        if count == 0:
            return []
        taken = list(islice(self._free, count))
        for block in taken:
            self.forget(block)
        self.keys[:, taken] = 0
        self.values[:, taken] = 0
        for block in taken:  # last: an interrupt while the memory is cleared loses no block
            del self._free[block]
            self.users[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more user for a block, which may have been free until now."""
        self._free.pop(block, None)
        self.users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for each. Of a sequence, its last block is handed out first: it is of use to the fewest."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._name_of)  # nothing to find in it: to the front

    # --- What is in a block ---

    def find(self, tenant: Hashable, before: int, tokens: tuple[int, ...]) -> int | None:
        """The block that holds these tokens of this tenant behind the block named `before` (0: at the beginning).

        A dictionary compares whole keys. Their hashes only say where to look: two keys may have the same one.
        """
        return self._block_of.get((type(tenant), tenant, before, tokens))

    def learn(self, block: int, tenant: Hashable, before: int, tokens: tuple[int, ...]) -> int:
        """Make a full block findable -> its name, which is the `before` of the next block.

        The keys of a token depend on all tokens before it, so the same tokens behind others are another block. The
        number of a block says where it lies, and is used again for other tokens; a name is never used again. So what
        was learnt about a recycled block, and about all that came behind it, can never be found by mistake.
        """
        key = type(tenant), tenant, before, tokens
        if key not in self._block_of:
            self._last_name += 1
            self._block_of[key], self._key_of[block], self._name_of[block] = block, key, self._last_name
        return self.name(self._block_of[key])  # of the first block that held them, if there are two

    def name(self, block: int) -> int:
        return self._name_of[block]

    def forget(self, block: int) -> None:
        """What is in the block will change: nobody may find it any longer."""
        if block in self._key_of:
            del self._block_of[self._key_of.pop(block)], self._name_of[block]


class BlockTable:
    """The blocks of one sequence, in order: position p lies in slot p % block_size of block number p // block_size."""

    def __init__(self, pool: BlockPool, tenant: Hashable = None):
        self.blocks: list[int] = []
        self.pool, self.tenant = pool, tenant
        self._names: list[int] = []  # names of the first blocks, as far as they are full and their tokens known
        self._cut = False  # was the last block cut short by truncate, and not written to since?

    def __del__(self):
        self.truncate(0)  # a table that nobody holds any longer would keep its blocks for ever

    def find(self, ids: Sequence[int]) -> list[int]:
        """The known blocks of a prompt, from its beginning. At least its last token is left: its logits are wanted."""
        size, blocks, before = self.pool.block_size, [], 0
        for start in range(0, len(ids) - size, size):
            block = self.pool.find(self.tenant, before, tuple(ids[start : start + size]))
            if block is None:
                break
            blocks.append(block)
            before = self.pool.name(block)
        return blocks

    def adopt(self, blocks: list[int]) -> None:
        """Hold the blocks that `find` found, instead of what it held."""
        for block in blocks:
            self.pool.share(block)
        self.truncate(0)
        self.blocks, self._names = list(blocks), [self.pool.name(block) for block in blocks]

    def missing(self, length: int, new: int) -> int:
        """How many blocks the pool must give before `new` tokens can be written behind the first `length`."""
        return max(0, self._count(length + new) - len(self.blocks)) + (new > 0 and self._must_copy())

    def reserve(self, length: int, new: int) -> None:
        """Take what is missing. Afterwards no other table holds the slots of the new tokens."""
        if new and self._cut:  # the new tokens begin inside a block that was used before
            pool, kept = self.pool, length % self.pool.block_size
            if self._must_copy():  # copy on write: the others go on reading theirs
                [copy], old = pool.take(1), self.blocks[-1]
                for memory in (pool.keys, pool.values):
                    memory[:, copy, :kept] = memory[:, old, :kept]
                self.blocks[-1] = copy
                pool.give_back([old])
            else:
                pool.forget(self.blocks[-1])
                for memory in (pool.keys, pool.values):
                    memory[:, self.blocks[-1], kept:] = 0
            self._cut = False
        self.blocks += self.pool.take(max(0, self._count(length + new) - len(self.blocks)))

    def learn(self, tokens: Sequence[int]) -> None:
        """Make the full blocks of the sequence findable. `tokens`: all that are written, from position 0 on."""
        size = self.pool.block_size
        for start in range(len(self._names) * size, len(tokens) - size + 1, size):
            before = self._names[-1] if self._names else 0
            block = self.blocks[start // size]
            self._names.append(self.pool.learn(block, self.tenant, before, tuple(tokens[start : start + size])))

    def truncate(self, n: int) -> None:
        """Give back all blocks behind the first n tokens."""
        gone = self.blocks[self._count(n) :]
        del self.blocks[len(self.blocks) - len(gone) :], self._names[n // self.pool.block_size :]
        self._cut = n % self.pool.block_size > 0
        self.pool.give_back(gone)  # last: an interrupt may lose blocks, but never give them back twice

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)  # rounded up

    def _must_copy(self) -> bool:
        return self._cut and self.pool.users[self.blocks[-1]] > 1


class PagedCache(Cache):
    """A cache whose rows lie in the blocks of a pool. Without a `pool` it makes its own, large enough for all rows.

    The pool may be smaller than the capacity of all its caches together: `reserve` says when it is full. With its
    prompt's first blocks known in the pool, `reuse` adopts them; blocks are shared only between caches of one `tenant`.
    `rows` and `lengths` are plain lists: between two passes a row may leave a batch, and another one join it (of a
    cache with a single row, clear `tokens` then). New weights in the same model make all that the pool knows wrong.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, batch: int = 1,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *,
                 pool: BlockPool | None = None, tenant: Hashable = None):
        super().__init__(layers, kv_heads, head_dim, capacity, batch, dtype, device)
        if pool is None:
            pool = BlockPool(layers, kv_heads, head_dim, -(-self.capacity // 16) * batch, 16, dtype, device)
        if not isinstance(pool, BlockPool):
            raise ValueError(f"a pool is made with ll.BlockPool.of(model, blocks=64), not {pool!r}")
        theirs = pool.keys.shape[0], *pool.keys.shape[3:], pool.keys.dtype, pool.keys.device
        if theirs != (layers, kv_heads, head_dim, dtype, self.device):
            raise ValueError(f"this pool is for layers, kv_heads, head_dim, dtype, device {theirs}, not for "
                             f"{(layers, kv_heads, head_dim, dtype, self.device)}: make one with BlockPool.of(model)")
        if not isinstance(tenant, (str, int, type(None))):  # of others, ("a", 1) equals ("a", True)
            raise ValueError(f"a tenant is a name or a whole number, not {tenant!r}")
        self.pool, self.tenant = pool, tenant
        self.rows = [BlockTable(pool, tenant) for _ in self.lengths]
        self._place: tuple | None = None  # where the new tokens go and all tokens lie, the same in every layer

    @property
    def model(self) -> weakref.ref | None:
        return self.pool.model

    @model.setter
    def model(self, model: weakref.ref) -> None:
        if self.pool.model is not None and self.pool.model() is not model():
            raise ValueError("this pool holds keys and values of another model: make one with BlockPool.of(model)")
        self.pool.model = model

    @property
    def nbytes(self) -> int:
        """The memory of the blocks that its rows hold; the pool's own `nbytes` is that of all blocks."""
        return len({block for row in self.rows for block in row.blocks}) * self.pool.nbytes // (self.pool.blocks + 1)

    def _make_room(self, new: list[int]) -> None:
        tables = list(zip(self.rows, self.lengths, new))
        missing = sum(table.missing(length, more) for table, length, more in tables)
        if missing > self.pool.free_blocks:
            self.pool.take(missing)  # refuses, before any row has taken one
        for table, length, more in tables:
            table.reserve(length, more)
        self._place = None

    def _locate(self) -> tuple[Tensor, Tensor]:
        """The slots that the new tokens go to, counted through all blocks; and the blocks of each row, as many each."""
        size, width = self.pool.block_size, -(-self._total // self.pool.block_size)
        slots = [row.blocks[p // size] * size + p % size for row, length, new in zip(self.rows, self.lengths, self._new)
                 for p in range(length, length + new)]
        blocks = [block for row in self.rows for block in (row.blocks[:width] + [0] * width)[:width]]
        return tuple(torch.tensor(numbers, dtype=torch.long, device=self.device) for numbers in (slots, blocks))

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._place is None:
            self._place = self._locate()
        return self._through(self.pool.keys[layer], k), self._through(self.pool.values[layer], v)

    def _through(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write new [batch, kv_heads, n, head_dim] into one layer's blocks, and gather all that the rows hold."""
        slots, blocks = self._place
        new = new.transpose(1, 2)  # [batch, n, kv_heads, head_dim]: as it lies in a block
        if self._alike:
            new = new[:, : self._new[0]].flatten(0, 1)
        else:
            new = torch.cat([row[:count] for row, count in zip(new, self._new)])
        memory.flatten(0, 1).index_copy_(0, slots, new)
        held = memory.index_select(0, blocks).view(len(self.rows), -1, *memory.shape[2:])
        return held[:, : self._total].transpose(1, 2)

    def remember(self, ids: list[int]) -> None:
        super().remember(ids)
        self.rows[0].learn(self.tokens)

    def reuse(self, ids: Sequence[int]) -> int:
        super().reuse(ids)
        ids = list(map(operator.index, ids))
        blocks = self.rows[0].find(ids)
        if len(blocks) * self.pool.block_size > self.length:
            self.rows[0].adopt(blocks)
            self.lengths = [len(blocks) * self.pool.block_size]
            self.tokens = ids[: self.length]
            self._new = None
        return self.length

    def free(self, row: int) -> None:
        """Give back the blocks of one row, which is then empty."""
        if whole_number("row", row, 0) >= len(self.rows):
            raise ValueError(f"there is no row {row}: this cache has rows 0 to {len(self.rows) - 1}")
        self.rows[row].truncate(0)
        self.lengths[row] = 0
        self.tokens, self._new = [], None

    def close(self) -> None:
        """Give back all blocks. The cache is empty, and can be used again."""
        self.truncate(0)

    def _drop(self, n: int, held: int) -> None:
        for row, length in zip(self.rows, self.lengths):
            row.truncate(length)
