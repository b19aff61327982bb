"""Lesson 05: the FLOPs of a prompt, arithmetic intensity, the roofline's least time, and a prompt read in chunks."""

from __future__ import annotations

import torch

from ...capacity import SHAPES
from ...kv_cache import KVCache
from ...model import Model, ModelConfig
from .core import Wrong, as_tensor, compare, exercise

SMALL = {"layers": 2, "hidden": 26, "heads": 6, "kv_heads": 2, "head_dim": 2, "ffn": 17, "vocab": 50}
SMOLLM2 = {name: getattr(SHAPES["smollm2-135m"], name) for name in SMALL}


def _flops(shape: dict, tokens: int, *, kv: float | None = None, output: int = 1, ffn: int = 3, scores: int = 4,
           attend: int | None = None, pairs: float | None = None, layers: int | None = None, logits: float = 1,
           width: int | None = None) -> float:
    """FLOPs of a prefill: 2 for each weight and token, 4 · H · D for each pair, 2 · V · C for the head.

    Each keyword puts one mistake in the place of one part.
    """
    C, H, G, D, V = (shape[name] for name in ("hidden", "heads", "kv_heads", "head_dim", "vocab"))
    pairs = tokens * (tokens + 1) / 2 if pairs is None else pairs
    block = (1 + output) * C * (width or H * D) + 2 * C * (kv or G) * D + ffn * C * shape["ffn"]
    attention = scores * (attend or H) * D * pairs
    return (layers or shape["layers"]) * (2 * tokens * block + attention) + 2 * logits * V * C


@exercise
def prefill_flops(answer) -> None:
    """`answer(shape, tokens)`: every matrix of every layer, the causal pairs of attention, the head for one token."""
    for shape, T in ((SMALL, 4), (SMALL, 1), (SMOLLM2, 512)):
        L, C, H, G, V = (shape[name] for name in ("layers", "hidden", "heads", "kv_heads", "vocab"))
        want = _flops(shape, T)
        all_logits, none = _flops(shape, T, logits=T), _flops(shape, T, logits=0)
        compare(answer(shape, T), want, f"for {T} {'token' if T == 1 else 'tokens'} and {shape} the count", {
            "you counted a multiplication and its addition as one: a weight costs 2 FLOPs for each token":
                want / 2,
            "you counted the head for every token; only the last token's logits are needed": all_logits,
            "the head is missing: 2 · hidden · vocab, for the last token": none,
            "the head stands once behind the layers, not in each of them": _flops(shape, T, logits=L),
            "you counted the embedding as a matrix product; it is a lookup":
                _flops(shape, T, logits=T + 1),
            f"k and v have {G} heads here, not {H}: heads share them (grouped-query attention)":
                _flops(shape, T, kv=H),
            "k and v are two matrices; one of them is missing": _flops(shape, T, kv=G / 2),
            f"a head has head_dim = {shape['head_dim']} numbers, which need not be hidden / heads":
                _flops({**shape, "head_dim": C // H}, T),
            "the output matrix of attention is missing": _flops(shape, T, output=0),
            "the feed-forward part has three matrices (gate, up, down); you counted two":
                _flops(shape, T, ffn=2),
            "attention itself is missing: comparing queries with keys, and mixing values":
                _flops(shape, T, scores=0),
            "attention itself is missing, and the head counts for the last token only (the rule of thumb is not exact)":
                _flops(shape, T, scores=0, logits=T),
            "attention does two things for each pair, 2 FLOPs a number each: it compares, and it mixes. You counted "
            "one of them": _flops(shape, T, scores=2),
            f"each of the {H} query heads does its own comparing and mixing; you counted {G}":
                _flops(shape, T, attend=G),
            "you counted all T · T pairs; the causal mask lets T · (T + 1) / 2 through":
                _flops(shape, T, pairs=T * T),
            "you counted T · (T - 1) / 2 pairs; a token may look at itself, too: T · (T + 1) / 2":
                _flops(shape, T, pairs=T * (T - 1) / 2),
            "half of T · T cuts the diagonal in half; the causal mask lets T · (T + 1) / 2 pairs through":
                _flops(shape, T, pairs=T * T / 2),
            "you counted one layer": _flops(shape, T, layers=1),
            "heads · head_dim need not be hidden; q leads from hidden to heads · head_dim, and output back":
                _flops(shape, T, width=C),
            "these are GFLOP: return FLOP": want / 1e9,
        }, tolerance=1e-6)


@exercise
def intensity(answer) -> None:
    """`answer(inputs, outputs, tokens, width)`: FLOPs of the product for each byte of weights, inputs and outputs."""
    for inputs, outputs, tokens, width in ((8, 4, 1, 4), (8, 4, 16, 4), (4096, 14336, 64, 2), (576, 192, 512, 0.5)):
        flops, weights = 2 * tokens * inputs * outputs, inputs * outputs
        numbers = weights + tokens * (inputs + outputs)
        want = flops / (width * numbers)
        what = (f"for {inputs} inputs, {outputs} outputs, {tokens} {'token' if tokens == 1 else 'tokens'} and {width} "
                f"bytes a number, the intensity")
        compare(answer(inputs, outputs, tokens, width), want, what, {
            "this is bytes per FLOP: turn it round": 1 / want,
            "a multiplication and an addition are 2 FLOPs": want / 2,
            "this is FLOPs for each number, not for each byte: a number takes `width` bytes": flops / numbers,
            "you took `width` for bits; it is in bytes": want / 8,
            "you took `width` for bits; it is in bytes, so do not divide it by 8": want * 8,
            "only the weights are counted; the inputs are read, and the outputs written":
                flops / (width * weights),
            "the outputs are missing: they are written": flops / (width * (weights + tokens * inputs)),
            "the inputs are missing: they are read": flops / (width * (weights + tokens * outputs)),
            "inputs and outputs are there for every token": flops / (width * (weights + inputs + outputs)),
            "the weights are read once for all tokens together, not once for each":
                flops / (width * tokens * (weights + inputs + outputs)),
            "the FLOPs of one token only: each token meets each weight": want / tokens,
            "these are the FLOPs; divide them by the bytes": flops,
            "these are the bytes": width * numbers,
        }, tolerance=1e-6)


@exercise
def least_time(answer) -> None:
    """`answer(flops, nbytes, peak, bandwidth)`: the longer of the two times, in seconds."""
    cases = ((6e9, 2e9, 1e11, 2e10), (6e12, 2e9, 1e11, 2e10), (10, 10, 5, 2), (12, 4, 4, 2), (0, 8, 4, 2))
    said = [f"for {flops:g} FLOP, {nbytes:g} bytes, {peak:g} FLOP/s and {bandwidth:g} bytes/s the least time"
            for flops, nbytes, peak, bandwidth in cases]
    pairs = [(flops / peak, nbytes / bandwidth) for flops, nbytes, peak, bandwidth in cases]
    first = [float(as_tensor(answer(*case), what).mean()) for case, what in zip(cases[:2], said)]
    for words, choose in (("arithmetic's time alone, also where the memory takes longer", lambda pair: pair[0]),
                          ("memory's time alone, also where the arithmetic takes longer", lambda pair: pair[1])):
        if torch.allclose(torch.tensor(first), torch.tensor([choose(pair) for pair in pairs[:2]])):
            raise Wrong(f"you return the {words}: both must be over, so the longer one decides")
    for case, what, (arithmetic, memory) in zip(cases, said, pairs):
        flops, nbytes, peak, bandwidth = case
        mistakes = {
            "you added the two; a machine calculates and loads at the same time, so the longer one decides":
                arithmetic + memory,
            "you took the shorter time; both must be over, so the longer one decides": min(arithmetic, memory),
            "the limits are swapped: FLOPs go by peak, bytes by bandwidth": max(flops / bandwidth, nbytes / peak),
            "you took the mean; the longer time decides": (arithmetic + memory) / 2,
            "this is in milliseconds; return seconds": 1e3 * max(arithmetic, memory)}
        if flops:
            mistakes["amount divided by rate gives a time; you divided the rate by the amount"] = \
                max(peak / flops, bandwidth / nbytes)
        compare(answer(*case), max(arithmetic, memory), what, mistakes, tolerance=1e-6)


class _SmallModel(Model):
    def __repr__(self) -> str:
        return "a small model"


class _NotingCache(KVCache):
    """A cache that notes how many tokens each pass of the model added."""

    def __init__(self, *shape, **settings):
        super().__init__(*shape, **settings)
        self.pieces: list[int] = []

    def advance(self, new) -> None:
        before = self.length
        super().advance(new)
        self.pieces.append(self.length - before)

    def __repr__(self) -> str:
        return "an empty cache"


def _small_model() -> Model:
    config = ModelConfig(layers=2, hidden=12, heads=3, kv_heads=1, head_dim=4, ffn=16, vocab=20, context=64)
    model = _SmallModel.random(config)
    for name, weight in model.named_parameters():
        if "norm" not in name and "head" not in name:  # a tied head is named once, as the embedding
            weight.mul_(20)  # so that every token counts
    return model


@exercise
def prefill_in_chunks(answer) -> None:
    """`answer(model, ids, cache, chunk)`: every id into the cache, at most `chunk` in a pass -> the last logits."""
    model = _small_model()
    for length, chunk in ((7, 3), (8, 4), (3, 5), (4, 1), (9, 8)):
        ids = [(7 * i + 3) % 20 for i in range(length)]
        cache, said = model.new_cache(64, kind=_NotingCache), f"for {length} tokens in chunks of {chunk}"
        got = answer(model, ids, cache, chunk)
        passes = len(range(0, length, chunk))
        if not cache.pieces:
            raise Wrong(f"{said} nothing was written into the cache you were given: pass it with every piece, "
                        f"model(piece, cache)")
        if cache.length > length:
            raise Wrong(f"{said} the cache holds {cache.length} tokens in the end: each pass adds its tokens to those "
                        f"that are there, so hand over the new ones only")
        if max(cache.pieces) > chunk:
            raise Wrong(f"{said} the model was handed {max(cache.pieces)} tokens at once")
        if cache.length < length:
            raise Wrong(f"{said} only {cache.length} of them are in the cache in the end. Is the last piece, which "
                        f"may be shorter than the others, read? Is the cache kept from piece to piece?")
        if len(cache.pieces) > passes:
            raise Wrong(f"{said} the model was called {len(cache.pieces)} times, and {passes} are enough")
        logits, rest = as_tensor(got, f"{said} the result"), cache.pieces[-1]
        if rest > 1 and list(logits.shape[-2:]) == [rest, 20]:
            raise Wrong(f"{said} the result has logits for every token of the last piece; return the last row")
        if logits.numel() == 1:
            raise Wrong(f"{said} the result is one number; return the logits of the last token, one for each of the "
                        f"20 tokens of the vocabulary")
        compare(got, model(ids)[-1], f"{said} the result", {
            "these are the logits after the first piece; the last token's are wanted": model(ids[:chunk])[-1],
            "these are the logits of the last piece read on its own, without what came before":
                model(ids[length - rest:])[-1],
            "these are the logits of the last piece's first token; its last one's are wanted":
                model(ids[:length - rest + 1])[-1],
        }, tolerance=1e-3)
