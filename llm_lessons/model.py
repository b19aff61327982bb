"""The transformer: a Llama model, readable in one sitting.

A prompt flows through this file from bottom to top: `Model` looks up one vector per token, sends the vectors through
its blocks, and turns the last ones into logits. Each `Block` lets the tokens exchange information (`Attention`), then
works on each token alone (`FeedForward`).

Letters in the shape comments: B rows of a batch, T tokens in this call, S tokens that attention can see (cached and
new), H query heads, G key/value heads, D numbers per head, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kv_cache import Cache, KVCache, whole_number
from .linear import Embedding, Layer, Linear, rms_norm
from .timing import check_device


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama model; every length is a count of numbers, not of bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # the longest sequence the model was trained for, in tokens
    tied: bool = True  # the output head is the embedding table
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a number above 0, not {value!r}")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied must be True or False, not {self.tied!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")


class RMSNorm(Layer):
    """Divide each vector by its root mean square, then scale: x / √(mean(x²) + eps) · weight."""

    def __init__(self, size: int, eps: float, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **where), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles: positions [...] -> two tables [..., head_dim], float32.

    Pair i of a head turns by position / base^(2i / head_dim) radians (Su et al. 2021, https://arxiv.org/abs/2104.09864).
    """
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() / base ** (pair / head_dim)  # [..., D/2]
    angles = torch.cat((angles, angles), dim=-1)  # [..., D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of the last dimension by its angle ("half-split", as Hugging Face has it)."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention: H query heads, of which H/G neighbours share one key/value head."""

    def __init__(self, config: ModelConfig, layer: int, **where):
        super().__init__()
        self.layer, self.config = layer, config
        head_count = config.heads + 2 * config.kv_heads
        self.qkv = Linear(config.hidden, head_count * config.head_dim, **where)  # three matrices, read as one
        self.output = Linear(config.heads * config.head_dim, config.hidden, **where)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] -> rotated queries [B, H, T, D], rotated keys and plain values [B, G, T, D]."""
        H, G = self.config.heads, self.config.kv_heads
        heads = self.qkv(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # [B, H + 2G, T, D]
        q_and_k, v = heads.split([H + G, G], dim=1)
        q, k = rotate(q_and_k, *rope).split([H, G], dim=1)  # turned together: one call instead of two
        return q, k, v

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # [B, G, S, D]
        B, H, T, D = q.shape
        if T == 1:  # the query heads of a group become the rows of one small matrix: each key is read once
            q = q.reshape(B, self.config.kv_heads, -1, D)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=T > 1
        )
        return self.output(mixed.reshape(B, H, T, D).transpose(1, 2).reshape(B, T, H * D))


class FeedForward(nn.Module):
    """SwiGLU: two projections up, one gates the other, one projection down."""

    def __init__(self, config: ModelConfig, **where):
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.ffn, **where)  # two matrices, read as one
        self.down = Linear(config.ffn, config.hidden, **where)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))  # in place: a fresh block of memory costs more than the product


class Block(nn.Module):
    """One layer. Each half adds what it found to the residual stream and replaces nothing."""

    def __init__(self, config: ModelConfig, layer: int, **where):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, **where)
        self.attention = Attention(config, layer, **where)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps, **where)
        self.ffn = FeedForward(config, **where)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache, mask)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    """Token ids in, logits out. The weights are uninitialised: `load_pretrained` or `Model.random` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type such as torch.float32, not {dtype!r}")
        where = {"dtype": dtype, "device": device}
        self.config = config
        self.embedding = Embedding(config.vocab, config.hidden, **where)
        self.blocks = nn.ModuleList(Block(config, layer, **where) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, **where)
        self.head = Linear(config.hidden, config.vocab, **where)
        if config.tied:
            self.head.weight = self.embedding.weight

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, dtype=torch.float32, device="cpu") -> Model:
        """A model of this shape that has learnt nothing, the same for the same seed: for tests and for timing."""
        model, generator = cls(config, dtype, check_device(device)), torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            values = torch.empty(weight.shape).normal_(std=0.02, generator=generator)
            weight.copy_(values + 1 if "norm" in name else values)
        return model

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are stored, scales and minima included; a shared table counts once."""
        return sum(weight.nbytes for weight in (*self.parameters(), *self.buffers()))

    def new_cache(self, capacity: int, batch: int = 1, kind: type[Cache] = KVCache, **settings) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens each.

        `kind`: `KVCache`, `GrowingCache`, `SlidingCache` (with window=...), `PagedCache` (pool=..., tenant=...) or
        `QuantizedCache` (bits=8 or 4).
        """
        c, capacity = self.config, whole_number("capacity", capacity)
        if capacity > c.context:
            raise ValueError(f"a cache of {capacity} tokens is longer than this model's context window of {c.context}")
        if not (isinstance(kind, type) and issubclass(kind, Cache)) or kind is Cache:
            raise ValueError(f"a kind of cache is a class such as ll.KVCache or ll.SlidingCache, not {kind!r}")
        shape = c.layers, c.kv_heads, c.head_dim, capacity, batch, self.norm.weight.dtype, self.device
        try:
            inspect.signature(kind).bind(*shape, **settings)
        except TypeError as problem:
            raise ValueError(f"new_cache(kind={kind.__name__}): {problem}") from None
        cache = kind(*shape, **settings)
        cache.model = weakref.ref(self)
        return cache

    def forward(self, ids, cache: Cache | None = None, lengths: list[int] | None = None) -> Tensor:
        """Logits for the token after each given one.

        `ids`: [T], or [B, T] padded on the right, with the true length of each row in `lengths`; a list or a tensor.
        With a cache, the ids continue what it holds, and are added to it. Returns [T, V], or [B, T, V] (whatever
        stands behind a row's length there is meaningless). Raises ValueError before anything is written.
        """
        return self.head(self.body(ids, cache, lengths))

    def body(self, ids, cache: Cache | None = None, lengths: list[int] | None = None) -> Tensor:
        """`forward` without the output head: the final vector of each token, [T, C] or [B, T, C]."""
        ids = check_ids(ids, self.config.vocab)
        rows = (ids[None] if ids.dim() == 1 else ids).to(self.device)  # [B, T]
        B, T = rows.shape
        lengths = check_lengths(lengths, B, T)
        if cache is not None:
            check_cache(cache, self)
        past = [0] * B if cache is None else cache.lengths
        longest = max(old + new for old, new in zip(past, lengths))
        if longest > self.config.context:
            raise ValueError(f"{longest} tokens are more than this model's context window of {self.config.context}")
        if cache is not None:
            cache.reserve(lengths)

        positions = torch.tensor(past, device=self.device)[:, None] + torch.arange(T, device=self.device)  # [B, T]
        cos, sin = rope_table(positions[:, None], self.config.head_dim, self.config.rope_base)  # [B, 1, T, D]
        mask = None if cache is None else cache.mask(T)  # None: plain causal order
        x = self.embedding(rows)  # [B, T, C]
        rope = cos.to(x.dtype), sin.to(x.dtype)
        if mask is not None:  # as numbers to add to the scores: SDPA would make them anew in every layer
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, float("-inf"))
        for block in self.blocks:
            x = block(x, rope, cache, mask)
        if cache is not None:
            cache.advance(lengths)
        x = self.norm(x)
        return x[0] if ids.dim() == 1 else x


def check_model(model) -> None:
    """Is this a model? Whoever swaps two arguments hears of it in these words: a ValueError."""
    if not isinstance(model, Model):
        raise ValueError(f"model must be a model such as ll.load_pretrained() gives, not {str(model)[:40]!r}")


def check_cache(cache, model: Model) -> None:
    """Is this a cache, and this model's? Keys and values of another would be nonsense: a ValueError.

    Lesson 07 writes caches of its own: whatever answers to the names that kv_cache.py lists is one.
    """
    if isinstance(cache, type) or not hasattr(cache, "reserve"):
        raise ValueError(f"a cache is made with model.new_cache(capacity), not {cache!r}")
    if cache.model is not None and cache.model() is not model:
        raise ValueError("this cache holds keys and values of another model: use this model's new_cache")


def check_ids(ids, vocab: int) -> Tensor:
    """Token ids as an integer tensor [T] or [B, T], or a ValueError that names what is wrong."""
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if "expected sequence of length" in str(error):
            raise ValueError("the rows of ids differ in length: pad on the right and give lengths=") from None
        if "verflow" in str(error):
            raise ValueError(f"an id of {str(ids)[:40]} is outside this model's vocabulary, 0 to {vocab - 1}") from None
        raise ValueError(f"ids must be whole numbers, not {str(ids)[:40]!r}: pass what tokenizer.encode gave") from None
    if ids.numel() == 0 or ids.dim() not in (1, 2):
        raise ValueError(f"ids must be [tokens] or [batch, tokens], with at least one token, not {list(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be whole numbers, not {ids.dtype}: pass what tokenizer.encode gave")
    if ids.layout != torch.strided or ids.is_meta:
        raise ValueError("ids must be an ordinary tensor, neither sparse nor without numbers (meta)")
    ids = ids.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"id {low if low < 0 else high} is outside this model's vocabulary, 0 to {vocab - 1}")
    return ids


def check_lengths(lengths, batch: int, tokens: int) -> list[int]:
    """The true length of each row, as a list; 0 means that a row sits this call out."""
    if lengths is None:
        return [tokens] * batch
    try:
        found = [whole_number("a length", length, 0) for length in lengths]
    except (TypeError, ValueError):  # not a list, or not of whole numbers
        found = []
    if len(found) != batch or max(found) > tokens:
        raise ValueError(f"lengths must be {batch} whole numbers from 0 to {tokens}, one for each row, not {lengths!r}")
    return found
