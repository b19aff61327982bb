"""The running chart of lessons 06 to 09: how many tokens per second your engine writes now."""

from __future__ import annotations

from ..reference import stored_run
from ..style import COLORS, Picture, drawable, label_axes, picture

CONTEXT = 512  # every bar of the chart: one more token behind a text of this length


def engine_speed(yours: dict[str, float], note: str = "") -> Picture:
    """Your engine, a bar for each stage: label -> tokens per second behind a text of `CONTEXT` tokens.

    Where a run of the benchmark is stored (data/engines.json), other engines stand in a panel of their own, which names
    that run's machine and date. Both panels have the same scale.
    """
    if not yours:
        raise ValueError("there is nothing to draw: give at least one bar, label -> tokens per second")
    for label, rate in yours.items():
        if not rate > 0:
            raise ValueError(f"tokens per second must be above 0, not {rate!r} for {label!r}")
    run = stored_run()
    others = run.decode(CONTEXT) if run else {}
    panels = [("your engine", yours, COLORS["decode"], note)]
    if others:
        title = "for comparison, a stored run, one request"
        panels.append((title, others, COLORS["neutral"], f"{run.machine}, {run.date}"))
    alt = ". ".join(f"{title}: " + ", ".join(f"{label} {rate:.1f} tokens/s" for label, rate in bars.items())
                    + (f" ({words})" if words else "") for title, bars, _, words in panels)
    height = 1.3 + 0.42 * len(yours) + (1.1 + 0.42 * len(others) if others else 0)
    with picture(alt, len(panels), 1, height=height, squeeze=False, sharex=True,
                 height_ratios=[len(bars) + 1 for _, bars, *_ in panels]) as (figure, axes):
        fastest = max(rate for _, bars, *_ in panels for rate in bars.values())
        for axis, (title, bars, color, words) in zip(axes[:, 0], panels):
            drawn = axis.barh(range(len(bars)), bars.values(), color=color, height=0.62)
            axis.bar_label(drawn, [f" {rate:.3g}" for rate in bars.values()])
            axis.set_yticks(range(len(bars)), [drawable(label) for label in bars])
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.set_xlim(0, 1.1 * fastest)
            axis.tick_params(labelbottom=True)
            label_axes(axis, drawable(words), "", title)
            axis.xaxis.label.set(fontsize=8, color=COLORS["neutral"])
        figure.supxlabel(f"tokens per second behind a text of {CONTEXT} tokens", fontsize=10)
    return figure
