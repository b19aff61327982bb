"""The attention explorer in a real JupyterLab: mouse and keyboard choose heads and tokens, and text stays text."""

import re

import pytest
from browser_tools import code, keep_screenshot, needs_browser, new_page, run_all

import llm_lessons as ll

pytestmark = needs_browser

# 30 x 9 heads as in the course's model; everything else as small as can be. Each word is one token.
MAKE = r'''
import re
import llm_lessons as ll

words = ["A", " cat", " <script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", " &amp;", ' "quoted"',
         " 'single'", " שלום", " مرحبا", " 🦙", " 👨‍👩‍👧", "\n", " \u202eevil", " a&b", " sat", "."]
text = "".join(words) + " cat sat." * 4
spans = {word.encode(): 256 + number for number, word in enumerate(words) if len(word) > 1}
pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) + r"|[\s\S]"
tokenizer = ll.Tokenizer({bytes([b]): b for b in range(256)} | spans, {}, pattern=pattern)
model = ll.Model.random(ll.ModelConfig(layers=30, hidden=36, heads=9, kv_heads=3, head_dim=4, ffn=40, vocab=300,
                                       context=256))
for block in model.blocks:
    block.attention.qkv.weight.mul_(50)  # or all heads of a model that has learnt nothing would look everywhere alike
'''
SHOW = '''
from llm_lessons.classroom import widgets
shown = widgets.attention_explorer(model, tokenizer, text)
shown
'''
LONG = 'widgets.attention_explorer(model, tokenizer, " cat" * 200)'
ASK = 'print("in the kernel:", shown.widget.layer, shown.widget.head, shown.widget.token)'


def expected():
    """What the kernel of the test's notebook computes, computed here: the tokens and a function layer -> weights."""
    made = {}
    exec(MAKE, made)
    ids = made["tokenizer"].encode(made["text"])
    tokens = [made["tokenizer"].decode([i]) for i in ids]
    return tokens, ll.trace(made["model"], ids).attention


@pytest.fixture(scope="module")
def page(browser, lab):
    """The page with the notebook, which runs once: an explorer of `text`, one of 200 tokens, a question."""
    with new_page(browser, lab) as page:
        run_all(page, lab, "explorer", code(MAKE, SHOW, LONG, ASK))
        yield page


def explorer_of(page, number: int):
    """The first explorer (0) of the notebook, or the second (1)."""
    explorer = page.locator(".llm-attention").nth(number)
    explorer.scroll_into_view_if_needed()
    return explorer


def wait_for(page, explorer, **data):
    """Wait until the explorer shows a layer (it then has the kernel's bytes), a head or a token."""
    page.wait_for_function("([node, data]) => Object.keys(data).every(name => node.dataset[name] === data[name])",
                           arg=[explorer.element_handle(), {name: str(value) for name, value in data.items()}])


def percent(weight) -> str:
    byte = round(float(weight) * 255)
    return "0 %" if byte == 0 else "under 1 %" if byte < 3 else f"{int(byte / 2.55 + 0.5)} %"


def test_mouse_and_keyboard_reach_the_kernel_and_any_text_is_shown_as_text(page):
    tokens, attention = expected()
    explorer = explorer_of(page, 0)
    last = len(tokens) - 1
    wait_for(page, explorer, layer=0, head=0, token=last)

    heads = explorer.get_by_role("gridcell")  # all heads, at most 24 x 24 pixels each
    assert heads.count() == 270
    assert heads.locator("canvas").evaluate_all("all => all.every(c => c.width <= 24 && c.height <= 24)")

    explorer.get_by_role("gridcell", name="layer 7, head 3", exact=True).click()
    wait_for(page, explorer, layer=7, head=3)  # the bytes of layer 7 came from the kernel
    assert "layer 7, head 3" in explorer.get_by_role("img").get_attribute("aria-label")
    is_active = "cell => cell.classList.contains('jp-mod-active')"
    active = [page.locator(".jp-Cell").nth(n).evaluate(is_active) for n in range(4)].index(True)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_for(page, explorer, layer=8, head=4)
    focused = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert focused == "layer 8, head 4"
    assert explorer.locator('[aria-selected="true"]').count() == 1
    assert page.locator(".jp-Cell").nth(active).evaluate(is_active), "the arrow keys moved the notebook's cursor, too"

    words, readout = explorer.locator(".word"), explorer.locator(".readout")
    assert words.all_text_contents() == [
        token.replace(" ", "·").replace("\n", "⏎").replace("\u202e", "⟨U+202E⟩") for token in tokens]
    assert page.evaluate("() => window.hacked === undefined")
    assert explorer.locator("img, script").count() == 0

    at = tokens.index(" 🦙")
    words.nth(at).hover()  # hovering shows, and changes nothing
    wait_for(page, explorer, token=at)
    weights = attention(8)[4]
    best = int(weights[at].argmax())
    seen = readout.text_content()
    assert seen.startswith(f"token {at} ·🦙 looks at {words.nth(best).text_content()} {percent(weights[at, best])}")
    page.mouse.move(0, 0)
    wait_for(page, explorer, token=last)

    words.nth(at).click()
    page.keyboard.press("ArrowLeft")
    wait_for(page, explorer, token=at - 1)
    page.keyboard.press("Home")
    wait_for(page, explorer, token=0)
    page.keyboard.press("Shift+Tab")  # one stop for all tokens, one for all heads
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "layer 8, head 4"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith("token 0: A")

    box = explorer.get_by_role("img").bounding_box()  # a cell of the map: row 5, column 2
    side = box["width"] / len(tokens)
    page.mouse.move(box["x"] + 2.5 * side, box["y"] + 5.5 * side)
    wait_for(page, explorer, token=5)
    assert re.search(rf'looks at ·<script>.*</script>: {percent(weights[5, 2])}$', readout.text_content())
    page.mouse.move(box["x"] + 5.5 * side, box["y"] + 2.5 * side)
    assert readout.text_content().endswith("never, it comes later")

    page.locator(".jp-CodeCell").last.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Shift+Enter")
    page.get_by_text("in the kernel: 8 4 0").wait_for(timeout=30_000)
    assert page.errors == []


def test_200_tokens_follow_the_mouse_without_lag(page):
    explorer = explorer_of(page, 1)
    assert explorer.locator(".word").count() == 200
    milliseconds = explorer.evaluate("""node => {
        const times = [...node.querySelectorAll('.word')].map(word => {
            const start = performance.now();
            word.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
            node.querySelector('.words').offsetHeight;  // the browser must have laid it out
            return performance.now() - start });
        return times.sort((a, b) => a - b)[100] }""")  # the median: the machine may be busy with other things
    print(f"{milliseconds:.1f} ms for a token")
    assert milliseconds < 50, "slower than 20 pictures a second"
    keep_screenshot(explorer, "03_explorer_200")
    assert page.errors == []

