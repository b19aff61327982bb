"""Linear layers that multiply with packed weights: fewer bytes to read for each token.

De-quantizing a matrix before each product would read the packed weights, write float ones, and read those again: more
bytes than without any quantization. torch has kernels that unpack a few codes at a time, in registers, on the way to
the product. They are used where they exist and fit; elsewhere a layer does it the plain way, which is correct and slow.
`layer.kernel` says which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Layer, Linear, product, return_freed_memory
from .model import Model, ModelConfig, RMSNorm
from .quantize import QuantizedTensor, check_bits, concatenate, quantize, unpack

MANY_ROWS = 64  # from here on, making a bfloat16 matrix out of int8 once costs less than the kernel's slower arithmetic


class PackedLinear(Layer):
    """y = x Wᵀ, with the weights as `quantize` stores them, de-quantized anew at each call: the plain way."""

    kernel = "plain"

    def __init__(self, weight: QuantizedTensor):
        super().__init__()
        self.inputs, self.bits = weight.columns, weight.bits
        for name in ("packed", "scale", "minimum"):  # so that torch counts and moves them with the model
            self.register_buffer(name, getattr(weight, name))

    @property
    def weight(self) -> QuantizedTensor:
        return QuantizedTensor(self.packed, self.scale, self.minimum, self.inputs, self.bits)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight.dequantize().to(x.dtype))

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of the weight: ids [...] -> [..., in], bfloat16."""
        minimum = None if self.minimum is None else self.minimum[ids]
        some = QuantizedTensor(self.packed[ids], self.scale[ids], minimum, self.inputs, self.bits)
        return some.dequantize().to(torch.bfloat16)


class Int8Linear(Layer):
    """One byte a weight, one scale a row. Activations in bfloat16, which the kernel asks for."""

    kernel = "int8"

    def __init__(self, weight: QuantizedTensor):
        super().__init__()
        self.inputs = weight.columns
        self.register_buffer("weight", (weight.packed ^ 128).view(torch.int8))  # [out, in], -127 to 127
        self.register_buffer("scale", weight.scale[:, 0].to(torch.bfloat16))  # [out]

    @staticmethod
    def fits(weight: QuantizedTensor) -> bool:
        """A kernel for it is here. It reads 16 columns at a time, beyond the end of a row where they do not divide."""
        one_scale_a_row = weight.bits == 8 and weight.symmetric and weight.scale.shape[-1] == 1
        return one_scale_a_row and weight.columns % 32 == 0 and _works(Int8Linear, weight.packed.device.type)

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(x, self.inputs)
        if len(rows) < MANY_ROWS:
            y = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            y = product(rows, self.weight.to(x.dtype)) * self.scale
        return y.view(*x.shape[:-1], y.shape[-1])

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of the weight: ids [...] -> [..., in], bfloat16."""
        return self.weight[ids].to(torch.bfloat16) * self.scale[ids][..., None]


class Int4Linear(Layer):
    """Half a byte a weight, one scale and one offset for each group of a row. Activations in bfloat16.

    The kernel computes (code - 8) · scale + offset, codes from 0 to 15; so offset = minimum + 8 · scale, or 0 on a
    symmetric grid.
    """

    kernel = "int4"

    def __init__(self, weight: QuantizedTensor):
        super().__init__()
        self.inputs, self.group_size = weight.columns, weight.group_size
        codes, scale = unpack(weight.packed, weight.columns, 4), weight.scale
        offset = torch.zeros_like(scale) if weight.symmetric else (weight.minimum / 8 + scale) * 8
        both = torch.stack((scale, offset), dim=-1).transpose(0, 1)  # [groups, out, 2]
        on_cpu = codes.device.type == "cpu"
        self._multiply = torch._weight_int4pack_mm_for_cpu if on_cpu else torch._weight_int4pack_mm
        self.register_buffer("weight", _pack_int4(codes))
        self.register_buffer("scale_and_offset", both.contiguous().to(torch.bfloat16))

    @staticmethod
    def fits(weight: QuantizedTensor) -> bool:
        """A kernel for it is here, and takes this group size and shape."""
        shaped = weight.shape[0] % 16 == 0 and weight.columns % 32 == 0 and weight.group_size in (32, 64, 128, 256)
        return weight.bits == 4 and shaped and _works(Int4Linear, weight.packed.device.type)

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(_rows(x, self.inputs), self.weight, self.group_size, self.scale_and_offset)
        return y.view(*x.shape[:-1], y.shape[-1])


def _rows(x: Tensor, inputs: int) -> Tensor:
    """x [..., in] -> [rows, in] as torch's kernels ask for it: one row after the other, in memory that begins at a
    multiple of 64 bytes. On others, such as x[1:] of a vector, the int8 kernel for CPUs ends the process.
    """
    if x.shape[-1] != inputs or x.dtype != torch.bfloat16:
        raise ValueError(f"this layer takes bfloat16 vectors [..., {inputs}], not {list(x.shape)} of {x.dtype}")
    rows = x.reshape(-1, inputs).contiguous()
    return rows.clone() if rows.data_ptr() % 64 else rows


def _pack_int4(codes: Tensor) -> Tensor:
    """Codes [out, in], uint8 from 0 to 15, in the order that the device's kernel reads them."""
    if codes.device.type == "cpu":  # 64 rows at a time, which lie together there: it asks for codes of 32 bits
        return torch.cat([torch._convert_weight_to_int4pack_for_cpu(some.int(), 1) for some in codes.split(64)])
    pairs = codes[:, 0::2] << 4 | codes[:, 1::2]
    return torch._convert_weight_to_int4pack(pairs, 4 if codes.shape[1] % 64 == 0 else 2)


class PackedTable(Layer):
    """The output head, and an embedding, on 8-bit weights [vocab, hidden]: slices of columns, each with a scale a row.

    The rows of a vocabulary are too uneven for one scale: for the course's model, six scales take a quarter of the
    perturbation of the logits away. Each slice is a product of its own; their sum is float32.
    """

    def __init__(self, weight: QuantizedTensor):
        super().__init__()
        self.width = weight.group_size
        columns = zip(weight.packed.split(self.width, dim=-1), weight.scale.split(1, dim=-1))
        self.slices = nn.ModuleList(packed_linear(QuantizedTensor(packed.contiguous(), scale, None, self.width, 8))
                                    for packed, scale in columns)

    @property
    def kernel(self) -> str:
        return self.slices[0].kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> logits [..., vocab], float32."""
        parts = [layer(part.contiguous()) for layer, part in zip(self.slices, x.split(self.width, dim=-1))]
        logits = parts[0].float()
        for part in parts[1:]:
            logits += part
        return logits

    def rows(self, ids: Tensor) -> Tensor:
        """The vectors of some ids: [...] -> [..., hidden], bfloat16."""
        return torch.cat([layer.rows(ids) for layer in self.slices], dim=-1)


class PackedEmbedding(Layer):
    """One row of a table for each id. The table may be the output head's: it is in memory once."""

    def __init__(self, table: PackedTable):
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.rows(ids)


def packed_linear(weight: QuantizedTensor) -> nn.Module:
    """The layer for a quantized weight [out, in]: the fastest kernel that its device has for it, or the plain way."""
    return next((kind for kind in (Int4Linear, Int8Linear) if kind.fits(weight)), PackedLinear)(weight)


@lru_cache
def _works(kind: type[nn.Module], device: str) -> bool:
    """Does torch have this kernel for this device, and is its product right? Asked once, with a small matrix."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 128, generator=generator).to(device) for rows in (32, 3))
    bits, group_size = (4, 32) if kind is Int4Linear else (8, None)
    packed = quantize(weight, bits, group_size)
    try:
        with torch.no_grad():
            y = kind(packed)(x.to(torch.bfloat16)).float()
    except (RuntimeError, AttributeError, TypeError):  # refused, not there, or asked for in another way
        return False
    expected = F.linear(x.to(torch.bfloat16).float(), packed.dequantize())
    return torch.allclose(y, expected, rtol=0.02, atol=0.2)


def quantize_model(model: Model, bits: int = 8, group_size: int | None = None, symmetric: bool = True) -> Model:
    """A new model with the same weights in fewer bits; the given one stays as it is.

    The linear layers of the blocks are quantized as `quantize` does it. The embedding, and an output head, get 8 bits
    whatever `bits` is: every logit depends on them. Activations, norms and caches are bfloat16,
    which torch's kernels ask for. ValueError for weights that cannot be quantized, with the name of the layer.
    """
    if not isinstance(model, Model) or not isinstance(model.head, Linear):
        raise ValueError("quantize_model takes a model with float weights, such as ll.load_pretrained() gives")
    check_bits(bits)

    def weight_of(name: str) -> QuantizedTensor | Tensor:
        weight = model.get_submodule(name).weight
        if "norm" in name:
            return weight
        try:
            if name not in ("embedding", "head"):
                return quantize(weight, bits, group_size, symmetric)
            some = weight.split(4096)  # rows at a time: on the way, `quantize` needs several times a matrix's memory
            return concatenate([quantize(rows, 8, table_group(model.config.hidden)) for rows in some])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    quantized = packed_model(model.config, model.device, weight_of)
    return_freed_memory()
    return quantized


def packed_model(config: ModelConfig, device: torch.device,
                 weight_of: Callable[[str], QuantizedTensor | Tensor]) -> Model:
    """A model on packed weights. `weight_of` is asked for each layer by its name, one after the other: a quantized
    matrix, or the numbers of a norm. What it gives is repacked and let go: no second copy of the model ever exists.
    The embedding and the head have 8 bits, in groups of `table_group(config.hidden)` columns.
    """
    model = Model(config, torch.bfloat16, "meta")  # the structure, without memory
    # The largest matrix first: what it needs on the way is then free for the others.
    model.head = PackedTable(weight_of("embedding" if config.tied else "head"))
    model.embedding = PackedEmbedding(model.head if config.tied else PackedTable(weight_of("embedding")))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, RMSNorm):
            layer.weight = nn.Parameter(weight_of(name).to(device, torch.bfloat16, copy=True), requires_grad=False)
        elif isinstance(layer, Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, packed_linear(weight_of(name)))
    return model


def table_group(columns: int) -> int:
    """Columns of the embedding and the head that share a scale: as many as divide them, in steps of 32 up to 128."""
    return next((size for size in (128, 96, 64, 32) if columns % size == 0), columns)
