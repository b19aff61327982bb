"""What the planner and its devices refuse, and in which words."""

from fractions import Fraction

import numpy as np
import pytest
from test_capacity import H100, TINY

import llm_lessons as ll
from llm_lessons import DEVICES, Device, decode_step_time, plan, prefill_servers

L4 = DEVICES["l4"]
FIGURES = dict(name="a device", memory=10**9, bytes_per_second=1e12, flops_per_second={"bfloat16": 1e14}, source="test")
NOT_ABOVE_0 = [0, -1, "1e9", None, True, float("nan"), float("inf"), 1j]


@pytest.mark.parametrize("name", ["context", "users"])
@pytest.mark.parametrize("count", [0, -1, 2.5, "4", None, True, float("nan")])
def test_counts(name, count):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {count!r}"):
        plan(TINY, L4, **{"context": 10, "users": 2} | {name: count})


@pytest.mark.parametrize(("count", "power"), [(10**15 + 1, "15.0"), (2 * 10**15, "15.3"), (10**400, "400.0")])
def test_more_than_anybody_has(count, power):
    for name, call in (("context", lambda: plan(TINY, L4, context=count, users=1)),
                       ("users", lambda: plan(TINY, L4, context=1, users=count)), ("count", lambda: L4.several(count)),
                       ("batch", lambda: decode_step_time(count, 1e9, 2e9, 0, 1e14, 1e12)),
                       ("batch", lambda: prefill_servers(0.9, 0.02, count, 512)),
                       ("answer_tokens", lambda: prefill_servers(0.9, 0.02, 32, count))):
        with pytest.raises(ValueError, match=rf"{name} must be at most 10\^15, not 10\^{power}: give a smaller number"):
            call()
    assert "users of 1,000,000,000,000,000 tokens" in str(plan(TINY, L4.several(10**15), context=10**15, users=10**15))


@pytest.mark.parametrize("name", ["weight_bits", "kv_bits"])
@pytest.mark.parametrize("bits", [0, 0.5, -4, 33, 64, "int4", None, True, float("nan"), float("inf")])
def test_bits(name, bits):
    with pytest.raises(ValueError, match=f"{name} must be 1 to 32 bits for each number, not {bits!r}: 16 for bfloat16"):
        plan(TINY, L4, **{name: bits}, context=10, users=2)


@pytest.mark.parametrize("bits", [1, 32, 4.5, Fraction(9, 2), np.float32(4.5), np.int64(8)])
def test_bits_and_counts_that_are_welcome(bits):
    found = plan(TINY, L4, bits, bits, context=np.int64(10), users=np.int32(2))
    assert type(found.weight_bits) in (int, float) and type(found.users) is type(found.context) is int
    assert found.weight_bits == float(bits) and str(found)


@pytest.mark.parametrize("other", ["llama-3-8b", None, 8e9, {"layers": 3}, H100])
def test_what_is_no_shape(other):
    with pytest.raises(ValueError, match=r"shape must be a Shape, such as ll.SHAPES\['llama-3-8b'\] or ll.Shape.of"):
        plan(other, L4, context=10, users=2)


@pytest.mark.parametrize("other", ["h100-sxm", None, 80e9, H100, TINY])
def test_what_is_no_device(other):
    with pytest.raises(ValueError, match=r"device must be a Device, such as ll.DEVICES\['l4'\] or ll.Device.measured"):
        plan(TINY, other, context=10, users=2)


def test_context_and_users_have_no_default():
    with pytest.raises(TypeError, match="context.*users"):
        plan(TINY, L4)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no device named 'h100' here, only t4, l4, .*h100-sxm, .*: write ll.Device"):
        DEVICES["h100"]


@pytest.mark.parametrize("memory", [0, 80, 80.0, -8e9, "80 GB", None, True, float("nan"), float("inf")])
def test_memory_is_bytes(memory):
    with pytest.raises(ValueError, match="memory must be a number of bytes, 2.20 at least, not .*: 80e9 for 80 GB"):
        Device(**FIGURES | {"memory": memory})


@pytest.mark.parametrize("amount", NOT_ABOVE_0)
def test_rates_are_numbers_above_0(amount):
    with pytest.raises(ValueError, match="bytes_per_second must be a number above 0, not"):
        Device(**FIGURES | {"bytes_per_second": amount})
    with pytest.raises(ValueError, match=r"flops_per_second\['bfloat16'\] must be a number above 0, not"):
        Device(**FIGURES | {"flops_per_second": {"float32": 1e12, "bfloat16": amount}})


@pytest.mark.parametrize("peaks", [{}, 1e14, None, {"int8": 1e15}, {"fp16": 1e14}, ["bfloat16"], "bfloat16"])
def test_a_device_needs_the_peak_of_a_dtype_that_models_are_multiplied_in(peaks):
    with pytest.raises(ValueError, match="flops_per_second must be FLOP/s by dtype, such as {'bfloat16': 989e12}, not"):
        Device(**FIGURES | {"flops_per_second": peaks})


@pytest.mark.parametrize("text", ["", None, 4])
def test_a_device_has_a_name_and_a_source(text):
    for name in ("name", "source"):
        with pytest.raises(ValueError, match=f"{name} must be a text, not {text!r}"):
            Device(**FIGURES | {name: text})


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None, True])
def test_several_is_a_whole_number(count):
    with pytest.raises(ValueError, match=f"count must be a whole number of at least 1, not {count!r}"):
        L4.several(count)
    with pytest.raises(ValueError, match=f"count must be a whole number of at least 1, not {count!r}"):
        Device(**FIGURES, count=count)


def test_measured_takes_a_roofline():
    for other in (None, (1e11, 1e10), L4):
        with pytest.raises(ValueError, match="roofline must be a Roofline, such as ll.measure_roofline"):
            Device.measured(other, memory=8e9)
    with pytest.raises(ValueError, match="memory must be a number of bytes"):
        Device.measured(H100, memory=8)


@pytest.mark.parametrize("amount", NOT_ABOVE_0)
@pytest.mark.parametrize("name", ["params", "weight_bytes", "flops", "bandwidth"])
def test_amounts_of_a_decode_step(name, amount):
    amounts = dict(params=1e9, weight_bytes=2e9, flops=1e14, bandwidth=1e12)
    with pytest.raises(ValueError, match=f"{name} must be a number above 0, not"):
        decode_step_time(1, kv_bytes_per_sequence=0, **amounts | {name: amount})


@pytest.mark.parametrize("batch", [0, -1, 1.5, "2", None, True])
def test_batches(batch):
    with pytest.raises(ValueError, match=f"batch must be a whole number of at least 1, not {batch!r}"):
        decode_step_time(batch, 1e9, 2e9, 0, 1e14, 1e12)
    with pytest.raises(ValueError, match=f"batch must be a whole number of at least 1, not {batch!r}"):
        prefill_servers(0.9, 0.02, batch, 512)
    with pytest.raises(ValueError, match=f"answer_tokens must be a whole number of at least 1, not {batch!r}"):
        prefill_servers(0.9, 0.02, 32, batch)


@pytest.mark.parametrize("nbytes", [-1, "1e6", None, True, float("nan"), float("inf")])
def test_the_cache_of_a_decode_step_may_be_empty_but_not_less(nbytes):
    with pytest.raises(ValueError, match="kv_bytes_per_sequence must be a number of at least 0, not"):
        decode_step_time(1, 1e9, 2e9, nbytes, 1e14, 1e12)


@pytest.mark.parametrize("amount", NOT_ABOVE_0)
def test_times_of_prefill_servers(amount):
    with pytest.raises(ValueError, match="prefill_seconds must be a number above 0, not"):
        prefill_servers(amount, 0.02, 32, 512)
    with pytest.raises(ValueError, match="decode_step_seconds must be a number above 0, not"):
        prefill_servers(0.9, amount, 32, 512)


def test_numpys_numbers_do_not_overflow():
    small = decode_step_time(np.int32(256), np.int32(2 * 10**9), np.int32(2 * 10**9), np.int32(10**9), 1e14, 1e12)
    assert small == pytest.approx(256 * 1e9 / 1e12 + 2 * 256 * 2e9 / 1e14)
    peaks = {"float32": np.int32(5)}
    figures = {"memory": np.int64(10**9), "bytes_per_second": np.int32(10**9), "flops_per_second": peaks}
    many = Device(**FIGURES | figures).several(100)
    assert (many.memory, many.bytes_per_second, many.flops_per_second) == (10**11, 1e11, {"float32": 500.0})
    assert ll.prefill_servers(np.float32(0.5), np.float32(0.25), np.int64(4), np.int8(2)) == 4
