"""Read a model from one GGUF file: configuration, weights, tokenizer, chat template.

The format is read by its own library, `gguf`. What is left to do here: llama.cpp's names and row order become ours.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .model import ModelConfig
from .quantize import QuantizedTensor, pack
from .tokenizer import DIGITS_PATTERN, GPT2_PATTERN, Tokenizer, byte_characters

NAMES = {  # our name of a matrix -> its name in the file; {} is the layer
    "embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "attention_norm": "blk.{}.attn_norm.weight", "q": "blk.{}.attn_q.weight", "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight", "output": "blk.{}.attn_output.weight", "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight", "down": "blk.{}.ffn_down.weight",
}
PATTERNS = {"smollm": DIGITS_PATTERN, "gpt-2": GPT2_PATTERN}
SPECIAL_TYPES = (3, 4)  # in tokenizer.ggml.token_type: control and user-defined tokens; 1 is an ordinary token


class GGUFFile:
    """An open file. `config` and `tokenizer` are read at once, each tensor when `tensor(name)` asks for it."""

    names = NAMES
    ignorable: frozenset[str] = frozenset()

    def __init__(self, path: Path):
        try:
            self._reader = _open(path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise ValueError(f"{path} is not a complete GGUF file ({error}): fetch it again") from error
        if (architecture := self._field("general.architecture")) != "llama":
            raise ValueError(f"{path} has the architecture {architecture!r}; this course runs 'llama'")
        self._path, self.config = path, self._read_config()
        self.tokenizer = self._read_tokenizer()
        self._reader.fields.clear()  # 45 MB of small arrays, all of them read by now

    @property
    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """The tensor that we call `name`, de-quantized to float32."""
        from gguf import dequantize

        stored = self._tensors[self.names[name].format(layer)]
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{stored.name} is stored as {stored.tensor_type.name}, which the gguf library "
                             f"cannot de-quantize") from None
        values = self._our_rows(name, values.reshape(tuple(int(n) for n in reversed(stored.shape))))
        return torch.from_numpy(np.require(values, requirements="CW"))  # the mapped file itself cannot be written to

    def quantized(self, name: str, layer: int | None = None) -> QuantizedTensor:
        """The matrix that we call `name` in the bits in which the file has it: a scale (and minimum) for each 32."""
        stored = self._tensors[self.names[name].format(layer)]
        kind = stored.tensor_type.name
        if kind not in BLOCKS:
            raise ValueError(f"{stored.name} is stored as {kind}; weights='stored' runs {' and '.join(BLOCKS)}: "
                             f"use another kind of weights for this file")
        columns, *others = (int(n) for n in stored.shape)
        # Read, where `tensor` maps: the pages of a mapped file stay in this process's memory beside the repacked ones.
        data = np.fromfile(self._path, np.uint8, int(stored.n_bytes), offset=int(stored.data_offset))
        weight = BLOCKS[kind](self._our_rows(name, data.reshape(math.prod(others), -1)), columns)
        if not all(part.isfinite().all() for part in (weight.scale, weight.minimum) if part is not None):
            raise ValueError(f"{stored.name} holds NaN or infinity: fetch the file again")
        return weight

    def _our_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        heads = {"q": self.config.heads, "k": self.config.kv_heads}.get(name)
        if heads and len(rows) == heads * self.config.head_dim:  # `build` refuses other shapes
            return half_split_rows(rows, heads)
        return rows

    def _field(self, key: str, default=None):
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _required(self, key: str):
        value = self._field(key)
        if value is None:
            raise ValueError(f"the file lacks {key}")
        return value

    def _read_config(self) -> ModelConfig:
        heads, hidden = self._required("llama.attention.head_count"), self._required("llama.embedding_length")
        head_dim = self._field("llama.attention.key_length", hidden // (heads or 1))
        for key, plain in (("llama.rope.dimension_count", head_dim), ("llama.rope.scaling.type", "none"),
                           ("llama.attention.value_length", head_dim), ("llama.expert_count", 0)):
            if (value := self._field(key, plain)) != plain:
                raise ValueError(f"{key} is {value!r}; this course runs {plain!r} only")
        return ModelConfig(
            layers=self._required("llama.block_count"), hidden=hidden, heads=heads,
            kv_heads=self._field("llama.attention.head_count_kv", heads), head_dim=head_dim,
            ffn=self._required("llama.feed_forward_length"), vocab=len(self._required("tokenizer.ggml.tokens")),
            context=self._required("llama.context_length"), tied=self.names["head"] not in self._tensors,
            rope_base=self._field("llama.rope.freq_base", 10_000.0),
            # stored as float32: 1e-5 would come back as 9.999999747378752e-06
            norm_eps=float(str(np.float32(self._required("llama.attention.layer_norm_rms_epsilon")))))

    def _read_tokenizer(self) -> Tokenizer:
        kind, split = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or split not in PATTERNS:
            raise ValueError(f"the file's tokenizer is {kind!r}, cut by {split!r}; this course reads 'gpt2' "
                             f"(byte-level BPE), cut by {' or '.join(map(repr, PATTERNS))}")
        tokens, types = self._required("tokenizer.ggml.tokens"), self._required("tokenizer.ggml.token_type")
        special = {text: token for token, text in enumerate(tokens) if types[token] in SPECIAL_TYPES}
        ranks = token_ranks({text: token for token, text in enumerate(tokens) if text not in special},
                            self._required("tokenizer.ggml.merges"))
        ids = {name: self._field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
        return Tokenizer(ranks, special, PATTERNS[split], self._field("tokenizer.chat_template"),
                         stop_ids={ids[name] for name in ("eos", "eot") if ids[name] is not None},
                         bos_id=ids["bos"] if self._field("tokenizer.ggml.add_bos_token", False) else None,
                         template_names={f"{name}_token": tokens[ids[name]] for name in ids if ids[name] is not None})


def _open(path: Path):
    from gguf import GGUFReader  # takes a moment to import, and Hugging Face folders do not need it

    class Reader(GGUFReader):
        """Slices its file 250,000 times for one vocabulary: 3.6 times as fast on a plain array as on numpy's memmap."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._plain = mapped.view(np.ndarray)

    return Reader(path)


def q4_1(rows: np.ndarray, columns: int) -> QuantizedTensor:
    """Blocks of 32 weights in 20 bytes: d and m (float16), then 16 bytes; a weight is code · d + m.

    Byte i holds the code of weight i in its low four bits and that of weight i + 16 in its high ones.
    """
    blocks = rows.reshape(len(rows), columns // 32, 20)
    scale, minimum = blocks[..., :4].copy().view(np.float16).astype(np.float32).transpose(2, 0, 1)
    codes = np.concatenate((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), axis=-1).reshape(len(rows), columns)
    packed = pack(torch.from_numpy(codes), 4)
    return QuantizedTensor(packed, torch.from_numpy(scale.copy()), torch.from_numpy(minimum.copy()), columns, 4)


def q8_0(rows: np.ndarray, columns: int) -> QuantizedTensor:
    """Blocks of 32 weights in 34 bytes: d (float16), then 32 codes (int8); a weight is code · d."""
    blocks = rows.reshape(len(rows), columns // 32, 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)[..., 0]
    packed = torch.from_numpy(blocks[..., 2:].copy().reshape(len(rows), columns))
    packed ^= 128  # from -128 … 127 to 0 … 255
    return QuantizedTensor(packed, torch.from_numpy(scale), None, columns, 8)


BLOCKS = {"Q4_1": q4_1, "Q8_0": q8_0}  # the layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h


def token_ranks(vocab: dict[str, int], merges: list[str], whole_pieces: bool = False) -> dict[bytes, int]:
    """Tokens as they are written in files -> bytes and id. Refuses a vocabulary that tiktoken would merge otherwise.

    tiktoken merges the pair whose result has the lowest id; the files list merges in their order. Both are the same
    when the ids of the results rise. tiktoken also looks up whole pieces of text first. That changes nothing when each
    token is the result of a merge, or when the tokenizer itself does so (`whole_pieces`).
    """
    results = [merge.replace(" ", "", 1) for merge in merges]
    ids = [vocab.get(result) for result in results]
    if None in ids or any(a >= b for a, b in zip(ids, ids[1:])):
        raise ValueError("the tokenizer's merges are not in the order of its ids; this course cannot encode with it")
    unmerged = {text for text in vocab if len(text) > 1} - set(results)
    if unmerged and not whole_pieces:
        raise ValueError(f"no merge of the tokenizer makes its token {min(unmerged)!r}; this course cannot encode "
                         f"with it")
    characters = byte_characters()
    try:
        return {bytes(characters[c] for c in text): token for text, token in vocab.items()}
    except KeyError as error:
        raise ValueError(f"the tokenizer's vocabulary is not byte-level: {error} stands for no byte") from None


def half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k matrix [heads · D, in], from llama.cpp's order (pairs side by side) to Llama's (half-split)."""
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
