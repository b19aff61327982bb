"""Lesson 09: what a batch gains and costs, who did what in which step, gaps between tokens, latency against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...batching import Step
from ...request import Request
from ...traffic import Percentiles, Report
from ..style import COLORS, Picture, drawable, footnote, label_axes, log_ticks, picture

MARKERS = ("o", "s", "^", "D")
LINES = ("-", "--", ":", "-.")
LOOKS = {  # what a request does in a step -> colour, hatch, words
    "waiting": ("#E5E5E5", "", "waits"), "prefill": (COLORS["prefill"], "", "prompt is read"),
    "decode": (COLORS["decode"], "", "answer is written"),
    "stalled": ("#F5DDB0", "", "pauses: other prompts are read"),
    "preempted": ("white", "//", "preempted, waits again"),
    "idle": ("white", "....", "done, its place stays empty")}


# --- What a batch gains, and what it costs each user ------------------------------------------------------------------

def batch_gain(measured: Mapping[str, Mapping[int, float]], predicted: Mapping[str, Mapping[int, float]],
               note: str = "") -> Picture:
    """Left, tokens/s of a batch in multiples of one request; right, time per token for each of its users.

    `measured`: label -> requests in the step -> seconds of the step. `predicted`: label -> requests -> times as many
    tokens per second as one request.
    """
    if not measured or any(1 not in steps for steps in measured.values()):
        raise ValueError("give seconds for each label, and among them those of a step for 1 request")
    gains = {label: {b: b * steps[1] / s for b, s in steps.items()} for label, steps in measured.items()}
    alt = "; ".join(f"{label}: " + ", ".join(
        f"{b} requests {steps[b] * 1e3:.0f} ms a token, {gain:.1f} times the tokens/s of one"
        + (f" (predicted {predicted[label][b]:.1f})" if b in predicted.get(label, {}) else "")
        for b, gain in gains[label].items()) for label, steps in measured.items())
    batches = sorted({b for steps in measured.values() for b in steps})
    with picture(alt, 1, 2, height=3.8, width_ratios=[1.15, 1]) as (figure, (left, right)):
        left.plot(batches, batches, color="#BBBBBB", linewidth=1, label="as many times as requests")
        for (label, steps), marker, line in zip(measured.items(), MARKERS, LINES):
            if label in predicted:
                left.plot(predicted[label].keys(), predicted[label].values(), line, color=COLORS["neutral"],
                          label=f"predicted, {drawable(label)}")
            left.plot(gains[label].keys(), gains[label].values(), line + marker, color=COLORS["decode"], linewidth=2,
                      label=f"measured, {drawable(label)}")
            right.plot(steps.keys(), [1e3 * s for s in steps.values()], line + marker, color=COLORS["decode"],
                       linewidth=2, label=drawable(label))
        for axis in (left, right):
            axis.set_xticks(batches)
            axis.set(xlim=(0, None), ylim=(0, None))
            axis.legend(loc="upper left", fontsize=9)
        right.set_ylim(0, 1.45e3 * max(max(steps.values()) for steps in measured.values()))
        label_axes(left, "requests in the batch", "times one request", "tokens per second, all together")
        label_axes(right, "requests in the batch", "time per token (ms)", "what each user waits")
        footnote(figure, note)
    return figure


# --- Who did what, when -----------------------------------------------------------------------------------------------

def occupancy(steps: Sequence[Step], places: int) -> float:
    """The share, 0 to 1, of the places that wrote a token, over all steps in which anybody wrote one."""
    busy = [len(step.decoded) for step in steps if step.decoded]
    return sum(busy) / (places * len(busy)) if busy else 0.0


Span = tuple[str, float, float]  # one of LOOKS, start, end in seconds


def spans(requests: Sequence[Request], steps: Sequence[Step]) -> list[list[Span]]:
    """What each request did, from its submission to its end, and, if it was a static batch, to the end of the batch."""
    moments, together = [_moments(step) for step in steps], [[read for read, _ in step.prefilled] for step in steps]
    found = []
    for request in requests:
        parts, kind, at = [], "waiting", request.submitted
        for step, moment in zip(steps, moments):
            if request in moment:
                now, start, end = moment[request]
                parts += [(kind, at, start), (now, max(at, start), end)]
                kind, at = "stalled" if request.times and request.times[0] <= end else "waiting", end
            if request in step.preempted:
                kind = "preempted"
        if request.finished is None:
            parts.append((kind, at, steps[-1].end))
        elif request.engine.policy == "static":
            batch = [other for read in together if request in read for other in read]
            parts.append(("idle", at, max([other.finished or at for other in batch], default=at)))
        found.append(_joined(parts))
    return found


def _moments(step: Step) -> dict[Request, Span]:
    """Within a step: all that decode, in one call; then prompts, a call each. A call ends when its token comes."""
    now, found = step.start, {}
    if step.decoded:
        came = [at for request in step.decoded for at in request.times if step.start < at <= step.end]
        end = max(came, default=step.end) if step.prefilled else step.end
        found, now = {request: ("decode", now, min(end, request.finished or end)) for request in step.decoded}, end
    for request, _ in step.prefilled:
        end = next((at for at in request.times if now < at <= step.end), step.end)
        found[request], now = ("prefill", now, min(end, request.finished or end)), end
    return found


def _joined(parts: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for kind, start, end in parts:
        if joined and joined[-1][0] == kind and start - joined[-1][2] < 1e-9:
            joined[-1] = kind, joined[-1][1], end
        elif end > start:
            joined.append((kind, start, end))
    return joined


def request_timeline(runs: Mapping[str, tuple[Sequence[Request], Sequence[Step]]], note: str = "") -> Picture:
    """A panel for each run, label -> (requests, steps of their engine), a bar for each request, all on one time axis.

    Time counts from the first submission. The words under a panel say how long the run took, and how many places of
    the batch were at work.
    """
    if not runs or not all(requests and steps for requests, steps in runs.values()):
        raise ValueError("there is nothing to draw: give at least one run, label -> (requests, steps of the engine)")
    said = {label: _summary(requests, steps) for label, (requests, steps) in runs.items()}
    alt = "; ".join(f"{label}: {words}" for label, words in said.items())
    rows = [len(requests) for requests, _ in runs.values()]
    with picture(alt, len(runs), 1, height=1.1 + sum(0.75 + 0.19 * n for n in rows), squeeze=False, sharex=True,
                 height_ratios=[n + 2 for n in rows]) as (figure, axes):
        shown: dict[str, None] = {}
        for axis, (label, (requests, steps)) in zip(axes[:, 0], runs.items()):
            zero = min(request.submitted for request in requests)
            for row, did in enumerate(spans(requests, steps)):
                for kind, start, end in did:
                    _bar(axis, row, start - zero, end - zero, kind)
                    shown[kind] = None
            axis.set(yticks=range(len(requests)), yticklabels=[str(n + 1) for n in range(len(requests))],
                     ylim=(len(requests) - 0.4, -0.6), xlim=(0, None))
            axis.tick_params(axis="y", labelsize=8)
            axis.grid(False, axis="y")
            label_axes(axis, "", "request", f"{drawable(label)}: {said[label]}")
        axes[-1, 0].set_xlabel("time (s)")
        handles = [Patch(facecolor=LOOKS[kind][0], hatch=LOOKS[kind][1], edgecolor="#999999", label=LOOKS[kind][2])
                   for kind in LOOKS if kind in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) if len(handles) < 5 else 3,
                      fontsize=9)
        axes[-1, 0].annotate(note, (1, 0), (0, -24), xycoords="axes fraction", textcoords="offset points", fontsize=8,
                             color=COLORS["neutral"], ha="right", va="top")
    return figure


def _bar(axis: Axes, row: int, start: float, end: float, kind: str) -> None:
    color, hatch, _ = LOOKS[kind]
    thick = 0.35 if kind in ("waiting", "preempted") else 0.78
    axis.barh(row, end - start, left=start, height=thick, color=color, hatch=hatch,
              edgecolor="#AAAAAA" if hatch else color, linewidth=0.5 if hatch else 0.2)


def _summary(requests: Sequence[Request], steps: Sequence[Step]) -> str:
    engine, start = requests[0].engine, min(request.submitted for request in requests)
    seconds = max([step.end for step in steps] + [request.finished or start for request in requests]) - start
    words = f"{seconds:.2f} s, {occupancy(steps, engine.max_batch):.0%} of {engine.max_batch} places at work"
    preempted = sum(len(step.preempted) for step in steps)
    return words + (f", {preempted} preempted" if preempted else "")


# --- Gaps between tokens ----------------------------------------------------------------------------------------------

def token_gaps(runs: Mapping[str, tuple[Sequence[Request], Request]], note: str = "") -> Picture:
    """A panel for each run: label -> (requests that are being written, a newcomer with a long prompt).

    Every gap between two tokens of the first, at the time of its end; shaded, from the newcomer's submission to its
    first token.
    """
    gaps = {label: [(later, later - sooner) for request in writing for sooner, later in zip(request.times,
                                                                                            request.times[1:])]
            for label, (writing, _) in runs.items()}
    if not runs or not all(gaps.values()) or any(newcomer.ttft is None for _, newcomer in runs.values()):
        raise ValueError("each run needs requests with at least two tokens, and a newcomer that has its first")
    longest = {label: 1e3 * max(gap for _, gap in found) for label, found in gaps.items()}  # ms
    alt = "; ".join(f"{label}: median gap {median(gap for _, gap in gaps[label]) * 1e3:.0f} ms, longest "
                    f"{longest[label]:.0f} ms; first token of the long prompt after "
                    f"{newcomer.ttft * 1e3:.0f} ms" for label, (_, newcomer) in runs.items())
    with picture(alt, 1, len(runs), height=3.4, squeeze=False, sharey=True) as (figure, axes):
        for axis, (label, (writing, newcomer)) in zip(axes[0], runs.items()):
            zero = min(request.submitted for request in writing)
            axis.axvspan(newcomer.submitted - zero, newcomer.times[0] - zero, color=COLORS["prefill"], alpha=0.2,
                         linewidth=0)
            axis.plot([at - zero for at, _ in gaps[label]], [1e3 * gap for _, gap in gaps[label]], "o", markersize=4,
                      color=COLORS["decode"])
            axis.set(xlim=(0, None), ylim=(0, 1.2 * max(longest.values())))  # room for the legend
            label_axes(axis, "time (s)", "", f"{drawable(label)}: longest {longest[label]:.0f} ms")
        axes[0, 0].set_ylabel("gap between two tokens (ms)")
        axes[0, 0].legend(handles=[Patch(color=COLORS["prefill"], alpha=0.2, label="a long prompt waits, is read")],
                          loc="upper left", fontsize=9)
        footnote(figure, note)
    return figure


# --- Latency against load ---------------------------------------------------------------------------------------------

def load_curve(curve: Mapping[float, Report], pairs: Mapping[float, tuple[Report, Report]] | None = None,
               knee: float | None = None, note: str = "") -> Picture:
    """TTFT and TPOT against load, requests per second -> what they got: median, and what 95 of 100 stay below.

    `pairs`: requests per second -> a load on the real model, and the same one simulated; drawn as points, medians.
    `knee`: the load up to which a promise is kept.
    """
    pairs = dict(pairs or {})
    reports = [*curve.values(), *(report for pair in pairs.values() for report in pair)]
    if not curve or any(report.tpot is None for report in reports):
        raise ValueError("give at least one load, requests per second -> Report, with answers of two tokens or more")
    rates = sorted(curve)
    alt = "; ".join(f"{rate:.3g} requests/s: TTFT {_spread(curve[rate].ttft)}, TPOT {_spread(curve[rate].tpot)}"
                    for rate in rates)
    alt += "".join(f". The real model at {rate:.3g} requests/s: TTFT {1e3 * real.ttft.p50:.0f} ms (simulated "
                   f"{1e3 * other.ttft.p50:.0f}), TPOT {1e3 * real.tpot.p50:.0f} ms (simulated "
                   f"{1e3 * other.tpot.p50:.0f})" for rate, (real, other) in pairs.items())
    alt += f". The promise is kept up to {knee:.3g} requests/s" if knee else ""
    with picture(alt, 1, 2, height=3.8) as (figure, axes):
        for axis, kind, color in zip(axes, ("ttft", "tpot"), (COLORS["prefill"], COLORS["decode"])):
            for line, part, label in (("-", "p50", "median"), ("--", "p95", "95 of 100 stay below")):
                axis.plot(rates, [1e3 * getattr(getattr(curve[rate], kind), part) for rate in rates], line,
                          color=color, linewidth=2, label=label)
            for at, fill, label in ((0, color, "median, real model"), (1, "white", "median, same load simulated")):
                if pairs:
                    axis.plot(list(pairs), [1e3 * getattr(pair[at], kind).p50 for pair in pairs.values()], "o",
                              markersize=8, markerfacecolor=fill, markeredgecolor=color, label=label)
            if knee:
                axis.axvline(knee, color="black", linewidth=1, label="the promise is kept up to here")
            axis.set_xlim(0, None)
            axis.legend(loc="upper left", fontsize=8, frameon=True, framealpha=1, edgecolor="white")
        axes[0].set_yscale("log")
        log_ticks(axes[0].yaxis, (1, 3))
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
        axes[1].set_ylim(0, 1.75 * axes[1].get_ylim()[1])
        label_axes(axes[0], "requests per second", "TTFT (ms, log scale)", "time to first token")
        label_axes(axes[1], "requests per second", "TPOT (ms)", "time per output token")
        footnote(figure, note)
    return figure


def _spread(times: Percentiles) -> str:
    return f"{1e3 * times.p50:.0f} ms (95 of 100 below {1e3 * times.p95:.0f})"


# --- What a use needs ------------------------------------------------------------------------------------------------

UPGRADES = {"bandwidth": COLORS["weights"], "arithmetic": COLORS["prefill"], "memory": COLORS["kv_cache"]}


def scenario_needs(found: Mapping[str, tuple[float, float, Mapping[str, float]]], note: str = "") -> Picture:
    """Name of a use -> seconds of the machine for a request's prompt, for its answer, and times as many requests per
    second with twice the "bandwidth", the "arithmetic" or the "memory"."""
    if not found:
        raise ValueError("there is nothing to draw: give at least one use")
    alt = "; ".join(f"{name}: {reading:.2f} s for the prompt, {writing:.2f} s for the answer; twice the " + ", ".join(
        f"{part} {gain:.2f} times as many requests" for part, gain in gains.items())
        for name, (reading, writing, gains) in found.items())
    with picture(alt, 1, 2, height=3.4) as (figure, (left, right)):
        places = range(len(found))
        reading, writing, gains = zip(*found.values())
        left.bar(places, reading, 0.6, color=COLORS["prefill"], label="prompt")
        left.bar(places, writing, 0.6, bottom=reading, color=COLORS["decode"], label="answer")
        for shift, (part, color) in zip((-0.27, 0, 0.27), UPGRADES.items()):
            bars = right.bar([at + shift for at in places], [gain[part] for gain in gains], 0.25, color=color,
                             label=part)
            right.bar_label(bars, [f"{gain[part]:.2f}" for gain in gains], fontsize=8)
        right.axhline(1, color="black", linewidth=0.8)
        for axis in (left, right):
            axis.set_xticks(places, [drawable(name).replace(" ", "\n") for name in found])
            axis.set_ylim(0, 1.35 * axis.get_ylim()[1])
            axis.grid(False, axis="x")
            axis.legend(loc="upper right" if axis is left else "upper left", fontsize=8, ncols=1 if axis is left else 3)
        label_axes(left, "", "seconds of the machine", "one request")
        label_axes(right, "", "times as many requests per second", "with twice the …")
        footnote(figure, note)
    return figure
