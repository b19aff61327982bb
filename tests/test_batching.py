"""The engine: the same answers as alone, and what happens in each step."""

import pytest
import torch
from cache_kinds import X, Y
from engines import Clock, all_free, alone, new_engine, right, script, told
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, tiny_model

import llm_lessons as ll

# --- The same answers -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("budget", [4, 7, 512])
def test_answers_together_are_those_of_transformers_alone_D7(policy, budget):
    engine = new_engine(max_batch=4, token_budget=budget, policy=policy)
    prompts = [random_ids(length, seed=length) for length in (2, 5, 9, 1, 17, 4)]
    requests = [engine.submit(prompt, 3 + number) for number, prompt in enumerate(prompts)]
    assert engine.waiting == requests and engine.running == []
    engine.run()
    for number, (request, prompt) in enumerate(zip(requests, prompts)):
        assert request.tokens == alone(prompt, 3 + number) and request.finish_reason == "length"
    assert all_free(engine)


def test_one_prompt_four_times_D7():
    engine, prompt, seen = new_engine(max_batch=4, token_budget=5), random_ids(7), []

    def sampler(logits, history):
        same_logits(logits, right(history))
        seen.append(history)
        return int(logits.argmax())

    requests = [engine.submit(prompt, 6, sampler) for _ in range(4)]
    engine.run()
    assert [request.tokens for request in requests] == [alone(prompt, 6)] * 4 and len(seen) == 24


def test_ids_may_be_a_tensor_and_are_copied():
    engine, ids = new_engine(), torch.tensor(X)
    request = engine.submit(ids, 2)
    ids[:] = 0
    engine.run()
    assert request.ids == X and request.tokens == alone(X, 2)


# --- What happens in a step: every number by hand -------------------------------------------------------------------

def test_decode_comes_first_and_prompts_are_read_with_the_rest_of_the_budget(monkeypatch):
    clock = Clock(monkeypatch)
    engine = new_engine(max_batch=2, token_budget=4, clock=clock)
    requests = [engine.submit(random_ids(length, seed=length), new) for length, new in ((3, 3), (7, 2), (2, 1))]
    clock.now = 10.0
    steps = engine.run()
    assert told(steps, requests) == [
        ([], [(0, 3), (1, 1)], [], []),  # 0 has its first token, of 1 there is one token read
        ([0], [(1, 3)], [], []),
        ([0], [(1, 3)], [], [0]),  # all 7 are read: 1 has its first token; 0 has three; 2 comes when the step is over
        ([1], [(2, 2)], [], [1, 2])]
    assert clock.calls == [[3], [1], [1, 1], [3], [1, 1], [3], [1, 1], [2]]
    assert [(step.start, step.end) for step in steps] == [(10, 12), (12, 14), (14, 16), (16, 18)]
    assert [r.times for r in requests] == [[11, 13, 15], [16, 17], [18]]
    assert [r.ttft for r in requests] == [11, 16, 18]  # all were submitted at 0
    assert [r.tpot for r in requests] == [2, 1, None]
    assert [r.seconds for r in requests] == [15, 17, 18]


def test_static_batching_reads_all_prompts_at_once_and_leaves_places_empty(monkeypatch):
    clock = Clock(monkeypatch)
    engine = new_engine(max_batch=2, token_budget=4, policy="static", clock=clock)
    requests = [engine.submit(random_ids(length, seed=length), new) for length, new in ((9, 1), (3, 4), (2, 2))]
    steps = engine.run()
    assert told(steps, requests) == [
        ([], [(0, 9), (1, 3)], [], [0]), ([1], [], [], []), ([1], [], [], []),  # the place of 0 stays empty
        ([1], [(2, 2)], [], [1]), ([2], [], [], [2])]
    assert [r.ttft for r in requests] == [1, 2, 6]


def test_whoever_finds_no_blocks_waits_and_nobody_overtakes():
    engine = new_engine(blocks=4, max_batch=8)
    requests = [engine.submit(ids, 5) for ids in (X[:5], Y, [1])]  # 2 blocks; 3: 8 tokens and one more; 1
    steps = [engine.step(), engine.step()]
    assert told(steps, requests) == [([], [(0, 5)], [], []), ([0], [], [], [])]
    assert engine.running == requests[:1] and engine.waiting == requests[1:] and steps[1].free_blocks == 2
    steps = engine.run()
    assert told(steps, requests)[:4] == [([0], [], [], []), ([0], [], [], []), ([0], [(1, 8), (2, 1)], [], [0]),
                                         ([1, 2], [], [], [])]
    assert [r.tokens for r in requests] == [alone(ids, 5) for ids in (X[:5], Y, [1])] and all_free(engine)


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_the_youngest_gives_its_blocks_to_the_older_and_goes_on_later(policy):
    engine = new_engine(blocks=3, max_batch=8, policy=policy)
    requests = [engine.submit(ids, 6) for ids in (X[:3], Y[:2])]
    steps = engine.run()
    assert told(steps, requests) == [
        ([], [(0, 3), (1, 2)], [], []),  # both hold a block: 3 tokens + 1, 2 tokens + 1
        ([0, 1], [], [], []),
        ([0, 1], [], [], []),  # 0 takes the third block for its fifth token
        ([0], [], [1], []),  # 1 has 2 tokens and an answer of 3, of which it has read 2: it needs a second block
        ([0], [], [], []),  # 0 holds two blocks; the 5 tokens of 1, and one more, need two as well
        ([0], [(1, 1)], [], [0]),  # 0 is done; of 1's tokens four are found as they were, the fifth was not read yet
        ([1], [], [], []),
        ([1], [], [], [1])]
    assert [r.tokens for r in requests] == [alone(ids, 6) for ids in (X[:3], Y[:2])] and all_free(engine)


def test_a_token_budget_below_one_prompt_never_stops_a_decoding_neighbour():
    engine = new_engine(max_batch=2, token_budget=3)
    first, second = engine.submit(X[:2], 9), engine.submit(random_ids(17), 1)
    first_steps = [engine.step() for _ in range(9)]
    assert all(first in step.decoded for step in first_steps[1:]) and first.finish_reason == "length"
    assert [count for step in first_steps for _, count in step.prefilled] == [2, 1] + [2] * 8
    assert second.tokens == alone(random_ids(17), 1)


# --- Room (D1), prefixes (D3) ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_an_answer_ends_where_the_pool_ends_D1(policy):
    engine = new_engine(blocks=2, policy=policy)
    requests = [engine.submit(ids, 10) for ids in (X[:6], X, [1])]
    engine.run()
    assert [(len(r.tokens), r.finish_reason) for r in requests] == [(3, "length"), (1, "length"), (8, "length")]
    assert [r.tokens for r in requests] == [alone(X[:6], 3), alone(X, 1), alone([1], 8)]
    with pytest.raises(ValueError, match="prompt of 9 tokens .* 2 blocks of 4, .* kv_blocks"):
        engine.submit(X + [9])
    assert all_free(engine)


def test_an_answer_ends_where_the_context_window_ends_D1():
    model = tiny_model(context=8)
    engine = new_engine(blocks=20, model=model)
    requests = [engine.submit(X[:6], 10) for _ in range(2)]
    engine.run()
    assert [(len(r.tokens), r.finish_reason) for r in requests] == [(3, "length")] * 2
    with pytest.raises(ValueError, match="9 tokens .* context window is 8"):
        engine.submit(X + [9])


def test_a_recycled_block_is_not_found_any_more_D3():
    engine, read = new_engine(blocks=2), []
    for prompt in (X, X, Y, X):
        request = engine.submit(prompt, 4)
        read += [count for step in engine.run() for _, count in step.prefilled]
        assert request.tokens == alone(prompt, 1)
    assert read == [8, 4, 8, 8]  # the last block of a prompt is always read: its logits are wanted


def test_requests_of_a_tenant_read_a_common_beginning_once_also_when_they_come_together():
    engine = new_engine()
    requests = [engine.submit(X + [number], 3, tenant=tenant)
                for number, tenant in enumerate(("a", "a", "b", None, "b", None))]
    steps = engine.run()
    assert [count for _, count in steps[0].prefilled] == [9, 1, 9, 9, 1, 1]
    assert [r.tokens for r in requests] == [alone(X + [number], 3) for number in range(6)]


def test_a_conversation_goes_on_with_what_is_known_of_it_D2():
    engine = new_engine()
    first = engine.submit(X, 8)
    engine.run()
    second = engine.submit(X + first.tokens + Y[:2], 4)
    assert engine.step().prefilled == [(second, 18 - 12)]  # 15 tokens were read, 3 full blocks of them
    engine.run()
    assert second.tokens == alone(second.ids, 4)
    third = engine.submit(Y, 2)
    engine.run()
    assert third.tokens == alone(Y, 2)


# --- Sampling -------------------------------------------------------------------------------------------------------

def flat_model():
    """Every token of 1,000 is as probable as any other."""
    model = tiny_model(layers=1, vocab=1000, tied=False)
    model.head.weight.zero_()
    return model


@pytest.mark.parametrize("arrangement", ["alone", "seed 7 beside it", "no seed beside it", "in the other row"])
@pytest.mark.parametrize("blocks", [40, 5], ids=["", "preempted"])
def test_a_seed_gives_the_same_answer_in_every_arrangement_C7(arrangement, blocks):
    generator, flat = torch.Generator().manual_seed(42), torch.full((1000,), 1e-3, dtype=torch.float64)
    expected = [int(torch.multinomial(flat, 1, generator=generator)) for _ in range(12)]
    engine, state = new_engine(blocks, model=flat_model()), torch.get_rng_state()
    seed = {"alone": [42], "seed 7 beside it": [42, 7], "no seed beside it": [42, None],
            "in the other row": [7, 42]}[arrangement]
    shared = {seed: ll.Sampler(temperature=1.0, seed=seed) for seed in seed}
    requests = [engine.submit(X[:3 + number], 12, shared[seed]) for number, seed in enumerate(seed)]
    steps = engine.run()
    assert requests[seed.index(42)].tokens == expected
    assert bool(sum(len(step.preempted) for step in steps)) == (blocks == 5 and len(seed) > 1)
    assert torch.equal(torch.get_rng_state(), state)
    again = engine.submit(X[:3], 12, shared[42])
    engine.run()
    assert again.tokens == expected


def test_two_requests_without_a_seed_differ_C7():
    engine, sampler = new_engine(model=flat_model()), ll.Sampler(temperature=1.0)
    requests = [engine.submit(X, 8, sampler) for _ in range(2)]
    engine.run()
    assert requests[0].tokens != requests[1].tokens


def test_history_is_prompt_and_answer_so_far_also_after_a_preemption():
    engine, histories = new_engine(blocks=3), []

    def sampler(logits, history):
        histories.append(history)
        return 1

    requests = [engine.submit(X[:3], 6), engine.submit(Y[:2], 6, sampler)]
    assert any(step.preempted for step in engine.run())
    assert histories == [Y[:2] + [1] * n for n in range(6)] and requests[0].tokens == alone(X[:3], 6)


def test_each_request_may_have_a_sampler_of_its_own_kind_and_write_into_its_logits():
    def vandal(logits, history):
        logits.fill_(float("nan"))
        return 5

    engine = new_engine()
    requests = [engine.submit(X, 5, sampler) for sampler in (vandal, None, script([1, 2, 3, 4, 5]), vandal, None)]
    engine.run()
    assert [r.tokens for r in requests] == [[5] * 5, alone(X, 5), [1, 2, 3, 4, 5], [5] * 5, alone(X, 5)]
