"""Lesson 05: where a product of so many tokens lies under this machine's roofline, and how long it takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import ipywidgets

from ...capacity import SHAPES, ridge_point, roofline_time
from ...timing import Roofline
from ..plots.prefill import roofline
from ..style import Picture, short
from .core import WIDTHS, Interactive, image_box, one_at_a_time, one_of

TOKENS = [2**n for n in range(13)]  # 1 to 4096
BYTES = {"float32": 4, "bfloat16": 2}  # of one activation


def layer_matrices(name: str) -> list[tuple[int, int]]:
    """The seven matrices of one layer of a shape, as (inputs, outputs)."""
    s = SHAPES[name]
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return [(s.hidden, queries), (s.hidden, keys), (s.hidden, keys), (queries, s.hidden), (s.hidden, s.ffn),
            (s.hidden, s.ffn), (s.ffn, s.hidden)]


MATRICES = {"SmolLM2-135M, one layer": layer_matrices("smollm2-135m"),
            "Llama-3-8B, one layer": layer_matrices("llama-3-8b"),
            "Llama-3-8B, one matrix": [(4096, 14336)]}


def cost(matrices: Sequence[tuple[int, int]], tokens: int, weight_bytes: float,
         activation_bytes: float) -> tuple[int, float]:
    """FLOPs and bytes of a product of each matrix with so many tokens: weights, inputs and outputs move once."""
    flops = sum(2 * tokens * inputs * outputs for inputs, outputs in matrices)
    nbytes = sum(weight_bytes * inputs * outputs + activation_bytes * tokens * (inputs + outputs)
                 for inputs, outputs in matrices)
    return flops, nbytes


class RooflineExplorer(Interactive):
    """The explorer; `controls` by name (matrices, tokens, width), `words` below them, `picture`."""

    def __init__(self, roof: Roofline, dtype: str, matrices: str, tokens: int, width: float):
        self.roof, self.dtype = roof, dtype
        look = {"style": {"description_width": "120px"}, "layout": {"width": "330px"}}
        self.controls = {
            "matrices": ipywidgets.Dropdown(options=list(MATRICES), value=matrices, description="matrices", **look),
            "tokens": ipywidgets.SelectionSlider(options=[(f"{t:,}", t) for t in TOKENS], value=tokens,
                                                 description="tokens (log scale)", continuous_update=False, **look),
            "width": ipywidgets.Dropdown(options=list(WIDTHS.items()), value=width, description="bytes per weight",
                                         **look)}
        self.words, self.picture = ipywidgets.HTML(), image_box()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        twin = self._show()
        super().__init__(ipywidgets.VBox([*self.controls.values(), self.words, self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self) -> Picture:
        name, tokens, width = (control.value for control in self.controls.values())
        points = []
        for t in TOKENS:
            flops, nbytes = cost(MATRICES[name], t, width, BYTES[self.dtype])
            points.append((t, flops / nbytes, flops / roofline_time(flops, nbytes, self.roof, self.dtype)))
        flops, nbytes = cost(MATRICES[name], tokens, width, BYTES[self.dtype])
        seconds = roofline_time(flops, nbytes, self.roof, self.dtype)
        bound = "arithmetic" if flops / nbytes >= ridge_point(self.roof, self.dtype) else "memory bandwidth"
        said = (f"{name}, {tokens:,} {'token' if tokens == 1 else 'tokens'}: {short(flops / 1e9)} GFLOP, "
                f"{short(nbytes / 1e6)} MB, {short(flops / nbytes)} FLOP per byte. Bound by {bound}: at least "
                f"{short(seconds * 1e3)} ms, at most {short(tokens / seconds)} tokens/s")
        shown = roofline(self.roof, self.dtype, {f"{name}, {width:g} bytes per weight": points}, chosen=tokens)
        shown.alt = f"{said}. {shown.alt}"
        self.words.value, self.picture.value = f"{escape(said)}.", shown.png()
        return shown


def roofline_explorer(roof: Roofline, dtype: str = "float32", matrices: str = "SmolLM2-135M, one layer",
                      tokens: int = 4, width: float = 4) -> RooflineExplorer:
    """Choose matrices, tokens and bytes per weight; see the point under the roofline of `roof` and the least time.

    `dtype`: the type in which the machine calculates. Weights of fewer bytes are widened to it on the way.
    """
    for name, value, choices in (("dtype", dtype, [d for d in roof.flops_per_second if d in BYTES]),
                                 ("matrices", matrices, MATRICES), ("tokens", tokens, TOKENS),
                                 ("width", width, WIDTHS.values())):
        one_of(name, value, choices)
    return RooflineExplorer(roof, dtype, matrices, tokens, width)
