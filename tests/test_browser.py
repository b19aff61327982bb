"""The lessons in a real JupyterLab, in a real browser: run all cells, use every widget as a person would.

`DRIVEN` says for each lesson and widget which function uses it. Such a function looks at what the page shows, and
returns what the kernel must hold afterwards, by the label in front of the control.
"""

import re

import pytest
from browser_tools import (
    ASK,
    ROOT,
    choose,
    code,
    control,
    drag,
    held_when_drawn,
    keep_screenshot,
    keys,
    lesson_cells,
    needs_browser,
    output,
    redrawn,
    run_all,
    shown,
)

from llm_lessons.classroom import widgets

SHOWN = re.compile(r"^widgets\.(\w+)\(", re.MULTILINE)
HACK = "<img src=x onerror='document.title=1'>"


def answer_stepper(page, widget) -> dict:
    with redrawn(page, widget):
        keys(page, widget, "token", "ArrowRight")
    assert control(widget, "token").locator(".widget-readout").text_content() == "2"
    with redrawn(page, widget):
        drag(page, widget, "token", 1)
    return {"token": int(control(widget, "token").locator(".noUi-handle").get_attribute("aria-valuemax").split(".")[0])}


def token_explorer(page, widget) -> dict:
    area = widget.locator("textarea")
    area.fill(f"{HACK}&amp; שלום")
    shown(page, widget, "for 48 characters")
    assert widget.locator("img").count() == 0 and page.title() != "1"
    for tokenizer in ("GPT-2", "yours, 512 tokens", "the course's model"):
        before = widget.text_content()
        choose(widget, "tokenizer", tokenizer)
        page.wait_for_function("([element, old]) => element.textContent !== old",
                               arg=[widget.element_handle(), before])
    area.fill("\U00040000")
    shown(page, widget, "cannot be encoded")
    area.fill("")
    area.press_sequentially("hi")
    shown(page, widget, "for 2 characters")
    area.fill("How does inference work? 你好 🦙 <b>&")
    shown(page, widget, "·inference")
    return {"text": "How does inference work? 你好 🦙 <b>&", "tokenizer": "the course's model"}


def neighbour_finder(page, widget) -> dict:
    field = widget.locator("input[type=text]")
    with redrawn(page, widget):
        field.fill(HACK)
        field.press("Enter")
        shown(page, widget, HACK.replace(" ", "·"))
    assert widget.locator("img").count() == 1 and page.title() != "1"
    field.fill("  ")
    field.press("Enter")
    shown(page, widget, "type a word")
    assert not widget.locator("img").is_visible()
    with redrawn(page, widget):
        field.fill("")
        field.press_sequentially("ice cream")
        field.press("Enter")
        shown(page, widget, "2 tokens: ·ice | ·cream.")
    widget.locator("img").wait_for(state="visible")
    return {"word": "ice cream"}


def rope_dials(page, widget) -> dict:
    shown(page, widget, "query at 3, key at 1, distance 2: score -3.456")
    with redrawn(page, widget):
        keys(page, widget, "both plus", "ArrowRight")
    shown(page, widget, "query at 4, key at 2, distance 2: score -3.456")  # the distance is the same: so is the score
    with redrawn(page, widget):
        drag(page, widget, "both plus", 1)
    shown(page, widget, "query at 103, key at 101, distance 2: score -3.456")
    with redrawn(page, widget):
        keys(page, widget, "query at", "ArrowRight", 2)
        shown(page, widget, "query at 105, key at 101, distance 4")
    assert "score -3.456" not in widget.text_content()
    with redrawn(page, widget):
        keys(page, widget, "key at", "ArrowLeft")
        shown(page, widget, "query at 105, key at 100, distance 5")
    return {"query at": 5, "key at": 0, "both plus": 100}


def attention_explorer(page, widget) -> dict:
    at = "([node, data]) => Object.keys(data).every(name => node.dataset[name] === data[name])"
    picture = widget.locator(".map canvas")
    page.wait_for_function(at, arg=[widget.element_handle(), {"layer": "18", "head": "6", "token": "105"}])
    before = picture.evaluate("canvas => canvas.toDataURL()")
    widget.get_by_role("gridcell", name="layer 16, head 0", exact=True).click()
    page.wait_for_function(at, arg=[widget.element_handle(), {"layer": "16", "head": "0"}])
    assert picture.evaluate("canvas => canvas.toDataURL()") != before
    widget.locator(".word").nth(40).click()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(at, arg=[widget.element_handle(), {"token": "41"}])
    return {"layer": 16, "head": 0, "token": 41}


def sampling_playground(page, widget) -> dict:
    shown(page, widget, "7 tokens can come; nothing drawn yet")
    with redrawn(page, widget):
        keys(page, widget, "top-k (0: off)", "ArrowLeft", 9)
        shown(page, widget, "3 tokens can come")
    with redrawn(page, widget):
        widget.get_by_role("button", name="draw 100").click()
        shown(page, widget, "last drawn")
    with redrawn(page, widget):
        widget.get_by_role("button", name="draw 1", exact=True).click()
    with redrawn(page, widget):
        drag(page, widget, "min-p (0: off)", 0)
        shown(page, widget, "nothing drawn yet")
    with redrawn(page, widget):
        keys(page, widget, "top-p (1: off)", "ArrowRight")
    with redrawn(page, widget):
        drag(page, widget, "temperature", 0)
        shown(page, widget, ": 1 token can come")  # temperature 0 is greedy
    seed = widget.locator("input[type=number]")
    seed.fill("7")
    seed.press("Enter")
    with redrawn(page, widget):
        widget.get_by_role("button", name="draw 100").click()
        shown(page, widget, "last drawn")
    return {"temperature": 0, "top-k (0: off)": 3, "top-p (1: off)": 1, "min-p (0: off)": 0, "seed": 7}


def roofline_explorer(page, widget) -> dict:
    """One matrix [14336, 4096] in float32: 2 · 4096 · 14336 FLOP a token; 234.9 MB and 4 bytes for each in and out."""
    with redrawn(page, widget):
        choose(widget, "matrices", "Llama-3-8B, one matrix")
        shown(page, widget, "4 tokens: 0.47 GFLOP, 235 MB, 2 FLOP per byte. Bound by memory bandwidth")
    with redrawn(page, widget):
        keys(page, widget, "tokens (log scale)", "ArrowLeft", 2)
        shown(page, widget, "1 token: 0.117 GFLOP, 235 MB, 0.5 FLOP per byte")
    with redrawn(page, widget):
        drag(page, widget, "tokens (log scale)", 1)
        shown(page, widget, "4,096 tokens: 481 GFLOP, 537 MB, 896 FLOP per byte. Bound by arithmetic")
    with redrawn(page, widget):
        choose(widget, "bytes per weight", "0.5 (int4)")
        shown(page, widget, "481 GFLOP, 331 MB")
    return {"matrices": "Llama-3-8B, one matrix", "tokens (log scale)": 4096, "bytes per weight": 0.5}


def step_timeline(page, widget) -> dict:
    with redrawn(page, widget):
        widget.get_by_role("button", name="with a cache", exact=True).click()
    with redrawn(page, widget):
        keys(page, widget, "prompt", "ArrowRight", 3)
    with redrawn(page, widget):
        drag(page, widget, "new tokens", 0)
    with redrawn(page, widget):
        keys(page, widget, "new tokens", "ArrowRight", 4)
    return {"ToggleButtons": True, "prompt": 67, "new tokens": 6}


def cache_growth(page, widget) -> dict:
    """Llama-3-8B: 32 layers · keys and values · 8 heads of 128 · 2 bytes = 131,072 bytes a token."""
    shown(page, widget, "131,072 bytes of cache per token; 32 users with 8,192 tokens each")
    with redrawn(page, widget):
        choose(widget, "heads", "MQA")
        shown(page, widget, "Llama-3-8B, MQA (1 KV head): weights")
        shown(page, widget, "16,384 bytes of cache per token")
    with redrawn(page, widget):
        choose(widget, "bytes per number", "1 (int8)")
        shown(page, widget, "8,192 bytes of cache per token")
    with redrawn(page, widget):
        keys(page, widget, "context", "ArrowRight")
        shown(page, widget, "32 users with 16,384 tokens each: 4.29")
    with redrawn(page, widget):
        drag(page, widget, "users", 0)
        shown(page, widget, "1 user with 16,384 tokens each: 0.13")
    with redrawn(page, widget):
        choose(widget, "model", "SmolLM2-135M")  # 30 layers · 2 · 1 head of 64
        shown(page, widget, "3,840 bytes of cache per token; 1 user")
    return {"model": "SmolLM2-135M", "heads": "MQA", "context": 16384, "users": 1, "bytes per number": "1 (int8)"}


def grid_explorer(page, widget) -> dict:
    """Bits per weight, by hand: 4 + 16 / 576 for a whole row; 4 + 16 / 32 in groups; a minimum as well; 8 bits."""
    with redrawn(page, widget):
        choose(widget, "row", "layer 0, qkv, row 0")
        shown(page, widget, "layer 0, qkv, row 0: ")
        shown(page, widget, re.compile(r"; 4\.028 bits per weight"))
    with redrawn(page, widget):
        choose(widget, "a grid for", "32 weights")
        shown(page, widget, re.compile(r"; 4\.5 bits per weight"))
    with redrawn(page, widget):
        choose(widget, "grid", "asymmetric")
        shown(page, widget, re.compile(r"; 5 bits per weight.*minima"))
    with redrawn(page, widget):
        drag(page, widget, "bits", 1)
        shown(page, widget, re.compile(r"; 9 bits per weight"))
    with redrawn(page, widget):
        keys(page, widget, "% of largest", "ArrowLeft", 2)
        shown(page, widget, " clipped")
    return {"row": "layer 0, qkv, row 0", "a grid for": 32, "grid": False, "bits": 8, "% of largest": 90}


def timeline(page, widget) -> dict:
    """Reading a prompt of 800 tokens takes 18 + 800 · 0.4 = 338 ms in one call: so long wait those that are writing."""
    longest = r"longest gap between two tokens (\d+) ms"
    assert int(re.search(longest, widget.text_content())[1]) > 338
    with redrawn(page, widget):
        drag(page, widget, "token budget", 0)
        page.wait_for_function(f"node => Number(node.textContent.match(/{longest}/)[1]) < 338",
                               arg=widget.element_handle())
    with redrawn(page, widget):
        keys(page, widget, "places", "ArrowLeft")
    with redrawn(page, widget):
        choose(widget, "batching", "static")
    with redrawn(page, widget):
        choose(widget, "requests", "answers of unequal length")
        shown(page, widget, "answers of unequal length; median TTFT")
    return {"requests": "answers of unequal length", "batching": "static", "places": 2, "token budget": 16}


def free(gigabytes: str) -> re.Pattern:
    """So much free memory in the planner's words."""
    return re.compile(rf"\b{re.escape(gigabytes)} GB( \([\d.]+ GiB\))? free")


def planner(page, widget) -> dict:
    """A token's cache takes 131,072 bytes with 16 bits; half the bits of 8 · 4,096 tokens free 2.15 GB.

    Free at first: 24 GB less 16.061 of weights, 4.295 of cache for 8 · 4,096 tokens, 0.214 of activations, and the
    reserve of a tenth.
    """
    shown(page, widget, free("1.03"))
    with redrawn(page, widget):
        choose(widget, "bits in the cache", "8 (fp8)")
        shown(page, widget, free("3.18"))
    with redrawn(page, widget):
        choose(widget, "bits per weight", "4.5 (int4, groups of 32)")  # 8.03 billion · 11.5 bits less: 11.5 GB
        shown(page, widget, free("14.7"))
    with redrawn(page, widget):
        keys(page, widget, "context", "ArrowRight")  # twice the cache: 2.15 GB less
        shown(page, widget, free("12.6"))
    with redrawn(page, widget):
        drag(page, widget, "users", 0)  # the caches of 7 users of 8,192 tokens: 3.76 GB more
        shown(page, widget, free("16.3"))
    with redrawn(page, widget):
        choose(widget, "how many", "2")
        shown(page, widget, re.compile(r"2 . NVIDIA L4"))
    with redrawn(page, widget):
        choose(widget, "device", "h200")
        shown(page, widget, re.compile(r"2 . NVIDIA H200"))
    with redrawn(page, widget):
        choose(widget, "model", "smollm2-135m")
        shown(page, widget, re.compile(r"smollm2-135m on 2 . NVIDIA H200"))
    return {"model": "smollm2-135m", "device": "h200", "how many": 2, "bits per weight": 4.5, "bits in the cache": 8,
            "context": 8192, "users": 1}


DRIVEN = {
    "00_two_jobs": [answer_stepper],
    "01_tokenization": [token_explorer],
    "02_embeddings": [neighbour_finder, rope_dials],
    "03_attention": [attention_explorer],
    "04_next_token": [sampling_playground],
    "05_prefill": [roofline_explorer],
    "06_decode": [step_timeline],
    "07_kv_cache": [cache_growth],
    "08_quantization": [grid_explorer],
    "09_batching": [timeline],
    "10_sizing": [planner],
}


def widgets_of(cells) -> list[tuple[int, str]]:
    """(number of the cell, name of the widget) for each widget that a lesson shows."""
    return [(number, name) for number, cell in enumerate(cells) if cell.cell_type == "code"
            for name in SHOWN.findall(cell.source)]


def test_every_widget_of_every_lesson_is_driven():
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert names == sorted(DRIVEN)
    shown_somewhere = set()
    for name in names:
        found = [widget for _, widget in widgets_of(lesson_cells(name))]
        assert found == [drive.__name__ for drive in DRIVEN[name]], name
        shown_somewhere |= set(found)
    assert shown_somewhere == {name for name, made in vars(widgets).items() if callable(made) and name[0].islower()}


@needs_browser
@pytest.mark.parametrize("name", DRIVEN)
def test_the_lesson_runs_and_its_widgets_answer(page, lab, name):
    cells = lesson_cells(name)
    run_all(page, lab, name, cells + code(ASK))
    places = widgets_of(cells)
    expected = [drive(page, output(page, number)) for (number, _), drive in zip(places, DRIVEN[name])]
    shown_widgets = [output(page, number) for number, _ in places]
    assert expected and held_when_drawn(page, shown_widgets) == expected
    for widget, (_, called) in zip(shown_widgets, places):
        keep_screenshot(widget, f"{name[:2]}_{called}")
    assert page.errors == []
