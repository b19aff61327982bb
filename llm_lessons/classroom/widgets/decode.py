"""Lesson 06: every token of an answer as a bar, with and without a cache, for any lengths up to the measured ones."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets
import numpy as np

from ..plots.decode import timeline
from ..style import drawable
from .core import Interactive, image_box, one_at_a_time


def token_seconds(whole: Mapping[int, float], step: Mapping[int, float], prompt: int, new: int,
                  cached: bool) -> list[float]:
    """Seconds of each of `new` tokens behind a prompt, the first by prefill; straight lines between measured lengths.

    `whole`: tokens of text -> seconds to run all of it; `step`: tokens in the cache -> seconds of a decode step.
    """
    first = _between(whole, [prompt])
    return first + _between(step if cached else whole, [prompt + written for written in range(1, new)])


def _between(measured: Mapping[int, float], lengths: list[int]) -> list[float]:
    at = sorted(measured)
    return np.interp(lengths, at, [measured[n] for n in at]).tolist()


class StepTimeline(Interactive):
    """The timeline; `controls` by name ("loop", "prompt", "new"), `seconds` of each token as they are set."""

    def __init__(self, whole: Mapping[int, float], step: Mapping[int, float], prompt: int, new: int, note: str):
        self.whole, self.step, self.note = dict(whole), dict(step), note
        shortest, longest = min(self.whole), max(self.whole)
        most = longest - shortest
        if not shortest <= prompt <= longest - 2 or not 2 <= new <= longest - prompt:
            raise ValueError(f"a prompt of {prompt} tokens and {new} new ones: the measured texts have {shortest} to "
                             f"{longest} tokens, and at least 2 new tokens are needed")
        look = {"continuous_update": False, "style": {"description_width": "90px"}}
        self.controls = {
            "loop": ipywidgets.ToggleButtons(options=[("without a cache", False), ("with a cache", True)], value=False),
            "prompt": ipywidgets.IntSlider(value=prompt, min=shortest, max=longest - 2, description="prompt", **look),
            "new": ipywidgets.IntSlider(value=new, min=2, max=most, description="new tokens", **look)}
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self.picture = image_box()
        twin = self._show()
        super().__init__(ipywidgets.VBox([*self.controls.values(), self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self):
        """Draw what the controls say. A text longer than any measured one is cut there."""
        cached, prompt = self.controls["loop"].value, self.controls["prompt"].value
        new = min(self.controls["new"].value, max(self.whole) - prompt)
        ways = {way: token_seconds(self.whole, self.step, prompt, new, way) for way in (True, False)}
        self.seconds = ways[cached]
        cut = f" {new} new tokens: no longer text was measured." if new < self.controls["new"].value else ""
        shown = timeline(ways[cached], ways[not cached], prompt, cached, drawable(self.note + cut))
        self.picture.value = shown.png()
        return shown


def step_timeline(whole: Mapping[int, float], step: Mapping[int, float], prompt: int = 64, new: int = 192,
                  note: str = "") -> StepTimeline:
    """Choose a prompt, a number of new tokens, and whether there is a cache: the time of each token, and in total.

    `whole`: tokens of text -> measured seconds to run all of it; `step`: tokens in the cache -> measured seconds of
    one decode step. Between measured lengths the times are interpolated.
    """
    if len(whole) < 2 or not step:
        raise ValueError(f"at least 2 measured texts and 1 measured step are needed, not {len(whole)} and {len(step)}")
    return StepTimeline(whole, step, prompt, new, note)
