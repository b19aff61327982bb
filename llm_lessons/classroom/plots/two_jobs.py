"""Lesson 00: how long each token takes, and an answer step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..style import COLORS, Picture, drawable, footnote, label_axes, picture, shortened, visible

LINE = 100  # characters in the width of `answer_step`
HIGH = 1.3  # the upper row of `two_passes`; the lower one is at 0


def token_times(runs: dict[str, Sequence[float]], note: str = "") -> Picture:
    """Time of each token, one panel for each run: title -> seconds; the first token is prefill's."""
    alt = ". ".join(f"{title}: the first token took {s[0] * 1e3:.0f} ms, the others {median(s[1:]) * 1e3:.0f} ms each"
                    for title, s in runs.items())
    with picture(alt, 1, len(runs), height=3.4, sharey=True, squeeze=False) as (figure, axes):
        for axis, (title, seconds) in zip(axes[0], runs.items()):
            milliseconds = [1e3 * s for s in seconds]
            axis.bar(1, milliseconds[0], color=COLORS["prefill"], label="first token (prefill)")
            later = range(2, len(seconds) + 1)
            axis.bar(later, milliseconds[1:], color=COLORS["decode"], label="later tokens (decode)")
            label_axes(axis, "token of the answer", "time (ms)" if axis is axes[0][0] else "", title)
            axis.annotate(f"{milliseconds[0]:.0f} ms", (1, milliseconds[0]), (4, 2), textcoords="offset points")
        axes[0][-1].legend(loc="center right")
        footnote(figure, note)
    return figure


@dataclass(frozen=True)
class Step:
    """One token of an answer: its text, the seconds it took, and the likeliest candidates as (text, probability)."""

    text: str
    seconds: float
    candidates: Sequence[tuple[str, float]]


def answer_step(prompt: str, steps: Sequence[Step], at: int = 0) -> Picture:
    """One moment of an answer: the text so far, the candidates for the next token, and where the time went."""
    step, job = steps[at], "prefill" if at == 0 else "decode"
    written = "".join(s.text for s in steps[:at])
    with picture(f"step {at + 1}: {step.text!r} was written after {written!r}, in {step.seconds * 1e3:.0f} ms", 1, 2,
                 height=3.6, width_ratios=[1, 1.25]) as (figure, (left, right)):
        before = visible(written, len(drawable(written)))
        now = f"▌{visible(step.text)}▐"
        room = LINE - len(now)
        before = before if len(before) <= room else f"…{before[1 - room:]}"
        figure.suptitle(f"{shortened(drawable(prompt), LINE)}\n{before}{now}", x=0.01, ha="left",
                        fontfamily="monospace", fontsize=10)
        texts, probabilities = [visible(t) or "∅" for t, _ in step.candidates], [p for _, p in step.candidates]
        bars = left.barh(range(len(texts)), probabilities, color=COLORS["neutral"])
        for text, bar in zip(texts, bars):
            if text == visible(step.text):
                bar.set_color(COLORS[job])
        left.set_yticks(range(len(texts)), texts, fontfamily="monospace")
        left.invert_yaxis()
        left.bar_label(bars, [f" {p:.0%}" for p in probabilities])
        left.set(xlim=(0, 1.12), xticks=[0, 0.5, 1])
        label_axes(left, "probability", "", f"candidates for token {at + 1}")
        colors = [COLORS["prefill"]] + [COLORS["decode"]] * (len(steps) - 1)
        marks = right.bar(range(1, len(steps) + 1), [1e3 * s.seconds for s in steps], color=colors, alpha=0.35)
        marks[at].set_alpha(1)
        right.xaxis.get_major_locator().set_params(integer=True)
        label_axes(right, "token of the answer", "time (ms)", f"token {at + 1}: {step.seconds * 1e3:.0f} ms of {job}")
    return figure


def two_passes(prompt: int, hidden: int, layers: int, vocab: int) -> Picture:
    """The way from text to the next token, and the shapes on it: once with a whole prompt, once with a single token.

    `prompt` and `vocab` count tokens; `hidden` is the size of a token's vector.
    """
    stations = ("ids", "vectors", f"{layers} layers", "logits of the\nlast token", "next token")
    alt = (f"prefill: {prompt} ids, vectors [{prompt}, {hidden}], {layers} layers, {vocab:,} logits, the first token; "
           f"decode, again and again: 1 id, a vector [1, {hidden}], the same layers, {vocab:,} logits, the next token")
    with picture(alt, height=3.7) as (figure, axis):
        axis.set(xlim=(-1.6, 4.5), ylim=(-0.75, 1.7))
        axis.axis("off")
        for row, job, count in ((HIGH, "prefill", prompt), (0, "decode", 1)):
            shapes = (f"[{count}]", f"[{count}, {hidden}]", f"[{count}, {hidden}]", f"[{vocab:,}]", "1 id")
            for at, (station, shape) in enumerate(zip(stations, shapes)):
                axis.annotate(f"{station}\n{shape}", (at, row), ha="center", va="center", fontsize=9.5,
                              bbox={"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": COLORS[job],
                                    "linewidth": 2})
                if at:
                    _arrow(axis, (at - 0.62, row), (at - 0.38, row))
            times = "the whole prompt,\nonce" if row else "one token,\nagain and again"
            axis.text(-1.55, row, f"{job}\n{times}", color=COLORS[job], fontweight="bold", va="center")
        _arrow(axis, (3.9, HIGH - 0.3), (0.1, 0.28), style="arc3,rad=-0.11")
        _arrow(axis, (3.9, -0.32), (0.1, -0.32), style="arc3,rad=-0.12")
        _arrow(axis, (2, HIGH - 0.26), (2, 0.27))  # what the layers computed for the prompt serves all later tokens
        axis.annotate("KV cache", (2, 0.83), ha="center", va="center", fontsize=9.5, color="white",
                      bbox={"boxstyle": "round,pad=0.3", "facecolor": COLORS["kv_cache"], "edgecolor": "none"})
    return figure


def _arrow(axis, start: tuple[float, float], end: tuple[float, float], style: str = "arc3") -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": COLORS["neutral"], "linewidth": 1.5,
                                              "connectionstyle": style, "shrinkA": 0, "shrinkB": 0})
