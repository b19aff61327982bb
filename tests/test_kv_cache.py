"""The cache's contract on its own: what it stores, what it lets a query see, what it refuses, and what it costs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, snapshot, tiny_model, unchanged

from llm_lessons import KVCache


def numbered(batch, n, start=1):
    """Keys [batch, 2, n, 4] that name their row and their place, and values that are the negative of them."""
    k = torch.arange(start, start + n)[None, None, :, None] + 100 * torch.arange(batch)[:, None, None, None]
    k = k.expand(batch, 2, n, 4).float()
    return k, -k


def small(capacity=8, batch=1, layers=2):
    return KVCache(layers, 2, 4, capacity, batch)


def put(cache, n, start=1):
    """n numbered tokens into every layer and row, as the model does it."""
    for layer in range(len(cache.keys)):
        cache.update(layer, *numbered(len(cache.lengths), n, start))
    cache.advance(n)


# --- Storing --------------------------------------------------------------------------------------------------------

def test_update_returns_all_keys_so_far_in_order_and_moves_nothing():
    cache = small()
    put(cache, 3)
    k, v = numbered(1, 2, start=4)
    for layer in (0, 1, 0):  # also when a layer is asked twice: update counts nothing (B2)
        keys, values = cache.update(layer, k, v)
        assert keys[0, 1, :, 0].tolist() == [1, 2, 3, 4, 5]
        assert values[0, 0, :, 3].tolist() == [-1, -2, -3, -4, -5]
        assert cache.length == 3 and cache.lengths == [3]
    cache.advance(2)
    assert cache.length == 5


def test_layers_and_rows_are_kept_apart():
    cache = small(batch=2)
    cache.update(1, *numbered(2, 3))
    assert cache.keys[0].eq(0).all() and cache.values[0].eq(0).all()
    assert cache.keys[1, :, 0, :4, 0].tolist() == [[1, 2, 3, 0], [101, 102, 103, 0]]


def test_ragged_rows_grow_by_their_own_lengths_and_padding_is_not_stored_D7():
    cache = small(capacity=6, batch=3)
    for new, junk in (([2, 0, 5], 5), ([1, 3, 0], 4), ([0, 1, 1], 2)):  # `junk` columns in the call, more than needed
        before = cache.keys.clone()
        starts = list(cache.lengths)
        cache.reserve(new)
        for layer in (0, 1):
            k, v = numbered(3, junk, start=50)
            keys, values = cache.update(layer, k, v)
            assert keys.shape == values.shape == (3, 2, max(a + b for a, b in zip(starts, new)), 4)
        for row, (start, more) in enumerate(zip(starts, new)):
            assert cache.keys[0, row, 0, start:start + more, 0].tolist() == [50 + 100 * row + i for i in range(more)]
            assert torch.equal(cache.keys[:, row, :, :start], before[:, row, :, :start])
            assert torch.equal(cache.keys[:, row, :, start + more:], before[:, row, :, start + more:])
        cache.advance(new)
        assert cache.lengths == [start + more for start, more in zip(starts, new)]
    assert cache.lengths == [3, 4, 6]


def test_length_is_for_one_row_only():
    with pytest.raises(ValueError, match="2 rows: read .lengths"):
        _ = small(batch=2).length


def test_truncate_forgets_the_tail_and_what_follows_overwrites_it_D2():
    cache = small(batch=1)
    cache.tokens = [7, 8, 9, 10, 11]
    put(cache, 5)
    cache.truncate(2)
    assert cache.length == 2 and cache.tokens == [7, 8]
    keys, _ = cache.update(0, *numbered(1, 1, start=40))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 40]
    with pytest.raises(ValueError, match="keep 3 tokens of a cache that holds 2"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        cache.truncate(-1)
    cache.truncate(0)
    assert cache.length == 0 and cache.tokens == []


def test_truncate_forgets_what_was_announced_too():
    cache = small()
    put(cache, 5)
    cache.reserve([3])
    cache.truncate(4)
    keys, _ = cache.update(0, *numbered(1, 1, start=40))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 40]


def test_truncate_leaves_shorter_rows_alone():
    cache = small(batch=3)
    cache.advance([1, 5, 3])
    cache.truncate(3)
    assert cache.lengths == [1, 3, 3]


# --- Costs ----------------------------------------------------------------------------------------------------------

def test_bytes_of_smollm2_S7():
    a_token = 2 * 30 * 3 * 64 * 2  # keys and values, layers, key/value heads, numbers each, bytes each
    assert a_token == 23_040
    cache = KVCache(layers=30, kv_heads=3, head_dim=64, capacity=2048, dtype=torch.bfloat16, device="meta")
    assert cache.nbytes == 2048 * a_token == 45 * 2**20
    assert KVCache(30, 3, 64, 2048, batch=4, dtype=torch.float32, device="meta").nbytes == 4 * 2 * 45 * 2**20


def test_bytes_of_llama_3_8b_count_the_kv_heads_not_the_query_heads_S7():
    assert KVCache(32, 8, 128, 8192, dtype=torch.float16, device="meta").nbytes == 2**30


def test_memory_is_allocated_once_D1():
    cache = small()
    where = cache.keys.data_ptr(), cache.values.data_ptr()
    for start in (1, 3, 5):
        put(cache, 2, start)
    cache.truncate(1)
    put(cache, 7)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == where


# --- What a query may see -------------------------------------------------------------------------------------------

def rows_of(mask):
    return [["".join("x" if seen else "." for seen in query) for query in row[0]] for row in mask.tolist()]


def test_a_first_prompt_needs_no_mask_but_plain_causal_order():
    assert small().mask(3) is None and small(batch=2).mask(1) is None
    cache = small(batch=2)
    cache.reserve([1, 3])  # also when some rows are padded: their own tokens come first
    assert cache.mask(5) is None


def test_mask_after_a_history_is_aligned_to_the_end_B4():
    cache = small()
    cache.advance(3)
    assert rows_of(cache.mask(2)) == [["xxxx.", "xxxxx"]]


def test_one_new_token_sees_everything_and_needs_no_mask_B4():
    cache = small(batch=2)
    cache.advance(4)
    assert cache.mask(1) is None
    assert cache.update(0, *numbered(2, 1))[0].shape[2] == 5


def test_mask_of_ragged_rows_is_by_absolute_position_D7():
    cache = small(batch=3)
    cache.advance([1, 4, 0])
    cache.reserve([2, 1, 0])  # the third row sits out, and the second has one token of padding
    mask = cache.mask(2)
    assert mask.shape == (3, 1, 2, 5)  # the longest row will hold 4 + 1
    rows = rows_of(mask)
    assert rows[0] == ["xx...", "xxx.."]
    assert rows[1][0] == "xxxxx"


def test_mask_of_one_new_token_in_ragged_rows_D7():
    cache = small(batch=3)
    cache.advance([1, 4, 2])
    assert rows_of(cache.mask(1)) == [["xx..."], ["xxxxx"], ["xxx.."]]


@settings(max_examples=50, deadline=None)
@given(past=st.lists(st.integers(0, 9), min_size=1, max_size=4), n=st.integers(1, 6))
def test_a_query_sees_a_key_exactly_when_the_key_is_not_later(past, n):
    cache = KVCache(1, 1, 2, capacity=15, batch=len(past))
    cache.advance(past)
    mask = cache.mask(n)
    if mask is None:
        assert max(past) == 0 or (n == 1 and len(set(past)) == 1)
        return
    expected = [[[key <= length + i for key in range(max(past) + n)] for i in range(n)] for length in past]
    assert mask[:, 0].tolist() == expected


def test_unwritten_rows_are_not_attended_to_S9():
    cache = KVCache(1, 1, 4, capacity=8)
    ones = torch.ones(1, 1, 1, 4)
    cache.update(0, ones, ones)
    cache.advance(1)
    mask = cache.mask(1)
    keys, values = cache.update(0, ones, ones)
    seen = F.scaled_dot_product_attention(ones, keys, values, attn_mask=mask)
    everything = F.scaled_dot_product_attention(ones, cache.keys[0], cache.values[0])
    assert seen.flatten().tolist() == pytest.approx([1.0] * 4)
    assert everything[0, 0, 0, 0] == pytest.approx(0.7112, abs=1e-4)  # the fault: six rows of zeros have a say


@pytest.mark.parametrize("poison", [1e30, -1e30])
def test_leftovers_in_unused_memory_change_nothing_S9(poison):
    model = tiny_model()
    rows = [random_ids(12, seed=row) for row in range(3)]
    calls = [[4, 1, 6], [1, 1, 1], [0, 5, 1], [1, 1, 1]]

    def run(cache):
        for lengths in calls:
            ids = torch.zeros(3, max(lengths) + 1, dtype=torch.long)
            for row, (start, new) in enumerate(zip(cache.lengths, lengths)):
                ids[row, :new] = torch.tensor(rows[row][start:start + new])
            logits = model(ids, cache, lengths)
            yield from (logits[row, :new] for row, new in enumerate(lengths))

    clean, poisoned = model.new_cache(12, batch=3), model.new_cache(12, batch=3)
    for memory in (poisoned.keys, poisoned.values):
        memory.fill_(poison)
    for ours, expected in zip(run(poisoned), run(clean)):
        same_logits(ours, expected)


def test_a_cache_that_was_used_and_truncated_is_as_good_as_a_new_one_D2():
    model = tiny_model()
    cache = model.new_cache(9)
    model(random_ids(9, seed=1), cache)
    cache.truncate(0)
    same_logits(model(random_ids(4, seed=2), cache), model(random_ids(4, seed=2)))


# --- What is refused ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("held, more", [(0, 9), (8, 1), (6, 3), (3, 600)])
@pytest.mark.parametrize("call", ["reserve", "update", "mask", "advance"])
def test_nothing_is_written_at_or_past_the_capacity_D1(call, held, more):
    cache = small(capacity=8)
    put(cache, held)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=f"holds {held} tokens, and {more} more do not fit in its capacity of 8"):
        {"reserve": lambda: cache.reserve([more]), "update": lambda: cache.update(0, *numbered(1, more)),
         "mask": lambda: cache.mask(more), "advance": lambda: cache.advance(more)}[call]()
    assert unchanged(cache, before)


def test_a_full_cache_is_full_to_the_last_place_and_no_further_D1():
    cache = small(capacity=8)
    put(cache, 8)
    assert cache.length == 8 and cache.keys[0, 0, 0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="8 tokens, and 1 more"):
        put(cache, 1, start=9)
    assert cache.keys[0, 0, 0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_row_without_room_is_named_D1():
    cache = small(capacity=8, batch=3)
    cache.advance([1, 7, 3])
    with pytest.raises(ValueError, match="row 1 .* 7 tokens, and 2 more .* capacity of 8"):
        cache.reserve([2, 2, 2])
    cache.reserve([7, 1, 5])


@pytest.mark.parametrize("new, message", [([1], "holds 2 sequences, and 1"), ([1, 1, 1], "holds 2 sequences, and 3"),
                                          ([2, -1], "not -1")])
def test_tokens_for_the_wrong_rows_and_fewer_than_none_are_refused(new, message):
    cache = small(batch=2)
    cache.advance(3)
    with pytest.raises(ValueError, match=message):
        cache.advance(new)
    assert cache.lengths == [3, 3]


@pytest.mark.parametrize("name, value", [("capacity", 0), ("capacity", -1), ("capacity", 2.5), ("batch", 0)])
def test_a_cache_needs_room(name, value):
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        KVCache(1, 1, 2, **{"capacity": 4, "batch": 1} | {name: value})
