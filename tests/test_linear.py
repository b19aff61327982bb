"""The matrices: right whatever way they are multiplied, and laid out for the one row of decode."""

import pytest
import torch

from llm_lessons import linear
from llm_lessons.linear import Embedding, Linear, matrix, product


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 33])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("outputs, inputs", [(7, 3), (3, 7), (64, 64), (1, 5)])
def test_products_are_those_of_float64(outputs, inputs, dtype, tolerance, fast, rows, monkeypatch):
    monkeypatch.setattr(linear, "has_fast_bfloat16", lambda: fast)
    generator = torch.Generator().manual_seed(rows)
    weight = matrix(outputs, inputs, dtype).copy_(torch.randn(outputs, inputs, generator=generator))
    x = torch.randn(2, rows, inputs, generator=generator).to(dtype)
    y = product(x, weight)
    assert y.dtype == dtype and y.shape == (2, rows, outputs)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=tolerance, atol=tolerance)


def test_wide_bfloat16_products_go_through_float32_only_where_that_is_faster(monkeypatch):
    used = []
    plain = linear.F.linear
    monkeypatch.setattr(linear.F, "linear", lambda x, w: used.append((len(x), x.dtype)) or plain(x, w))
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    for fast in (False, True):
        monkeypatch.setattr(linear, "has_fast_bfloat16", lambda fast=fast: fast)
        for rows in (1, linear.FEW_ROWS, linear.FEW_ROWS + 1):
            product(torch.ones(rows, 4, dtype=torch.bfloat16), weight)
    half, full, few = torch.bfloat16, torch.float32, linear.FEW_ROWS
    assert used == [(1, half), (few, half), (few + 1, full), (1, half), (few, half), (few + 1, half)]


def test_float32_lies_along_its_longer_side_and_bfloat16_row_by_row():
    assert matrix(8, 3).stride() == (1, 8) and matrix(3, 8).stride() == (8, 1) and matrix(4, 4).stride() == (1, 4)
    assert matrix(8, 3, torch.bfloat16).stride() == (3, 1) and matrix(3, 8, torch.bfloat16).stride() == (8, 1)
    for layer in (Linear(3, 8), Embedding(8, 3)):
        assert layer.weight.shape == (8, 3) and not layer.weight.requires_grad


def test_this_cpu_is_asked_once_and_answers_yes_or_no():
    assert linear.has_fast_bfloat16() in (True, False)
    assert linear.has_fast_bfloat16.cache_info().currsize == 1


def test_gradients_flow_through_every_way(monkeypatch):
    monkeypatch.setattr(linear, "has_fast_bfloat16", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(20, 3, dtype=dtype, requires_grad=True)
        weight = torch.arange(6.0).reshape(2, 3).to(dtype)
        product(x, weight).sum().backward()
        assert x.grad[0].tolist() == [3.0, 5.0, 7.0]
