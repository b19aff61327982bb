"""Lesson 03: the ways in which attention is written wrongly."""

import math

import torch


def no_scale(q, k):
    return (q @ k.T).softmax(-1)


def scaled_by_d(q, k):
    return (q @ k.T / q.shape[-1]).softmax(-1)


def scaled_by_the_number_of_keys(q, k):
    return (q @ k.T / k.shape[0] ** 0.5).softmax(-1)


def scaled_after_softmax(q, k):
    return (q @ k.T).softmax(-1) / q.shape[-1] ** 0.5


def softmax_over_the_queries(q, k):
    return (q @ k.T / q.shape[-1] ** 0.5).softmax(0)


def softmax_over_everything(q, k):
    return (q @ k.T / q.shape[-1] ** 0.5).flatten().softmax(0).reshape(len(q), len(k))


def keys_ask_the_queries(q, k):
    return (k @ q.T / q.shape[-1] ** 0.5).softmax(-1)


def no_softmax(q, k):
    return q @ k.T / q.shape[-1] ** 0.5


def scale_2(q, k):
    return (q @ k.T / 2).softmax(-1)


def scale_8(q, k):
    return (q @ k.T / 64**0.5).softmax(-1)


def not_normalised(q, k):
    return (q @ k.T / q.shape[-1] ** 0.5).exp()


def plain_python_overflows(q, k):
    rows = [[math.exp(float(a @ b) / len(a) ** 0.5) if abs(float(a @ b)) < 88 else math.exp(1e4) for b in k] for a in q]
    return [[w / sum(row) for w in row] for row in rows]


def exp_overflows(q, k):
    e = torch.exp(q @ k.T / q.shape[-1] ** 0.5)
    return e / e.sum(-1, keepdim=True)


def elementwise_product(q, k):
    return (q * k).softmax(-1)


def top_left(queries, keys):
    return torch.ones(queries, keys).tril().bool()


def masks_the_diagonal(queries, keys):
    return torch.ones(queries, keys).tril(keys - queries - 1).bool()


def one_too_late(queries, keys):
    return torch.ones(queries, keys).tril(keys - queries + 1).bool()


def upside_down(queries, keys):
    return torch.ones(queries, keys).triu(keys - queries + 1).bool()


def always_square(queries, keys):
    return torch.ones(keys, keys).tril().bool()


def sees_everything(queries, keys):
    return torch.ones(queries, keys).bool()


def right_but_floats(queries, keys):
    return torch.ones(queries, keys).tril(keys - queries)


def numbers_to_add(queries, keys):
    return torch.full((queries, keys), -torch.inf).triu(keys - queries + 1)


def window_of_the_last_keys(queries, keys):
    return torch.ones(queries, keys).tril(keys - queries).triu(keys - queries).bool()


def attend(q, k, v, seen):
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def bottom_right(q, k, shift=0):
    return torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1] + shift).bool()


def tiled_heads(q, k, v):
    share = q.shape[0] // k.shape[0]
    return attend(q, k.repeat(share, 1, 1), v.repeat(share, 1, 1), bottom_right(q, k))


def tiled_values_only(q, k, v):
    share = q.shape[0] // k.shape[0]
    return attend(q, k.repeat_interleave(share, 0), v.repeat(share, 1, 1), bottom_right(q, k))


def grouped(q, k, v):
    share = q.shape[0] // k.shape[0]
    return q, k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)


def grouped_without_scale(q, k, v):
    return attend(*grouped(q * q.shape[-1] ** 0.5, k, v), bottom_right(q, k))


def grouped_top_left(q, k, v):
    return attend(*grouped(q, k, v), torch.ones(q.shape[1], k.shape[1]).tril().bool())


def grouped_without_mask(q, k, v):
    return attend(*grouped(q, k, v), torch.ones(q.shape[1], k.shape[1]).bool())


def grouped_without_itself(q, k, v):
    return attend(*grouped(q, k, v), bottom_right(q, k, -1))


def masked_after_softmax(q, k, v):
    q, k, v = grouped(q, k, v)
    return ((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) * bottom_right(q, k)) @ v


def masked_with_zero(q, k, v):
    q, k, v = grouped(q, k, v)
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~bottom_right(q, k), 0).softmax(-1) @ v


def heads_not_repeated(q, k, v):
    return attend(q, k, v, bottom_right(q, k))


def looks_at_itself(weights):
    return weights.diagonal(0, 1, 2).mean(-1)


def looks_ahead(weights):
    return weights.diagonal(1, 1, 2).mean(-1)


def divided_by_all_tokens(weights):
    return weights.diagonal(-1, 1, 2).sum(-1) / weights.shape[-1]


def sum_instead_of_mean(weights):
    return weights.diagonal(-1, 1, 2).sum(-1)


def one_number_for_all_heads(weights):
    return weights.diagonal(-1, 1, 2).mean()


def diagonal_of_the_heads(weights):
    return weights.diagonal(-1).mean(-1)


def mean_over_the_heads(weights):
    return weights.diagonal(-1, 1, 2).mean(0)


def scaled_by_the_number_of_queries(q, k):
    return (q @ k.T / q.shape[0] ** 0.5).softmax(-1)


WRONG = {
    "attention_weights": [
        (no_scale, "the scale is missing"), (scaled_by_d, "you divided by d; .* square root"),
        (scaled_by_the_number_of_keys, "number of keys"), (scaled_by_the_number_of_queries, "number of queries"),
        (scaled_after_softmax, "scaled after softmax"),
        (softmax_over_the_queries, "over the queries: each column sums to 1"),
        (softmax_over_everything, r"the weights, at \[\d, \d\], is"),
        (keys_ask_the_queries, "rows and columns are swapped"),
        (scale_2, "always 2"), (scale_8, "always 8"), (not_normalised, "do not sum to 1"),
        (plain_python_overflows, "exp overflows"), (no_softmax, "softmax over the keys is still missing"),
        (exp_overflows, "NaN for large scores"),
        (elementwise_product, "raised RuntimeError")],
    "causal_mask": [
        (right_but_floats, "float32 is not True and False"),
        (top_left, "queries=1, keys=5 your mask starts in the top left corner: the first query stands at position 4"),
        (masks_the_diagonal, "cannot see itself"), (one_too_late, "row 0 attends to a later token"),
        (upside_down, "upside down"), (always_square, r"shape \[1, 5\], not \[5, 5\]"),
        (sees_everything, "row 0 attends to a later token"), (numbers_to_add, "True and False, not numbers"),
        (window_of_the_last_keys, "row 1 stands at position 1, and must see the key at position 0")],
    "grouped_attention": [
        (tiled_heads, "take the keys in turns: query heads 0 to 1 are neighbours"),
        (tiled_values_only, r"for 4 query heads, 2 key/value heads .*at \[\d, \d, \d\], is"),
        (grouped_without_scale, "the scale is missing"), (grouped_top_left, "top left corner"),
        (grouped_without_mask, "attends to later tokens"), (grouped_without_itself, "not even its own"),
        (masked_after_softmax, "masked after softmax"), (masked_with_zero, "a masked score is 0"),
        (heads_not_repeated, "raised RuntimeError")],
    "previous_token_score": [
        (looks_at_itself, "looks at itself"), (looks_ahead, "the next one; masked, so 0"),
        (divided_by_all_tokens, "only 3 count"), (sum_instead_of_mean, "this is the sum"),
        (one_number_for_all_heads, "averaged over the heads too"), (diagonal_of_the_heads, r"shape \[3\], not \[4\]"),
        (mean_over_the_heads, "wrong dimension")],
}
