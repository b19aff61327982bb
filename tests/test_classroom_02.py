"""Lesson 02: its widgets and pictures, and its checks against outsiders: transformers, torch, arithmetic by hand."""

import math

import ipywidgets
import pytest
import torch
import torch.nn.functional as F

import llm_lessons as ll
from llm_lessons.classroom import check, plots, widgets
from llm_lessons.classroom.checks.embeddings import _turned, _waves, _woven
from llm_lessons.classroom.plots.embeddings import rope_score
from llm_lessons.classroom.widgets.embeddings import look_up, nearest, token_text
from llm_lessons.model import rope_table, rotate

Q, K = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])


@pytest.fixture(scope="module")
def tokenizer():
    return ll.load_tokenizer()


@pytest.fixture(scope="module")
def table(tokenizer):
    """Rows of the right number, but short: what the widget does with words does not depend on the vectors."""
    return torch.randn(tokenizer.vocab, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def finder(table, tokenizer):
    shown = widgets.neighbour_finder(table, tokenizer, "hot")
    return shown, *shown.widget.children


# --- Neighbours -----------------------------------------------------------------------------------------------------

def test_nearest_rows_are_those_of_torchs_cosine(table):
    for row, without in ((0, [0]), (777, [777, 5]), (49_151, [])):
        cosines = F.cosine_similarity(table.double(), table[row].double()[None])
        cosines[without] = -9
        values, rows = cosines.topk(6)
        found = nearest(table, table[row], 6, without)
        assert [r for r, _ in found] == rows.tolist()
        assert [c for _, c in found] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("typed, text, tokens, note", [
    ("king", " king", 1, "one token"), ("  king ", " king", 1, "one token"), ("3", "3", 1, "without a space"),
    ("unbelievableness", " unbelievableness", None, "tokens: ·"),
    ("ice cream", " ice cream", 2, "2 tokens: ·ice | ·cream")])
def test_a_word_is_looked_up_as_it_stands_in_a_sentence(tokenizer, typed, text, tokens, note):
    found, ids, said = look_up(tokenizer, typed)
    assert found == text and tokenizer.decode(ids) == text
    assert tokens is None and len(ids) > 1 or len(ids) == tokens
    assert note in said


def test_part_of_a_character_is_shown_as_its_bytes(tokenizer):
    texts = [token_text(tokenizer, token) for token in tokenizer.encode("🦙")]
    assert len(texts) > 1 and "�" not in "".join(texts)
    assert "F0" in texts[0]


def test_the_finder_starts_with_its_twin_and_follows_the_typed_word(finder, table, tokenizer):
    shown, field, line, image = finder
    assert image.value == shown.twin.png()
    assert line.value == '<span style="overflow-wrap:anywhere"><code>·hot</code> is one token.</span>'
    field.value = "king"
    rows = nearest(table, table[tokenizer.encode(" king")[0]], 8, tokenizer.encode(" king"))
    expected = plots.neighbour_bars(" king", [(token_text(tokenizer, row), cosine) for row, cosine in rows])
    assert image.value == expected.png() != shown.twin.png()
    assert "·king" in line.value
    field.value = "hot"
    assert image.value == shown.twin.png()


def test_a_word_of_several_tokens_says_so_and_leaves_its_own_tokens_out(finder, table, tokenizer):
    _, field, line, image = finder
    field.value = "ice cream"
    assert "2 tokens: ·ice | ·cream" in line.value and "no row of its own" in line.value
    ids = tokenizer.encode(" ice cream")
    mean = F.normalize(table[ids], dim=1).mean(0)
    assert not {row for row, _ in nearest(table, mean, 8, ids)} & set(ids)


@pytest.mark.parametrize("typed, words", [("", "type a word"), ("   ", "type a word"), ("\x04", "U+0004")])
def test_what_cannot_be_looked_up_is_told_and_shows_no_other_words_picture(finder, typed, words):
    _, field, line, image = finder
    field.value = typed or " "
    assert words in line.value
    assert image.layout.visibility == "hidden"
    field.value = "king"
    assert image.layout.visibility == "visible"


@pytest.mark.parametrize("typed", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</code><b>", "a&b",
                                   "'\"", "你好", "🦙", "שלום", "$x_1$", "a" * 3000, "<|im_end|>"])
def test_any_text_can_be_typed_and_none_becomes_markup(finder, typed, recwarn):
    _, field, line, image = finder
    field.value = typed
    assert line.value.startswith('<span style="overflow-wrap:anywhere"><code>')
    inside = line.value.split("<code>", 1)[1].replace("</code>", "", 1).removesuffix("</span>")
    assert "<" not in inside and "&b" not in inside
    assert bytes(image.value).startswith(b"\x89PNG")
    assert not recwarn.list


def test_bars_are_grey_for_the_same_letters_and_the_words_are_told():
    shown = plots.neighbour_bars(" hot", [(" Hot", 0.9), ("warm", 0.5)])
    grey, blue = (bar.get_facecolor() for bar in shown.axes[0].patches)
    assert grey != blue
    assert [bar.get_width() for bar in shown.axes[0].patches] == [0.9, 0.5]
    assert "' Hot' 0.90, 'warm' 0.50" in repr(shown)


def test_a_row_without_direction_is_never_near():
    table = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.5], [-1.0, 0.0]])
    assert [row for row, _ in nearest(table, table[1], 3, without=[1])] == [2, 3, 0]


def test_padding_rows_are_left_out(table, tokenizer):
    padded = torch.cat((table, table[tokenizer.encode(" hot")]))
    assert widgets.neighbour_finder(padded, tokenizer, "hot").twin.alt == \
        widgets.neighbour_finder(table, tokenizer, "hot").twin.alt


@pytest.mark.parametrize("at", [dict(q_at=-1), dict(k_at=21), dict(q_at=2.5), dict(k_at=True)])
def test_dials_refuse_positions_that_no_slider_can_show(at):
    with pytest.raises(ValueError, match="whole number from 0 to 20"):
        widgets.rope_dials(Q, K, 10_000.0, **at)


# --- Pairs, map, positions ------------------------------------------------------------------------------------------

def test_similarities_show_every_pair_and_the_median_of_each_kind():
    shown = plots.similarities({"synonyms": [0.5, 0.7, 0.6], "unrelated": [0.1] * 150}, reference="unrelated")
    assert "synonyms, 3 pairs, median 0.60" in shown.alt and "unrelated, 150 pairs, median 0.10" in shown.alt
    assert [len(dots.get_offsets()) for dots in shown.axes[0].collections] == [3, 150]
    assert shown.png()


def test_the_map_names_every_word_once_and_keeps_crowded_labels_apart():
    spots = [(f"word{n}", 0.02 * (n % 3), 0.03 * (n // 3)) for n in range(9)]
    shown = plots.word_map({"a": spots, "b": [("far", 1.0, 1.0), ("<b>", -1.0, 0.0)]})
    shown.png()
    labels = [text for text in shown.axes[0].texts if text.get_text().startswith("word")]
    assert len(labels) == 9
    boxes = [label.get_window_extent() for label in labels]
    overlaps = [a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert sum(overlaps) <= 2


def test_wavelengths_by_hand():
    shown = plots.wavelengths(64, 100_000.0, 8192)
    assert "6.3 for the fastest pair, 438,460 for the slowest; 20 of 32 pairs" in shown.alt
    assert 2 * math.pi * 10 ** (5 * 62 / 64) == pytest.approx(438_460, abs=0.5)
    heights = shown.axes[0].lines[0].get_ydata()
    assert heights[0] == pytest.approx(2 * math.pi) and heights[16] == pytest.approx(2 * math.pi * 100_000 ** 0.5)


def test_the_map_of_added_positions_shows_the_table():
    values = torch.linspace(-1, 1, 12).reshape(3, 4)
    shown = plots.position_vectors(values)
    assert shown.axes[0].images[0].get_array().tolist() == values.tolist()
    assert "4 numbers" in shown.alt and "3 positions" in shown.alt


# --- Rotary positions -----------------------------------------------------------------------------------------------

def test_the_score_depends_on_the_distance_alone_B2():
    assert rope_score(Q, K, 3, 1, 10_000.0) == pytest.approx(-3.456429, abs=1e-5)
    assert rope_score(Q, K, 5, 3, 10_000.0) == pytest.approx(-3.456429, abs=1e-5)
    assert abs(rope_score(Q, K, 4, 1, 10_000.0) + 3.456429) > 0.1


def test_the_dials_keep_the_score_when_both_move_and_change_it_when_one_moves():
    shown = widgets.rope_dials(Q, K, 10_000.0)
    query, key, both, line, image = shown.widget.children
    assert all(isinstance(slider, ipywidgets.IntSlider) for slider in (query, key, both))
    first = plots.rope_dial(Q, K, 3, 1, 10_000.0).png()
    assert image.value == first
    assert line.value == shown.twin.alt == "query at 3, key at 1, distance 2: score -3.456"
    both.value = 100
    assert line.value == "query at 103, key at 101, distance 2: score -3.456"
    assert image.value == plots.rope_dial(Q, K, 103, 101, 10_000.0).png() != first
    key.value = 0
    assert "distance 3: score -1.616" in line.value
    both.value, key.value, query.value = 0, 20, 0
    assert "distance -20: score" in line.value
    key.value, query.value = 1, 3
    assert image.value == first


def test_hands_point_where_the_rotation_by_hand_says():
    shown = plots.rope_dial(Q, K, 1, 0, 10_000.0)
    dial = shown.axes[0]
    tips = [text.xy for text in dial.texts if getattr(text, "arrow_patch", None) is not None]
    a, b = math.cos(1) * 1 - math.sin(1) * 3, math.sin(1) * 1 + math.cos(1) * 3  # pair 0 of q is (1, 3)
    assert tips[0] == pytest.approx((a, b), abs=1e-5)
    assert tips[1] == pytest.approx((4, 2), abs=1e-5)
    assert shown.axes[-1].lines[-1].get_ydata()[0] == pytest.approx(rope_score(Q, K, 1, 0, 10_000.0))


@pytest.mark.parametrize("make", [lambda table, tokenizer: widgets.neighbour_finder(table, tokenizer, "hot"),
                                  lambda table, tokenizer: widgets.rope_dials(Q, K, 10_000.0)])
def test_f1_both_widgets_travel_with_their_picture(make, table, tokenizer):
    bundle = make(table, tokenizer)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}


@pytest.mark.parametrize("size, base", [(4, 10_000.0), (64, 100_000.0), (10, 500.0)])
def test_the_rotation_is_that_of_transformers(size, base):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=size * 2, num_attention_heads=2, head_dim=size, max_position_embeddings=512,
                         rope_theta=base, rope_parameters={"rope_type": "default", "rope_theta": base})  # version 4; 5
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 9, size, generator=draw), torch.randn(1, 2, 9, size, generator=draw)
    positions = torch.arange(40, 49)
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions[None]))
    table = rope_table(positions, size, base)
    for ours, expected in zip((rotate(q, *table), rotate(k, *table)), theirs):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    by_check = torch.stack([_turned(x, int(at), base) for x, at in zip(q[0, 0], positions)])
    torch.testing.assert_close(by_check, theirs[0][0, 0].double(), rtol=1e-4, atol=1e-5)


def test_the_added_positions_are_those_of_transformers():
    from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

    theirs = torch.empty(20, 8)
    create_sinusoidal_embeddings(20, 8, theirs)
    torch.testing.assert_close(_woven(*_waves(torch.arange(20), 8)).float(), theirs, rtol=1e-4, atol=1e-5)


# --- Other correct answers ------------------------------------------------------------------------------------------

def nearest_by_sorting(table, row, k):
    order = F.cosine_similarity(table, table[row:row + 1]).sort(descending=True, stable=True).indices.tolist()
    order.remove(row)
    return order[:k]


def nearest_one_by_one(table, row, k):
    cosines = [float(other @ table[row] / other.norm() / table[row].norm()) for other in table]
    return tuple(sorted((i for i in range(len(table)) if i != row), key=lambda i: -cosines[i])[:k])


def sinusoidal_in_loops(count, size):
    pairs = [10_000 ** (2 * i / size) for i in range(size // 2)]
    return [[wave(p / slow) for slow in pairs for wave in (math.sin, math.cos)] for p in range(count)]


def sinusoidal_in_places(count, size):
    out = torch.zeros(count, size)
    angles = torch.outer(torch.arange(count).float(), 10_000 ** (-torch.arange(0, size, 2) / size))
    out[:, 0::2], out[:, 1::2] = angles.sin(), angles.cos()
    return out


def rotate_as_complex_numbers(x, position, base):
    half = len(x) // 2
    turned = torch.complex(x[:half], x[half:]) * torch.exp(1j * position / base ** (torch.arange(half) / half))
    return torch.cat((turned.real, turned.imag))


def rotate_with_the_package(x, position, base):
    return rotate(x, *rope_table(torch.tensor([position]), len(x), base))


def rotate_in_a_loop(x, position, base):
    out, half = x.tolist(), len(x) // 2
    for i in range(half):
        angle, a, b = position / base ** (2 * i / len(x)), float(x[i]), float(x[i + half])
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


@pytest.mark.parametrize("name, answer", [
    ("nearest", nearest_by_sorting), ("nearest", nearest_one_by_one), ("sinusoidal", sinusoidal_in_loops),
    ("sinusoidal", sinusoidal_in_places), ("rotate_pairs", rotate_as_complex_numbers),
    ("rotate_pairs", rotate_with_the_package), ("rotate_pairs", rotate_in_a_loop)])
def test_every_correct_way_passes(name, answer, capsys):
    getattr(check, name)(answer)
    assert capsys.readouterr().out == "passed\n"
