"""Lesson 01: counting pairs, merging, encoding with merges in order, streaming without broken characters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ...bpe import BPETokenizer, pre_split
from ...gpt2 import gpt2_ranks, gpt2_tokenizer
from .core import Wrong, exercise

A, B, C, D, X = b"abcdx"
FAMILY = "👨\u200d👩\u200d👧"
PAGE = f"""It's 2026: don't ask what 12345 GPUs cost, ask what they READ.  Two  spaces, a tab\tand "quotes".
    for i in range(10):
        print(f"{{i:>3}} {{i ** 2}}")   # code, with its spaces
Über naïve Größen. Все люди рождаются свободными. 人人生而自由。 सभी मनुष्यों को 🦙 {FAMILY}
internationalization, pneumonoultramicroscopicsilicovolcanoconiosis; hi<|endoftext|> aaaaaaaaaaaaaaaa!!!???
"""


@exercise
def count_pairs(answer):
    """`count_pairs(ids)` -> {(left, right): how often}."""
    cases = [
        ([A, B, C, D], {(A, B): 1, (B, C): 1, (C, D): 1}, {
            "the last pair is missing: the loop stops one too early": {(A, B): 1, (B, C): 1},
            "it skips every second pair: each id but the first and the last is in two pairs": {(A, B): 1, (C, D): 1},
            "it holds a pair of the last id and the first, which are no neighbours":
                {(A, B): 1, (B, C): 1, (C, D): 1, (D, A): 1}}),
        ([A, B, A, C, A, B], {(A, B): 2, (B, A): 1, (A, C): 1, (C, A): 1}, {
            "each pair is counted only once, however often it occurs": {(A, B): 1, (B, A): 1, (A, C): 1, (C, A): 1},
            "it does not tell (97, 98) from (98, 97): the order of the two matters": {(A, B): 3, (A, C): 2}}),
        ([A, A, A], {(A, A): 2}, {
            "the pairs overlap: the id in the middle is in both, and there are 2": {(A, A): 1}}),
        ([A], {}, {}),
        ([], {}, {}),
    ]
    for ids, want, mistakes in cases:
        got = answer(ids)
        if not isinstance(got, dict):
            raise Wrong(f"return a dictionary (a Counter is one), not {type(got).__name__}")
        got = {tuple(pair) if isinstance(pair, list) else pair: n for pair, n in got.items() if n}
        if bad := [pair for pair in got if not isinstance(pair, tuple) or len(pair) != 2]:
            raise Wrong(f"the keys are pairs (left id, right id), and one of yours is {bad[0]!r}")
        _judge(got, want, f"for {_text(ids)}, ids {ids}", mistakes)


@exercise
def merge_pair(answer):
    """`merge_pair(ids, pair, new_id)` -> the ids with every occurrence of the pair replaced."""
    cases = [
        ([X, A, B, C], (A, B), [X, 256, C], {
            "the new id came, but the right part of the pair stayed: step over both": [X, 256, B, C],
            "the left part of the pair stayed": [X, A, 256, C],
            "the id after the merged pair is gone: does your loop reach the last id?": [X, 256],
            "nothing was merged (a list never equals a tuple: compare tuple(ids[i:i + 2]) with the pair)":
                [X, A, B, C]}),
        ([A, B, C, A, B], (A, B), [256, C, 256], {
            "only the first occurrence was merged": [256, C, A, B],
            "the pair at the very end was not merged: the loop stops one too early": [256, C, A, B],
            "the last id is gone": [256, C]}),
        ([A, B, X], (A, B), [256, X], {"the last id is gone: it begins no pair, but it belongs to the result": [256]}),
        ([A, A, A], (A, A), [256, A], {
            "you merged overlapping pairs: once two ids are merged, the second is used up": [256, 256],
            "you merged from the right: go from left to right": [A, 256],
            "the last id is gone: it begins no pair, but it belongs to the result": [256]}),
        ([A, A, A, A, A], (A, A), [256, 256, A], {
            "you merged overlapping pairs: once two ids are merged, the second is used up": [256] * 4}),
        ([B, A, C, B], (A, B), [B, A, C, B], {}),
        ([A, X, B], (A, B), [A, X, B], {"the two are not neighbours here: nothing should be merged": [256, X]}),
        ([A], (A, A), [A], {}),
        ([], (A, B), [], {}),
    ]
    for ids, pair, want, mistakes in cases:
        got = _ids(answer(ids, pair, 256))
        _judge(got, want, f"for {_text(ids)}, ids {ids}, and the pair {pair}", mistakes)


@exercise
def bpe_encode(answer):
    """`bpe_encode(ids, merges)` -> the ids of one piece after all merges, in the order in which they were learned."""
    ab_first, bc_first = {(A, B): 256, (B, C): 257}, {(B, C): 256, (A, B): 257}
    levels = {(A, B): 256, (256, C): 257, (257, D): 258}
    cases = [
        ([A, B, X, A, B], ab_first, [256, X, 256], {
            "nothing was merged": [A, B, X, A, B], "only the first occurrence was merged": [256, X, A, B]}),
        ([A, B, C], ab_first, [256, C], {
            "you merged the pair that was learned last; take the one that was learned first (the lowest new id)":
                [A, 257]}),
        ([A, B, C, X, B, C], ab_first, [256, C, X, 257], {
            "you merged the pair that is most frequent in this text; when encoding, only the order of learning counts":
                [A, 257, X, 257],
            "only one pair was merged: go on until no pair of the result is in `merges`": [256, C, X, B, C]}),
        ([A, B, C], bc_first, [A, 256], {
            "you merged the pair that comes first in the text; take the one that was learned first (the lowest new id)":
                [257, C]}),
        ([A, B, C, D], levels, [258], {
            "a token that was merged can be merged again, with its new neighbour": [256, C, D]}),
        ([A, A, A], {(A, A): 256}, [256, A], {"you merged overlapping pairs": [256, 256],
                                              "you merged from the right: go from left to right": [A, 256]}),
        ([X], ab_first, [X], {}),
        ([], ab_first, [], {}),
        ([A, B], {}, [A, B], {}),
    ]
    for ids, merges, want, mistakes in cases:
        got = _ids(answer(ids, merges))
        _judge(got, want, f"for {_text(ids)}, ids {ids}, and the merges {merges}", mistakes)
    pieces, merges, byte_ids = gpt2_page()
    for piece in pieces:
        got, want = _ids(answer([byte_ids[byte] for byte in piece.encode()], merges)), \
            gpt2_tokenizer().encode_ordinary(piece)
        _judge(got, want, f"for the piece {piece!r} and GPT-2's merges", {})


@lru_cache
def gpt2_page() -> tuple[list[str], dict[tuple[int, int], int], list[int]]:
    """The pieces of a page of mixed text, GPT-2's id for each byte, and those of its merges that the page can need.

    A merge makes no difference to a text that lacks the bytes of its token. Leaving these out keeps the check fast for
    an answer that goes through all merges for each piece, which is right, too.
    """
    gpt2, page = BPETokenizer.from_ranks(gpt2_ranks()), PAGE.encode()
    merges = {pair: token for pair, token in gpt2.merges.items() if gpt2.tokens[token] in page}
    return sorted(set(pre_split(PAGE)), key=len), merges, gpt2.byte_ids


@exercise
def stream_pieces(answer):
    """`stream_pieces(tokens)`, tokens as bytes -> the text that can be shown after each; empty pieces do not count."""
    broken = ("a character was broken: its bytes came in several tokens, and you showed a part. Keep them back until "
              "it is whole")
    late = "text came too late: what is complete can be shown at once"
    lost = "bytes that were kept back got lost"
    cases = [
        ([b"Hi", b" there"], ["Hi", " there"], {late: ["Hi there"]}),
        ([b"\xf0\x9f", b"\xa6\x99"], ["🦙"], {lost: []}),
        ([b" \xe7\xa4", b"\xbe!"], [" ", "社!"], {
            "text came too late: the space in the first token is complete, and could be shown at once": [" 社!"],
            lost: ["!"],
            "the space in front of the incomplete character is lost": ["社!"]}),
        ([bytes([byte]) for byte in FAMILY.encode()], list(FAMILY), {late: [FAMILY]}),
        ([b"Hi \xf0\x9f\x91"], ["Hi ", "\ufffd"], {
            "the text ended in the middle of a character, and its bytes vanished. When nothing more comes, show U+FFFD "
            "for them": ["Hi "]}),
        ([b"a", b"\xef\xbf\xbd", b"b"], ["a", "\ufffd", "b"], {
            "U+FFFD is a character of its own (EF BF BD) and may stand in the text: look at the bytes to see whether a "
            "character is incomplete, not at the decoded text": ["a", "\ufffdb"],
            "the text held the character U+FFFD itself (EF BF BD), and it got lost": ["a", "b"]}),
        ([b"\xff", b"o", b"k"], ["\ufffd", "o", "k"], {
            "the byte FF can never become a character, and everything after it waits for it: show U+FFFD at once and "
            "go on": ["\ufffdok"],
            "the byte FF, which can never become a character, was left out: show U+FFFD for it": ["o", "k"]}),
        ([b"", b"ok"], ["ok"], {}),
        ([], [], {}),
    ]
    for tokens, want, mistakes in cases:
        what = f"for the tokens {tokens if len(tokens) < 5 else f'{tokens[:4]} …'.replace('] …', ', …]')}"
        got = _pieces(answer(tokens), what)
        if b"".join(tokens).decode(errors="replace").count("\ufffd") < "".join(got).count("\ufffd"):
            raise Wrong(f"{what}: {broken}")
        _judge(got, want, what, mistakes)


def _judge(got, want, what: str, mistakes: dict) -> None:
    if got == want:
        return
    for words, wrong in mistakes.items():
        if got == wrong:
            raise Wrong(f"{what}: {words}")
    raise Wrong(f"{what} the result is {got}, and should be {want}")


def _listed(got, what: str = "") -> list:
    """All that a learner's function returned or yields: a generator runs, and fails, only now."""
    try:
        return list(got)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"{what}your function raised {type(error).__name__}: {error}") from error


def _ids(got) -> list[int]:
    """A learner's ids, in any container or generator, as a list of whole numbers."""
    if isinstance(got, (str, bytes, dict)) or not isinstance(got, Iterable):
        raise Wrong(f"return a list of ids, not {got!r}")
    ids = _listed(got)
    for i in ids:
        try:
            whole = not isinstance(i, (str, bytes)) and int(i) == i
        except Exception:
            whole = False
        if not whole:
            raise Wrong(f"return a list of ids, whole numbers; one of yours is {i!r}")
    return [int(i) for i in ids]


def _pieces(got, what: str) -> list[str]:
    """The pieces a learner's function returned or yielded, without the empty ones."""
    if isinstance(got, str) or not isinstance(got, Iterable):
        raise Wrong(f"return a list of pieces (or yield them), not {type(got).__name__}")
    pieces = _listed(got, f"{what} ")
    if not all(isinstance(piece, str) for piece in pieces):
        raise Wrong(f"{what} each piece should be text (str), not bytes or numbers: {pieces!r}")
    return [piece for piece in pieces if piece]


def _text(ids: list[int]) -> str:
    return repr(bytes(ids).decode())
