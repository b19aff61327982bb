"""Lesson 06: what a decode step reads, how fast memory lets it be, where it stands, and what a missing cache costs."""

from __future__ import annotations

import torch

from ...capacity import SHAPES, Shape
from ...model import ModelConfig
from .core import Wrong, compare, exercise

# The course's model; one with an output head of its own; one of a size that nobody knows by heart.
CONFIGS = {
    "SmolLM2-135M": ModelConfig(30, 576, 9, 3, 64, 1536, 49152, 8192),
    "Llama-3-8B (its head is not the embedding table)": ModelConfig(32, 4096, 32, 8, 128, 14336, 128256, 8192, False),
    "a small model (2 layers, 6 query heads, 2 key/value heads)": ModelConfig(2, 64, 6, 2, 16, 104, 500, 4096),
}


def _bytes(c: ModelConfig, context: int, width: float, *, table: float = 1, up: int = 3, kv_heads: int | None = None,
           kv_matrices: int | None = None, kinds: int = 2, layers: int | None = None, output: int = 1,
           columns: int | None = None) -> float:
    """Bytes of a decode step, right or with a mistake: `table` counts V x C, `up` the matrices of the ffn.

    `output` counts the output matrix of attention, and `columns` are those of its and the queries' matrix.
    """
    kv_columns = 2 * (c.kv_heads if kv_matrices is None else kv_matrices) * c.head_dim
    layer = c.hidden * ((1 + output) * (columns or c.heads * c.head_dim) + kv_columns + up * c.ffn)
    cache = kinds * (c.layers if layers is None else layers) * (kv_heads or c.kv_heads) * c.head_dim * context
    return (c.layers * layer + table * c.vocab * c.hidden + cache) * width


@exercise
def bytes_per_step(answer) -> None:
    """`answer(config, context, bytes_per_value)` -> bytes that one decode step reads: weights once, and the cache."""
    for name, c in CONFIGS.items():
        for context, width in ((4096, 2), (2048, 4)):
            want = _bytes(c, context, width)
            twice = "the embedding table is counted twice: it is the output head, which is read once" if c.tied else \
                "the whole embedding table is counted: a step looks up one row of it. Only the head is read whole"
            compare(answer(c, context, width), want, f"for {name}, a context of {context}, {width} bytes a value, the "
                    f"result", {
                twice: _bytes(c, context, width, table=2),
                "the output head is missing: vocab x hidden numbers, also when it is the embedding table":
                    _bytes(c, context, width, table=0),
                "the cache is counted for the query heads; it holds keys and values of the kv_heads only":
                    _bytes(c, context, width, kv_heads=c.heads),
                "the cache holds keys and values: 2 numbers where you count 1": _bytes(c, context, width, kinds=1),
                "the cache is missing": _bytes(c, 0, width),
                "the weights are missing": _bytes(c, context, width) - _bytes(c, 0, width),
                "the cache of one layer is counted; every layer has its own": _bytes(c, context, width, layers=1),
                "the key and value matrices have kv_heads x head_dim rows each, fewer than the queries'":
                    _bytes(c, context, width, kv_matrices=c.heads),
                "the feed-forward part has three matrices: gate, up and down": _bytes(c, context, width, up=2),
                "queries and output are two matrices; one of them is missing": _bytes(c, context, width, output=0),
                "heads x head_dim need not be hidden: take it for the queries and the output":
                    _bytes(c, context, width, columns=c.hidden),
                "these are numbers, not bytes: multiply by bytes_per_value": want / width,
                "these are the operations, 2 for each number; asked are the bytes": 2 * want / width,
                "these are bits: a byte has 8": 8 * want,
                "these are MB: return bytes": want / 1e6,
            }, tolerance=2e-3)  # norms, the new token's own row and key: far less than this


@exercise
def ceiling(answer) -> None:
    """`answer(weight_bytes, cache_bytes, batch, bandwidth)` -> tokens per second that memory allows at most, in all."""
    for weights, cache, batch, bandwidth in ((8e9, 2e9, 1, 100e9), (8e9, 2e9, 16, 100e9), (0.5e9, 0.1e9, 4, 20e9)):
        step = (weights + batch * cache) / bandwidth
        what = f"for {weights / 1e9:g} GB of weights, {cache / 1e9:g} GB of cache for each request, {batch} " \
               f"request{'s' * (batch > 1)}, {bandwidth / 1e9:g} GB/s, the result"
        compare(answer(weights, cache, batch, bandwidth), batch / step, what, {
            "these are the seconds of one step; asked are tokens per second": step,
            "these are the milliseconds of one step; asked are tokens per second": 1e3 * step,
            "these are seconds per token; asked are tokens per second": step / batch,
            "the cache is missing": batch * bandwidth / weights,
            "these are the steps in a second; each step writes a token for every request": 1 / step,
            "the weights are read once for all requests of a step, not once for each":
                bandwidth / (weights + cache),
            "every request has a cache of its own: a step reads batch times cache_bytes":
                batch * bandwidth / (weights + cache),
            "the requests share the weights; the cache is not shared":
                batch * bandwidth / (weights + cache / batch),
        }, tolerance=1e-6)


@exercise
def positions(answer) -> None:
    """`answer(prompt_length, steps)` -> the positions of the tokens that go in at decode steps 0, 1, 2, ..."""
    for prompt, steps in ((6, 4), (1, 3), (35, 8), (6, 1)):
        def run(start: int, count: int = steps) -> torch.Tensor:
            return torch.arange(start, start + count, dtype=torch.float64)

        right = run(prompt)
        compare(answer(prompt, steps), right, f"for a prompt of {prompt} tokens and {steps} "
                f"step{'s' * (steps > 1)}, the list", {
            "these are the numbers of the steps; the prompt comes before them": run(0),
            "these are the numbers of the steps, from 1; the prompt comes before them": run(1),
            f"it begins one too late: positions count from 0, so the prompt fills 0 to {prompt - 1}": run(prompt + 1),
            f"it begins one too early: {prompt - 1} is the position of the prompt's last token": run(prompt - 1),
            "the prompt's length is added twice after the first step": torch.cat([right[:1], right[1:] + prompt]),
            "the prompt's length is added twice": right + prompt,
            "the position must grow by 1 at every step": right[:1].repeat(steps),
            "the prompt's own positions are in it; only the new tokens are asked for": run(0, prompt + steps),
        })


def _recomputed(shape: Shape, prompt: int, new: int, first: int = 0, **how) -> float:
    return sum(shape.prefill_flops(prompt + i, **how) for i in range(first, new + first))


@exercise
def recompute_flops(answer) -> None:
    """`answer(shape, prompt, new)` -> FLOPs of writing `new` tokens behind a prompt when every step runs all of it."""
    for name in ("smollm2-135m", "llama-3-8b"):
        shape = SHAPES[name]
        for prompt, new in ((100, 3), (100, 1), (32, 64)):
            once, last = shape.prefill_flops(prompt), shape.prefill_flops(prompt + new - 1)
            with_cache = once + sum(shape.flops_per_token(prompt + i) for i in range(1, new))
            case = f"for {name}, a prompt of {prompt} tokens and {new} new one{'s' * (new > 1)}, the result"
            try:
                got = answer(shape, prompt, new)
            except Wrong as wrong:
                if "tokens must be a whole number of at least 1, not 0" in str(wrong):
                    raise Wrong(f"{case}: the prompt is missing, so your first pass has no tokens") from None
                raise
            compare(got, _recomputed(shape, prompt, new), case, {
                "every step is counted like the first; the text grows by one token at each": new * once,
                "it begins one token too late: the first new token is computed from the prompt alone":
                    _recomputed(shape, prompt, new, first=1),
                "only the last pass is counted; each token costs a pass of its own": last,
                "this is a single pass over the whole text; every new token needs one":
                    shape.prefill_flops(prompt + new),
                "the prompt is missing: every pass runs over it, too": _recomputed(shape, 0, new, first=1),
                "one pass too many: the pass over the whole text would give one token more":
                    _recomputed(shape, prompt, new + 1),
                "this is the work with a cache: prefill once, then one token at a time": with_cache,
                "only the new tokens are counted; without a cache a pass runs over the prompt, too":
                    sum(shape.flops_per_token(prompt + i) for i in range(new)),
                "logits for every token are counted; only the last row is needed":
                    _recomputed(shape, prompt, new, all_logits=True),
                "pairs that the mask forbids are counted: leave causal as it is":
                    _recomputed(shape, prompt, new, causal=False),
            }, tolerance=1e-6)
