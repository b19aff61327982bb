"""Lesson 03: maps of attention, what scaling does, what each head looks at, what a head is worth, and what T² costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import ScalarFormatter
from torch import Tensor

from ..style import COLORS, Picture, drawable, footnote, label_axes, picture, shortened, visible

WEIGHTS = LinearSegmentedColormap.from_list("attention", ["#FFFFFF", COLORS["attention"], "#4A1237"])  # 0, 0.5, 1


def attention_maps(maps: dict[str, Tensor], tokens: Sequence[str]) -> Picture:
    """Maps of a few tokens with their numbers: title -> weights [queries, keys]; the queries are the last tokens."""
    alt = ". ".join(f"{title}: " + "; ".join(
        f"{token!r} looks at " + ", ".join(f"{seen!r} {w:.0%}" for seen, w in zip(tokens, row) if w >= 0.005)
        for token, row in zip(tokens[-len(weights):], weights.tolist())) for title, weights in maps.items())
    with picture(alt, 1, len(maps), width=4.3 * len(maps), height=3.9, squeeze=False) as (figure, axes):
        for axis, (title, weights) in zip(axes[0], maps.items()):
            axis.imshow(weights.numpy(), cmap=WEIGHTS, vmin=0, vmax=1)
            for row, column in weights.nonzero().tolist():  # what is masked stays empty
                w = float(weights[row, column])
                axis.text(column, row, f"{w:.2f}", ha="center", va="center", color="white" if w > 0.6 else "black")
            axis.grid(False)
            axis.set_xticks(range(len(tokens)), [visible(t) for t in tokens])
            axis.set_yticks(range(len(weights)), [visible(t) for t in tokens[-len(weights):]])
            label_axes(axis, "token it looks at (key)", "token that looks (query)", title)
    return figure


def scale_effect(dims: Sequence[int], spread: dict[str, Sequence[float]],
                 largest: dict[str, Sequence[float]]) -> Picture:
    """Scores and weights against the length of the vectors; both dicts map "plain" and "scaled" to values."""
    looks = {"plain": (COLORS["mistake"], "s--", "q · k"), "scaled": (COLORS["attention"], "o-", "q · k / √d")}
    alt = ". ".join(f"{looks[name][2]}, d from {dims[0]} to {dims[-1]}: spread of the scores from "
                    f"{spread[name][0]:.1f} to {spread[name][-1]:.1f}, largest weight from {largest[name][0]:.2f} "
                    f"to {largest[name][-1]:.2f}" for name in spread)
    with picture(alt, 1, 2, height=3.3) as (figure, (left, right)):
        for name in spread:
            color, line, label = looks[name]
            left.loglog(dims, spread[name], line, color=color, label=label)
            right.semilogx(dims, largest[name], line, color=color, label=label)
        for axis in (left, right):
            axis.set_xticks(dims, dims)
            axis.minorticks_off()
        left.set_yticks([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32])
        right.set_ylim(0, 1)
        right.axhline(1 / 16, color=COLORS["neutral"], linewidth=1)
        right.text(dims[-1], 1 / 16, "all 16 alike: 1/16", ha="right", va="bottom", color=COLORS["neutral"])
        left.legend()
        label_axes(left, "numbers in a vector, d (log scale)", "standard deviation (log scale)", "scores")
        label_axes(right, "numbers in a vector, d (log scale)", "mean of the largest weight", "weights over 16 keys")
    return figure


def head_scores(scores: dict[str, Tensor]) -> Picture:
    """A panel for each kind of head: title -> score [layers, heads] of every head; the best is framed."""
    best = {title: divmod(int(values.argmax()), values.shape[1]) for title, values in scores.items()}
    alt = ". ".join(f"{title}: the highest of {values.numel()} scores is {values.max():.2f}, "
                    f"layer {best[title][0]} head {best[title][1]}" for title, values in scores.items())
    with picture(alt, len(scores), 1, height=1.95 * len(scores) + 0.5, sharex=True, squeeze=False) as (figure, axes):
        for axis, (title, values) in zip(axes[:, 0], scores.items()):
            image = axis.imshow(values.T.numpy(), cmap=WEIGHTS, vmin=0, vmax=1, aspect="auto")
            layer, head = best[title]
            axis.plot(layer, head, "s", markersize=15, markerfacecolor="none", markeredgecolor="black")
            axis.grid(False)
            axis.set_yticks(range(0, values.shape[1], 2))
            axis.set_xticks(range(0, values.shape[0], 2))
            name = f"{title}: best is layer {layer}, head {head} ({values.max():.2f})"
            label_axes(axis, "layer" if axis is axes[-1][0] else "", "head", name)
        figure.colorbar(image, ax=list(axes[:, 0]), label="mean attention weight", shrink=0.6)
    return figure


def knock_out(intact: float, without: dict[str, float], others: Sequence[float]) -> Picture:
    """The loss when one head is silenced: `without` maps its name to the loss, `others` are random heads."""
    alt = (f"loss {intact:.1f} nats with all heads; "
           + "; ".join(f"{loss:.1f} without {name}" for name, loss in without.items())
           + f"; without one of {len(others)} random heads {min(others):.1f} to {max(others):.1f}")
    names = [*without, f"one of {len(others)}\nrandom heads"]
    with picture(alt, height=0.62 * len(names) + 1.1) as (figure, axis):
        axis.barh(range(len(without)), without.values(), color=COLORS["attention"], height=0.6)
        axis.plot(others, [len(without)] * len(others), "o", color=COLORS["neutral"], alpha=0.6)
        axis.axvline(intact, color="black", linewidth=1)
        for row, loss in enumerate(without.values()):
            axis.text(max(loss, intact), row, f" {loss:.1f}", va="center")
        axis.text(intact, -0.62, f" all heads: {intact:.1f}", va="bottom")
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -1.1)
        axis.set_xlim(0, 1.08 * max(*without.values(), *others))
        axis.grid(False, axis="y")
        label_axes(axis, "loss on the second copy (nats per token; lower is better)", "without")
    return figure


def growth(tokens: Sequence[int], seconds: dict[str, Sequence[float]], note: str = "") -> Picture:
    """Time against the length of the text, both axes logarithmic: "attention" and "matrices" -> seconds."""
    looks = {"attention": (COLORS["attention"], "o-", "attention: scores and mixing"),
             "matrices": (COLORS["weights"], "s--", "the layer's weight matrices")}
    alt = "; ".join(f"{looks[name][2]}: from {s[0] * 1e3:.1f} ms for {tokens[0]} tokens to {s[-1] * 1e3:.0f} ms for "
                    f"{tokens[-1]}, slope {slope(tokens, s):.2f}" for name, s in seconds.items())
    with picture(alt, height=3.8) as (figure, axis):
        for name, values in seconds.items():
            color, line, label = looks[name]
            axis.loglog(tokens, [1e3 * s for s in values], line, color=color,
                        label=f"{label} (slope {slope(tokens, values):.1f})")
        axis.set_xticks(tokens, [f"{t:,}" for t in tokens])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.legend()
        label_axes(axis, "tokens T (log scale)", "time for one layer (ms, log scale)")
        footnote(figure, note)
    return figure


def slope(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent p of seconds ~ tokens^p: the slope of the best line through the points on log-log axes."""
    x, y = torch.tensor(tokens, dtype=torch.float64).log(), torch.tensor(seconds, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def explorer_view(thumbnails: Tensor, weights: Tensor, tokens: Sequence[str], layer: int, head: int,
                  token: int) -> Picture:
    """The attention explorer standing still: thumbnails [layers, heads, n, n] of bytes, one map [T, T], one token."""
    def label(at: int) -> str:
        return shortened(drawable(tokens[at]), 20)

    layers, heads, n, _ = thumbnails.shape
    order = [at for at in weights[token].argsort(descending=True)[:6].tolist() if at <= token]
    looks = [(f"{tokens[at]} ({at})", float(weights[token, at])) for at in order]
    alt = (f"thumbnails of {layers} x {heads} attention heads; below, layer {layer}, head {head} on {len(tokens)} "
           f"tokens, with {weights[:, 0].mean():.0%} of its weight on the first token; token {token}, "
           f"{tokens[token]}, looks at {looks[0][0]} with {looks[0][1]:.0%}")
    with picture(alt, 2, 2, height=7.2, height_ratios=[1, 1.55], width_ratios=[1.35, 1]) as (figure, axes):
        for axis in axes[0]:
            axis.remove()
        top, (left, right) = figure.add_subplot(axes[1, 0].get_gridspec()[0, :]), axes[1]
        size = n + 4  # with a gap between them
        framed = torch.nn.functional.pad(thumbnails, (0, 4, 0, 4))  # [layers, heads, size, size]
        framed = framed.permute(1, 2, 0, 3).reshape(heads * size, layers * size)
        top.imshow(framed.numpy(), cmap=WEIGHTS, vmin=0, vmax=255)
        corner = layer * size - 2.5, head * size - 2.5
        top.add_patch(Rectangle(corner, size, size, fill=False, edgecolor="black", linewidth=1.5))
        top.set_xticks([layer * size + n / 2 for layer in range(0, layers, 2)], range(0, layers, 2))
        top.set_yticks([head * size + n / 2 for head in range(heads)], range(heads))
        label_axes(top, "layer", "head", "")
        left.imshow(weights.sqrt().numpy(), cmap=WEIGHTS, vmin=0, vmax=1)
        left.axhline(token, color=COLORS["neutral"], linewidth=0.8)
        label_axes(left, "token it looks at (position)", "token that looks (position)", f"layer {layer}, head {head}")
        bars = right.barh(range(len(looks)), [w for _, w in looks], color=COLORS["attention"])
        names = [f"{label(at)} ({at})" for at in order]
        right.set_yticks(range(len(names)), names, fontfamily="monospace")
        right.invert_yaxis()
        right.bar_label(bars, [f" {w:.0%}" for _, w in looks])
        right.set(xlim=(0, 1.15), xticks=[0, 0.5, 1], anchor="N", box_aspect=0.9)
        label_axes(right, "attention weight", "", f"{label(token)} ({token}) looks at")
        for axis in (top, left):
            axis.grid(False)
        for ticks in (left.xaxis, left.yaxis):
            ticks.get_major_locator().set_params(integer=True)
    return figure
