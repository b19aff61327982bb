"""A request: one prompt, the answer as it is written, where its text ends, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .paged_cache import PagedCache
from .tokenizer import stream_text


class Request:
    """A prompt and its answer, while it is written and afterwards. Made by `Engine.submit`.

    Iterate over it to get the tokens one by one: that steps the engine, and so writes the other answers as well.
    `ids` are the prompt, `tokens` the answer so far, without the stop id. `text` is None without a tokenizer; it only
    ever grows, and ends before a stop string (whose tokens stay in `tokens`). `finish_reason` is None until it is
    "stop" (a stop id or a stop string came), "length" (`max_new_tokens` were written, or there is no room for more),
    "cancelled", or "error" (of this request alone: see `error`).
    """

    def __init__(self, engine, number: int, ids: list[int], max_new_tokens: int, sampler: Callable,
                 stop_ids: set[int], stop_strings: tuple[str, ...], cache: PagedCache):
        self.engine, self.number, self.ids, self.max_new_tokens = engine, number, ids, max_new_tokens
        self.sampler, self.stop_ids, self.stop_strings, self.cache = sampler, stop_ids, stop_strings, cache
        self.tokens: list[int] = []
        self.text = None if engine.tokenizer is None else ""
        self.running = False
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.submitted, self.finished = engine.clock(), None
        self.times: list[float] = []  # when each token came
        self._pieces = stream_text(engine.tokenizer, iter(self.tokens))  # asked for a piece only after a new token
        self._held = ""  # text that may turn out to be the beginning of a stop string

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.running else "waiting")
        return f"<request {self.number}: {state}, {len(self.ids)} + {len(self.tokens)} tokens>"

    def __iter__(self) -> Iterator[int]:
        given = 0
        while given < len(self.tokens) or self.finish_reason is None:
            if given < len(self.tokens):
                given += 1
                yield self.tokens[given - 1]
            else:
                self.engine.step()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """End the answer here and give its blocks back, whether it is waiting or running. Afterwards: nothing."""
        with self.engine._lock:
            if self.finish_reason is None:
                self.engine._finish(self, "cancelled")

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from `submit` to the first token, the time in which it waited included."""
        return self.times[0] - self.submitted if self.times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds from one token to the next; None for fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def seconds(self) -> float | None:
        """End-to-end time, from `submit` to the end of the answer; None until then."""
        return None if self.finished is None else self.finished - self.submitted

    @property
    def unread(self) -> int:
        """How many tokens of prompt and answer the model has not read yet: 1 while the answer is written."""
        return len(self.ids) + len(self.tokens) - self.cache.length

    def _write(self, token: int) -> str | None:
        """Add a token to the answer -> the reason to end it, if there is one."""
        if token in self.stop_ids:
            return "stop"
        self.tokens.append(token)
        self.times.append(self.engine.clock())
        if self.text is not None and self._show(next(self._pieces)):
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def _show(self, piece: str) -> bool:
        """Add to the text what cannot belong to a stop string -> True if there is a whole one: the text ends before."""
        new, self._held = self._held + piece, ""
        found = [new.index(stop) for stop in self.stop_strings if stop in new]
        if found:
            self.text, self._pieces = self.text + new[: min(found)], iter(())
            return True
        held = max((n for stop in self.stop_strings for n in range(len(stop)) if new.endswith(stop[:n])), default=0)
        self.text, self._held = self.text + new[: len(new) - held], new[len(new) - held :]
        return False

    def _end_text(self) -> None:
        """No token will follow: show what was held back, and U+FFFD for a character that stays incomplete."""
        if self.text is not None and not self._show("".join(self._pieces)):
            self.text += self._held
