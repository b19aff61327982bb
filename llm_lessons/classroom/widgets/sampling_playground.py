"""Lesson 04: turn a sampler's settings, see what each step keeps, draw and count."""

from __future__ import annotations

from collections import Counter
from html import escape

import ipywidgets
from torch import Tensor

from ...sampling import Sampler
from ..plots.next_token import sampler_stages
from .core import Interactive, breakable, image_box, one_at_a_time, readable, side_by_side

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
HIGHEST = {"temperature": 2, "top_k": 50, "top_p": 1, "min_p": 0.5, "seed": 999_999}


def _start(settings: dict) -> dict:
    """Where the sliders stand at first. None switches a filter off; ValueError for what no slider can show."""
    if unknown := set(settings) - set(OFF):
        raise ValueError(f"unknown setting {', '.join(sorted(unknown))}: the settings are {', '.join(OFF)}")
    start = OFF | {name: OFF[name] if value is None and name in ("top_k", "top_p", "min_p") else value
                   for name, value in settings.items()}
    for name, value in start.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= HIGHEST[name]:
            raise ValueError(f"{name}={value}: the slider goes from 0 to {HIGHEST[name]:,}")
        if name in ("top_k", "seed") and not isinstance(value, int):
            raise ValueError(f"{name}={value}: a whole number is needed")
    return start


class SamplingPlayground(Interactive):
    """The playground; `controls` by name, `sampler` as they are set, `drawn` id -> count since the last change."""

    def __init__(self, prompt: str, logits: Tensor, tokenizer, **settings):
        self.prompt, self.logits, self.tokenizer = prompt, logits, tokenizer
        self.drawn: Counter[int] = Counter()
        start = _start(settings)
        look = {"continuous_update": False, "style": {"description_width": "90px"}}
        self.controls = {
            "temperature": ipywidgets.FloatSlider(value=start["temperature"], min=0, max=HIGHEST["temperature"],
                                                  step=0.1, **look),
            "top_k": ipywidgets.IntSlider(value=start["top_k"], min=0, max=HIGHEST["top_k"], **look),
            "top_p": ipywidgets.FloatSlider(value=start["top_p"], min=0, max=HIGHEST["top_p"], step=0.05, **look),
            "min_p": ipywidgets.FloatSlider(value=start["min_p"], min=0, max=HIGHEST["min_p"], step=0.01, **look),
            "seed": ipywidgets.BoundedIntText(value=start["seed"], min=0, max=HIGHEST["seed"], style=look["style"])}
        names = ("temperature", "top-k (0: off)", "top-p (1: off)", "min-p (0: off)", "seed")
        for control, name in zip(self.controls.values(), names):
            control.description = name
            control.observe(self._changed, names="value")
        self.draw_one, self.draw_many = (ipywidgets.Button(description=text) for text in ("draw 1", "draw 100"))
        self.draw_one.on_click(lambda _: self.draw(1))
        self.draw_many.on_click(lambda _: self.draw(100))
        self.picture, self.words = image_box(), ipywidgets.HTML()
        self.sampler = self._sampler()
        twin = self._show()
        controls = side_by_side(list(self.controls.values())[:4],
                                [self.controls["seed"], self.draw_one, self.draw_many])
        super().__init__(ipywidgets.VBox([controls, self.words, self.picture]), twin)

    @one_at_a_time
    def draw(self, count: int) -> None:
        """Draw `count` tokens, as the buttons do."""
        if count < 1:
            raise ValueError(f"draw({count}): draw at least one token")
        for _ in range(count):
            token = self.sampler(self.logits)
            self.drawn[token] += 1
        self._show(f"last drawn: <b>{escape(readable(self.tokenizer.decode([token])))}</b>")

    @one_at_a_time
    def _changed(self, _) -> None:
        """New settings: a new sampler, at the beginning of its seed, and nothing drawn yet."""
        self.sampler, self.drawn = self._sampler(), Counter()
        self._show()

    def _sampler(self) -> Sampler:
        at = {name: control.value for name, control in self.controls.items()}
        return Sampler(at["temperature"], at["top_k"] or None, None if at["top_p"] == 1 else at["top_p"],
                       at["min_p"] or None, seed=at["seed"])

    def _show(self, news: str = "nothing drawn yet"):
        left = int((self.sampler.stages(self.logits)[-1][1] > 0).sum())
        # A long prompt breaks behind its spaces if it can, and the number stays behind one written from right to left.
        prompt = escape(readable(self.prompt).replace("·", "·\N{ZERO WIDTH SPACE}"))
        self.words.value = breakable(f"after <b>{prompt}</b>\N{LEFT-TO-RIGHT MARK}: {left:,} "
                                     f"{'token' if left == 1 else 'tokens'} can come; {news}")
        shown = sampler_stages(self.sampler, self.logits, self.tokenizer, self.drawn)
        self.picture.value = shown.png()
        return shown


def sampling_playground(prompt: str, logits: Tensor, tokenizer, **settings) -> SamplingPlayground:
    """Sliders for a sampler's settings over the logits [vocab] that follow a prompt, with a button that draws.

    `settings`: where the sliders stand at first (temperature, top_k, top_p, min_p, seed); None: this filter is off.
    """
    return SamplingPlayground(prompt, logits, tokenizer, **settings)
