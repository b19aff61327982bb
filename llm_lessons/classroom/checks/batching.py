"""Lesson 09: who runs in the next step, what it reads, who was served in time, and whose blocks may be found."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from .core import Wrong, compare, exercise


def _whole(got, what: str) -> int:
    """An answer as a whole number; one in a tensor or an array is welcome."""
    try:
        return operator.index(got.item() if hasattr(got, "item") else got)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{what} should be a whole number, not {str(got)[:60]}") from None


# --- Who runs in the next step ----------------------------------------------------------------------------------------

def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _starters(needs: Sequence[int], free: int, places: int) -> int:
    """How many of the first requests fit, with these needs of blocks; the first that does not fit ends it."""
    return sum(total <= free for total in accumulate(needs[: max(0, places)]))


@exercise
def admit(answer: Callable) -> None:
    """`answer(waiting, free_blocks, free_places, block_size)` -> how many of the waiting prompts start, oldest first.

    Each needs blocks for its tokens and one token more. Nobody overtakes.
    """
    for waiting, free, places, size in (
            ([20, 40, 10], 8, 4, 16), ([20], 2, 8, 16), ([20], 1, 8, 16), ([16], 1, 8, 16), ([15], 1, 8, 16),
            ([10, 100, 10], 3, 8, 16), ([5] * 6, 20, 2, 16), ([30, 30, 30], 5, 8, 16), ([7, 8, 3], 5, 3, 4),
            ([9, 9], 4, 0, 4), ([9, 9, 9, 9], 2, 8, 16), ([], 4, 4, 16)):
        case = f"for waiting={waiting}, free_blocks={free}, free_places={places}, block_size={size}:"
        got = answer(waiting, free, places, size)
        if isinstance(got, (list, tuple)):
            raise Wrong(f"{case} give back how many start, a number, not the requests themselves")
        got = _whole(got, f"{case} the answer")
        right = _starters([_blocks(n + 1, size) for n in waiting], free, places)
        if got == right:
            continue
        for words, mistake in _admissions(waiting, free, places, size).items():
            if got == mistake:
                raise Wrong(f"{case} {got} is wrong, {right} would be right. {words}")
        raise Wrong(f"{case} it should be {right}, not {got}. Take the oldest, count its blocks, see whether they are "
                    f"free, take them away from the free ones; then the next")


def _admissions(waiting: list[int], free: int, places: int, size: int) -> dict[str, int]:
    """What known mistakes answer."""
    needs, left, overtaking = [_blocks(n + 1, size) for n in waiting], free, 0
    for need in needs:
        if need <= left and overtaking < places:
            overtaking, left = overtaking + 1, left - need
    return {
        "A younger request overtook one that did not fit. A large one would then wait for ever: stop at the first "
        "that does not fit": overtaking,
        "You forgot the places: at most free_places requests may start": _starters(needs, free, len(needs)),
        "You forgot that each takes its blocks away from those that are free":
            next((i for i, need in enumerate(needs[:places]) if need > free), min(places, len(needs))),
        "A prompt needs room for one token more: the first of its answer":
            _starters([_blocks(n, size) for n in waiting], free, places),
        "Half a block is a block: round up": _starters([(n + 1) // size for n in waiting], free, places),
        "n // block_size + 1 is one block too many where a text fills its last block":
            _starters([(n + 1) // size + 1 for n in waiting], free, places),
        "A request may take the last free block: it is enough if they just fit":
            sum(total < free for total in accumulate(needs[:places])),
        "Two requests never share a block that is half empty: round up for each of them, then add":
            sum(total <= free * size for total in accumulate(n + 1 for n in waiting[:places])),
        "You compared tokens with blocks: divide by the block size, rounded up":
            _starters([n + 1 for n in waiting], free, places)}


# --- What a step reads ------------------------------------------------------------------------------------------------

def _chunks(unread: Sequence[int], budget: int) -> list[int]:
    chunks = []
    for tokens in unread:
        chunks.append(min(tokens, budget))
        budget -= chunks[-1]
    return chunks


@exercise
def plan_step(answer: Callable) -> None:
    """`answer(decoding, unread, budget)` -> how many tokens of each prompt, oldest first, the step reads.

    Each of the `decoding` requests takes one token of the budget before.
    """
    for decoding, unread, budget in ((3, [10, 50], 32), (0, [100], 64), (2, [3, 4], 100), (4, [40, 3], 20),
                                     (8, [5], 8), (1, [6, 6, 6], 11), (1, [], 8)):
        case = f"for decoding={decoding}, unread={unread}, budget={budget}:"
        got = answer(decoding, unread, budget)
        try:
            got = [_whole(chunk, f"{case} a chunk") for chunk in got]
        except TypeError:
            raise Wrong(f"{case} give back a list, a number of tokens for each prompt, not {got!r}") from None
        right = _chunks(unread, budget - decoding)
        if got == right:
            continue
        for words, mistake in _plans(decoding, unread, budget).items():
            if got == mistake:
                raise Wrong(f"{case} {got} is wrong: {words}")
        if len(got) != len(unread):
            raise Wrong(f"{case} there are {len(unread)} prompts, and you give {len(got)} numbers: a prompt that must "
                        f"wait gets 0")
        if any(chunk < 0 for chunk in got):
            raise Wrong(f"{case} {got} has a number below 0: min(tokens, what is left), and nothing is left for some")
        if sum(got) + decoding > budget:
            raise Wrong(f"{case} {got} and the {decoding} that decode are more than {budget} tokens")
        raise Wrong(f"{case} it should be {right}, not {got}")


def _plans(decoding: int, unread: list[int], budget: int) -> dict[str, list[int]]:
    left, whole = budget - decoding, []
    for tokens in unread:
        whole.append(tokens if tokens <= left else 0)
        left -= whole[-1]
    left, count = budget - decoding, max(1, len(unread))
    return {
        "the requests that decode come first, and take a token each from the budget": _chunks(unread, budget),
        "the budget is one for all prompts together: what the first reads is gone for the second":
            [min(tokens, left) for tokens in unread],
        "a prompt that does not fit whole is read in part: that is the point of chunks": whole,
        "the youngest prompt was served first: the oldest has waited longest": _chunks(unread[::-1], left)[::-1],
        "you shared the budget out evenly. Then every prompt is done late: the oldest takes what it can use":
            [min(tokens, left // count) for tokens in unread],
        "these are all unread tokens, whatever the budget": list(unread)}


# --- Who was served in time -------------------------------------------------------------------------------------------

GOOD = (2.0, [2.5, 2.55, 2.6, 2.65])  # a request: submitted, and when each token came, in seconds
ONE_BY_ONE = [  # with limits of 1.0 and 0.1: a request, is it in time, and what to say to who thinks otherwise
    (GOOD, True, "its first token came after 0.5 s, the others 0.05 s apart. Time per output token is counted from the "
     "first token on: what came before is TTFT"),
    ((1.0, [4.2, 4.25, 4.3]), False, "its first token came 3.2 s after it was submitted. Time to first token counts "
     "from there, the time in which it waited included"),
    ((3.0, [3.2, 3.44, 3.68]), False, "its tokens came 0.24 s apart: the later tokens have a limit, too"),
    ((0.0, [0.2, 0.32, 0.44]), False, "three tokens have two gaps between them: divide by one less than there are "
     "tokens, which gives 0.12 s"),
    ((0.0, [0.2, 0.22, 0.24, 0.44]), True, "its three gaps are 0.08 s on average: the limit is for the mean, not "
     "for the longest"),
    ((0.0, [0.2, 0.21, 0.22, 0.62]), False, "its three gaps are 0.14 s on average: the limit is for the mean, not for "
     "the median"),
    ((4.0, [4.4]), True, "an answer of one token has no gap that could be too long: the first limit alone decides"),
    ((0.0, [1.0]), True, "1.0 s is still within a limit of 1.0 s"),
    ((5.0, []), False, "it has no token yet: that is not in time")]


@exercise
def within_limits(answer: Callable) -> None:
    """`answer(requests, ttft_limit, tpot_limit)` -> the share of requests, 0 to 1, that were served within both.

    A request is (submitted, times of its tokens). No token at all is not in time; a single one has no TPOT to miss.
    """
    for request, right, words in ONE_BY_ONE:
        compare(answer([request], 1.0, 0.1), float(right), f"limits 1.0 and 0.1, requests {[request]}: the share",
                {words: float(not right)})
    late, unanswered = ONE_BY_ONE[1][0], ONE_BY_ONE[-1][0]
    for requests, right, mistakes in (
            ([GOOD, GOOD, late], 2 / 3, {
                "this is how many they are: divide by the number of requests": 2.0,
                "you judged the mean of all requests. Nobody gets the mean: judge each one": 0.0}),
            ([GOOD, unanswered], 1 / 2, {
                "you left out the request without an answer. Its user waits longest: count it as missed": 1.0})):
        compare(answer(requests, 1.0, 0.1), right, f"limits 1.0 and 0.1, requests {requests}: the share", mistakes)
    everybody = [request for request, *_ in ONE_BY_ONE]
    compare(answer(everybody, 9.0, 9.0), 8 / 9, "limits of 9.0 and 9.0, nine requests: the share", {
        "the limits are given to your function, and may be others than 1.0 and 0.1": 4 / 9})


# --- Whose blocks may be found ----------------------------------------------------------------------------------------

SAME = [("alice", 0, (5, 6)), ("bob", 7, (5, 6)), (None, 3, (9, 9))]
DIFFERENT = [  # two blocks that must not be taken for each other, and what would happen
    (("alice", 0, (5, 6)), ("bob", 0, (5, 6)), "bob would read alice's blocks, and could tell from the time that she "
     "sent this text: the tenant belongs into the key"),
    (("alice", 3, (5, 6)), ("alice", 7, (5, 6)), "keys and values depend on all tokens before, so the same tokens "
     "behind another block are other keys, and the answer would be wrong: the block before belongs into the key"),
    (("alice", 3, (5, 6)), ("alice", 3, (5, 7)), "other tokens: they belong into the key"),
    (("alice", 3, (5, 6)), ("alice", 3, (6, 5)), "the same tokens in another order are another text"),
    (("alice", 3, (5, 5, 6)), ("alice", 3, (5, 6, 6)), "a set forgets how often a token stands there"),
    (("alice", 3, (1, 23)), ("alice", 3, (12, 3)), "glued together both read 123: keep the parts apart, in a tuple"),
    (("a1", 2, (5, 6)), ("a", 12, (5, 6)), "glued together both read a12: a tenant could choose its name so that it "
     "finds another's blocks. Keep the parts apart, in a tuple"),
    ((1, 0, (5, 6)), ("1", 0, (5, 6)), "the number 1 and the text \"1\" are two tenants: as text they are one"),
    ((None, 0, (5, 6)), ("None", 0, (5, 6)), "no tenant, and a tenant who is called \"None\": as text they are one"),
    ((0, 0, (5, 6)), (None, 0, (5, 6)), "tenant 0, and no tenant, are two: keep the tenant as it is"),
    ((-1, 0, (5, 6)), (-2, 0, (5, 6)), "these two have the same hash: in Python hash(-1) == hash(-2). A hash says "
     "where to look, not that two things are equal: return the parts themselves")]


@exercise
def block_key(answer: Callable) -> None:
    """`answer(tenant, before, tokens)` -> a key under which a block is kept, and found by nobody else."""
    for case in SAME:
        first, second = answer(*case), answer(case[0], case[1], tuple(list(case[2])))
        try:
            equal = len({first, second}) == 1
        except TypeError:
            raise Wrong(f"{first!r} cannot be the key of a dictionary (a list or a set can change): return a tuple"
                        ) from None
        if not equal:
            raise Wrong(f"for {case} you gave two different keys, {first!r} and {second!r}: then nobody finds anything")
    for one, other, words in DIFFERENT:
        if answer(*one) == answer(*other):
            raise Wrong(f"{one} and {other} (tenant, before, tokens) get the same key: {words}")
