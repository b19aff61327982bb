"""The planner: published worked examples, what a production engine found, arithmetic by hand, what always holds."""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_capacity import SIZES, TINY
from tiny import one_thread as one_thread
from tiny import random_ids, tiny_model

import llm_lessons as ll
from llm_lessons import DEVICES, SHAPES, Device, Roofline, Shape, decode_step_time, plan, planner

LLAMA_2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, tied=False)
LLAMA_2_70B = Shape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000, tied=False)


def device(memory, bytes_per_second=1e12, bfloat16=1e14, **peaks):
    return Device(name="a device", memory=memory, bytes_per_second=bytes_per_second,
                  flops_per_second={"bfloat16": bfloat16} | peaks, source="made up for a test")


# --- Worked examples from "How to Scale Your Model" and published configurations --------------------------------------

def test_example_1_30e9_int8_parameters_on_16_chips_take_2_57_ms_a_step():
    seconds = decode_step_time(4, 30e9, 30e9, 8192 * 100e3, flops=16 * 1.97e14, bandwidth=16 * 8.1e11)
    assert seconds * 1e3 == pytest.approx(2.57, abs=0.005)  # ms; the book rounds to 2.5


def test_example_2_at_batch_256_the_cache_takes_16_18_ms_and_the_weights_4_87_ms():
    chips = dict(flops=16 * 1.97e14, bandwidth=16 * 8.1e11)
    both = decode_step_time(256, 30e9, 30e9, 8192 * 100e3, **chips)
    weights = decode_step_time(256, 30e9, 30e9, 0, **chips)
    assert weights * 1e3 == pytest.approx(4.87, abs=0.005)  # ms
    assert (both - weights) * 1e3 == pytest.approx(16.18, abs=0.005)
    assert both * 1e3 == pytest.approx(21.05, abs=0.005)


def test_example_3_llama_2_13b_holds_6_7_GB_of_cache_at_8192_tokens():
    assert plan(SHAPES["llama-2-13b"], DEVICES["h100-sxm"], context=8192, users=1).cache == 6_710_886_400  # bytes


@pytest.mark.parametrize("batch, milliseconds, tokens", [(1, 4.17, 239.9), (64, 17.04, 3756.6), (240, 52.99, 4529.3)])
def test_example_5_llama_2_13b_on_8_chips(batch, milliseconds, tokens):
    seconds = decode_step_time(batch, 13e9, 26e9, 1.34e9, flops=8 * 1.97e14, bandwidth=8 * 8.2e11)
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.005)
    assert batch / seconds == pytest.approx(tokens, abs=0.05)  # tokens/s


def test_example_6_an_int8_cache_of_262_144_bytes_a_token():
    shape = Shape(layers=64, hidden=4096, ffn=16384, heads=32, kv_heads=8, head_dim=256, vocab=32128)
    found = plan(shape, DEVICES["h200"], kv_bits=8, context=1, users=1)
    norms = (2 * 64 + 1) * 4096
    assert found.cache == 262_144  # bytes
    assert found.weights == 2 * (18_385_207_296 + norms)


def test_example_7_llama_3_70b_with_an_int8_cache():
    found = plan(SHAPES["llama-3-70b"], DEVICES["h200"], kv_bits=8, context=32_768, users=1)
    assert found.cache == 163_840 * 32_768
    assert found.cache / 1e9 == pytest.approx(5.37, abs=0.005)  # GB


def test_example_10_three_prefill_servers_for_each_decode_server():
    assert ll.prefill_servers(0.91, 0.019, batch=32, answer_tokens=512) == pytest.approx(2.99, abs=0.005)


def test_example_12_qwen3_4b_writes_at_most_33_9_tokens_a_second_at_273_GB_a_second():
    step = decode_step_time(1, 4_022_272_000, 2 * 4_022_272_000, 0, flops=1e18, bandwidth=273e9)
    assert 1 / step == pytest.approx(33.9, abs=0.05)  # tokens/s
    found = plan(SHAPES["qwen3-4b"], device(128e9, 273e9), context=1, users=1)  # as good as empty: 147,456 bytes
    assert found.tpot == pytest.approx(step, rel=1e-4) and found.tpot > step
    assert found.tokens_per_second == pytest.approx(33.9, abs=0.05)


def test_example_S_smollm2():
    found = plan(SHAPES["smollm2-135m"], DEVICES["t4"], context=2048, users=1)
    assert found.cache == 45 * 2**20  # 45 MiB
    assert found.weights == 2 * 134_515_008


# --- Known faults -----------------------------------------------------------------------------------------------------

def test_S7_the_cache_counts_key_value_heads_and_takes_head_dim_from_the_configuration():
    assert plan(SHAPES["llama-3-8b"], DEVICES["l4"], context=8192, users=1).cache == 2**30  # 1.0 GiB; all heads: 4.0
    assert plan(SHAPES["smollm2-135m"], DEVICES["l4"], context=2048, users=1).cache == 45 * 2**20  # all heads: 135 MiB
    # Qwen3-4B states 128; 2560 / 32 would be 80, and 92,160 bytes a token.
    assert plan(SHAPES["qwen3-4b"], DEVICES["l4"], context=1, users=1).cache == 147_456


def test_F3_a_model_of_1_24e9_parameters_cannot_fit_in_2_GiB():
    binder = device(2 * 2**30)
    found = plan(SHAPES["llama-3.2-1b"], binder, context=1, users=1)  # 2.30 GiB of weights
    assert not found.fits and found.max_users == found.max_context == 0
    assert "does not fit" in str(found) and "2.30 GiB" in str(found) and "missing" in str(found)
    assert plan(SHAPES["llama-3.2-1b"], binder, weight_bits=8, context=1, users=1).fits
    assert plan(SHAPES["smollm2-135m"], binder, weight_bits=32, kv_bits=32, context=2048, users=1).fits


# --- Published figures ------------------------------------------------------------------------------------------------

def test_weights_as_published():
    # "requires roughly 140GB just to load": https://github.com/vllm-project/vllm/issues/5711
    assert plan(SHAPES["llama-3-70b"], DEVICES["h200"], context=1, users=1).weights == pytest.approx(140e9, rel=0.01)
    # "model weights take 14.96GiB": https://github.com/vllm-project/vllm/pull/10511
    weights = plan(SHAPES["llama-3-8b"], DEVICES["l4"], context=1, users=1).weights
    assert weights / 2**30 == pytest.approx(14.96, abs=0.005)


@pytest.mark.parametrize("shape, where, tokens", [
    # "available_kv_cache_memory 53.29GiB" at 131,072 bytes a token; the GPU has 79.22 GiB, 90 % of which vLLM may use:
    # https://github.com/vllm-project/vllm/pull/10511
    (SHAPES["llama-3-8b"], device(79.22 * 2**30), 53.29 * 2**30 / 131_072),
    (SHAPES["llama-3-8b"], DEVICES["h100-sxm"], 53.29 * 2**30 / 131_072),
    # "Llama2-7B with TP=1 and 1xA100-80GB: # GPU blocks: 7351", of 16 tokens each, also at 90 %:
    # https://github.com/vllm-project/vllm/pull/2031
    (LLAMA_2_7B, DEVICES["a100-80gb"], 7351 * 16),
])
def test_room_for_as_many_tokens_as_vllm_found(shape, where, tokens):
    assert plan(shape, where, context=1, users=1).max_context == pytest.approx(tokens, rel=0.08)


def test_on_several_devices_a_real_engine_finds_less_room():
    # The same pull request, "Llama2-70B with TP=4 and 4xA100-80GB": 31615 blocks before, 20865 when it measures
    # memory in another way; the author guesses that NCCL's is the difference.
    found = plan(LLAMA_2_70B, DEVICES["a100-80gb"].several(4), context=1, users=1).max_context
    assert 20865 * 16 < found < 31615 * 16
    assert found // 16 == 28539 and 1 - 20865 / 28539 == pytest.approx(0.27, abs=0.005)  # as Device.several says


def test_vllms_activations(monkeypatch):
    # "PyTorch activation peak memory 1.26GiB", in the same log: passes of 8,192 tokens, 256 sequences at most.
    monkeypatch.setattr(planner, "PREFILL_CHUNK", 8192)
    activations = plan(SHAPES["llama-3-8b"], DEVICES["h100-sxm"], context=8192, users=256).activations
    assert 1 < 1.26 * 2**30 / activations < 2


# Peaks as NVIDIA and Google print them: GB, GB/s, TFLOP/s, and whether the last is "with sparsity".
DATA_SHEETS = {
    "t4": (16, 320, 65, False), "l4": (24, 300, 242, True), "a100-80gb": (80, 2039, 312, False),
    "h100-sxm": (80, 3350, 1979, True), "h200": (141, 4800, 1979, True), "rtx-4090": (24, 1008, 165.2, False),
    "tpu-v5e": (16, 819, 197, False),
}


@pytest.mark.parametrize("name", DEVICES)
def test_devices_have_the_dense_peaks_of_their_data_sheets(name):
    gigabytes, bandwidth, teraflops, sparse = DATA_SHEETS[name]
    found = DEVICES[name]
    assert (found.memory, found.bytes_per_second) == (gigabytes * 10**9, bandwidth * 1e9)
    dense = teraflops * 1e12 / (2 if sparse else 1)
    assert found.flops_per_second == {"float16" if name == "t4" else "bfloat16": pytest.approx(dense)}
    assert found.source.startswith("https://") and found.name


# --- Each number, by hand ---------------------------------------------------------------------------------------------

def test_memory_by_hand():
    found = plan(SHAPES["llama-3-8b"], DEVICES["h100-sxm"], weight_bits=4.5, kv_bits=8, context=8192, users=4)
    weights = 8_030_261_248 * 9 // 16
    cache = 4 * 8192 * 65_536  # 2 · 32 layers · 8 heads · 128 numbers, one byte each
    activations = 2048 * (2 * 4096 + 3 * 14_336) * 2 + 4 * 128_256 * 4
    assert found.parts == {"weights": weights, "cache": cache, "activations": activations, "reserve": 8 * 10**9}
    assert list(found.parts) == ["weights", "cache", "activations", "reserve"]
    assert all(type(nbytes) is int for nbytes in (*found.parts.values(), found.needed, found.free))
    assert found.needed == weights + cache + activations + 8 * 10**9
    assert found.free == 80 * 10**9 - found.needed and found.fits


def test_activations_by_hand():
    def activations(shape, context, users):
        return plan(shape, DEVICES["l4"], context=context, users=users).activations

    layer = (2 * 36 + 3 * 40) * 2  # residual and norm of 36; gate, up and product of 40; 2 bytes
    assert activations(TINY, 5, 1) == 5 * layer + 97 * 4
    assert activations(TINY, 5, 7) == 7 * layer + 7 * 97 * 4  # one token of each user is more than the prompt
    assert activations(TINY, 9999, 7) == 2048 * layer + 7 * 97 * 4
    wide = dataclasses.replace(TINY, ffn=8, head_dim=10)
    assert activations(wide, 5, 1) == 5 * (2 * 36 + 2 * (9 + 3) * 10) * 2 + 97 * 4  # attention is wider than 3 · 8


def test_part_bits_and_odd_memory_are_rounded_up():
    found = plan(TINY, device(2**20 + 1), weight_bits=1.3, kv_bits=4.5, context=1, users=1)
    assert found.weights == -(-13 * TINY.parameters // 80)
    assert found.cache == -(-2 * 3 * 3 * 4 * 9 // 16)
    assert found.reserve == -(-(2**20 + 1) // 10)


def test_times_by_hand():
    found = plan(SHAPES["llama-3-8b"], DEVICES["h100-sxm"], weight_bits=4, kv_bits=8, context=8192, users=4)
    head, streamed = 128_256 * 4096, 7_504_658_432
    flops = 2 * 8192 * (streamed - head) + 4 * 32 * 32 * 128 * 8192 * 8193 / 2 + 2 * head
    assert found.ttft == pytest.approx(flops / 989.5e12)
    assert found.tpot == pytest.approx((4 * 8192 * 65_536 + streamed / 2) / 3.35e12)
    assert found.tokens_per_second == pytest.approx(4 / found.tpot)
    short = dataclasses.replace(found, context=1)  # a prompt of one token waits for the weights
    assert short.ttft == pytest.approx((streamed / 2 + 65_536) / 3.35e12)


def test_a_decode_step_becomes_bound_by_arithmetic():
    shape, where = SHAPES["llama-3-8b"], DEVICES["h100-sxm"]
    # The ridge: 989.5e12 / 3.35e12 = 295 FLOP/byte, and 1 FLOP/byte for each user while the cache is small.
    few, many = (plan(shape, where, context=1, users=users) for users in (290, 310))
    assert (few.bound, many.bound) == ("the weights", "arithmetic")
    assert many.tpot == pytest.approx(2 * 310 * 7_504_658_432 / 989.5e12 + 310 * 131_072 / 3.35e12)
    assert plan(shape, where, weight_bits=4, context=1, users=80).bound == "arithmetic"  # 4 FLOP/byte for each user
    assert plan(shape, where, context=8192, users=310).bound == "the caches"  # 310 · 1.07 GB, against 15 GB of weights


def test_what_a_step_waits_for_is_the_largest_part_of_its_time():
    shape, where = SHAPES["llama-3-8b"], DEVICES["h100-sxm"]
    # 150 · 200 · 131,072 bytes / 3.35e12 = 1.17 ms; 2 · 150 · 7.5047e9 / 989.5e12 = 2.28 ms; 4.5 bits: 1.26 ms
    assert plan(shape, where, weight_bits=4.5, context=200, users=150).bound == "arithmetic"
    # weights 15.009 GB, and 134,217,728 bytes of cache for each: as much for 111.8 users
    assert [plan(shape, where, context=1024, users=n).bound for n in (111, 112)] == ["the weights", "the caches"]
    # 295 of 1,024 tokens: 11.8 ms of caches beside 4.5 of arithmetic
    assert plan(shape, where, context=1024, users=400).bound == "the caches"


def test_prefill_servers_by_hand():
    assert ll.prefill_servers(2.0, 0.1, batch=10, answer_tokens=100) == pytest.approx(2)  # 1 request/s, of 2 s each


# --- Devices ----------------------------------------------------------------------------------------------------------

def test_several_devices_are_one_of_that_many_times_the_size():
    two = device(10**9, 3e11, 5e13, float32=1e13).several(2)
    assert (two.memory, two.bytes_per_second) == (2 * 10**9, 6e11)
    assert two.flops_per_second == {"bfloat16": 1e14, "float32": 2e13} and two.name == "2 x a device"
    alone = device(10**9)
    assert alone.several(1) is alone
    one, eight = (plan(SHAPES["llama-3-8b"], DEVICES["l4"].several(n), context=4096, users=4) for n in (1, 8))
    assert eight.tpot == pytest.approx(one.tpot / 8) and eight.ttft == pytest.approx(one.ttft / 8)
    assert eight.reserve == 8 * one.reserve and eight.weights == one.weights and eight.max_users > 8 * one.max_users


@pytest.mark.parametrize("count, heads", [(1, 8), (2, 8), (3, 9), (5, 10), (8, 8), (12, 12), (16, 16), (64, 64)])
def test_each_of_several_devices_keeps_whole_key_value_heads(count, heads):
    """Llama-3-8B has 8 of them: 3 devices keep 3 each, 9 in all, and 16 devices one each, every head twice."""
    found = plan(SHAPES["llama-3-8b"], DEVICES["h100-sxm"].several(count), context=1000, users=3)
    each_token = heads * 2 * 32 * 128 * 2  # keys and values, 32 layers, 128 numbers a head, 2 bytes a number
    assert found.cache == 3 * 1000 * each_token
    weights = 2 * 7_504_658_432
    assert found.tpot == pytest.approx((3 * 1000 * each_token + weights) / (count * 3.35e12))
    alone = dataclasses.replace(found, context=1)  # waits for the weights, on up to 64 devices
    assert alone.ttft == pytest.approx((weights + each_token) / (count * 3.35e12))


def test_several_of_several():
    two_by_eight, sixteen = (DEVICES["l4"].several(n).several(m) for n, m in ((8, 2), (16, 1)))
    assert two_by_eight.count == sixteen.count == 16 and two_by_eight.memory == sixteen.memory
    assert plan(SHAPES["llama-3-8b"], two_by_eight, context=1, users=1).cache == 16 * 2 * 32 * 128 * 2


def test_the_fastest_of_16_and_32_bits_counts():
    assert device(10**9, float32=1e15, float8=1e16).dtype == "float32"  # a CPU that is slow at bfloat16
    assert DEVICES["t4"].dtype == "float16" and DEVICES["l4"].dtype == "bfloat16"
    alike = Device(name="x", memory=10**9, bytes_per_second=1, flops_per_second={"float16": 2.0, "bfloat16": 2.0},
                   source="x")
    assert alike.dtype == "bfloat16"


def test_a_measured_machine():
    found = Device.measured(Roofline({"float32": 1e11, "bfloat16": 2e10}, 1e10, {"memory": 0.1}), memory=8e9)
    assert (found.memory, found.dtype, found.name) == (8 * 10**9, "float32", "this machine")
    assert ll.ridge_point(found.roofline, found.dtype) == pytest.approx(10)
    plan_here = plan(SHAPES["smollm2-135m"], found, weight_bits=32, kv_bits=32, context=100, users=1)
    assert plan_here.tpot == pytest.approx((134_479_872 * 4 + 100 * 46_080) / 1e10)
    assert "this machine" in str(plan_here)


def test_a_device_keeps_its_own_figures():
    peaks = {"bfloat16": 1e14}
    found = Device(name="x", memory=1e9, bytes_per_second=1e12, flops_per_second=peaks, source="x")
    peaks["bfloat16"] = 1.0
    found.roofline.flops_per_second["bfloat16"] = 1.0
    assert found.flops_per_second == {"bfloat16": 1e14}


# --- What always holds ------------------------------------------------------------------------------------------------

@st.composite
def plans(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    shape = Shape(layers=draw(st.integers(1, 8)), hidden=draw(st.sampled_from([16, 64])), kv_heads=kv_heads,
                  heads=kv_heads * draw(st.sampled_from([1, 2])), head_dim=8, ffn=draw(st.sampled_from([8, 96])),
                  vocab=draw(st.integers(10, 500)), tied=draw(st.booleans()))
    return plan(shape, device(draw(st.integers(2**20, 2**26))), draw(st.floats(1, 32)), draw(st.floats(1, 32)),
                context=draw(st.integers(1, 5000)), users=draw(st.integers(1, 300)))


@given(plans())
def test_the_most_users_fit_and_one_more_does_not(found):
    assert found.fits == (found.users <= found.max_users) == (found.context <= found.max_context) == (found.free >= 0)
    assert found.max_users == 0 or dataclasses.replace(found, users=found.max_users).fits
    assert not dataclasses.replace(found, users=found.max_users + 1).fits


@given(plans())
def test_the_longest_context_fits_and_one_more_token_does_not(found):
    assert found.max_context == 0 or dataclasses.replace(found, context=found.max_context).fits
    assert not dataclasses.replace(found, context=found.max_context + 1).fits


@given(plans(), st.floats(0, 31), st.sampled_from(["weight_bits", "kv_bits"]))
def test_more_bits_never_fit_more_and_are_never_faster(found, more, name):
    wider = dataclasses.replace(found, **{name: min(32, getattr(found, name) + more)})
    assert wider.max_users <= found.max_users and wider.max_context <= found.max_context
    assert wider.needed >= found.needed and wider.tpot >= found.tpot and wider.ttft >= found.ttft


@given(plans(), st.integers(1, 500), st.integers(1, 5000))
def test_more_users_and_longer_contexts_never_take_less(found, users, context):
    more = dataclasses.replace(found, users=found.users + users)
    longer = dataclasses.replace(found, context=found.context + context)
    for other in (more, longer):
        assert other.needed > found.needed and other.tpot > found.tpot
    assert more.ttft == found.ttft < longer.ttft
    assert longer.max_users <= found.max_users and more.max_context <= found.max_context


@given(plans(), st.integers(2, 8))
def test_more_devices_never_fit_less(found, count):
    larger = dataclasses.replace(found, device=found.device.several(count))
    split = found.shape.kv_heads % count == 0  # else the heads are not split evenly, and some are there several times
    assert larger.max_users >= (count if split else 1) * found.max_users
    assert larger.tpot <= found.tpot and larger.tpot >= found.tpot / count * (1 - 1e-9)
    assert not split or larger.tpot == pytest.approx(found.tpot / count)


def test_tpot_is_never_below_the_roofline_of_its_bytes():
    shape, where = SHAPES["llama-3-8b"], DEVICES["a100-80gb"]
    for users in (1, 16, 512):
        for context in (1, 1000, 100_000):
            found = plan(shape, where, context=context, users=users)
            nbytes = users * shape.bytes_per_token(context, users)
            assert found.tpot >= nbytes / 2.039e12 * (1 - 1e-12)


# --- What a learner reads ---------------------------------------------------------------------------------------------

def test_a_plan_that_fits_in_words():
    text = str(plan(SHAPES["llama-3-8b"], DEVICES["h100-sxm"], context=8192, users=4))
    assert text.splitlines()[:2] == ["8.03 billion weights in 16 bits on NVIDIA H100 SXM",
                                     "4 users of 8,192 tokens, KV cache in 16 bits"]
    for line in (r"weights +16.06 GB +14.96 GiB", r"KV cache +4.29 GB +4.00 GiB", r"activations +0.21 GB +0.20 GiB",
                 r"reserve +8.00 GB +7.45 GiB", r"device +80.00 GB +74.51 GiB", r"It fits.*at most 51 users of 8,192",
                 "TTFT: at least 133 ms", "TPOT: at least 5.76 ms, bound by the weights; .*at most 694 tokens/s"):
        assert re.search(line, text), line


@pytest.mark.parametrize("shape, where, bits, context, users", [
    ("llama-3-8b", "l4", 16, 8192, 64), ("llama-3-8b", "l4", 16, 8192, 5), ("llama-2-13b", "l4", 8, 4096, 4),
    ("llama-3-70b", "h100-sxm", 8, 4096, 100), ("llama-3-70b", "t4", 16, 1, 1),
    ("llama-3.2-1b", "t4", 4.5, 2**17, 9), ("smollm2-135m", "rtx-4090", 16, 2048, 5000),
])
def test_each_way_out_that_the_words_name_is_one_and_the_best(shape, where, bits, context, users):
    found = plan(SHAPES[shape], DEVICES[where], bits, context=context, users=users)
    text = str(found)
    assert f"{-found.free / 1e9:,.2f} GB" in text and "are missing" in text

    def named(pattern):
        match = re.search(pattern, text)
        return match and float(match[1].replace(",", ""))

    for pattern, name, step, least in (
        (r"fewer users: at most ([\d,]+)", "users", 1, 1), (r"context: at most ([\d,]+)", "context", 1, 1),
        (r"weights: at most ([\d.]+) bits", "weight_bits", 0.1, 2),
        (r"cache: at most ([\d.]+) bits", "kv_bits", 0.1, 2),
    ):
        value = named(pattern)
        if value is None:  # not named: even the least of it would not do
            assert not dataclasses.replace(found, **{name: least}).fits
            continue
        value = value if step == 0.1 else int(value)
        assert dataclasses.replace(found, **{name: value}).fits
        assert not dataclasses.replace(found, **{name: value + step}).fits
    for unit, step in (("GB", 10**9), ("GiB", 2**30)):
        memory = named(rf"larger device: at least .*?([\d,.]+) {unit}\b")
        assert dataclasses.replace(found, device=device(memory * step)).fits
        assert not dataclasses.replace(found, device=device((memory - 0.01) * step)).fits
    ways = text.count("  - ")
    assert ("It would with one of these:" in text) == (ways > 1) and ("It would with:" in text) == (ways == 1)


def test_one_is_not_written_as_many():
    text = str(plan(TINY, DEVICES["t4"], context=1, users=1))
    assert "1 user of 1 token, KV cache" in text and "a prompt of 1 token, read" in text
    assert re.search(r"or for this user with [\d,]+ tokens\n", text)
    text = str(plan(TINY, DEVICES["t4"], context=1, users=2))
    assert re.search(r"or for these 2 users with [\d,]+ tokens each\n", text)


def test_too_few_bits_are_no_way_out():
    # 64 users of 8,192 tokens: 5.3 GB are left for 68.7 GB of cache, 1.2 bits of 16
    assert "KV cache: at most" not in str(plan(SHAPES["llama-3-8b"], DEVICES["l4"], context=8192, users=64))


# --- Activations, as torch allocates them -----------------------------------------------------------------------------

def peak_memory(fn, folder):
    """The most bytes that tensors made by fn() took at once, from the allocations that torch's profiler records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in sorted((event for event in events if event.get("name") == "[memory]"),
                                                        key=lambda event: event["ts"])]
    assert sizes
    return max(sum(sizes[: i + 1]) for i in range(len(sizes)))


@pytest.mark.parametrize("change", [{}, {"ffn": 160}, {"ffn": 8}, {"kv_heads": 9}, {"hidden": 72, "ffn": 200}])
def test_activations_of_a_real_prefill(change, tmp_path):
    model, ids = tiny_model(**change), random_ids(500)
    cache = model.new_cache(512)
    with torch.inference_mode():
        ll.prefill(model, ids, model.new_cache(512))  # once, so that nothing is set up while we count
        measured = peak_memory(lambda: ll.prefill(model, ids, cache), tmp_path)
    logits = 97 * 4
    planned = plan(Shape.of(model), DEVICES["t4"], context=500, users=1).activations
    assert 1 < measured / ((planned - logits) * 2 + logits) < 2  # this model's numbers are float32, not 16 bits


def test_sizes_of_a_real_model_and_its_cache():
    model = tiny_model(tied=False)
    found = plan(Shape.of(model), DEVICES["t4"], weight_bits=32, kv_bits=32, context=50, users=3)
    assert found.weights == model.nbytes and found.cache == model.new_cache(50, batch=3).nbytes
    assert Shape.of(model) == Shape(**SIZES, tied=False)
