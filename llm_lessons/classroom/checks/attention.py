"""Lesson 03: one head, its mask, heads that share keys, and a score for heads that look back."""

from __future__ import annotations

import torch
from torch import Tensor

from .core import Wrong, as_tensor, compare, exercise


def _random(*shape: int, seed: int = 0, large: float = 1.0) -> Tensor:
    return large * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@exercise
def attention_weights(answer) -> None:
    """`answer(q [T, D], k [S, D])` -> the weights [T, S] of one head without a mask."""
    for q, k in ((_random(2, 4), _random(3, 4, seed=1)), (_random(3, 4), _random(3, 4, seed=1)),
                 (_random(2, 9, seed=2), _random(5, 9, seed=3)), (_random(1, 64, seed=4), _random(7, 64, seed=5)),
                 (_random(2, 4, large=40), _random(3, 4, large=40))):
        scores, d = q @ k.T, q.shape[-1]
        what = f"for queries of shape {list(q.shape)} and keys of shape {list(k.shape)}, the weights"
        mistakes = {"these are the scores; softmax over the keys is still missing": scores / d**0.5,
                    "these are the plain scores; the scale and softmax are still missing": scores,
                    "the scale is missing: before softmax, divide by the square root of d": scores.softmax(-1),
                    "you divided by d; divide by its square root": (scores / d).softmax(-1),
                    "you multiplied by the square root of d; divide by it": (scores * d**0.5).softmax(-1),
                    "you scaled after softmax; scale the scores before it": scores.softmax(-1) / d**0.5,
                    "the softmax runs over the queries: each column sums to 1, where each row must. Use the last "
                    "dimension": (scores / d**0.5).softmax(0),
                    "rows and columns are swapped: a row for each query, a column for each key":
                    (scores / d**0.5).T.softmax(-1)}
        if k.shape[0] != d:
            mistakes["you divided by the square root of the number of keys; d is the length of a vector"] = \
                (scores / k.shape[0] ** 0.5).softmax(-1)
        if q.shape[0] not in (d, k.shape[0]):
            mistakes["you divided by the square root of the number of queries; d is the length of a vector"] = \
                (scores / q.shape[0] ** 0.5).softmax(-1)
        for scale, words in ((2.0, "the scale is always 2"), (8.0, "the scale is always 8, the root of 64")):
            if scale != d**0.5:
                mistakes[f"{words}; here the vectors have {d} numbers: divide by the square root of q.shape[-1]"] = \
                    (scores / scale).softmax(-1)
        if scores.max() < 88:
            mistakes["the rows do not sum to 1: divide exp of the scores by its sum over the keys"] = \
                (scores / d**0.5).exp()
        try:
            got = answer(q, k)
        except Wrong as wrong:
            if "OverflowError" in str(wrong):
                raise Wrong(f"{what} cannot be computed for large scores (up to {scores.max():.0f}): exp overflows. "
                            f"Use torch's softmax, or take the largest score of a row away first") from None
            raise
        if scores.max() > 88 and as_tensor(got, what).isnan().any():
            raise Wrong(f"{what} contain NaN for large scores (up to {scores.max():.0f}): exp overflows. Use torch's "
                        f"softmax, or take the largest score of a row away first")
        compare(got, (scores / d**0.5).softmax(-1), what, mistakes)


@exercise
def causal_mask(answer) -> None:
    """`answer(queries, keys)` -> True where a query may look at a key; the queries are the last of the tokens."""
    for queries, keys in ((3, 3), (4, 4), (1, 5), (2, 5), (3, 7), (1, 1)):
        asked = f"for queries={queries}, keys={keys}"
        got = answer(queries, keys)
        mask = as_tensor(got, f"{asked} the mask")
        if list(mask.shape[-2:]) != [queries, keys] or mask.numel() != queries * keys:
            raise Wrong(f"{asked} the mask should have the shape {[queries, keys]}, not {list(mask.shape)}")
        mask = mask.reshape(queries, keys)
        if not ((mask == 0) | (mask == 1)).all():
            raise Wrong(f"{asked} the mask should hold True and False, not numbers to add to the scores")
        want = torch.ones(queries, keys).tril(keys - queries).double()
        if torch.equal(mask, want):
            if isinstance(got, torch.Tensor) and got.is_floating_point():
                raise Wrong(f"{asked} the places are right, but {got.dtype} is not True and False: attention would add "
                            f"the numbers to the scores. Make it a comparison, or call .bool()")
            continue
        if torch.equal(mask, 1 - want):
            raise Wrong(f"{asked} the mask is upside down: True means that the query may look")
        if torch.equal(mask, torch.ones(queries, keys).tril(keys - queries - 1).double()):
            raise Wrong(f"{asked} a token cannot see itself: the diagonal belongs to the past")
        if torch.equal(mask, torch.ones(queries, keys).tril().double()):
            raise Wrong(f"{asked} your mask starts in the top left corner: the first query stands at position "
                        f"{keys - queries}, and must see the {keys - queries} keys before it")
        row, column = map(int, (mask != want).nonzero()[0])
        position = keys - queries + row
        if mask[row, column]:
            raise Wrong(f"{asked}, row {row} attends to a later token: it stands at position {position}, and sees the "
                        f"key at position {column}")
        raise Wrong(f"{asked}, row {row} stands at position {position}, and must see the key at position {column}")


def _grouped(q: Tensor, k: Tensor, v: Tensor, tiled=False, scale=True, mask: int | None = 0,
             renormalise=True, hidden=-torch.inf) -> Tensor:
    """Grouped causal attention, right or with a mistake; `mask` moves the diagonal (None: no mask)."""
    share, (tokens, keys) = q.shape[0] // k.shape[0], (q.shape[1], k.shape[1])
    k, v = (x.repeat(share, 1, 1) if tiled else x.repeat_interleave(share, 0) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5 if scale else 1)
    seen = torch.ones(tokens, keys).tril(keys - tokens + mask).bool() if mask is not None else torch.ones(1).bool()
    if renormalise:
        return scores.masked_fill(~seen, hidden).softmax(-1) @ v
    return (scores.softmax(-1) * seen) @ v


@exercise
def grouped_attention(answer) -> None:
    """`answer(q [H, T, D], k [G, S, D], v [G, S, D])` -> [H, T, D]: causal, H/G neighbours share a key/value head."""
    for heads, shared, tokens, keys, d in ((2, 2, 3, 3, 4), (4, 2, 3, 3, 4), (9, 3, 4, 4, 8), (6, 2, 2, 5, 4)):
        q, k, v = _random(heads, tokens, d), _random(shared, keys, d, seed=1), _random(shared, keys, d, seed=2)
        last = "" if tokens == keys else f" (the last {tokens} of {keys} tokens ask)"
        what = f"for {heads} query heads, {shared} key/value heads and {tokens} queries{last}, the result"
        mistakes = {
            f"your heads take the keys in turns: query heads 0 to {heads // shared - 1} are neighbours and share "
            f"key/value head 0. repeat_interleave puts copies side by side, repeat puts them at the end":
            _grouped(q, k, v, tiled=True),
            "the scale is missing: divide the scores by the square root of d": _grouped(q, k, v, scale=False),
            "you masked after softmax: the rest no longer sums to 1. Mask the scores with -inf before it":
            _grouped(q, k, v, renormalise=False),
            "a masked score is 0, which is a score like others and still gets weight: make it -inf":
            _grouped(q, k, v, hidden=0.0),
            "a query attends to later tokens: the causal mask is missing": _grouped(q, k, v, mask=None),
            "a token cannot see itself: the diagonal belongs to the past": _grouped(q, k, v, mask=-1).nan_to_num()}
        if tokens < keys:
            mistakes["your mask starts in the top left corner: the queries are the last tokens, and see all before "
                     "them"] = _grouped(q, k, v, mask=tokens - keys)
        got = answer(q, k, v)
        if as_tensor(got, what).isnan().any():
            raise Wrong(f"{what} contains NaN: does a query have no key left, not even its own?")
        compare(got, _grouped(q, k, v), what, mistakes)


@exercise
def previous_token_score(answer) -> None:
    """`answer(weights [H, T, T])` -> for each head [H], the mean weight that a token gives to the one before it."""
    for heads, tokens in ((3, 4), (2, 6), (5, 5)):
        weights = _random(heads, tokens, tokens, seed=tokens).masked_fill(
            torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
        below = weights.diagonal(-1, 1, 2)  # [H, T-1]: row 1 looks at 0, row 2 at 1, …
        want = below.mean(-1)
        compare(answer(weights), want, f"for {heads} heads and {tokens} tokens, the score", {
            "the sum is divided by the number of tokens; the first token has no token before it, so only "
            f"{tokens - 1} count": below.sum(-1) / tokens,
            "this is the sum; take the mean": below.sum(-1),
            "you took the main diagonal, where each token looks at itself; the token before is one column to the left":
            weights.diagonal(0, 1, 2).mean(-1),
            "you took the diagonal above, where a token looks at the next one; masked, so 0. Use offset -1":
            weights.diagonal(1, 1, 2).mean(-1),
            "you averaged over the heads too; give one number for each head": want.mean(),
            "you averaged over the wrong dimension; give one number for each head": below.mean(0)})
