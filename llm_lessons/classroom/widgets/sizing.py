"""Lesson 10: a planner. Turn model, device, bits, context and users; see what fills the memory, and the least times."""

from __future__ import annotations

from html import escape

import ipywidgets

from ...capacity import SHAPES
from ...devices import DEVICES
from ...kv_cache import whole_number
from ...planner import plan
from ..plots.sizing import listed, memory_bars, verdict
from ..style import Picture, short
from .core import Interactive, image_box, one_at_a_time, one_of, side_by_side

COUNTS = [1, 2, 4, 8]
WEIGHT_BITS = {"16 (bfloat16)": 16, "8 (int8)": 8, "4.5 (int4, groups of 32)": 4.5}
KV_BITS = {"16 (bfloat16)": 16, "8 (fp8)": 8, "4.75 (int4)": 4.75}  # lesson 08's int4 cache, scales and minima included
CONTEXTS = [2**power for power in range(9, 18)]
USERS = [2**power for power in range(10)]


class Planner(Interactive):
    """The widget; `controls` by name (those of `planner`), `words` below them, `picture`."""

    def __init__(self, **start):
        look = {"style": {"description_width": "110px"}}
        choices = {"model": list(SHAPES), "device": list(DEVICES), "count": COUNTS,
                   "weight_bits": list(WEIGHT_BITS.items()), "kv_bits": list(KV_BITS.items()),
                   "context": [(f"{n:,}", n) for n in CONTEXTS], "users": [(f"{n:,}", n) for n in USERS]}
        self.controls = {}
        for name, options in choices.items():
            kind = ipywidgets.SelectionSlider if name in ("context", "users") else ipywidgets.Dropdown
            words = {"count": "how many", "weight_bits": "bits per weight", "kv_bits": "bits in the cache"}
            self.controls[name] = kind(options=options, value=start[name], description=words.get(name, name), **look)
        self.words, self.picture = ipywidgets.HTML(), image_box()
        twin = self._show()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        controls = side_by_side(*([self.controls[name] for name in part] for part in
                                  (("model", "device", "count"), ("weight_bits", "kv_bits", "context", "users"))))
        super().__init__(ipywidgets.VBox([controls, self.words, self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self) -> Picture:
        at = {name: control.value for name, control in self.controls.items()}
        shape, device = SHAPES[at["model"]], DEVICES[at["device"]].several(at["count"])
        p = plan(shape, device, at["weight_bits"], at["kv_bits"], context=at["context"], users=at["users"])
        room = (f"room for {p.max_users:,} {'user' if p.max_users == 1 else 'users'} of {p.context:,} tokens"
                if p.max_users else "not even one user fits")
        said = (f"{at['model']} on {device.name}: {verdict(p.parts, device.memory)}; "
                f"{room}. TTFT at least {short(1e3 * p.ttft)} ms; TPOT at least {short(1e3 * p.tpot)} ms, bound by "
                f"{p.bound}; at most {short(p.tokens_per_second)} tokens/s in all")
        shown = memory_bars({at["model"]: (p.parts, device.memory)}, title=device.name)
        shown.alt = f"{said}. {listed(p.parts)}"
        self.words.value, self.picture.value = f"{escape(said)}.", shown.png()
        return shown


def planner(model: str = "llama-3-8b", device: str = "l4", count: int = 1, weight_bits: float = 16, kv_bits: float = 16,
            context: int = 4096, users: int = 8) -> Planner:
    """What a model and its users take of a device's memory, and the least times, with controls for all of them."""
    for name, value, options in (("model", model, SHAPES), ("device", device, DEVICES), ("count", count, COUNTS),
                                 ("weight_bits", weight_bits, WEIGHT_BITS.values()),
                                 ("kv_bits", kv_bits, KV_BITS.values()), ("context", context, CONTEXTS),
                                 ("users", users, USERS)):
        one_of(name, value, options)
    for name, value in (("count", count), ("context", context), ("users", users)):
        whole_number(name, value)  # True and 4096.0 are among the options for Python, and not for the controls
    return Planner(model=model, device=device, count=count, weight_bits=weight_bits, kv_bits=kv_bits, context=context,
                   users=users)
