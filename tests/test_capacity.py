"""Parameters, FLOPs and bytes of a shape: as torch counts them, as transformers has them, as they are published."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import SHAPE, as_transformers, random_ids, tiny_model
from tiny import one_thread as one_thread
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import llm_lessons as ll
from llm_lessons import SHAPES, ModelConfig, Roofline, Shape

SIZES = {name: SHAPE[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
TINY = Shape(**SIZES)  # 9 query heads and 3 key/value heads of 4, tied
CHANGES = [{}, {"tied": False}, {"kv_heads": 9}, {"kv_heads": 1}, {"head_dim": 10}, {"layers": 1}]

# What Hugging Face shows beside each model's files, in numbers.
PUBLISHED = {"smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "qwen3-4b": 4_022_468_096,
             "llama-3-8b": 8_030_261_248, "llama-2-13b": 13_015_864_320, "llama-3-70b": 70_553_706_496}


def without_memory(shape, name):
    """transformers' own model of this shape, to be made and run in a FakeTensorMode: structure, and no numbers."""
    import transformers

    family = "Qwen3" if name.startswith("qwen3") else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied, attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config)


def counted(fn):
    """FLOPs of fn() as torch counts them. On a CPU it counts 0 for any other kind of SDPA than MATH."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        fn()
    # Some versions of transformers multiply positions and rotary frequencies as matrices: not the model's arithmetic.
    rotary = [sum(flops.values()) for module, flops in counter.get_flop_counts().items() if "rotary_emb" in module]
    return counter.get_total_flops() - sum(rotary)


# --- Parameters -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    qk_norms = 2 * 36 * 128 if name == "qwen3-4b" else 0  # Qwen3 also norms queries and keys; a Shape does not
    assert SHAPES[name].parameters + qk_norms == PUBLISHED[name]
    with FakeTensorMode():
        assert without_memory(SHAPES[name], name).num_parameters() == PUBLISHED[name]


def test_every_shape_of_the_catalogue_has_a_published_count():
    assert set(SHAPES) == set(PUBLISHED)


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_and_parts_of_a_real_model(change):
    model = tiny_model(**change)
    shape, parts = Shape.of(model), dict.fromkeys(("embedding", "attention", "ffn", "norms", "head"), 0)
    for name, weight in model.named_parameters():  # a tied head is named once, as the embedding
        part = "norms" if "norm" in name else next(part for part in parts if part in name)
        parts[part] += weight.numel()
    assert shape.parts == parts
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.matrix_parameters == shape.parameters - parts["norms"]


def test_parts_by_hand():
    # q and output 36x36 each, k and v 36x12 each: 3456 a layer; gate, up, down 36x40 each: 4320; two norms and a last.
    assert TINY.parts == {"embedding": 97 * 36, "attention": 3 * 3456, "ffn": 3 * 4320, "norms": 7 * 36, "head": 0}
    assert dataclasses.replace(TINY, tied=False).parts["head"] == 97 * 36


def test_the_head_is_streamed_and_the_lookup_table_is_not():
    untied = dataclasses.replace(TINY, tied=False)
    assert TINY.streamed_parameters == untied.streamed_parameters == 3 * (3456 + 4320) + 97 * 36
    assert TINY.streamed_parameters == TINY.matrix_parameters
    assert untied.streamed_parameters == untied.matrix_parameters - 97 * 36


# --- FLOPs, exactly as torch counts them ----------------------------------------------------------------------------

@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_prefill(tokens, change):
    model, ids = tiny_model(**change), random_ids(tokens)
    shape = Shape.of(model)
    assert counted(lambda: ll.prefill(model, ids, model.new_cache(64))) == shape.prefill_flops(tokens, causal=False)
    expected = shape.prefill_flops(tokens, all_logits=True, causal=False)
    assert counted(lambda: model(ids)) == counted(lambda: model(ids, model.new_cache(64))) == expected
    oracle = as_transformers(model)
    assert counted(lambda: oracle(torch.tensor([ids]), use_cache=False)) == expected


@pytest.mark.parametrize("past", [1, 5, 30])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_prefill_behind_a_past(tokens, past):
    model = tiny_model()
    cache = model.new_cache(64)
    ll.prefill(model, random_ids(past), cache)
    flops = counted(lambda: ll.prefill(model, random_ids(tokens), cache))
    assert flops == TINY.prefill_flops(tokens, past, causal=False)


@pytest.mark.parametrize("chunk", [1, 4, 11, 32])
def test_a_chunked_prefill_is_the_sum_of_its_passes_with_one_head(chunk):
    model = tiny_model()
    pieces = [(start, min(chunk, 33 - start)) for start in range(0, 33, chunk)]
    head = 2 * 97 * 36
    expected = sum(TINY.prefill_flops(tokens, past, causal=False) for past, tokens in pieces) - head * (len(pieces) - 1)
    assert counted(lambda: ll.prefill(model, random_ids(33), model.new_cache(64), chunk=chunk)) == expected
    needed = sum(TINY.prefill_flops(tokens, past) for past, tokens in pieces) - head * (len(pieces) - 1)
    assert needed == TINY.prefill_flops(33)  # what the mask lets through does not depend on the pieces


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("context", [1, 2, 9, 50])
def test_a_decode_step(context, change):
    model = tiny_model(**change)
    cache = model.new_cache(64)
    if context > 1:
        ll.prefill(model, random_ids(context - 1), cache)
    assert counted(lambda: ll.decode(model, 5, cache)) == Shape.of(model).flops_per_token(context)
    assert cache.length == context


def test_prefill_and_decode_steps_of_transformers_generate():
    model, prompt = as_transformers(tiny_model()), torch.tensor([random_ids(8)])
    flops = counted(lambda: model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False))
    assert flops == TINY.prefill_flops(8, causal=False) + TINY.flops_per_token(9) + TINY.flops_per_token(10)


def test_a_batch_of_three_costs_three_times_as_much():
    model = tiny_model()
    cache, ids = model.new_cache(64, batch=3), torch.tensor([random_ids(7, seed) for seed in range(3)])
    assert counted(lambda: model(ids, cache)) == 3 * TINY.prefill_flops(7, all_logits=True, causal=False)
    assert counted(lambda: model(ids[:, :1], cache)) == 3 * TINY.flops_per_token(8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_of_published_models(name):
    T = 16
    with FakeTensorMode():
        model = without_memory(SHAPES[name], name)
        ids, mask = torch.zeros(1, T, dtype=torch.long), torch.zeros(1, 1, T, T)
        flops = counted(lambda: model(ids, attention_mask=mask, use_cache=False))
    assert flops == SHAPES[name].prefill_flops(T, all_logits=True, causal=False)


@given(st.integers(1, 60), st.integers(0, 60))
def test_prefill_needs_what_as_many_decode_steps_need(tokens, past):
    steps = sum(TINY.flops_per_token(past + i) for i in range(1, tokens + 1))
    assert TINY.prefill_flops(tokens, past, all_logits=True) == steps


def test_the_causal_mask_needs_half_of_the_scores():
    def scores(tokens, **how):  # what is left without the weights
        return TINY.prefill_flops(tokens, **how) - 2 * tokens * 3 * (3456 + 4320) - 2 * 97 * 36

    # By hand: 3 layers, 9 heads, 2 · 4 FLOPs for a score and 2 · 4 for its value; 4 tokens see 1 + 2 + 3 + 4 keys.
    assert scores(4) == 3 * 9 * 16 * 10
    assert scores(4, causal=False) == 3 * 9 * 16 * 16
    assert scores(1000) / scores(1000, causal=False) == 1001 / 2000
    assert scores(1) == scores(1, causal=False)


# --- Bytes ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_real_cache(dtype):
    model = tiny_model(dtype=dtype, kv_heads=3)
    assert TINY.kv_bytes_per_token(dtype.itemsize) * 50 * 2 == model.new_cache(50, batch=2).nbytes


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_decode_step_are_those_of_the_matrices_and_of_the_cache(tied, batch):
    model = tiny_model(tied=tied)
    matrices = sum(weight.nbytes for weight in model.parameters() if weight.dim() == 2)  # a tied table is here once
    matrices -= 0 if tied else model.embedding.weight.nbytes
    per_token = Shape.of(model).bytes_per_token(50, batch, bytes_per_weight=4, bytes_per_value=4)
    assert per_token * batch == matrices + model.new_cache(50, batch).nbytes


def test_bytes_by_hand():
    weights, kv = 3 * (3456 + 4320) + 97 * 36, 2 * 3 * 3 * 4
    assert TINY.kv_bytes_per_token() == 2 * kv
    assert TINY.kv_bytes_per_token(0.5) == kv / 2
    assert TINY.bytes_per_token(0) == 2 * weights
    assert TINY.bytes_per_token(10, batch=4, bytes_per_weight=0.5, bytes_per_value=1) == weights / 8 + 10 * kv
    assert TINY.prefill_bytes(7, past=3) == 2 * weights + 10 * 2 * kv
    assert TINY.prefill_bytes(1, past=9) == TINY.bytes_per_token(10)  # a pass of one token is a decode step


def test_where_the_cache_outweighs_the_weights():
    # SmolLM2 at 2 bytes: 134,479,872 streamed weights · 2 / 23,040 = 11,673.6 tokens, past its 8,192 tokens of context.
    assert SHAPES["smollm2-135m"].crossover_context() == 11_674
    # Llama-3-8B: 7,504,658,432 · 2 / 131,072 = 114,512.0; with 4-bit weights and 16 sequences 1,789.2.
    assert SHAPES["llama-3-8b"].crossover_context() == 114_512 + 1
    assert SHAPES["llama-3-8b"].crossover_context(batch=16, bytes_per_weight=0.5) == 1_790


@given(st.integers(1, 64), st.sampled_from([0.5, 1, 2, 4]), st.sampled_from([0.5, 1, 2]))
def test_the_crossover_is_the_first_context_with_more_cache_than_weights(batch, weight, value):
    context = TINY.crossover_context(batch, weight, value)
    weights = TINY.streamed_parameters * weight
    assert batch * (context - 1) * TINY.kv_bytes_per_token(value) <= weights
    assert batch * context * TINY.kv_bytes_per_token(value) > weights


# --- Arithmetic intensity and the roofline --------------------------------------------------------------------------

def test_intensity_is_flops_over_bytes():
    # Llama-3-8B at 2 bytes, 1000 tokens: 131,072 bytes of cache and 4 · 32 · 32 · 128 = 524,288 FLOPs for each of them.
    weights = 7_504_658_432
    flops, cache = 2 * weights + 524_288 * 1000, 131_072 * 1000
    shape = SHAPES["llama-3-8b"]
    assert shape.decode_intensity(1000) == pytest.approx(flops / (2 * weights + cache))
    assert shape.decode_intensity(1000, batch=32) == pytest.approx(32 * flops / (2 * weights + 32 * cache))
    pairs, head = 1000 * 1001 / 2, 128_256 * 4096
    prefill = 2 * 1000 * (weights - head) + 524_288 * pairs + 2 * head
    assert shape.prefill_intensity(1000) == pytest.approx(prefill / (2 * weights + cache))
    assert shape.prefill_intensity(1) == shape.decode_intensity(1)


def test_what_intensity_is_about():
    shape = SHAPES["llama-3-8b"]
    for batch in (1, 2, 8):  # 2 · batch / 2 bytes while the weights outweigh the cache
        assert shape.decode_intensity(1, batch) == pytest.approx(batch, rel=1e-3)
        assert shape.decode_intensity(1, batch, bytes_per_weight=0.5) == pytest.approx(4 * batch, rel=1e-3)
    assert shape.prefill_intensity(512, bytes_per_weight=1) == pytest.approx(2 * 512, rel=0.1)
    limit = 2 * 4 / 2 + 2 * 7_504_658_432 / (4096 * 131_072)  # 4 query heads share each key/value head
    intensities = [shape.decode_intensity(4096, batch) for batch in (1, 8, 64, 512, 4096, 10**6)]
    assert intensities == sorted(intensities) and intensities[-1] < limit
    assert intensities[-1] == pytest.approx(limit, rel=1e-3)


H100 = Roofline({"bfloat16": 989e12, "float8": 1979e12}, 3.35e12, {})  # NVIDIA's data sheet, SXM


def test_ridge_point():
    assert ll.ridge_point(H100, "bfloat16") == pytest.approx(295.2, abs=0.05)  # 989 / 3.35
    assert ll.ridge_point(H100, torch.bfloat16) == ll.ridge_point(H100, "bfloat16")
    assert ll.ridge_point(H100, "float8") == pytest.approx(590.7, abs=0.05)


def test_roofline_time_is_the_larger_of_the_two_times():
    assert ll.roofline_time(989e12, 1, H100, "bfloat16") == pytest.approx(1)
    assert ll.roofline_time(1, 3.35e12, H100, "bfloat16") == pytest.approx(1)
    assert ll.roofline_time(0, 0, H100, "bfloat16") == 0
    nbytes = 1e9
    flops = nbytes * ll.ridge_point(H100, "bfloat16")
    at_ridge = ll.roofline_time(flops, nbytes, H100, "bfloat16")
    assert at_ridge == pytest.approx(flops / 989e12) and at_ridge == pytest.approx(nbytes / 3.35e12)
    assert ll.roofline_time(flops * 0.9, nbytes, H100, "bfloat16") == pytest.approx(at_ridge)
    assert ll.roofline_time(flops * 1.1, nbytes, H100, "bfloat16") == pytest.approx(at_ridge * 1.1)


# --- Worked examples from "How to Scale Your Model" and published configurations ------------------------------------

def test_planner_example_2_the_weights_of_a_step_at_batch_256_take_4_87_ms():
    chips = Roofline({"int8": 16 * 1.97e14}, 16 * 8.1e11, {})
    assert ll.roofline_time(2 * 256 * 30e9, 30e9, chips, "int8") == pytest.approx(4.87e-3, abs=5e-6)  # arithmetic
    assert ll.roofline_time(2 * 4 * 30e9, 30e9, chips, "int8") == pytest.approx(30e9 / 12.96e12)  # example 1: bandwidth


def test_planner_example_3_llama_2_13b_holds_6_7_GB_of_cache_at_8192_tokens():
    assert SHAPES["llama-2-13b"].kv_bytes_per_token(2) * 8192 == 6_710_886_400  # bytes


def test_planner_example_6_parameters_without_norms_and_an_int8_cache():
    shape = Shape(layers=64, hidden=4096, ffn=16384, heads=32, kv_heads=8, head_dim=256, vocab=32128)
    assert shape.matrix_parameters == 18_385_207_296
    assert shape.kv_bytes_per_token(1) == 262_144  # bytes per token


def test_planner_example_7_llama_3_70b_with_an_int8_cache():
    per_token = SHAPES["llama-3-70b"].kv_bytes_per_token(1)
    assert per_token == 163_840  # bytes per token
    assert per_token * 32_768 / 1e9 == pytest.approx(5.37, abs=0.005)  # GB


def test_planner_example_12_qwen3_4b_writes_at_most_33_9_tokens_a_second_at_273_GB_a_second():
    # The weights streamed are those of all matrices, the tied table read whole as the head; by hand, from config.json:
    attention = 2560 * (2 * 32 * 128 + 2 * 8 * 128)  # q and output, k and v
    assert 36 * (attention + 3 * 2560 * 9728) + 151_936 * 2560 == 4_022_272_000
    shape = SHAPES["qwen3-4b"]
    assert shape.streamed_parameters == 4_022_272_000
    assert shape.kv_bytes_per_token(2) == 147_456  # bytes per token: head_dim 128, not 2560 / 32 = 80
    nbytes = shape.bytes_per_token(0, bytes_per_weight=2)  # bfloat16, empty cache
    assert nbytes / 1e9 == pytest.approx(8.045, abs=0.0005)  # GB
    memory_alone = Roofline({"bfloat16": 1e18}, 273e9, {})
    seconds = ll.roofline_time(shape.flops_per_token(1), nbytes, memory_alone, "bfloat16")
    assert 1 / seconds == pytest.approx(33.9, abs=0.05)  # tokens/s


def test_planner_example_S_smollm2():
    shape = SHAPES["smollm2-135m"]
    assert shape.parameters == 134_515_008  # tied; 162,826,560 if wrongly untied (B6)
    assert dataclasses.replace(shape, tied=False).parameters == 162_826_560
    assert shape.kv_bytes_per_token(2) == 23_040  # bytes per token
    assert shape.kv_bytes_per_token(2) * 2048 == 45 * 2**20  # 45 MiB


def test_the_cache_counts_key_value_heads_not_heads_S7():
    shape = SHAPES["llama-3-8b"]
    assert shape.kv_bytes_per_token(2) * 8192 == 1 * 2**30  # 1.0 GiB
    every_head_its_own = dataclasses.replace(shape, kv_heads=shape.heads)
    assert every_head_its_own.kv_bytes_per_token(2) * 8192 == 4 * 2**30


# --- Making a shape -------------------------------------------------------------------------------------------------

def test_shape_of_a_model_and_of_its_configuration(smollm2):
    model = smollm2[0]
    assert Shape.of(model) == Shape.of(model.config) == SHAPES["smollm2-135m"]
    assert Shape.of(ModelConfig(**SHAPE | {"tied": False, "head_dim": 6})) == Shape(**SIZES, head_dim=6, tied=False)


def test_head_dim_is_hidden_over_heads_unless_it_is_given():
    assert TINY.head_dim == 4 and Shape(**SIZES, head_dim=5).head_dim == 5
    uneven = SIZES | {"hidden": 37}
    with pytest.raises(ValueError, match="37 does not divide by 9 heads: give head_dim"):
        Shape(**uneven)
    assert Shape(**uneven, head_dim=4).head_dim == 4


def test_a_shape_cannot_be_changed_and_takes_its_sizes_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.layers = 4
    with pytest.raises(TypeError):
        Shape(3, 36, 9, 3, 4, 40, 97)  # seven numbers in a row are too easily swapped


def test_numpy_numbers_are_welcome():
    assert Shape(**{name: np.int64(size) for name, size in SIZES.items()}) == TINY
    assert TINY.kv_bytes_per_token(np.float32(0.5)) == TINY.kv_bytes_per_token(0.5)
    assert TINY.flops_per_token(np.int32(9)) == TINY.flops_per_token(9)
