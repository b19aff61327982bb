"""Every kind of cache up to its last place, cut short, used again, and made: what it refuses, and what it costs."""

import pytest
import torch
from cache_kinds import KINDS, MODEL, WINDOW, every_kind, expected, fail_in_layer, fed, feed, held, same, sliding
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE, random_ids, same_logits
from tiny import one_thread as one_thread

import llm_lessons as ll

NEW = 12


def greedy(new_cache, ids, count):
    """What transformers' logits say, computed anew for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(expected(new_cache, ids)[-1].argmax()))
    return ids[-count:]


# --- Capacity (D1) --------------------------------------------------------------------------------------------------

@every_kind
def test_the_last_place_is_used_and_none_behind_it_D1(new_cache):
    cache, ids = new_cache(8), random_ids(9)
    answer = list(ll.generate(MODEL, ids[:6], 10, cache=cache))
    assert answer == greedy(new_cache, ids[:6], 3)  # 2 places are left, and the last token needs none
    assert cache.length == 8 == cache.capacity
    before = held(cache)
    for refused in (lambda: ll.decode(MODEL, 1, cache), lambda: MODEL([1], cache), lambda: cache.reserve([1]),
                    lambda: ll.prefill(MODEL, [1, 2], cache, chunk=1)):
        with pytest.raises(ValueError, match="8 tokens, and [12] more do not fit in its capacity of 8"):
            refused()
    assert same(before, held(cache))


@every_kind
def test_a_prompt_of_9_for_8_places_is_refused_and_nothing_is_written_D1(new_cache):
    cache = new_cache(8)
    ll.prefill(MODEL, [1, 2, 3], cache)
    before = held(cache)
    with pytest.raises(ValueError, match="prompt of 9 tokens .* capacity of 8"):
        ll.generate(MODEL, random_ids(9), 4, cache=cache)
    with pytest.raises(ValueError, match="3 tokens, and 6 more do not fit in its capacity of 8"):
        ll.prefill(MODEL, random_ids(6), cache, chunk=2)
    assert same(before, held(cache))
    ll.prefill(MODEL, random_ids(5), cache, chunk=2)
    assert cache.length == 8


# --- Forgetting and reusing (D2) ------------------------------------------------------------------------------------

@every_kind
@pytest.mark.parametrize("length", [1, 4, 9])
def test_after_truncate_another_text_goes_on_as_if_new_D2(new_cache, length):
    for n in range(length + 1):
        cache, ids, other = new_cache(20), random_ids(length), random_ids(7, seed=5)
        MODEL(ids, cache)
        cache.remember(ids)
        keep = n if new_cache is not sliding or length <= WINDOW or n in (0, length - 1, length) else 0
        assert cache.can_keep(n) == (keep == n) and not cache.can_keep(length + 1)
        if keep != n:
            before = held(cache)
            with pytest.raises(ValueError, match=f"keep {n} of {length} tokens: .* left the window"):
                cache.truncate(n)
            assert same(before, held(cache))
        cache.truncate(keep)
        assert cache.length == keep and cache.tokens == ids[:keep]
        same_logits(feed(other, [3, 1, 3], cache), expected(new_cache, ids[:keep] + other)[keep:])


def exhausted(cache, first):
    list(ll.generate(MODEL, first, 5, cache=cache))


def closed_early(cache, first):
    generation = ll.generate(MODEL, first, 5, cache=cache)
    next(generation), next(generation)
    generation.close()


def failed_in_prefill(cache, first):
    hook = fail_in_layer(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(ll.generate(MODEL, first, 5, cache=cache))
    finally:
        hook.remove()


def failed_in_decode(cache, first):
    generation = ll.generate(MODEL, first, 5, cache=cache)
    next(generation), next(generation)
    hook = fail_in_layer(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    finally:
        hook.remove()


@every_kind
@pytest.mark.parametrize("end", [exhausted, closed_early, failed_in_prefill, failed_in_decode])
@pytest.mark.parametrize("second", [random_ids(3, seed=3), random_ids(7, seed=7)[:4] + [1, 2], random_ids(7, seed=7),
                                    random_ids(7, seed=7)[:1]], ids=["new", "shared", "same", "beginning"])
def test_a_used_cache_gives_what_a_fresh_one_gives_D2(new_cache, end, second):
    cache = new_cache(30)
    end(cache, random_ids(7, seed=7))
    tokens = list(ll.generate(MODEL, second, NEW, cache=cache))
    assert tokens == greedy(new_cache, second, NEW)
    assert cache.length == len(second) + NEW - 1 and cache.tokens == second + tokens[:-1]


@every_kind
def test_a_shared_prefix_of_4_is_reused_where_it_is_still_held_D2(new_cache, monkeypatch):
    cache, first = new_cache(30), random_ids(7, seed=7)
    list(ll.generate(MODEL, first, 3, cache=cache))
    second = first[:4] + [(first[4] + 1) % 97, 5, 6, 7, 8]
    counts = fed(monkeypatch)
    assert next(ll.generate(MODEL, second, 3, cache=cache)) == greedy(new_cache, second, 1)[0]
    assert counts == [9 if new_cache is sliding else 5]  # the window of 5 has moved past what token 4 would look at


@every_kind
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_cache_its_logits_are_those_of_a_recomputation(new_cache, data):
    cache, ids, seed = new_cache(40), [], 0
    for _ in range(data.draw(st.integers(1, 8), label="operations")):
        seed, room = seed + 1, 40 - len(ids)
        todo = data.draw(st.sampled_from(["prefill", "decode", "truncate", "another prompt", "fail"]))
        if todo == "truncate":
            n = data.draw(st.integers(0, len(ids)))
            n = n if cache.can_keep(n) else 0
            cache.truncate(n)
            del ids[n:]
        elif todo == "another prompt":  # it begins like this one
            shared = data.draw(st.integers(0, len(ids)))
            ids = ids[:shared] + random_ids(data.draw(st.integers(1, 41 - shared)), seed)[:40 - shared] or [1]
            known = ll.keep_shared_prefix(cache, ids)
            assert known < len(ids) and cache.tokens == ids[:known] and cache.length == known
            same_logits(ll.prefill(MODEL, ids[known:], cache, chunk=11), expected(new_cache, ids)[-1])
        elif room:
            new = random_ids(1 if todo == "decode" else data.draw(st.integers(1, min(room, 19))), seed)
            if todo == "fail":
                hook = fail_in_layer(data.draw(st.integers(0, SHAPE["layers"] - 1)))
                try:
                    with pytest.raises(KeyboardInterrupt):
                        ll.prefill(MODEL, new, cache)
                finally:
                    hook.remove()
            else:
                ids = ids + new
                logits = ll.decode(MODEL, new[0], cache) if todo == "decode" else ll.prefill(MODEL, new, cache, chunk=7)
                same_logits(logits, expected(new_cache, ids)[-1])
        assert cache.lengths == [len(ids)] and cache.tokens == ids


# --- What they cost, and how they are made --------------------------------------------------------------------------

A_TOKEN = 2 * 3 * 3 * 4 * 4  # keys and values, layers, key/value heads, numbers each, bytes each


def test_bytes_by_hand_S7():
    expected_bytes = {"contiguous": [40, 40, 40, 40], "growing": [0, 6, 7, 3], "sliding": [5, 5, 5, 5],
                      "sliding_far": [40, 40, 40, 40], "paged": [0, 16, 16, 16], "paged_by_4": [0, 8, 8, 4]}
    for new_cache in KINDS:
        cache = new_cache(40)
        found = [cache.nbytes]
        for ids in (random_ids(6), [1]):
            MODEL(ids, cache)
            found.append(cache.nbytes)
        cache.truncate(3 if cache.can_keep(3) else 0)
        found.append(cache.nbytes)
        assert found == [tokens * A_TOKEN for tokens in expected_bytes[new_cache.__name__]], new_cache.__name__


@pytest.mark.parametrize("arguments, message", [
    (dict(kind="sliding"), "a class such as ll.KVCache .*not 'sliding'"), (dict(kind=dict), "not <class 'dict'>"),
    (dict(kind=ll.Cache), "a class such as ll.KVCache"), (dict(window=4), r"kind=KVCache\).*'window'"),
    (dict(kind=ll.SlidingCache), r"kind=SlidingCache\).*missing .*'window'"),
    (dict(kind=ll.GrowingCache, dtype=torch.float16), r"kind=GrowingCache\).*'dtype'"),
    (dict(kind=ll.SlidingCache, window=0), "window .*at least 1, not 0"),
    (dict(kind=ll.SlidingCache, window=2.5), "window .*not 2.5"),
    (dict(kind=ll.PagedCache, pool=16), r"BlockPool.of\(model, blocks=64\), not 16"),
    (dict(kind=ll.PagedCache, tenant=["a"]), r"tenant .*not \['a'\]")], ids=str)
def test_a_cache_that_cannot_be_made_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        MODEL.new_cache(8, **arguments)


@every_kind
def test_keys_that_a_layer_was_never_given_are_not_counted(new_cache):
    cache = new_cache(8)
    if not isinstance(cache, (ll.GrowingCache, ll.SlidingCache)):
        return  # the memory is there already: zeros until it is written
    cache.update(0, torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4))
    with pytest.raises(ValueError, match="some layers were given no keys"):
        cache.advance(2)
    assert cache.length == 0
