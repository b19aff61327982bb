"""Lesson 10: what fits into a memory, for how many, how fast at most; a plan beside what was measured; training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ..style import COLORS, Picture, axis_note, drawable, footnote, label_axes, log_ticks, picture, short

LOOKS = {  # of a part of memory, in the order in which they are stacked
    "weights": {"color": COLORS["weights"]},
    "cache": {"color": COLORS["kv_cache"]},
    "activations": {"color": "#B9B9B9"},
    "reserve": {"color": "white", "edgecolor": COLORS["neutral"], "hatch": "//"},
    "gradients": {"color": COLORS["prefill"]},
    "optimizer": {"color": "#1F4E6B"},
}
PLATE = {"color": "white", "pad": 1}  # under a number that stands on a hatched part
LONGEST = 400  # per cent of a memory that a bar can show
LINES = (("-", "o"), ("--", "s"), ("-.", "D"), (":", "^"))


def both_units(nbytes: float) -> str:
    """A size in both units, each to three digits: 5.37 GB (5 GiB), 24 MB (22.9 MiB)."""
    name, ten, two = ("G", 1e9, 2**30) if nbytes >= 1e8 or nbytes == 0 else ("M", 1e6, 2**20)
    return f"{short(nbytes / ten)} {name}B ({short(nbytes / two)} {name}iB)"


def verdict(parts: Mapping[str, float], memory: float) -> str:
    """Does it fit? In words, with what is left or missing."""
    needed = sum(parts.values())
    rest = f"{both_units(abs(memory - needed))} {'free' if needed <= memory else 'too much'}"
    return f"needs {both_units(needed)} of {both_units(memory)}: {rest}"


def listed(parts: Mapping[str, float], unit: float = 1e9, name: str = "GB") -> str:
    return ", ".join(f"{part} {short(size / unit)} {name}" for part, size in parts.items())


def _parts(label: str, parts: Mapping[str, float]) -> None:
    unknown = [name for name in parts if name not in LOOKS]
    if unknown or not parts:
        raise ValueError(f"the parts of {label!r} must be named {', '.join(LOOKS)}, not {unknown or 'nothing'}")
    for name, size in parts.items():
        if not 0 <= size < math.inf:
            raise ValueError(f"{name} of {label!r} must be a number of bytes, at least 0, not {size!r}")


def memory_bars(rows: Mapping[str, tuple[Mapping[str, float], float]], title: str = "") -> Picture:
    """Label -> (bytes of each part, bytes of the device's memory): a bar for each, in per cent of its memory.

    The picture ends at LONGEST per cent; a longer bar says how long it is.
    """
    if not rows:
        raise ValueError("there is nothing to draw: give at least one bar, label -> (parts, memory)")
    for label, (parts, memory) in rows.items():
        _parts(label, parts)
        _above_0(f"the memory of {label!r}", memory)
    alt = "memory: " + ". ".join(f"{label} {verdict(parts, memory)} ({listed(parts)})"
                                 for label, (parts, memory) in rows.items())
    longest = min(LONGEST, max(100, *(100 * sum(parts.values()) / memory for parts, memory in rows.values())))
    with picture(alt, height=1.7 + 0.75 * len(rows)) as (figure, axis):
        for place, (parts, memory) in enumerate(rows.values()):
            _stack(axis, place, parts, memory / 100, longest, 1e9)
            over = 100 * sum(parts.values()) / memory - 100
            if over > 0:
                axis.barh(place, over, 0.5, left=100, color="none", edgecolor=COLORS["mistake"], hatch="xx",
                          linewidth=2)
            if over + 100 > longest:
                axis.text(longest, place, f"{short(1 + over / 100)} times the memory →", ha="right", va="center",
                          bbox=PLATE)
            axis.text(0, place - 0.32, verdict(parts, memory), va="bottom", fontsize=9,
                      color=COLORS["mistake"] if over > 0 else "black")
            axis.plot([100, 100], [place - 0.28, place + 0.36], color="black", linewidth=2.5,
                      label="all the memory there is")
        axis.set_yticks(range(len(rows)), [drawable(label) for label in rows])
        axis.set(xlim=(0, 1.04 * longest), ylim=(len(rows) - 0.5, -0.75))
        axis.grid(False, axis="y")
        _legend(figure, axis)
        label_axes(axis, "share of the device's memory (%); numbers in the bars: GB, 10^9 bytes", "", drawable(title))
    return figure


def _stack(axis: Axes, place: float, parts: Mapping[str, float], unit: float, longest: float, shown: float) -> None:
    """One bar, in `unit` bytes; a part that is wide enough for it carries its size in `shown` bytes."""
    left = 0.0
    for name in sorted(parts, key=list(LOOKS).index):
        width = parts[name] / unit
        axis.barh(place, width, 0.5, left=left, label=name, **{"linewidth": 0.5, **LOOKS[name]})
        seen = min(left + width, longest) - left
        if seen > 0.07 * longest:
            dark = name in ("gradients", "optimizer", "cache")
            axis.text(left + seen / 2, place, short(parts[name] / shown), ha="center", va="center",
                      color="white" if dark else "black", bbox=PLATE if name == "reserve" else None)
        left += width


def _legend(figure: Picture, axis: Axes) -> None:
    handles = dict(zip(*reversed(axis.get_legend_handles_labels())))  # each name once
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)


def users_by_context(contexts: Sequence[int], users: Mapping[str, Sequence[int]], window: int | None = None,
                     title: str = "") -> Picture:
    """How many users fit against the context of each, both log scales: label -> users at each of the contexts.

    Contexts at which nobody fits are left out. `window`: the longest text that the model was trained for.
    """
    if not users or any(len(counts) != len(contexts) for counts in users.values()):
        raise ValueError("give label -> as many numbers of users as there are contexts")
    for label, counts in users.items():
        if not any(counts):
            raise ValueError(f"{label!r}: nobody fits at any of these contexts; leave it out, and say so")
    alt = "users that fit; " + "; ".join(
        f"{label}: " + ", ".join(f"{count:,} at {context:,} tokens" for context, count in zip(contexts, counts)
                                 if context in (contexts[0], contexts[-1], window)) for label, counts in users.items())
    alt += f"; context window {window:,} tokens" if window else ""
    with picture(alt, height=4.2) as (figure, axis):
        shades = [COLORS["mistake"], COLORS["decode"], COLORS["kv_cache"], COLORS["prefill"], COLORS["attention"]]
        for at, (label, counts) in enumerate(users.items()):
            line, marker = LINES[at % len(LINES)]
            shown = [(context, count) for context, count in zip(contexts, counts) if count]
            axis.plot(*zip(*shown), line, marker=marker, markersize=4, color=shades[at % len(shades)],
                      label=drawable(label))
        axis.set(xscale="log", yscale="log", xlim=(contexts[0] / 1.1, contexts[-1] * 1.1))
        axis.set_xticks(contexts[::2], [f"{c:,}" for c in contexts[::2]])
        axis.minorticks_off()
        log_ticks(axis.yaxis, (1, 3))
        if window:
            axis.axvspan(window, contexts[-1] * 1.1, color="#EEEEEE", zorder=0)
            axis.axvline(window, color="black", linewidth=1)
            axis.text(window, axis.get_ylim()[1], " beyond what the model\n was trained for", va="top", fontsize=9)
        figure.legend(loc="outside lower center", ncols=3)
        label_axes(axis, "context of each user (tokens, log scale)", "users that fit (log scale)", drawable(title))
    return figure


@dataclass(frozen=True)
class Batches:
    """Steps of so many tokens each, at least `seconds` long; the first `fit` of them fit into memory."""

    sizes: Sequence[int]
    seconds: Sequence[float]
    fit: int

    @property
    def rates(self) -> list[float]:
        """Tokens per second, all requests together."""
        return [size / seconds for size, seconds in zip(self.sizes, self.seconds)]


def latency_throughput(curves: Mapping[str, Batches], critical: int | None = None, title: str = "") -> Picture:
    """Tokens per second in all against the time per token, a point for each batch; hollow: does not fit into memory.

    `critical`: the batch from which multiplying the weights takes longer than reading them.
    """
    if not curves:
        raise ValueError("there is nothing to draw: give at least one curve, label -> Batches")
    for label, curve in curves.items():
        if not len(curve.sizes) == len(curve.seconds) > 0 or not 0 <= curve.fit <= len(curve.sizes):
            raise ValueError(f"{label!r} needs as many seconds as batch sizes, and `fit` among them, not {curve!r}")
        for seconds in curve.seconds:
            _above_0(f"a time of {label!r}", seconds)
    alt = "tokens per second against time per token; " + "; ".join(
        f"{label}: " + ", ".join(f"batch {size} {short(1e3 * seconds)} ms {short(rate)} tokens/s"
                                 + ("" if at < curve.fit else " (does not fit)") for at, (size, seconds, rate)
                                 in enumerate(zip(curve.sizes, curve.seconds, curve.rates)))
        for label, curve in curves.items())
    alt += f"; multiplying the weights takes longer than reading them from a batch of {critical}" if critical else ""
    shades = [COLORS["decode"], COLORS["kv_cache"], COLORS["attention"], COLORS["prefill"]]
    with picture(alt, height=4.6) as (figure, axis):
        for at, (label, curve) in enumerate(curves.items()):
            color, (line, marker) = shades[at % len(shades)], LINES[at % len(LINES)]
            times = [1e3 * seconds for seconds in curve.seconds]
            axis.plot(times, curve.rates, line, color=color, marker=marker, label=drawable(label))
            axis.plot(times[curve.fit:], curve.rates[curve.fit:], marker, color=color, markerfacecolor="white")
            for size, x, y in zip(curve.sizes, times, curve.rates):
                axis.annotate(f"{size}", (x, y), (0, 9 if size == critical else 6), textcoords="offset points",
                              ha="center", fontsize=8)
            if critical in curve.sizes:
                place = curve.sizes.index(critical)
                axis.plot(times[place], curve.rates[place], marker, color="black", markersize=13, fillstyle="none")
        axis.set(xscale="log", yscale="log")
        axis.set_ylim(top=1.5 * axis.get_ylim()[1])  # room for the numbers
        log_ticks(axis.xaxis, (1, 2, 5))
        log_ticks(axis.yaxis, (1, 3))
        axis.plot([], [], "o", color="black", markersize=11, fillstyle="none",
                  label="multiplying the weights takes as long as reading them" if critical else "")
        axis.plot([], [], "o", color=COLORS["neutral"], markerfacecolor="white", label="does not fit into memory")
        figure.legend(loc="outside lower center", ncols=2)
        label_axes(axis, "time per token, at least (ms, log scale)", "tokens per second in all,\nat most (log scale)",
                   drawable(title))
    return figure


def plan_and_measured(rows: Mapping[str, tuple[float, float]], note: str = "") -> Picture:
    """Label -> (least seconds by the plan, seconds measured): the part of each time that the plan accounts for."""
    if not rows:
        raise ValueError("there is nothing to draw: give label -> (planned, measured) seconds")
    for label, pair in rows.items():
        for name, seconds in zip(("planned", "measured"), pair):
            _above_0(f"{name} time of {label!r}", seconds)
    told = {label: f"at least {short(1e3 * planned)} ms, measured {short(1e3 * measured)} ms: {planned / measured:.0%}"
            for label, (planned, measured) in rows.items()}
    with picture("the plan's part of the time; " + "; ".join(f"{label}: {words}" for label, words in told.items()),
                 height=1.5 + 0.6 * len(rows)) as (figure, axis):
        for place, (label, (planned, measured)) in enumerate(rows.items()):
            color = COLORS["prefill" if "TTFT" in label else "decode"]
            axis.barh(place, 100, 0.55, color="#E8E8E8")
            axis.barh(place, 100 * planned / measured, 0.55, color=color)
            axis.text(101, place, told[label].split(": ")[0], va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), [drawable(label) for label in rows])
        axis.invert_yaxis()
        axis.set_xlim(0, max(155, *(100 * planned / measured for planned, measured in rows.values())))
        axis.set_xticks(range(0, 101, 20))
        axis.grid(False, axis="y")
        label_axes(axis, "share of the measured time (%); grey: what the plan does not know", "",
                   "the plan's bound, and what was measured")
        footnote(figure, note)
    return figure


def training_and_inference(memory: Mapping[str, Mapping[str, float]], ratios: Mapping[str, float],
                           note: str = "") -> Picture:
    """Left, memory by parts for each job: label -> part -> bytes. Right, a training step over a forward pass."""
    for label, parts in memory.items():
        _parts(label, parts)
    for label, ratio in ratios.items():
        _above_0(f"{label!r}", ratio)
    if not memory or not ratios:
        raise ValueError("there is nothing to draw: give the memory of each job, and at least one ratio")
    alt = "; ".join(f"{label}: {listed(parts, 1e6, 'MB')}" for label, parts in memory.items())
    alt += ". A training step over a forward pass: " + ", ".join(f"{label} {ratio:.1f}" for label, ratio
                                                                 in ratios.items())
    with picture(alt, 1, 2, height=3.3, width_ratios=[1.7, 1]) as (figure, (left, right)):
        longest = max(sum(parts.values()) for parts in memory.values()) / 1e6
        for place, parts in enumerate(memory.values()):
            _stack(left, place, parts, 1e6, longest, 1e6)
        left.set_yticks(range(len(memory)), [drawable(label) for label in memory])
        left.invert_yaxis()
        left.grid(False, axis="y")
        _legend(figure, left)
        label_axes(left, "memory (MB, 10^6 bytes)", "", "what must be kept")
        bars = right.bar([drawable(label) for label in ratios], ratios.values(), color=COLORS["neutral"], width=0.55)
        right.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios.values()])
        right.axhline(1, color="black", linewidth=1)
        right.set_ylim(0, 1.2 * max(ratios.values()))
        right.grid(False, axis="x")
        label_axes(right, "", "times one forward pass", "a training step")
        axis_note(left, note)
    return figure


def _above_0(name: str, number: float) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {number!r}")
