"""One look for every picture: colours that mean one thing through the whole course, and figures that are returned.

Figures are made without pyplot: nothing is shown twice, no backend is chosen, and nothing is kept alive behind the
learner's back.
"""

from __future__ import annotations

import io
import platform
import textwrap
import threading
from contextlib import contextmanager
from functools import lru_cache

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe and Ito's palette: told apart with every common kind of colour blindness (https://jfly.uni-koeln.de/color/).
COLORS = {
    "prefill": "#0072B2",
    "decode": "#E69F00",
    "weights": "#56B4E9",
    "kv_cache": "#009E73",
    "attention": "#CC79A7",
    "mistake": "#D55E00",
    "neutral": "#777777",
}
RULES = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E5E5E5", "legend.frameon": False, "figure.facecolor": "white", "text.parse_math": False,
}


_DRAWING = threading.RLock()  # matplotlib's settings are global, and widgets draw in threads of their own


class Picture(Figure):
    """A figure that Jupyter shows as PNG and a screen reader as its `alt` text."""

    alt = "a picture"

    def png(self) -> bytes:
        with io.BytesIO() as buffer, _DRAWING, matplotlib.rc_context(RULES):
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"


@contextmanager
def picture(alt: str, rows: int = 1, columns: int = 1, width: float = 9.0, height: float = 3.2, **subplots):
    """Draw in the course's style: `with picture("what it shows") as (figure, axes): ...`; axes is one, or an array."""
    with _DRAWING, matplotlib.rc_context(RULES):
        figure = Picture(figsize=(width, height), layout="constrained")
        figure.alt = alt
        yield figure, figure.subplots(rows, columns, **subplots)


def visible(text: str, most: int = 40) -> str:
    """A token's text as a label: spaces and line breaks become signs that can be seen. Of a long one, the beginning."""
    return shortened(drawable(text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")), most)


def shortened(text: str, most: int) -> str:
    """At most so many characters of a text; the last of them is an ellipsis where something is left out."""
    return text if len(text) <= most else text[:most - 1] + "…"


def drawable(text: str) -> str:
    """Text as matplotlib's own font can draw it, on one line: Chinese and most emoji, which it lacks, become U+hhhh."""
    return "".join(c if ord(c) in _glyphs() else f"⟨U+{ord(c):04X}⟩" for c in text.replace("\n", " "))


@lru_cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans Mono")).get_charmap())


def label_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Axis labels with their units, and a title."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title)


def short(value: float) -> str:
    """A number with three digits that count, written out: 0.117, 1,200."""
    return f"{float(f'{value:.3g}'):,.10g}"


def footnote(figure: Figure, note: str) -> None:
    """A line under the picture: where its numbers were measured."""
    figure.supxlabel(textwrap.fill(note, 130), fontsize=8, color=COLORS["neutral"])


def axis_note(axis: Axes, note: str) -> None:
    """The same under an axis and its label, where a legend takes the place under the picture."""
    axis.annotate(drawable(note), (0, 0), (0, -42), xycoords="axes fraction", textcoords="offset points", fontsize=8,
                  color=COLORS["neutral"])


def log_ticks(axis: Axis, multiples: tuple[int, ...]) -> None:
    """Ticks of an x or y axis at these multiples of the powers of ten, written out: 0.3, 10, 3,000."""
    axis.set_major_locator(LogLocator(subs=multiples, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())


def this_machine(device: object = "cpu") -> str:
    """What stands under a measurement: processor, threads, torch."""
    import torch

    kind = torch.device(device).type
    name = torch.cuda.get_device_name() if kind == "cuda" else "Apple GPU" if kind == "mps" else _processor()
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if kind == "cpu" else ""
    return f"{name}{threads}, PyTorch {torch.__version__.split('+')[0]}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
