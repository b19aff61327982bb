"""Lesson 03's pictures and its explorer: the right numbers reach the reader, the right bytes reach the browser."""

import base64
import sys
import types

import matplotlib
import numpy as np
import pytest
import torch
from tiny import as_transformers, random_ids, tiny_model

import llm_lessons as ll
from llm_lessons.classroom import check, plots, style, widgets
from llm_lessons.classroom.checks.attention import _grouped
from llm_lessons.classroom.widgets.attention_explorer import AttentionExplorer, thumbnails, token_label

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"
BYTES = ll.Tokenizer({bytes([b]): b for b in range(256)}, {}, pattern=r"[\s\S]")


def explorer(text="hello there", **where):
    return widgets.attention_explorer(tiny_model(vocab=256), BYTES, text, **where)


def as_weights(widget) -> torch.Tensor:
    T = len(widget.tokens)
    return torch.from_numpy(np.frombuffer(widget.maps, dtype=np.uint8).copy()).reshape(widget.heads, T, T) / 255


# --- the explorer -----------------------------------------------------------------------------------------------

def test_the_maps_of_the_chosen_layer_are_those_that_transformers_computes():
    model, ids = tiny_model(), random_ids(40)
    eager = as_transformers(model)(torch.tensor([ids]), output_attentions=True).attentions
    widget = AttentionExplorer(ll.trace(model, ids), [str(i) for i in ids])
    for layer in (0, 2, 1):
        widget.layer = layer
        assert widget.maps_layer == layer
        assert len(widget.maps) == 9 * 40 * 40
        torch.testing.assert_close(as_weights(widget), eager[layer][0], rtol=0, atol=0.5 / 255 + 1e-4)


def test_layer_and_maps_travel_in_one_message_and_only_when_the_layer_changes(monkeypatch):
    widget = explorer().widget
    monkeypatch.setattr(type(widget.comm), "kernel", "any", raising=False)  # without one ipywidgets 7 sends nothing
    sent = []
    widget.send_state = lambda key=None: sent.append(set(key) if isinstance(key, (set, list)) else {key})
    widget.set_state({"layer": 2, "head": 4})  # what arrives from the browser
    assert any({"maps", "maps_layer"} <= keys for keys in sent)
    assert not any(("maps" in keys) != ("maps_layer" in keys) for keys in sent)
    sent.clear()
    widget.set_state({"head": 5, "token": 3})
    assert not any("maps" in keys for keys in sent)


def test_thumbnails_show_every_head_once_in_at_most_24_by_24_bytes():
    model, text = tiny_model(vocab=256), "a" * 100
    widget = widgets.attention_explorer(model, BYTES, text).widget
    assert (widget.layers, widget.heads, widget.thumbnail_size) == (3, 9, 24)
    assert len(widget.thumbnails) == 3 * 9 * 24 * 24
    assert explorer("hello").widget.thumbnail_size == 5


def test_a_thumbnail_keeps_lines_that_are_one_token_wide():
    previous = torch.eye(200).roll(-1, 1)[None]
    small = thumbnails(previous.tril())[0]
    assert small.shape == (24, 24)
    assert (small.diagonal() == 255).all() and small[23, 0] == 0
    faint = thumbnails(torch.full((1, 24, 24), 0.04))
    assert int(faint[0, 5, 5]) == 51, "a square root: 4 % is shown as 20 %"


@pytest.mark.parametrize(("text", "where", "words"), [
    ("x" * 201, {}, r"201 tokens.*at most 200.*shorter text"), ("", {}, "empty"),
    ("abc", {"layer": 3}, "no layer 3: choose 0 to 2"), ("abc", {"head": -1}, "no head -1"),
    ("abc", {"token": 3}, "no token 3: choose 0 to 2")])
def test_what_cannot_be_shown_is_refused_with_a_reason(text, where, words):
    with pytest.raises(ValueError, match=words):
        explorer(text, **where)


@pytest.mark.parametrize("text", ["x", "xy", "x" * 24, "x" * 25, "x" * 200])
def test_any_length_up_to_the_limit_can_be_shown(text):
    shown = explorer(text)
    assert len(shown.widget.maps) == 9 * len(text) ** 2
    assert shown.twin.png().startswith(PNG)


def test_a_choice_that_does_not_exist_is_refused_and_changes_nothing():
    widget = explorer(layer=1, head=2).widget
    for name, value in (("layer", 3), ("head", 9), ("token", -1)):
        with pytest.raises(Exception, match=f"there is no {name} {value}"):
            setattr(widget, name, value)
    assert (widget.layer, widget.head, widget.token) == (1, 2, len("hello there") - 1)


def test_f1_view_picture_and_words_are_in_one_output_and_no_address_is():
    data, _ = explorer(layer=2, head=7)._repr_mimebundle_()
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert "layer 2, head 7 on 11 tokens" in data["text/plain"] and "token 10, e, looks at" in data["text/plain"]
    assert repr(explorer(layer=2, head=7).widget) == "AttentionExplorer: layer 2, head 7, 11 tokens"


def test_colab_is_told_where_the_code_for_foreign_widgets_is(monkeypatch):
    fake = types.SimpleNamespace(enable_custom_widget_manager=lambda: None,
                                 _widgets=types.SimpleNamespace(_installed_url="https://colab/manager"))
    monkeypatch.setitem(sys.modules, "google.colab.output", fake)
    _, metadata = explorer()._repr_mimebundle_()
    assert metadata[WIDGET]["colab"]["custom_widget_manager"]["url"] == "https://colab/manager"


def test_the_browser_part_needs_no_network_and_never_writes_html():
    source = str(AttentionExplorer._esm)
    for forbidden in ("http:", "https:", "import ", "innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert forbidden not in source, forbidden
    assert "url(" not in str(AttentionExplorer._css) and "@import" not in str(AttentionExplorer._css)


@pytest.mark.parametrize(("piece", "label"), [
    (b" cat", "·cat"), (b"\n\n\t", "⏎⏎⇥"), (b"\xf0\x9f", "⟨F0 9F⟩"), ("你好".encode(), "你好"), (b"\x00", "⟨U+0000⟩"),
    ("\u202eevil".encode(), "⟨U+202E⟩evil"), ("👨‍👩‍👧".encode(), "👨‍👩‍👧"), (b"<b>", "<b>"), (b"\x7f", "⟨U+007F⟩")])
def test_labels_show_what_has_no_picture(piece, label):
    assert token_label(piece) == label


# --- the pictures -----------------------------------------------------------------------------------------------

def test_maps_are_drawn_with_their_numbers_and_masked_places_stay_empty():
    shown = plots.attention_maps({"causal": torch.tensor([[1.0, 0.0], [0.25, 0.75]])}, ["a", " b"])
    assert [text.get_text() for text in shown.axes[0].texts] == ["1.00", "0.25", "0.75"]
    assert "' b' looks at 'a' 25%, ' b' 75%" in repr(shown)
    assert [tick.get_text() for tick in shown.axes[0].get_yticklabels()] == ["a", "·b"]


def test_with_fewer_queries_than_keys_rows_are_named_after_the_last_tokens():
    shown = plots.attention_maps({"one": torch.tensor([[0.5, 0.25, 0.25]])}, ["a", "b", "c"])
    assert [tick.get_text() for tick in shown.axes[0].get_yticklabels()] == ["c"]
    assert "'c' looks at 'a' 50%" in repr(shown)


def test_the_best_head_is_named_and_framed():
    scores = torch.zeros(30, 9)
    scores[16, 2] = 0.7
    shown = plots.head_scores({"previous token": scores, "induction": scores.flip(0)})
    assert "previous token: the highest of 270 scores is 0.70, layer 16 head 2" in repr(shown)
    frame = shown.axes[0].lines[0]
    assert (list(frame.get_xdata()), list(frame.get_ydata())) == ([16], [2])
    assert "layer 13, head 2" in shown.axes[1].get_title(loc="left")


def test_bars_of_the_knock_out_have_the_heights_of_the_losses():
    shown = plots.knock_out(2.5, {"induction": 5.0, "first": 2.4}, [2.4, 2.6, 6.0])
    assert [bar.get_width() for bar in shown.axes[0].patches] == [5.0, 2.4]
    assert list(shown.axes[0].lines[0].get_xdata()) == [2.4, 2.6, 6.0]
    color = matplotlib.colors.to_hex(shown.axes[0].patches[0].get_facecolor()).upper()
    assert color == style.COLORS["attention"]


@pytest.mark.parametrize(("power", "factor"), [(1, 0.001), (2, 3.0), (1.5, 1e-9)])
def test_the_slope_is_the_power(power, factor):
    sizes = [256, 512, 1024, 2048, 4096]
    assert plots.slope(sizes, [factor * size**power for size in sizes]) == pytest.approx(power)


def test_growth_says_its_units_and_slopes():
    shown = plots.growth([256, 512], {"attention": [0.001, 0.004], "matrices": [0.01, 0.02]}, note="here")
    assert "slope 2.00" in repr(shown) and "slope 1.00" in repr(shown)
    assert "(ms, log scale)" in shown.axes[0].get_ylabel() and "log scale" in shown.axes[0].get_xlabel()


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(recwarn):
    before = dict(matplotlib.rcParams)
    pair = {"plain": [1.8, 32.0], "scaled": [0.9, 1.0]}
    shares = {"plain": [0.4, 0.9], "scaled": [0.2, 0.2]}
    for shown in (plots.scale_effect([4, 1024], pair, shares), explorer("שלום $x$ <b>").twin, explorer("x" * 50).twin,
                  plots.knock_out(2.5, {"a": 5.0}, [2.0]), plots.head_scores({"a": torch.rand(30, 9)})):
        assert shown.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- what the checks hold for right --------------------------------------------------------------------------------

@pytest.mark.parametrize(("heads", "shared", "tokens"), [(9, 3, 7), (8, 2, 5), (4, 4, 3), (6, 1, 2)])
def test_b3_the_checks_grouped_attention_is_torchs(heads, shared, tokens):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, tokens, 16, generator=generator) for n in (heads, shared, shared))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(_grouped(q, k, v), theirs, rtol=1e-5, atol=1e-5)


def test_b4_fewer_queries_than_keys():
    keys, values = torch.zeros(1, 5, 4), torch.arange(1.0, 6).reshape(1, 5, 1)
    assert _grouped(torch.zeros(1, 1, 4), keys, values).flatten().tolist() == pytest.approx([3.0])
    assert _grouped(torch.zeros(1, 2, 4), keys, values).flatten().tolist() == pytest.approx([2.5, 3.0])
    prefill = _grouped(torch.zeros(1, 3, 4), keys[:, :3], torch.tensor([[[1.0], [2], [6]]]))
    assert prefill.flatten().tolist() == pytest.approx([1.0, 1.5, 3.0])


def by_comparison(queries, keys):
    return [[column <= keys - queries + row for column in range(keys)] for row in range(queries)]


def with_zeros_and_ones(queries, keys):
    return torch.ones(1, 1, queries, keys, dtype=torch.int).tril(keys - queries)


def by_torch(q, k, v):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)


def in_a_loop(q, k, v):
    rows = []
    for head in range(q.shape[0]):
        shared = head // (q.shape[0] // k.shape[0])
        for t in range(q.shape[1]):
            seen = k.shape[1] - q.shape[1] + t + 1
            scores = torch.stack([q[head, t].dot(k[shared, s]) for s in range(seen)]) / q.shape[-1] ** 0.5
            rows.append(scores.softmax(0) @ v[shared, :seen])
    return torch.stack(rows).reshape(q.shape)


def one_by_one(weights):
    return [sum(float(head[t, t - 1]) for t in range(1, len(head))) / (len(head) - 1) for head in weights]


def softmax_by_hand(q, k):
    scores = torch.einsum("td,sd->ts", q, k) / q.shape[-1] ** 0.5
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize(("name", "fn"), [
    ("causal_mask", by_comparison), ("causal_mask", with_zeros_and_ones), ("grouped_attention", by_torch),
    ("grouped_attention", in_a_loop), ("previous_token_score", one_by_one), ("attention_weights", softmax_by_hand)])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"
