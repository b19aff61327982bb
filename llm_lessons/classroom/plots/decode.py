"""Lesson 06: what one decode step reads, how long it takes, and how far that is from what the machine allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...capacity import ridge_point
from ...timing import Roofline
from ..style import COLORS, Picture, axis_note, footnote, label_axes, log_ticks, picture
from .prefill import draw_roof

PARTS = [COLORS["weights"], "#A9D8F5", COLORS["kv_cache"], COLORS["neutral"]]  # of a step; the second: weights, paler


def growing_time(tokens: Sequence[int], measured: Sequence[float], least: Sequence[float], note: str = "") -> Picture:
    """Without a cache: seconds for one more token against the tokens of text, and the least time of the roofline."""
    alt = "time for one more token without a cache: " + "; ".join(
        f"{t} tokens {_ms(m)}, at least {_ms(a)}" for t, m, a in zip(tokens, measured, least))
    with picture(alt, height=3.4) as (figure, axis):
        axis.plot(tokens, [1e3 * s for s in measured], "o-", color=COLORS["decode"], linewidth=2, label="measured")
        axis.plot(tokens, [1e3 * s for s in least], "--", color=COLORS["neutral"], linewidth=2,
                  label="least time, from the roofline")
        axis.set(xlim=(0, None), ylim=(0, None))
        axis.set_xticks(tokens, [f"{t:,}" for t in tokens])
        axis.legend()
        label_axes(axis, "tokens of text", "time for one more token (ms)", "without a cache")
        footnote(figure, note)
    return figure


def step_bytes(contexts: Sequence[int], weights: float, cache: Sequence[float], bandwidth: float,
               seconds: Sequence[float], note: str = "") -> Picture:
    """What a step reads (weights, and the cache of each context), and tokens per second: the ceiling and measured."""
    ceiling = [bandwidth / (weights + c) for c in cache]
    alt = "; ".join(f"{n} tokens in the cache: {weights / 1e6:.0f} MB of weights and {c / 1e6:.0f} MB of cache, at "
                    f"most {top:.1f} tokens/s, measured {1 / s:.1f}"
                    for n, c, top, s in zip(contexts, cache, ceiling, seconds))
    places = range(len(contexts))
    with picture(alt, 1, 2, height=3.6) as (figure, (left, right)):
        left.bar(places, [weights / 1e6] * len(contexts), color=COLORS["weights"], width=0.6, label="weights")
        left.bar(places, [c / 1e6 for c in cache], bottom=weights / 1e6, color=COLORS["kv_cache"], width=0.6,
                 label="KV cache")
        left.set_ylim(0, 1.3 * (weights + max(cache)) / 1e6)
        left.legend(loc="upper left", ncols=2)
        right.hlines(ceiling, [at - 0.3 for at in places], [at + 0.3 for at in places], color="black", linewidth=2,
                     label="ceiling")
        bars = right.bar(places, [1 / s for s in seconds], color=COLORS["decode"], width=0.6, label="measured")
        right.bar_label(bars, [f"{1 / s / top:.0%}" for s, top in zip(seconds, ceiling)], label_type="center")
        right.set_ylim(0, 1.35 * max(*ceiling, *(1 / s for s in seconds)))
        right.legend(loc="upper right", ncols=2)
        for axis in (left, right):
            axis.set_xticks(places, [f"{n:,}" for n in contexts])
            axis.grid(False, axis="x")
        label_axes(left, "tokens in the cache", "MB", "one step reads")
        label_axes(right, "tokens in the cache", "tokens per second", "one request gets (the number is the MBU)")
        footnote(figure, note)
    return figure


def step_parts(parts: Mapping[str, float], floor: float, note: str = "") -> Picture:
    """One decode step as a bar: name of a part -> seconds, at most four; `floor`: the least time for all its bytes."""
    total = sum(parts.values())
    alt = (f"one decode step, {_ms(total)}: " + ", ".join(f"{name} {_ms(s)}" for name, s in parts.items())
           + f". At full bandwidth all its bytes take {_ms(floor)}")
    with picture(alt, height=2.5) as (figure, axis):
        start = 0.0
        for (name, seconds), color in zip(parts.items(), PARTS):
            axis.barh(0, 1e3 * seconds, left=1e3 * start, color=color, height=0.5, label=f"{name}: {_ms(seconds)}")
            start += seconds
        axis.axvline(1e3 * floor, color="black", linewidth=2)
        axis.text(1e3 * floor, 0.33, f"all bytes at full bandwidth: {_ms(floor)} ", ha="right", va="bottom")
        axis.set(ylim=(-0.35, 0.62), yticks=[], xlim=(0, 1.02e3 * max(total, floor)))
        axis.grid(False, axis="y")
        label_axes(axis, "time (ms)", "", f"one decode step: {_ms(total)}")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        axis_note(axis, note)
    return figure


def batch_steps(batches: Sequence[int], measured: Sequence[float], least: Sequence[float], note: str = "") -> Picture:
    """Rows in one decode step: time of the step and tokens per second in all, beside the least time of the roofline."""
    alt = "; ".join(f"{b} rows: {_ms(m)} a step, at least {_ms(a)}, {b / m:.1f} tokens/s in all"
                    for b, m, a in zip(batches, measured, least))
    lines = {"measured": (measured, "o-", COLORS["decode"]), "roofline": (least, "--", "black")}
    with picture(alt, 1, 2, height=3.6) as (figure, (left, right)):
        for name, (seconds, line, color) in lines.items():
            left.loglog(batches, [1e3 * s for s in seconds], line, color=color, label=name, linewidth=2)
            right.loglog(batches, [b / s for b, s in zip(batches, seconds)], line, color=color, linewidth=2)
        left.set_ylim(0.5e3 * min(*measured, *least), 2e3 * max(*measured, *least))
        _plain_ticks(left, right)
        for axis in (left, right):
            axis.set_xticks(batches, batches)
        left.legend(loc="upper left")
        label_axes(left, "requests in the step (log scale)", "time of a step (ms, log scale)", "one step")
        label_axes(right, "requests in the step (log scale)", "tokens per second (log scale)", "all requests together")
        footnote(figure, note)
    return figure


def two_jobs_roofline(roof: Roofline, dtype: str, jobs: Mapping[str, Sequence[tuple[int, float, float]]],
                      note: str = "") -> Picture:
    """Prefill and decode under one roof: "prefill" (points by tokens) and "decode" (by requests in the step), each
    (count, FLOP per byte, FLOP/s)."""
    peak, ridge = roof.flops_per_second[dtype] / 1e9, ridge_point(roof, dtype)
    points = [point for series in jobs.values() for point in series]
    low, high = min(ridge, *(x for _, x, _ in points)) / 2, max(ridge, *(x for _, x, _ in points)) * 2
    lowest = min(peak * low / ridge, *(y / 1e9 for *_, y in points))
    alt = (f"roofline of {peak:,.0f} GFLOP/s and {roof.bytes_per_second / 1e9:.1f} GB/s, ridge at {ridge:.1f} FLOP per "
           "byte. " + ". ".join(f"{job}: " + ", ".join(f"{count} at {x:,.1f} FLOP per byte {y / 1e9:.1f} GFLOP/s"
                                                      for count, x, y in series) for job, series in jobs.items()))
    looks = {"prefill": ("s", "tokens in one pass", (6, -4), "left", "top"),
             "decode": ("o", "requests in one step", (-4, -5), "right", "top")}
    with picture(alt, height=4.2) as (figure, axis):
        draw_roof(axis, peak, ridge, low, high, lowest / 1.9)
        for job, series in jobs.items():
            marker, unit, away, side, edge = looks[job]
            counts, x, y = zip(*series)
            axis.plot(x, [value / 1e9 for value in y], f"{marker}-", color=COLORS[job], linewidth=1,
                      label=f"{job} (number: {unit})")
            for count, at, value in zip(counts, x, y):
                axis.annotate(f"{count}", (at, value / 1e9), away, textcoords="offset points", fontsize=9,
                              ha=side, va=edge)
        axis.set(xlim=(low, high), ylim=(lowest / 2, peak * 2.5))
        axis.text(ridge, peak * 1.08, f"peak: {peak:,.0f} GFLOP/s", va="bottom")
        between = (low * ridge) ** 0.5
        axis.text(between, peak * between / ridge, f"memory: {roof.bytes_per_second / 1e9:,.1f} GB/s    ", ha="right",
                  va="bottom")
        _plain_ticks(axis)
        axis.legend(loc="lower right")
        label_axes(axis, "arithmetic intensity (FLOP per byte, log scale)", "GFLOP/s (log scale)")
        footnote(figure, note)
    return figure


def timeline(shown: Sequence[float], other: Sequence[float], prompt: int, cached: bool, note: str = "") -> Picture:
    """Seconds of each token of an answer as bars, prefill first; a thin line shows the same answer the other way."""
    names = ("with a cache", "without a cache") if cached else ("without a cache", "with a cache")
    totals = [f"{name}: {sum(seconds):.1f} s" for name, seconds in zip(names, (shown, other))]
    alt = (f"{len(shown)} tokens behind a prompt of {prompt}; {totals[0]} in total, first {_ms(shown[0])}, last "
           f"{_ms(shown[-1])}; {totals[1]}")
    with picture(alt, height=3.6) as (figure, axis):
        x = range(1, len(shown) + 1)
        axis.bar(1, 1e3 * shown[0], color=COLORS["prefill"], width=1, label="first token (prefill)")
        axis.bar(x[1:], [1e3 * s for s in shown[1:]], color=COLORS["decode"], width=1, label=f"later, {names[0]}")
        axis.step(x, [1e3 * s for s in other], where="mid", color=COLORS["neutral"], linewidth=1.5, label=names[1])
        axis.set(xlim=(0.4, len(shown) + 0.6), ylim=(0, 1.15e3 * max(*shown, *other)))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="upper left", ncols=3)
        label_axes(axis, "token of the answer", "time (ms)", "in total, " + "; ".join(totals))
        footnote(figure, note)
    return figure


def _plain_ticks(*axes) -> None:
    """Numbers at 1, 2 and 5 of each power of ten: a short logarithmic axis would else carry a single one."""
    for axis in axes:
        log_ticks(axis.xaxis, (1, 2, 5))
        log_ticks(axis.yaxis, (1, 2, 5))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
