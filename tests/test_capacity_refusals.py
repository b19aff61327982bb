"""What a Shape and its formulas refuse, and in which words."""

from collections import namedtuple

import pytest
import torch
from test_capacity import H100, SIZES, TINY

import llm_lessons as ll
from llm_lessons import SHAPES, Roofline, Shape


@pytest.mark.parametrize("name", list(SIZES) + ["head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True, float("nan")])
def test_sizes_are_whole_numbers_above_0(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        Shape(**SIZES | {name: value})


def test_shapes_that_no_model_has():
    with pytest.raises(ValueError, match="9 query heads cannot share 2 key/value heads evenly"):
        Shape(**SIZES | {"kv_heads": 2})
    with pytest.raises(ValueError, match="9 query heads cannot share 18 key/value heads"):
        Shape(**SIZES | {"kv_heads": 18})
    with pytest.raises(ValueError, match="tied must be True or False, not 'false'"):
        Shape(**SIZES, tied="false")


@pytest.mark.parametrize("other", [None, 3, SIZES, "llama-3-8b", namedtuple("Foreign", "config")(config=SIZES)])
def test_what_has_no_shape_of_this_package(other):
    with pytest.raises(ValueError, match="Shape.of takes a model of this package or its ModelConfig, not"):
        Shape.of(other)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no shape named 'llama-3' here, only smollm2-135m, .*llama-3-70b"):
        SHAPES["llama-3"]


@pytest.mark.parametrize("width", [0, -2, 16, 32, "bfloat16", None, True, float("nan"), float("inf")])
def test_widths_are_bytes_not_bits(width):
    for what, name in ((lambda: TINY.kv_bytes_per_token(width), "bytes_per_value"),
                       (lambda: TINY.bytes_per_token(5, bytes_per_weight=width), "bytes_per_weight"),
                       (lambda: TINY.bytes_per_token(5, bytes_per_value=width), "bytes_per_value"),
                       (lambda: TINY.prefill_bytes(5, bytes_per_weight=width), "bytes_per_weight"),
                       (lambda: TINY.crossover_context(bytes_per_weight=width), "bytes_per_weight"),
                       (lambda: TINY.decode_intensity(5, bytes_per_value=width), "bytes_per_value"),
                       (lambda: TINY.prefill_intensity(5, bytes_per_value=width), "bytes_per_value")):
        with pytest.raises(ValueError, match=f"{name} must be above 0 and at most 8 bytes, not {width!r}"):
            what()


@pytest.mark.parametrize("count", [-1, 1.5, "7", None, True])
def test_counts_of_tokens_and_rows(count):
    for what, name in ((lambda: TINY.flops_per_token(count), "context"),
                       (lambda: TINY.bytes_per_token(count), "context"),
                       (lambda: TINY.prefill_flops(count), "tokens"),
                       (lambda: TINY.prefill_flops(1, past=count), "past"),
                       (lambda: TINY.prefill_bytes(count), "tokens"),
                       (lambda: TINY.prefill_bytes(1, past=count), "past"),
                       (lambda: TINY.bytes_per_token(1, batch=count), "batch"),
                       (lambda: TINY.crossover_context(batch=count), "batch")):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least [01], not {count!r}"):
            what()


def test_a_query_attends_at_least_to_itself():
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, not 0"):
        TINY.flops_per_token(0)
    with pytest.raises(ValueError, match="tokens must be a whole number of at least 1, not 0"):
        TINY.prefill_flops(0)
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, not 0"):
        TINY.bytes_per_token(5, batch=0)


def test_rooflines_that_say_nothing_of_this_work():
    with pytest.raises(ValueError, match="no peak for 'float16', only for bfloat16, float8"):
        ll.roofline_time(1, 1, H100, "float16")
    with pytest.raises(ValueError, match="no peak for torch.float32, only for"):
        ll.ridge_point(H100, torch.float32)
    for roofline in (None, 3.35e12, (989e12, 3.35e12)):
        with pytest.raises(ValueError, match="roofline must be a Roofline, such as ll.measure_roofline"):
            ll.ridge_point(roofline, "bfloat16")
    for peak, bandwidth in ((0, 1e12), (1e12, 0), (float("inf"), 1e12), ("1e12", 1e12)):
        with pytest.raises(ValueError, match="a roofline's limits must be above 0"):
            ll.roofline_time(1, 1, Roofline({"bfloat16": peak}, bandwidth, {}), "bfloat16")


@pytest.mark.parametrize("amount", [-1, "1e9", None, True, float("nan"), float("inf")])
def test_amounts_of_work(amount):
    with pytest.raises(ValueError, match="flops must be a number of at least 0"):
        ll.roofline_time(amount, 1, H100, "bfloat16")
    with pytest.raises(ValueError, match="nbytes must be a number of at least 0"):
        ll.roofline_time(1, amount, H100, "bfloat16")
