"""Every kind of cache gives the logits of transformers: in chunks, in ragged rows, and after a pass that failed."""

import math

import pytest
import torch
from cache_kinds import MODEL, contiguous, every_kind, expected, fail_in_layer, feed, growing, oracle, paged_by_4
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE, ragged, random_ids, same_logits, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll
from llm_lessons.model import rope_table

# --- One result, however it is computed -----------------------------------------------------------------------------

@every_kind
@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 33, 40])
def test_chunks_of_any_size_give_the_logits_of_transformers_B4(new_cache, length):
    ids = random_ids(length, seed=length)
    for size in (1, 2, 3, 5, 16, 17, 40):
        same_logits(feed(ids, size, new_cache(length)), expected(new_cache, ids))


@every_kind
@pytest.mark.parametrize("sizes", [[4, 3], [6, 1, 1, 1, 1], [1, 16, 1, 17, 2]], ids=str)
def test_prefill_then_decode_equals_a_recomputation_without_a_cache_B4(new_cache, sizes):
    ids = random_ids(sum(sizes), seed=len(sizes))
    same_logits(feed(ids, sizes, new_cache(len(ids))), expected(new_cache, ids))


@every_kind
@settings(max_examples=15, deadline=None)
@given(calls=st.lists(st.tuples(*[st.integers(0, 7)] * 3).filter(any), min_size=1, max_size=6),
       padding=st.integers(0, 3), seed=st.integers(0, 99))
def test_rows_of_a_ragged_batch_equal_each_row_alone_D7(new_cache, calls, padding, seed):
    """Prefill, decode and rows that sit out, mixed in any way; padding is junk, and may reach past the capacity."""
    totals = [max(1, sum(lengths)) for lengths in zip(*calls)]
    rows = [random_ids(total, seed + row) for row, total in enumerate(totals)]
    cache = new_cache(max(totals), batch=3)
    for starts, lengths, logits in ragged(MODEL, cache, rows, calls, padding, seed):
        assert torch.isfinite(logits).all()
        assert cache.lengths == [start + new for start, new in zip(starts, lengths)]
        for row, (start, new) in enumerate(zip(starts, lengths)):
            same_logits(logits[row, :new], expected(new_cache, rows[row])[start:start + new])


@every_kind
def test_the_course_model_writes_the_same_answer_with_every_kind(new_cache, smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": "How does inference work?"}])
    kind, settings = type(new_cache(4)), {"window": 200} if "sliding" in new_cache.__name__ else {}
    cache = model.new_cache(len(prompt) + 10, kind=kind, **settings)
    answer = list(ll.generate(model, prompt, 10, cache=cache))
    whole = model(prompt + answer)[len(prompt) - 1:-1]
    assert answer == whole.argmax(-1).tolist()


@pytest.mark.parametrize("kind, settings", [
    (ll.KVCache, {}), (ll.GrowingCache, {}), (ll.SlidingCache, {"window": 3}), (ll.PagedCache, {})])
def test_bfloat16_is_kept_and_another_type_refused(kind, settings):
    model = tiny_model(dtype=torch.bfloat16)
    cache = model.new_cache(4, kind=kind, **settings)
    assert model([1, 2, 3], cache).dtype == torch.bfloat16
    k = torch.ones(1, 3, 1, 4, dtype=torch.bfloat16)
    assert all(held.dtype == torch.bfloat16 for held in cache.update(0, k, k))
    with pytest.raises(ValueError, match=r"torch.float32 for layer 0 do not fit this cache of .* torch.bfloat16"):
        cache.update(0, k.float(), k.float())


# --- Positions: the prompt comes first (claim 16) -------------------------------------------------------------------

@every_kind
def test_a_new_token_stands_behind_the_prompt_in_every_layer_B2(new_cache, monkeypatch):
    """The faults: positions 6, 12, 13, 14; or a counter that layer 0 moves before the other layers read it."""
    used, seen = [], []
    monkeypatch.setattr("llm_lessons.model.rope_table",
                        lambda at, *rest: used.append(at.flatten().tolist()) or rope_table(at, *rest))
    cache = new_cache(10)
    update = cache.update
    monkeypatch.setattr(cache, "update", lambda layer, k, v: seen.append((layer, cache.length)) or update(layer, k, v))
    ids = random_ids(10)
    logits = [MODEL(ids[:6], cache)[-1]] + [MODEL(ids[i:i + 1], cache)[0] for i in range(6, 10)]
    assert used == [[0, 1, 2, 3, 4, 5], [6], [7], [8], [9]]
    assert seen == [(layer, start) for start in (0, 6, 7, 8, 9) for layer in range(SHAPE["layers"])]
    for length, ours in enumerate(logits, start=6):
        same_logits(ours, expected(new_cache, ids[:length])[-1])


@pytest.mark.parametrize("new_cache", [contiguous, growing, paged_by_4])
def test_every_layer_holds_the_keys_and_values_that_transformers_holds_B2(new_cache, monkeypatch):
    ids, cache, held_ = random_ids(10), new_cache(10), {}
    update = cache.update
    monkeypatch.setattr(cache, "update", lambda layer, *kv: held_.setdefault(layer, []).append(update(layer, *kv))
                        or held_[layer][-1])
    for piece in (ids[:6], ids[6:7], ids[7:8], ids[8:9], ids[9:]):
        MODEL(piece, cache)
    with torch.no_grad():
        theirs = oracle(None)(torch.tensor([ids]), use_cache=True).past_key_values
    if hasattr(theirs, "layers"):
        theirs = [(layer.keys, layer.values) for layer in theirs.layers]
    for layer in range(SHAPE["layers"]):
        keys, values = held_[layer][-1]
        torch.testing.assert_close(keys, theirs[layer][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, theirs[layer][1], rtol=1e-4, atol=1e-4)


def test_scores_depend_on_the_distance_only_and_equal_the_published_value_B2():
    q, k = torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 3, 2, 1])

    def turned(x, position):
        cos, sin = rope_table(torch.tensor(position), 4, 10_000.0)
        return ll.model.rotate(x, cos, sin)

    for first, second in ((3, 1), (5, 3), (9, 7)):
        assert float(turned(q, first) @ turned(k, second)) == pytest.approx(-3.456429, abs=1e-4)
    assert rope_table(torch.tensor(6), 4, 10_000.0)[0].tolist() == pytest.approx(
        [math.cos(6), math.cos(0.06)] * 2, abs=1e-6)


# --- Failing half-way -----------------------------------------------------------------------------------------------

@every_kind
@pytest.mark.parametrize("layer", range(SHAPE["layers"]))
@pytest.mark.parametrize("before, failed", [(0, 1), (0, 9), (2, 3), (7, 1), (7, 9), (11, 1), (11, 3), (16, 1)])
def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was(new_cache, layer, before, failed):
    ids, cache = random_ids(before + 9), new_cache(before + 9)
    if before:
        MODEL(ids[:before], cache)
    hook = fail_in_layer(layer, times=2)
    try:
        for junk in (random_ids(failed, seed=77), random_ids(2, seed=78)):
            with pytest.raises(KeyboardInterrupt):
                MODEL(junk, cache)
    finally:
        hook.remove()
    assert cache.lengths == [before]
    same_logits(feed(ids[before:], [1, 2, 6], cache), expected(new_cache, ids)[before:])


@every_kind
def test_a_batch_that_fails_half_way_leaves_every_row_as_it_was(new_cache):
    rows, cache = [random_ids(12, seed=row) for row in range(3)], new_cache(12, batch=3)
    MODEL([ids[:8] for ids in rows], cache, [2, 0, 8])
    hook = fail_in_layer(1)
    try:
        with pytest.raises(KeyboardInterrupt):
            MODEL([random_ids(4, seed=9)] * 3, cache, [4, 2, 1])
    finally:
        hook.remove()
    starts = cache.lengths
    assert starts == [2, 0, 8]
    logits = MODEL([(ids[start:] + [0] * 3)[:3] for ids, start in zip(rows, starts)], cache, [1, 3, 2])
    for row, (start, new) in enumerate(zip(starts, [1, 3, 2])):
        same_logits(logits[row, :new], expected(new_cache, rows[row][:start + new])[start:])
