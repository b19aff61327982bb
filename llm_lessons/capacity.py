"""What a model costs, from its shape alone: parameters, FLOPs, bytes, and the least time that they take.

Nothing here runs a model: every line is arithmetic that you can redo on paper. A FLOP is one multiplication or one
addition. Counted are the matrix products; norms, rotary positions, softmax and SiLU are left out, as torch's own
FLOP counter leaves them out. A GB is 10^9 bytes, a GiB 2^30.

Letters in the formulas: L layers, C hidden size, H query heads, G key/value heads, D numbers per head, F ffn size,
V vocabulary, T tokens in one pass, S keys that a query attends to.
Sources: Kaplan et al. 2020, https://arxiv.org/abs/2001.08361 (2 FLOPs per weight and token); Austin et al. 2025,
"How to Scale Your Model", https://jax-ml.github.io/scaling-book/inference (bytes of a decode step); Williams et al.
2009, "Roofline", https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real

import torch

from .kv_cache import whole_number
from .model import Model, ModelConfig
from .timing import Roofline


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Llama model (grouped-query attention, SwiGLU, RMSNorm, no biases), without its weights.

    `head_dim` is hidden / heads unless it is given: read it from the model's configuration where that states it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    ffn: int
    vocab: int
    tied: bool = True  # the output head is the embedding table

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"a hidden size of {self.hidden} does not divide by {self.heads} heads: give head_dim, as "
                             f"the model's configuration states it")
        head_dim = self.hidden // self.heads if self.head_dim is None else whole_number("head_dim", self.head_dim)
        object.__setattr__(self, "head_dim", head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied must be True or False, not {self.tied!r}")

    @classmethod
    def of(cls, model: Model | ModelConfig) -> Shape:
        """The shape of a model, or of its configuration."""
        config = getattr(model, "config", model)
        if not isinstance(config, ModelConfig):
            raise ValueError(f"Shape.of takes a model of this package or its ModelConfig, not {type(model).__name__}: "
                             f"write Shape(layers=…, hidden=…, …) for another")
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    # --- Weights: counts of numbers ---------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, int]:
        """Parameters of each part, all layers together. A tied head has none of its own. They add up to `parameters`.

        attention: L · C · D · (2H + 2G), for queries and output, keys and values; ffn: L · 3 · C · F (gate, up, down).
        """
        return {
            "embedding": self.vocab * self.hidden,
            "attention": self.layers * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads),
            "ffn": self.layers * 3 * self.hidden * self.ffn,
            "norms": (2 * self.layers + 1) * self.hidden,
            "head": 0 if self.tied else self.vocab * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """All numbers that the model learnt. In memory they take this times the bytes per weight."""
        return sum(self.parts.values())

    @property
    def matrix_parameters(self) -> int:
        """`parameters` without the norms, as papers and books often count them."""
        return self.parameters - self.parts["norms"]

    @property
    def streamed_parameters(self) -> int:
        """Weights that one decode step reads: every matrix once, attention + ffn + V · C for the head.

        Of the embedding table a step looks up one row, which is not counted, nor are the norms: together they are far
        below 1 % of the rest. A tied table is read whole all the same: it is the head.
        """
        return self.parts["attention"] + self.parts["ffn"] + self.vocab * self.hidden

    # --- Bytes ------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Bytes of KV cache for one token of one sequence: 2 · L · G · D · bytes per value (2: keys and values).

        G, the key/value heads: grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) shrinks
        the cache by H / G.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * _width("bytes_per_value", bytes_per_value)

    def bytes_per_token(self, context: int, batch: int = 1, bytes_per_weight: float = 2,
                        bytes_per_value: float = 2) -> float:
        """Bytes that a decode step must read for each token it writes: weights / batch + S · KV bytes per token.

        One step makes one token in each of `batch` sequences. All of them share one reading of the weights, but each
        reads its own cache of `context` tokens. The whole step reads this times `batch`.
        """
        weights = self.streamed_parameters * _width("bytes_per_weight", bytes_per_weight)
        cache = whole_number("context", context, 0) * self.kv_bytes_per_token(bytes_per_value)
        return weights / whole_number("batch", batch) + cache

    def prefill_bytes(self, tokens: int, past: int = 0, bytes_per_weight: float = 2,
                      bytes_per_value: float = 2) -> float:
        """Bytes that one prefill pass must move: the weights once, and the cache of past + T tokens, read or written.

        Activations are left out: a good implementation keeps most of them near the arithmetic.
        """
        context = whole_number("tokens", tokens) + whole_number("past", past, 0)
        return self.bytes_per_token(context, 1, bytes_per_weight, bytes_per_value)

    def crossover_context(self, batch: int = 1, bytes_per_weight: float = 2, bytes_per_value: float = 2) -> int:
        """The first context length, in tokens for each sequence, at which decode reads more cache than weights.

        It may lie beyond what the model was trained for: a Shape knows no context window.
        """
        weights = self.streamed_parameters * _width("bytes_per_weight", bytes_per_weight)
        return int(weights // (whole_number("batch", batch) * self.kv_bytes_per_token(bytes_per_value))) + 1

    # --- FLOPs ------------------------------------------------------------------------------------------------------

    def flops_per_token(self, context: int) -> int:
        """FLOPs of one decode step of one sequence: 2 · streamed weights + 4 · L · H · D · S.

        A weight costs one multiplication and one addition. `context` is S, the keys that the new token attends to,
        itself included: 2 · D for its score with each, 2 · D to add up the values, in every head and layer.
        """
        return self._flops(1, whole_number("context", context), 1)

    def prefill_flops(self, tokens: int, past: int = 0, all_logits: bool = False, causal: bool = True) -> int:
        """FLOPs of one pass over T new tokens behind `past` cached ones: 2 · T · weights of the blocks
        + 4 · L · H · D · pairs of query and key + 2 · V · C for each row of logits.

        `causal`: True counts the pairs that the mask lets through, T · past + T · (T + 1) / 2, which is what the
        result needs. False counts all T · (past + T): a dense implementation fills the whole matrix of scores and,
        with no past, throws nearly half of it away. `all_logits`: the head for every token, not for the last alone.
        """
        tokens, past = whole_number("tokens", tokens), whole_number("past", past, 0)
        pairs = tokens * past + tokens * (tokens + 1) // 2 if causal else tokens * (past + tokens)
        return self._flops(tokens, pairs, tokens if all_logits else 1)

    def _flops(self, tokens: int, pairs: int, logits: int) -> int:
        blocks = self.parts["attention"] + self.parts["ffn"]
        scores_and_mix = 4 * self.layers * self.heads * self.head_dim * pairs  # H, not G: every query head has its own
        return 2 * tokens * blocks + scores_and_mix + 2 * logits * self.vocab * self.hidden

    # --- Arithmetic intensity: FLOPs for each byte moved ------------------------------------------------------------

    def decode_intensity(self, context: int, batch: int = 1, bytes_per_weight: float = 2,
                         bytes_per_value: float = 2) -> float:
        """FLOP per byte of a decode step: `flops_per_token` / `bytes_per_token`.

        About 2 · batch / bytes per weight while the weights outweigh the cache. A growing batch cannot raise it past
        2 · H / G / bytes per value + 2 · streamed weights / (S · KV bytes): each sequence reads its own cache.
        """
        return self.flops_per_token(context) / self.bytes_per_token(context, batch, bytes_per_weight, bytes_per_value)

    def prefill_intensity(self, tokens: int, past: int = 0, bytes_per_weight: float = 2,
                          bytes_per_value: float = 2) -> float:
        """FLOP per byte of one prefill pass: `prefill_flops` / `prefill_bytes`.

        It grows almost in step with T: a weight of the blocks is read once and used for all T tokens.
        """
        return self.prefill_flops(tokens, past) / self.prefill_bytes(tokens, past, bytes_per_weight, bytes_per_value)


# --- The roofline: the least time that FLOPs and bytes take on a device -----------------------------------------------

def ridge_point(roofline: Roofline, dtype: str | torch.dtype) -> float:
    """FLOP per byte at which arithmetic and memory take the same time: peak FLOP/s / (bytes/s) (Williams et al. 2009).

    Work of a lower arithmetic intensity is bound by memory bandwidth, work of a higher one by arithmetic.
    """
    peak, bandwidth = _limits(roofline, dtype)
    return peak / bandwidth


def roofline_time(flops: float, nbytes: float, roofline: Roofline, dtype: str | torch.dtype) -> float:
    """The least time, in seconds: max(FLOPs / peak FLOP/s, bytes / (bytes/s)). Arithmetic and memory work side by side.

    Divided by the time that you measure, the first term is the MFU and the second the MBU: the shares of the device's
    arithmetic and of its memory bandwidth that were put to use.
    """
    peak, bandwidth = _limits(roofline, dtype)
    for name, amount in (("flops", flops), ("nbytes", nbytes)):
        if not _is_number(amount) or amount < 0:
            raise ValueError(f"{name} must be a number of at least 0, not {amount!r}")
    return max(flops / peak, nbytes / bandwidth)


def _limits(roofline: Roofline, dtype: str | torch.dtype) -> tuple[float, float]:
    """Peak FLOP/s for a dtype and bytes/s of a roofline, or a ValueError that says which dtypes it has."""
    if not isinstance(roofline, Roofline):
        raise ValueError(f"roofline must be a Roofline, such as ll.measure_roofline() gives, not {roofline!r}")
    name = str(dtype).removeprefix("torch.")
    if name not in roofline.flops_per_second:
        raise ValueError(f"this roofline has no peak for {dtype!r}, only for {', '.join(roofline.flops_per_second)}")
    limits = roofline.flops_per_second[name], roofline.bytes_per_second
    if not all(_is_number(limit) and limit > 0 for limit in limits):
        raise ValueError(f"a roofline's limits must be above 0, not {limits[0]!r} FLOP/s and {limits[1]!r} bytes/s")
    return limits


def _is_number(value) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number larger than any float
        return False


def _width(name: str, value: float) -> float:
    """Bytes for one stored number: 4 for float32, 2 for bfloat16, 0.5 for 4 bits; refused when it looks like bits."""
    if not _is_number(value) or not 0 < value <= 8:
        raise ValueError(f"{name} must be above 0 and at most 8 bytes, not {value!r}: bits / 8, so 2 for bfloat16")
    return int(value) if value == int(value) else float(value)  # Python's numbers: numpy's would overflow


class _Shapes(dict):
    def __missing__(self, name):
        raise ValueError(f"no shape named {name!r} here, only {', '.join(self)}: write Shape(layers=…, …) for another")


# Each from the model's own config.json on Hugging Face: the address beside it, with /blob/main/config.json behind.
SHAPES = _Shapes({
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536, vocab=49152),
    # https://huggingface.co/meta-llama/Llama-3.2-1B
    "llama-3.2-1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    # https://huggingface.co/Qwen/Qwen3-4B (it also norms queries and keys: 9,216 parameters that a Shape leaves out)
    "qwen3-4b": Shape(layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocab=151936),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama-3-8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False),
    # https://huggingface.co/meta-llama/Llama-2-13b-hf
    "llama-2-13b": Shape(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000, tied=False),
    # https://huggingface.co/meta-llama/Meta-Llama-3-70B
    "llama-3-70b": Shape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, tied=False),
})
