"""Lesson 05: the ways in which a prompt's cost is counted wrongly, and a prompt is read wrongly in pieces."""

import torch


def flops(shape, tokens, kv="kv_heads", each=2, head_tokens=1, attention=4, heads="heads", pairs=None, ffn=3):
    s = shape
    pairs = tokens * (tokens + 1) / 2 if pairs is None else pairs
    weights = s["hidden"] * s["head_dim"] * (2 * s["heads"] + 2 * s[kv]) + ffn * s["hidden"] * s["ffn"]
    layer = each * tokens * weights + attention * s[heads] * s["head_dim"] * pairs
    return s["layers"] * layer + each * head_tokens * s["hidden"] * s["vocab"]


def forgets_the_2(shape, tokens):
    return flops(shape, tokens) / 2


def head_dim_by_division(shape, tokens):
    return flops({**shape, "head_dim": shape["hidden"] // shape["heads"]}, tokens)


def head_for_all_tokens(shape, tokens):
    return flops(shape, tokens, head_tokens=tokens)


def no_head(shape, tokens):
    return flops(shape, tokens, head_tokens=0)


def head_in_every_layer(shape, tokens):
    return flops(shape, tokens, head_tokens=shape["layers"])


def query_heads_for_keys(shape, tokens):
    return flops(shape, tokens, kv="heads")


def attention_forgotten(shape, tokens):
    return flops(shape, tokens, attention=0)


def compares_without_mixing(shape, tokens):
    return flops(shape, tokens, attention=2)


def attends_with_the_shared_heads(shape, tokens):
    return flops(shape, tokens, heads="kv_heads")


def dense_attention(shape, tokens):
    return flops(shape, tokens, pairs=tokens**2)


def without_the_diagonal(shape, tokens):
    return flops(shape, tokens, pairs=tokens * (tokens - 1) / 2)


def half_of_the_square(shape, tokens):
    return flops(shape, tokens, pairs=tokens**2 / 2)


def embedding_as_a_product(shape, tokens):
    return flops(shape, tokens, head_tokens=1 + tokens)


def gate_forgotten(shape, tokens):
    return flops(shape, tokens, ffn=2)


def output_forgotten(shape, tokens):
    return flops(shape, tokens) - 2 * tokens * shape["layers"] * shape["hidden"] * shape["heads"] * shape["head_dim"]


def gigaflops(shape, tokens):
    return flops(shape, tokens) / 1e9


def rule_of_thumb(shape, tokens):
    return flops(shape, tokens, head_tokens=tokens, attention=0)


def one_layer(shape, tokens):
    return flops(shape | {"layers": 1}, tokens)


def head_dim_from_hidden(shape, tokens):
    s = shape
    wrong = 2 * s["hidden"] ** 2 - 2 * s["hidden"] * s["heads"] * s["head_dim"]
    return flops(shape, tokens) + s["layers"] * 2 * tokens * wrong


def bytes_per_flop(inputs, outputs, tokens, width):
    return width * (inputs * outputs + tokens * (inputs + outputs)) / (2 * tokens * inputs * outputs)


def half(inputs, outputs, tokens, width):
    return tokens * inputs * outputs / (width * (inputs * outputs + tokens * (inputs + outputs)))


def per_number(inputs, outputs, tokens, width):
    return 2 * tokens * inputs * outputs / (inputs * outputs + tokens * (inputs + outputs))


def weights_only(inputs, outputs, tokens, width):
    return 2 * tokens / width


def outputs_forgotten(inputs, outputs, tokens, width):
    return 2 * tokens * inputs * outputs / (width * (inputs * outputs + tokens * inputs))


def weights_for_every_token(inputs, outputs, tokens, width):
    return 2 * tokens * inputs * outputs / (width * tokens * (inputs * outputs + inputs + outputs))


def one_input_row(inputs, outputs, tokens, width):
    return 2 * tokens * inputs * outputs / (width * (inputs * outputs + inputs + outputs))


def one_tokens_flops(inputs, outputs, tokens, width):
    return 2 * inputs * outputs / (width * (inputs * outputs + tokens * (inputs + outputs)))


def bits(inputs, outputs, tokens, width):
    return 8 * per_number(inputs, outputs, tokens, width) / width


def the_sum(flops, nbytes, peak, bandwidth):
    return flops / peak + nbytes / bandwidth


def the_shorter(flops, nbytes, peak, bandwidth):
    return min(flops / peak, nbytes / bandwidth)


def arithmetic_only(flops, nbytes, peak, bandwidth):
    return flops / peak


def memory_only(flops, nbytes, peak, bandwidth):
    return nbytes / bandwidth


def swapped(flops, nbytes, peak, bandwidth):
    return max(flops / bandwidth, nbytes / peak)


def upside_down(flops, nbytes, peak, bandwidth):
    return max(peak / flops, bandwidth / nbytes)


def milliseconds(flops, nbytes, peak, bandwidth):
    return 1000 * max(flops / peak, nbytes / bandwidth)


def by_the_ridge_the_wrong_way(flops, nbytes, peak, bandwidth):
    return flops / peak if flops / nbytes < peak / bandwidth else nbytes / bandwidth


def whole_at_once(model, ids, cache, chunk):
    return model(ids, cache)[-1]


def last_piece_missing(model, ids, cache, chunk):
    for start in range(0, len(ids) - chunk + 1, chunk):
        logits = model(ids[start:start + chunk], cache)
    return logits[-1]


def from_the_start_each_time(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        logits = model(ids[:start + chunk], cache)
    return logits[-1]


def without_a_cache(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        logits = model(ids[start:start + chunk])
    return logits[-1]


def new_cache_for_each_piece(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        logits = model(ids[start:start + chunk], model.new_cache(chunk))
    return logits[-1]


def all_rows(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        logits = model(ids[start:start + chunk], cache)
    return logits


def returns_inside_the_loop(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        return model(ids[start:start + chunk], cache)[-1]


def first_row(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        logits = model(ids[start:start + chunk], cache)
    return logits[0]


def keeps_the_first_logits(model, ids, cache, chunk):
    rows = [model(ids[start:start + chunk], cache)[-1] for start in range(0, len(ids), chunk)]
    return rows[0]


def one_by_one(model, ids, cache, chunk):
    for token in ids:
        logits = model([token], cache)
    return logits[-1]


def forgets_between_pieces(model, ids, cache, chunk):
    for start in range(0, len(ids), chunk):
        cache.truncate(0)
        logits = model(ids[start:start + chunk], cache)
    return logits[-1]


def picks_the_token(model, ids, cache, chunk):
    return int(all_rows(model, ids, cache, chunk)[-1].argmax())


def batch_of_chunks(model, ids, cache, chunk):
    return model(torch.tensor(ids).split(chunk), cache)[-1]


WRONG = {
    "prefill_flops": [
        (head_dim_by_division, "need not be hidden / heads"),
        (forgets_the_2, "a weight costs 2 FLOPs for each token"), (head_for_all_tokens, "the head for every token"),
        (no_head, "the head is missing"), (head_in_every_layer, "once behind the layers"),
        (query_heads_for_keys, "k and v have 2 heads here, not 6"),
        (attention_forgotten, "attention itself is missing: comparing"),
        (compares_without_mixing, "it compares, and it mixes"),
        (attends_with_the_shared_heads, "each of the 6 query heads"), (dense_attention, "you counted all T · T pairs"),
        (without_the_diagonal, "a token may look at itself"), (half_of_the_square, "cuts the diagonal in half"),
        (embedding_as_a_product, "it is a lookup"), (gate_forgotten, "three matrices"),
        (rule_of_thumb, "the rule of thumb is not exact"), (one_layer, "you counted one layer"),
        (head_dim_from_hidden, r"for 4 tokens .* need not be hidden"),
        (output_forgotten, "the output matrix of attention is missing"), (gigaflops, "GFLOP: return FLOP")],
    "intensity": [
        (bytes_per_flop, "turn it round"), (half, "are 2 FLOPs"), (per_number, "not for each byte"),
        (weights_only, "only the weights are counted"), (outputs_forgotten, "the outputs are missing"),
        (weights_for_every_token, "once for all tokens together"), (one_input_row, "there for every token"),
        (one_tokens_flops, "one token only"), (bits, "it is in bytes")],
    "least_time": [
        (the_sum, "the longer one decides"), (the_shorter, "you took the shorter time"),
        (arithmetic_only, "the arithmetic's time alone"),
        (memory_only, "the memory's time alone"), (swapped, "the limits are swapped"),
        (upside_down, "you divided the rate by the amount"), (milliseconds, "return seconds"),
        (by_the_ridge_the_wrong_way, "you took the shorter time")],
    "prefill_in_chunks": [
        (whole_at_once, "handed 7 tokens at once"), (last_piece_missing, "only 6 of them"),
        (from_the_start_each_time, "holds 16 tokens in the end: .* hand over the new ones only"),
        (without_a_cache, "nothing was written"), (new_cache_for_each_piece, "nothing was written"),
        (all_rows, "8 tokens in chunks of 4 .*return the last row"), (returns_inside_the_loop, "only 3 of them"),
        (first_row, "8 tokens .*the last piece's first token"), (keeps_the_first_logits, "after the first piece"),
        (one_by_one, "called 7 times, and 3 are enough"),
        (forgets_between_pieces, "only 1 of them .* kept from piece to piece"),
        (picks_the_token, "the result is one number"), (batch_of_chunks, "raised .*Error")],
}
