"""The block pool and the caches on it: who holds a block, what a full pool refuses, and that nothing leaks."""

import gc

import pytest
import torch
from cache_kinds import MODEL, X, Y, consistent, fail_in_layer, held, new_pool, on_pool, read, right, same
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, tiny_model

import llm_lessons as ll

# --- Blocks ---------------------------------------------------------------------------------------------------------

def test_a_row_takes_a_block_when_it_needs_one_and_gives_it_back():
    pool = new_pool(5)
    cache = on_pool(pool)
    for size, free in ((3, 4), (1, 4), (1, 3), (7, 2), (1, 1)):
        MODEL(random_ids(size), cache)
        assert pool.free_blocks == free and consistent(pool, cache)
    for n, free in ((12, 2), (9, 2), (8, 3), (1, 4), (0, 5)):
        cache.truncate(n)
        assert pool.free_blocks == free and consistent(pool, cache)


def test_bytes_of_the_pool_and_of_what_a_cache_holds_of_it_S7():
    pool = ll.BlockPool(30, 3, 64, blocks=128, block_size=16, dtype=torch.bfloat16, device="meta")
    assert pool.nbytes == 129 * 16 * 23_040  # one block more than can be handed out: the one that stays zero
    pool = new_pool(9)
    cache, other = on_pool(pool), on_pool(pool)
    a_block = 4 * 2 * 3 * 3 * 4 * 4  # tokens, keys and values, layers, key/value heads, numbers each, bytes each
    assert pool.nbytes == 10 * a_block
    read(cache, X + [9])
    assert (cache.nbytes, other.nbytes) == (3 * a_block, 0)
    assert read(other, X + [10]) == 8
    assert other.nbytes == 3 * a_block and 9 - pool.free_blocks == 4  # two of them are the same memory


@pytest.mark.parametrize("end", ["close", "truncate", "free", "del", "fail"])
def test_all_blocks_come_back_however_a_cache_ends(end):
    pool = new_pool(6)
    cache = on_pool(pool)
    read(cache, X)
    if end == "close":
        cache.close()
        assert cache.length == 0 and cache.tokens == [] and read(cache, X) == 4  # it can be used again
        cache.close()
    elif end == "truncate":
        cache.truncate(0)
    elif end == "free":
        cache.free(0)
        assert cache.length == 0 and cache.tokens == []
    elif end == "fail":
        hook = fail_in_layer(1)
        with pytest.raises(KeyboardInterrupt):
            MODEL(Y, cache)
        hook.remove()
        cache.close()
    del cache
    gc.collect()
    assert pool.free_blocks == 6 and consistent(pool)


def test_a_row_of_a_batch_is_given_back_and_the_others_go_on():
    pool = new_pool(8)
    cache = MODEL.new_cache(20, batch=3, kind=ll.PagedCache, pool=pool)
    rows = [random_ids(9, seed=row) for row in range(3)]
    MODEL([ids[:6] for ids in rows], cache, [6, 5, 2])
    assert pool.free_blocks == 8 - 2 - 2 - 1
    cache.free(1)
    assert cache.lengths == [6, 0, 2] and pool.free_blocks == 5
    logits = MODEL([rows[0][6:9], rows[1][:3], rows[2][2:5]], cache, [1, 3, 3])
    for row, ids in enumerate((rows[0][:7], rows[1][:3], rows[2][:5])):
        same_logits(logits[row, [1, 3, 3][row] - 1], right(ids))
    assert consistent(pool, cache)


def test_rows_join_and_leave_a_batch_with_their_tables():
    pool, ids = new_pool(12), [random_ids(9, seed=row) for row in range(3)]
    batch, guest = MODEL.new_cache(20, batch=2, kind=ll.PagedCache, pool=pool), on_pool(pool)
    MODEL([ids[0][:5], ids[1][:5]], batch, [5, 3])
    MODEL(ids[2][:6], guest)
    batch.rows += guest.rows
    batch.lengths += guest.lengths
    del batch.rows[0], batch.lengths[0], guest
    gc.collect()
    assert consistent(pool, batch) and pool.free_blocks == 12 - 1 - 2
    logits = MODEL([ids[1][3:7], ids[2][6:9] + [0]], batch, [4, 3])
    same_logits(logits[0, 3], right(ids[1][:7]))
    same_logits(logits[1, 2], right(ids[2]))


# --- A full pool ----------------------------------------------------------------------------------------------------

def test_a_pool_without_enough_blocks_refuses_before_anything_is_written_D1():
    pool = new_pool(4)
    first, second = on_pool(pool), on_pool(pool)
    read(first, Y + [1])
    ll.prefill(MODEL, X[:3], second)
    before = held(first), held(second)
    for refused in (lambda: ll.prefill(MODEL, [4, 5], second, chunk=1), lambda: second.reserve([2])):
        with pytest.raises(ValueError, match="1 more blocks of 4 tokens are needed, and 0 of 4 are free: give back"):
            refused()
    assert same(before[0], held(first)) and same(before[1], held(second)) and consistent(pool, first, second)
    same_logits(ll.decode(MODEL, 4, second), right(X[:4]))  # one place was left
    first.close()
    same_logits(ll.prefill(MODEL, X[4:], second), right(X))


def test_no_row_of_a_batch_takes_a_block_when_one_row_finds_none():
    pool = new_pool(3)
    cache = MODEL.new_cache(20, batch=2, kind=ll.PagedCache, pool=pool)
    with pytest.raises(ValueError, match="4 more blocks .* 3 of 3 are free"):
        MODEL([Y, Y], cache)
    assert pool.free_blocks == 3 and cache.lengths == [0, 0] and cache.nbytes == 0
    MODEL([Y, Y], cache, [8, 1])


@pytest.mark.parametrize("blocks, capacity", [(2, 8), (1, 4)])
def test_a_pool_as_large_as_the_capacity_is_enough_also_after_going_back(blocks, capacity):
    cache = on_pool(new_pool(blocks), capacity)
    read(cache, X[:capacity])
    for n in range(capacity):
        cache.truncate(n)
        read(cache, X[:n] + Y[n:capacity])
        read(cache, X[:capacity])


@pytest.mark.parametrize("settings, message", [
    (dict(blocks=0), "blocks .*0"), (dict(blocks=2.5), "blocks .*2.5"), (dict(block_size=0), "block_size .*0")])
def test_a_pool_needs_blocks(settings, message):
    with pytest.raises(ValueError, match=message):
        ll.BlockPool.of(MODEL, **{"blocks": 4} | settings)


@pytest.mark.parametrize("other", [tiny_model(layers=2), tiny_model(head_dim=6), tiny_model(dtype=torch.bfloat16),
                                   tiny_model(seed=1)], ids=["layers", "head_dim", "dtype", "weights"])
def test_the_pool_of_another_model_is_refused(other):
    with pytest.raises(ValueError, match=r"this pool .*BlockPool.of\(model\)"):
        other.new_cache(8, kind=ll.PagedCache, pool=new_pool(4))


def test_a_pool_belongs_to_the_first_model_that_makes_a_cache_on_it():
    pool = ll.BlockPool(3, 3, 4, blocks=4)
    on_pool(pool)
    with pytest.raises(ValueError, match="another model"):
        tiny_model(seed=1).new_cache(8, kind=ll.PagedCache, pool=pool)


# --- Whatever happens -----------------------------------------------------------------------------------------------

def poison(pool, value):
    """Spoil all free blocks of which nothing is known, as a forgetful pool might hand them out."""
    for block in range(1, pool.blocks + 1):
        if pool.users[block] == 0 and block not in pool._name_of:
            pool.keys[:, block] = pool.values[:, block] = value


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_rows_of_unequal_length_see_nothing_of_what_was_in_their_blocks_S9(value):
    """A short row is as wide as the longest in the batch: the rest of its block, and blocks that it does not have."""
    pool = new_pool(13)
    other = on_pool(pool)
    MODEL([1], other)
    poison(pool, value)
    pool.keys[:, other.rows[0].blocks] = pool.values[:, other.rows[0].blocks] = value
    cache = MODEL.new_cache(20, batch=3, kind=ll.PagedCache, pool=pool)
    rows, starts = [random_ids(12, seed=row) for row in range(3)], [0, 0, 0]
    for new in ([1, 9, 0], [1, 1, 1], [3, 0, 6]):
        logits = MODEL([(ids[start:] + [0] * 9)[:max(new)] for ids, start in zip(rows, starts)], cache, new)
        starts = [start + count for start, count in zip(starts, new)]
        assert torch.isfinite(logits).all()
        for row, (end, count) in enumerate(zip(starts, new)):
            if count:
                same_logits(logits[row, count - 1], right(rows[row][:end]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), value=st.sampled_from([float("nan"), 1e30, -1e30]))
def test_no_block_is_seen_by_a_row_that_has_no_right_to_it(data, value):
    """Caches of two tenants come and go on a small pool. Prompts are made of few tokens, so that many begin alike."""
    pool = new_pool(10)
    caches = {name: on_pool(pool, 24, tenant=name[0]) for name in ("a1", "a2", "b1")}
    for _ in range(data.draw(st.integers(1, 10), label="operations")):
        cache = caches[data.draw(st.sampled_from(sorted(caches)), label="cache")]
        todo = data.draw(st.sampled_from(["prompt", "prompt", "decode", "truncate", "close", "fail"]))
        ids = [1] * data.draw(st.integers(1, 9)) + [2] * data.draw(st.integers(0, 9))
        full = pool.free_blocks, held(cache)
        try:
            if todo == "prompt":
                read(cache, ids)
            elif todo == "decode":
                ids = cache.tokens + [3]
                same_logits(ll.decode(MODEL, 3, cache), right(ids))
            elif todo == "truncate":
                cache.truncate(data.draw(st.integers(0, cache.length)))
            elif todo == "close":
                cache.close()
            else:
                hook = fail_in_layer(1)
                with pytest.raises(KeyboardInterrupt):
                    try:
                        ll.prefill(MODEL, ids, cache)
                    finally:
                        hook.remove()
        except ValueError as refusal:
            assert "are needed" in str(refusal) or "capacity of 24" in str(refusal)
            assert todo == "prompt" or same(full[1], held(cache))  # a prompt may have truncated, and nothing else
        assert consistent(pool, *caches.values())
        poison(pool, value)
        (one, two), other = (caches[name] for name in ("a1", "a2")), caches["b1"].rows[0].blocks
        both = set(one.rows[0].blocks) & set(two.rows[0].blocks)
        assert not set(other) & set(one.rows[0].blocks + two.rows[0].blocks)
        assert one.rows[0].blocks[:len(both)] == two.rows[0].blocks[:len(both)]  # what they share is their beginning,
        alike = min(len(both) * 4, one.length, two.length)
        assert one.tokens[:alike] == two.tokens[:alike]  # and it is the same text
    for cache in caches.values():
        cache.close()
    assert pool.free_blocks == 10 and pool.users == [0] * 11
