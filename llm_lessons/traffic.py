"""Traffic: requests that come when they like, for an engine that serves them, and what they had to wait.

    load = ll.arrivals(ll.SCENARIOS["chat"].scaled(1 / 8), rate=2, count=20)
    report = ll.Report.of(ll.serve(engine, load))
    print(report.tokens_per_second, report.ttft.p50, report.tpot.p50, report.within(ttft=0.5, tpot=0.1))

The load is open: a request comes at its time, however many are waiting. A load generator that sends the next request
when it has the last answer slows down with the server, and never sees a queue. The same happens on a small scale when
latency is counted from the moment at which a busy generator got round to sending: "coordinated omission" (Tene,
https://github.com/giltene/wrk2). `serve` counts from the moment at which the request was due.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .batching import Engine
from .capacity import _is_number
from .kv_cache import whole_number
from .model import check_ids
from .request import Request


@dataclass(frozen=True)
class Scenario:
    """What the requests of one use look like: median lengths of `prompt` and `answer`, in tokens.

    Lengths are log-normal: their logarithm is normal with standard deviation `spread`. A longer one than
    `longest_prompt` or `longest_answer` is cut.
    """

    name: str
    prompt: int
    answer: int
    spread: float
    longest_prompt: int
    longest_answer: int

    def __post_init__(self):
        for name in ("prompt", "answer", "longest_prompt", "longest_answer"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if not _is_number(self.spread) or self.spread < 0:
            raise ValueError(f"spread must be a number of at least 0, not {self.spread!r}")

    def scaled(self, share: float) -> Scenario:
        """The same with all lengths times `share`, for a machine that is that much slower: 1 / 8."""
        if not _is_number(share) or share <= 0:
            raise ValueError(f"share must be a number above 0, not {share!r}")
        lengths = (self.prompt, self.answer, self.longest_prompt, self.longest_answer)
        prompt, answer, *longest = (max(1, round(length * share)) for length in lengths)
        return Scenario(self.name, prompt, answer, self.spread, *longest)

    def _lengths(self, die: random.Random) -> tuple[int, int]:
        prompt, answer = (median * math.exp(die.normalvariate(0, self.spread)) for median in (self.prompt, self.answer))
        return (min(max(1, round(prompt)), self.longest_prompt), min(max(1, round(answer)), self.longest_answer))


class _Scenarios(dict):
    def __missing__(self, name):
        raise ValueError(f"no scenario named {name!r} here, only {', '.join(self)}: write Scenario(…) for another")


# Medians, and the longest as the 99th percentile, of recorded traffic. `spread`: between the standard deviations of the
# logarithm of the two lengths, which are given behind. The log-normal shape is ours: the records have several humps.
SCENARIOS = _Scenarios({scenario.name: scenario for scenario in (
    # 19,366 conversations of one day of 2023 on Azure; 0.99 and 0.86.
    # https://github.com/Azure/AzurePublicDataset/blob/master/data/AzureLLMInferenceTrace_conv.csv
    Scenario("chat", prompt=1020, answer=129, spread=0.9, longest_prompt=4142, longest_answer=601),
    # 28,257 scientific papers that are to be summarized, those of up to 4,096 tokens in all; 0.75 and 0.80.
    # https://github.com/microsoft/vidur/tree/main/data/processed_traces (arxiv_summarization_…_v2.csv)
    Scenario("long document", prompt=2730, answer=167, spread=0.8, longest_prompt=3933, longest_answer=3270),
    # 8,819 completions of code on the same day on Azure; 1.36 and 0.85.
    # https://github.com/Azure/AzurePublicDataset/blob/master/data/AzureLLMInferenceTrace_code.csv
    Scenario("code completion", prompt=1469, answer=13, spread=1.1, longest_prompt=7436, longest_answer=249),
)})


@dataclass(frozen=True)
class Arrival:
    """One request of a load: when it is due, in seconds after the start, and how many tokens it has."""

    at: float
    prompt: int
    answer: int

    def __post_init__(self):
        if not _is_number(self.at) or self.at < 0:
            raise ValueError(f"a request arrives at a number of seconds of at least 0, not {self.at!r}")
        for name in ("prompt", "answer"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))


def arrivals(scenario: Scenario, rate: float, count: int, seed: int = 0) -> list[Arrival]:
    """`count` requests that come at random, `rate` of them a second on average: a Poisson process.

    The gaps between them are independent and exponential, of mean 1 / rate: many users who know nothing of each other.
    The same seed with another rate gives the same requests with all gaps stretched alike; with a larger count, more of
    them behind.
    """
    if not isinstance(scenario, Scenario):
        raise ValueError(f"scenario must be one such as ll.SCENARIOS['chat'], not {scenario!r}")
    if not _is_number(rate) or rate <= 0:
        raise ValueError(f"rate must be a number of requests per second above 0, not {rate!r}")
    die, now, load = random.Random(whole_number("seed", seed, 0)), 0.0, []
    for _ in range(whole_number("count", count)):
        now += die.expovariate(1.0)
        load.append(Arrival(now / rate, *scenario._lengths(die)))
    return load


def serve(engine: Engine, arrivals: Sequence[Arrival], ids=None) -> list[Request]:
    """Submit each request when its time has come, and step the engine until all have their answers -> the requests.

    Their `submitted` is the time at which they were due, also when a step of the engine was under way then. Answers
    have exactly their length: there are no stop ids. Prompts are random ids, or pieces of the text `ids` [tokens], each
    from another place. Each request is a tenant of its own, so that none finds its prompt read already, in this call or
    an earlier one. When nothing is to be done, `serve` sleeps; a clock that is not the time of day has a
    `sleep(seconds)` for that.

    Raises ValueError, with nothing started, when a request does not fit the engine.
    """
    load = sorted(arrivals, key=lambda arrival: arrival.at)
    if engine.running or engine.waiting:
        raise ValueError("the engine still has requests of its own: run() it first, or make another one")
    for number, arrival in enumerate(load):
        if arrival.prompt + arrival.answer - 1 > engine.room:  # the last token needs no place
            raise ValueError(f"request {number} does not fit: {arrival.prompt} + {arrival.answer} tokens, and the "
                             f"engine has room for {engine.room} of one request. Make it with more kv_blocks (and a "
                             f"model with a larger context window), or shorten the load: scenario.scaled(1 / 8)")
    prompts = _prompts(load, engine.model.config.vocab, ids)
    sleep, start = getattr(engine.clock, "sleep", time.sleep), engine.clock()
    requests: list[Request] = []
    while len(requests) < len(load) or engine.running or engine.waiting:
        while len(requests) < len(load) and engine.clock() >= start + load[len(requests)].at:
            number, arrival = len(requests), load[len(requests)]
            request = engine.submit(prompts[number], arrival.answer, tenant=f"load, request {engine._submitted}")
            request.submitted = start + arrival.at  # it has been waiting since then
            requests.append(request)
        if engine.running or engine.waiting:
            engine.step()
        else:
            sleep(max(0.0, start + load[len(requests)].at - engine.clock()))
    return requests


def _prompts(load: list[Arrival], vocab: int, ids) -> list[torch.Tensor]:
    if ids is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocab, (arrival.prompt,), generator=generator) for arrival in load]
    text = check_ids(ids, vocab).flatten()
    starts = [number * len(text) // len(load) for number in range(len(load))]
    return [text[torch.arange(start, start + arrival.prompt) % len(text)]  # behind its end it begins again
            for start, arrival in zip(starts, load)]


class Percentiles(NamedTuple):
    """Of one time for each request, in seconds: the mean, the median, and what 95 of 100 stay below."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True)
class Report:
    """What a load got: `Report.of(requests)`. `seconds` pass from the first request to the end of the last answer.

    `ttfts` and `tpots` hold one time for each request, in seconds; an answer of a single token has no tpot (None).
    """

    seconds: float
    tokens: int  # of all answers
    ttfts: tuple[float, ...]
    tpots: tuple[float | None, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Report:
        requests = list(requests)
        bad = [request for request in requests
               if request.ttft is None or request.finish_reason not in ("length", "stop")]
        if bad or not requests:
            raise ValueError(f"a report is about requests with complete answers, not {bad[0] if bad else 'none'}"
                             + (f" ({bad[0].error})" if bad and bad[0].error else ""))
        seconds = max(request.finished for request in requests) - min(request.submitted for request in requests)
        return cls(seconds, sum(len(request.tokens) for request in requests),
                   tuple(request.ttft for request in requests), tuple(request.tpot for request in requests))

    @property
    def requests(self) -> int:
        return len(self.ttfts)

    @property
    def tokens_per_second(self) -> float:
        """Throughput: tokens of all answers together."""
        return self.tokens / self.seconds

    @property
    def ttft(self) -> Percentiles:
        """Time to first token, the time in the queue included."""
        return _percentiles(self.ttfts)

    @property
    def tpot(self) -> Percentiles | None:
        """Time per output token after the first; None when no answer has a second one."""
        times = [each for each in self.tpots if each is not None]
        return _percentiles(times) if times else None

    def within(self, ttft: float = math.inf, tpot: float = math.inf) -> float:
        """The share of requests that kept both limits, in seconds. Times requests a second, this is the goodput."""
        for name, limit in (("ttft", ttft), ("tpot", tpot)):
            if limit != math.inf and (not _is_number(limit) or limit < 0):
                raise ValueError(f"{name} must be a number of seconds of at least 0, not {limit!r}")
        kept = [first <= ttft and (each is None or each <= tpot) for first, each in zip(self.ttfts, self.tpots)]
        return sum(kept) / len(kept)


def _percentiles(times: Sequence[float]) -> Percentiles:
    values = torch.tensor(times, dtype=torch.float64)
    return Percentiles(float(values.mean()), *values.quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist())
