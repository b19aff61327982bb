"""The two jobs of inference: `prefill` reads the prompt, `decode` writes one token, `generate` does both."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from .kv_cache import Cache, whole_number
from .model import Model, check_cache, check_ids, check_model
from .sampling import Sampler

# Tokens that prefill hands to the model at once. It bounds the memory of activations, and costs some 10 % of the time,
# since later pieces need a mask.
CHUNK = 512


def prefill(model: Model, ids, cache: Cache, chunk: int = CHUNK) -> Tensor:
    """Job one: read all `ids` [tokens] into a cache of one row -> logits [vocab] for the token after the last.

    A prompt longer than `chunk` is read in pieces; the result is the same. Raises ValueError, with nothing written,
    when the prompt does not fit.
    """
    check_model(model)
    ids, chunk = check_ids(ids, model.config.vocab), whole_number("chunk", chunk)
    if ids.dim() != 1:
        raise ValueError(f"prefill reads one sequence, not a batch of shape {list(ids.shape)}: call the model itself")
    check_cache(cache, model)  # asked first: a call that is refused must not have changed it
    if cache.length + len(ids) > model.config.context:
        raise ValueError(f"{cache.length} + {len(ids)} tokens do not fit the context window of {model.config.context}")
    cache.reserve([len(ids)])
    with torch.inference_mode():
        for piece in ids.split(chunk):
            hidden = model.body(piece, cache)  # [tokens of this piece, hidden]
            cache.remember(piece.tolist())
        logits = model.head(hidden[-1:])[0]  # only the last token's logits are needed
    return logits.clone()  # out of inference mode: samplers may write into it


def decode(model: Model, token: int, cache: Cache) -> Tensor:
    """Job two: one more token into a cache of one row -> logits [vocab] for the token after it."""
    check_model(model)
    token = token_id(token, model.config.vocab)
    check_cache(cache, model)
    with torch.inference_mode():  # no_grad, and less bookkeeping: a decode step is short
        logits = model([token], cache)[0]
    cache.remember([token])
    return logits.clone()


def token_id(token, vocab: int) -> int:
    """A token as a plain number: a tensor, which many samplers return, is never equal to a stop id in a set."""
    try:
        number = operator.index(token)
    except (TypeError, ValueError):
        number = -1
    if isinstance(token, bool) or not 0 <= number < vocab:
        raise ValueError(f"a token is one id from 0 to {vocab - 1}, not {token!r}")
    return number


def stop_id_set(stop_ids: int | Collection[int] | None) -> set[int]:
    """One stop id, several, or None, as a set; ValueError for what cannot be an id."""
    try:
        several = [stop_ids] if isinstance(stop_ids, (str, bytes)) else () if stop_ids is None else list(stop_ids)
    except TypeError:  # one: an int, numpy's, a tensor of one number
        several = [stop_ids]
    return {whole_number("a stop id", i, 0) for i in several}


def fresh_sampler(sampler) -> Callable:
    """The sampler of one answer: greedy if none is given, a `Sampler` back at its seed, others as they are."""
    sampler = Sampler() if sampler is None else sampler
    if not callable(sampler) or isinstance(sampler, type):
        raise ValueError(f"a sampler is a function of logits and history, such as ll.Sampler(), not {sampler!r}")
    return sampler.restarted() if isinstance(sampler, Sampler) else sampler


def keep_shared_prefix(cache: Cache, ids: Sequence[int]) -> int:
    """Truncate the cache to what it shares with a new prompt -> the number of tokens that need no prefill.

    At least the prompt's last token is always left over: its logits are wanted. A cache that has lost keys which the
    rest would look at begins anew; one that finds more of the prompt elsewhere adopts it.
    """
    shared = 0
    while shared < min(len(cache.tokens), len(ids) - 1) and cache.tokens[shared] == ids[shared]:
        shared += 1
    cache.truncate(shared if cache.can_keep(shared) else 0)
    return cache.reuse(ids)


class Generation:
    """An answer while it is being written: iterate over it to get its token ids one by one. Made by `generate`.

    `tokens` are the ids so far; `finish_reason` is None while it runs, then "stop" (a stop id came), "length"
    (`max_new_tokens` were written, or there is no room for more), "cancelled" (closed, or interrupted in the middle of
    a token), or "error" (which was raised).
    """

    def __init__(self, model: Model, ids: Tensor, max_new_tokens: int, sampler, stop_ids, cache: Cache):
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._steps = self._write(model, ids, max_new_tokens, sampler, stop_ids, cache)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        try:
            return next(self._steps)
        except StopIteration:
            raise
        except BaseException as error:  # no token will follow
            self.finish_reason = "error" if isinstance(error, Exception) else "cancelled"
            raise

    def close(self) -> None:
        """End the answer here; what the cache holds stays right."""
        self._steps.close()
        self.finish_reason = self.finish_reason or "cancelled"

    def _write(self, model, ids, max_new_tokens, sampler, stop_ids, cache) -> Iterator[int]:
        prompt = ids.tolist()
        known = keep_shared_prefix(cache, prompt)
        logits = prefill(model, ids[known:], cache)
        while (token := token_id(sampler(logits, prompt + self.tokens), model.config.vocab)) not in stop_ids:
            self.tokens.append(token)
            yield token
            if len(self.tokens) == max_new_tokens:
                self.finish_reason = "length"
                return
            if cache.tokens != prompt + self.tokens[:-1] or cache.length != len(cache.tokens):
                raise RuntimeError("the cache was used for something else meanwhile: give each generation its own")
            logits = decode(model, token, cache)
        self.finish_reason = "stop"


def generate(model: Model, ids, max_new_tokens: int = 64, sampler=None,
             stop_ids: int | Collection[int] | None = (), cache: Cache | None = None) -> Generation:
    """Continue a prompt: an iterator over new token ids, which ends before a stop id (it is not among them).

    `ids`: the whole prompt, [tokens]. `sampler(logits, history) -> id` is greedy unless given; a `Sampler` starts
    anew from its seed for each call. `cache`: one row; without one, a cache just large enough is made. A cache from an
    earlier call may be passed again: the tokens both prompts begin with are kept, the rest is forgotten.
    Raises ValueError at once when the prompt does not fit the cache or the context window. A prompt that fits is
    continued until the cache or the context window is full. (A paged cache whose pool is full raises ValueError.)
    """
    check_model(model)
    ids, context = check_ids(ids, model.config.vocab).clone(), model.config.context
    if ids.dim() != 1:
        raise ValueError(f"generate continues one prompt, not a batch of shape {list(ids.shape)}")
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    stop_ids = stop_id_set(stop_ids)
    if cache is not None:
        check_cache(cache, model)
        if len(cache.lengths) != 1:
            raise ValueError(f"generate continues one prompt: it needs a cache of one row, not of "
                             f"{len(cache.lengths)}")
    room = context if cache is None else min(cache.capacity, context)
    if len(ids) > room:
        limit = "the context window" if room == context else "this cache's capacity"
        raise ValueError(f"a prompt of {len(ids)} tokens does not fit {limit} of {room}: shorten it, or use a larger "
                         f"one")
    max_new_tokens = min(max_new_tokens, room - len(ids) + 1)  # the last token needs no place in the cache
    cache = model.new_cache(len(ids) + max_new_tokens - 1) if cache is None else cache
    return Generation(model, ids, max_new_tokens, fresh_sampler(sampler), stop_ids, cache)
