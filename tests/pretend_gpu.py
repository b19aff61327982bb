"""A GPU that is not there: tensors that lie in ordinary memory and keep the rules of a CUDA or an Apple GPU.

`with pretend("cuda") as gpu:` makes torch.zeros(3, device="cuda") succeed on any computer. What it gives is a CPU
tensor with a mark. The mark goes on to whatever is computed from it, and torch's rules for devices hold, in torch's
own words: no mixing with tensors of the CPU, no numpy, no generator of the CPU, no products of whole numbers; "mps"
has no float64. A GPU works behind the program's back: it is `busy` from the first operation on until the program
waits for it or reads a number, and whoever reads the clock meanwhile is noted in `early`.

It cannot show memory, speed or rounding, nor the kernels that only a GPU has.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import llm_lessons as ll

PRODUCTS = {"mm", "matmul", "__matmul__", "__rmatmul__", "bmm", "linear"}
MOVES = {"to", "cpu", "cuda"}


class OnGpu(Tensor):
    """A tensor of the CPU that says it lies on the GPU."""

    gpu: Gpu

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.gpu.call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.gpu._mark(_bare(self).clone())
        return memo[id(self)]

    def __repr__(self, **settings) -> str:
        self.gpu.busy = False
        return f"{_bare(self)!r}"[:-1] + f", device='{self.device}')"

    def __format__(self, how: str) -> str:
        self.gpu.busy = False
        return format(_bare(self), how)


class Gpu(TorchFunctionMode):
    """Sees every call of torch, says where its result lies, and raises what a GPU would.

    Products with more than `largest` multiplications are not computed but made up: one of an 8B model takes a CPU
    seconds.
    """

    def __init__(self, kind: str, largest: float):
        super().__init__()
        self.kind, self.largest, self.busy, self.waits, self.early = kind, largest, False, 0, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func, args: tuple, kwargs: dict):
        if func is torch.device:  # its name, not a use of it
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = any(isinstance(tensor, OnGpu) for tensor in tensors)
        if marked and func == Tensor.device.__get__:
            return torch.device(self.kind, 0)
        here = self._goes_here(name, args, kwargs, marked)
        self._check(name, func, args, kwargs, tensors, here)
        args, kwargs = tree_map(lambda leaf: "cpu" if self._is_me(leaf) else leaf, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = self._made_up(name, tensors) if here else None
            result = func(*args, **kwargs) if result is None else result
            if name in MOVES and marked != here:
                result = result.detach().clone()  # another device has memory of its own
        if name in ("copy_", "__setitem__", "__set__") or name.endswith("_") and not name.endswith("__"):
            self.busy = self.busy or isinstance(args[0], OnGpu)
            return result
        if (marked or here) and name not in ("__get__", "empty", "new_empty", "empty_like"):  # these ask for no work
            self.busy = here and _has_tensors(result)  # a number, or a copy on the CPU: the program has waited for it
        return _each(result, self._mark if here else _bare)

    def wait(self, device=None) -> None:
        self.busy, self.waits = False, self.waits + 1

    def _is_me(self, device) -> bool:
        return isinstance(device, (str, torch.device)) and str(device).split(":")[0] == self.kind

    def _goes_here(self, name: str, args: tuple, kwargs: dict, marked: bool) -> bool:
        """Will the result lie on the GPU?"""
        if name in ("cpu", "cuda"):
            return name == self.kind
        device = kwargs.get("device")
        if name == "to" and isinstance(args[1], (str, torch.device, Tensor)):
            device = args[1].device if isinstance(args[1], Tensor) else args[1]
        if device is None:
            return marked and not (name in ("tensor", "as_tensor") and isinstance(args[0], (list, tuple)))
        return self._is_me(device)

    def _check(self, name: str, func, args: tuple, kwargs: dict, tensors: list[Tensor], here: bool) -> None:
        marks = [isinstance(tensor, OnGpu) for tensor in tensors]
        if here and getattr(kwargs.get("generator"), "device", None) == torch.device("cpu"):
            raise RuntimeError(f"Expected a '{self.kind}' device type for generator but found 'cpu'")
        if not any(marks) or name in MOVES or name == "copy_":
            return
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert {self.kind}:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                            "tensor to host memory first.")
        if name in PRODUCTS and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            raise RuntimeError(f'"addmm_{self.kind}" not implemented for {tensors[0].dtype}')
        mixed = [mark for tensor, mark in zip(tensors, marks) if mark or tensor.dim() > 0]  # a CPU scalar may go along
        if name == "__getitem__" and marks[0]:  # an index may lie on the CPU
            return
        if name == "__setitem__" and marks[0] and not _has_tensors(args[1]):  # and what a slice is filled with
            return
        if not all(mixed):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                               f"{self.kind}:0 and cpu! ({name})")

    def _mark(self, tensor: Tensor) -> Tensor:
        if self.kind == "mps" and tensor.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it.")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(tensor.data.as_subclass(OnGpu), requires_grad=tensor.requires_grad)
        return tensor if isinstance(tensor, OnGpu) else tensor.as_subclass(OnGpu)

    def _made_up(self, name: str, tensors: list[Tensor]) -> Tensor | None:
        """Numbers of the right shape and kind, in the place of a large product."""
        if name not in ("linear", "scaled_dot_product_attention") or any(tensor.requires_grad for tensor in tensors):
            return None
        x, outputs = tensors[0], tensors[1].shape[0] if name == "linear" else tensors[2].shape[-1]
        if x.numel() * tensors[1].shape[-2] <= self.largest:  # rows of the weight, or keys
            return None
        return torch.linspace(-1, 1, outputs, dtype=x.dtype).expand(*x.shape[:-1], outputs).clone()


def _has_tensors(found) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(found))


def _bare(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, OnGpu) else tensor


def _each(result, change):
    """Change every tensor of a result: one, or a tuple or list of them, also of torch's own kinds (values, indices)."""
    if isinstance(result, Tensor):
        return change(result)
    if isinstance(result, (tuple, list)) and _has_tensors(list(result)):
        return type(result)([_each(part, change) for part in result])
    return result


@contextmanager
def pretend(kind: str, largest: float = float("inf")) -> Iterator[Gpu]:
    """Be a computer with one GPU of this kind, "cuda" or "mps", until the end of the block."""
    OnGpu.gpu = gpu = Gpu(kind, largest)
    read = time.perf_counter

    def clock() -> float:
        reader = sys._getframe(1)
        if gpu.busy and ("llm_lessons" in reader.f_code.co_filename or reader.f_code.co_filename.startswith("<cell")):
            gpu.early.append(f"{reader.f_code.co_filename}:{reader.f_lineno}")
        return read()

    with pytest.MonkeyPatch.context() as patch, gpu:
        patch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
        patch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
        patch.setattr(torch.cuda, "synchronize", gpu.wait)
        patch.setattr(torch.mps, "synchronize", gpu.wait)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU that is not there")
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 * 2**30, 8 * 2**30))
        patch.setattr(time, "perf_counter", clock)
        defaults = [clock if value is read else value for value in ll.Engine.__init__.__defaults__]
        patch.setattr(ll.Engine.__init__, "__defaults__", tuple(defaults))
        yield gpu
