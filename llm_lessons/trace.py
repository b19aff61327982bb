"""Look inside a forward pass: the residual stream, attention maps of any layer, and the operations it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .model import Model, check_ids, check_model, rope_table

# Operations that touch no number: they describe memory that is already there anew.
VIEWS = frozenset("alias as_strided chunk detach detach_ diagonal expand permute reshape select slice split "
                  "split_with_sizes squeeze squeeze_ t t_ transpose transpose_ unbind unflatten unfold unsqueeze "
                  "unsqueeze_ view view_as_complex view_as_real _unsafe_view".split())


@dataclass
class Trace:
    """What `trace` saw. `logits` [T, V]; `hidden[0]` the embedding, `hidden[l]` [T, C] after l layers."""

    logits: Tensor
    hidden: list[Tensor]
    _model: Model = field(repr=False)
    _rope: tuple[Tensor, Tensor] = field(repr=False)

    @torch.no_grad()
    def attention(self, layer: int) -> Tensor:
        """Attention weights of one layer, from 0 on: [H, T, T], each row a query, summing to 1. Computed when asked."""
        if isinstance(layer, bool) or layer not in range(len(self._model.blocks)):
            raise ValueError(f"there is no layer {layer!r}: this model has layers 0 to {len(self._model.blocks) - 1}")
        layer = int(layer)
        block = self._model.blocks[layer]
        q, k, _ = block.attention.project(block.attention_norm(self.hidden[layer][None]), self._rope)  # [1, H|G, T, D]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # the neighbours of a group see the same keys
        scores = (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5  # [1, H, T, T]
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1)[0]


@torch.no_grad()
def trace(model: Model, ids) -> Trace:
    """Run a prompt [T] and keep every layer's output: layers · T · hidden numbers, 18 MB for 250 tokens here."""
    check_model(model)
    ids = check_ids(ids, model.config.vocab)
    if ids.dim() != 1 or len(ids) > model.config.context:
        raise ValueError(f"trace takes one prompt of at most {model.config.context} tokens, not {list(ids.shape)}")
    x = model.embedding(ids.to(model.device)[None])  # [1, T, C]
    cos, sin = rope_table(torch.arange(len(ids), device=model.device), model.config.head_dim, model.config.rope_base)
    rope = cos.to(x.dtype), sin.to(x.dtype)
    hidden = [x[0]]
    for block in model.blocks:
        x = block(x, rope, None, None)
        hidden.append(x[0])
    return Trace(model.head(model.norm(x[0])), hidden, model, rope)


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """The operations that torch carries out during run(), name -> how many: those that compute or copy, and the views.

    What other threads do meanwhile is not counted.
    A name may differ from machine to machine: a layer's product is `linear` on one, `_linear_pointwise` on another.
    """
    if not callable(run):
        raise ValueError(f"run must be a function without arguments, not {run!r}")
    with _Watch() as watch:
        run()
    working = Counter({name: count for name, count in watch.seen.items() if name not in VIEWS})
    return working, watch.seen - working
