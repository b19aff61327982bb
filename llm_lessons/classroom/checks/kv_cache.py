"""Lesson 07: a cache that grows, a cache in a block of memory, what a token costs, and the mask of a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .core import Wrong, as_tensor, compare, exercise


def _numbered(heads: int, tokens: int, size: int, first: float) -> Tensor:
    """Keys or values of which no two numbers are alike: [heads, tokens, size], counted from `first`."""
    return first + torch.arange(heads * tokens * size, dtype=torch.float32).reshape(heads, tokens, size)


def _two(got, what: str) -> tuple[Tensor, Tensor]:
    """The keys and the values of an answer: two tensors, in a tuple, a list, or stacked."""
    if isinstance(got, dict) or not hasattr(got, "__len__") or len(got) != 2:
        raise Wrong(f"return two things, {what}: `return keys, values`")
    return as_tensor(got[0], "the keys"), as_tensor(got[1], "the values")


# --- A cache that grows -----------------------------------------------------------------------------------------------

@exercise
def append(answer: Callable) -> None:
    """`answer(keys, values, k, v)`: old [heads, tokens, d] and new [heads, more, d] -> all keys, all values."""
    for heads, held, more, size in ((3, 3, 3, 4), (2, 5, 1, 4), (3, 0, 4, 2), (1, 2, 3, 4)):
        old = _numbered(heads, held, size, 0), _numbered(heads, held, size, 1000)
        new = _numbered(heads, more, size, 500), _numbered(heads, more, size, 1500)
        case = f"for {held} cached and {more} new tokens:"
        try:
            got = _two(answer(*old, *new), "all keys and all values")
        except Wrong as wrong:
            if "Sizes of tensors must match" in str(wrong):
                raise Wrong(f"{case} torch cannot join them: tokens are dimension 1 of [heads, tokens, d], the only "
                            f"one in which old and new may differ: torch.cat(..., dim=1)") from None
            raise
        if got[0].numel() and torch.equal(got[0].flatten(), torch.cat((old[1], new[1]), 1).double().flatten()):
            raise Wrong(f"{case} keys and values are exchanged: return the keys first")
        for name, a, b, result in (("keys", old[0], new[0], got[0]), ("values", old[1], new[1], got[1])):
            want, other = torch.cat((a, b), 1), torch.cat((old[0], new[0]), 1)
            mistakes = {
                "these are the new ones alone. Join the two": b,
                "these are the old ones alone. torch.cat changes nothing, it returns a longer tensor": a,
                "the new tokens stand before the old: the cache is in the order of the text, so they go to the end":
                    torch.cat((b, a), 1),
                "you joined them as more heads: tokens are dimension 1 of [heads, tokens, d]":
                    torch.cat((a, b), 0) if held == more else b[:0],
                "you joined them as longer vectors: tokens are dimension 1 of [heads, tokens, d]":
                    torch.cat((a, b), 2) if held == more else b[:0],
                "you added old and new up: join them, so that every token keeps its own": a + b if held == more else a}
            if name == "values":
                mistakes["these are the keys: values are a second cache beside them"] = other
            for words, mistake in mistakes.items():
                if result.shape == mistake.shape and torch.equal(result, mistake.double()) \
                        and not torch.equal(mistake, want):
                    raise Wrong(f"{case} the {name} are wrong: {words}")
            if tuple(result.squeeze().shape) != tuple(want.squeeze().shape):
                raise Wrong(f"{case} the {name} should have the shape {list(want.shape)}, not {list(result.shape)}")
            compare(result, want, f"{case} the {name}")


# --- A cache in a block of memory that is allocated once --------------------------------------------------------------

@dataclass(eq=False)
class Room:
    """One layer's memory: keys and values [heads, capacity, d], of which the first `length` tokens are written."""

    keys: Tensor
    values: Tensor
    length: int

    def __repr__(self) -> str:
        return f"a cache of capacity {self.keys.shape[1]} that holds {self.length}"


def _room(capacity: int, length: int, heads: int = 2, size: int = 3) -> Room:
    room = Room(torch.zeros(heads, capacity, size), torch.zeros(heads, capacity, size), length)
    room.keys[:, :length] = _numbered(heads, length, size, 1)
    room.values[:, :length] = _numbered(heads, length, size, 901)
    return room


@exercise
def write(answer: Callable) -> None:
    """`answer(cache, k, v)`: new tokens go behind the first `cache.length`; -> all written keys and values.

    A ValueError, with nothing written, when they do not fit. `cache.length` stays: all layers need it.
    """
    for capacity, length, more in ((8, 3, 1), (8, 0, 5), (6, 2, 4)):
        _writes(answer, capacity, length, more)
    for capacity, length, more in ((4, 3, 2), (4, 4, 1), (3, 0, 4)):
        _refuses(answer, capacity, length, more)


def _writes(answer: Callable, capacity: int, length: int, more: int) -> None:
    room, end = _room(capacity, length), length + more
    keys, values = room.keys, room.values
    k, v = _numbered(2, more, 3, 501), _numbered(2, more, 3, 1501)
    want = torch.cat((keys[:, :length], k), 1), torch.cat((values[:, :length], v), 1)
    case = f"with a capacity of {capacity}, {length} tokens held and {more} new:"
    try:
        got = _two(answer(room, k, v), "all keys and all values so far")
    except Wrong as wrong:
        if isinstance(wrong.__cause__, (ValueError, AssertionError)) and end == capacity:
            raise Wrong(f"{case} a cache that is exactly full is allowed: refuse only what goes beyond") from None
        raise
    if room.length != length:
        raise Wrong(f"{case} you moved cache.length. Every layer writes its keys at the same place, so the model "
                    f"counts once, after the last layer: leave it as it is")
    if room.keys is not keys or room.values is not values:
        raise Wrong(f"{case} you put a new tensor in the place of cache.keys or cache.values: that copies all that is "
                    f"held, at every step. Write into the memory that is there: cache.keys[:, start:end] = k")
    for name, memory, new, right in (("keys", keys, k, want[0]), ("values", values, v, want[1])):
        stored = memory[:, :end]
        if torch.equal(stored, right) and not memory[:, end:].any():
            continue
        where = [start for start in range(capacity - more + 1) if torch.equal(memory[:, start : start + more], new)]
        if where:
            at = f"{length}" if more == 1 else f"{length} to {end - 1}"
            raise Wrong(f"{case} the new {name} were written at position {where[0]}: they belong behind the {length} "
                        f"that are there, at {at}")
        other = v if name == "keys" else k
        if torch.equal(memory[:, length:end], other):
            raise Wrong(f"{case} {'the values' if name == 'keys' else 'the keys'} were written into cache.{name}")
        if not memory[:, length:].any() and torch.equal(memory[:, :length], right[:, :length]):
            raise Wrong(f"{case} nothing was written into cache.{name}: the next step would not find them")
        raise Wrong(f"{case} cache.{name}, positions 0 to {end - 1}, does not hold the old {name} and then the new")
    for name, result, right, other in (("keys", got[0], *want), ("values", got[1], *reversed(want))):
        shape = list(result.shape)
        if shape[1:2] == [capacity] and end < capacity:
            raise Wrong(f"{case} you return all {capacity} rows, also the {capacity - end} that nobody wrote. Softmax "
                        f"gives a key of zeros the weight e^0, not 0: return the first {end} alone")
        if shape[1:2] == [more] and length:
            raise Wrong(f"{case} you return the {more} new {name} alone: attention looks at all {end}")
        if shape[1:2] == [length] and more:
            raise Wrong(f"{case} you return the {name} from before: a token also looks at itself, so at all {end}")
        compare(result, right, f"{case} the {name}", {
            "keys and values are exchanged: return the keys first": other})


def _refuses(answer: Callable, capacity: int, length: int, more: int) -> None:
    room = _room(capacity, length)
    keys, values = room.keys, room.values
    before = keys.clone(), values.clone()
    case = f"with a capacity of {capacity}, {length} tokens held and {more} new:"
    raised: BaseException | None = None
    try:
        answer(room, _numbered(2, more, 3, 501), _numbered(2, more, 3, 1501))
    except Wrong as wrong:
        raised = wrong.__cause__
        if raised is None and "returned None" not in str(wrong):
            raise
    if not (torch.equal(keys, before[0]) and torch.equal(values, before[1])):
        if raised is not None:
            raise Wrong(f"{case} it fails half-way, with something already written: look whether they fit, first")
        lost = "The rest is lost" if torch.equal(keys[:, :1], before[0][:, :1]) else \
            "What was at position 0 is lost, and the mask still takes row i for position i"
        raise Wrong(f"{case} they do not fit, and you wrote all the same. {lost}: raise ValueError")
    if room.keys is not keys or room.values is not values:
        raise Wrong(f"{case} you made the memory larger: a capacity is a promise. Raise ValueError")
    if raised is None:
        raise Wrong(f"{case} they do not fit, and nothing is said: raise ValueError, which names the capacity")
    if not isinstance(raised, ValueError):
        raise Wrong(f"{case} {type(raised).__name__} was raised, and callers wait for ValueError: look whether they "
                    f"fit, and raise it with words that name the capacity")


# --- What a token costs -----------------------------------------------------------------------------------------------

@exercise
def kv_bytes_per_token(answer: Callable) -> None:
    """`answer(layers, heads, kv_heads, head_dim, bytes_per_value)` -> bytes of cache for one token."""
    for shape in ((40, 12, 4, 128, 1), (30, 9, 3, 64, 4), (30, 9, 3, 64, 2), (40, 40, 40, 128, 2), (2, 6, 3, 4, 0.5)):
        layers, heads, shared, size, width = shape
        right = 2 * layers * shared * size * width
        case = f"for layers={layers}, heads={heads}, kv_heads={shared}, head_dim={size}, bytes_per_value={width}"
        mistakes = {
            "you counted the query heads: only the heads of keys and values are kept":
                2 * layers * heads * size * width,
            "you counted query and key/value heads: queries are not kept": 2 * layers * (heads + shared) * size * width,
            "you counted queries, keys and values: queries are not kept, so two, not three":
                3 * layers * shared * size * width,
            "half of it: a token has a key and a value": right / 2,
            "half of it, and of the query heads: a token has a key and a value, for each key/value head":
                layers * heads * size * width,
            "this is one layer: every layer has keys and values of its own": right / layers,
            "these are bits: the width is given in bytes": right * 8,
            "an eighth of it: the width is given in bytes, not in bits": right / 8,
            "this is how many numbers they are: multiply by the bytes for each": right / width,
            "2 bytes for each number, always: multiply by bytes_per_value": right / width * 2,
            "divided by the width: multiply by it": 2 * layers * shared * size / width,
            "one head: each key/value head has a key and a value": right / shared,
            "these are KiB: give bytes": right / 1024, "these are kB: give bytes": right / 1000}
        compare(answer(*shape), right, f"{case} the answer", mistakes, tolerance=1e-6)


# --- The mask of a window ---------------------------------------------------------------------------------------------

def _window(past: int, new: int, window: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The mask [new, past + new] of a causal window, and those that come of known mistakes."""
    q, k = past + torch.arange(new)[:, None], torch.arange(past + new)  # the positions of queries and keys
    right = (k <= q) & (k > q - window)
    return right, {
        "the mask is upside down: True means that the query may look": ~right,
        f"a query sees {window + 1} keys: with itself there should be {window}": (k <= q) & (k >= q - window),
        f"a query sees {window - 1} keys: with itself there should be {window}": (k <= q) & (k > q - window + 1),
        "a token does not see itself: the window begins with it": (k < q) & (k >= q - window),
        "the window is missing: this is the plain causal mask": k <= q,
        "a query sees later tokens: the window reaches back only": (k - q).abs() < window,
        "a query sees later tokens: a key's position must not be above the query's": k > q - window,
        f"your mask takes the first new token for position 0: it stands at position {past}":
            (k <= q - past) & (k > q - past - window),
        "every query sees the same keys: the window moves with the query":
            (k >= past + new - window).expand(new, -1)}


@exercise
def window_mask(answer: Callable) -> None:
    """`answer(past, new, window)` -> True where a new token may look: at itself and the window - 1 before it."""
    for past, new, window in ((0, 6, 3), (5, 1, 4), (4, 3, 2), (3, 3, 9), (6, 2, 1), (0, 1, 1)):
        asked = f"for past={past}, new={new}, window={window}:"
        got = answer(past, new, window)
        mask = as_tensor(got, f"{asked} the mask")
        if list(mask.shape[-2:]) == [new, new] and past:
            raise Wrong(f"{asked} there are {past + new} keys, and your mask has {new} columns: the {past} tokens in "
                        f"the cache are keys, too")
        if list(mask.shape[-2:]) != [new, past + new] or mask.numel() != new * (past + new):
            raise Wrong(f"{asked} the mask should have the shape {[new, past + new]}, not {list(mask.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise Wrong(f"{asked} the mask should hold True and False, not numbers to add to the scores")
        mask, (want, mistakes) = mask.reshape(new, past + new).bool(), _window(past, new, window)
        if torch.equal(mask, want):
            if isinstance(got, Tensor) and got.dtype != torch.bool:
                raise Wrong(f"{asked} the places are right, but {got.dtype} is not True and False: attention adds a "
                            f"mask of floats to the scores, and takes no whole numbers. Make it a comparison, or call "
                            f".bool()")
            continue
        for words, mistake in mistakes.items():
            if torch.equal(mask, mistake):
                raise Wrong(f"{asked} {words}")
        row, column = map(int, (mask != want).nonzero()[0])
        may = "must not" if mask[row, column] else "must"
        raise Wrong(f"{asked} row {row} stands at position {past + row}, and {may} see the key at position {column}")
