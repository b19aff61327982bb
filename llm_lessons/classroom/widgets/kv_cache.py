"""Lesson 07: turn context, users, heads and bytes, and see when the cache outweighs the weights."""

from __future__ import annotations

from dataclasses import replace

import ipywidgets

from ...capacity import SHAPES, Shape
from ..plots.kv_cache import weights_and_cache
from .core import WIDTHS, Interactive, image_box, one_at_a_time, one_of, side_by_side

MODELS = {"SmolLM2-135M": "smollm2-135m", "Llama-3-8B": "llama-3-8b", "Llama-3-70B": "llama-3-70b"}
CONTEXTS = [2**power for power in range(8, 18)]
USERS = [2**power for power in range(9)]
HEADS = ["MHA", "GQA, as it is", "MQA"]


def with_heads(shape: Shape, kind: str) -> Shape:
    """The same model with a key/value head for each query head (MHA), with as many as it has (GQA), or with one."""
    return replace(shape, kv_heads={"MHA": shape.heads, "MQA": 1}.get(kind, shape.kv_heads))


class CacheGrowth(Interactive):
    """The widget; `controls` by name. Weights are in bfloat16."""

    def __init__(self, model: str, context: int, users: int, bytes_per_value: float, heads: str):
        width = next((name for name, value in WIDTHS.items() if value == bytes_per_value), bytes_per_value)
        start = {"model": (model, list(MODELS)), "heads": (heads, HEADS), "context": (context, CONTEXTS),
                 "users": (users, USERS), "width": (width, list(WIDTHS))}
        for name, (value, options) in start.items():
            one_of(name, value, options)
        names = {"model": "model", "heads": "heads", "context": "context", "users": "users",
                 "width": "bytes per number"}
        self.controls = {}
        for name, (value, options) in start.items():
            kind = ipywidgets.SelectionSlider if name in ("context", "users") else ipywidgets.Dropdown
            shown = [(f"{option:,}", option) for option in options] if name in ("context", "users") else options
            self.controls[name] = kind(options=shown, value=value, description=names[name],
                                       style={"description_width": "120px"})
        self.words, self.picture = ipywidgets.HTML(), image_box()
        twin = self._show()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        controls = side_by_side(*([self.controls[name] for name in part]
                                  for part in (("model", "heads", "width"), ("context", "users"))))
        super().__init__(ipywidgets.VBox([controls, self.words, self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self):
        at = {name: control.value for name, control in self.controls.items()}
        shape = with_heads(SHAPES[MODELS[at["model"]]], at["heads"])
        kind = at["heads"].split(",")[0]
        name = f"{at['model']}, {kind} ({shape.kv_heads} KV {'head' if shape.kv_heads == 1 else 'heads'})"
        shown = weights_and_cache(name, shape, at["context"], at["users"], WIDTHS[at["width"]])
        self.words.value, self.picture.value = shown.alt, shown.png()
        return shown


def cache_growth(model: str = "SmolLM2-135M", context: int = 4096, users: int = 1, bytes_per_value: float = 2,
                 heads: str = "GQA, as it is") -> CacheGrowth:
    """Memory of a model's weights (bfloat16) and of its users' caches, with controls for all that decides them."""
    return CacheGrowth(model, context, users, bytes_per_value, heads)
