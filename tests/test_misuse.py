"""What a learner may plausibly get wrong: nothing is silently wrong, the message names the value, nothing is lost."""

import numpy as np
import pytest
import torch
from tiny import SHAPE, one_thread, random_ids, tiny_model  # noqa: F401

import llm_lessons as ll
from llm_lessons.kv_cache import KVCache

MODEL = tiny_model()
PROMPT = random_ids(6, seed=1)
ANSWER = list(ll.generate(MODEL, PROMPT, 8))


# --- Samplers and stop ids --------------------------------------------------------------------------------------------

def test_a_sampler_may_return_a_tensor_and_the_answer_still_stops():
    stop = ANSWER[3]
    generation = ll.generate(MODEL, PROMPT, 8, lambda logits, history: logits.argmax(), stop_ids=[stop])
    assert list(generation) == ANSWER[:ANSWER.index(stop)]
    assert generation.finish_reason == "stop" and all(type(token) is int for token in generation.tokens)


@pytest.mark.parametrize("token", [-1, SHAPE["vocab"], None, 1.5, True, "a", torch.tensor([1, 2])])
def test_a_token_that_is_none_is_refused_before_it_is_handed_out(token):
    generation = ll.generate(MODEL, PROMPT, 8, lambda logits, history: token)
    with pytest.raises(ValueError, match="one id from 0 to 96"):
        next(generation)
    assert generation.tokens == []
    with pytest.raises(ValueError, match="one id from 0 to 96"):
        ll.decode(MODEL, token, MODEL.new_cache(4))


@pytest.mark.parametrize("stop", [torch.tensor([ANSWER[2]]), np.array([ANSWER[2]]), ANSWER[2], {ANSWER[2]},
                                  np.int64(ANSWER[2]), torch.tensor(ANSWER[2])])
def test_stop_ids_may_come_in_any_form(stop):
    assert list(ll.generate(MODEL, PROMPT, 8, stop_ids=stop)) == ANSWER[:ANSWER.index(ANSWER[2])]
    assert list(ll.generate(MODEL, PROMPT, 8, stop_ids=None)) == ANSWER


@pytest.mark.parametrize("stop", ["72", ["72"], [None], [1.5], [-1], 2.0, "a", "", b"ab", [[1, 2]],
                                  torch.tensor([[1, 2]]), torch.tensor(1.0)], ids=repr)
def test_stop_ids_that_could_never_stop_are_refused(stop):
    with pytest.raises(ValueError, match="a stop id must be a whole number of at least 0, not "):
        ll.generate(MODEL, PROMPT, 8, stop_ids=stop)


def test_a_samplers_settings_cannot_be_changed_into_nonsense():
    sampler = ll.Sampler(temperature=1.0, seed=3)
    with pytest.raises(AttributeError, match="temperature"):
        sampler.temperature = -1
    assert sampler.temperature == sampler.restarted().temperature == 1.0


@pytest.mark.parametrize("error, reason", [(ZeroDivisionError, "error"), (KeyboardInterrupt, "cancelled")])
def test_an_answer_that_breaks_off_says_how_it_ended(error, reason):
    def sampler(logits, history):
        if len(history) == len(PROMPT) + 2:
            raise error
        return int(logits.argmax())

    generation = ll.generate(MODEL, PROMPT, 8, sampler)
    with pytest.raises(error):
        list(generation)
    assert (generation.finish_reason, generation.tokens) == (reason, ANSWER[:2])
    assert list(generation) == [] and generation.finish_reason == reason


@pytest.mark.parametrize("written", [0, 3, 8])
def test_a_closed_answer_is_cancelled_unless_it_had_ended(written):
    generation = ll.generate(MODEL, PROMPT, 8)
    assert [next(generation) for _ in range(written)] == ANSWER[:written]
    if written == 8:
        assert list(generation) == []
    generation.close()
    assert generation.finish_reason == ("length" if written == 8 else "cancelled") and list(generation) == []


@pytest.mark.parametrize("sampler", [ll.Sampler, 3, "greedy"])
def test_what_is_no_sampler_is_refused_at_the_call(sampler):
    with pytest.raises(ValueError, match="a sampler is a function"):
        ll.generate(MODEL, PROMPT, 8, sampler)


def test_ids_that_change_after_the_call_do_not_change_the_answer():
    ids = torch.tensor(PROMPT)
    generation = ll.generate(MODEL, ids, 8)
    ids.zero_()
    assert list(generation) == ANSWER


def test_a_sampler_of_ones_own_keeps_its_attributes_when_it_is_restarted():
    class Banning(ll.Sampler):
        def __init__(self, ban):
            super().__init__(temperature=0.0)
            self.ban = ban

        def __call__(self, logits, history=()):
            return super().__call__(logits.index_fill(0, torch.tensor([self.ban]), -torch.inf), history)

    assert ANSWER[0] not in list(ll.generate(MODEL, PROMPT, 1, Banning(ANSWER[0])))


@pytest.mark.parametrize(("name", "value"), [("temperature", "0.7"), ("temperature", None), ("temperature", 10**400),
                                             ("top_k", True), ("top_k", "3"), ("top_p", "a"), ("seed", "x"),
                                             ("repetition_penalty", 1e-320)])
def test_settings_of_the_wrong_type_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        ll.Sampler(**{name: value})


def test_logits_may_be_a_list_and_a_history_must_be_of_this_vocabulary():
    assert ll.Sampler()([1.0, 3.0, 2.0]) == 1
    for history in ([5], [-1]):
        with pytest.raises(ValueError, match="history"):
            ll.Sampler(repetition_penalty=2.0)(torch.ones(5), history)


# --- Caches -----------------------------------------------------------------------------------------------------------

def test_a_cache_of_another_model_is_refused():
    cache = MODEL.new_cache(20)
    list(ll.generate(MODEL, PROMPT, 4, cache=cache))
    before = cache.keys.clone()
    with pytest.raises(ValueError, match="another model"):
        list(ll.generate(tiny_model(), PROMPT, 4, cache=cache))
    assert torch.equal(cache.keys[:, :, :, :5], before[:, :, :, :5])


@pytest.mark.parametrize("change", [{"layers": 2}, {"kv_heads": 1}, {"head_dim": 8}, {"dtype": torch.bfloat16}])
def test_a_cache_of_another_shape_or_type_is_refused_by_name(change):
    settings = {name: SHAPE[name] for name in ("layers", "kv_heads", "head_dim")} | {"capacity": 9} | change
    with pytest.raises(ValueError, match="do not fit this cache"):
        MODEL(PROMPT, KVCache(**settings))


def test_what_is_truncated_is_gone_from_memory():
    cache = MODEL.new_cache(9, batch=2)
    MODEL([PROMPT, PROMPT], cache)
    cache.keys[:, :, :, :6] = cache.values[:, :, :, :6] = torch.nan
    cache.truncate(0)
    logits = MODEL([[1, 2, 3], [4, 0, 0]], cache, [3, 1])
    assert torch.isfinite(logits[0]).all() and torch.isfinite(logits[1, 0]).all()


@pytest.mark.parametrize("n", [1.5, 3.0, float("nan"), "2", None, True, -1])
def test_a_number_that_is_not_whole_leaves_a_cache_as_it_was(n):
    cache = MODEL.new_cache(9)
    ll.prefill(MODEL, PROMPT, cache)
    for call in (cache.truncate, cache.advance, lambda n: cache.reserve([n])):
        with pytest.raises(ValueError, match="whole number"):
            call(n)
    assert cache.lengths == [6] and cache.tokens == PROMPT
    with pytest.raises(ValueError, match="whole number"):
        MODEL.new_cache(n)


def test_numbers_of_numpy_are_welcome():
    assert MODEL.new_cache(np.int64(8)).capacity == 8
    assert list(ll.generate(MODEL, np.array(PROMPT), np.int64(8))) == ANSWER


# --- Ids and models ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids, words", [
    ([[1, 2], [3]], "rows of ids differ in length: pad on the right and give lengths="),
    ([2**70], "outside this model's vocabulary, 0 to 96"), ([[1], [-2**64]], "outside this model's vocabulary"),
    (torch.tensor([1, 2]).to_sparse(), "sparse"), (torch.ones(2, dtype=torch.long, device="meta"), "meta")])
def test_ids_that_are_no_ordinary_tensor_are_refused_in_words_that_help(ids, words):
    for call in (MODEL, lambda ids: ll.generate(MODEL, ids), ll.Engine(MODEL).submit):
        with pytest.raises(ValueError, match=words):
            call(ids)


@pytest.mark.parametrize("call", [
    lambda: ll.generate(PROMPT, MODEL), lambda: ll.prefill(None, PROMPT, MODEL.new_cache(9)), lambda: ll.Engine("m"),
    lambda: ll.decode([1], 1, MODEL.new_cache(9)), lambda: ll.Engine(ll.Model)])
def test_what_is_no_model_is_called_so(call):
    with pytest.raises(ValueError, match="model must be a model such as ll.load_pretrained.. gives, not "):
        call()


@pytest.mark.parametrize("dtype", ["float16", torch.int8, None, torch.bool])
def test_weights_are_floating_point(dtype):
    for make in (ll.Model, lambda config, dtype: ll.Model.random(config, dtype=dtype)):
        with pytest.raises(ValueError, match="dtype must be a floating-point type such as torch.float32, not "):
            make(MODEL.config, dtype)


# --- Text, devices --------------------------------------------------------------------------------------------

WHOLE = ll.Tokenizer({bytes([b]): b for b in range(256)}, {"<s>": 256}, chat_template="{{messages[0]['content']}}")


@pytest.mark.parametrize("write", [WHOLE.encode, lambda text: WHOLE.chat([{"role": "user", "content": text}])])
def test_half_a_surrogate_pair_is_refused_also_where_no_byte_is_missing(write):
    for text in ("a\ud800b", "\ud800s>"):
        with pytest.raises(ValueError, match="surrogate"):
            write(text)


@pytest.mark.parametrize("ids", [[1.7], "12", torch.tensor([1.9]), [None], [float("inf")]])
@pytest.mark.parametrize("tokenizer", [WHOLE, ll.BPETokenizer({})], ids=["tokenizer", "by hand"])
def test_what_is_no_id_is_not_decoded(tokenizer, ids):
    with pytest.raises(ValueError, match="not in this vocabulary"):
        tokenizer.decode(ids)


def test_bytes_are_no_text():
    with pytest.raises(ValueError, match="bytes"):
        WHOLE.encode(b"ab")


def test_a_pattern_that_loses_text_and_a_size_that_is_not_whole_are_refused():
    with pytest.raises(ValueError, match="every character"):
        ll.BPETokenizer.train("ab c\nd", 260, r"\w+")
    for size in (300.5, float("nan"), "512"):
        with pytest.raises(ValueError, match="vocab_size"):
            ll.BPETokenizer.train("ab", size)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", 3.5])
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(device):
    threads = torch.get_num_threads()
    for call in (lambda: ll.load_pretrained("/nowhere", device=device),
                 lambda: ll.Model.random(MODEL.config, device=device)):
        with pytest.raises(ValueError, match="is not here"):
            call()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "", None, 5])
def test_a_model_that_is_not_there_is_a_clear_error(name):
    with pytest.raises((ValueError, FileNotFoundError), match="model|config.json|expected"):
        ll.load_pretrained(name, device="cpu")


@pytest.mark.parametrize("change", [{"norm_eps": 0.0}, {"norm_eps": None}, {"rope_base": "x"}, {"heads": 0},
                                    {"layers": 1.5}, {"rope_base": True}, {"tied": "false"}, {"tied": 1}])
def test_a_configuration_that_cannot_run_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        ll.ModelConfig(**SHAPE | change)
