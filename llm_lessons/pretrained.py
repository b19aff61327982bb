"""`load_pretrained`: one door to a model's weights and its tokenizer, wherever they are stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .download import SMOLLM2
from .gguf_file import GGUFFile
from .hf_folder import HuggingFaceFolder
from .linear import return_freed_memory
from .model import Model
from .packed_linear import packed_model, quantize_model, table_group
from .quantize import QuantizedTensor, concatenate, regroup
from .timing import best_device, check_device, set_threads
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKED = {"int8": dict(bits=8), "int4": dict(bits=4, group_size=32, symmetric=False)}
WEIGHTS = (*DTYPES, *PACKED, "stored")
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # layers that a file has in several pieces


def load_pretrained(name: str | Path = "smollm2-135m", weights: str = "float32",
                    device: torch.device | str | None = None) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer, ready to run.

    `name`: "smollm2-135m", the course's model (fetched once, 93 MB, then read from the cache); a folder in Hugging
    Face layout; or a GGUF file. `weights`: "float32"; "bfloat16" in half the memory; "int8" or "int4" (a scale and a
    minimum for each 32 weights), quantized here from float32; or "stored", a GGUF file's own 4- and 8-bit blocks, which
    are repacked without ever becoming a float model. `device`: the fastest one here unless given. Also sets torch's
    number of threads to the CPUs that this process may use.

    Raises ValueError for a model that cannot be run faithfully, naming what stands in the way, FileNotFoundError for a
    path that is not there, and DownloadError when fetching fails. Nothing is ever loaded halfway.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    device = best_device() if device is None else check_device(device)
    checkpoint = open_checkpoint(name)
    set_threads()
    if weights == "stored":
        model = build_stored(checkpoint, device)
    else:
        model = build(checkpoint, DTYPES.get(weights, torch.float32), device)
        model = quantize_model(model, **PACKED[weights]) if weights in PACKED else model
    tokenizer = checkpoint.tokenizer
    del checkpoint  # its reader made 200,000 small objects
    return_freed_memory()
    return model, tokenizer


def load_tokenizer(name: str | Path = "smollm2-135m") -> Tokenizer:
    """The tokenizer of a model alone, without its weights; names and errors as for `load_pretrained`."""
    return open_checkpoint(name).tokenizer


def open_checkpoint(name: str | Path) -> GGUFFile | HuggingFaceFolder:
    """The reader for a name, as `load_pretrained` understands it."""
    if name == SMOLLM2.name:
        return GGUFFile(SMOLLM2.fetch() / next(iter(SMOLLM2.files)))
    try:
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            return HuggingFaceFolder(path)
        if path.suffix == ".gguf" and path.is_file():
            return GGUFFile(path)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the files of {name!r} are not as expected ({type(error).__name__}: {error})") from error
    raise FileNotFoundError(f"there is no model {str(name)!r}: pass {SMOLLM2.name!r}, a folder with config.json, or a "
                            f".gguf file")


def build(checkpoint: GGUFFile | HuggingFaceFolder, dtype: torch.dtype, device: torch.device) -> Model:
    """The model of a checkpoint. One matrix after the other is copied to its place: a second copy never exists."""
    model = Model(checkpoint.config, dtype, device)
    with torch.no_grad():
        for stored, (name, layer, target) in _wanted(checkpoint, model).items():
            values = checkpoint.tensor(name, layer)
            _check_shape(stored, values, target)
            target.copy_(values)
    return model


def build_stored(checkpoint: GGUFFile | HuggingFaceFolder, device: torch.device) -> Model:
    """The model of a GGUF file on the file's own bits.

    Lost on the way: the scales of 4-bit blocks are rounded to bfloat16, and 8-bit blocks of 32 joined to larger ones.
    """
    if not isinstance(checkpoint, GGUFFile):
        raise ValueError("weights='stored' runs the quantized weights of a GGUF file; this model's are stored as "
                         "numbers: use 'bfloat16', 'int8' or 'int4'")
    wanted = {(name, layer): (stored, target) for stored, (name, layer, target)
              in _wanted(checkpoint, Model(checkpoint.config, torch.bfloat16, "meta")).items()}

    def weight_of(path: str) -> QuantizedTensor | Tensor:
        *block, name = path.split(".")
        layer = int(block[1]) if block else None
        read = checkpoint.tensor if "norm" in name else checkpoint.quantized
        parts = []
        for part in PARTS.get(name, (name,)):
            parts.append(read(part, layer))
            _check_shape(wanted[part, layer][0], parts[-1], wanted[part, layer][1])
        if "norm" in name:
            return parts[0]
        try:
            weight = concatenate(parts)
        except ValueError as error:
            raise ValueError(f"{path}: {error}: use another kind of weights for this file") from None
        del parts
        in_table = name in ("embedding", "head")
        if in_table or weight.bits == 8:
            weight = regroup(weight, table_group(weight.columns) if in_table else weight.columns)
        return weight.to(device)

    return packed_model(checkpoint.config, device, weight_of)


def _wanted(checkpoint: GGUFFile | HuggingFaceFolder, model: Model) -> dict[str, tuple[str, int | None, Tensor]]:
    """Each tensor of the file by its name there: ours, its layer, its place. ValueError for one too many or missing."""
    names, available = checkpoint.names, checkpoint.tensor_names
    wanted = {names[name].format(layer): (name, layer, target) for name, layer, target in _targets(model)}
    if missing := sorted(wanted.keys() - available):
        raise ValueError(f"the weights lack {_some(missing)}")
    if unexpected := sorted(available - wanted.keys() - checkpoint.ignorable):
        raise ValueError(f"the weights hold {_some(unexpected)}, which a plain Llama model does not have")
    return wanted


def _check_shape(stored: str, values: Tensor | QuantizedTensor, target: Tensor) -> None:
    if values.shape != target.shape:
        raise ValueError(f"{stored} has the shape {list(values.shape)}, but the configuration asks for "
                         f"{list(target.shape)}")


def _targets(model: Model) -> Iterator[tuple[str, int | None, Tensor]]:
    """Every matrix that a file holds: its name, its layer, and the part of the model's memory it belongs in."""
    yield "embedding", None, model.embedding.weight
    for layer, block in enumerate(model.blocks):
        attention = block.attention
        c = attention.config
        sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
        yield "attention_norm", layer, block.attention_norm.weight
        yield from zip("qkv", [layer] * 3, attention.qkv.weight.split(sizes))
        yield "output", layer, attention.output.weight
        yield "ffn_norm", layer, block.ffn_norm.weight
        yield from zip(("gate", "up"), [layer] * 2, block.ffn.gate_up.weight.chunk(2))
        yield "down", layer, block.ffn.down.weight
    yield "norm", None, model.norm.weight
    if not model.config.tied:
        yield "head", None, model.head.weight


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
