"""The matrices of the model: how they lie in memory, and how they are multiplied.

A layer is free to store its weights as it likes; to the rest of the model it only answers `layer(x)`. On a GPU the
layout makes little difference. On a CPU with one input row, the case of decode, it decides how fast memory is read.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 12  # up to here bfloat16 gains more by its half as many bytes than it loses by slow arithmetic


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, device="cpu") -> nn.Parameter:
    """An empty weight [outputs, inputs], laid out so that a product with one row reads it fastest.

    float32: the longer side lies in one piece, so a weight that is higher than wide is stored column by column.
    Measured on two CPUs: read at 1.2 to 1.7 times the rate of the other order. Other types: always row by row, which
    is the only order that torch's kernels for them read well (column by column: up to 20 times slower).
    """
    if dtype == torch.bfloat16 and torch.device(device).type == "cpu":
        has_fast_bfloat16()  # ask now: later, somebody may be timing or counting
    if dtype == torch.float32 and outputs >= inputs:
        weight = torch.empty(inputs, outputs, dtype=dtype, device=device).t()
    else:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
    return nn.Parameter(weight, requires_grad=False)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] -> [..., out]; bfloat16 by way of float32 where the CPU is slow at it."""
    rows = x.numel() // x.shape[-1]
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and rows > FEW_ROWS and not has_fast_bfloat16():
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


class Linear(nn.Module):
    """y = x Wᵀ, without a bias. `weight` has the shape [out, in], as in `torch.nn.Linear`."""

    def __init__(self, inputs: int, outputs: int, **where):
        super().__init__()
        self.weight = matrix(outputs, inputs, **where)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class Embedding(nn.Module):
    """One row of `weight` [vocab, hidden] for each id. Stored like `Linear`, so that an output head can share it."""

    def __init__(self, vocab: int, hidden: int, **where):
        super().__init__()
        self.weight = matrix(vocab, hidden, **where)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


@lru_cache
def has_fast_bfloat16() -> bool:
    """Does this CPU multiply bfloat16 matrices about as fast as float32 ones, or faster?

    It does with instructions for it (AVX512-BF16, AMX, Arm's BF16). Without, torch falls back to a loop that was 100
    times slower on the CPU where we measured it, and widening to float32 first is the better way. Measured, in some
    0.1 s, the first time it matters: no torch function tells it for every kind of processor.
    """
    best = {}
    with torch.autocast("cpu", enabled=False):
        for _ in range(3):
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.ones(256, 256, dtype=dtype, device="cpu")
                start = time.perf_counter()
                F.linear(square, square)
                best[dtype] = min(best.get(dtype, float("inf")), time.perf_counter() - start)
    return best[torch.bfloat16] < 2 * best[torch.float32]
