"""Lesson 10: how many users fit, which plan is the cheapest that will do, and is the plan or its program at fault?"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from numbers import Real

from ...capacity import SHAPES, Shape
from ...devices import DEVICES, Device
from ...planner import Plan, plan
from .core import Wrong, exercise, show

# --- How many users fit -----------------------------------------------------------------------------------------------

CASES = (  # shape, gigabytes, context, weight bits, cache bits; the first tells nearly all mistakes apart
    ("smollm2-135m", 24, 1024, 16, 8),
    ("llama-3-8b", 24, 4096, 16, 16), ("llama-3-8b", 80, 8192, 8, 16), ("qwen3-4b", 24, 4096, 16, 8),
    ("llama-2-13b", 80, 2048, 16, 16), ("llama-3-70b", 80, 8192, 16, 16))


def _users(s: Shape, gigabytes: float, context: int, weight_bits: float, kv_bits: float, *, heads: int | None = None,
           head_dim: int | None = None, kinds: int = 2, gb: float = 1e9, kept: float = 0.9, bits: int = 8,
           cache_bits: int = 8, layers: int | None = None) -> float:
    """Users that fit, not rounded; right, or with a mistake: `kinds` keys and values, `kept` what may be filled."""
    token = kinds * (layers or s.layers) * (heads or s.kv_heads) * (head_dim or s.head_dim) * kv_bits / cache_bits
    return (gigabytes * gb * kept - s.parameters * weight_bits / bits) / (context * token)


@exercise
def users_that_fit(answer: Callable) -> None:
    """`answer(shape, gigabytes, context, weight_bits, kv_bits)` -> users of whom each has `context` tokens cached."""
    for name, *case in CASES:
        s, (gigabytes, context, weight_bits, kv_bits) = SHAPES[name], case
        right = max(0, math.floor(_users(s, *case)))
        asked = (f"for {name}, {gigabytes} GB, {context:,} tokens each, {weight_bits}-bit weights and {kv_bits}-bit "
                 f"cache: ")
        got = _number(answer(s, *case), asked)
        if got == right:
            continue
        room, weights = gigabytes * 0.9e9, s.parameters * weight_bits / 8
        mistakes = {
            "you round up: the last of them does not fit whole. Round down": math.ceil(_users(s, *case)),
            "the cache has the width of the weights here, and kv_bits may be another":
                _users(s, *case) * kv_bits / weight_bits,
            "the cache is counted for the query heads. Only the kv_heads are kept": _users(s, *case, heads=s.heads),
            "head_dim is not hidden / heads in this model: take shape.head_dim":
                _users(s, *case, head_dim=s.hidden // s.heads),
            "each token has a key and a value: 2 times what you count": _users(s, *case, kinds=1),
            "these are as many as fit into so many GiB. A GB is 10^9 bytes": _users(s, *case, gb=2**30),
            "nothing is kept free: weights and cache may fill 90 % of the memory": _users(s, *case, kept=1),
            "bits are taken for bytes: a byte has 8 bits": _users(s, *case, bits=1, cache_bits=1),
            "kv_bits are bits: divide by 8": _users(s, *case, cache_bits=1),
            "every layer has a cache of its own": _users(s, *case, layers=1),
            "10 % are kept of the whole memory, not of what the weights leave":
                (gigabytes * 1e9 - weights) * 0.9 / (context * s.kv_bytes_per_token(kv_bits / 8)),
            "gigabytes are taken for bytes: a GB is 10^9 of them": _users(s, *case, gb=1),
            "the weights are forgotten: they lie in the same memory":
                room / (context * s.kv_bytes_per_token(kv_bits / 8)),
            "each user has weights of their own here. All users share one copy":
                room / (weights + context * s.kv_bytes_per_token(kv_bits / 8)),
            "this is the cache of one token for each user. Each has a context of many": _users(s, *case) * context,
        }
        for words, wrong in mistakes.items():
            if math.floor(max(0, wrong)) != right and math.floor(got) in (math.floor(wrong), math.floor(max(0, wrong))):
                raise Wrong(f"{asked}{words} (you give {got:g}, right is {right})")
        if got < 0:
            raise Wrong(f"{asked}you give {got:g} users. Where the weights alone are too large, nobody fits: 0")
        if math.floor(got) == right:
            raise Wrong(f"{asked}you give {got:g}: users are whole people, round down to {right}")
        raise Wrong(f"{asked}you give {got:g}, and right is {right}: 90 % of the memory, without the weights, divided "
                    f"by the cache of one user")


def _number(got, asked: str) -> float:
    with suppress(AttributeError, ValueError, RuntimeError):  # a number in an array or a tensor, or something else
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, Real) or not math.isfinite(got):
        raise Wrong(f"{asked}return a number of users, not {got!r:.60}")
    return float(got)


# --- The cheapest plan ------------------------------------------------------------------------------------------------

COUNTS, WEIGHT_BITS, KV_BITS = (1, 2, 4, 8), (16, 8, 4.5), (16, 8)
SCENARIOS = (  # model, device, context, users, the longest time per token, in seconds, and the plan's share of it
    ("llama-3-8b", "l4", 4096, 8, 0.1, 0.8), ("llama-3-8b", "l4", 4096, 8, 0.09, 0.5),
    ("llama-3-8b", "l4", 8192, 32, 0.3, 0.6),
    ("llama-3-70b", "h100-sxm", 8192, 32, 0.04, 0.5), ("llama-3-70b", "h100-sxm", 8192, 32, 0.015, 0.6))


@exercise
def cheapest(answer: Callable) -> None:
    """`answer(shape, device, context, users, seconds, share)` -> (count, weight bits, cache bits)."""
    for name, kind, context, users, seconds, share in SCENARIOS:
        shape, device = SHAPES[name], DEVICES[kind]
        plans = {(count, w, kv): plan(shape, device.several(count), w, kv, context=context, users=users)
                 for count in COUNTS for w in WEIGHT_BITS for kv in KV_BITS}
        will_do = [choice for choice, p in plans.items() if p.fits and p.tpot / share <= seconds]
        right = min(will_do, key=lambda choice: (choice[0], -choice[1], -choice[2]))
        asked = (f"for {name} on {kind}, {users} users of {context:,} tokens, at most {1e3 * seconds:g} ms a token, "
                 f"share {share}: ")
        try:
            got = answer(shape, device, context, users, seconds, share)
        except Wrong as wrong:
            if "returned None" not in str(wrong):
                raise
            raise Wrong(f"{asked}your function returns nothing. {right} will do: it fits, and takes "
                        f"{_corrected(plans[right], share)}") from None
        got = got.tolist() if hasattr(got, "tolist") else got  # an array or a tensor
        got = tuple(got) if isinstance(got, (list, tuple)) else got
        if got == right:
            continue
        if not isinstance(got, tuple) or got not in list(plans):
            raise Wrong(f"{asked}return (count, weight bits, cache bits), each from its list, not {got!r:.60}")
        if got not in will_do:
            raise Wrong(f"{asked}you choose {got}, but {_fault(plans[got], seconds, share)}")
        if got[0] > right[0]:
            raise Wrong(f"{asked}you choose {got}, but fewer devices will do: {right}. You pay for "
                        f"devices, so they come first")
        if got[1] < right[1]:
            raise Wrong(f"{asked}you choose {got}, but weights of {right[1]} bits will do as well: {right}. Take no "
                        f"fewer bits than you need")
        raise Wrong(f"{asked}you choose {got}, but a cache of {right[2]} bits will do as well: {right}. Take no fewer "
                    f"bits than you need")


def _fault(p: Plan, seconds: float, share: float) -> str:
    if not p.fits:
        return f"that does not fit: {-p.free / 1e9:.1f} GB are missing"
    return (f"that is too slow: {_corrected(p, share)}, and {1e3 * seconds:g} are allowed"
            + (". Divide the bound by the share" if p.tpot <= seconds else ""))


def _corrected(p: Plan, share: float) -> str:
    return f"at least {1e3 * p.tpot:.1f} ms a token, with the share {1e3 * p.tpot / share:.1f}"


# --- The plan, or the program? ----------------------------------------------------------------------------------------

VERDICTS = ("memory", "device", "program", "fine")
SMALL = Device(name="a small GPU", memory=24 * 10**9, bytes_per_second=300e9, flops_per_second={"bfloat16": 121e12},
               source="the exercise")


def _deployments() -> list[tuple[Plan, float, float, float, str]]:
    """(plan, measured seconds a token, the longest allowed, share, verdict): the bounds are 52 and 64 ms, or 279."""
    shape = SHAPES["llama-3-8b"]
    one, eight, many = (plan(shape, SMALL, context=context, users=users)
                        for context, users in ((4096, 1), (4096, 8), (8192, 64)))
    return [(eight, 0.090, 0.100, 0.8, "fine"), (eight, 0.150, 0.100, 0.8, "program"),
            (eight, 0.150, 0.100, 0.5, "device"), (eight, 0.080, 0.050, 0.8, "device"),
            (many, 0.900, 0.500, 0.8, "memory"), (many, 0.400, 0.500, 0.8, "memory"),
            (many, 0.900, 0.200, 0.8, "memory"), (one, 0.150, 0.100, 0.7, "program"),
            (one, 0.056, 0.030, 0.9, "device"), (one, 0.080, 0.080, 0.5, "fine")]


@exercise
def diagnose(answer: Callable) -> None:
    """`answer(plan, measured, limit, share)` -> "memory", "device", "program" or "fine"; times in seconds a token."""
    why = {"memory": "the plan does not fit: whatever the times are, it will run out of memory",
           "device": "a program that reaches the share takes longer than allowed, too, so a better one is no help",
           "program": "a program that reaches the share is within the limit, and this one is not: it loses the time",
           "fine": "it fits, and what was measured is within the limit"}
    for p, measured, limit, share, right in _deployments():
        users = f"{p.users} {'user' if p.users == 1 else 'users'}"
        try:
            got = answer(p, measured, limit, share)
        except Wrong as wrong:  # a plan in words has many lines
            raise Wrong(str(wrong).replace(show([p]), f"a plan of {users}")) from None
        if isinstance(got, str) and got == right:
            continue
        asked = (f"for a plan of {users} that "
                 f"{'fits' if p.fits else 'does not fit'}, at least {1e3 * p.tpot:.0f} ms a token, with the share "
                 f"{1e3 * p.tpot / share:.0f}, {1e3 * measured:.0f} ms measured and {1e3 * limit:.0f} ms allowed: ")
        if not isinstance(got, str) or got not in VERDICTS:
            raise Wrong(f"{asked}return one of {', '.join(VERDICTS)}, not {got!r:.60}")
        raise Wrong(f"{asked}you say {got!r}, and it is {right!r}: {why[right]}")
