"""Lesson 08: lay a row of real weights on a grid: how many bits, a grid for how many of them, and what is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import ipywidgets
from torch import Tensor

from ...quality import SCALE_BITS
from ...quantize import QuantizedTensor, quantize
from ..plots.quantization import grid_summary, grid_view
from ..style import Picture
from .core import Interactive, breakable, image_box, one_at_a_time, side_by_side

GROUPS = (192, 96, 32)


def on_grid(values: Tensor, bits: int, group_size: int, symmetric: bool, kept: float) -> QuantizedTensor:
    """Values [columns] on their grid, clamped before to the share `kept`, 0 to 1, of each group's largest |value|."""
    groups = values.detach().float().reshape(-1, group_size)
    largest = kept * groups.abs().amax(-1, keepdim=True)
    return quantize(groups.clamp(-largest, largest).reshape(1, -1), bits, group_size, symmetric)


def bits_per_weight(quantized: QuantizedTensor) -> float:
    """Bits of a code and its part in the scale, and in the minimum of an asymmetric grid, of 16 bits each."""
    return quantized.bits + (1 if quantized.symmetric else 2) * SCALE_BITS / quantized.group_size


class GridExplorer(Interactive):
    """The explorer; `controls` by name (row, bits, group, symmetric, kept), `words` below them, `picture`."""

    def __init__(self, rows: Mapping[str, Tensor]):
        self.rows = dict(rows)
        groups = [("the whole row", 0)] + [(f"{size} weights", size) for size in GROUPS
                                           if all(len(row) % size == 0 and len(row) > size for row in rows.values())]
        look = {"style": {"description_width": "90px"}}
        slides = {"continuous_update": False, **look}
        self.controls = {
            "row": ipywidgets.Dropdown(options=list(rows), description="row", **look),
            "bits": ipywidgets.IntSlider(value=4, min=2, max=8, description="bits", **slides),
            "group": ipywidgets.Dropdown(options=groups, description="a grid for", **look),
            "symmetric": ipywidgets.Dropdown(options=[("symmetric", True), ("asymmetric", False)], description="grid",
                                             **look),
            "kept": ipywidgets.IntSlider(value=100, min=50, max=100, step=5, description="% of largest", **slides)}
        self.words, self.picture = ipywidgets.HTML(), image_box()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        twin = self._show()
        controls = side_by_side(*([self.controls[name] for name in part]
                                  for part in (("row", "group", "symmetric"), ("bits", "kept"))))
        super().__init__(ipywidgets.VBox([controls, self.words, self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self) -> Picture:
        name, bits, group, symmetric, kept = (control.value for control in self.controls.values())
        values = self.rows[name]
        quantized = on_grid(values, bits, group or len(values), symmetric, kept / 100)
        said = (f"{name}: {grid_summary(values, quantized)}; {bits_per_weight(quantized):.4g} bits per weight with "
                f"{SCALE_BITS}-bit {'scales' if symmetric else 'scales and minima'}")
        shown = grid_view(values, quantized)
        shown.alt = f"{said}. {shown.alt}"
        self.words.value, self.picture.value = breakable(f"{escape(said)}."), shown.png()
        return shown


def grid_explorer(rows: Mapping[str, Tensor]) -> GridExplorer:
    """Choose a row (label -> weights [columns]), bits, grouping and kind of grid; see the steps and every error.

    "% of largest": what of each group's largest |value| its grid reaches; values beyond are clipped to its end. Groups
    are offered in sizes that divide every row.
    """
    if not rows:
        raise ValueError("there is nothing to explore: give at least one row, label -> tensor of its weights")
    for label, row in rows.items():
        if not isinstance(row, Tensor) or row.dim() != 1 or not row.is_floating_point() or not len(row):
            what = f"{list(row.shape)} of {row.dtype}" if isinstance(row, Tensor) else repr(row)
            raise ValueError(f"row {label!r} must be a tensor [columns] of floating-point numbers, not {what}")
        if not row.isfinite().all():
            raise ValueError(f"row {label!r} holds NaN or infinity: no grid has a place for them")
    return GridExplorer(rows)
