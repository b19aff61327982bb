"""What every widget shares: its static twin, and a slider over pictures. Made of what ipywidgets 7.7 and 8 share."""

from __future__ import annotations

import base64
import functools
import threading
import unicodedata
from collections.abc import Callable, Iterable

import ipywidgets

from ..style import Picture


class Interactive:
    """A widget and its static twin in one output: a front end with a kernel shows the widget, any other the picture."""

    def __init__(self, widget: ipywidgets.Widget, twin: Picture):
        self.widget, self.twin = widget, twin

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {"application/vnd.jupyter.widget-view+json": view,
                "image/png": base64.b64encode(self.twin.png()).decode("ascii"),
                "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Interactive: {self.twin.alt}"


UNSEEN = {"BN", "B", "S", "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode's classes of signs
JOINERS = "\u200c\u200d"  # that have no picture of their own; these two shape their neighbours, and stay


def readable(text: str) -> str:
    """Text for a line of a page, which can draw every letter: signs for spaces and control characters. Not escaped."""
    signs = {" ": "·", "\n": "⏎", "\t": "⇥"}
    unseen = {c: f"⟨U+{ord(c):04X}⟩" for c in text if unicodedata.bidirectional(c) in UNSEEN and c not in JOINERS}
    return "".join((unseen | signs).get(c, c) for c in text)


def side_by_side(*columns: Iterable[ipywidgets.Widget]) -> ipywidgets.HBox:
    """Controls in columns, which go below each other where the page is narrow."""
    return ipywidgets.HBox([ipywidgets.VBox(list(column)) for column in columns],
                           layout=ipywidgets.Layout(flex_flow="row wrap"))


def image_box(png: bytes = b"") -> ipywidgets.Image:
    """A picture in its own size, or as wide as the page where that is less; a box would stretch it otherwise."""
    room = "calc(100% - 4px)"  # without the margins that ipywidgets gives every widget
    return ipywidgets.Image(value=png, format="png", layout=ipywidgets.Layout(align_self="flex-start", max_width=room))


def breakable(markup: str) -> str:
    """A line of HTML that may break inside a word: a token can be longer than the page is wide."""
    return f'<span style="overflow-wrap:anywhere">{markup}</span>'


WIDTHS = {"4 (float32)": 4, "2 (bfloat16)": 2, "1 (int8)": 1, "0.5 (int4)": 0.5}  # bytes of a number, as a choice


def one_of(name: str, value, options: Iterable) -> None:
    """ValueError unless the value is among the options, which it lists."""
    options = list(options)
    if value not in options:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, options))}")


_LOCK = threading.RLock()


def one_at_a_time(callback: Callable) -> Callable:
    """For what a widget calls: JupyterLab may handle two events in two threads of the kernel.

    A callback then waits for the one before it; it should read the controls as they stand, not what the event says.
    """

    @functools.wraps(callback)
    def waiting(*arguments):
        with _LOCK:
            return callback(*arguments)

    return waiting


def steps_through(count: int, draw: Callable[[int], Picture], label: str) -> Interactive:
    """A slider over `count` pictures, each drawn when it is first looked at."""
    drawn: dict[int, bytes] = {}
    first = draw(0)
    slider = ipywidgets.IntSlider(value=1, min=1, max=count, description=label, continuous_update=True)
    image = image_box(first.png())

    @one_at_a_time
    def show(_) -> None:
        at = slider.value - 1
        if at not in drawn:
            drawn[at] = draw(at).png()
        image.value = drawn[at]

    slider.observe(show, names="value")
    return Interactive(ipywidgets.VBox([slider, image]), first)
