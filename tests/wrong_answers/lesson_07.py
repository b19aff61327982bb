"""Lesson 07: the ways in which a KV cache is written wrongly."""

import torch


def joined_as_heads(keys, values, k, v):
    return torch.cat((keys, k), 0), torch.cat((values, v), 0)


def joined_as_longer_vectors(keys, values, k, v):
    return torch.cat((keys, k), -1), torch.cat((values, v), -1)


def new_before_old(keys, values, k, v):
    return torch.cat((k, keys), 1), torch.cat((v, values), 1)


def replaces(keys, values, k, v):
    return k, v


def forgets_what_cat_returned(keys, values, k, v):
    torch.cat((keys, k), 1)
    torch.cat((values, v), 1)
    return keys, values


def keys_twice(keys, values, k, v):
    keys = torch.cat((keys, k), 1)
    return keys, keys


def values_first(keys, values, k, v):
    return torch.cat((values, v), 1), torch.cat((keys, k), 1)


def keys_alone(keys, values, k, v):
    return torch.cat((keys, k), 1)


def adds_up(keys, values, k, v):
    if keys.shape == k.shape:
        return keys + k, values + v
    return torch.cat((keys, k), 1), torch.cat((values, v), 1)


def appends_one_token_only(keys, values, k, v):
    return torch.cat((keys, k[:, -1:]), 1), torch.cat((values, v[:, -1:]), 1)


def old_values_new_keys(keys, values, k, v):
    return torch.cat((keys, k), 1), values


def room(cache, k):
    if cache.length + k.shape[1] > cache.keys.shape[1]:
        raise ValueError(f"{cache.length} + {k.shape[1]} tokens do not fit a capacity of {cache.keys.shape[1]}")
    return cache.length, cache.length + k.shape[1]


def returns_unwritten_rows(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys, cache.values


def returns_the_new_alone(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, start:end], cache.values[:, start:end]


def returns_the_old_alone(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :start], cache.values[:, :start]


def returns_values_first(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.values[:, :end], cache.keys[:, :end]


def returns_nothing(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v


def writes_at_0(cache, k, v):
    _, end = room(cache, k)
    cache.keys[:, :k.shape[1]], cache.values[:, :k.shape[1]] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def writes_at_the_end_of_the_memory(cache, k, v):
    _, end = room(cache, k)
    cache.keys[:, -k.shape[1]:], cache.values[:, -k.shape[1]:] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def writes_nothing(cache, k, v):
    start, _ = room(cache, k)
    return torch.cat((cache.keys[:, :start], k), 1), torch.cat((cache.values[:, :start], v), 1)


def writes_keys_twice(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, k
    return cache.keys[:, :end], cache.values[:, :end]


def moves_the_length(cache, k, v):
    start, end = room(cache, k)
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    cache.length = end
    return cache.keys[:, :end], cache.values[:, :end]


def makes_a_new_tensor(cache, k, v):
    start, end = room(cache, k)
    cache.keys = torch.cat((cache.keys[:, :start], k, cache.keys[:, end:]), 1)
    cache.values = torch.cat((cache.values[:, :start], v, cache.values[:, end:]), 1)
    return cache.keys[:, :end], cache.values[:, :end]


def wraps_around(cache, k, v):
    capacity = cache.keys.shape[1]
    for i in range(k.shape[1]):
        cache.keys[:, (cache.length + i) % capacity] = k[:, i]
        cache.values[:, (cache.length + i) % capacity] = v[:, i]
    end = min(capacity, cache.length + k.shape[1])
    return cache.keys[:, :end], cache.values[:, :end]


def drops_what_does_not_fit(cache, k, v):
    start, end = cache.length, min(cache.length + k.shape[1], cache.keys.shape[1])
    cache.keys[:, start:end], cache.values[:, start:end] = k[:, :end - start], v[:, :end - start]
    return cache.keys[:, :end], cache.values[:, :end]


def grows_in_silence(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    if end > cache.keys.shape[1]:
        cache.keys = torch.cat((cache.keys[:, :start], k), 1)
        cache.values = torch.cat((cache.values[:, :start], v), 1)
    else:
        cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def does_not_look(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def refuses_the_last_place(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    if end >= cache.keys.shape[1]:
        raise ValueError("full")
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def raises_index_error(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    if end > cache.keys.shape[1]:
        raise IndexError(f"{end} tokens do not fit")
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def asserts_that_there_is_room(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    assert end <= cache.keys.shape[1]
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def looks_too_late(cache, k, v):
    fits = min(k.shape[1], cache.keys.shape[1] - cache.length)
    start, end = cache.length, cache.length + fits
    cache.keys[:, start:end], cache.values[:, start:end] = k[:, :fits], v[:, :fits]
    room(cache, k)
    return cache.keys[:, :end], cache.values[:, :end]


def keeps_quiet(cache, k, v):
    start, end = cache.length, cache.length + k.shape[1]
    if end > cache.keys.shape[1]:
        return cache.keys[:, :start], cache.values[:, :start]
    cache.keys[:, start:end], cache.values[:, start:end] = k, v
    return cache.keys[:, :end], cache.values[:, :end]


def query_heads(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * heads * head_dim * bytes_per_value


def all_heads(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * (heads + kv_heads) * head_dim * bytes_per_value


def queries_too(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 3 * layers * kv_heads * head_dim * bytes_per_value


def forgets_the_values(layers, heads, kv_heads, head_dim, bytes_per_value):
    return layers * kv_heads * head_dim * bytes_per_value


def one_layer(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * kv_heads * head_dim * bytes_per_value


def bits(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * bytes_per_value * 8


def takes_bytes_for_bits(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * bytes_per_value / 8


def always_bfloat16(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * 2


def numbers_not_bytes(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim


def one_head(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * head_dim * bytes_per_value


def kibibytes(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * bytes_per_value / 1024


def positions(past, new):
    return past + torch.arange(new)[:, None], torch.arange(past + new)


def one_key_too_many(past, new, window):
    q, k = positions(past, new)
    return (k <= q) & (k >= q - window)


def one_key_too_few(past, new, window):
    q, k = positions(past, new)
    return (k <= q) & (k > q - window + 1)


def not_itself(past, new, window):
    q, k = positions(past, new)
    return (k < q) & (k >= q - window)


def top_left_aligned(past, new, window):
    q, k = torch.arange(new)[:, None], torch.arange(past + new)
    return (k <= q) & (k > q - window)


def sees_both_ways(past, new, window):
    q, k = positions(past, new)
    return (k - q).abs() < window


def forgets_the_future(past, new, window):
    q, k = positions(past, new)
    return k > q - window


def forgets_the_window(past, new, window):
    q, k = positions(past, new)
    return k <= q


def upside_down_window(past, new, window):
    q, k = positions(past, new)
    return (k > q) | (k <= q - window)


def the_last_keys_for_all(past, new, window):
    return torch.arange(past + new).expand(new, -1) >= past + new - window


def without_the_cached(past, new, window):
    q, k = torch.arange(new)[:, None], torch.arange(new)
    return (k <= q) & (k > q - window)


def scores_to_add(past, new, window):
    q, k = positions(past, new)
    return torch.zeros(new, past + new).masked_fill(~((k <= q) & (k > q - window)), -torch.inf)


def window_of_three(past, new, window):
    q, k = positions(past, new)
    return (k <= q) & (k > q - 3)


def a_mask_of_numbers(past, new, window):
    return torch.ones(new, past + new).tril(past).triu(past - window + 1)


def a_mask_of_whole_numbers(past, new, window):
    return a_mask_of_numbers(past, new, window).int()


WRONG = {
    "append": [
        (joined_as_heads, "you joined them as more heads: tokens are dimension 1"),
        (joined_as_longer_vectors, "you joined them as longer vectors: tokens are dimension 1"),
        (new_before_old, "the new tokens stand before the old"), (replaces, "these are the new ones alone"),
        (forgets_what_cat_returned, "these are the old ones alone.*torch.cat changes nothing"),
        (keys_twice, "the values are wrong: these are the keys"),
        (values_first, "keys and values are exchanged"), (keys_alone, "return two things"),
        (adds_up, "you added old and new up"), (appends_one_token_only, r"shape \[3, 6, 4\], not \[3, 4, 4\]"),
        (old_values_new_keys, "the values are wrong: these are the old ones alone")],
    "write": [
        (returns_unwritten_rows, r"all 8 rows, also the 4 that nobody wrote.*e\^0"),
        (returns_the_new_alone, "the 1 new keys alone"), (returns_the_old_alone, "a token also looks at itself"),
        (returns_values_first, "keys and values are exchanged"), (returns_nothing, "returned None"),
        (writes_at_0, "written at position 0: they belong behind the 3"),
        (writes_at_the_end_of_the_memory, "written at position 7: they belong behind the 3 that are there, at 3$"),
        (writes_nothing, "nothing was written into cache.keys"),
        (writes_keys_twice, "the keys were written into cache.values"),
        (moves_the_length, "you moved cache.length.*counts once, after the last layer"),
        (makes_a_new_tensor, "new tensor in the place.*copies all"),
        (wraps_around, "What was at position 0 is lost, and the mask still takes row i"),
        (drops_what_does_not_fit, "you wrote all the same. The rest is lost"),
        (grows_in_silence, "made the memory larger: a capacity is a promise"),
        (does_not_look, "RuntimeError was raised, and callers wait for ValueError"), (looks_too_late, "fails half-way"),
        (refuses_the_last_place, "exactly full is allowed: refuse only what goes beyond"),
        (raises_index_error, "IndexError was raised, and callers wait for ValueError"),
        (asserts_that_there_is_room, "AssertionError was raised, and callers wait for ValueError"),
        (keeps_quiet, "nothing is said: raise ValueError")],
    "kv_bytes_per_token": [
        (query_heads, "you counted the query heads"), (all_heads, "queries are not kept"),
        (queries_too, "two, not three"), (forgets_the_values, "a token has a key and a value"),
        (one_layer, "this is one layer"), (bits, "these are bits"), (takes_bytes_for_bits, "not in bits"),
        (always_bfloat16, "2 bytes for each number, always"), (numbers_not_bytes, "how many numbers"),
        (one_head, "one head"), (kibibytes, "KiB")],
    "window_mask": [
        (one_key_too_many, "sees 4 keys: with itself there should be 3"),
        (one_key_too_few, "sees 2 keys: with itself there should be 3"),
        (not_itself, "the window begins with it"), (top_left_aligned, "it stands at position 5"),
        (sees_both_ways, "later tokens: the window reaches back only"),
        (forgets_the_future, "must not be above the query's"), (forgets_the_window, "plain causal mask"),
        (upside_down_window, "upside down"), (the_last_keys_for_all, "the window moves with the query"),
        (without_the_cached, "the 5 tokens in the cache are keys, too"),
        (scores_to_add, "True and False"), (a_mask_of_numbers, r"places are right.*float32.*\.bool\(\)"),
        (a_mask_of_whole_numbers, r"places are right.*int32.*\.bool\(\)"),
        (window_of_three, "sees 3 keys: with itself there should be 4")],
}
