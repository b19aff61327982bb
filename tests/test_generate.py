"""Prefill, decode, generate: the same ids as transformers and llama.cpp, from any cache, up to the last free place."""

import gc
from itertools import islice

import pytest
import torch
from tiny import SHAPE, as_transformers, random_ids, same_logits, snapshot, tiny_model, unchanged
from tiny import one_thread as one_thread

import llm_lessons as ll

MODEL = tiny_model()
PROMPT, NEW = random_ids(6), 12


def script(ids):
    """A sampler that says these ids one after the other, whatever the model thinks."""
    steps = iter(ids)
    return lambda logits, history: next(steps)


def fed(model, monkeypatch):
    """A list that fills with the number of tokens of each call of the model."""
    counts, body = [], model.body
    monkeypatch.setattr(model, "body", lambda ids, *rest: counts.append(len(ids)) or body(ids, *rest))
    return counts


# --- Against transformers and llama.cpp -----------------------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 6, 40])
def test_greedy_ids_equal_transformers_generate(length):
    prompt = random_ids(length, seed=length)
    expected = as_transformers(MODEL).generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert list(ll.generate(MODEL, prompt, NEW)) == expected[0, length:].tolist()


@pytest.fixture(scope="module")
def course(smollm2):
    """The model, the tokenizer, and the course's prompt as a chat."""
    model, tokenizer = smollm2
    return model, tokenizer, tokenizer.chat([{"role": "user", "content": "How does inference work?"}])


@pytest.fixture(scope="module")
def real_transformers(gguf_path):
    """transformers with weights from its own GGUF reader, not from ours; 600 MB, given back after the module."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    assert model.dtype == torch.float32
    yield model.eval()
    del model
    gc.collect()


def test_the_real_model_writes_the_ids_and_logits_of_transformers(course, real_transformers):
    model, tokenizer, prompt = course
    expected = real_transformers.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False,
                                          eos_token_id=sorted(tokenizer.stop_ids), pad_token_id=0)[0].tolist()
    assert len(expected) == len(prompt) + 64
    assert list(ll.generate(model, prompt, 64, stop_ids=tokenizer.stop_ids)) == expected[len(prompt):]
    with torch.no_grad():
        same_logits(model(expected), real_transformers(torch.tensor([expected])).logits[0], tolerance=1e-3)


def test_the_real_model_writes_the_text_of_llama_cpp(course, gguf_path):
    """llama.cpp rounds activations to 8 bits: where our two best ids are nearer than 0.2, it may choose the other."""
    llama = pytest.importorskip("xllamacpp")
    model, tokenizer, prompt = course
    settings = llama.CommonParams()
    settings.model.path = str(gguf_path)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 256, 1, False, -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = ll.available_cpus()
    answer = llama.Server(settings).handle_completions({"prompt": prompt, "n_predict": 64, "temperature": 0.0,
                                                        "n_probs": 1, "cache_prompt": False})["choices"][0]
    steps = answer["logprobs"]["content"]
    theirs = [step["id"] for step in steps]
    assert answer["text"] == tokenizer.decode(theirs) and len(theirs) == 64

    # Both read llama.cpp's answer, so that each of its 64 steps can be compared, also after the first narrow choice.
    scores = model(prompt + theirs)[len(prompt) - 1:-1].log_softmax(-1)
    best = scores.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.2
    assert clear.sum() > 40
    assert scores.argmax(-1)[clear].tolist() == torch.tensor(theirs)[clear].tolist()
    difference = scores[range(64), theirs] - torch.tensor([step["logprob"] for step in steps])
    assert difference.abs().max() < 0.5 and difference.abs().median() < 0.1

    first = (~clear).nonzero()[0].item()  # up to the first narrow choice the text is the same, word for word
    ours = list(ll.generate(model, prompt, max(1, first), stop_ids=tokenizer.stop_ids))
    assert first >= 5 and answer["text"].startswith(tokenizer.decode(ours))


# --- The two jobs ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("length, chunk", [(length, chunk) for length in (1, 7, 20) for chunk in (1, 3, 7, 512)]
                                          + [(600, 100), (600, 512)])
def test_prefill_in_pieces_gives_the_logits_after_the_last_token(length, chunk, monkeypatch):
    ids, counts, cache = random_ids(length), fed(MODEL, monkeypatch), MODEL.new_cache(length + 1)
    expected = MODEL(ids + [5])
    counts.clear()
    same_logits(ll.prefill(MODEL, ids, cache, chunk), expected[-2])
    assert sum(counts) == length and max(counts) <= chunk and len(counts) == -(-length // chunk)
    same_logits(ll.decode(MODEL, 5, cache), expected[-1])
    assert cache.length == length + 1 and cache.tokens == ids + [5]


def test_decode_feeds_one_token_and_generate_one_for_each_step_but_the_last(monkeypatch):
    counts = fed(MODEL, monkeypatch)
    assert len(list(ll.generate(MODEL, PROMPT, NEW))) == NEW
    assert counts == [6] + [1] * (NEW - 1)


def test_neither_job_builds_a_graph():
    model = tiny_model().requires_grad_(True)
    cache = model.new_cache(9)
    assert model(PROMPT).requires_grad  # the model itself may be trained
    assert not ll.prefill(model, PROMPT, cache).requires_grad and not ll.decode(model, 1, cache).requires_grad
    assert not cache.keys.requires_grad
    assert list(ll.generate(model, PROMPT, NEW, cache=cache)) == list(ll.generate(MODEL, PROMPT, 4))
    assert list(ll.generate(model, PROMPT, NEW)) == list(ll.generate(MODEL, PROMPT, NEW))


# --- The end of the room (D1) ---------------------------------------------------------------------------------------

def test_a_cache_of_8_and_a_prompt_of_6_give_3_tokens_D1():
    cache = MODEL.new_cache(8)
    generation = ll.generate(MODEL, PROMPT, 10, cache=cache)
    tokens = list(generation)
    assert len(tokens) == 3 and generation.finish_reason == "length"  # two places, and the last token needs none
    assert tokens == list(ll.generate(MODEL, PROMPT, 10))[:3]
    assert cache.length == 8 and cache.tokens == PROMPT + tokens[:2]


@pytest.mark.parametrize("capacity", [None, 8, 20])
def test_the_context_window_ends_an_answer_whatever_the_cache_could_hold_D1(capacity):
    model = tiny_model(context=8)
    cache = capacity and ll.KVCache(SHAPE["layers"], SHAPE["kv_heads"], SHAPE["head_dim"], capacity)
    generation = ll.generate(model, PROMPT, 10, cache=cache)
    assert len(list(generation)) == 3 and generation.finish_reason == "length"


@pytest.mark.parametrize("capacity, context, limit", [(8, 1024, "capacity of 8"), (20, 8, "context window of 8"),
                                                      (None, 8, "context window of 8")])
def test_a_prompt_of_9_that_does_not_fit_8_is_refused_at_the_call_D1(capacity, context, limit):
    model, cache = tiny_model(context=context), None
    if capacity:
        cache = ll.KVCache(SHAPE["layers"], SHAPE["kv_heads"], SHAPE["head_dim"], capacity)
        ll.prefill(model, [1, 2, 3], cache)
        before = snapshot(cache)
    with pytest.raises(ValueError, match=f"prompt of 9 tokens does not fit .*{limit}"):
        ll.generate(model, random_ids(9), 4, cache=cache)
    assert cache is None or unchanged(cache, before)


@pytest.mark.parametrize("capacity, context", [(8, 1024), (20, 8)])
def test_prefill_that_does_not_fit_writes_nothing_even_in_small_pieces_D1(capacity, context):
    model, cache = tiny_model(context=context), ll.KVCache(3, 3, 4, capacity)
    ll.prefill(model, [1, 2, 3], cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="3 .*6 .*8"):
        ll.prefill(model, random_ids(6), cache, chunk=2)
    assert unchanged(cache, before)
    ll.prefill(model, random_ids(5), cache, chunk=2)
    with pytest.raises(ValueError, match="8"):
        ll.decode(model, 1, cache)


@pytest.mark.parametrize("arguments, message", [
    (dict(ids=[]), "at least one token"), (dict(ids=[[1, 2]]), "batch"), (dict(ids=[97]), "id 97"),
    (dict(ids=[1.0]), "whole numbers"),
    (dict(max_new_tokens=0), "max_new_tokens .*0"), (dict(max_new_tokens=2.5), "max_new_tokens .*2.5"),
    (dict(cache=MODEL.new_cache(40, batch=2)), "one row, not of 2")], ids=str)
def test_wrong_arguments_are_refused_at_the_call_not_at_the_first_token(arguments, message):
    with pytest.raises(ValueError, match=message):
        ll.generate(MODEL, **{"ids": PROMPT} | arguments)


# --- One cache after another (D2) -----------------------------------------------------------------------------------

def exhausted(generation):
    list(generation)


def closed_early(generation):
    next(generation), next(generation)
    generation.close()
    assert list(generation) == []


def dropped(generation):
    next(generation)


def failed_in_the_sampler(cache):
    with pytest.raises(ZeroDivisionError):
        list(ll.generate(MODEL, random_ids(7, seed=7), 5, cache=cache, sampler=lambda *_: 1 / 0))


def failed_in_the_model(cache):
    steps = iter(range(9))
    hook = MODEL.blocks[1].register_forward_hook(lambda *_: 1 / (6 - next(steps)) and None)
    try:
        with pytest.raises(ZeroDivisionError):
            list(ll.generate(MODEL, random_ids(7, seed=7), 9, cache=cache))
    finally:
        hook.remove()


@pytest.mark.parametrize("end", [exhausted, closed_early, dropped, failed_in_the_sampler, failed_in_the_model])
@pytest.mark.parametrize("second", [random_ids(3, seed=3), random_ids(7, seed=7)[:4] + [1, 2], random_ids(7, seed=7),
                                    random_ids(7, seed=7)[:1]], ids=["new", "shared", "same", "beginning"])
def test_a_used_cache_gives_what_a_fresh_one_gives_D2(end, second):
    cache, first = MODEL.new_cache(30), random_ids(7, seed=7)
    end(cache if end.__name__.startswith("failed") else ll.generate(MODEL, first, 5, cache=cache))
    tokens = list(ll.generate(MODEL, second, NEW, cache=cache))
    assert tokens == list(ll.generate(MODEL, second, NEW))
    assert cache.length == len(second) + NEW - 1 and cache.tokens == second + tokens[:-1]
    cache.truncate(len(second) - 1)
    same_logits(MODEL(second[-1:], cache)[0], MODEL(second)[-1], tolerance=1e-5)


def test_a_shared_prefix_of_4_is_reused_and_the_rest_recomputed_D2(monkeypatch):
    cache, counts = MODEL.new_cache(30), fed(MODEL, monkeypatch)
    first = random_ids(7, seed=7)
    list(ll.generate(MODEL, first, 3, cache=cache))
    other = [(first[4] + 1) % 97, 5, 6, 7, 8]
    counts.clear()
    next(ll.generate(MODEL, first[:4] + other, 3, cache=cache))
    assert counts == [5]


def test_of_a_prompt_that_the_cache_holds_already_only_the_last_token_is_computed_D2(monkeypatch):
    cache, counts = MODEL.new_cache(30), fed(MODEL, monkeypatch)
    answer = list(ll.generate(MODEL, PROMPT, 5, cache=cache))
    counts.clear()
    assert list(ll.generate(MODEL, PROMPT, 5, cache=cache)) == answer and counts == [1] * 5
    counts.clear()
    next(ll.generate(MODEL, PROMPT + answer + [1, 2], 5, cache=cache))  # the next turn of a chat
    assert counts == [3]  # the answer's last token was never fed


def test_a_cache_whose_contents_are_unknown_is_not_reused(monkeypatch):
    cache, counts = MODEL.new_cache(30), fed(MODEL, monkeypatch)
    MODEL([9, 9], cache)
    ll.prefill(MODEL, PROMPT, cache)
    counts.clear()
    assert list(ll.generate(MODEL, PROMPT, 5, cache=cache)) == list(ll.generate(MODEL, PROMPT, 5))
    assert counts[0] == len(PROMPT)


def test_two_answers_at_a_time_do_not_disturb_each_other():
    prompts = [random_ids(5, seed=1), random_ids(9, seed=2)]
    both = zip(*(ll.generate(MODEL, prompt, NEW) for prompt in prompts))
    assert [list(tokens) for tokens in zip(*both)] == [list(ll.generate(MODEL, prompt, NEW)) for prompt in prompts]


def test_two_answers_from_one_cache_are_an_error_and_never_a_wrong_answer_D2():
    cache = MODEL.new_cache(30)
    first = ll.generate(MODEL, PROMPT, NEW, cache=cache)
    next(first)
    second = ll.generate(MODEL, random_ids(6, seed=5), NEW, cache=cache)
    expected = list(ll.generate(MODEL, random_ids(6, seed=5), NEW))
    assert list(islice(second, 3)) == expected[:3]
    with pytest.raises(RuntimeError, match="give each generation its own"):
        next(first)
    assert list(second) == expected[3:]


# --- Where an answer stops (D5) -------------------------------------------------------------------------------------

@pytest.mark.parametrize("stop_ids, expected, reason", [
    ({43, 41}, [26, 13], "stop"), ((41,), [26, 13], "stop"), ([26], [], "stop"), ((), [26, 13, 41, 33, 43], "length"),
    ({96}, [26, 13, 41, 33, 43], "length")])
def test_an_answer_ends_before_the_first_of_the_stop_ids_D5(stop_ids, expected, reason):
    generation = ll.generate(MODEL, PROMPT, 5, sampler=script([26, 13, 41, 33, 43, 1]), stop_ids=stop_ids)
    assert generation.finish_reason is None
    assert list(generation) == expected == generation.tokens
    assert generation.finish_reason == reason
    assert list(generation) == []


def test_the_sampler_sees_the_prompt_and_the_answer_so_far():
    seen = []
    list(ll.generate(MODEL, PROMPT, 3, sampler=lambda logits, history: seen.append(list(history)) or 7))
    assert seen == [PROMPT, PROMPT + [7], PROMPT + [7, 7]]


# --- Seeds (C7) -----------------------------------------------------------------------------------------------------

def test_a_seeded_answer_is_the_same_alone_and_among_others_and_leaves_the_global_state_alone_C7():
    warm = ll.Sampler(temperature=3.0, seed=42)
    state = torch.get_rng_state()
    alone = list(ll.generate(MODEL, PROMPT, NEW, sampler=warm))
    for other in (ll.Sampler(temperature=3.0, seed=7), ll.Sampler(temperature=3.0), warm, None):
        for place in (0, 1):
            pair = [ll.generate(MODEL, PROMPT, NEW, sampler=sampler) for sampler in (warm, other)[::1 - 2 * place]]
            assert [list(tokens) for tokens in zip(*zip(*pair))][place] == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert list(ll.generate(MODEL, PROMPT, NEW, sampler=ll.Sampler(temperature=3.0, seed=43))) != alone


def test_two_unseeded_answers_differ_C7():
    sampler = ll.Sampler(temperature=3.0)
    first, second = (list(ll.generate(MODEL, PROMPT, 30, sampler=sampler)) for _ in range(2))
    assert first != second
