"""The matrices of the model: how they are stored, and how they are multiplied.

A layer is free to store its weights as it likes; to the rest of the model it only answers `layer(x)`. On a GPU there is
little to choose. On a CPU the library that multiplies decides how fast memory is read, and how much arithmetic is done.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, mm_flop, register_flop_formula

# oneDNN, which multiplies on a CPU, keeps the code it made for each shape, some half a megabyte, for the last 1,024
# shapes. Prompts of 65 lengths took 160 MB so. A step needs five shapes; it reads this once, at its first product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

FEW_ROWS = 12  # up to here bfloat16 gains more by its half as many bytes than it loses by slow arithmetic
VECTORS = 3  # for so few rows of float32 the best library is asked for; from 4 on oneDNN was never slower


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, device="cpu") -> nn.Parameter:
    """An empty weight [outputs, inputs], stored row by row."""
    for kind in (torch.float32, torch.bfloat16):  # ask now: later, somebody may be timing or counting
        torch_reads_a_row_faster(kind)
    if dtype == torch.bfloat16 and torch.device(device).type == "cpu":
        has_fast_bfloat16()
    return nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device), requires_grad=False)


def return_freed_memory() -> None:
    """glibc keeps freed memory in the process. After a model was made of another or of a file, that is some 100 MB."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library: macOS, Windows, musl
        pass


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] -> [..., out]; bfloat16 by way of float32 where the CPU is slow at it."""
    if x.device.type != "cpu":
        return F.linear(x, weight)
    if x.dtype == torch.float32:
        return _float32_product(x, weight)
    rows = x.numel() // x.shape[-1]
    if rows == 1 and torch_reads_a_row_faster(x.dtype) and not torch.is_autocast_enabled("cpu"):
        return torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], len(weight))
    if x.dtype == torch.bfloat16 and rows > FEW_ROWS and not has_fast_bfloat16():
        return _float32_product(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` for float32 on a CPU, through oneDNN where torch has it.

    torch itself hands float32 to the library MKL, which on one AMD CPU that we measured did half as many operations per
    second, and read the weights for a single row at two thirds of the rate; for 2 to 64 rows it took 2 to 3 times as
    long, there and on another. On an Intel CPU the two did as many operations, and MKL read the weights 1.4 times as
    fast for 1 to 3 rows. This operation of torch knows no gradient: where one is wanted, `F.linear` it is.
    """
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    few = x.numel() <= VECTORS * x.shape[-1] and torch_reads_a_row_faster(x.dtype)
    few = few and not torch.is_autocast_enabled("cpu")  # which would make F.linear's result bfloat16
    return F.linear(x, weight) if trained or few else _by_onednn(x, weight)


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != torch.float32 or not _has_onednn():
        return F.linear(x, weight)  # which is oneDNN for bfloat16
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


@lru_cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linear_flops(x_shape, weight_shape, *others, out_shape=None, **named) -> int:
    """What torch's FLOP counter counts for a matrix product, for the operation above, which it does not know."""
    return mm_flop([prod(x_shape[:-1]), x_shape[-1]], weight_shape[::-1])


def _vector_flops(weight_shape, x_shape, *others, out_shape=None, **named) -> int:
    return mm_flop(weight_shape, [*x_shape, 1])


if _has_onednn() and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_linear_flops)
if torch.ops.aten.mv not in flop_registry:
    register_flop_formula(torch.ops.aten.mv)(_vector_flops)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight, for each vector x [..., size]; in float32 inside, a square overflows float16."""
    if x.device.type != "cpu" or x.requires_grad:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On a CPU torch makes that of eight small operations, but a layer norm of one. Over (x, -x) it is the same: the
    # mean is 0, and the variance is the mean of the squares. (For a backward pass it would keep twice as much.)
    both = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * x.shape[-1],), eps=eps)
    return both[..., : x.shape[-1]] * weight


class Layer(nn.Module):
    """A small layer, called directly. torch's own way to call a module looks for hooks first, and takes 1 µs for it on
    a CPU; 180 such calls are 3 % of a decode step on 4-bit weights. So hooks on a Layer are not run. The parts of the
    model that you may want to look into are ordinary modules: blocks, attention, feed-forward, `Linear`.
    """

    def __call__(self, *inputs):
        return self.forward(*inputs)


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


def _least_seconds(ways: dict, runs: int) -> dict:
    """The shortest of some runs of each, in turns: another program can only make them longer.

    With one thread: on a busy machine a second one may not get its turn at all, and the answer would be chance.
    """
    best, threads = dict.fromkeys(ways, float("inf")), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autocast("cpu", enabled=False), torch.inference_mode():
            for _ in range(runs):
                for name, way in ways.items():
                    start = time.perf_counter()
                    way()
                    best[name] = min(best[name], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best


@lru_cache
def has_fast_bfloat16() -> bool:
    """Does this CPU multiply bfloat16 matrices about as fast as float32 ones, or faster?

    It does with instructions for it (AVX512-BF16, AMX, Arm's BF16). Without, torch falls back to a loop that was 100
    times slower on the CPU where we measured it, and widening to float32 first is the better way. Measured, in some
    0.1 s, the first time it matters: no torch function tells it for every kind of processor.
    """
    squares = {dtype: torch.ones(256, 256, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.bfloat16)}
    best = _least_seconds({dtype: lambda x=x: F.linear(x, x) for dtype, x in squares.items()}, 3)
    return best[torch.bfloat16] < 2 * best[torch.float32]


@lru_cache
def torch_reads_a_row_faster(dtype: torch.dtype) -> bool:
    """For a single row: is what torch has for a matrix and a vector clearly faster on this CPU than oneDNN?

    That is MKL for float32, and a loop of torch's own for bfloat16. On an Intel CPU with AMX both were (1.4 times as
    fast), on an AMD CPU MKL was not. Measured in some 20 ms, as above, on a matrix of the size of a small layer.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight, x = torch.ones(1536, 576, dtype=dtype, device="cpu"), torch.ones(576, dtype=dtype, device="cpu")
    best = _least_seconds({"torch": lambda: torch.mv(weight, x), "oneDNN": lambda: _by_onednn(x[None], weight)}, 20)
    return best["torch"] < 0.9 * best["oneDNN"]
