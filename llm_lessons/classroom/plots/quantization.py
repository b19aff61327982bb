"""Lesson 08: values on their grid, what more bits and smaller groups buy, outliers, and where quality breaks off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex
from torch import Tensor

from ...quantize import QuantizedTensor
from ..style import COLORS, Picture, drawable, footnote, label_axes, log_ticks, picture, short

WEIGHTS, MISTAKE, NEUTRAL = COLORS["weights"], COLORS["mistake"], COLORS["neutral"]
ERRORS = LinearSegmentedColormap.from_list("errors", ["#FFFFFF", MISTAKE, "#4A1E00"])
SHADES = LinearSegmentedColormap.from_list("shades", [WEIGHTS, "#1F4E6B", "black"])  # the finer the grid, the darker
SIDES = {True: "symmetric", False: "asymmetric"}


def grid_errors(values: Tensor, quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """What rounding did to values [columns]: error, step of the grid, whether clipped; each [columns], float64.

    `quantized` is made of values.reshape(1, -1), or of the same values clamped: what lies more than half a step beyond
    the ends of its grid counts as clipped. ValueError if it was made of other values.
    """
    if not isinstance(values, Tensor) or values.dim() != 1 or not values.is_floating_point() or not len(values):
        what = f"{list(values.shape)} of {values.dtype}" if isinstance(values, Tensor) else repr(values)
        raise ValueError(f"values must be a tensor [columns] of floating-point numbers, such as weight[0], not {what}")
    if quantized.shape != (1, len(values)):
        raise ValueError(f"quantized is {list(quantized.shape)}, not {[1, len(values)]}: make it with "
                         f"quantize(values.reshape(1, -1), …)")
    values = values.detach().double().cpu()
    step, low, high = (part.repeat_interleave(quantized.group_size) for part in _ladder(quantized))
    error = values - quantized.dequantize()[0].double().cpu()
    reach = step / 2 + 1e-6 * torch.stack((values, low, high)).abs().amax(0)  # half a step; the rounding of float32
    clipped = (values < low - reach) | (values > high + reach)
    wrong = ~((values.clamp(low, high) - (values - error)).abs() <= reach)
    if wrong.any():
        at = int(wrong.int().argmax())
        raise ValueError(f"quantized was made of other values: number {at} is {values[at]:.6g}, on the grid "
                         f"{values[at] - error[at]:.6g}, with steps of {step[at]:.3g}")
    return error, step, clipped


def _ladder(quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step, lowest and highest value of each group's grid, [groups], float64."""
    step = quantized.scale[0].double().cpu()
    if quantized.symmetric:
        high = step * (2 ** (quantized.bits - 1) - 1)
        return step, -high, high
    low = quantized.minimum[0].double().cpu()
    return step, low, low + step * (2**quantized.bits - 1)


def grid_summary(values: Tensor, quantized: QuantizedTensor) -> str:
    """Steps, largest error, relative error ‖w − q‖ / ‖w‖, and how many values were clipped, in words."""
    error, step, clipped = grid_errors(values, quantized)
    worst, size = int(error.abs().argmax()), float(values.double().norm())
    said = (f"step {_span(step)}, largest error {error[worst].abs():.3g} ({error[worst].abs() / step[worst]:.2f} steps)"
            f", relative error {float(error.norm()) / size if size else 0:.3g}")
    return said + (f", {int(clipped.sum())} of {len(values)} values clipped" if clipped.any() else "")


def _span(numbers: Tensor) -> str:
    low, high = f"{numbers.min():.3g}", f"{numbers.max():.3g}"
    return low if low == high else f"{low} to {high}"


def grid_view(values: Tensor, quantized: QuantizedTensor) -> Picture:
    """Values [columns] over the steps of their grid, group by group; below, each value's error in steps of its grid.

    `quantized`: quantize(values.reshape(1, -1), …), or of the clamped values: clipped ones are drawn as triangles.
    """
    error, step, clipped = grid_errors(values, quantized)
    shown, groups = values.detach().double().cpu(), quantized.scale.shape[-1]
    parts = "one group" if groups == 1 else f"{groups} groups of {quantized.group_size}"
    grid = f"{quantized.bits} bits, {SIDES[quantized.symmetric]}, {parts}"
    alt = f"{len(values)} values from {shown.min():.3g} to {shown.max():.3g}; {grid}: {grid_summary(values, quantized)}"
    with picture(alt, 2, 1, height=4.9, sharex=True, height_ratios=[2, 1]) as (figure, (top, below)):
        drawn = _draw_ladders(top, quantized)
        size, places = 6 if len(values) < 100 else 3.5, torch.arange(len(values))
        errors = (error / step).where(~clipped, 0.62 * error.sign())
        for axis, color, y in ((top, WEIGHTS, shown), (below, MISTAKE, errors)):
            axis.plot(places[~clipped], y[~clipped], "o", color=color, markersize=size, markeredgewidth=0)
            for mark, side in (("^", clipped & (error > 0)), ("v", clipped & (error < 0))):
                axis.plot(places[side], y[side], mark, color=MISTAKE, markersize=size + 2, markeredgewidth=0)
        for y, line in ((-0.5, "--"), (0, "-"), (0.5, "--")):
            below.axhline(y, color="black", linewidth=0.8, linestyle=line)
        below.set(ylim=(-0.72, 0.72), yticks=[-0.5, 0, 0.5], xlim=(-1, len(values)))
        top.grid(False)
        label_axes(top, "", "value")
        each = 1 < groups <= 18  # more numbers would touch
        top.set_title(f"{grid}: step {_span(step)}{', above each group' if each else ''}", pad=16 if each else None)
        for group in range(groups if each else 0):
            top.annotate(f"{quantized.scale[0, group]:.2g}", ((group + 0.5) * quantized.group_size - 0.5, 1), (0, 2),
                         xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", fontsize=8)
        told = f" (triangles: clipped, up to {(error / step)[clipped].abs().max():.3g} steps)" if clipped.any() else ""
        label_axes(below, f"place in the row (lines: {drawn} of the grid)", "error (steps)",
                   f"error, at most half a step{told}")
    return figure


def _draw_ladders(axis: Axes, quantized: QuantizedTensor) -> str:
    """The steps of each group's grid as lines under its values; says which steps are drawn."""
    every = 2 ** max(0, quantized.bits - 5)  # more lines than 32 would run together
    last = 2 ** (quantized.bits - 1) - 1
    codes = range(-(last // every) * every, last + 1, every) if quantized.symmetric else range(0, 2 * last + 2, every)
    step, low, _ = _ladder(quantized)
    lines = []
    for group, (width, lowest) in enumerate(zip(step.tolist(), low.tolist())):
        start, gap = group * quantized.group_size, 0.04 * quantized.group_size if len(step) > 1 else 0
        left, right = start - 0.5 + gap, start + quantized.group_size - 0.5 - gap
        zero = 0.0 if quantized.symmetric else lowest
        lines += [[(left, zero + width * code), (right, zero + width * code)] for code in codes]
    axis.add_collection(LineCollection(lines, colors="#BBBBBB", linewidths=0.7, zorder=1))
    return {1: "the steps", 2: "every 2nd step"}.get(every, f"every {every}th step")


def error_by_bits(errors: Mapping[str, Mapping[int, float]]) -> Picture:
    """Relative error against bits, log scale: label ("per row") -> bits -> ‖w − q‖ / ‖w‖, coarsest grid first."""
    if not errors or not all(errors.values()):
        raise ValueError("there is nothing to draw: give label -> {bits: relative error}, with at least one number")
    for label, by_bits in errors.items():
        for bits, error in by_bits.items():
            _above_0(f"the error of {label!r} at {bits} bits", error)
    alt = "relative error; " + "; ".join(
        f"{label}: " + ", ".join(f"{bits} bits {by_bits[bits]:.2g}" for bits in sorted(by_bits))
        for label, by_bits in errors.items())
    every = sorted({bits for by_bits in errors.values() for bits in by_bits})
    with picture(alt, height=3.8) as (figure, axis):
        for (label, by_bits), (color, marker) in zip(errors.items(), _looks(len(errors))):
            bits = sorted(by_bits)
            axis.semilogy(bits, [by_bits[b] for b in bits], f"{marker}-", color=color, linewidth=2,
                          label=drawable(label))
        start = 0.5 * min(error * 2 ** (bits - every[0]) for by_bits in errors.values()
                          for bits, error in by_bits.items())  # under every line
        axis.semilogy(every, [start / 2 ** (b - every[0]) for b in every], ":", color="black", linewidth=1,
                      label="half the error with each bit")
        axis.set_xticks(every)
        log_ticks(axis.yaxis, (1, 3))
        axis.legend()
        label_axes(axis, "bits of a code", "relative error ‖w − q‖ / ‖w‖\n(log scale)", "error of rounding")
    return figure


def _looks(count: int) -> list[tuple[str, str]]:
    """Colour and marker of so many groupings, coarsest first."""
    return [(to_hex(SHADES(at / max(1, count - 1))), "os^Dv"[at % 5]) for at in range(count)]


def _above_0(name: str, number: float) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {number!r}: only numbers above 0 can be drawn here; leave it out, and say so")


def _matrix(name: str, values: Tensor) -> Tensor:
    """Values [tokens, channels] in float32, on the CPU. ValueError for other shapes, and for NaN and infinity."""
    if not isinstance(values, Tensor) or values.dim() != 2 or not values.numel():
        what = list(values.shape) if isinstance(values, Tensor) else repr(values)
        raise ValueError(f"{name} must be a tensor [tokens, channels], not {what}")
    if not values.isfinite().all():
        raise ValueError(f"{name} must be finite, and hold NaN or infinity")
    return values.detach().float().cpu()


def outlier_channels(activations: Tensor, title: str = "") -> Picture:
    """The largest |value| of each channel of activations [tokens, channels], log scale; the four largest as bars."""
    largest = _matrix("activations", activations).abs().amax(0)
    median, top = float(largest.quantile(0.5)), largest.argsort(descending=True)[:4]
    if median == 0:
        raise ValueError("half of the channels or more are 0 throughout: a log scale has no place for them")
    names, heights = [f"channel {at}" for at in top], largest[top].tolist()
    sizes = [f"{short(height)} ({short(height / median)} × median)" for height in heights]
    alt = (f"the largest |value| of {len(largest)} channels over {len(activations)} tokens: median {short(median)}; "
           + ", ".join(f"{name}: {size}" for name, size in zip(names, sizes)))
    with picture(alt, 1, 2, height=3.6, width_ratios=[1.7, 1]) as (figure, (left, right)):
        left.semilogy(largest.tolist(), "o", color=NEUTRAL, markersize=3.5, markeredgewidth=0)
        left.semilogy(top.tolist(), heights, "o", color=MISTAKE, markersize=6)
        spread = float(largest.max() / largest[largest > 0].min())
        log_ticks(left.yaxis, (1, 2, 5) if spread < 30 else (1, 3) if spread < 3000 else (1,))
        bars = right.barh(names, heights, color=MISTAKE, height=0.6)
        right.bar_label(bars, sizes, padding=2)
        right.invert_yaxis()
        right.set_xlim(0, 2.1 * heights[0])
        right.set_xticks([0, heights[0]], ["0", short(heights[0])])
        right.grid(False)
        left.axhline(median, color="black", linewidth=1.2, label=f"median {short(median)}")
        right.axvline(median, color="black", linewidth=1.2)
        figure.legend(loc="outside lower center")
        label_axes(left, "channel", "largest |value| of any token\n(log scale)", drawable(title))
        label_axes(right, "largest |value| of any token", "", "the largest channels")
    return figure


FIELDS = ("bits_per_weight", "label", "group", "symmetric", "perplexity_ratio", "low", "high")


def quality_cliff(rows: Sequence) -> Picture:
    """Perplexity relative to the baseline against bits per weight, both log scales; a line for each kind of grouping.

    A row, a dict or an object: bits_per_weight, label, group (None: a whole row), symmetric, perplexity_ratio, and
    low and high, the ends of its 95 % interval. Rows without a grid (symmetric is None) are left out.
    """
    rows = [row for row in (_fields(number, row) for number, row in enumerate(rows)) if row["symmetric"] is not None]
    if not rows:
        raise ValueError("there is nothing to draw: give at least one row of the table that has a grid")
    alt = "perplexity relative to the baseline, with 95 % interval; " + "; ".join(
        f"{row['label']}, {row['bits_per_weight']:.3g} bits per weight: {row['perplexity_ratio']:.4g} "
        f"({row['low']:.4g} to {row['high']:.4g})" for row in rows)
    near = [row["bits_per_weight"] for row in rows if row["perplexity_ratio"] < 1.25]
    near = near if max(row["high"] for row in rows) > 3 else []  # then a second panel, where the intervals can be seen
    with picture(alt, 1, 1 + bool(near), height=4.6, squeeze=False) as (figure, axes):
        for axis in axes[0]:
            _draw_lines(axis, rows)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                      title="bars: 95 % interval")
        label_axes(axes[0, 0], "bits per weight, scales included (log scale)", "perplexity / baseline (log scale)",
                   "where quality breaks off")
        if near:
            axes[0, 1].set_ylim(0.99 * min(1, *(row["low"] for row in rows)), 1.3)
            axes[0, 1].set_xlim(left=0.9 * min(near))
            log_ticks(axes[0, 1].yaxis, (0.95, 1, 1.05, 1.1, 1.2))
            label_axes(axes[0, 1], "bits per weight (log scale)", "", "the same, near 1")
    return figure


def _draw_lines(axis: Axes, rows: Sequence[Mapping]) -> None:
    """A line for each kind of grouping, with the intervals of its points: solid where symmetric, else dashed."""
    sizes = sorted({row["group"] for row in rows}, key=lambda group: -(group or math.inf))
    for group, (color, marker) in zip(sizes, _looks(len(sizes))):
        for symmetric, name in SIDES.items():
            line = sorted((row["bits_per_weight"], row["perplexity_ratio"], row["low"], row["high"]) for row in rows
                          if (row["group"], row["symmetric"]) == (group, symmetric))
            if line:
                bits, ratio, low, high = zip(*line)
                bars = [r - a for r, a in zip(ratio, low)], [b - r for r, b in zip(ratio, high)]
                axis.errorbar(bits, ratio, bars, marker=marker, linestyle="-" if symmetric else "--", color=color,
                              linewidth=1.8, capsize=3, markerfacecolor=color if symmetric else "white",
                              label=f"{f'groups of {group}' if group else 'whole row'}, {name}")
    axis.axhline(1, color="black", linewidth=1)
    axis.set(xscale="log", yscale="log")
    highest = max(row["high"] for row in rows)
    log_ticks(axis.yaxis, (1, 1.1, 1.2, 1.5, 2) if highest < 3 else (1, 2, 5) if highest < 100 else (1,))
    log_ticks(axis.xaxis, (1, 1.6, 2, 3, 4, 5, 6, 8))


def _fields(number: int, row) -> dict:
    """A row of the table as a dict. ValueError for a field that is missing and for what no interval can be."""
    try:
        found = {name: row[name] if isinstance(row, Mapping) else getattr(row, name) for name in FIELDS}
    except (KeyError, AttributeError) as error:
        raise ValueError(f"row {number} is {row!r}: it needs the fields {', '.join(FIELDS)}") from error
    if found["symmetric"] not in (True, False, None):
        raise ValueError(f"row {number}: symmetric must be True, False or None, not {found['symmetric']!r}")
    for name in ("bits_per_weight", "perplexity_ratio", "low", "high"):
        _above_0(f"{name} of row {number}", found[name])
    if not found["low"] <= found["perplexity_ratio"] <= found["high"]:
        raise ValueError(f"row {number}: perplexity_ratio {found['perplexity_ratio']!r} must lie between low "
                         f"{found['low']!r} and high {found['high']!r}")
    return found


def size_and_speed(measured: Mapping[str, float], predicted: Mapping[str, float], note: str = "") -> Picture:
    """Speed-up of decode over "float32" for each kind of weights: predicted from the bytes, and measured.

    Both: label -> tokens per second, or any ratio of such; each is divided by its own "float32".
    """
    if "float32" not in measured or set(measured) != set(predicted):
        raise ValueError(f"measured has {list(measured)}, predicted {list(predicted)}: both need the same labels, and "
                         f"'float32', to which the others are compared")
    for label in measured:
        _above_0(f"measured[{label!r}]", measured[label])
        _above_0(f"predicted[{label!r}]", predicted[label])
    ratios = {label: (predicted[label] / predicted["float32"], measured[label] / measured["float32"])
              for label in measured}
    alt = "decode, times as fast as float32: " + "; ".join(
        f"{label} measured {ratio:.3g}, predicted {guess:.3g}" for label, (guess, ratio) in ratios.items())
    looks = ((-0.2, "predicted from the bytes it reads", {"color": "white", "edgecolor": NEUTRAL, "hatch": "//"}),
             (0.2, "measured", {"color": COLORS["decode"]}))
    with picture(alt, height=3.6) as (figure, axis):
        for (shift, name, look), heights in zip(looks, zip(*ratios.values())):
            bars = axis.bar([at + shift for at in range(len(ratios))], heights, 0.38, label=name, **look)
            axis.bar_label(bars, [f"{height:.3g}" for height in heights], padding=1)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(ratios)), [drawable(label) for label in ratios])
        axis.set_ylim(0, 1.2 * max(max(pair) for pair in ratios.values()))
        axis.grid(False, axis="x")
        axis.legend(loc="upper left")
        label_axes(axis, "weights stored as", "times as fast as float32", "decode, one request")
        footnote(figure, note)
    return figure


def key_channels(per_channel_error: Tensor, per_token_error: Tensor) -> Picture:
    """Absolute errors [tokens, channels] of quantized keys: a grid for each channel, a grid for each token."""
    maps = {"one grid per channel": _matrix("per_channel_error", per_channel_error),
            "one grid per token": _matrix("per_token_error", per_token_error)}
    if per_channel_error.shape != per_token_error.shape:
        raise ValueError(f"two maps of the same keys are needed, not {list(per_channel_error.shape)} and "
                         f"{list(per_token_error.shape)}")
    if min(errors.min() for errors in maps.values()) < 0:
        raise ValueError("errors below 0: absolute errors are drawn here, (keys - quantized).abs()")
    told = {title: f"mean {errors.mean():.2g}, largest {errors.max():.2g}" for title, errors in maps.items()}
    most = max(float(errors.max()) for errors in maps.values()) or 1
    with picture("absolute error of keys; " + "; ".join(f"{title}: {words}" for title, words in told.items()), 1, 2,
                 height=3.8, sharey=True) as (figure, axes):
        for axis, (title, errors) in zip(axes, maps.items()):
            image = axis.imshow(errors.numpy(), cmap=ERRORS, vmin=0, vmax=most, aspect="auto", interpolation="nearest")
            axis.grid(False)
            axis.xaxis.get_major_locator().set_params(integer=True)
            label_axes(axis, "channel", "token" if axis is axes[0] else "", f"{title}\n{told[title]}")
        figure.colorbar(image, ax=list(axes), label="absolute error")
    return figure
