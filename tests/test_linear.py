"""The matrices: right whatever way they are multiplied."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llm_lessons import linear
from llm_lessons.linear import Embedding, Linear, matrix, product


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 33])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("outputs, inputs", [(7, 3), (3, 7), (64, 64), (1, 5)])
def test_products_are_those_of_float64(outputs, inputs, dtype, tolerance, vectors, fast, rows, monkeypatch):
    monkeypatch.setattr(linear, "has_fast_bfloat16", lambda: fast)
    monkeypatch.setattr(linear, "torch_reads_a_row_faster", lambda dtype: vectors)
    generator = torch.Generator().manual_seed(rows)
    weight = matrix(outputs, inputs, dtype).copy_(torch.randn(outputs, inputs, generator=generator))
    x = torch.randn(2, rows, inputs, generator=generator).to(dtype)
    x_by_column = x.transpose(1, 2).contiguous().transpose(1, 2)
    for gradients, given in itertools.product((True, False), (x, x[0], x_by_column, x[:1, :1], x[1, 0])):
        with torch.set_grad_enabled(gradients):
            y = product(given, weight)
        assert y.dtype == dtype and y.shape == (*given.shape[:-1], outputs)
        torch.testing.assert_close(y.double(), given.double() @ weight.double().T, rtol=tolerance, atol=tolerance)


def test_wide_bfloat16_products_go_through_float32_only_where_that_is_faster(monkeypatch):
    used, wide = [], linear._float32_product
    monkeypatch.setattr(linear, "_float32_product", lambda x, w: used.append(len(x)) or wide(x, w))
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    for fast in (False, True):
        monkeypatch.setattr(linear, "has_fast_bfloat16", lambda fast=fast: fast)
        for rows in (1, linear.FEW_ROWS, linear.FEW_ROWS + 1):
            product(torch.ones(rows, 4, dtype=torch.bfloat16), weight)
    assert used == [linear.FEW_ROWS + 1]  # only the wide one on the slow CPU


def test_weights_are_stored_row_by_row_and_are_not_trained():
    for layer in (Linear(3, 8), Embedding(8, 3)):
        assert layer.weight.shape == (8, 3) and layer.weight.stride() == (3, 1) and not layer.weight.requires_grad


@pytest.mark.parametrize("present", [True, False])
def test_float32_goes_through_onednn_where_torch_has_it_and_no_gradient_is_wanted(present, monkeypatch):
    plain, used = linear.F.linear, []
    monkeypatch.setattr(linear, "torch_reads_a_row_faster", lambda dtype: False)
    monkeypatch.setattr(linear.F, "linear", lambda x, w: used.append(len(x)) or plain(x, w))
    if not present:
        monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    for trained, gradients in itertools.product((True, False), repeat=2):
        x, weight = torch.ones(2, 3, requires_grad=trained), torch.arange(6.0).reshape(2, 3)
        used.clear()
        with torch.set_grad_enabled(gradients):
            assert product(x, weight).tolist() == [[3.0, 12.0]] * 2
        assert used == ([] if linear._has_onednn() and not (trained and gradients) else [2])


@pytest.mark.parametrize("vectors", [True, False])
def test_few_rows_go_the_way_that_reads_the_weights_faster_here(vectors, monkeypatch):
    plain, mv, used = linear.F.linear, torch.mv, []
    monkeypatch.setattr(linear, "torch_reads_a_row_faster", lambda dtype: vectors)
    monkeypatch.setattr(linear.F, "linear", lambda x, w: used.append(("linear", len(x))) or plain(x, w))
    monkeypatch.setattr(torch, "mv", lambda w, x: used.append(("mv", 1)) or mv(w, x))
    for rows in (1, 2, 3, 4):
        product(torch.ones(rows, 5), torch.ones(2, 5))
    wide = [] if linear._has_onednn() else [4]  # rows for which there is no other way
    assert used == [("linear", rows) for rows in ([1, 2, 3] if vectors or not linear._has_onednn() else []) + wide]
    used.clear()
    for rows in (1, 2):
        product(torch.ones(rows, 5, dtype=torch.bfloat16), torch.ones(2, 5, dtype=torch.bfloat16))
    assert used == [("mv" if vectors else "linear", 1), ("linear", 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 1, 3), (2, 3), (2, 5, 3)])
def test_torchs_flop_counter_counts_every_way_alike(shape, dtype, monkeypatch):
    counts = []
    for present, vectors in itertools.product((linear._has_onednn(), False), (True, False)):
        monkeypatch.setattr(linear, "_has_onednn", lambda present=present: present)
        monkeypatch.setattr(linear, "torch_reads_a_row_faster", lambda dtype, vectors=vectors: vectors)
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            product(torch.ones(shape, dtype=dtype), torch.ones(7, 3, dtype=dtype))
        counts.append(counter.get_total_flops())
    assert counts == [2 * torch.ones(shape).numel() * 7] * 4


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_under_autocast_the_way_makes_no_difference(rows, vectors, monkeypatch):
    """The cache takes keys and values of the model's own type alone, so products must not change theirs."""
    monkeypatch.setattr(linear, "torch_reads_a_row_faster", lambda dtype: vectors)
    monkeypatch.setattr(linear, "has_fast_bfloat16", lambda: True)
    x, weight = torch.ones(rows, 4), torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert product(x, weight).dtype == (torch.float32 if linear._has_onednn() else torch.bfloat16)
        assert product(x.bfloat16(), weight).tolist() == [[4.0] * 3] * rows  # of two types, as F.linear allows it there


def test_asking_leaves_the_number_of_threads_and_is_done_when_a_matrix_is_made(monkeypatch):
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        linear._least_seconds({"a": lambda: 1 / 0}, 1)
    assert torch.get_num_threads() == before
    seen = []
    linear._least_seconds({"a": lambda: seen.append(torch.get_num_threads())}, 2)
    assert seen == [1, 1] and torch.get_num_threads() == before
    asked = []
    monkeypatch.setattr(linear, "torch_reads_a_row_faster", asked.append)
    matrix(2, 3)
    assert asked == [torch.float32, torch.bfloat16]  # also of the type that the model may be turned into later


def test_this_cpu_is_asked_once_and_answers_yes_or_no():
    assert linear.has_fast_bfloat16() in (True, False)
    assert linear.has_fast_bfloat16.cache_info().currsize == 1
    assert linear.torch_reads_a_row_faster(torch.float32) is linear.torch_reads_a_row_faster(torch.float32)
    assert linear.torch_reads_a_row_faster(torch.float16) is False


def test_a_way_is_taken_only_where_it_is_clearly_faster(monkeypatch):
    for seconds, expected in (((0.89, 1), True), ((0.91, 1), False), ((2, 1), False)):
        monkeypatch.setattr(linear, "_least_seconds", lambda ways, runs, found=seconds: dict(zip(ways, found)))
        assert linear.torch_reads_a_row_faster.__wrapped__(torch.float32) is expected


def test_gradients_flow_through_every_way(monkeypatch):
    monkeypatch.setattr(linear, "has_fast_bfloat16", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(20, 3, dtype=dtype, requires_grad=True)
        weight = torch.arange(6.0).reshape(2, 3).to(dtype)
        product(x, weight).sum().backward()
        assert x.grad[0].tolist() == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("given, found", [(None, "128"), ("7", "7")])
def test_onednn_is_told_to_keep_fewer_shapes_unless_the_user_says_otherwise(given, found):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    environment = {key: value for key, value in os.environ.items() if key != name} | ({name: given} if given else {})
    command = [sys.executable, "-c", f"import os, llm_lessons; print(os.environ['{name}'])"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip() == found
