"""Lesson 05: times beside the two bounds that a machine sets, and the same as points under its roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from ...capacity import ridge_point
from ...timing import Roofline
from ..style import COLORS, Picture, footnote, label_axes, log_ticks, picture

LOOKS = (("o", COLORS["prefill"], -1), ("s", COLORS["weights"], 1))  # marker, colour, side of the number


def time_and_bounds(tokens: Sequence[int], seconds: Sequence[float], flops: Sequence[float], nbytes: Sequence[float],
                    roof: Roofline, dtype: str | torch.dtype, note: str = "") -> Picture:
    """Time and tokens per second against the number of tokens, measured, beside what memory and arithmetic allow."""
    dtype = str(dtype).removeprefix("torch.")
    memory = [n / roof.bytes_per_second for n in nbytes]
    arithmetic = [n / roof.flops_per_second[dtype] for n in flops]
    alt = (f"{tokens[0]} to {tokens[-1]} tokens: measured {_ms(seconds[0])} to {_ms(seconds[-1])}; "
           f"memory allows {_ms(memory[0])} to {_ms(memory[-1])}, arithmetic {_ms(arithmetic[0])} to "
           f"{_ms(arithmetic[-1])}. Measured tokens per second: {tokens[0] / seconds[0]:,.0f} to "
           f"{tokens[-1] / seconds[-1]:,.0f}")
    lines = {"arithmetic alone": (arithmetic, ":", COLORS["neutral"]),
             "memory alone": (memory, "--", COLORS["weights"]), "measured": (seconds, "o-", COLORS["prefill"])}
    with picture(alt, 1, 2, height=3.7) as (figure, (left, right)):
        for name, (values, line, color) in lines.items():
            left.loglog(tokens, [1e3 * s for s in values], line, color=color, label=name, linewidth=2, markersize=5)
            right.loglog(tokens, [t / s for t, s in zip(tokens, values)], line, color=color, linewidth=2, markersize=5)
        least, slowest = min(map(max, memory, arithmetic)), min(t / s for t, s in zip(tokens, seconds))
        left.set_ylim(bottom=0.4e3 * min(least, *seconds))  # the bounds go on below what any time can be
        right.set_ylim(0.5 * slowest, 4 * max(t / max(s) for t, s in zip(tokens, zip(memory, arithmetic))))
        for axis in (left, right):
            _token_ticks(axis.xaxis, tokens)
            log_ticks(axis.yaxis, (1, 3))
        left.legend(loc="upper left")
        label_axes(left, "tokens (log scale)", "time (ms, log scale)", "time")
        label_axes(right, "tokens (log scale)", "tokens per second (log scale)", "tokens per second")
        footnote(figure, note)
    return figure


def roofline(roof: Roofline, dtype: str | torch.dtype, points: dict[str, Sequence[tuple[int, float, float]]],
             chosen: int | None = None, note: str = "") -> Picture:
    """Points under the roofline: title -> (tokens, FLOP per byte, FLOP/s). `chosen`: tokens that stand out."""
    dtype = str(dtype).removeprefix("torch.")
    peak, ridge = roof.flops_per_second[dtype] / 1e9, ridge_point(roof, dtype)
    everything = [point for series in points.values() for point in series]
    low = min(ridge / 8, *(x for _, x, _ in everything)) / 1.5
    high = max(ridge * 8, *(x for _, x, _ in everything)) * 1.5
    lowest = min(peak * low / ridge, *(y / 1e9 for *_, y in everything)) / 2.5
    alt = (f"roofline: {peak:,.0f} GFLOP/s, {roof.bytes_per_second / 1e9:,.1f} GB/s, ridge at {ridge:.1f} FLOP per "
           f"byte. " + ". ".join(f"{title}: " + ", ".join(f"{t} tokens at {x:.1f} FLOP per byte, {y / 1e9:,.1f} GFLOP/s"
                                                         for t, x, y in _named(series, chosen))
                                 for title, series in points.items()))
    with picture(alt, height=4.2) as (figure, axis):
        draw_roof(axis, peak, ridge, low, high, 1.1 * lowest)
        for (title, series), (marker, color, side) in zip(points.items(), LOOKS):
            _, x, y = zip(*series)
            axis.plot(x, [value / 1e9 for value in y], marker, color=color, label=title, alpha=0.4 if chosen else 1)
            for t, at, value in _named(series, chosen):
                axis.plot(at, value / 1e9, marker, color=color, markersize=11 if chosen else 6)
                axis.annotate(f"{t:,}", (at, value / 1e9), (0, 8 * side), ha="center", fontsize=9,
                              va="bottom" if side > 0 else "top", textcoords="offset points",
                              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})
        axis.set(xlim=(low, high), ylim=(lowest, peak * 3))
        axis.text(ridge, peak * 1.6, f" arithmetic: {peak:,.0f} GFLOP/s", va="bottom")
        along = math.degrees(math.atan2(1.5 * peak, ridge))  # the slope of the roof, where the text stands
        axis.text(ridge / 6, peak / 6 * 1.5, f"memory: {roof.bytes_per_second / 1e9:,.1f} GB/s", va="bottom",
                  rotation=along, rotation_mode="anchor", transform_rotates_text=True)
        log_ticks(axis.xaxis, (1,))
        log_ticks(axis.yaxis, (1, 3))
        axis.legend(loc="lower right")
        label_axes(axis, "arithmetic intensity (FLOP per byte, log scale)", "GFLOP/s (log scale)",
                   "roofline; the numbers beside the points are tokens")
        footnote(figure, note)
    return figure


def draw_roof(axis: Axes, peak: float, ridge: float, low: float, high: float, bottom: float) -> None:
    """The roof from `low` to `high` FLOP per byte, both axes logarithmic; the ridge is named at the height `bottom`."""
    axis.loglog([low, ridge, high], [peak * low / ridge, peak, peak], color="black", linewidth=2)
    axis.axvline(ridge, color=COLORS["neutral"], linewidth=1, linestyle=":")
    axis.text(ridge, bottom, f"ridge: {ridge:.1f} FLOP per byte ", ha="right", va="bottom", color=COLORS["neutral"])


def _named(series: Sequence[tuple[int, float, float]], chosen: int | None) -> list[tuple[int, float, float]]:
    """The points that get a number: the chosen one; or the first, the last, and some between that do not touch."""
    if chosen is not None:
        return [point for point in series if point[0] == chosen]
    named = [series[0]]
    for point in series:
        if point[0] >= 10 * named[-1][0]:
            named.append(point)
    return named if named[-1] == series[-1] else [*named, series[-1]]


def _token_ticks(axis, tokens: Sequence[int]) -> None:
    """Ticks at the token counts, but none where two labels would touch."""
    apart, shown = (tokens[-1] / tokens[0]) ** 0.12, [tokens[-1]]
    for t in reversed(tokens):
        if t * apart <= shown[-1]:
            shown.append(t)
    axis.set_ticks(shown, [f"{t:,}" for t in shown])
    axis.set_minor_locator(NullLocator())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
