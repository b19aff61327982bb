"""The transformer against transformers' own Llama, and against itself: chunks, caches and batches change no result."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPE, as_transformers, feed, ragged, random_ids, same_logits, snapshot, tiny_model, unchanged
from tiny import one_thread as one_thread  # used by every test here

import llm_lessons as ll
from llm_lessons.model import Attention, Linear, RMSNorm, rope_table, rotate

MODEL = tiny_model()


# --- Against transformers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [
    dict(kv_heads=1), dict(kv_heads=3), dict(kv_heads=9), dict(head_dim=10), dict(heads=2, kv_heads=2),
    dict(tied=False)], ids=str)
def test_logits_equal_those_of_transformers(shape):
    model = tiny_model(seed=1, **shape)
    oracle = as_transformers(model)
    # At position 600 float32 rounds the rotary angle to 3e-5 radians, and the two libraries round it differently.
    for length, pieces, tolerance in ((1, [1], 1e-4), (2, [1, 1], 1e-4), (7, [4, 1, 1, 1], 1e-4),
                                      (600, [5, 1, 1, 513, 80], 5e-4)):
        ids = random_ids(length, seed=length)
        with torch.no_grad():
            expected = oracle(torch.tensor([ids])).logits[0]
        same_logits(model(ids), expected, tolerance)
        same_logits(feed(model, ids, pieces, model.new_cache(length)), expected, tolerance)


def test_trace_shows_the_logits_attention_and_residual_stream_that_transformers_shows():
    oracle, ids = as_transformers(MODEL), random_ids(23)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
    seen = ll.trace(MODEL, ids)
    same_logits(seen.logits, MODEL(ids))
    same_logits(seen.logits, expected.logits[0])
    assert len(expected.attentions) == SHAPE["layers"]
    for layer, attention in enumerate(expected.attentions):
        torch.testing.assert_close(seen.attention(layer), attention[0], rtol=1e-4, atol=1e-5)
    assert len(seen.hidden) == SHAPE["layers"] + 1
    for ours, theirs in zip(seen.hidden[:-1], expected.hidden_states):  # transformers' last one is already normalised
        torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(MODEL.norm(seen.hidden[-1]), expected.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [-1, SHAPE["layers"], 0.5, None, True])
def test_trace_refuses_a_layer_that_is_not_there(layer):
    with pytest.raises(ValueError, match=f"no layer {layer}.*0 to {SHAPE['layers'] - 1}"):
        ll.trace(MODEL, [1, 2]).attention(layer)


@pytest.mark.parametrize("ids", [[[1, 2]], [1] * 1025])
def test_trace_refuses_a_batch_and_a_prompt_beyond_the_context_window(ids):
    with pytest.raises(ValueError, match="1024"):
        ll.trace(MODEL, ids)


def test_operations_are_counted_and_views_told_apart():
    a = torch.ones(2, 2)
    working, views = ll.operations(lambda: ((a @ a).transpose(0, 1) + 1 + a[:1].unsqueeze(0)).clone())
    assert working == {"mm": 1, "add": 2, "clone": 1} and views == {"transpose": 1, "slice": 1, "unsqueeze": 1}
    assert ll.operations(lambda: None) == ({}, {})
    with pytest.raises(ValueError, match="run must be a function.*not 3"):
        ll.operations(3)


@pytest.mark.parametrize("ids", [[3], [3, 1, 4]])
def test_a_pass_has_as_many_products_and_attentions_as_its_layers(ids):
    cache = MODEL.new_cache(8)
    working, views = ll.operations(lambda: ll.prefill(MODEL, ids, cache))
    products = sum(count for name, count in working.items() if name in ("linear", "addmm", "mm", "_linear_pointwise"))
    assert products == 4 * SHAPE["layers"] + 1  # q, k, v as one; output; gate and up as one; down; and the head
    assert sum(count for name, count in working.items() if "dot_product" in name) == SHAPE["layers"]
    assert not set(views) & set(working)


def test_bfloat16_stays_near_float32_with_and_without_a_cache():
    rough, ids = tiny_model(dtype=torch.bfloat16), random_ids(40)
    exact = tiny_model()
    for ours, given_ in zip(exact.parameters(), rough.parameters()):
        ours.copy_(given_)  # the same rounded weights: what is left is the rounding of the arithmetic
    for logits in (rough(ids), feed(rough, ids, [17, 1, 22], rough.new_cache(40))):
        assert logits.dtype == torch.bfloat16
        error = (logits.float() - exact(ids)).norm() / exact(ids).norm()
        assert 1e-4 < error < 0.1  # bfloat16 keeps 8 bits: 0.4 % for each operation, and some dozens follow each other


# --- One result, however it is computed -----------------------------------------------------------------------------

@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_whole_equals_chunks_equals_token_by_token_B4(sizes, seed):
    ids = random_ids(sum(sizes), seed)
    whole = MODEL(ids)
    same_logits(feed(MODEL, ids, sizes, MODEL.new_cache(len(ids))), whole)
    same_logits(feed(MODEL, ids, 1, MODEL.new_cache(len(ids))), whole)


def test_chunks_of_a_prompt_longer_than_512_equal_the_whole():
    ids = random_ids(700)
    same_logits(feed(MODEL, ids, [513, 1, 186], MODEL.new_cache(700)), MODEL(ids))


def test_cached_steps_equal_a_recomputation_without_a_cache_and_stand_at_the_right_positions_B2(monkeypatch):
    used = []
    monkeypatch.setattr("llm_lessons.model.rope_table",
                        lambda at, *rest: used.append(at.flatten().tolist()) or rope_table(at, *rest))
    ids, cache = random_ids(10), MODEL.new_cache(10)
    steps = [MODEL(ids[:6], cache)[-1]] + [MODEL(ids[i:i + 1], cache)[0] for i in range(6, 10)]
    assert used == [[0, 1, 2, 3, 4, 5], [6], [7], [8], [9]]
    for length, logits in enumerate(steps, start=6):
        same_logits(logits, MODEL(ids[:length])[-1])


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.tuples(*[st.integers(0, 5)] * 3).filter(any), min_size=1, max_size=7),
       padding=st.integers(0, 9), seed=st.integers(0, 99))
def test_rows_of_any_batch_equal_each_row_alone_D7(calls, padding, seed):
    """Prefill, decode and rows that sit out, mixed in any way; padding is junk, and may reach past the capacity."""
    totals = [max(1, sum(lengths)) for lengths in zip(*calls)]
    rows = [random_ids(total, seed + row) for row, total in enumerate(totals)]
    alone = [MODEL(ids) for ids in rows]
    cache = MODEL.new_cache(max(totals), batch=3)
    for starts, lengths, logits in ragged(MODEL, cache, rows, calls, padding, seed):
        assert cache.lengths == [start + new for start, new in zip(starts, lengths)]
        for row, (start, new) in enumerate(zip(starts, lengths)):
            same_logits(logits[row, :new], alone[row][start:start + new])


@pytest.mark.parametrize("prompt_lengths", [(2, 5, 9), (1, 300, 17), (4, 4, 4)])
def test_padded_batch_equals_each_prompt_alone_then_decodes_on_D7(prompt_lengths):
    rows = [random_ids(length + 4, seed=length + i) for i, length in enumerate(prompt_lengths)]
    alone = [MODEL(ids) for ids in rows]
    padded = torch.tensor([ids[:n] + [0] * (max(prompt_lengths) - n) for ids, n in zip(rows, prompt_lengths)])
    cache = MODEL.new_cache(max(prompt_lengths) + 4, batch=3)
    with_cache, without = MODEL(padded, cache, list(prompt_lengths)), MODEL(padded, lengths=list(prompt_lengths))
    for row, length in enumerate(prompt_lengths):
        same_logits(with_cache[row, :length], alone[row][:length])
        same_logits(without[row, :length], alone[row][:length])
    for step in range(4):
        logits = MODEL([[ids[n + step]] for ids, n in zip(rows, prompt_lengths)], cache)
        for row, length in enumerate(prompt_lengths):
            same_logits(logits[row, 0], alone[row][length + step])


def test_one_prompt_four_times_gives_the_same_row_four_times_D7():
    ids = random_ids(9)
    for row in MODEL([ids] * 4):
        same_logits(row, MODEL(ids))


# --- The parts, by hand ---------------------------------------------------------------------------------------------

def test_score_depends_on_the_distance_of_two_tokens_alone_B2():
    q, k = torch.tensor([1., 2., 3., 4.]), torch.tensor([4., 3., 2., 1.])

    def score(q_position, k_position):
        cos, sin = rope_table(torch.tensor([q_position, k_position]), 4, 10_000.0)
        return float(rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1]))

    assert score(3, 1) == pytest.approx(-3.456429, abs=1e-5)
    assert score(5, 3) == pytest.approx(-3.456429, abs=1e-5)
    assert abs(score(4, 1) - score(3, 1)) > 0.1


def attention_that_shows_values(heads, kv_heads, value):
    """Attention over [B, T, C] whose queries and keys are 0 and whose output is the mixed values, head after head."""
    config = ll.ModelConfig(layers=1, hidden=2 * heads, heads=heads, kv_heads=kv_heads, head_dim=2, ffn=1, vocab=1,
                            context=9)
    attention = Attention(config, 0)
    attention.qkv.weight.zero_()
    attention.qkv.weight[-2 * kv_heads:, 0] = value
    attention.output.weight.copy_(torch.eye(2 * heads))
    return attention


@pytest.mark.parametrize("kv_heads, heads, expected", [
    (2, 4, [0, 0, 1, 1]), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]), (3, 9, [0, 0, 0, 1, 1, 1, 2, 2, 2])])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_neighbouring_query_heads_share_a_key_value_head_B3(kv_heads, heads, expected, tokens, cached):
    attention = attention_that_shows_values(heads, kv_heads, torch.arange(kv_heads).repeat_interleave(2).float())
    cache = ll.KVCache(1, kv_heads, 2, 8) if cached else None
    x = F.one_hot(torch.zeros(1, tokens, dtype=torch.long), 2 * heads).float()  # value head g answers g
    rope = rope_table(torch.arange(tokens), 2, 10_000.0)
    mixed = attention(x, rope, cache, cache.mask(tokens) if cached else None)
    assert mixed.shape == (1, tokens, 2 * heads)
    assert mixed[0, -1, ::2].tolist() == expected == mixed[0, -1, 1::2].tolist()


@pytest.mark.parametrize("chunks, expected", [
    ([[1, 2, 6]], [[1, 1.5, 3]]), ([[1, 2, 3, 4], [5]], [[1, 1.5, 2, 2.5], [3]]),
    ([[1, 2, 3], [4, 5]], [[1, 1.5, 2], [2.5, 3]]), ([[1, 2, 3, 4], [5, 6, 7]], [[1, 1.5, 2, 2.5], [3, 3.5, 4]])])
def test_cached_attention_averages_exactly_the_tokens_up_to_its_own_B4(chunks, expected):
    attention, cache = attention_that_shows_values(1, 1, torch.ones(2)), ll.KVCache(1, 1, 2, 8)
    for values, averages in zip(chunks, expected):
        n = len(values)
        x = torch.tensor(values).float()[None, :, None] * torch.tensor([1., 0.])
        mixed = attention(x, rope_table(cache.length + torch.arange(n), 2, 10_000.0), cache, cache.mask(n))
        cache.advance(n)
        assert mixed[0, :, 0].tolist() == pytest.approx(averages, abs=1e-6)


def test_the_head_of_a_tied_model_is_the_embedding_B6():
    config = ll.ModelConfig(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=3, context=4)
    model = ll.Model(config)
    model.embedding.weight.copy_(torch.tensor([[1., 0.], [0., 1.], [1., 1.]]))
    assert model.head(torch.tensor([2., 3.])).tolist() == [2, 3, 5]
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert model.to(torch.bfloat16).head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("tied, expected", [(True, 134_515_008), (False, 162_826_560)])
def test_parameter_count_of_smollm2_B6(tied, expected):
    shape = ll.ModelConfig(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, context=8192,
                           tied=tied)
    assert sum(weight.numel() for weight in ll.Model(shape, device="meta").parameters()) == expected


@pytest.mark.parametrize("values, eps, expected", [
    ([1000, -1000, 1000, 1000], 1e-5, [1, -1, 1, 1]), ([300, -400, 0, 0], 1e-5, [1.2002, -1.5996, 0, 0]),
    ([0, 0, 0, 0], 1e-8, [0, 0, 0, 0])])
def test_rmsnorm_in_float16_neither_overflows_nor_divides_by_zero_B7(values, eps, expected):
    norm = RMSNorm(4, eps, dtype=torch.float16)
    norm.weight.fill_(1)
    out = norm(torch.tensor(values, dtype=torch.float16))
    assert out.dtype == torch.float16
    assert out.tolist() == pytest.approx(expected, abs=5e-5)


def test_linear_is_torchs_linear():
    ours, theirs = Linear(5, 3), torch.nn.Linear(5, 3, bias=False)
    ours.weight.copy_(theirs.weight)
    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x))


# --- What is refused, and that a refusal changes nothing ------------------------------------------------------------

BAD_IDS = {"negative": [3, -1], "beyond the vocabulary": [0, SHAPE["vocab"]], "float": [1.0, 2.0],
           "bool": [True, False], "empty": [], "empty rows": [[], []], "3-D": [[[1]]], "a single number": 5,
           "text": "How", "nothing": None, "complex": [1j], "float tensor": torch.tensor([1.0])}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS.keys())
def test_bad_ids_are_refused_before_anything_is_written(ids):
    cache = MODEL.new_cache(8)
    MODEL([5, 6, 7], cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="ids? .*(vocabulary, 0 to 96|whole numbers|at least one token)"):
        MODEL(ids, cache)
    assert unchanged(cache, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16])
def test_ids_of_any_whole_number_type_are_accepted(dtype):
    same_logits(MODEL(torch.tensor([3, 96, 0], dtype=dtype)), MODEL([3, 96, 0]))


@pytest.mark.parametrize("lengths", [[3, 1], [-1, 1], [1], [1, 1, 1], [], [1.5, 1], [float("nan"), 1], 2, "12",
                                     [None, 1], [[1], [1]]], ids=str)
@pytest.mark.parametrize("cached", [True, False])
def test_bad_lengths_are_refused(lengths, cached):
    cache = MODEL.new_cache(8, batch=2) if cached else None
    with pytest.raises(ValueError, match="lengths must be 2 whole numbers from 0 to 2"):
        MODEL([[1, 2], [3, 4]], cache, lengths)
    assert not cached or cache.lengths == [0, 0]


@pytest.mark.parametrize("batch, ids, lengths, message", [
    (2, [1, 2], None, "holds 2 sequences, and 1 were given"),
    (2, [[1]] * 3, None, "holds 2 sequences, and 3 were given"),
    (1, [[1], [2]], None, "holds 1 sequences, and 2 were given"),
    (2, [[1] * 6] * 2, [5, 6], "row 1 of the cache holds 3 tokens, and 6 more do not fit in its capacity of 8"),
    (1, [1] * 6, None, "holds 3 tokens, and 6 more do not fit in its capacity of 8")])
def test_wrong_batches_and_too_many_tokens_are_refused_before_anything_is_written_D1(batch, ids, lengths, message):
    cache = MODEL.new_cache(8, batch)
    MODEL([[5, 6, 7]] * batch, cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        MODEL(ids, cache, lengths)
    assert unchanged(cache, before)


def test_the_context_window_is_a_limit_with_and_without_a_cache():
    model = tiny_model(context=8)
    assert model([1] * 8).shape == (8, SHAPE["vocab"])
    larger = ll.KVCache(SHAPE["layers"], SHAPE["kv_heads"], SHAPE["head_dim"], capacity=20)
    model([1] * 5, larger)
    before = snapshot(larger)
    for cache, more in ((None, 9), (larger, 4)):
        with pytest.raises(ValueError, match="9 tokens are more than this model's context window of 8"):
            model([1] * more, cache)
    assert unchanged(larger, before)
    with pytest.raises(ValueError, match="cache of 9 tokens is longer than .* 8"):
        model.new_cache(9)


@pytest.mark.parametrize("changes, message", [
    (dict(heads=9, kv_heads=2), "9 query heads cannot share 2"), (dict(head_dim=3), "even.*3"),
    (dict(layers=0), "layers .*0"), (dict(vocab=1.5), "vocab .*1.5")])
def test_a_shape_that_cannot_be_a_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ll.ModelConfig(**SHAPE | changes)
