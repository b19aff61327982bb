"""Lesson 04: where the parameters sit, what each layer would answer, and what a sampler keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..style import COLORS, Picture, label_axes, picture, visible

DROPPED = "#C4C4C4"
SHADES = {"embedding": ("neutral", 0.55), "attention": ("attention", 1.0), "feed-forward": ("weights", 1.0)}


def parameter_map(embedding: int, layer: Mapping[str, int], layers: int, final_norm: int) -> Picture:
    """Every parameter as area; a line of the picture is as long as one layer.

    `layer`: name of a matrix -> its count. gate, up and down are the feed-forward part, names that begin with "norm"
    the norms, all others attention.
    """
    line = sum(layer.values())
    kinds = {name: "feed-forward" if name in ("gate", "up", "down") else
             "norms" if name.startswith("norm") else "attention" for name in layer}
    total = {kind: layers * sum(n for name, n in layer.items() if kinds[name] == kind) for kind in kinds.values()}
    total = {"embedding": embedding, **total, "norms": total.get("norms", 0) + final_norm}
    everything = sum(total.values())
    parts = (f"{kind} {n:,} ({n / everything:.1%})" for kind, n in total.items())
    alt = f"{everything:,} parameters: {', '.join(parts)}"
    with picture(alt, height=5.6) as (figure, axes):
        rows = -(-embedding // line)
        for row in range(rows):
            _strip(axes, row, 0, min(line, embedding - row * line), "embedding")
        for row in range(rows, rows + layers):
            start = 0
            for name, count in layer.items():
                if kinds[name] in SHADES:
                    _strip(axes, row, start, count, kinds[name])
                start += count
        start = 0
        for name, count in layer.items():
            if kinds[name] in SHADES:
                _label(axes, start + count / 2, rows + layers / 2 - 0.5, name, kinds[name])
            start += count
        _label(axes, line / 2, rows / 2 - 0.5, "embedding, which is also the output head", "embedding")
        for kind, (color, alpha) in SHADES.items():
            axes.bar(0, 0, color=COLORS[color], alpha=alpha,
                     label=f"{kind} {total[kind]:,} ({total[kind] / everything:.0%})")
        axes.bar(0, 0, color="none", label=f"norms {total['norms']:,}: too thin to see")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        axes.set(xlim=(0, line / 1e6), ylim=(rows + layers - 0.4, -0.6))
        axes.set_yticks([rows, rows + layers - 1], ["layer 0", f"layer {layers - 1}"])
        axes.grid(False)
        label_axes(axes, "parameters in one line (millions)", "", f"{everything:,} parameters")
    return figure


def _strip(axes: Axes, row: int, start: int, count: int, kind: str) -> None:
    color, alpha = SHADES[kind]
    axes.barh(row, count / 1e6, left=start / 1e6, height=0.86, color=COLORS[color], alpha=alpha, edgecolor="white",
              linewidth=0.8)


def _label(axes: Axes, x: float, row: float, text: str, kind: str) -> None:
    color, alpha = SHADES[kind]
    background = [1 - alpha * (1 - c) for c in to_rgb(COLORS[color])]
    axes.text(x / 1e6, row, text, ha="center", va="center", fontsize=9,
              bbox={"facecolor": background, "edgecolor": "none", "pad": 2})


def logit_lens(panels: Mapping[str, Tensor], tokenizer) -> Picture:
    """What each layer would answer: title -> probabilities [layers + 1, vocab]; the last row is the model's answer."""
    described = []
    for title, probabilities in panels.items():
        first, best = _settled(probabilities), int(probabilities[-1].argmax())
        described.append(f"{title}: {tokenizer.decode([best])!r} is the first choice from layer {first} on")
    with picture("; ".join(described), 1, len(panels), height=6.4, squeeze=False) as (figure, axes):
        for axis, (title, probabilities) in zip(axes[0], panels.items()):
            final = int(probabilities[-1].argmax())
            top, ids = probabilities.max(-1)
            ranks = 1 + (probabilities > probabilities[:, final : final + 1]).sum(-1)
            rows = range(len(top))
            colors = [COLORS["decode"] if i == final else DROPPED for i in ids.tolist()]
            axis.barh(rows, top.tolist(), color=colors, height=0.8)
            for row in rows:
                axis.text(0.015, row, f"'{visible(tokenizer.decode([int(ids[row])]))}'", va="center", fontsize=8,
                          fontfamily="monospace")
                axis.text(1.13, row, f"{int(ranks[row]):,}", va="center", ha="right", fontsize=8,
                          color=COLORS["neutral"])
            axis.set(xlim=(0, 1.15), ylim=(len(top) - 0.4, -0.6), xticks=[0, 0.25, 0.5, 0.75, 1])
            axis.set_yticks([0, *range(5, len(top), 5)])
            axis.grid(axis="y", visible=False)
            label_axes(axis, "probability of the first choice", "layers run so far" if axis is axes[0][0] else "")
            answer = f"'{visible(tokenizer.decode([final]))}'"
            axis.text(1.13, -1.1, f"rank of {answer}", ha="right", fontsize=8, color=COLORS["neutral"])
            axis.set_title(f"{title}\norange: {answer}, the model's answer", fontsize=9, pad=16)
    return figure


def _settled(probabilities: Tensor) -> int:
    """The first layer from which on the first choice is the last layer's."""
    same = (probabilities.argmax(-1) == probabilities[-1].argmax()).tolist()
    return len(same) - (same[::-1] + [False]).index(False)


def sampler_stages(sampler, logits: Tensor, tokenizer, drawn: Mapping[int, int] | None = None,
                   top: int = 15) -> Picture:
    """The probabilities after each of the sampler's steps, for the model's `top` candidates and the rest together.

    `drawn`: id -> how often it was drawn so far. The steps are `sampler.stages`: the picture shows what is drawn from.
    """
    stages = sampler.stages(logits)
    ids = stages[0][1].topk(min(top, len(logits))).indices
    last = stages[-1][1]
    names = [visible(tokenizer.decode([i])) for i in ids.tolist()]
    steps = ", ".join(name for name, _ in stages[1:])
    alt = (f"{int((last > 0).sum()):,} of {len(last):,} tokens are left after {steps}; "
           f"the most probable, {names[0]}, has {float(last[ids[0]]):.0%}")
    panels = len(stages) + bool(drawn)
    with picture(alt, 1, panels, height=0.24 * len(ids) + 1.3, sharey=True, squeeze=False) as (figure, axes):
        longest = max(float(p[ids].max()) for _, p in stages)
        for axis, (name, p) in zip(axes[0], stages):
            limit = getattr(sampler, name.replace("-", "_").replace(" ", "_"), None)
            title = f"{name} {limit:g}" if limit is not None else name
            _candidates(axis, [*p[ids].tolist(), float(p.index_fill(0, ids, 0.0).sum())], longest)
            label_axes(axis, "probability", "")
            axis.set_title(f"{title}\n{int((p > 0).sum()):,} left", fontsize=9)
        if drawn:
            axis, rest = axes[0][-1], sum(drawn.values()) - sum(drawn.get(i, 0) for i in ids.tolist())
            counts = [*(drawn.get(i, 0) for i in ids.tolist()), rest]
            bars = axis.barh(range(len(counts)), counts, color=COLORS["decode"])
            axis.bar_label(bars, [f" {n}" if n else "" for n in counts], fontsize=8)
            axis.set_xlim(0, 1.4 * max(counts))
            axis.xaxis.set_major_locator(MaxNLocator(2, integer=True))
            axis.grid(axis="y", visible=False)
            label_axes(axis, "times", "")
            axis.set_title(f"drawn\n{sum(drawn.values()):,}", fontsize=9)
        axes[0][0].set_yticks(range(len(ids) + 1), [*names, "all others"], fontfamily="monospace", fontsize=8)
        axes[0][0].set_ylim(len(ids) + 0.5, -0.6)
    return figure


def _candidates(axis: Axes, probabilities: Sequence[float], longest: float) -> None:
    """One bar for each candidate; a cross where a filter left nothing."""
    axis.barh(range(len(probabilities)), probabilities, color=COLORS["neutral"])
    for row, p in enumerate(probabilities):
        axis.text(p, row, f" {p:.1%}" if p else " ×", va="center", fontsize=8, color="black" if p else DROPPED)
    axis.set_xlim(0, 1.55 * max(longest, max(probabilities)))
    axis.xaxis.set_major_locator(MaxNLocator(2))
    axis.grid(axis="y", visible=False)


def draws(probabilities: Tensor, drawn: Mapping[int, int], tokenizer, top: int = 12) -> Picture:
    """How often each of the most probable tokens was drawn, beside how often its probability lets expect it."""
    p, ids = probabilities.topk(top)
    count = sum(drawn.values())
    names = [visible(tokenizer.decode([i])) for i in ids.tolist()]
    alt = (f"{count:,} draws beside their probabilities: {float(p[0]):.0%} for {names[0]}, the most probable token, "
           f"{1 - float(p.sum()):.0%} for all but the first {top} together")
    with picture(alt, height=3.8) as (figure, axes):
        expected = [count * float(v) for v in p] + [count * (1 - float(p.sum()))]
        observed = [drawn.get(i, 0) for i in ids.tolist()]
        observed.append(count - sum(observed))
        axes.barh(range(top + 1), observed, color=COLORS["decode"], label="drawn")
        axes.scatter(expected, range(top + 1), marker="|", s=160, color="black", linewidth=2, zorder=3,
                     label="expected: probability × draws")
        for row, (times, hoped) in enumerate(zip(observed, expected)):
            axes.annotate(f"{times}", (max(times, hoped), row), (7, 0), textcoords="offset points", va="center",
                          fontsize=9)
        axes.set_yticks(range(top + 1), [*names, "all others"], fontfamily="monospace")
        axes.set(ylim=(top + 0.6, -0.6), xlim=(0, 1.12 * max(*expected, *observed)))
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower right" if observed[-1] < 0.5 * max(observed) else "center right")
        label_axes(axes, f"times among {count:,} draws", "")
    return figure
