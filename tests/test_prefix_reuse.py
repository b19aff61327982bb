"""Prefix reuse in a pool of blocks: found when it is the same text of the same tenant, and never otherwise (D3)."""

import pytest
import torch
from cache_kinds import MODEL, X, Y, consistent, fail_in_layer, fed, held, new_pool, on_pool, read, right, same
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits

import llm_lessons as ll


def test_a_recycled_block_is_not_found_any_more_D3():
    pool, found = new_pool(2), []
    for prompt in (X, X, Y, X, X):
        cache = on_pool(pool, 8)
        found.append(read(cache, prompt))
        cache.close()
    assert found == [0, 4, 0, 0, 4]  # of X's two blocks the last is computed anew: its logits are wanted


@pytest.mark.parametrize("length, reused", [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_full_blocks_are_reused_and_the_last_token_is_always_computed_D3(length, reused, monkeypatch):
    pool, ids = new_pool(9), random_ids(12)
    read(on_pool(pool), ids[:length])
    counts = fed(monkeypatch)
    answer = list(ll.generate(MODEL, ids[:length], 3, cache=on_pool(pool)))
    assert counts == [length - reused, 1, 1]
    assert answer[0] == int(right(ids[:length]).argmax())


def test_the_same_tokens_behind_others_are_another_block_D3():
    pool = new_pool(9)
    first, second = on_pool(pool), on_pool(pool)
    read(first, X + [0])
    assert read(second, [9, 9, 9, 9] + X[4:] + [0]) == 0
    assert read(on_pool(pool), X[4:] + [0]) == 0  # nor is a second block a first one


def test_two_tenants_never_share_D3():
    pool = new_pool(20)
    caches = [on_pool(pool, tenant=tenant) for tenant in ("alice", "bob", None, 1, True, "1")]
    assert [read(cache, X + [0]) for cache in caches] == [0] * 6
    assert not set(caches[0].rows[0].blocks) & set(caches[1].rows[0].blocks)
    caches[0].close()
    assert read(caches[1], Y) == 0 and read(on_pool(pool, tenant="alice"), X + [0]) == 8


class Colliding(int):
    """A token whose hash says nothing."""

    def __hash__(self):
        return 0


@pytest.mark.parametrize("kind", [int, Colliding])
def test_tokens_are_compared_and_not_their_hashes_D3(kind):
    pool = new_pool(9, block_size=2)
    assert hash((1, -1)) == hash((1, -2)) and hash((Colliding(3), Colliding(4))) == hash((Colliding(5), Colliding(6)))
    table, ids = ll.BlockTable(pool), [kind(i) for i in (1, -1, 3, 4)]
    table.reserve(0, 4)
    table.learn(ids)
    for other, blocks in (([1, -1, 3, 4, 0], 2), ([1, -2, 3, 4, 0], 0), ([1, -1, 5, 6, 0], 1), ([3, 4, 0], 0)):
        assert ll.BlockTable(pool).find([kind(i) for i in other]) == table.blocks[:blocks]


def test_what_was_behind_a_recycled_block_is_not_found_behind_its_next_contents_D3():
    """X's second block is kept alive; its first is recycled and filled with others, under the same number."""
    pool = new_pool(3)
    first, second = ll.BlockTable(pool), ll.BlockTable(pool)
    first.reserve(0, 8)
    first.learn(X)
    number = first.blocks.pop(0)
    pool.give_back([number])
    pool.take(1)  # the third block, of which nothing is known
    second.reserve(0, 4)
    assert second.blocks == [number]
    second.learn(Y[:4])
    assert ll.BlockTable(pool).find(Y[:4] + X[4:] + [0]) == [number]
    assert ll.BlockTable(pool).find(X + [0]) == []
    second.truncate(0), first.truncate(0)


def test_the_longest_unused_is_recycled_first_and_a_beginning_after_its_end():
    pool, prompts = new_pool(6), [[i] * 8 for i in (1, 2, 3)]
    for prompt in prompts:
        cache = on_pool(pool)
        read(cache, prompt)
        cache.close()
    assert [len(ll.BlockTable(pool).find(prompt + [0])) for prompt in prompts] == [2, 2, 2]
    cache = on_pool(pool)
    assert read(cache, prompts[0] + [0]) == 8  # used once more; for its last token the end of prompt 2 is recycled
    assert [len(ll.BlockTable(pool).find(prompt + [0])) for prompt in prompts] == [2, 1, 2]
    cache.close()
    assert ll.BlockTable(pool).find([2] * 5) != []
    pool.take(2)  # the one of which nothing is known, then the beginning of prompt 2
    assert [len(ll.BlockTable(pool).find(prompt + [0])) for prompt in prompts] == [2, 0, 2]


def test_an_answer_is_found_as_well_as_a_prompt(monkeypatch):
    pool, ids = new_pool(12), random_ids(6)
    cache = on_pool(pool)
    answer = list(ll.generate(MODEL, ids, 8, cache=cache))
    cache.close()
    counts = fed(monkeypatch)
    next(ll.generate(MODEL, ids + answer + [1, 2], 1, cache=on_pool(pool)))  # 6 + 7 tokens are in the pool: 12 in full
    assert counts == [16 - 12]


def test_what_is_unknown_is_not_found_and_reuse_refuses_a_cache_that_holds_other_tokens():
    pool = new_pool(9)
    cache = on_pool(pool)
    MODEL(X, cache)  # nobody said which tokens these are
    assert read(on_pool(pool), X) == 0
    for ids in (X, Y):
        with pytest.raises(ValueError, match="other tokens .* truncate"):
            cache.reuse(ids)
    assert read(cache, X) == 4 and cache.tokens == X


def test_a_row_that_shares_a_block_copies_it_before_it_writes():
    pool = new_pool(9)
    first, second = on_pool(pool), on_pool(pool)
    read(first, X + [0])
    assert read(second, X + [1]) == 8
    shared = first.rows[0].blocks[:2]
    assert second.rows[0].blocks[:2] == shared
    before = pool.keys[:, shared].clone(), pool.values[:, shared].clone()
    second.truncate(6)
    assert second.rows[0].blocks == shared
    second.reserve([1])
    copy = second.rows[0].blocks[1]
    assert torch.equal(pool.keys[:, copy, :2], before[0][:, 1, :2]) and pool.keys[:, copy, 2:].eq(0).all()
    hook = fail_in_layer(1)
    with pytest.raises(KeyboardInterrupt):
        MODEL(Y, second)
    hook.remove()
    same_logits(ll.prefill(MODEL, Y, second), right(X[:6] + Y))
    assert second.rows[0].blocks[:2] == [shared[0], copy] and copy != shared[1]
    assert torch.equal(pool.keys[:, shared], before[0]) and torch.equal(pool.values[:, shared], before[1])
    same_logits(ll.decode(MODEL, 5, first), right(X + [0, 5]))
    assert consistent(pool, first, second)
    assert read(on_pool(pool), X + Y[2:6] + [0]) == 8  # what was written behind the copy is not behind the original,
    assert read(on_pool(pool), X[:6] + Y[:6] + [0]) == 12  # but behind the copy


def test_a_copy_needs_a_free_block_too():
    pool = new_pool(3)
    first, second = on_pool(pool), on_pool(pool)
    read(first, X[:5]), read(second, X[:4] + [9])
    second.truncate(3)
    first.close()  # now the block is not shared any more, and can be written in place
    same_logits(ll.decode(MODEL, 7, second), right(X[:3] + [7]))
    assert read(first, X[:5]) == 0
    second.close()
    assert read(second, X[:5]) == 4
    second.truncate(3)
    pool.take(1)
    before = held(second)
    with pytest.raises(ValueError, match="1 more blocks .* 0 of 3 are free"):
        ll.decode(MODEL, 7, second)
    assert same(before, held(second))


def test_no_row_of_a_batch_takes_a_block_when_there_is_none_for_a_copy():
    pool = new_pool(3)
    first, batch = on_pool(pool), MODEL.new_cache(20, batch=2, kind=ll.PagedCache, pool=pool)
    read(first, X[:5])
    batch.rows[1].adopt(batch.rows[1].find(X))
    batch.lengths = [0, 4]
    batch.truncate(3)
    before = held(batch)
    with pytest.raises(ValueError, match="2 more blocks .* 1 of 3 are free"):  # one for row 0, one for the copy
        MODEL([[1], [9]], batch)
    assert same(before, held(batch)) and consistent(pool, first, batch)
