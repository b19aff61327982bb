"""The sliding cache: what its ring holds, what a query sees of it, what it costs, and how far it can go back."""

import pytest
import torch
from cache_kinds import MODEL, expected, fail_in_layer, feed, held, oracle, same, sliding
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits

import llm_lessons as ll


def small(window=4, capacity=40, batch=1):
    return ll.SlidingCache(1, 1, 2, capacity, batch, window=window)


def put(cache, new):
    """new[row] tokens into each row; each key is its own position."""
    k = torch.tensor(cache.lengths)[:, None] + torch.arange(max(new))
    k = k[:, None, :, None].expand(-1, 1, -1, 2).float()
    cache.reserve(new)
    keys, values = cache.update(0, k, -k)
    cache.advance(new)
    return keys, values


def seen_by(cache, new):
    """For each row, the positions that each of its new queries sees, found by looking up the keys that it may see."""
    cache.reserve(new)
    mask = cache.mask(max(new))
    keys, _ = put(cache, new)
    assert mask.shape == (len(new), 1, max(new), keys.shape[2])
    return [[sorted(int(key) for key in keys[row, 0, query, 0]) for query in mask[row, 0, :count]]
            for row, count in enumerate(new)]


# --- The ring and the mask ------------------------------------------------------------------------------------------

def test_a_ring_of_4_after_6_tokens_and_no_query_sees_the_future_D1():
    cache = small()
    assert seen_by(cache, [6]) == [[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]]
    assert cache.positions.tolist() == [[4, 5, 2, 3]]
    assert cache.keys[0, 0, 0, :, 0].tolist() == [4, 5, 2, 3]
    assert cache.values[0, 0, 0, :, 1].tolist() == [-4, -5, -2, -3]
    assert seen_by(cache, [2]) == [[[3, 4, 5, 6], [4, 5, 6, 7]]]
    assert seen_by(cache, [1]) == [[[5, 6, 7, 8]]]


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 9), calls=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(any),
                                                min_size=1, max_size=5))
def test_each_query_sees_itself_and_the_window_before_it_in_every_row(window, calls):
    cache = small(window, capacity=60, batch=2)
    for new in calls:
        starts = list(cache.lengths)
        expected_ = [[list(range(max(0, start + i - window + 1), start + i + 1)) for i in range(count)]
                     for start, count in zip(starts, new)]
        assert seen_by(cache, list(new)) == expected_


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("sizes", [[60], [4, 3, 53], [16, 17, 1, 26], [1] * 60], ids=["whole", "4+3", "16+17", "steps"])
def test_logits_are_those_of_transformers_mistral(window, sizes):
    ids = random_ids(60)
    cache = MODEL.new_cache(60, kind=ll.SlidingCache, window=window)
    with torch.no_grad():
        theirs = oracle(window)(torch.tensor([ids])).logits[0]
        wide = oracle(None)(torch.tensor([ids])).logits[0]
    assert not torch.allclose(theirs[-1], wide[-1], atol=1e-2)  # a window does change the answer
    same_logits(feed(ids, sizes, cache), theirs)


def test_logits_are_those_of_transformers_llama_with_an_explicit_mask():
    """The same oracle as for the other caches, told by hand which pairs of positions see each other."""
    ids, window = random_ids(23), 5
    distance = torch.arange(23)[:, None] - torch.arange(23)
    mask = torch.zeros(1, 1, 23, 23).masked_fill((distance < 0) | (distance >= window), torch.finfo(torch.float32).min)
    with torch.no_grad():
        theirs = oracle(None)(torch.tensor([ids]), attention_mask=mask).logits[0]
    same_logits(expected(sliding, ids), theirs)
    same_logits(feed(ids, 7, sliding(23)), theirs)


# --- Memory ---------------------------------------------------------------------------------------------------------

def test_memory_is_the_window_whatever_the_length_and_the_chunk_in_flight(monkeypatch):
    a_token = 2 * 3 * 3 * 4 * 4  # keys and values, layers, key/value heads, numbers each, bytes each
    cache = MODEL.new_cache(300, kind=ll.SlidingCache, window=5)
    where, most, update = (cache.keys.data_ptr(), cache.values.data_ptr()), [], cache.update
    monkeypatch.setattr(cache, "update", lambda *kv: (update(*kv), most.append(cache.nbytes))[0])
    for size in [100, 1, 1, 30, 1]:
        MODEL(random_ids(size), cache)
        assert cache.nbytes == 5 * a_token and (cache.keys.data_ptr(), cache.values.data_ptr()) == where
        assert max(most) == (5 + size) * a_token
        most.clear()


def test_a_window_beyond_the_capacity_takes_no_more_than_the_capacity():
    assert small(window=1000, capacity=7).nbytes == 2 * 7 * 2 * 4


def test_what_was_never_written_or_was_truncated_is_not_seen_S9():
    cache = sliding(20)
    cache.keys.fill_(1e30), cache.values.fill_(1e30)
    ids = random_ids(9)
    same_logits(feed(ids, [2, 1, 6], cache), expected(sliding, ids))
    cache.keys.fill_(torch.nan), cache.values.fill_(torch.nan)
    cache.truncate(0)
    same_logits(feed(ids, [2, 1, 6], cache), expected(sliding, ids))


# --- Going back -----------------------------------------------------------------------------------------------------

def test_a_window_of_4_goes_back_by_one_token_but_not_by_one_more():
    ids, cache = random_ids(10), MODEL.new_cache(20, kind=ll.SlidingCache, window=4)
    MODEL(ids, cache)  # the ring holds 6, 7, 8, 9; the token at 9 looks back at 6, 7, 8
    assert [n for n in range(12) if cache.can_keep(n)] == [0, 9, 10]
    cache.truncate(9)
    assert sorted(cache.positions[0].tolist()) == [-1, 6, 7, 8]
    assert [n for n in range(12) if cache.can_keep(n)] == [0, 9]
    before = held(cache)
    with pytest.raises(ValueError, match="keep 8 of 9 tokens: .* some have left the window"):
        cache.truncate(8)
    assert same(before, held(cache))
    with torch.no_grad():
        theirs = oracle(4)(torch.tensor([ids[:9] + [1, 2, 3]])).logits[0]
    same_logits(feed([1, 2, 3], 2, cache), theirs[9:])


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 6), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=8))
def test_it_keeps_exactly_what_it_still_holds_the_keys_for(window, steps):
    """A list of the positions in the ring, kept by hand, says which n can be kept."""
    cache, ring = small(window, capacity=80), []
    for cut, n in steps:
        if cut:
            n = min(n, cache.length)
            if cache.can_keep(n):
                cache.truncate(n)
                ring = [position for position in ring if position < n]
        elif n:
            ring = (ring + list(range(cache.length, cache.length + n)))
            put(cache, [n])
            ring = [position for position in ring if position >= cache.length - window]
        for keep in range(cache.length + 1):
            needed = range(max(0, keep - window + 1), keep)
            assert cache.can_keep(keep) == all(position in ring for position in needed)
        assert seen_by_next(cache) == [p for p in range(max(0, cache.length - window + 1), cache.length)]


def seen_by_next(cache):
    mask = cache.mask(1)[0, 0, 0, :-1]
    return sorted(cache.positions[0][mask].tolist())


def test_a_failed_step_has_not_yet_replaced_what_going_back_needs():
    ids, cache = random_ids(10), MODEL.new_cache(20, kind=ll.SlidingCache, window=4)
    MODEL(ids, cache)
    hook = fail_in_layer(1)
    with pytest.raises(KeyboardInterrupt):
        MODEL([5], cache)
    hook.remove()
    cache.truncate(9)
    with torch.no_grad():
        theirs = oracle(4)(torch.tensor([ids[:9] + [1, 2]])).logits[0]
    same_logits(feed([1, 2], 1, cache), theirs[9:])


def test_rows_that_are_shorter_do_not_hinder_going_back():
    cache = small(window=3, batch=3)
    put(cache, [2, 9, 5])
    assert [n for n in range(10) if cache.can_keep(n)] == [0, 8, 9]  # row 1 has lost what 5 needs
    cache.truncate(8)
    assert cache.lengths == [2, 8, 5]
    assert seen_by(cache, [1, 1, 2]) == [[[0, 1, 2]], [[6, 7, 8]], [[3, 4, 5], [4, 5, 6]]]


def test_generate_begins_anew_when_the_window_has_moved_on():
    cache, prompt = sliding(60), random_ids(20)
    answer = list(ll.generate(MODEL, prompt, 9, cache=cache))
    assert cache.length == 28
    assert list(ll.generate(MODEL, prompt, 9, cache=cache)) == answer
    assert ll.keep_shared_prefix(cache, prompt + answer + [1]) == 28  # the next turn of a chat: all is kept
    assert ll.keep_shared_prefix(cache, prompt[:15]) == 0
    assert cache.length == 0 and cache.tokens == []


def test_the_layers_of_a_short_pass_are_not_mixed_with_those_of_the_one_before():
    cache = ll.SlidingCache(2, 1, 2, 9, window=4)
    k = torch.ones(1, 1, 2, 2)
    cache.reserve([2])
    cache.update(0, k, k), cache.update(1, k, k)
    cache.reserve([1])  # that pass failed; this one reaches layer 0 only
    cache.update(0, k[:, :, :1], k[:, :, :1])
    with pytest.raises(ValueError, match="some layers were given no keys"):
        cache.advance([1])
    assert cache.length == 0
