"""Many requests at once: an engine in which they share every pass over the weights, and the memory of one pool.

    engine = ll.Engine(model, tokenizer)
    first = engine.submit(tokenizer.encode("Once upon a time"))
    second = engine.submit(tokenizer.encode("The capital of France is"), max_new_tokens=8)
    engine.run()
    print(first.text, second.ttft)

A request is *waiting* until there is a place in the batch and there are blocks for its prompt. Then it is *running*:
its prompt is read (prefill), its answer is written (decode). One `step` of the engine does both, for all of them:

1. Decode: the next token of every answer, all in one call of the model. If the pool has no block for one of them, the
   youngest running request gives all of its own back and waits again (preemption).
2. Prefill: the rest of the step's token budget reads prompts, oldest first, in chunks. A long prompt takes several
   steps, in which the answers of the others go on. Whoever finds room joins, in any step (continuous batching).

Sources: Yu et al. 2022 (Orca: who runs is decided anew in each step), https://www.usenix.org/conference/osdi22;
Kwon et al. 2023 (vLLM: blocks, preemption), https://arxiv.org/abs/2309.06180; Agrawal et al. 2024 (Sarathi-Serve:
chunked prefill beside decode under a token budget), https://arxiv.org/abs/2403.02310.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .generate import fresh_sampler, prefill, stop_id_set, token_id
from .kv_cache import whole_number
from .model import Model, check_ids, check_model
from .paged_cache import BlockPool, PagedCache
from .request import Request
from .timing import synchronize


@dataclass
class Step:
    """What happened in one step of the engine. Times are those of its clock."""

    start: float
    end: float = 0.0
    decoded: list[Request] = field(default_factory=list)  # one token each, in one call
    prefilled: list[tuple[Request, int]] = field(default_factory=list)  # and how many tokens of it, in a call each
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    free_blocks: int = 0  # at the end of the step


class Engine:
    """Serves requests on one model: submit them, then `run`, or `step` by hand, or iterate over a request.

    `max_batch`: requests that run at a time. `kv_blocks` blocks of `block_size` tokens are the memory for the keys and
    values of all of them. `token_budget`: tokens that one step reads at most, decode first. `policy` "static" is there
    for comparison: a batch is put together when nothing runs, its prompts are read at once, and the place of an answer
    that is done stays empty until the whole batch is done. `clock()` gives the time in seconds.

    Requests of one `tenant` share the blocks of a common beginning, requests of two tenants never share any. When a
    step is interrupted, or the model fails in it, all running requests wait again, and their tokens stay: go on with
    `step` or `run`. An engine may be used from several threads: one step runs at a time, and the others wait for it.
    """

    def __init__(self, model: Model, tokenizer=None, max_batch: int = 8, kv_blocks: int = 256, block_size: int = 16,
                 token_budget: int = 512, policy: str = "continuous", clock: Callable[[], float] = time.perf_counter):
        check_model(model)
        self.max_batch = whole_number("max_batch", max_batch)
        self.token_budget = whole_number("token_budget", token_budget)
        if token_budget < max_batch:
            raise ValueError(f"a token_budget of {token_budget} is less than a token for each of max_batch={max_batch} "
                             f"requests: make it larger, or max_batch smaller")
        if policy not in ("continuous", "static"):
            raise ValueError(f"policy must be 'continuous' or 'static', not {policy!r}")
        self.model, self.tokenizer, self.policy, self.clock = model, tokenizer, policy, clock
        self.pool = BlockPool.of(model, kv_blocks, block_size)
        self.room = min(model.config.context, self.pool.blocks * self.pool.block_size)  # tokens, for one request
        self._requests: list[Request] = []  # all that are not finished, oldest first
        self._submitted = 0
        self._lock = threading.RLock()  # re-entrant: a sampler may submit or cancel in the middle of a step
        self._batch = self._new_cache(None)  # lends its rows to the requests that decode in a step

    @property
    def running(self) -> list[Request]:
        """Requests that have blocks, oldest first. They are all older than those that wait: nobody overtakes."""
        return [request for request in self._requests if request.running]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for a place or for blocks, oldest first."""
        return [request for request in self._requests if not request.running and request.finish_reason is None]

    def submit(self, ids, max_new_tokens: int = 64, sampler=None,
               stop_ids: int | Collection[int] | None = (), stop_strings: str | Collection[str] | None = (),
               tenant: Hashable = None) -> Request:
        """Queue a prompt, ids [tokens]. Like `generate`: greedy without a sampler; a `Sampler` starts from its seed.

        Raises ValueError when the prompt can never fit the pool or the context window; one that fits is continued
        until one of them is full. `stop_strings` need the engine's tokenizer.
        """
        ids = check_ids(ids, self.model.config.vocab)
        if ids.dim() != 1:
            raise ValueError(f"submit takes one prompt, not a batch of shape {list(ids.shape)}: submit each row")
        if len(ids) > self.room:
            raise ValueError(f"a prompt of {len(ids)} tokens does not fit: the pool has {self.pool.blocks} blocks of "
                             f"{self.pool.block_size}, the context window is {self.model.config.context}. Shorten it, "
                             f"or make an engine with more kv_blocks")
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        stop_ids = stop_id_set(stop_ids)
        stop_strings = () if stop_strings is None else stop_strings
        one = isinstance(stop_strings, str) or not isinstance(stop_strings, Iterable)
        stop_strings = (stop_strings,) if one else tuple(stop_strings)
        if not all(isinstance(stop, str) and stop for stop in stop_strings):
            raise ValueError(f"stop_strings must be texts that are not empty, not {stop_strings!r}")
        if stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: Engine(model, tokenizer)")
        sampler = fresh_sampler(sampler)
        max_new_tokens = min(max_new_tokens, self.room - len(ids) + 1)  # the last token needs no place in a block
        with self._lock:
            request = Request(self, self._submitted, ids.tolist(), max_new_tokens, sampler, stop_ids, stop_strings,
                              self._new_cache(tenant))
            self._submitted += 1
            self._requests.append(request)
        return request

    def run(self) -> list[Step]:
        """Step until every request is finished -> the steps."""
        steps = []
        while self._requests:
            steps.append(self.step())
        return steps

    def step(self) -> Step:
        """Decode one token of every answer, read some of the prompts -> what happened. See the top of this file."""
        with self._lock:
            return self._step()

    def _step(self) -> Step:
        synchronize(self.pool.keys.device)  # what a GPU still does for others is no part of this step
        step = Step(self.clock())
        try:
            self._decode(step)
            self._prefill(step)
        except BaseException:  # KeyboardInterrupt as well: what the caches hold is uncertain now, the tokens are not
            for request in list(self._requests):
                self._preempt(request)
                if len(request.tokens) == request.max_new_tokens:
                    self._finish(request, "length")
            raise
        touched = step.decoded + [request for request, _ in step.prefilled]
        step.finished = [request for request in touched if request.finish_reason is not None]
        synchronize(self.pool.keys.device)  # a GPU may still be reading a piece of a prompt
        step.end, step.free_blocks = self.clock(), self.pool.free_blocks
        return step

    # --- Decode ---

    def _decode(self, step: Step) -> None:
        """One token of each answer in one call: the weights are read from memory once, for all of them."""
        requests = step.decoded = self._with_blocks(step)
        if not requests:
            return
        self._batch.rows = [request.cache.rows[0] for request in requests]
        self._batch.lengths = [request.cache.length for request in requests]
        last = [(request.tokens or request.ids)[-1] for request in requests]
        with torch.inference_mode():
            logits = self.model(torch.tensor(last)[:, None], self._batch)[:, 0]  # [batch, vocab]
        for request, token in zip(requests, last):
            request.cache.lengths[0] += 1
            request.cache.remember([token])
        for request, row in zip(requests, logits.clone()):  # out of inference mode: samplers may write into it
            self._sample(request, row)

    def _with_blocks(self, step: Step) -> list[Request]:
        """The requests that decode. While there is no block for one of them, the youngest running one makes room.

        The oldest is never preempted: alone, it fits the pool. So in every step it gets on, and nobody waits for ever.
        """
        while True:
            requests = [request for request in self.running if request.unread == 1]
            missing = sum(request.cache.rows[0].missing(request.cache.length, 1) for request in requests)
            if missing <= self.pool.free_blocks:
                return requests
            step.preempted.append(self.running[-1])
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Give all its blocks back. It is first in the queue, and will read its prompt and its answer so far again.

        (Often it finds some of its blocks as it left them. Its sampler goes on where it was: the same answer, up to
        rounding.)
        """
        request.running = False
        request.cache.close()

    # --- Prefill ---

    def _prefill(self, step: Step) -> None:
        """Read prompts for the rest of the budget, each with a call of its own.

        In one call with the decoding rows, each of those would be padded from one token to the width of the chunk.
        """
        budget, places = self.token_budget - len(step.decoded), self.max_batch - len(self.running)
        if self.policy == "static":
            budget, places = sys.maxsize, 0 if self.running else self.max_batch
        for request in [request for request in self.running if request.unread > 1]:  # read in part, by the last step
            budget -= self._read(request, budget, step)
        while budget > 0 and places > 0 and (request := self._admit()):
            budget, places = budget - self._read(request, budget, step), places - 1

    def _read(self, request: Request, budget: int, step: Step) -> int:
        """Read the next chunk of a prompt, and after the last one write the first token -> how many were read."""
        known = request.cache.length
        chunk = (request.ids + request.tokens)[known : known + budget]
        logits = prefill(self.model, chunk, request.cache)
        step.prefilled.append((request, len(chunk)))
        if request.unread == 0:
            self._sample(request, logits)
        return len(chunk)

    def _admit(self) -> Request | None:
        """The oldest waiting request starts to run, if there are blocks for all it has and for one token more.

        A request is admitted only when its turn to be read has come: by then its tenant's older prompts are read, and
        the blocks of a common beginning are found.
        """
        request = next(iter(self.waiting), None)
        if request is None:
            return None
        ids, cache = request.ids + request.tokens, request.cache
        new = min(len(ids) + 1, self.room) - cache.reuse(ids)
        if self.running and cache.rows[0].missing(cache.length, new) > self.pool.free_blocks:
            cache.close()
            return None
        cache.reserve([new])  # takes the blocks
        request.running = True
        return request

    # --- Both ---

    def _sample(self, request: Request, logits: Tensor) -> None:
        """The next token of one request. Whatever goes wrong here is the end of this request, and of no other."""
        if request.finish_reason is not None:  # the sampler of another request has cancelled it
            return
        try:
            if not torch.isfinite(logits).all():
                for block in request.cache.rows[0].blocks:  # its keys may be spoilt, also those of its first tokens:
                    self.pool.forget(block)  # 0 times NaN is NaN, and a pass adds up what is masked with weight 0
                raise ValueError("the logits contain NaN or infinity: the model's arithmetic went wrong")
            token = token_id(request.sampler(logits, request.ids + request.tokens), self.model.config.vocab)
            reason = request.finish_reason or request._write(token)  # its sampler may have cancelled it
        except Exception as error:
            request.error, reason = error, "error"
        if reason is not None and request.finish_reason is None:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason, request.finished, request.running = reason, self.clock(), False
        request.cache.close()
        self._requests = [other for other in self._requests if other.finish_reason is None]
        request._end_text()

    def _new_cache(self, tenant: Hashable) -> PagedCache:
        return self.model.new_cache(self.room, kind=PagedCache, pool=self.pool, tenant=tenant)
