"""Lesson 04: its reference numbers come from transformers, its pictures and its playground show what the sampler does.

`python tests/test_classroom_04.py` computes the reference numbers again and stores them in the package.
"""

import datetime
import hashlib
import html
import importlib
import json
import re
import time
from pathlib import Path
from threading import Thread

import ipywidgets
import nbformat
import pytest
import torch
import torch.nn.functional as F

import llm_lessons as ll
from llm_lessons.classroom import check, plots, widgets
from llm_lessons.download import SMOLLM2

ROOT = Path(__file__).parent.parent
STORED = ROOT / "llm_lessons" / "data" / "reference_logits.json"
PROMPT = "How does inference work?"
FIXED = range(0, 49152, 4096)  # ids from all over the vocabulary, whatever their logit is


def reference(path: Path) -> dict:
    """The last position's logits for the course's prompt, as transformers computes them from the same file."""
    import transformers

    ids = ll.load_tokenizer().encode(PROMPT)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name,
                                                              dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    rounded = {i: round(float(logits[i]), 5) for i in (*logits.topk(10).indices.tolist(), *FIXED)}
    pairs = list(rounded.items())
    return {"prompt": PROMPT, "ids": ids, "what": "logits for the token after the last; [id, logit]",
            "top": pairs[:10], "others": pairs[10:], "logsumexp": round(float(logits.logsumexp(-1)), 5),
            "origin": {"model file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                       "computed by": "transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=..., "
                                      "dtype=torch.float32)",
                       "transformers": transformers.__version__, "torch": torch.__version__,
                       "date": datetime.date.today().isoformat(), "command": "python tests/test_classroom_04.py"}}


# --- The reference numbers ------------------------------------------------------------------------------------------

def test_the_stored_numbers_are_what_transformers_computes_from_the_same_file(gguf_path):
    stored, fresh = json.loads(STORED.read_text()), json.loads(json.dumps(reference(gguf_path)))
    assert stored["origin"]["sha256"] == fresh["origin"]["sha256"]
    for key in ("prompt", "ids"):
        assert stored[key] == fresh[key]
    for key in ("top", "others"):
        assert [i for i, _ in stored[key]] == [i for i, _ in fresh[key]]
        assert [v for _, v in stored[key]] == pytest.approx([v for _, v in fresh[key]], abs=1e-3)
    assert stored["logsumexp"] == pytest.approx(fresh["logsumexp"], abs=1e-3)


def test_our_model_gives_the_stored_numbers(smollm2):
    model, tokenizer = smollm2
    stored = json.loads(STORED.read_text())
    assert tokenizer.encode(stored["prompt"]) == stored["ids"]
    logits = model(stored["ids"])[-1]
    for i, logit in stored["top"] + stored["others"]:
        assert float(logits[i]) == pytest.approx(logit, abs=1e-3)
    assert logits.topk(10).indices.tolist() == [i for i, _ in stored["top"]]
    assert float(logits.logsumexp(-1)) == pytest.approx(stored["logsumexp"], abs=1e-3)


# --- Yours or ours --------------------------------------------------------------------------------------------------

def right_norm(x, weight, eps=1e-5):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def named(name, fn):
    fn.__name__ = name
    return fn


def test_a_function_that_passes_is_used_and_one_that_does_not_is_replaced(capsys):
    x, ones = torch.tensor([3.0, 4.0]), torch.ones(2)
    calls = []

    def counted(*arguments):
        calls.append(1)
        print("a trace of my own")
        return right_norm(*arguments)

    yours = check.yours_or_ours(named("rms_norm", counted))
    assert capsys.readouterr().out == "using your rms_norm\n"
    calls.clear()
    torch.testing.assert_close(yours(x, ones), x / 12.5**0.5)
    assert calls == [1]
    capsys.readouterr()
    for wrong in (lambda x, weight, eps=1e-5: x, lambda x, weight, eps=1e-5: 1 / 0):
        ours = check.yours_or_ours(named("rms_norm", wrong))
        assert capsys.readouterr().out == "using the course's rms_norm\n"
        torch.testing.assert_close(ours(x, ones), x / 12.5**0.5)


def test_a_function_that_is_not_written_is_replaced(capsys):
    def swiglu(x, gate, up, down):
        raise NotImplementedError

    assert check.yours_or_ours(swiglu)(*torch.ones(4, 1, 1)).shape == (1, 1)
    assert capsys.readouterr().out == "using the course's swiglu\n"


@pytest.mark.parametrize("form", [lambda y: y.tolist(), lambda y: list(y), lambda y: y.numpy()],
                         ids=["list", "row tensors", "array"])
def test_results_of_any_form_become_tensors_of_the_inputs_type(form, capsys):
    def softened(logits, t):
        if t == 0:
            return form(F.one_hot(logits.argmax(), len(logits)).to(logits.dtype))
        return form((logits / t).softmax(-1))

    got = check.yours_or_ours(named("temperature", softened))(LOGITS.double(), 2.0)
    assert capsys.readouterr().out == "using your temperature\n"
    torch.testing.assert_close(got, (LOGITS.double() / 2).softmax(-1), check_dtype=got.dtype != torch.float64)


@pytest.mark.parametrize("fn", [lambda x: x, named("norm", lambda x: x), 3])
def test_an_unknown_name_is_told_the_names(fn):
    with pytest.raises(ValueError, match="rms_norm, swiglu, temperature or top_p"):
        check.yours_or_ours(fn)


# --- Pictures -------------------------------------------------------------------------------------------------------

class Letters:
    """A tokenizer of single characters, some of them hostile, two of them unknown to the font."""

    texts = ["<b>", "$x$", "\n", "你", "", " a"] + [chr(0x61 + n) for n in range(20)]

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


LOGITS = torch.linspace(4, -4, 26)


def test_every_parameter_has_its_area():
    layer = {"q": 300, "output": 100, "up": 390, "norms": 10}
    shown = plots.parameter_map(1000, layer, 3, 5)
    areas = [bar.get_width() * 1e6 for bar in shown.axes[0].patches if bar.get_width() > 1e-9]
    drawn = [round(area) for area in areas if area < 1000]  # the bars of the legend have the default width 0.8
    assert sum(drawn) == 1000 + 3 * (300 + 100 + 390)
    assert "3,405 parameters: embedding 1,000 (29.4%), attention 1,200 (35.2%), feed-forward 1,170" in shown.alt
    assert "norms 35 " in shown.alt


def test_the_lens_says_from_which_layer_on_the_answer_stands():
    rows = torch.zeros(5, 26)
    rows[torch.arange(5), torch.tensor([7, 6, 8, 6, 6])] = 0.9
    assert "'a' is the first choice from layer 3 on" in plots.logit_lens({"t": rows}, Letters()).alt
    assert "'a' is the first choice from layer 0 on" in plots.logit_lens({"t": rows[3:]}, Letters()).alt


def test_draws_are_drawn_as_they_were_counted():
    shown = plots.draws(LOGITS.softmax(-1), {0: 60, 3: 30, 25: 10}, Letters(), top=5)
    assert [bar.get_width() for bar in shown.axes[0].patches] == [60, 0, 0, 30, 0, 10]


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(temperature=1.0), dict(temperature=0.7, top_k=9),
                                      dict(temperature=2.0, top_k=9, top_p=0.8, min_p=0.2)], ids=str)
def test_the_panels_are_the_samplers_own_stages(settings):
    sampler = ll.Sampler(**settings)
    shown = plots.sampler_stages(sampler, LOGITS, Letters(), top=12)
    stages = sampler.stages(LOGITS)
    assert len(shown.axes) == len(stages)
    for axis, (name, probabilities) in zip(shown.axes, stages):
        title = axis.get_title("left")
        assert title.startswith(name) and title.endswith(f"\n{int((probabilities > 0).sum())} left")
        widths = [bar.get_width() for bar in axis.patches]
        assert widths == pytest.approx([*probabilities[:12].tolist(), float(probabilities[12:].sum())])


# --- The playground -------------------------------------------------------------------------------------------------

def kept(playground):
    return playground.sampler.stages(LOGITS)[-1][1].nonzero().flatten().tolist()


def test_moving_a_slider_changes_what_is_kept_as_the_sampler_says():
    play = widgets.sampling_playground(PROMPT, LOGITS, Letters())
    assert kept(play) == list(range(26))
    for name, value, settings in (("top_k", 9, dict(top_k=9)), ("top_p", 0.6, dict(top_k=9, top_p=0.6)),
                                  ("min_p", 0.5, dict(top_k=9, top_p=0.6, min_p=0.5)),
                                  ("min_p", 0.0, dict(top_k=9, top_p=0.6))):
        before = play.picture.value
        play.controls[name].value = value
        wanted = ll.Sampler(temperature=1.0, **settings)
        assert kept(play) == wanted.stages(LOGITS)[-1][1].nonzero().flatten().tolist()
        assert play.picture.value == plots.sampler_stages(wanted, LOGITS, Letters()).png() != before
        assert f": {len(kept(play))} tokens can come" in play.words.value
    play.controls["temperature"].value = 0
    assert kept(play) == [0] and ": 1 token can come" in play.words.value


def test_the_button_draws_what_the_sampler_draws_and_a_change_begins_anew():
    play = widgets.sampling_playground(PROMPT, LOGITS, Letters(), temperature=1.5, top_k=8, seed=5)
    sampler = ll.Sampler(temperature=1.5, top_k=8, seed=5)
    expected = [sampler(LOGITS) for _ in range(101)]
    play.draw_many.click()
    play.draw_one.click()
    assert dict(play.drawn) == {i: expected.count(i) for i in set(expected)}
    bars = [bar.get_width() for bar in play._show().axes[-1].patches]
    assert bars == [expected.count(i) for i in range(15)] + [0]
    play.controls["seed"].value = 6
    assert not play.drawn
    play.controls["seed"].value = 5
    play.draw_one.click()
    assert list(play.drawn) == expected[:1]


def test_clicks_that_arrive_in_two_threads_at_once_wait_for_each_other(monkeypatch):
    play, changed_meanwhile = widgets.sampling_playground(PROMPT, LOGITS, Letters()), []

    def slow(sampler, logits, tokenizer, drawn):
        before = dict(drawn), play.sampler
        time.sleep(0.05)
        changed_meanwhile.append(before != (dict(play.drawn), play.sampler))
        return plots.sampler_stages(sampler, logits, tokenizer, drawn)

    module = importlib.import_module("llm_lessons.classroom.widgets.sampling_playground")  # a function hides its name
    monkeypatch.setattr(module, "sampler_stages", slow)
    clicks = [play.draw_many.click, lambda: setattr(play.controls["top_k"], "value", 4), play.draw_many.click]
    threads = [Thread(target=click) for click in clicks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert changed_meanwhile == [False] * 3
    assert play.picture.value == plots.sampler_stages(play.sampler, LOGITS, Letters(), play.drawn).png()


@pytest.mark.parametrize("token", range(6))
def test_no_text_reaches_the_page_as_html(token, recwarn):
    logits = torch.full((26,), -9.0).index_fill(0, torch.tensor([token]), 9.0)
    play = widgets.sampling_playground("<script>alert('x')</script>", logits, Letters(), temperature=0)
    play.draw(1)
    assert re.findall(r"<[^>]*>", play.words.value) == [
        '<span style="overflow-wrap:anywhere">', "<b>", "</b>", "<b>", "</b>", "</span>"]
    assert html.escape("<script>alert('x')</script>") in play.words.value
    assert not recwarn.list


@pytest.mark.parametrize("settings, words", [
    (dict(topk=3), "unknown setting topk"), (dict(temperature=3.0), "temperature=3.0.*0 to 2"),
    (dict(top_k=51), "0 to 50"), (dict(top_p=1.5), "0 to 1"), (dict(min_p=float("nan")), "0 to 0.5"),
    (dict(top_k=2.5), "whole"), (dict(seed=-1), "seed=-1"), (dict(temperature=None), "temperature=None")])
def test_settings_that_no_slider_can_show_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        widgets.sampling_playground(PROMPT, LOGITS, Letters(), **settings)


def test_none_switches_a_filter_off_and_a_draw_has_at_least_one_token():
    play = widgets.sampling_playground(PROMPT, LOGITS, Letters(), top_k=None, top_p=None, min_p=None)
    assert [play.controls[name].value for name in ("top_k", "top_p", "min_p")] == [0, 1, 0]
    with pytest.raises(ValueError, match="at least one"):
        play.draw(0)
    play.draw(1)
    assert sum(play.drawn.values()) == 1


def test_the_playground_starts_with_its_twin_and_is_made_of_plain_ipywidgets():
    play = widgets.sampling_playground(PROMPT, LOGITS, Letters(), top_k=5, top_p=0.9)
    assert play.picture.value == play.twin.png()
    assert "0x" not in repr(play)

    def parts(widget):
        return [widget, *(part for child in getattr(widget, "children", ()) for part in parts(child))]

    used = {type(part) for part in parts(play.widget)}
    assert used <= {getattr(ipywidgets, name) for name in ("VBox", "HBox", "HTML", "Image", "Button", "IntSlider",
                                                           "FloatSlider", "BoundedIntText")}
    assert all(control.description for control in play.controls.values())


# --- The lesson -----------------------------------------------------------------------------------------------------

def test_the_lesson_counts_the_lines_of_its_model_rightly():
    book = nbformat.read(ROOT / "notebooks" / "04_next_token.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in book.cells)

    def lines(*names):
        found = [re.findall(rf"^(def {name}\(.*?)(?=^\S|\Z)", text, re.S | re.M)[-1] for name in names]  # not the stub
        return sum(bool(line.strip()) and '"""' not in line
                   for code in found for line in code.split("```")[0].splitlines())

    model = lines("rms_norm", "swiglu", "attention", "block", "forward")
    sampler = lines("temperature", "top_k", "top_p", "min_p")
    assert f"**{model + sampler} lines**: {model} lines are the model (" in text, (model, sampler)
    assert f"{sampler} its sampler" in text, (model, sampler)


if __name__ == "__main__":
    numbers = reference(SMOLLM2.fetch() / next(iter(SMOLLM2.files)))
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in numbers.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
