"""A thousand random schedules: whoever comes, leaves, waits or is preempted, each answer is as if it were alone.

What is right comes from transformers, which reads every text anew, without a cache or a batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import torch
from cache_kinds import consistent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import as_transformers, random_ids, same_logits, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll

MODEL = tiny_model(layers=2, context=40)  # 9 query heads on 3 key/value heads
TEXTS = [random_ids(24), random_ids(6) + random_ids(18, seed=1), random_ids(24, seed=2)]  # the first two begin alike
ORACLE = as_transformers(MODEL)


@cache
def right(ids: tuple[int, ...]) -> torch.Tensor:
    """The logits that transformers gives for the token after the last."""
    with torch.no_grad():
        return ORACLE(torch.tensor([ids])).logits[0, -1]


class Ranked:
    """Checks the logits that it is given, then takes the best, second or third token by a die of its own.

    The die must go on where it was when a request is preempted; and the token is chosen by the right logits, so that
    near ties make no difference.
    """

    def __init__(self, seed):
        self.die = random.Random(seed)

    def __call__(self, logits, history):
        same_logits(logits, right(tuple(history)))
        return int(right(tuple(history)).topk(3).indices[self.die.randrange(3)])


def alone(ids, count, sampler) -> tuple[list[int], int]:
    """An answer of `count` tokens, and how many of its tokens are clear: a near tie may be decided either way (D7)."""
    answer = []
    for done in range(count):
        logits = right(tuple(ids + answer))
        best, second = logits.topk(2).values
        if sampler is None and best - second < 1e-3:
            return answer, done
        answer.append(int(logits.argmax()) if sampler is None else sampler(logits, ids + answer))
    return answer, count


@dataclass
class Plan:
    """One request of a schedule: when it comes, what it wants, and after how many steps it is cancelled."""

    text: int
    length: int
    new: int
    tenant: str | None
    arrival: int
    seed: int | None
    cancel: int | None
    request: ll.Request | None = field(default=None, repr=False)

    @property
    def ids(self):
        return TEXTS[self.text][:self.length]

    def sampler(self):
        return None if self.seed is None else Ranked(self.seed)


lengths = st.one_of(st.sampled_from([1, 2, 3, 5, 8, 9, 17]), st.integers(1, 24))
plans = st.builds(Plan, st.integers(0, 2), lengths, st.one_of(st.sampled_from([1, 2, 9]), st.integers(1, 9)),
                  st.sampled_from(["a", "a", "b", None]), st.integers(0, 12), st.sampled_from([None, None, 1, 2]),
                  st.one_of(st.none(), st.none(), st.integers(0, 9)))
crowd = st.builds(Plan, st.integers(0, 2), st.integers(1, 9), st.integers(5, 12), st.sampled_from(["a", "a", "b"]),
                  st.integers(0, 2), st.sampled_from([None, 1]), st.one_of(st.none(), st.none(), st.integers(0, 9)))


def check_step(engine: ll.Engine, step: ll.Step, unfinished: list) -> None:
    """What must hold after every step."""
    running = engine.running
    assert consistent(engine.pool, *(request.cache for request in running))
    assert len(running) <= engine.max_batch and running + engine.waiting == unfinished  # nobody overtakes
    assert all(request.cache.length == 0 for request in engine.waiting)
    if engine.policy == "continuous":
        assert len(step.decoded) + sum(count for _, count in step.prefilled) <= engine.token_budget
    holders = {}
    for request in running:
        for block in request.cache.rows[0].blocks:
            assert holders.setdefault(block, request.cache.tenant) == request.cache.tenant


def play(engine: ll.Engine, schedule: list[Plan]) -> int:
    """Run a schedule to its end and check every answer -> the number of preemptions."""
    preemptions, steps = 0, 0
    while any(plan.arrival >= steps for plan in schedule) or engine.running or engine.waiting:
        for plan in schedule:
            if plan.arrival == steps:
                plan.request = engine.submit(plan.ids, plan.new, plan.sampler(), tenant=plan.tenant)
            elif plan.cancel is not None and plan.arrival + plan.cancel == steps:
                plan.request.cancel()
        step = engine.step()
        submitted = sorted((plan.request for plan in schedule if plan.request), key=lambda request: request.number)
        check_step(engine, step, [request for request in submitted if request.finish_reason is None])
        preemptions += len(step.preempted)
        steps += 1
        # The oldest request reads a token in every step: none of them needs more steps than it has tokens, as oldest.
        assert steps <= 13 + sum(plan.length + plan.new for plan in schedule), "somebody starves"
    assert engine.pool.free_blocks == engine.pool.blocks and engine.pool.users == [0] * (engine.pool.blocks + 1)
    for plan in schedule:
        count = min(plan.new, engine.room - plan.length + 1)
        answer, clear = alone(plan.ids, count, plan.sampler())
        request = plan.request
        assert request.error is None and request.tokens[:clear] == answer[:len(request.tokens)]
        if request.finish_reason != "cancelled":
            assert request.finish_reason == "length" and len(request.tokens) == count
        else:
            assert plan.cancel is not None and len(request.tokens) <= count
    return preemptions


def many(examples):
    """Derandomized: the same schedules in every run, so that a failure is a change of the code."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck))


def new_engine(max_batch, blocks, block_size, budget, policy="continuous"):
    return ll.Engine(MODEL, max_batch=max_batch, kv_blocks=blocks, block_size=block_size,
                     token_budget=max(max_batch, budget), policy=policy)


@many(400)
@given(st.lists(plans, min_size=1, max_size=6), st.integers(1, 5), st.sampled_from([1, 3, 4, 16]),
       st.integers(1, 30), st.sampled_from(["continuous", "continuous", "static"]))
def test_any_schedule(schedule, max_batch, block_size, budget, policy):
    play(new_engine(max_batch, 120 // block_size, block_size, budget, policy), schedule)


@many(400)
@given(st.lists(crowd, min_size=3, max_size=6), st.integers(2, 5), st.sampled_from([1, 2, 4, 5]),
       st.integers(0, 8), st.integers(1, 30), st.sampled_from(["continuous", "continuous", "static"]))
def test_a_pool_with_hardly_room_for_the_longest(schedule, max_batch, block_size, more, budget, policy):
    longest = max(plan.length for plan in schedule)
    play(new_engine(max_batch, -(-(longest + more) // block_size), block_size, budget, policy), schedule)


@many(200)
@given(st.lists(plans, min_size=3, max_size=6), st.integers(1, 3), st.integers(1, 12))
def test_all_come_at_once_with_the_same_beginning(schedule, block_size, budget):
    for plan in schedule:
        plan.text, plan.arrival = plan.text % 2, 0
    play(new_engine(4, 40 // block_size, block_size, budget), schedule)


def test_the_schedules_do_preempt():
    """Eight answers on a pool for two of them: by hand, and counted, so that the tests above cannot do without."""
    schedule = [Plan(n % 3, 4 + n, 9, None, n // 4, n % 2 or None, None) for n in range(8)]
    assert play(new_engine(4, 10, 2, 8), schedule) > 0
