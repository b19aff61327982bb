"""What a device can do at most: its memory, its bytes per second, its FLOP/s. From data sheets, or measured.

A GB is 10^9 bytes, a GiB 2^30. Data sheets say GB; the driver of a "24 GB" card then offers some per cent more or less.
Where you have the device, take `torch.cuda.mem_get_info()[1]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .capacity import _is_number
from .kv_cache import whole_number
from .timing import Roofline

DTYPES = "bfloat16", "float16", "float32"  # in which a language model is multiplied
MOST = 10**15  # of anything that is counted: beyond it, times and sizes would leave the range of floats


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device can do at most: its memory in bytes, bytes per second, and FLOP/s for each dtype.

    All figures are those of `count` devices together, see `several`; `memory` is the sum.

    `flops_per_second` needs "bfloat16", "float16" or "float32"; give figures "without sparsity" (dense): a language
    model's matrices are not sparse, and the figure in large print is often twice as high. `source`: where they stand.
    """

    name: str
    memory: int
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    source: str
    count: int = 1

    def __post_init__(self):
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} must be a text, not {getattr(self, name)!r}")
        if not _is_number(self.memory) or self.memory < 2**20:
            raise ValueError(f"memory must be a number of bytes, 2^20 at least, not {self.memory!r}: 80e9 for 80 GB")
        object.__setattr__(self, "memory", int(self.memory))
        object.__setattr__(self, "count", at_most_10_15("count", self.count))
        object.__setattr__(self, "bytes_per_second", *above_0(bytes_per_second=self.bytes_per_second))
        peaks = dict(self.flops_per_second) if isinstance(self.flops_per_second, Mapping) else {}
        if not peaks.keys() & set(DTYPES):
            raise ValueError(f"flops_per_second must be FLOP/s by dtype, such as {{'bfloat16': 989e12}}, not "
                             f"{self.flops_per_second!r}")
        rates = above_0(**{f"flops_per_second[{dtype!r}]": peak for dtype, peak in peaks.items()})
        object.__setattr__(self, "flops_per_second", dict(zip(peaks, rates)))

    @classmethod
    def measured(cls, roofline: Roofline, memory: int, name: str = "this machine") -> Device:
        """A device with the peaks that `ll.measure_roofline()` found: your own computer, and its memory in bytes."""
        if not isinstance(roofline, Roofline):
            raise ValueError(f"roofline must be a Roofline, such as ll.measure_roofline() gives, not {roofline!r}")
        return cls(name=name, memory=memory, bytes_per_second=roofline.bytes_per_second,
                   flops_per_second=roofline.flops_per_second, source="measured with ll.measure_roofline()")

    def several(self, count: int) -> Device:
        """`count` of these as one: memory, bytes/s and FLOP/s times `count`. One is the device itself.

        All work at the same time, each on its share of the heads and of every matrix (tensor parallelism). Weights are
        split evenly; of the key/value heads each device keeps whole ones, and with more devices than heads several keep
        the same. So from there on, the cache of each becomes no smaller. vLLM does it like that, and asks for a count
        that divides the query heads, and divides the key/value heads or is a multiple of them (LlamaAttention in
        https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama.py).

        Communication is left out, its time and its memory. For Llama-2-70B on four A100, a plan finds room for 28,539
        blocks of 16 tokens. vLLM found 31,615, and when it measured memory in another way 20,865: 34 % less, and 27 %
        less than the plan. Its author guesses that NCCL's memory is the cause
        (https://github.com/vllm-project/vllm/pull/2031).
        """
        count = at_most_10_15("count", count)
        if count == 1:
            return self
        peaks = {dtype: count * peak for dtype, peak in self.flops_per_second.items()}
        return Device(name=f"{count} x {self.name}", memory=count * self.memory, flops_per_second=peaks,
                      bytes_per_second=count * self.bytes_per_second, source=self.source, count=count * self.count)

    @property
    def dtype(self) -> str:
        """The dtype that this device multiplies fastest, of 16 and 32 bits. Not every device knows bfloat16."""
        return max(filter(self.flops_per_second.get, DTYPES), key=self.flops_per_second.get)

    @property
    def roofline(self) -> Roofline:
        """The same figures as `roofline_time` and `ridge_point` take them."""
        return Roofline(dict(self.flops_per_second), self.bytes_per_second, {})


def at_most_10_15(name: str, count: int) -> int:
    """`count` as an int from 1 to 10^15, or a ValueError that names it."""
    count = whole_number(name, count)
    if count > MOST:
        raise ValueError(f"{name} must be at most 10^15, not 10^{math.log10(count):.1f}: give a smaller number")
    return count


def above_0(**amounts: float) -> list[float]:
    """The amounts as Python's floats, or a ValueError that names the one which is no number above 0."""
    for name, amount in amounts.items():
        if not _is_number(amount) or amount <= 0:
            raise ValueError(f"{name} must be a number above 0, not {amount!r}")
    return [float(amount) for amount in amounts.values()]


class _Devices(dict):
    def __missing__(self, name):
        raise ValueError(f"no device named {name!r} here, only {', '.join(self)}: write ll.Device(name=…, memory=…, …) "
                         f"for another, or ll.Device.measured(…) for this machine")


def _device(name: str, gigabytes: float, gigabytes_per_second: float, source: str, **teraflops: float) -> Device:
    return Device(name=name, memory=int(gigabytes * 1e9), bytes_per_second=gigabytes_per_second * 1e9, source=source,
                  flops_per_second={dtype: peak * 1e12 for dtype, peak in teraflops.items()})


# Peak figures of data sheets. Where a sheet prints TFLOP/s "with sparsity", half of that stands here.
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DEVICES = _Devices({
    "t4": _device("NVIDIA T4", 16, 320, f"{NVIDIA}tesla-t4/", float16=65),
    "l4": _device("NVIDIA L4", 24, 300, f"{NVIDIA}l4/", bfloat16=242 / 2),
    "a100-80gb": _device("NVIDIA A100 80GB SXM", 80, 2039, f"{NVIDIA}a100/", bfloat16=312),
    "h100-sxm": _device("NVIDIA H100 SXM", 80, 3350, f"{NVIDIA}h100/", bfloat16=1979 / 2),
    "h200": _device("NVIDIA H200", 141, 4800, f"{NVIDIA}h200/", bfloat16=1979 / 2),
    # With sums in float32, as language models need them; the sheet's larger figure is for sums in float16.
    "rtx-4090": _device("NVIDIA GeForce RTX 4090", 24, 1008, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
                        "nvidia-ada-gpu-architecture.pdf", bfloat16=165.2),
    "tpu-v5e": _device("Google TPU v5e", 16, 819, "https://cloud.google.com/tpu/docs/v5e", bfloat16=197),
})
