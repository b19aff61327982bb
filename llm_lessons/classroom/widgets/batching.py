"""Lesson 09: who waits, reads and writes when, for a policy, a batch and a token budget, on a simulated engine."""

from __future__ import annotations

from statistics import median

import ipywidgets

from ...batching import Step
from ...request import Request
from ...simulation import CostModel, simulated_engine
from ...traffic import SCENARIOS, Arrival, arrivals, serve
from ..plots.batching import request_timeline
from .core import Interactive, image_box, one_at_a_time, one_of, side_by_side

# About the seconds that the course's model takes with bfloat16 weights on 2 cores; fixed, so that the picture is the
# same for everybody, and there at once.
COST = CostModel(decode_call=0.020, decode_row=0.0012, decode_cached=3e-6, prefill_call=0.018, prefill_token=0.0004)
ANSWERS = (4, 24, 6, 3, 18, 5, 8, 30, 4, 10, 6, 12)
LOADS = {
    "answers of unequal length": [Arrival(0, 20, answer) for answer in ANSWERS],
    "a long prompt among short ones": [Arrival(0, 20, 30 + 3 * n) for n in range(3)] + [Arrival(0.25, 800, 12)],
    "requests that come at random": arrivals(SCENARIOS["chat"].scaled(1 / 16), rate=9, count=16, seed=5)}
POLICIES = ["static", "continuous"]
PLACES = [1, 2, 4, 8]
BUDGETS = [16, 32, 64, 128, 512, 2048]


def simulate(load: str, policy: str, max_batch: int, token_budget: int) -> tuple[list[Request], list[Step]]:
    """Serve one of LOADS on a simulated engine -> its requests and steps."""
    engine, steps = simulated_engine(COST, max_batch=max_batch, token_budget=token_budget, policy=policy), []
    step = engine.step
    engine.step = lambda: steps.append(step())  # serve() steps the engine; keep what happened
    return serve(engine, LOADS[load]), steps


class Timeline(Interactive):
    """The widget; `controls` by name (load, policy, max_batch, token_budget), `words` below them, `picture`."""

    def __init__(self, load: str, policy: str, max_batch: int, token_budget: int):
        look = {"style": {"description_width": "110px"}, "layout": {"width": "350px"}}
        options = {"load": (load, list(LOADS)), "policy": (policy, POLICIES), "max_batch": (max_batch, PLACES),
                   "token_budget": (token_budget, BUDGETS)}
        names = {"load": "requests", "policy": "batching", "max_batch": "places", "token_budget": "token budget"}
        for name, (value, choices) in options.items():
            one_of(name, value, choices)
        self.controls = {
            name: (ipywidgets.Dropdown if name in ("load", "policy") else ipywidgets.SelectionSlider)(
                options=choices, value=value, description=names[name], **look)
            for name, (value, choices) in options.items()}
        self.words, self.picture = ipywidgets.HTML(), image_box()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        twin = self._show()
        controls = side_by_side(*([self.controls[name] for name in part]
                                  for part in (("load", "policy"), ("max_batch", "token_budget"))))
        super().__init__(ipywidgets.VBox([controls, self.words, self.picture]), twin)

    @one_at_a_time
    def _changed(self, _) -> None:
        self._show()

    def _show(self):
        load, policy, max_batch, token_budget = (control.value for control in self.controls.values())
        requests, steps = simulate(load, policy, max_batch, token_budget)
        gaps = [later - sooner for request in requests for sooner, later in zip(request.times, request.times[1:])]
        shown = request_timeline({policy: (requests, steps)}, note="simulated")
        said = (f"{load}; median TTFT {median(request.ttft for request in requests):.2f} s, longest gap between two "
                f"tokens {1e3 * max(gaps):.0f} ms")
        shown.alt = f"{said}. {shown.alt}"
        self.words.value, self.picture.value = f"{said}.", shown.png()
        return shown


def timeline(load: str = "answers of unequal length", policy: str = "static", max_batch: int = 4,
             token_budget: int = 2048) -> Timeline:
    """Choose requests, batching, places and token budget; see every request's time. Simulated, so that it answers at
    once: the scheduler is the real one, the time of each call a fixed sum (see COST). Static batching reads prompts
    whole, whatever the budget."""
    return Timeline(load, policy, max_batch, token_budget)
