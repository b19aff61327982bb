"""A request: how its answer ends, streaming and cancelling, and what goes wrong for itself alone."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cache_kinds import MODEL, X, Y, fail_in_layer
from engines import all_free, alone, new_engine, script, told
from tiny import one_thread as one_thread
from tiny import random_ids, tiny_model

import llm_lessons as ll

# --- The end of an answer -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stop_ids, said, tokens", [
    ({5, 3}, [9, 8, 3, 7], [9, 8]), ([5, 3], [9, 8, 5, 7], [9, 8]), (3, [3, 1, 1, 1], []), ((), [3, 5, 3, 5], None)])
def test_a_stop_id_ends_the_answer_and_is_not_part_of_it_D5(stop_ids, said, tokens):
    engine = new_engine()
    request, neighbour = engine.submit(X, 4, script(said), stop_ids), engine.submit(Y, 6)
    steps = engine.run()
    assert request.tokens == (said if tokens is None else tokens)
    assert request.finish_reason == ("length" if tokens is None else "stop")
    assert len(steps) == 6 and neighbour.tokens == alone(Y, 6) and all_free(engine)
    assert tokens != [] or (request.ttft, request.tpot) == (None, None) and request.seconds > 0


class Letters:
    """A tokenizer that knows what each id stands for."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode_single_token_bytes(self, token):
        return self.pieces[token]


LETTERS = Letters(b"ab", b"c", b"d\n", b"\nab", "🦙".encode()[:2], "🦙".encode()[2:], b"abab")


@pytest.mark.parametrize("stops, said, texts", [
    ((), [0, 1, 4, 5], ["ab", "abc", "abc", "abc🦙"]),
    ((), [0, 4], ["ab", "ab\ufffd"]),  # the end of the answer, in the middle of a character
    (["c"], [0, 1, 0], ["ab", "ab"]),
    ("bc", [0, 1, 0], ["a", "a"]),  # a text is one stop string, not two; "b" is held back
    (["bcd"], [0, 1, 0, 0], ["a", "a", "abca", "abcabab"]),  # it was none; shown in the end
    (["\n\n"], [2, 3, 1], ["d", "d"]),  # over a border, in the middle of a token
    (["abc"], [0, 0, 1], ["", "ab", "ab"]),  # a second beginning while the first is held back
    (["ababc"], [6, 0, 1], ["", "ab", "ab"]),  # one that overlaps the first
    (["zz", "b", "ab"], [0], [""]),  # the first of several
    (["🦙"], [1, 4, 5, 1], ["c", "c", "c"]),
    (["\ufffd"], [1, 4, 1], ["c", "c", "c"]),  # bytes that no character begins with
    (["c"], [1, 0], [""])], ids=repr)
def test_a_stop_string_is_cut_out_also_when_tokens_share_it(stops, said, texts):
    engine = ll.Engine(MODEL, LETTERS)
    request = engine.submit(X, len(said), script(said), stop_strings=stops)
    seen = []
    while request.finish_reason is None:
        engine.step()
        seen.append(request.text)
    assert seen == texts and request.tokens == said[:len(texts)]
    whole = b"".join(map(LETTERS.decode_single_token_bytes, said)).decode(errors="replace")
    assert request.finish_reason == ("stop" if any(stop in whole for stop in stops if stops != "bc") or stops == "bc"
                                     else "length")


def test_the_text_of_the_real_tokenizer(smollm2):
    _, tokenizer = smollm2
    model, text = tiny_model(layers=1, vocab=tokenizer.vocab), "Grüße 🦙 an\nalle 社員"
    said = tokenizer.encode(text)
    engine = ll.Engine(model, tokenizer)
    whole, cut = (engine.submit(X, 90, script(said + [2]), 2, stops) for stops in ((), ["\nal"]))
    assert "".join(ll.stream_text(tokenizer, whole)) == text == whole.text
    assert cut.text == "Grüße 🦙 an" and (cut.finish_reason, whole.finish_reason) == ("stop", "stop")


# --- Streaming and cancelling ---------------------------------------------------------------------------------------

def test_iterating_steps_the_engine_and_writes_the_other_answers_too():
    engine = new_engine()
    first, second = engine.submit(X, 5, stop_ids=None, stop_strings=None), engine.submit(Y, 9)
    seen = [(token, len(first.tokens), len(second.tokens)) for token in first]
    assert seen == [(token, n, n) for n, token in enumerate(alone(X, 5), start=1)]
    iterator = iter(second)
    assert [next(iterator) for _ in range(7)] == alone(Y, 7) and second.finish_reason is None
    engine.run()
    assert list(iterator) == alone(Y, 9)[7:] and list(second) == alone(Y, 9) and list(first) == alone(X, 5)


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancelled_request_gives_its_blocks_back_at_once(steps):
    engine = new_engine(max_batch=2, token_budget=4)
    first, gone, last = engine.submit(X[:2], 9), engine.submit(random_ids(11), 9), engine.submit(Y, 9)
    for _ in range(steps):
        engine.step()
    written = list(gone.tokens)
    assert (gone.running, len(written)) == {0: (False, 0), 1: (True, 0), 3: (True, 0), 6: (True, 3)}[steps]
    gone.cancel(), gone.cancel()
    assert gone.finish_reason == "cancelled" and gone.tokens == written and gone.cache.rows[0].blocks == []
    assert list(gone) == written and gone.seconds is not None
    engine.run()
    assert (first.tokens, last.tokens) == (alone(X[:2], 9), alone(Y, 9)) and all_free(engine)
    first.cancel()
    assert first.finish_reason == "length"


def test_a_sampler_may_cancel_its_own_request_and_others():
    engine, requests = new_engine(), []

    def sampler(logits, history):
        if len(history) == len(X) + 2:
            requests[0].cancel(), requests[2].cancel()
        return int(logits.argmax())

    requests += [engine.submit(X, 5, sampler) for _ in range(3)] + [engine.submit(X, 5)]
    engine.run()
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "cancelled", "length"]
    assert [r.tokens for r in requests] == [alone(X, n) for n in (2, 5, 2, 5)] and all_free(engine)


def test_several_threads_share_an_engine():
    prompts = [[random_ids(3 + 2 * n, seed=3 * thread + n) for n in range(3)] for thread in range(3)]
    engine, interval = new_engine(blocks=12, max_batch=4, token_budget=6), sys.getswitchinterval()

    def serve(mine):
        return [list(request) for request in [engine.submit(prompt, 6) for prompt in mine]]

    sys.setswitchinterval(1e-5)  # so that threads get into each other's way, if they can
    try:
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(serve, prompts))
    finally:
        sys.setswitchinterval(interval)
    assert answers == [[alone(prompt, 6) for prompt in mine] for mine in prompts] and all_free(engine)


# --- What goes wrong ------------------------------------------------------------------------------------------------

def broken(logits, history):
    raise ZeroDivisionError("the sampler's own fault")


@pytest.mark.parametrize("said", [broken, "x", None, -1, 97, 1.5, True, [1], torch.tensor([1, 2])], ids=repr)
@pytest.mark.parametrize("after", [0, 2])
def test_a_sampler_that_fails_ends_its_own_request_only(said, after):
    engine = new_engine()

    def sampler(logits, history):
        if len(history) < len(X) + after:
            return int(logits.argmax())
        return said(logits, history) if said is broken else said

    request, neighbour = engine.submit(X, 5, sampler), engine.submit(Y, 5)
    engine.run()
    assert request.finish_reason == "error" and request.tokens == alone(X, after)
    with pytest.raises(ZeroDivisionError if said is broken else ValueError, match="own fault|a token is one id"):
        list(request)
    assert neighbour.tokens == alone(Y, 5) and all_free(engine)


def test_logits_that_are_not_numbers_end_one_request_only():
    model = tiny_model(tied=False)
    model.embedding.weight[50] = float("nan")
    engine = new_engine(model=model)
    requests = [engine.submit(X[:5] + [50], 4), engine.submit(X[:5], 4), engine.submit(Y, 4, script([1, 50, 2, 3])),
                engine.submit(X[:5], 4, script([1, 2, 3, 4]))]  # they begin alike: spoilt blocks must not be found
    engine.run()
    assert [r.finish_reason for r in requests] == ["error", "length", "error", "length"]
    assert [len(r.tokens) for r in requests] == [0, 4, 2, 4] and "NaN" in str(requests[0].error)
    assert requests[1].tokens == list(ll.generate(model, X[:5], 4)) and all_free(engine)


def test_a_token_that_the_tokenizer_does_not_know_ends_one_request_only():
    engine = ll.Engine(MODEL, LETTERS)
    request, neighbour = engine.submit(X, 4, script([1, 96, 1, 1])), engine.submit(Y, 2, script([1, 1]))
    engine.run()
    assert (request.finish_reason, request.text) == ("error", "c") and isinstance(request.error, IndexError)
    assert neighbour.text == "cc" and all_free(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_interrupted_step_leaves_an_engine_that_goes_on(steps):
    engine = new_engine(max_batch=3, token_budget=5)
    prompts = [X[:3], random_ids(11), Y]
    requests = [engine.submit(prompt, 6) for prompt in prompts]
    for _ in range(steps):
        engine.step()
    for _ in range(2):
        hook = fail_in_layer(1)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        hook.remove()
        assert engine.waiting == requests and engine.pool.free_blocks == engine.pool.blocks
    engine.run()
    assert [r.tokens for r in requests] == [alone(prompt, 6) for prompt in prompts] and all_free(engine)


def test_an_interrupt_behind_the_last_token_does_not_make_the_answer_longer():
    class Interrupted(Letters):
        def decode_single_token_bytes(self, token):
            raise KeyboardInterrupt

    engine = ll.Engine(MODEL, Interrupted(), kv_blocks=2, block_size=4)
    request = engine.submit(X, 1)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (request.finish_reason, request.tokens) == ("length", alone(X, 1)) and engine.run() == []


@pytest.mark.parametrize("settings, message", [
    (dict(max_batch=0), "max_batch .*0"), (dict(kv_blocks=0), "blocks .*0"), (dict(block_size=2.5), "block_size .*2.5"),
    (dict(token_budget=7), "token_budget of 7 .*max_batch=8"), (dict(policy="best"), "'continuous' or 'static'.*best")])
def test_an_engine_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ll.Engine(MODEL, **settings)


@pytest.mark.parametrize("settings, message", [
    (dict(ids=[]), "at least one token"), (dict(ids=[X, Y]), r"one prompt.*\[2, 8\]"), (dict(ids=[97]), "97 .*0 to 96"),
    (dict(ids="text"), "whole numbers"), (dict(max_new_tokens=0), "max_new_tokens .*0"), (dict(stop_ids=["x"]), "'x'"),
    (dict(sampler=ll.Sampler), "a sampler is a function"), (dict(sampler=5), "a sampler is a function .*5"),
    (dict(stop_ids=2.0), "a stop id .*2.0"), (dict(stop_strings=5), "texts .*5"), (dict(stop_strings=[5]), "texts .*5"),
    (dict(stop_strings=["a"]), "tokenizer"), (dict(stop_strings=["a", ""]), "not empty"),
    (dict(tenant=("a", 1)), "a tenant is a name")])
def test_a_request_that_makes_no_sense_is_refused_and_not_queued(settings, message):
    engine = new_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"ids": X} | settings)
    assert all_free(engine) and engine.run() == []
    assert told([engine.step()], []) == [([], [], [], [])]
