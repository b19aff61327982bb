"""Caches used carelessly: refused calls that must leave no trace, interrupted ones, foreign calls in between."""

import numpy as np
import pytest
import torch
from cache_kinds import MODEL, contiguous, growing, paged, paged_by_4, sliding_far
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, tiny_model

import llm_lessons as ll

KINDS = [contiguous, growing, sliding_far, paged, paged_by_4]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
PROMPT = random_ids(9)


def right(model, ids):
    with torch.no_grad():
        return model(ids)[-1]


@pytest.mark.parametrize("tenant", [("a", 1), 0.0, -0.0, frozenset([1]), (["a"],), 1.5])
def test_a_tenant_is_a_name_or_a_whole_number(tenant):
    with pytest.raises(ValueError, match="a tenant is a name or a whole number"):
        tiny_model().new_cache(16, kind=ll.PagedCache, tenant=tenant)


def test_blocks_are_never_given_back_twice_even_when_interrupted(monkeypatch):
    model = tiny_model()
    pool = ll.BlockPool.of(model, 4, 4)
    cache = model.new_cache(16, kind=ll.PagedCache, pool=pool)
    ll.prefill(model, PROMPT, cache)
    give_back = pool.give_back

    def interrupted(blocks):
        give_back(blocks)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    monkeypatch.undo()
    cache.close()
    assert pool.users == [0] * 5 and pool.free_blocks == 4


@every_kind
def test_a_pass_in_which_every_row_sits_out_changes_nothing(kind):
    model, cache = MODEL, kind(16, 2)
    model([[1], [2]], cache, [0, 0])
    assert cache.lengths == [0, 0]
    same_logits(model([[1, 2], [3, 0]], cache, [2, 1])[0, 1], right(model, [1, 2]))


@every_kind
def test_a_foreign_call_between_two_tokens_is_noticed_at_once(kind):
    model, cache = MODEL, kind(32)
    answer = ll.generate(model, PROMPT, 4, cache=cache)
    next(answer)
    model([3], cache)
    with pytest.raises(RuntimeError, match="used for something else"):
        next(answer)


@every_kind
def test_reuse_refuses_other_tokens(kind):
    model, cache = MODEL, kind(32)
    ll.prefill(model, PROMPT, cache)
    with pytest.raises(ValueError, match="other tokens than the prompt begins with"):
        cache.reuse([96] * 12)


@every_kind
def test_values_are_like_the_keys_and_as_many_as_announced(kind):
    c = MODEL.config
    k = torch.ones(1, c.kv_heads, 2, c.head_dim)
    for v in (k[..., :1], k[:, :, :1], k.double(), k.long()):
        with pytest.raises(ValueError, match="must be alike"):
            kind(16).update(0, k, v)
    cache = kind(16)
    cache.reserve([3])
    with pytest.raises(ValueError, match="hold the 3 tokens that were announced"):
        cache.update(0, k, k)


@every_kind
def test_what_is_no_layer_no_key_and_no_list_of_counts_is_refused(kind):
    cache, c = kind(16), MODEL.config
    k = torch.ones(1, c.kv_heads, 2, c.head_dim)
    for layer in (-1, "a", None, 0.0, True):
        with pytest.raises(ValueError, match=f"layer must be a whole number of at least 0, not {layer!r}"):
            cache.update(layer, k, k)
    with pytest.raises(ValueError, match="for layer 3 do not fit this cache of 3 layers"):
        cache.update(3, k, k)
    for pair in ((k.tolist(), k), (k, k.tolist()), (k[0], k[0]), (None, None)):
        with pytest.raises(ValueError, match=r"k and v must be tensors \[batch, kv_heads, n, head_dim\], not"):
            cache.update(0, *pair)
    for new in (None, 2, "2", 1.5):
        with pytest.raises(ValueError, match=f"new tokens of each row in a list, not {new!r}"):
            cache.reserve(new)
    same_logits(MODEL(PROMPT, cache)[-1], right(MODEL, PROMPT))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not paged_by_4], ids=lambda kind: kind.__name__)
def test_far_too_many_rows_are_refused_with_the_bytes_that_they_would_take(kind):
    each = 2 * 3 * 3 * 4 * 64 * 4  # keys and values, 3 layers, 3 heads of 4 numbers, 64 tokens, 4 bytes a number
    with pytest.raises(ValueError, match=f"not 1,000,000,000,000: {each:,} bytes each .* {each * 10**12:,} bytes"):
        kind(64, 10**12)


def test_memory_that_is_not_there_is_named_in_bytes():
    each = 3 * 3 * 4 * 16 * 4  # 3 layers, 3 heads of 4 numbers, 16 tokens, 4 bytes a number
    for blocks in (10**15, 10**30):
        with pytest.raises(MemoryError, match=f"no memory for {each * (blocks + 1):,} bytes on cpu, {each:,} for each"):
            ll.Engine(MODEL, kv_blocks=blocks)


@every_kind
def test_a_refused_call_leaves_no_announcement_and_no_blocks_behind(kind):
    model, other, cache = MODEL, tiny_model(1), kind(32)
    logits = ll.prefill(model, PROMPT, cache)
    refused = [lambda: ll.prefill(other, PROMPT, cache), lambda: ll.prefill(model, PROMPT, cache, chunk=0),
               lambda: ll.prefill(model, PROMPT, cache, chunk=2.5), lambda: ll.decode(other, 1, cache),
               lambda: ll.generate(other, [1, 2, 3], 4, cache=cache), lambda: cache.reserve([1000])]
    for call in refused:
        with pytest.raises(ValueError):
            call()
        assert cache._new is None and cache.length == len(PROMPT) and cache.tokens == PROMPT
    token = int(logits.argmax())
    same_logits(ll.decode(model, token, cache), right(model, PROMPT + [token]))


def test_a_refused_prefill_takes_no_block():
    model = tiny_model(context=16)
    pool = ll.BlockPool.of(model, 8, 4)
    cache = model.new_cache(16, kind=ll.PagedCache, pool=pool)
    for call in (lambda: ll.prefill(tiny_model(1), PROMPT, cache), lambda: ll.prefill(model, random_ids(17), cache),
                 lambda: ll.prefill(model, PROMPT, cache, chunk=-1)):
        with pytest.raises(ValueError):
            call()
        assert pool.free_blocks == 8


@pytest.mark.parametrize("cache", [None, 5, [], {}, ll.KVCache])
def test_what_is_no_cache(cache):
    model = tiny_model()
    for call in (lambda: ll.prefill(model, PROMPT, cache), lambda: ll.decode(model, 1, cache)):
        with pytest.raises(ValueError, match=r"made with model\.new_cache\(capacity\)"):
            call()
    if cache is not None:
        with pytest.raises(ValueError, match=r"made with model\.new_cache\(capacity\)"):
            ll.generate(model, PROMPT, cache=cache)
        with pytest.raises(ValueError, match=r"made with model\.new_cache\(capacity\)"):
            model(PROMPT, cache)


@every_kind
def test_a_cache_made_in_inference_mode_is_an_ordinary_one(kind):
    model = MODEL
    with torch.inference_mode():
        cache = kind(32)
        ll.prefill(model, PROMPT, cache)
    with torch.no_grad():
        model([3], cache)
    cache.truncate(len(PROMPT))
    assert ll.prefill(model, [5], cache).mul_(1).shape == (model.config.vocab,)
    same_logits(ll.decode(model, 7, cache), right(model, PROMPT + [5, 7]))


def test_a_sliding_cache_interrupted_while_it_writes_says_so(monkeypatch):
    model = tiny_model()
    cache = model.new_cache(64, kind=ll.SlidingCache, window=6)
    ll.prefill(model, PROMPT, cache)
    stack = torch.stack
    calls = iter([None, KeyboardInterrupt])

    def interrupted(*arguments, **more):
        if next(calls):
            raise KeyboardInterrupt
        return stack(*arguments, **more)

    monkeypatch.setattr(torch, "stack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model([1, 2, 3, 4], cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="interrupted while tokens were written: truncate"):
        model([1], cache)
    fresh = list(ll.generate(model, PROMPT, 5, cache=model.new_cache(64, kind=ll.SlidingCache, window=6)))
    assert list(ll.generate(model, PROMPT, 5, cache=cache)) == fresh  # generate begins anew by itself


def test_a_sliding_cache_interrupted_while_it_forgets_is_right_all_the_same(monkeypatch):
    model, n = tiny_model(), 8  # it needs the tokens 3 to 7, which are all in the window of the 9
    cache, whole = (model.new_cache(64, kind=ll.SlidingCache, window=6) for _ in range(2))
    ll.prefill(model, PROMPT, cache)
    ll.prefill(model, PROMPT[:n], whole)
    monkeypatch.setattr(ll.SlidingCache, "_drop", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.truncate(n)
    monkeypatch.undo()
    for token in (3, 1, 4, 1, 5):
        same_logits(ll.decode(model, token, cache), ll.decode(model, token, whole))


def test_rows_that_a_paged_cache_does_not_have():
    cache = tiny_model().new_cache(16, 2, kind=ll.PagedCache)
    for row in (2, -1, "a", None):
        with pytest.raises(ValueError, match="row"):
            cache.free(row)


@pytest.mark.parametrize("width", [np.int8(2), np.uint8(2), np.int32(2), np.float16(2), np.float32(2)])
def test_numpy_widths_do_not_overflow(width):
    shape = ll.SHAPES["llama-2-13b"]
    assert shape.kv_bytes_per_token(width) * 8192 == 6_710_886_400
    assert shape.bytes_per_token(8192, 1, width, width) == shape.bytes_per_token(8192, 1, 2, 2)


def test_numbers_too_large_for_a_float_are_refused_by_name():
    with pytest.raises(ValueError, match="flops"):
        ll.roofline_time(10**400, 1, ll.Roofline({"float32": 1e11}, 1e10, {}), "float32")


def test_flops_are_the_same_whether_or_not_this_cpu_was_asked_before():
    from torch.utils.flop_counter import FlopCounterMode

    ll.linear.has_fast_bfloat16.cache_clear()
    model = tiny_model(dtype=torch.bfloat16)
    totals = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(random_ids(20))
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1]


@pytest.mark.parametrize("device", ["cuda:77", "banana", 5.5])
def test_a_roofline_of_a_device_that_is_not_here(device):
    with pytest.raises(ValueError, match="is not here"):
        ll.measure_roofline(device)
