"""What training costs, beside inference: memory for one step, and FLOPs for all of it. From a model's shape alone.

Inference keeps the weights, and a cache. Training also keeps a gradient for each weight, what the optimizer remembers
of each, and all that the backward pass will need of the forward pass, of every layer at once.
"""

from __future__ import annotations

from .capacity import Shape
from .kv_cache import whole_number


def training_memory(shape: Shape, tokens: int, batch: int = 1) -> dict[str, int]:
    """Bytes of each part in one training step on `batch` sequences of `tokens` tokens, on one device.

    Mixed precision with Adam takes 16 bytes for each parameter (Rajbhandari et al. 2020, "ZeRO", section 3.1,
    https://arxiv.org/abs/1910.02054): weights 2 and gradients 2, in 16 bits; optimizer 12, in float32: a copy of the
    weight, and the running means of its gradient and of its square, 4 each.

    Activations are what autograd keeps, counted after Korthikanti et al. 2022, section 4.1,
    https://arxiv.org/abs/2205.05198, here for a Llama layer without dropout. For each token and layer, in 16 bits: the
    inputs of both norms and their results, 4 · C; queries and the mixed values, 2 · H · D; keys and values, 2 · G · D;
    gate, up, SiLU of gate, and the product, 4 · F. Behind the layers 2 · C more, and V probabilities in float32 for the
    loss. The scores are not kept (FlashAttention). The Llama of transformers, which fuses little, keeps some 10 to 20 %
    more. Nothing is computed a second time: gradient checkpointing would trade most of this for another forward pass.
    """
    _check(shape)
    rows = whole_number("tokens", tokens) * whole_number("batch", batch)
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 4 * shape.hidden + heads + 4 * shape.ffn
    return {
        "weights": 2 * shape.parameters,
        "gradients": 2 * shape.parameters,
        "optimizer": 12 * shape.parameters,
        "activations": rows * (2 * (shape.layers * layer + 2 * shape.hidden) + 4 * shape.vocab),
    }


def training_flops(shape: Shape, tokens: int, context: int) -> int:
    """FLOPs to train on `tokens` tokens in sequences of `context` (the last one may be shorter): 3 · the forward pass.

    Behind each matrix product y = x · Wᵀ of the forward pass, the backward pass has two of the same size: the gradient
    of x, from that of y and W, and the gradient of W, from that of y and x. So 2 + 4 = 6 FLOPs for each weight and
    token, the rule C = 6 · N · D (Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361); attention over
    the context comes on top. Every token gets its logits. What Adam does, some ten operations for each weight and step,
    is left out.
    """
    _check(shape)
    whole, rest = divmod(whole_number("tokens", tokens), whole_number("context", context))
    forward = whole * shape.prefill_flops(context, all_logits=True) if whole else 0
    return 3 * (forward + (shape.prefill_flops(rest, all_logits=True) if rest else 0))


def _check(shape: Shape) -> None:
    if not isinstance(shape, Shape):
        raise ValueError(f"shape must be a Shape, such as ll.SHAPES['llama-3-8b'] or ll.Shape.of(model), not {shape!r}")
