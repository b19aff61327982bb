"""Serving without computing: the engine itself, over a model that only knows how long its calls take.

    cost = ll.CostModel.measure(model)  # or RooflineCost(shape, roofline), for a GPU that is not here
    engine = ll.simulated_engine(cost, max_batch=8)
    report = ll.Report.of(ll.serve(engine, load))

The scheduler, the blocks and the queue are those of the real `Engine`, line by line. Each call of the stand-in model
moves a clock on by what the cost says, and nobody waits: minutes of traffic take seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .batching import Engine
from .capacity import Shape, _is_number, _width, roofline_time
from .generate import prefill
from .kv_cache import Cache, whole_number
from .model import Model, ModelConfig
from .paged_cache import BlockPool, PagedCache
from .sampling import Sampler
from .timing import Roofline, stopwatch

# The calls that `measure` times, ROUNDS times each.
DECODES = [(rows, context) for rows in (1, 2, 4, 8) for context in (16, 128, 512)]  # cached tokens of each row
PROMPTS = [(16, 0), (64, 0), (160, 0), (512, 0), (32, 512), (128, 512)]  # new tokens, and those before them
ROUNDS = 3


class Cost(Protocol):
    """How long a call of a model takes, in seconds."""

    def decode(self, rows: int, cached: int) -> float:
        """A token for each of `rows` sequences, of which `cached` tokens are known in all."""

    def prefill(self, tokens: int, past: int) -> float:
        """`tokens` of one prompt, behind `past` cached ones."""


class Call(NamedTuple):
    """A call of a model that was timed: `kind` "decode", with rows and cached tokens in all; or "prefill", with new
    tokens and those before them."""

    kind: str
    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """Seconds for a call, as sums with six coefficients:

    decode:  decode_call + decode_row · rows + decode_cached · cached
    prefill: prefill_call + prefill_token · tokens + prefill_pair · pairs of a new token and one that it sees,
             tokens · past + tokens · (tokens + 1) / 2

    `calls` are the timed calls that they were fitted to.
    """

    decode_call: float
    decode_row: float = 0.0
    decode_cached: float = 0.0
    prefill_call: float = 0.0
    prefill_token: float = 0.0
    prefill_pair: float = 0.0
    calls: tuple[Call, ...] = ()

    def __post_init__(self):
        for name in [field.name for field in fields(self)][:6]:
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be a number of seconds of at least 0, not {getattr(self, name)!r}")

    def decode(self, rows: int, cached: int) -> float:
        return self.decode_call + self.decode_row * rows + self.decode_cached * cached

    def prefill(self, tokens: int, past: int = 0) -> float:
        return self.prefill_call + self.prefill_token * tokens + self.prefill_pair * _pairs(tokens, past)

    @property
    def errors(self) -> list[float]:
        """How far the sums are off, for each of `calls`: 0.1 is 10 % too much."""
        return [getattr(self, call.kind)(call.tokens, call.cached) / call.seconds - 1 for call in self.calls]

    @classmethod
    def fit(cls, calls: Iterable[Call]) -> CostModel:
        """The coefficients, none below 0, with the least squares of the relative errors."""
        calls = tuple(calls)
        coefficients: list[float] = []
        for kind, terms in (("decode", lambda call: (1, call.tokens, call.cached)),
                            ("prefill", lambda call: (1, call.tokens, _pairs(call.tokens, call.cached)))):
            of_kind = [call for call in calls if call.kind == kind]
            if len(of_kind) < 3:
                raise ValueError(f"three coefficients need at least 3 timed {kind} calls, not {len(of_kind)}")
            if bad := [call for call in of_kind if not _is_number(call.seconds) or call.seconds <= 0]:
                raise ValueError(f"a call takes a number of seconds above 0: not {bad[0]}")
            coefficients += _least_squares([terms(call) for call in of_kind], [call.seconds for call in of_kind])
        return cls(*coefficients, calls)

    @classmethod
    def measure(cls, model: Model) -> CostModel:
        """Time a few dozen calls of a model as the engine makes them, and fit. Takes seconds.

        A machine is faster now and slower then: to compare with a run of the engine, measure before and after it, and
        take `CostModel.fit(before.calls + after.calls)`.
        """
        return cls.fit(_timed_calls(model))


def _pairs(tokens: int, past: int) -> int:
    return tokens * past + tokens * (tokens + 1) // 2


def _least_squares(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 that make terms · coefficients / seconds as near to 1 as can be.

    Every choice of terms that may stay is tried, and the best one that needs no coefficient below 0 is taken: for
    three terms that is the simplest exact way.
    """
    target = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(terms, dtype=torch.float64) / target[:, None]  # [calls, terms]
    scale = matrix.amax(0).clamp_min(1e-300)  # of very different sizes otherwise
    best, least = torch.zeros(len(scale), dtype=torch.float64), math.inf
    for choice in range(1, 2 ** len(scale)):
        kept = [term for term in range(len(scale)) if choice >> term & 1]
        found = torch.linalg.lstsq(matrix[:, kept] / scale[kept], torch.ones_like(target)[:, None]).solution[:, 0]
        error = float(((matrix[:, kept] / scale[kept]) @ found - 1).square().sum())
        if float(found.min()) >= 0 and error < least:
            best, least = torch.zeros_like(best), error
            best[kept] = found / scale[kept]
    return best.tolist()


def _timed_calls(model: Model) -> Iterator[Call]:
    """Time calls as the engine makes them, sampling included; of the cached tokens only their number matters.

    Each round makes every call once, so that a busy moment of the machine meets all alike. The mean counts, not the
    median: what disturbs a call now and then is a part of what it costs.
    """
    room = model.config.context
    work = [(_decode_seconds, rows, min(context, room - 2)) for rows, context in DECODES]
    work += [(_prefill_seconds, min(tokens, room // 2), min(past, room // 2)) for tokens, past in PROMPTS]
    pool = BlockPool.of(model, max(rows * (context // 16 + 2) for rows, context in DECODES))
    _decode_seconds(model, pool, 2, 1), _prefill_seconds(model, pool, 2, 1)  # to warm up
    rounds = [[measure(model, pool, *sizes) for measure, *sizes in work] for _ in range(ROUNDS)]
    for (measure, tokens, cached), *times in zip(work, *rounds):
        seconds = statistics.mean(times)
        if measure is _decode_seconds:
            yield Call("decode", tokens, sum(_lengths(tokens, cached)), seconds)
        else:
            yield Call("prefill", tokens, cached, seconds)


def _lengths(rows: int, context: int) -> list[int]:
    """Not quite alike, as in most batches: rows of one length need no mask, and are faster."""
    return [context + row % 2 for row in range(rows)]


def _decode_seconds(model: Model, pool: BlockPool, rows: int, context: int) -> float:
    cache = model.new_cache(model.config.context, rows, kind=PagedCache, pool=pool)
    cache.advance(_lengths(rows, context))

    def call():
        with torch.inference_mode():
            logits = model(torch.zeros(rows, 1, dtype=torch.long), cache)[:, 0]
        for row in logits.clone():
            _sample(row)

    seconds = stopwatch(call, model.device, runs=1, warmup=0).median
    cache.close()
    return seconds


def _prefill_seconds(model: Model, pool: BlockPool, tokens: int, past: int) -> float:
    cache = model.new_cache(model.config.context, kind=PagedCache, pool=pool)
    cache.advance(past)
    ids = torch.zeros(tokens, dtype=torch.long)
    seconds = stopwatch(lambda: _sample(prefill(model, ids, cache)), model.device, runs=1, warmup=0).median
    cache.close()
    return seconds


def _sample(logits: Tensor) -> None:
    """What the engine does with the logits of a row."""
    bool(torch.isfinite(logits).all())
    Sampler()(logits, [])


@dataclass(frozen=True)
class RooflineCost:
    """The least that a call of a model of this `shape` can take on a device: capacity.roofline_time, for each call.

    Real servers need more: by how much is the question. `roofline.flops_per_second` must have the `dtype`.
    """

    shape: Shape
    roofline: Roofline
    dtype: str = "bfloat16"
    bytes_per_weight: float = 2
    bytes_per_value: float = 2  # of the KV cache

    def __post_init__(self):
        for name in ("bytes_per_weight", "bytes_per_value"):
            _width(name, getattr(self, name))
        self.prefill(1)  # refuses a roofline that makes no sense

    def decode(self, rows: int, cached: int) -> float:
        """The weights are read once, the cache of each row is read; each row attends to its cache and to itself."""
        shape = self.shape
        flops = (rows - 1) * shape.flops_per_token(1) + shape.flops_per_token(cached + 1)
        nbytes = shape.bytes_per_token(cached + rows, 1, self.bytes_per_weight, self.bytes_per_value)
        return roofline_time(flops, nbytes, self.roofline, self.dtype)

    def prefill(self, tokens: int, past: int = 0) -> float:
        nbytes = self.shape.prefill_bytes(tokens, past, self.bytes_per_weight, self.bytes_per_value)
        return roofline_time(self.shape.prefill_flops(tokens, past), nbytes, self.roofline, self.dtype)


class VirtualClock:
    """A clock that only moves when it is told to: `clock()` gives the time, `clock.sleep(seconds)` lets it pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if not seconds >= 0:  # also NaN: with it nothing would ever be due
            raise ValueError(f"time cannot pass by {seconds!r} seconds")
        self.now += seconds


class StandIn(Model):
    """A model that computes nothing: each call lets the clock run on by its cost, and the next token is always 0."""

    def __init__(self, cost: Cost, clock: VirtualClock, context: int, vocab: int = 256):
        super().__init__(ModelConfig(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=vocab,
                                     context=context))
        self.cost, self.clock = cost, clock
        self.head = nn.Identity()
        self._logits = torch.zeros(vocab)

    def body(self, ids, cache: Cache, lengths: list[int] | None = None) -> Tensor:
        """`Model.body`, except that it returns logits already."""
        cached, new = sum(cache.lengths), ids.shape[-1]
        cache.advance([new] * len(cache.lengths))
        if ids.dim() == 2:  # the engine decodes: [rows, 1]
            self.clock.sleep(self.cost.decode(len(cache.lengths), cached))
        else:
            self.clock.sleep(self.cost.prefill(new, cached))
        return self._logits.expand(*ids.shape, -1)


def simulated_engine(cost: Cost, context: int = 8192, **options) -> Engine:
    """An engine like any other, in which a call of the model takes `cost` seconds of virtual time, and no real ones.

    `options` are those of `Engine`; `context` is the model's window. Its ids are 0 to 255.
    """
    clock = VirtualClock()
    return Engine(StandIn(cost, clock, whole_number("context", context)), clock=clock, **options)
