"""Pictures and widgets: what they show, what a screen reader hears, and what a hostile or foreign text does to them."""

import base64

import ipywidgets
import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient

from llm_lessons.classroom import plots, style, widgets

PNG = b"\x89PNG\r\n"
STEPS = [plots.Step(text, seconds, [(text, 0.6), (" other", 0.3)])
         for text, seconds in (("Inference", 0.9), (" is", 0.05), (" a", 0.06))]


def test_pictures_are_returned_as_png_with_their_content_in_words():
    shown = plots.token_times({"5 tokens": [0.08, 0.04, 0.04], "540 tokens": [1.0, 0.05, 0.05]})
    assert shown.png().startswith(PNG)
    assert "540 tokens: the first token took 1000 ms, the others 50 ms each" in repr(shown)


def test_bars_have_the_heights_of_the_times_and_the_colours_of_their_job():
    shown = plots.token_times({"5 tokens": [0.08, 0.04, 0.05]})
    bars = shown.axes[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx([80, 40, 50])
    colors = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars]
    assert colors == [style.COLORS["prefill"], style.COLORS["decode"], style.COLORS["decode"]]
    assert "(ms)" in shown.axes[0].get_ylabel()


def test_drawing_changes_neither_the_backend_nor_the_settings():
    before = dict(matplotlib.rcParams)
    plots.token_times({"5 tokens": [0.08, 0.04]}).png()
    assert dict(matplotlib.rcParams) == before


def test_two_passes_say_their_shapes():
    shown = plots.two_passes(5, 576, 30, 49152)
    assert shown.png().startswith(PNG)
    assert "[5, 576]" in shown.alt and "[1, 576]" in shown.alt and "49,152" in shown.alt
    texts = " ".join(text.get_text() for text in shown.axes[0].texts)
    assert "[5, 576]" in texts and "[1, 576]" in texts and "KV cache" in texts


@pytest.mark.parametrize("text", ["$x_1$", "\\frac", "<script>alert(1)</script>", "你好", "🦙", "", "\n", "שלום", "\0"])
def test_any_text_can_be_drawn_without_a_warning(text, recwarn):
    steps = [plots.Step(text, 0.1, [(text, 0.5), ("other", 0.1)])] * 2
    assert plots.answer_step(text, steps, 1).png().startswith(PNG)
    assert not recwarn.list


def test_labels_show_spaces_line_breaks_and_what_the_font_lacks():
    assert style.visible(" a\n\tb") == "·a⏎⇥b"
    assert style.visible("é") == "é"
    assert style.visible("#" * 80) == "#" * 39 + "…" and style.visible("#" * 40) == "#" * 40
    assert style.visible("你") == "⟨U+4F60⟩"


def test_the_stepper_redraws_for_each_token_and_starts_with_its_static_twin():
    shown = widgets.answer_stepper("How?", STEPS)
    slider, image = shown.widget.children
    assert isinstance(slider, ipywidgets.IntSlider) and (slider.min, slider.max) == (1, 3)
    assert image.value == shown.twin.png()
    slider.value = 3
    assert image.value == plots.answer_step("How?", STEPS, 2).png() != shown.twin.png()
    slider.value = 1
    assert image.value == shown.twin.png()


def test_the_stepper_says_what_is_wrong_with_an_empty_answer():
    with pytest.raises(ValueError, match="empty"):
        widgets.answer_stepper("How?", [])


def test_f1_a_widget_is_shown_with_its_picture_and_its_words_in_one_output():
    bundle = widgets.answer_stepper("How?", STEPS)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(PNG)
    assert "0x" not in bundle["text/plain"], "an address would differ in every run"


def test_f1_a_notebook_run_without_a_browser_holds_view_and_picture():
    source = ("from llm_lessons.classroom import plots, widgets\n"
              "widgets.answer_stepper('How?', [plots.Step('a', 0.1, [('a', 1.0)])])")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    data = book.cells[0].outputs[0].data
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
