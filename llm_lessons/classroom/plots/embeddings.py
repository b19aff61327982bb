"""Lesson 02: neighbours of a word, how close pairs of words are, a map of words, and positions as turning hands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from ...model import rope_table, rotate
from ..style import COLORS, Picture, drawable, label_axes, picture, visible

QUERY, KEY = COLORS["attention"], COLORS["kv_cache"]
MARKERS = "os^DvPX*"
SHADES = "#FFFFFF", COLORS["weights"], "#1F4E6B", "#C9E4F5", "#2D86BD", "#E9F4FB", "#12303F", "#8FCBEE"  # of one blue


def same_letters(a: str, b: str) -> bool:
    """The same word, but for capitals and the spaces around it?"""
    return a.strip().lower() == b.strip().lower()


def neighbour_bars(word: str, neighbours: Sequence[tuple[str, float]]) -> Picture:
    """The nearest tokens of a word as bars, nearest first: (text of the token, cosine)."""
    told = ", ".join(f"{text!r} {cosine:.2f}" for text, cosine in neighbours)
    with picture(f"nearest to {word!r} by cosine: {told}", width=7, height=3.4) as (figure, axes):
        colors = [COLORS["neutral" if same_letters(text, word) else "weights"] for text, _ in neighbours]
        bars = axes.barh(range(len(neighbours)), [cosine for _, cosine in neighbours], color=colors)
        axes.bar_label(bars, [f" {cosine:.2f}" for _, cosine in neighbours])
        axes.set_yticks(range(len(neighbours)), [visible(text) or "∅" for text, _ in neighbours],
                        fontfamily="monospace")
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.08), xticks=[0, 0.25, 0.5, 0.75, 1])
        shown = drawable(word if len(word) <= 30 else f"{word[:30]}…")
        label_axes(axes, "cosine (grey: the same letters as the word)", "", f"nearest to {shown!r}")
    return figure


def similarities(kinds: Mapping[str, Sequence[float]], reference: str) -> Picture:
    """Cosines of word pairs by kind, one point for a pair, a bar for the median. `reference` is drawn in grey."""
    medians = {kind: float(torch.tensor(values).median()) for kind, values in kinds.items()}
    alt = "cosines of pairs: " + ", ".join(f"{kind}, {len(kinds[kind])} pairs, median {median:.2f}"
                                           for kind, median in medians.items())
    with picture(alt, height=0.55 * len(kinds) + 0.9) as (figure, axes):
        for row, (kind, values) in enumerate(kinds.items()):
            color = COLORS["neutral" if kind == reference else "weights"]
            spread = [0.5 * ((7 * n) % 11 / 10 - 0.5) for n in range(len(values))]  # apart, and always the same way
            axes.scatter(values, [row + s for s in spread], color=color, s=22 if len(values) < 100 else 2,
                         alpha=0.8 if len(values) < 100 else 0.25, linewidths=0)
            axes.plot([medians[kind]] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2)
            axes.annotate(f"{medians[kind]:.2f}", (medians[kind], row - 0.4), (3, -1), textcoords="offset points",
                          va="top", fontweight="bold")
        axes.set_yticks(range(len(kinds)), list(kinds))
        axes.set_ylim(len(kinds) - 0.4, -0.6)
        label_axes(axes, "cosine of the two rows (black: median of the kind)", "")
    return figure


def word_map(groups: Mapping[str, Sequence[tuple[str, float, float]]]) -> Picture:
    """Words on a plane: name of a group -> (word, x, y). Each group has a mark and a shade of its own."""
    alt = "a map of words; " + "; ".join(f"{name}: {', '.join(word for word, _, _ in words)}"
                                         for name, words in groups.items())
    with picture(alt, width=9, height=6.4) as (figure, axes):
        for marker, shade, (name, words) in zip(MARKERS, SHADES, groups.items()):
            axes.scatter([x for _, x, _ in words], [y for _, _, y in words], marker=marker, s=38, label=name,
                         color=shade, edgecolors="#1F4E6B", linewidths=0.8)
        axes.margins(0.08)
        axes.legend(loc="best", fontsize=9)
        label_axes(axes, "first principal direction", "second principal direction")
        figure.draw_without_rendering()  # fixes the scale, by which labels are kept apart
        points = [axes.transData.transform((x, y)) for words in groups.values() for _, x, y in words]
        taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
        for word, (x, y) in zip([word for words in groups.values() for word, _, _ in words], points):
            taken.append(_free_place(len(word) * 5.6 + 2, 10.5, x, y, taken))
            left, bottom, *_ = taken[-1]
            axes.annotate(drawable(word), (left, bottom), xycoords="figure pixels", fontsize=8.5, color="#222222")
    return figure


def _free_place(width: float, height: float, x: float, y: float, taken: Sequence[tuple]) -> tuple:
    """The box near (x, y) for a label that covers the least of what is taken, in pixels."""
    places = [(x + dx, y + dy) for far in (5, 12, 20)
              for dx in (far, -far - width, -width / 2) for dy in (-height / 2, far, -far - height)
              if (dx, dy) != (-width / 2, -height / 2)]

    def covered(place) -> float:
        left, bottom = place
        return sum(max(0, min(left + width, x1) - max(left, x0)) * max(0, min(bottom + height, y1) - max(bottom, y0))
                   for x0, y0, x1, y1 in taken)

    left, bottom = min(places, key=covered)
    return left, bottom, left + width, bottom + height


def position_vectors(table: Tensor) -> Picture:
    """Added positions [positions, size] as a map: each row is the vector that is added at one position."""
    with picture(f"the {table.shape[1]} numbers that are added at each of {table.shape[0]} positions, from -1 to 1: "
                 f"the first columns swing fast, the last hardly at all", height=3.4) as (figure, axes):
        image = axes.imshow(table.numpy(), cmap="gray", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], label="value")
        axes.grid(False)
        label_axes(axes, "place in the vector (0: fastest)", "position (tokens)")
    return figure


def wavelengths(head_dim: int, base: float, context: int) -> Picture:
    """Tokens that each rotary pair takes for one full turn, against the context window. Log scale."""
    turns = [2 * math.pi * base ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
    inside = sum(turn <= context for turn in turns)
    alt = (f"tokens for one turn: {turns[0]:.1f} for the fastest pair, {turns[-1]:,.0f} for the slowest; {inside} of "
           f"{len(turns)} pairs turn at least once within {context:,} tokens")
    with picture(alt) as (figure, axes):
        axes.plot(turns, "o", color=COLORS["attention"], markersize=5)
        axes.axhline(context, color=COLORS["neutral"], linestyle="--")
        axes.annotate(f"context window: {context:,} tokens", (0, context), (0, 4), textcoords="offset points")
        for pair, text, place in ((0, f"{turns[0]:.1f}", (4, -13)), (len(turns) - 1, f"{turns[-1]:,.0f}", (-68, -4))):
            axes.annotate(text, (pair, turns[pair]), place, textcoords="offset points", fontweight="bold")
        axes.set_yscale("log")
        axes.set_ylim(bottom=2)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        label_axes(axes, "pair", "tokens for one full turn\n(log scale)")
    return figure


def rope_score(q: Tensor, k: Tensor, q_at: int, k_at: int, base: float) -> float:
    """The score of a query at one position and a key at another: both turned, then multiplied."""
    cos, sin = rope_table(torch.tensor([q_at, k_at]), q.numel(), base)
    return float(rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1]))


def rope_dial(q: Tensor, k: Tensor, q_at: int, k_at: int, base: float, reach: int = 20) -> Picture:
    """Each pair of a query and of a key as two hands of a dial, and their score among those of other distances."""
    cos, sin = rope_table(torch.tensor([q_at, k_at]), q.numel(), base)
    hands = ((q, rotate(q, cos[0], sin[0]), QUERY, "query"), (k, rotate(k, cos[1], sin[1]), KEY, "key"))
    half, distance, score = q.numel() // 2, q_at - k_at, rope_score(q, k, q_at, k_at, base)
    alt = f"query at {q_at}, key at {k_at}, distance {distance}: score {score:.3f}"
    with picture(alt, 1, half + 1, width=3 * half + 4.5, height=3.3, width_ratios=[1] * half + [1.5]) as (figure, axes):
        for pair, dial in enumerate(axes[:half]):
            radius = 1.12 * max(math.hypot(float(x[pair]), float(x[pair + half])) for x in (q, k))
            for plain, turned, color, name in hands:
                dial.plot([0, plain[pair]], [0, plain[pair + half]], color=color, alpha=0.6, linestyle=":")
                tip = (float(turned[pair]), float(turned[pair + half]))
                dial.annotate("", tip, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2.5,
                                                           "shrinkA": 0, "shrinkB": 0})
                dial.plot([], [], color=color, linewidth=2.5, label=name)
            dial.set(xlim=(-radius, radius), ylim=(-radius, radius), aspect="equal")
            speed = base ** (-2 * pair / q.numel())
            label_axes(dial, f"x[{pair}]", f"x[{pair + half}]", f"pair {pair}: {speed:.3g} rad per token")
        axes[0].plot([], [], color=COLORS["neutral"], linestyle=":", label="at position 0")
        axes[0].legend(loc="lower left", fontsize=8)
        distances = range(-reach, reach + 1)
        axes[-1].plot(distances, [rope_score(q, k, max(d, 0), max(-d, 0), base) for d in distances], ".-",
                      color=COLORS["neutral"], linewidth=1, markersize=4)
        axes[-1].plot(distance, score, "o", color=COLORS["attention"], markersize=10)
        title = f"{q_at} - {k_at} = {distance}: score {score:.3f}"
        label_axes(axes[-1], "distance: query - key (tokens)", "score", title)
    return figure
