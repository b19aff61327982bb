"""Lesson 06: the stored run, the running chart, the pictures, the timeline, and what the checks hold for right."""

import base64
import json
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest
import torch
from tiny import as_transformers, random_ids, tiny_model
from tiny import one_thread as one_thread

import llm_lessons as ll
from llm_lessons.classroom import check, plots, reference, style, widgets
from llm_lessons.classroom.checks import decode as checks
from llm_lessons.classroom.widgets.decode import token_seconds
from llm_lessons.model import rope_table

PNG = b"\x89PNG\r\n"
NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "06_decode.ipynb"
RUN = {"machine": "a machine of the tests", "date": "2026-01-31", "command": "python benchmarks/engines.py",
       "results": [{"job": "prefill", "tokens": 512, "engine": "ours", "tokens_per_second": 500.0},
                   {"job": "decode", "tokens": 32, "engine": "ours", "tokens_per_second": 50},
                   {"job": "decode", "tokens": 512, "engine": "ours", "tokens_per_second": 40.0},
                   {"job": "decode", "tokens": 512, "engine": "theirs <b>", "tokens_per_second": 80.0},
                   {"job": "decode", "tokens": 2048, "engine": "ours", "tokens_per_second": 30.0}]}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A function that stores a run where the package looks for one."""
    path = tmp_path / "engines.json"
    monkeypatch.setattr(reference, "ENGINES", path)

    def store(run):
        path.write_text(run if isinstance(run, str) else json.dumps(run), encoding="utf-8")
        return path

    return store


# --- the stored run -------------------------------------------------------------------------------------------------

def test_without_a_file_there_is_no_run(stored):
    assert reference.stored_run() is None


def test_a_run_is_read_with_its_machine_date_and_command(stored):
    path = stored(RUN)
    run = reference.stored_run()
    assert (run.machine, run.date, run.command) == (RUN["machine"], RUN["date"], RUN["command"])
    assert [vars(result) for result in run.results] == RUN["results"]
    assert run == reference.stored_run(path)


@pytest.mark.parametrize(("context", "found"), [
    (512, {"ours": 40.0, "theirs <b>": 80.0}), (511, {"ours": 50}), (4096, {"ours": 30.0}), (31, {})])
def test_decode_takes_the_longest_context_up_to_the_one_asked_for(stored, context, found):
    stored(RUN)
    assert reference.stored_run().decode(context) == found


def changed(**fields):
    return {**RUN, "results": [{**RUN["results"][2], **fields}]}


@pytest.mark.parametrize(("run", "words"), [
    ("{", "is not a stored run"), ("[]", "is not a stored run"), ({"machine": "x"}, "results"),
    ({**RUN, "more": 1}, "more"), ({**RUN, "machine": ""}, "machine must be a text, not ''"),
    ({**RUN, "date": "31.1.2026"}, "31.1.2026"), ({**RUN, "results": []}, "at least one measurement"),
    (changed(job="train"), "job must be one of decode, prefill, not 'train'"), (changed(tokens=0), "at least 1, not 0"),
    (changed(tokens="512"), "'512'"), (changed(engine=""), "engine must be a name"),
    (changed(tokens_per_second=0), "above 0, not 0"), (changed(tokens_per_second="40"), "'40'"),
    (changed(tokens_per_second=float("inf")), "inf"), (changed(tokens_per_second=True), "True"),
    (changed(extra=1), "extra")])
def test_a_file_that_is_no_run_is_refused_with_its_path(stored, run, words):
    path = stored(run)
    with pytest.raises(ValueError) as refused:
        reference.stored_run()
    assert words in str(refused.value) and str(path) in str(refused.value)


def test_the_committed_run_can_be_read_if_there_is_one():
    run = reference.stored_run()
    assert run is None or run.decode(plots.CONTEXT)


# --- the running chart ----------------------------------------------------------------------------------------------

def test_the_chart_has_one_panel_where_no_run_is_stored(stored):
    shown = plots.engine_speed({"recompute everything": 1.25, "with a cache": 20.0}, note="here")
    assert [bar.get_width() for bar in shown.axes[0].patches] == [1.25, 20.0]
    assert [tick.get_text() for tick in shown.axes[0].get_yticklabels()] == ["recompute everything", "with a cache"]
    assert len(shown.axes) == 1 and shown.axes[0].get_xlabel() == "here"
    assert repr(shown).endswith("recompute everything 1.2 tokens/s, with a cache 20.0 tokens/s (here)")


def test_other_engines_stand_in_a_panel_that_names_machine_and_date(stored):
    stored(RUN)
    shown = plots.engine_speed({"with a cache": 20.0}, note="here")
    mine, theirs = shown.axes
    assert [bar.get_width() for bar in mine.patches] == [20.0]
    assert [bar.get_width() for bar in theirs.patches] == [40.0, 80.0]
    assert theirs.get_xlabel() == "a machine of the tests, 2026-01-31"
    assert mine.get_xlim() == theirs.get_xlim() and mine.get_xlim()[1] > 80
    assert "512 tokens" in shown.get_supxlabel() and "theirs <b> 80.0" in repr(shown)
    colors = {matplotlib.colors.to_hex(axis.patches[0].get_facecolor()).upper() for axis in shown.axes}
    assert colors == {style.COLORS["decode"], style.COLORS["neutral"]}


def test_a_run_without_decode_gives_no_empty_panel(stored):
    stored({**RUN, "results": RUN["results"][:1]})
    assert len(plots.engine_speed({"with a cache": 20.0}).axes) == 1


@pytest.mark.parametrize(("yours", "words"), [({}, "at least one bar"), ({"a": 0.0}, "above 0, not 0.0 for 'a'"),
                                              ({"a": float("nan")}, "not nan")])
def test_what_cannot_be_drawn_is_refused(stored, yours, words):
    with pytest.raises(ValueError, match=words):
        plots.engine_speed(yours)


# --- the pictures ---------------------------------------------------------------------------------------------------

def test_bytes_and_ceiling():
    shown = plots.step_bytes([10, 1000], 4e6, [1e6, 4e6], 100e6, [0.1, 0.1], note="here")
    left, right = shown.axes
    assert [bar.get_height() for bar in left.patches] == [4, 4, 1, 4]  # MB: weights, then the cache on top
    assert [bar.get_height() for bar in right.patches] == pytest.approx([10, 10])
    ceilings = [float(segment[0][1]) for segment in right.collections[0].get_segments()]
    assert ceilings == pytest.approx([20, 12.5])  # 100 MB/s over 5 MB, over 8 MB
    assert [text.get_text() for text in right.texts] == ["50%", "80%"]
    assert "10 tokens in the cache: 4 MB of weights and 1 MB of cache, at most 20.0 tokens/s" in repr(shown)


def test_the_parts_of_a_step_stand_one_behind_the_other():
    shown = plots.step_parts({"weights": 0.03, "above": 0.004, "attention": 0.002, "else": 0.007}, 0.031)
    bars = shown.axes[0].patches
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 30, 34, 36])
    assert [bar.get_width() for bar in bars] == pytest.approx([30, 4, 2, 7])
    assert shown.axes[0].lines[0].get_xdata()[0] == pytest.approx(31)
    assert "43 ms" in shown.axes[0].get_title(loc="left") and "else 7 ms" in repr(shown)


def test_a_batch_as_time_and_as_tokens_per_second():
    shown = plots.batch_steps([1, 4], [0.1, 0.2], [0.05, 0.05])
    left, right = shown.axes
    assert [list(line.get_ydata()) for line in left.lines] == [[100, 200], [50, 50]]
    assert list(right.lines[0].get_ydata()) == pytest.approx([10, 20])
    assert "log scale" in left.get_ylabel() and "4 rows: 200 ms a step, at least 50 ms, 20.0 tokens/s" in repr(shown)


def test_both_jobs_stand_under_one_roof():
    roof = ll.Roofline({"float32": 100e9}, 10e9, {})
    shown = plots.two_jobs_roofline(roof, "float32", {"prefill": [(32, 12.0, 50e9)], "decode": [(1, 0.5, 4e9)]})
    axis = shown.axes[0]
    ceiling = axis.lines[0]
    assert ceiling.get_ydata()[1] == 100 and ceiling.get_xdata()[1] == 10  # the ridge: 100 GFLOP/s over 10 GB/s
    assert [list(line.get_ydata()) for line in axis.lines[2:]] == [[50], [4]]
    assert [line.get_color() for line in axis.lines[2:]] == [style.COLORS["prefill"], style.COLORS["decode"]]
    assert "ridge at 10.0" in repr(shown) and "decode: 1 at 0.5 FLOP per byte 4.0 GFLOP/s" in repr(shown)


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(stored, recwarn):
    stored(RUN)
    before = dict(matplotlib.rcParams)
    roof = ll.Roofline({"float32": 100e9}, 10e9, {})
    for shown in (plots.growing_time([32, 128], [0.1, 0.3], [0.05, 0.2], "here"), plots.engine_speed({"模型 <b>": 3.0}),
                  plots.step_bytes([1], 1e9, [0.0], 1e9, [1.0]), plots.step_parts({"a": 0.0, "b": 0.1}, 0.2),
                  plots.batch_steps([1, 2], [0.1, 0.1], [0.1, 0.1]), plots.timeline([0.1, 0.2], [0.1, 0.1], 5, True),
                  plots.two_jobs_roofline(roof, "float32", {"decode": [(1, 0.5, 4e9), (2, 1.0, 7e9)]})):
        assert shown.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- the timeline ---------------------------------------------------------------------------------------------------

WHOLE, STEP = {32: 0.1, 64: 0.2, 128: 0.5}, {32: 0.01, 1024: 0.02}


def test_times_lie_on_straight_lines_between_the_measured_ones():
    # 48 is half-way from 32 to 64, 80 a quarter of the way from 64 to 128.
    assert token_seconds(WHOLE, STEP, 48, 2, False) == pytest.approx([0.15, 0.15 + 0.1 / 32])
    assert token_seconds(WHOLE, STEP, 80, 1, False) == pytest.approx([0.2 + 0.3 / 4])
    cached = token_seconds(WHOLE, STEP, 64, 3, True)
    assert cached == pytest.approx([0.2, 0.01 + 0.01 * 33 / 992, 0.01 + 0.01 * 34 / 992])
    assert token_seconds({32: 1.0, 64: 1.0}, {512: 0.5}, 40, 4, True) == [1.0, 0.5, 0.5, 0.5]
    assert token_seconds({np.int64(32): 1.0, 64: 2.0}, STEP, 64, 1, False) == [2.0]


def timeline(**where):
    return widgets.step_timeline(WHOLE, STEP, **{"prompt": 40, "new": 20, **where})


def test_the_controls_choose_the_loop_and_the_lengths():
    shown = timeline()
    assert shown.seconds == token_seconds(WHOLE, STEP, 40, 20, False)
    before = shown.picture.value
    shown.controls["loop"].value = True
    assert shown.seconds == token_seconds(WHOLE, STEP, 40, 20, True)
    assert shown.picture.value != before and bytes(shown.picture.value).startswith(PNG)
    shown.controls["prompt"].value, shown.controls["new"].value = 60, 8
    assert shown.seconds == token_seconds(WHOLE, STEP, 60, 8, True)


def test_no_text_longer_than_the_measured_ones_is_shown():
    shown = timeline(prompt=100, new=28)
    shown.controls["new"].value = 96
    assert len(shown.seconds) == 28
    shown.controls["prompt"].value = 126
    assert len(shown.seconds) == 2
    assert (shown.controls["prompt"].min, shown.controls["prompt"].max) == (32, 126)


@pytest.mark.parametrize(("where", "words"), [
    ({"prompt": 31}, "31 tokens"), ({"prompt": 127}, "127 tokens"), ({"new": 1}, "1 new"),
    ({"prompt": 100, "new": 29}, "32 to 128")])
def test_lengths_that_were_not_measured_are_refused(where, words):
    with pytest.raises(ValueError, match=words):
        timeline(**where)


@pytest.mark.parametrize(("whole", "step"), [({32: 1.0}, STEP), ({}, STEP), (WHOLE, {})])
def test_a_timeline_needs_measurements(whole, step):
    with pytest.raises(ValueError, match="at least 2 measured texts and 1 measured step"):
        widgets.step_timeline(whole, step)


def test_f1_view_picture_and_words_are_in_one_output():
    data = timeline(note="measured here")._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert "20 tokens behind a prompt of 40; without a cache" in data["text/plain"]


# --- what the checks hold for right ---------------------------------------------------------------------------------

def test_the_bytes_of_published_models():
    # Parameters as Hugging Face states them, less norms and, for Llama-3-8B, the embedding table; bfloat16.
    small = 2 * (134_515_008 - 61 * 576) + 23_040 * 4096
    large = 2 * (8_030_261_248 - 65 * 4096 - 128_256 * 4096) + 131_072 * 4096
    configs = list(checks.CONFIGS.values())
    assert checks._bytes(configs[0], 4096, 2) == small
    assert checks._bytes(configs[1], 4096, 2) == large


def from_the_shape(config, context, bytes_per_value):
    return ll.Shape.of(config).bytes_per_token(context, 1, bytes_per_value, bytes_per_value)


def with_all_that_is_small(config, context, bytes_per_value):
    norms_and_row = (2 * config.layers + 2) * config.hidden
    return from_the_shape(config, context + 1, bytes_per_value) + norms_and_row * bytes_per_value


def as_a_tensor(config, context, bytes_per_value):
    return torch.tensor([from_the_shape(config, context, bytes_per_value)])


def tokens_per_second(weight_bytes, cache_bytes, batch, bandwidth):
    return batch / ((weight_bytes + batch * cache_bytes) / bandwidth)


def by_range(prompt_length, steps):
    return range(prompt_length, prompt_length + steps)


def by_tensor(prompt_length, steps):
    return prompt_length + torch.arange(steps)


def by_floats(prompt_length, steps):
    return [float(prompt_length + step) for step in range(steps)]


def by_hand(shape, prompt, new):
    passes = [(2 * n * (shape.parts["attention"] + shape.parts["ffn"]) + 2 * shape.vocab * shape.hidden
               + 2 * shape.layers * shape.heads * shape.head_dim * n * (n + 1)) for n in range(prompt, prompt + new)]
    return float(sum(passes))


@pytest.mark.parametrize(("name", "fn"), [
    ("bytes_per_step", from_the_shape), ("bytes_per_step", with_all_that_is_small), ("bytes_per_step", as_a_tensor),
    ("ceiling", tokens_per_second), ("positions", by_range), ("positions", by_tensor), ("positions", by_floats),
    ("recompute_flops", by_hand)])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


@pytest.mark.parametrize(("batch", "rate"), [(1, 239.9), (64, 3756.6), (240, 4529.3)])
def test_the_ceiling_of_a_published_example(batch, rate):
    # "How to Scale Your Model": Llama-2-13B on 8 chips of 8.2e11 B/s, 26 GB of weights, 1.34 GB of cache each.
    assert tokens_per_second(26e9, 1.34e9, batch, 8 * 8.2e11) == pytest.approx(rate, abs=0.1)


# --- the lesson's own decode step -----------------------------------------------------------------------------------

def from_the_notebook(model, *names):
    """Functions of the lesson, taken from its cells, for another model."""
    space = {"torch": torch, "rope_table": rope_table, "model": model, "device": model.device}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code" and any(f"def {name}(" in cell.source for name in names):
            exec(cell.source, space)
    return [space[name] for name in names]


def test_b2_the_lessons_decode_step_is_transformers_and_its_mistakes_are_not():
    model, ids, new = tiny_model(), random_ids(6), random_ids(8, seed=1)
    expected = as_transformers(model)(torch.tensor([ids + new])).logits[0, 6:].log_softmax(-1)
    decode_at, write_8 = from_the_notebook(model, "decode_at", "write_8")
    cache = model.new_cache(14)
    logits = ll.prefill(model, ids, cache)
    found = {rule: write_8(logits, cache, rule, new)[1] for rule in ("right", "steps alone", "prompt twice")}
    torch.testing.assert_close(found["right"], expected, rtol=1e-4, atol=1e-4)
    assert (found["steps alone"] - expected).abs().max() > 0.1
    torch.testing.assert_close(found["prompt twice"][0], expected[0], rtol=1e-4, atol=1e-4)
    assert (found["prompt twice"][1:] - expected[1:]).abs().max() > 0.1
    assert cache.length == 6


@pytest.mark.parametrize(("rule", "used"), [("right", [6, 7, 8, 9]), ("steps alone", [0, 1, 2, 3]),
                                            ("prompt twice", [6, 12, 13, 14])])
def test_b2_the_positions_of_each_rule(rule, used):
    space = {"torch": torch}
    source = next(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "def write_8(" in cell.source)
    exec(source, space)
    assert [space["rules"][rule](6, step) for step in range(4)] == used


def test_the_loop_without_a_cache_takes_transformers_next_token():
    model, ids = tiny_model(), random_ids(9)
    (next_token,) = from_the_notebook(model, "next_token")
    assert next_token(ids) == int(as_transformers(model)(torch.tensor([ids])).logits[0, -1].argmax())
