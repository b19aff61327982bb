"""Requests beside each other: nothing that one does, is or leaves behind can be seen in the logits of another."""

import pytest
import torch
from cache_kinds import MODEL, X, Y
from tiny import as_transformers, random_ids, same_logits, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll

ORACLE = as_transformers(MODEL)
LONG = random_ids(19)


def right(ids):
    with torch.no_grad():
        return ORACLE(torch.tensor([ids])).logits[0, -1]


class Watched:
    """A greedy sampler that keeps what it is given, and demands the logits of transformers for the text alone."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits, history):
        same_logits(logits, right(history))
        self.logits.append(logits.clone())
        return int(right(history).argmax())


def new_engine(blocks=30, **settings):
    return ll.Engine(MODEL, **dict(kv_blocks=blocks, block_size=4, max_batch=4, token_budget=6) | settings)


def spoil(pool, value, known=False):
    """Fill the blocks that nobody holds, as a forgetful pool might hand them out; `known`: those with a name as well,
    which are then forgotten, since what is found in them would rightly be used."""
    for block in range(1, pool.blocks + 1):
        if pool.users[block] == 0 and (known or block not in pool._name_of):
            pool.forget(block)
            pool.keys[:, block] = pool.values[:, block] = value


def all_right(*requests):
    assert [request.error for request in requests] == [None] * len(requests)
    return True


# --- Neighbours -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tenant", [None, "another"])
def test_another_text_beside_it_changes_nothing(tenant):
    seen = []
    for neighbours in ([], [Y], [LONG, X[:1]], [[96] * 30, [0], LONG + Y]):
        engine, watched = new_engine(), Watched()
        for ids in neighbours[:1]:
            engine.submit(ids, 9, tenant=tenant)
        request = engine.submit(X, 8, watched)
        for ids in neighbours[1:]:
            engine.submit(ids, 3, ll.Sampler(temperature=2.0, seed=1), tenant=tenant)
        engine.run()
        assert all_right(request) and len(watched.logits) == 8
        seen.append(torch.stack(watched.logits))
    for other in seen[1:]:
        same_logits(other, seen[0])


@pytest.mark.parametrize("steps", range(0, 9))
def test_a_neighbour_that_is_cancelled_in_the_middle_changes_nothing(steps):
    engine = new_engine(max_batch=3)
    first, gone, last = (engine.submit(ids, 7, Watched()) for ids in (X, LONG, Y))
    for _ in range(steps):
        engine.step()
    gone.cancel()
    spoil(engine.pool, float("nan"), known=True)
    engine.run()
    assert all_right(first, last) and len(first.tokens) == len(last.tokens) == 7


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_neighbour_whose_own_numbers_are_spoilt_changes_nothing(value):
    engine = new_engine(max_batch=3, token_budget=20)
    bad, good, other = engine.submit(Y, 9), engine.submit(X, 9, Watched()), engine.submit(LONG, 9, Watched())
    engine.step(), engine.step(), engine.step()
    for memory in (engine.pool.keys, engine.pool.values):
        memory[:, bad.cache.rows[0].blocks] = value
    engine.run()
    assert all_right(good, other) and len(other.tokens) == 9
    if value != value:
        assert bad.finish_reason == "error" and engine.pool._name_of.keys().isdisjoint(bad.cache.rows[0].blocks)


# --- What is left in blocks -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("blocks", [30, 9])
def test_freed_blocks_carry_nothing_over(value, known, blocks):
    """Between any two steps whatever is free is spoilt: by a chunk, by a cancelled, finished or preempted request."""
    engine, preempted = new_engine(blocks), 0
    requests = [engine.submit(ids, 9, Watched()) for ids in (X[:3], LONG, Y, X[:1], X + Y[:3], [5])]
    spoil(engine.pool, value, known)
    while engine.running or engine.waiting:
        preempted += len(engine.step().preempted)
        spoil(engine.pool, value, known)
        if len(requests[4].tokens) == 2:
            requests[4].cancel()
            spoil(engine.pool, value, known)
    assert all_right(*requests) and [len(r.tokens) for r in requests] == [9, 9, 9, 9, 2, 9]
    assert (preempted > 0) == (blocks == 9)
    assert engine.pool.free_blocks == blocks


def test_a_block_is_zeroed_before_it_is_handed_out_again():
    engine = new_engine()
    engine.submit(LONG, 5, tenant="a")
    engine.run()
    engine.pool.keys[:, 1:] = engine.pool.values[:, 1:] = 7.0
    request = engine.submit(X[:5], 2, tenant="b")
    engine.step()
    for memory in (engine.pool.keys, engine.pool.values):
        own = memory[:, request.cache.rows[0].blocks]  # [layers, 2, 4, kv_heads, head_dim]
        assert len(request.cache.rows[0].blocks) == 2 and own[:, 1, 1:].eq(0).all() and not own.eq(7).any()


# --- Tenants --------------------------------------------------------------------------------------------------------

def test_the_same_prompt_of_two_tenants_is_read_twice_and_lies_in_two_places():
    engine = new_engine(token_budget=100)
    requests = [engine.submit(X + Y[:1], 6, Watched(), tenant=tenant) for tenant in ("alice", "bob", "alice", None)]
    assert [count for _, count in engine.step().prefilled] == [9, 9, 1, 9]
    alice, bob, again, nobody = (set(request.cache.rows[0].blocks[:2]) for request in requests)
    assert alice == again and not alice & bob and not alice & nobody and not bob & nobody
    for memory in (engine.pool.keys, engine.pool.values):  # what is spoilt for bob, while both run, is not for alice
        memory[:, list(bob)] = float("nan")
    engine.run()
    assert all_right(requests[0], requests[2], requests[3]) and requests[1].finish_reason == "error"


def test_a_tenant_cannot_tell_whether_another_has_sent_the_same_text():
    """The number of tokens that are read, and so the time to first token, is that of an engine nobody else uses."""
    engine, first = new_engine(token_budget=100), []
    for tenant in ("alice", "bob", 1, "1", "bob"):
        request = engine.submit(LONG, 2, Watched(), tenant=tenant)
        first.append(engine.step().prefilled)
        engine.run()
        assert all_right(request)
    assert [count for [(_, count)] in first] == [19, 19, 19, 19, 19 - 16]


def test_a_preempted_request_finds_only_blocks_of_its_own_tenant():
    """Two tenants write the same answers; each is preempted and reads again what is gone."""
    engine = new_engine(blocks=7, token_budget=30)
    requests = [engine.submit(X[:6], 11, Watched(), tenant=tenant) for tenant in ("alice", "bob", "carol")]
    steps, owner = [], {}
    while engine.waiting or engine.running:
        steps.append(engine.step())
        for request in engine.running:
            for block in request.cache.rows[0].blocks:
                owner.setdefault(block, set()).add(request.cache.tenant)
                holders = [r for r in engine.running if block in r.cache.rows[0].blocks]
                assert holders == [request]
    assert all_right(*requests) and any(step.preempted for step in steps)
    assert any(len(tenants) > 1 for tenants in owner.values())  # blocks did change hands
    assert all(len(request.tokens) == 11 for request in requests)


def test_two_engines_on_one_model_share_nothing():
    model = tiny_model(layers=1)
    first, second = (ll.Engine(model, kv_blocks=9, block_size=4) for _ in range(2))
    one = first.submit(X + Y, 3)
    first.run()
    two = second.submit(X + Y, 3)
    assert second.step().prefilled == [(two, 16)]
    second.run()
    assert one.tokens == two.tokens == list(ll.generate(model, X + Y, 3))
