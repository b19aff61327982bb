"""Every widget of the course in one small notebook: at two widths, in two themes, and with text of strangers.

A new widget needs one line in `GALLERY`, and one in `HOSTILE` if it is given text. The notebook runs once for all
tests of this file.
"""

import json

import pytest
from browser_tools import (
    choose_theme,
    code,
    control,
    keep_screenshot,
    keys,
    needs_browser,
    new_page,
    output,
    run_all,
    shown,
)
from test_browser import DRIVEN

pytestmark = needs_browser

# The course's shapes where they decide how a widget looks (30 x 9 heads), and small random numbers for the rest.
SETUP = '''
import torch
import llm_lessons as ll
from llm_lessons.classroom import plots, widgets

torch.manual_seed(0)
letters = ll.Tokenizer({bytes([b]): b for b in range(256)}, {}, pattern=r"[\\s\\S]")
model = ll.Model.random(ll.ModelConfig(layers=30, hidden=36, heads=9, kv_heads=3, head_dim=4, ffn=40, vocab=256,
                                       context=256))
for block in model.blocks:
    block.attention.qkv.weight.mul_(50)  # or all heads of a model that has learnt nothing would look everywhere alike
question = "How does inference work?"
logits = torch.randn(256).index_fill(0, torch.arange(128, 256), -20)
steps = [plots.Step(word, 0.1, [(word, 0.6), (" a", 0.2)]) for word in (" by", " reading")]
roof = ll.Roofline({"float32": 1e11}, 2e10, {"float32": 0.1})
'''
GALLERY = {
    "answer_stepper": "widgets.answer_stepper(question, steps)",
    "token_explorer": 'widgets.token_explorer(question + " 你好 🦙", {"the course\'s model": letters, "b": letters})',
    "neighbour_finder": 'widgets.neighbour_finder(torch.randn(256, 8), letters, "hot")',
    "rope_dials": "widgets.rope_dials(torch.tensor([1.0, 0, 0, 2]), torch.tensor([0, 1.0, 1, 0]), base=10_000.0)",
    "attention_explorer": "widgets.attention_explorer(model, letters, question * 3, layer=7, head=3)",
    "sampling_playground": "widgets.sampling_playground(question, logits, letters, top_k=12)",
    "roofline_explorer": "widgets.roofline_explorer(roof)",
    "step_timeline": "widgets.step_timeline({32: 0.1, 256: 0.8}, {32: 0.02, 256: 0.03}, note='times of no machine')",
    "cache_growth": 'widgets.cache_growth("Llama-3-8B", context=8192, users=32)',
    "grid_explorer": 'widgets.grid_explorer({"layer 28, down, row 507": torch.randn(576), "b": torch.randn(192)})',
    "timeline": 'widgets.timeline("a long prompt among short ones", "continuous")',
    "planner": 'widgets.planner("llama-3-8b", "l4", weight_bits=4.5)',
}

# Each is one token, so that a token's own text is hostile, too. (The course's model has a token of 80 #.)
STRANGE = ["<script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", "&amp;&lt;b&gt;", "\"double\"",
           "'single'", "שלום", "مرحبا", "🦙", "👨‍👩‍👧", "$x_1$", "#" * 80]
ODD_SETUP = f'''
import re
strange = {STRANGE!r}
text = " ".join(strange)
pieces = [bytes([b]) for b in range(245)] + [word.encode() for word in strange]
words = ll.Tokenizer({{piece: n for n, piece in enumerate(pieces)}}, {{}},
                     pattern="|".join(map(re.escape, strange)) + r"|[\\s\\S]")
sure = torch.full((256,), -9.0)
sure[245:] = 9.0
odd_steps = [plots.Step(word, 0.1, [(other, 0.1) for other in strange]) for word in strange]
'''
HOSTILE = {
    "answer_stepper": "widgets.answer_stepper(text, odd_steps)",
    "token_explorer": "widgets.token_explorer(text, {word: words for word in strange})",
    "neighbour_finder": "widgets.neighbour_finder(torch.randn(256, 8), words, text)",
    "attention_explorer": "widgets.attention_explorer(model, words, text)",
    "sampling_playground": "widgets.sampling_playground(text, sure, words)",
    "step_timeline": "widgets.step_timeline({32: 0.1, 256: 0.8}, {32: 0.02, 256: 0.03}, note=text)",
    "grid_explorer": "widgets.grid_explorer({word: torch.randn(192) for word in strange})",
}
BEHIND = 'widgets.sampling_playground("שלום", logits, letters, top_k=12)'

# What a person would call broken, in words, for one widget: its text, its controls, its pictures.
FAULTS = r"""root => {
    const faults = [];
    const seen = node => node.getClientRects().length > 0 && getComputedStyle(node).visibility !== "hidden";
    const name = node => `${node.tagName.toLowerCase()}.${node.className} "${(node.textContent || "").slice(0, 30)}"`;
    const parts = [...root.querySelectorAll("label, select, input, textarea, button, img, .map canvas, .noUi-target," +
        " .widget-readout, .widget-html-content, .title, .words, .readout")].filter(seen);
    const page = root.closest(".jp-OutputArea-output").getBoundingClientRect();
    const boxes = parts.map(node => node.getBoundingClientRect());
    boxes.forEach((box, n) => {
        if (!box.width || !box.height) faults.push(`${name(parts[n])} has no size`);
        if (box.left < page.left - 1 || box.right > page.right + 1)
            faults.push(`${name(parts[n])} from ${box.left} to ${box.right} leaves ${page.left} to ${page.right}`);
        for (let m = 0; m < n; m++) {
            const wide = Math.min(box.right, boxes[m].right) - Math.max(box.left, boxes[m].left);
            const high = Math.min(box.bottom, boxes[m].bottom) - Math.max(box.top, boxes[m].top);
            const inside = parts[m].contains(parts[n]) || parts[n].contains(parts[m]);
            if (wide > 1 && high > 1 && !inside) faults.push(`${name(parts[n])} lies over ${name(parts[m])}`);
        } });
    const draw = document.createElement("canvas").getContext("2d");
    for (const node of parts) {
        const style = getComputedStyle(node);
        if (node.matches("label, .widget-readout, button:not(.head)") && node.scrollWidth > node.clientWidth + 1)
            faults.push(`${name(node)} is cut off`);
        if (node.matches("select")) {  // a closed menu must show its whole choice, whichever, and its arrow (16 pixels)
            draw.font = style.font;
            const room = node.clientWidth - parseFloat(style.paddingLeft) - 16;
            for (const { textContent } of node.options)
                if (draw.measureText(textContent).width > room) faults.push(`the menu cuts off "${textContent}"`);
        } }
    // Contrast as WCAG 2 defines it, of every text with what lies behind it.
    const numbers = text => text.match(/[\d.]+/g).map(Number);
    const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    const light = rgb => { const [r, g, b] = rgb.map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const over = (top, under) => { const [r, g, b, alpha = 1] = top;
                                   return [r, g, b].map((v, n) => alpha * v + (1 - alpha) * under[n]) };
    const behind = node => node === null ? [255, 255, 255]
        : over(numbers(getComputedStyle(node).backgroundColor), behind(node.parentElement));
    let texts = 0;
    for (const node of root.querySelectorAll("*")) {
        const written = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
        if (!seen(node) || !(written || node.matches("select, input, textarea"))) continue;
        texts++;
        const back = behind(node), front = over(numbers(getComputedStyle(node).color), back);
        const [low, high] = [light(front), light(back)].sort((a, b) => a - b), contrast = (high + 0.05) / (low + 0.05);
        if (contrast < 4.5) faults.push(`${name(node)}: contrast ${contrast.toFixed(2)}, ${front} on ${back}`);
    }
    if (!texts) faults.push("no text found");
    return faults }"""


@pytest.fixture(scope="module")
def page(browser, lab):
    """The page with the notebook, for all tests: a cell for each widget of GALLERY, of HOSTILE, and of `BEHIND`."""
    with new_page(browser, lab) as page:
        run_all(page, lab, "gallery", code(SETUP, *GALLERY.values(), ODD_SETUP, *HOSTILE.values(), BEHIND))
        yield page


@pytest.fixture
def strange(page):
    """A function from a widget's name to that widget, made of hostile texts."""
    return lambda name: output(page, len(GALLERY) + 2 + list(HOSTILE).index(name))


def resize(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    page.wait_for_function("""width => {  // JupyterLab lays its panels out some time after
        const { right } = document.querySelector(".jp-NotebookPanel").getBoundingClientRect();
        return width - 100 < right && right <= width }""", arg=width)


def test_the_gallery_holds_every_widget_of_the_lessons():
    assert list(GALLERY) == [drive.__name__ for lesson in DRIVEN.values() for drive in lesson]


def test_every_widget_is_whole_and_readable_at_two_widths_in_two_themes(page):
    faults = {}
    for theme in ("Light", "Dark"):
        choose_theme(page, f"JupyterLab {theme}")
        for width in (1280, 800):
            resize(page, width)
            for number, name in enumerate(GALLERY, 1):
                widget = output(page, number)
                for _ in range(20):  # until the page has been laid out anew
                    if not (found := widget.evaluate(FAULTS)):
                        break
                    page.wait_for_timeout(100)
                if found:
                    faults[f"{name}, {theme}, {width}"] = found
                keep_screenshot(widget, f"gallery_{name}_{theme}_{width}")
    assert not faults, json.dumps(faults, indent=1, ensure_ascii=False)
    assert page.errors == []


def options(widget, label: str) -> list[str]:
    """What a menu offers. ipywidgets writes its spaces as spaces that do not break."""
    return [text.replace("\xa0", " ") for text in control(widget, label).locator("option").all_text_contents()]


CUT = ".widget-html-content, .widget-html-content *, .readout, .words, .word"  # where a text could be too wide


def test_text_of_strangers_is_text_in_every_widget_that_takes_it(page, strange):
    resize(page, 1280)
    signs = [word.replace(" ", "·") for word in STRANGE]  # a space is shown as a sign
    explorer = strange("token_explorer")
    tokens = [part for word in signs for part in (word, "·")][:-1]
    assert [token.replace("⟨U+200D⟩", "\u200d") for token in explorer.locator("bdi").all_text_contents()] == tokens
    assert options(explorer, "tokenizer") == STRANGE
    for word in STRANGE:
        control(explorer, "tokenizer").locator("select").select_option(word)
    shown(page, strange("neighbour_finder"), f"·{'·'.join(signs)}"[:60])
    assert strange("attention_explorer").locator(".word").all_text_contents() == tokens
    grid = strange("grid_explorer")
    assert options(grid, "row") == STRANGE
    playground = strange("sampling_playground")
    text = playground.locator(".widget-html-content").text_content()
    assert text.replace("\u200b", "").startswith(f"after {'·'.join(signs)}")  # it may break behind a space
    drawn = set()
    for word in STRANGE:
        control(grid, "row").locator("select").select_option(word)
        shown(page, grid, f"{word}: step ")
        playground.get_by_role("button", name="draw 1", exact=True).click()
        shown(page, playground, "last drawn: ")
        drawn.add(playground.locator(".widget-html-content b").last.text_content())
        keys(page, strange("answer_stepper"), "token", "ArrowRight")
    assert drawn <= set(signs) and len(drawn) > 2
    for width in (800, 1280):
        resize(page, width)
        for name in HOSTILE:
            cut = strange(name).locator(CUT).evaluate_all("""all => all.filter(node =>
                node.clientWidth && node.scrollWidth > node.clientWidth + 1).map(node => node.textContent)""")
            assert cut == [], f"{name}: a long text is cut off at {width} pixels"
    for name in HOSTILE:
        widget = strange(name)
        assert widget.locator("script").count() == 0
        assert widget.locator("img").evaluate_all("all => all.every(image => image.src.startsWith('blob:'))")
        keep_screenshot(widget, f"hostile_{name}")
    assert page.evaluate("() => window.hacked === undefined")
    assert page.errors == []


def test_words_behind_right_to_left_text_stay_behind_it(page):
    """Else a number behind Hebrew is drawn on its left: 'after 21 :שלום tokens'."""
    line = output(page, len(GALLERY) + len(HOSTILE) + 2).locator(".widget-html-content")
    assert line.text_content().replace("\u200e", "").startswith("after שלום: 12 tokens can come")
    right, left = line.evaluate("""node => {
        const range = document.createRange(), behind = node.querySelector("b").nextSibling;
        const at = behind.textContent.indexOf("12");
        range.setStart(behind, at);
        range.setEnd(behind, at + 2);
        return [node.querySelector("b").getBoundingClientRect().right, range.getBoundingClientRect().left] }""")
    assert left > right
