"""Lesson 00: walk through an answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..plots.two_jobs import Step, answer_step
from .core import Interactive, steps_through


def answer_stepper(prompt: str, steps: Sequence[Step]) -> Interactive:
    """Walk through an answer token by token: what was written, what else could have come, how long it took."""
    if not steps:
        raise ValueError("there are no steps to show: the answer is empty")
    return steps_through(len(steps), lambda at: answer_step(prompt, steps, at), "token")
