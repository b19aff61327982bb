"""The quantized cache: what is on the grid and what is exact, the logits that follow from it, and its bytes.

Random keys must come back to half a step. What happens to rows, and what goes wrong: test_quantized_cache_misuse.py.
"""

import inspect

import pytest
import test_cache_limits as limits
import test_cache_misuse as misuse
import test_caches as caches
import torch
from cache_kinds import (
    BITS,
    LAST,
    MODEL,
    QUANTIZED,
    both,
    contiguous,
    expected,
    feed,
    held,
    lossless,
    oracle,
    put,
    seen,
    small,
)
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, tiny_model

import llm_lessons as ll


def bound(x, bits, axis):
    """How far a grid along an axis may be off: half a step, and the rounding of scale and minimum to float16."""
    x = x.double().numpy()
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    return torch.from_numpy((high - low) / LAST[bits] / 2 + (high - low + abs(low)) / 2**11 + LAST[bits] * 2.0**-25)


# --- What every kind of cache must do, where this one is exact: up to 63 tokens ---------------------------------------

@both
@pytest.mark.parametrize("test, arguments", [
    (limits.test_the_last_place_is_used_and_none_behind_it_D1, ()),
    (limits.test_a_prompt_of_9_for_8_places_is_refused_and_nothing_is_written_D1, ()),
    (limits.test_after_truncate_another_text_goes_on_as_if_new_D2, (9,)),
    *[(limits.test_a_used_cache_gives_what_a_fresh_one_gives_D2, (end, random_ids(7, seed=7)[:4] + [1, 2])) for end in
      (limits.exhausted, limits.closed_early, limits.failed_in_prefill, limits.failed_in_decode)],
    (misuse.test_a_pass_in_which_every_row_sits_out_changes_nothing, ()),
    (misuse.test_a_foreign_call_between_two_tokens_is_noticed_at_once, ()),
    (misuse.test_reuse_refuses_other_tokens, ()),
    (misuse.test_values_are_like_the_keys_and_as_many_as_announced, ()),
    (misuse.test_a_refused_call_leaves_no_announcement_and_no_blocks_behind, ()),
    (misuse.test_a_cache_made_in_inference_mode_is_an_ordinary_one, ()),
    (caches.test_prefill_then_decode_equals_a_recomputation_without_a_cache_B4, ([6, 1, 1, 1, 1],)),
    (caches.test_a_batch_that_fails_half_way_leaves_every_row_as_it_was, ()),
    (caches.test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was, (1, 7, 9)),
], ids=lambda value: getattr(value, "__name__", "")[5:40])
def test_up_to_63_tokens_it_is_like_every_kind(test, arguments, new_cache):
    test(new_cache, *arguments)


# --- On the grid ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("step", [1, 13, 102])
@pytest.mark.parametrize("length, on_grid", [(63, 0), (64, 32), (95, 32), (96, 64), (102, 64)])
def test_keys_have_a_grid_for_each_channel_and_values_for_each_token(bits, length, on_grid, step):
    """All full blocks of 32 but the last: 102 = 3 · 32 + 6, so two are on the grid, however the tokens came."""
    k, v = torch.randn(2, 2, 3, length, 6, generator=torch.Generator().manual_seed(bits))
    k[..., 3] = 50 + 0.5 * k[..., 3]
    v[:, :, 5] *= 100
    cache = small(bits, 110, batch=2, layers=1)
    for new_k, new_v in zip(k.split(step, dim=2), v.split(step, dim=2)):
        keys, values = cache.update(0, new_k, new_v)
        count = new_k.shape[2]
        assert torch.equal(keys[:, :, -count:], new_k)  # a pass sees its own tokens exactly
        assert torch.equal(values[:, :, -count:], new_v)
        cache.advance(count)
    keys, values = seen(cache)
    assert torch.equal(keys[:, :, on_grid:], k[:, :, on_grid:])
    assert torch.equal(values[:, :, on_grid:], v[:, :, on_grid:])
    for start in range(0, on_grid, 32):
        for ours, exact, axis in ((keys, k, 2), (values, v, 3)):
            block = slice(start, start + 32)
            error, most = (ours - exact)[:, :, block].abs(), bound(exact[:, :, block], bits, axis)
            assert (error <= most).all() and error.max() > most.max() / 3  # and it is on a grid, not kept exactly


def test_an_outlier_channel_spoils_values_per_token_but_not_keys_per_channel_S5():
    """The case's numbers: a step of about .3 along channels; 50 to -1, or 52 / 15 = 3.4 a step, along tokens."""
    k = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    k[:, 3] = 50 + 0.5 * k[:, 3]
    for ours, low, high in zip(seen_once(k), (0.1, 1.4), (0.25, 2.0)):
        error = (ours - k).abs()
        others = error[:, [c for c in range(8) if c != 3]]
        assert low < others.max() < high
    assert (seen_once(k)[0] - k)[:, 3].abs().max() < 0.15


def seen_once(k, bits=4):
    """Keys and values as they come back off the grid, when both are k [tokens, head_dim], whole blocks."""
    cache = ll.QuantizedCache(1, 1, k.shape[1], len(k) + 32, dtype=k.dtype, bits=bits)
    both = torch.cat((k, torch.ones_like(k[:1]).expand(32, -1)))[None, None]  # the block behind them stays exact
    cache.update(0, both, both)
    cache.advance(len(k) + 32)
    return [part[0, 0, :len(k)] for part in seen(cache)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", [0.0, 5.0, -3.25, 1e-6, 1e-30, 60_000.0, -60_000.0])
def test_a_constant_line_is_neither_nan_nor_lost_E1(bits, number):
    for dtype in (torch.float32, torch.bfloat16):
        k = torch.full((32, 4), number, dtype=dtype)
        k[:, 2] = 0
        k[3] = 0  # so that some lines are constant and others are not
        for ours in seen_once(k, bits):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, k, rtol=2**-7, atol=abs(number) * 2**-9 + 1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 65_536.0, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_grid_can_hold_becomes_nan_in_its_own_line_only(bits, poison, dtype):
    k = torch.stack([lossless(bits, row, 0, 100) for row in range(2)]).to(dtype)
    bad = k.clone()
    bad[0, 1, 40, 2] = poison  # on the grid; 70 is not
    bad[0, 2, 70, 4] = poison
    cache = small(bits, batch=2, layers=1, dtype=dtype)
    cache.update(0, bad, bad)
    cache.advance(100)
    keys, values = seen(cache)
    k_nan, v_nan = torch.zeros_like(k, dtype=bool), torch.zeros_like(k, dtype=bool)
    k_nan[0, 1, 32:64, 2] = v_nan[0, 1, 40] = True
    for ours, nan in ((keys, k_nan), (values, v_nan)):
        right = bad.masked_fill(nan, torch.nan)
        assert torch.equal(ours.isnan(), right.isnan())
        assert torch.equal(ours.nan_to_num(7), right.nan_to_num(7))


@both
def test_a_row_with_nan_does_not_poison_the_others(new_cache):
    rows = [random_ids(80, seed) for seed in range(2)]
    cache, clean = new_cache(90, batch=2), new_cache(90, batch=2)
    hook = MODEL.blocks[0].attention.qkv.register_forward_hook(lambda layer, x, y: poison_first_row(y))
    MODEL(rows, cache)
    hook.remove()
    MODEL(rows, clean)
    for _ in range(2):
        logits = MODEL([[3], [4]], cache)
        assert logits[0].isnan().all()  # as with a KVCache: it is noticed, and by whom it concerns
        same_logits(logits[1], MODEL([[3], [4]], clean)[1])


def poison_first_row(qkv):
    qkv = qkv.clone()
    qkv[0, 7] = torch.nan
    return qkv


# --- Logits ---------------------------------------------------------------------------------------------------------

@both
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 100])
def test_a_prompt_in_one_pass_gets_the_logits_of_transformers(new_cache, length):
    ids = random_ids(length, seed=length)
    same_logits(feed(ids, length, new_cache(length)), expected(new_cache, ids))


@both
@pytest.mark.parametrize("length, on_grid", [(64, 32), (100, 64)])
def test_what_follows_gets_the_logits_of_transformers_with_such_keys_and_values_B4(new_cache, length, on_grid):
    """The keys and values that transformers holds are half a step from ours; with ours in their place it agrees."""
    ids, cache, model = random_ids(length + 28), new_cache(length + 28), oracle(None)
    MODEL(ids[:length], cache)
    with torch.no_grad():
        past = model(torch.tensor([ids[:length]]), use_cache=True).past_key_values
        layers = [(layer.keys, layer.values) for layer in past.layers] if hasattr(past, "layers") else past
        for layer, theirs in enumerate(layers):
            for ours, exact, axis in zip(seen(cache, layer), theirs, (2, 3)):
                error = (ours - exact).abs()
                for start in range(0, on_grid, 32):
                    block = slice(start, start + 32)
                    assert (error[:, :, block] <= bound(exact[:, :, block], cache.bits, axis) + 1e-4).all()
                assert (error[:, :, on_grid:] < 1e-4).all()
                exact.copy_(ours)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
        theirs = model(torch.tensor([ids[length:]]), **{name: past}).logits[0]
    same_logits(feed(ids[length:], [1, 5, 1, 1, 20], cache), theirs)


def test_the_error_of_the_logits_is_proportional_to_the_step():
    """A step of 4 bits is 17 times as long as one of 8 bits. Both are small against the logits, whose size is 1.8."""
    ids = random_ids(150)
    for sizes in (1, 7, [100, 50]):
        fine, coarse = ((feed(ids, sizes, new_cache(150)) - expected(new_cache, ids)).pow(2).mean().sqrt()
                        for new_cache in QUANTIZED)
        assert 17 / 3 < coarse / fine < 17 * 3
        assert fine < 0.05


def test_bfloat16_stays_bfloat16():
    model, ids = tiny_model(dtype=torch.bfloat16), random_ids(130)
    cache = model.new_cache(130, kind=ll.QuantizedCache, bits=8)
    logits = torch.cat([model(piece, cache) for piece in torch.tensor(ids).split(9)])
    assert logits.dtype == torch.bfloat16 and all(part.dtype == torch.bfloat16 for part in seen(cache))
    rounding = (model(ids).float() - expected(contiguous, ids)).pow(2).mean().sqrt()  # bfloat16's own
    assert (logits.float() - expected(contiguous, ids)).pow(2).mean().sqrt() < 2 * rounding
    cache.truncate(40)  # a block is taken off the grid
    again = model(ids[40:], cache).float() - expected(contiguous, ids)[40:]
    assert again.pow(2).mean().sqrt() < 2 * rounding


@pytest.mark.parametrize("bits", BITS)
def test_the_course_model_writes_on_as_without_a_grid(bits, smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.encode(ll.course_prose())[:100]
    cache = model.new_cache(len(prompt) + 10, kind=ll.QuantizedCache, bits=bits)
    answer = list(ll.generate(model, prompt, 10, cache=cache))
    whole = model(prompt + answer)[len(prompt) - 1:-1].log_softmax(-1)
    lost = whole.amax(-1) - whole.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert lost.max() < {8: 0.02, 4: 0.5}[bits]


# --- Bytes ------------------------------------------------------------------------------------------------------------

def test_bytes_of_smollm2_by_hand_S7():
    numbers = 2 * 30 * 3 * 64  # of a token: keys and values, layers, key/value heads, numbers each
    assert numbers * 2 == 23_040  # bytes in bfloat16
    scales = 30 * 3 * (64 + 32) * 2 * 2  # of a block: 64 channels, 32 tokens; scale and minimum, 2 bytes each
    for bits, a_token in ((8, 11_520 + 1_080), (4, 5_760 + 1_080)):
        cache = ll.QuantizedCache(30, 3, 64, 512, dtype=torch.bfloat16, device="meta", bits=bits)
        assert numbers * bits // 8 * 32 + scales == 32 * a_token
        assert cache.nbytes == 15 * 32 * a_token + 64 * 23_040  # 15 of 16 blocks on the grid, and room for two exact
    assert cache.nbytes == 4_757_760 and 2.4 < 512 * 23_040 / cache.nbytes < 2.5
    assert 3.3 < 23_040 / a_token < 3.4


@pytest.mark.parametrize("capacity, blocks, places", [
    (1, 0, 1), (31, 0, 31), (63, 0, 63), (64, 1, 64), (65, 1, 64), (95, 1, 64), (96, 2, 64)])
def test_memory_is_allocated_once_and_counted_whole_D1(capacity, blocks, places):
    cache = small(bits=4, capacity=capacity)
    a_head = blocks * (32 * 3 + 6 * 4 + 32 * 3 + 32 * 4) + 2 * places * 6 * 4  # 6 codes are 3 bytes; float32 has 4
    assert len(held(cache)[0]) == 8 and cache.nbytes == 2 * 3 * a_head
    where = cache.keys.open.data_ptr(), cache.keys.packed.data_ptr()
    put(cache, [capacity], layers=1)
    waiting = cache._waiting[0][0][0]
    assert waiting.nbytes == 3 * (capacity - 32 * blocks) * 6 * 4
    assert cache.nbytes == 2 * 3 * a_head + 2 * waiting.nbytes
    assert waiting.untyped_storage().nbytes() == waiting.nbytes  # a slice would keep the whole chunk
    put(cache, [capacity])
    assert cache.nbytes == 2 * 3 * a_head and where == (cache.keys.open.data_ptr(), cache.keys.packed.data_ptr())
