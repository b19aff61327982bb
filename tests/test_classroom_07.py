"""Lesson 07's pictures, its widget and its checks: the right numbers reach the reader, and right answers pass."""

import base64
import types
from pathlib import Path

import ipywidgets
import matplotlib
import nbformat
import pytest
import torch
from cache_kinds import MODEL, WINDOW, expected, feed, oracle, sliding
from tiny import one_thread as one_thread
from tiny import random_ids, same_logits, tiny_model

import llm_lessons as ll
from llm_lessons.classroom import check, plots, style, widgets
from llm_lessons.classroom.checks.kv_cache import Room, _window
from llm_lessons.classroom.plots.kv_cache import CACHE, DARK, PALE, gigabytes
from llm_lessons.classroom.widgets.kv_cache import CONTEXTS, USERS, with_heads

PNG = b"\x89PNG\r\n"
WIDGET = "application/vnd.jupyter.widget-view+json"
BOOK = Path(__file__).parent.parent / "notebooks" / "07_kv_cache.ipynb"


def color(patch) -> str:
    return matplotlib.colors.to_hex(patch.get_facecolor()).upper()


# --- The widget -----------------------------------------------------------------------------------------------------

@pytest.fixture
def shown():
    return widgets.cache_growth("Llama-3-8B", context=8192, users=32)


def test_the_widget_begins_with_its_twin_and_follows_every_control(shown):
    assert "Llama-3-8B, GQA (8 KV heads)" in shown.words.value and "131,072 bytes of cache" in shown.words.value
    assert "34.4 GB (32.0 GiB)" in shown.words.value and "weights 16.1 GB (15.0 GiB)" in shown.words.value
    assert shown.picture.value == shown.twin.png()
    shown.controls["users"].value = 1
    assert "1 user with 8,192 tokens each: 1.07 GB (1.00 GiB)" in shown.words.value
    assert shown.picture.value != shown.twin.png()
    shown.controls["context"].value = 4096
    assert "0.537 GB (0.500 GiB)" in shown.words.value
    shown.controls["heads"].value = "MHA"
    assert "MHA (32 KV heads)" in shown.words.value and "2.15 GB (2.00 GiB)" in shown.words.value
    shown.controls["heads"].value = "MQA"
    assert "MQA (1 KV head)" in shown.words.value and "16,384 bytes of cache per token" in shown.words.value
    shown.controls["width"].value = "0.5 (int4)"
    assert "4,096 bytes of cache per token" in shown.words.value
    for name, value in (("heads", "GQA, as it is"), ("width", "2 (bfloat16)"), ("context", 8192), ("users", 32)):
        shown.controls[name].value = value
    assert shown.picture.value == shown.twin.png()


@pytest.mark.parametrize(("start", "words"), [
    (dict(model="SmolLM2-135M", context=2048), ["23,040 bytes", "0.0472 GB (0.0439 GiB)"]),  # S: 45 MiB
    (dict(model="Llama-3-70B", context=32768, bytes_per_value=1), ["163,840 bytes", "5.37 GB (5.00 GiB)"]),  # 7
    (dict(model="Llama-3-70B", context=131072, users=256, heads="MHA"), ["64 KV heads", "87,961 GB (81,920 GiB)"])])
def test_planner_examples_and_the_largest_setting_S7(start, words):
    shown = widgets.cache_growth(**start)
    for word in words:
        assert word in shown.twin.alt
    assert shown.twin.png().startswith(PNG)


@pytest.mark.parametrize(("start", "words"), [
    (dict(model="GPT-2"), "model='GPT-2': choose one of SmolLM2-135M"), (dict(context=1000), "context=1000: choose"),
    (dict(users=3), "users=3"), (dict(bytes_per_value=3), "width=3: choose one of 4"), (dict(heads="none"), "heads=")])
def test_what_no_control_can_show_is_refused(start, words):
    with pytest.raises(ValueError, match=words):
        widgets.cache_growth(**start)


def test_f1_the_widget_travels_with_its_picture_and_is_made_of_what_colab_has(shown):
    data = shown._repr_mimebundle_()
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    for name, control in shown.controls.items():
        kind = ipywidgets.SelectionSlider if name in ("context", "users") else ipywidgets.Dropdown
        assert isinstance(control, kind)
    assert (CONTEXTS[0], CONTEXTS[-1], USERS[0], USERS[-1]) == (256, 131_072, 1, 256)


def test_heads_change_the_cache_and_the_matrices_that_make_it():
    shape = ll.SHAPES["llama-3-8b"]
    assert with_heads(shape, "GQA, as it is") == shape
    many = with_heads(shape, "MHA")
    assert many.kv_bytes_per_token(2) == 4 * shape.kv_bytes_per_token(2)
    assert many.parameters - shape.parameters == 32 * 2 * (32 - 8) * 128 * 4096


@pytest.mark.parametrize(("nbytes", "text"), [
    (5.36870912e9, "5.37 GB (5.00 GiB)"), (47_185_920, "0.0472 GB (0.0439 GiB)"), (2**40, "1,100 GB (1,024 GiB)"),
    (1e9, "1.00 GB (0.931 GiB)")])
def test_sizes_in_both_units(nbytes, text):
    assert gigabytes(nbytes) == text


# --- The pictures ---------------------------------------------------------------------------------------------------

def test_the_speed_picture_shows_each_token_and_both_ratios():
    shown = plots.cache_speed([0.1, 0.2, 0.3], [0.1, 0.05, 0.05], {64: (2.0, 4.0), 512: (19.0, 15.0)}, note="here")
    left, right = shown.axes
    assert [line.get_ydata() for line in left.lines] == [pytest.approx([100, 200, 300]), pytest.approx([100, 50, 50])]
    assert [bar.get_height() for bar in right.patches] == [2, 19, 4, 15]
    assert "64 tokens 4.0 times, predicted 2.0" in shown.alt and "100 ms at first and 300 ms at last" in shown.alt
    assert "(ms)" in left.get_ylabel()


def test_memory_is_drawn_in_mb():
    shown = plots.memory_growth([0, 100], {"growing": [0, 4_608_000], "all at once": [4_608_000] * 2})
    assert [list(line.get_ydata()) for line in shown.axes[0].lines] == [[0, 4.608], [4.608, 4.608]]
    assert "growing: 0.0 MB at 0 tokens, 4.6 MB at 100" in shown.alt
    assert {matplotlib.colors.to_hex(line.get_color()).upper() for line in shown.axes[0].lines} == {CACHE}
    assert CACHE == style.COLORS["kv_cache"]


def test_the_window_is_drawn_with_what_is_seen_what_is_out_and_what_is_later():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    shown = plots.window_view(mask, [0, 10], {"all": [0, 10], "window": [2, 2]})
    assert shown.axes[0].images[0].get_array().tolist() == [[2, 0, 0], [2, 2, 0], [1, 2, 2]]
    assert [(text.get_position(), text.get_text()) for text in shown.axes[0].texts] == [((0, 2), "×")]
    assert "each of 3 tokens sees itself and up to 1 before it" in shown.alt


def test_the_losses_stand_in_pairs_over_the_line_of_all_keys():
    shown = plots.window_loss(3.8, {64: 7.4, 16: 8.1}, {64: 4.0, 16: 4.2})
    assert [bar.get_height() for bar in shown.axes[0].patches] == [7.4, 8.1, 4.0, 4.2]
    assert list(shown.axes[0].lines[0].get_ydata()) == [3.8, 3.8]
    assert "window 16: 8.1, with the first token kept 4.2" in shown.alt


def test_blocks_are_drawn_where_the_tables_say():
    shown = plots.paged_blocks({"alice": ([1, 3], 6), "bob": ([1, 2], 8)}, blocks=4, block_size=4)
    assert shown.alt == "alice: 6 tokens in blocks 1, 3; bob: 8 tokens in blocks 1, 2; shared: 1; free: 1"
    words = [text.get_text() for text in shown.axes[0].texts]
    assert words.count("block 1") == 2 and words[-8:] == ["1", "both", "2", "bob", "3", "alice", "4", "free"]
    filled = [color(patch) for patch in shown.axes[0].patches if patch.get_fill()]
    assert filled[-16:] == [DARK] * 4 + [PALE.upper()] * 4 + [CACHE] * 2 + ["#FFFFFF"] * 6


def test_every_picture_can_be_drawn_and_leaves_the_settings_alone(recwarn, shown):
    before = dict(matplotlib.rcParams)
    for picture in (plots.cache_speed([0.1] * 3, [0.1] * 3, {64: (1.0, 1.0)}), plots.paged_blocks({}, 2, 4),
                    plots.memory_growth([0, 1], {"a": [0, 1]}), plots.window_loss(1.0, {4: 2.0}, {4: 1.5}), shown.twin):
        assert picture.png().startswith(PNG)
    assert dict(matplotlib.rcParams) == before
    assert not recwarn.list


# --- What the learner builds in the notebook ------------------------------------------------------------------------

@pytest.fixture(scope="module")
def built():
    """The classes of the notebook, as they stand in its cells."""
    space = {"torch": torch, "ll": ll, "device": torch.device("cpu")}
    for cell in nbformat.read(BOOK, as_version=4).cells:
        if cell.cell_type == "code" and cell.source.startswith("class "):
            exec(cell.source.split("\n\nmasked, sliding")[0], space)
    return types.SimpleNamespace(**space)


@pytest.mark.parametrize("sizes", [[40], [1] * 12, [6, 1, 1, 3, 9]], ids=str)
def test_the_growing_cache_of_the_lesson_gives_the_logits_of_transformers(built, sizes):
    ids = random_ids(sum(sizes), seed=len(sizes))
    same_logits(feed(ids, sizes, built.Growing()), expected(lambda: None, ids))


def test_the_preallocated_cache_of_the_lesson_writes_in_place_and_ends_where_it_ends_D1(built):
    cache = built.Preallocated(8)
    memory = cache.keys.data_ptr()
    for new in (5, 3):
        k = torch.randn(1, 3, new, 64)
        cache.reserve([new])
        for layer in range(30):
            keys, values = cache.update(layer, k + layer, -k)
        assert keys.shape == (1, 3, cache.lengths[0] + new, 64) and torch.equal(keys[:, :, -new:], k + 29)
        assert torch.equal(values[:, :, -new:], -k)
        cache.advance([new])
    assert cache.keys.data_ptr() == memory
    with pytest.raises(ValueError, match=r"8 \+ 1 tokens do not fit a capacity of 8"):
        cache.reserve([1])


@pytest.mark.parametrize("sizes", [[20], [6, 1, 1, 9, 3]], ids=str)
def test_the_windowed_cache_of_the_lesson_is_the_sliding_window_of_mistral(built, sizes):
    assert oracle(WINDOW).config.sliding_window == WINDOW
    ids, cache = random_ids(sum(sizes), seed=3), MODEL.new_cache(40, kind=built.Windowed)
    cache.window = WINDOW
    same_logits(feed(ids, sizes, cache), expected(sliding, ids))


def test_the_first_token_stays_in_sight_when_it_is_asked_to(built):
    cache = built.Windowed(1, 1, 2, 10)
    cache.window, cache.first = 2, 1
    assert cache.mask(4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


# --- What the checks hold for right ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("past", "new", "window"), [(0, 6, 3), (5, 1, 4), (4, 3, 2), (3, 3, 9), (6, 2, 1)])
def test_the_checks_window_is_that_of_transformers(past, new, window):
    from transformers.masking_utils import sliding_window_causal_mask_function

    sees = sliding_window_causal_mask_function(window)
    at = torch.tensor(0)
    theirs = [[bool(sees(at, at, at + past + row, at + key)) for key in range(past + new)] for row in range(new)]
    assert _window(past, new, window)[0].tolist() == theirs


def test_bytes_per_token_are_those_of_transformers_own_cache(capsys):
    from tiny import as_transformers

    with torch.no_grad():
        layers = as_transformers(tiny_model())(torch.tensor([random_ids(10)]), use_cache=True).past_key_values.layers
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 10
    c = MODEL.config
    assert in_one_line(c.layers, c.heads, c.kv_heads, c.head_dim, 4) == measured
    check.kv_bytes_per_token(in_one_line)
    assert capsys.readouterr().out == "passed\n"


def test_s9_unwritten_rows_take_weight():
    keys, query = torch.zeros(8, 4), torch.ones(1, 4)
    keys[:2] = 1
    values = keys[:, :1]
    attend = torch.nn.functional.scaled_dot_product_attention
    assert attend(query, keys, values).item() == pytest.approx(0.7112, abs=1e-4)
    assert attend(query, keys[:2], values[:2]).item() == pytest.approx(1.0)


def in_one_line(layers, heads, kv_heads, head_dim, bytes_per_value):
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def bytes_as_a_tensor(layers, heads, kv_heads, head_dim, bytes_per_value):
    return torch.tensor([layers, kv_heads, head_dim], dtype=torch.float64).prod() * bytes_per_value * 2


def appended_in_a_list(keys, values, k, v):
    return [torch.cat([keys, k], -2), torch.cat([values, v], -2)]


def appended_and_stacked(keys, values, k, v):
    return torch.stack((torch.cat((keys, k), 1), torch.cat((values, v), 1)))


def appended_as_arrays(keys, values, k, v):
    import numpy as np

    return np.concatenate((keys, k), 1), np.concatenate((values, v), 1)


def appended_head_by_head(keys, values, k, v):
    return tuple(torch.stack([torch.cat(pair) for pair in zip(old, new)]) for old, new in ((keys, k), (values, v)))


def written_row_by_row(cache, k, v):
    if cache.length + k.shape[1] > cache.keys.shape[1]:
        raise ValueError("full")
    for i in range(k.shape[1]):
        cache.keys[:, cache.length + i] = k[:, i]
        cache.values[:, cache.length + i] = v[:, i]
    return [cache.keys[:, :cache.length + k.shape[1]], cache.values[:, :cache.length + k.shape[1]]]


def written_with_index_copy(cache, k, v):
    at = torch.arange(cache.length, cache.length + k.shape[1])
    if len(at) and at[-1] >= cache.keys.shape[1]:
        raise ValueError(f"the capacity is {cache.keys.shape[1]}")
    cache.keys.index_copy_(1, at, k)
    cache.values.index_copy_(1, at, v)
    return cache.keys.narrow(1, 0, int(at[-1]) + 1).clone(), cache.values.narrow(1, 0, int(at[-1]) + 1)


def window_in_loops(past, new, window):
    return [[past + row - window < column <= past + row for column in range(past + new)] for row in range(new)]


def window_with_batch_and_heads(past, new, window):
    full = torch.ones(past + new, past + new, dtype=torch.bool)
    return full.tril().triu(1 - window)[None, None, past:]


@pytest.mark.parametrize(("name", "fn"), [
    ("append", appended_in_a_list), ("append", appended_and_stacked), ("append", appended_head_by_head),
    ("append", appended_as_arrays), ("write", written_row_by_row), ("write", written_with_index_copy),
    ("kv_bytes_per_token", bytes_as_a_tensor), ("window_mask", window_in_loops),
    ("window_mask", window_with_batch_and_heads)])
def test_every_correct_way_of_writing_it_passes(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


def test_an_error_of_the_learners_own_is_told_as_it_is(capsys):
    def misspelt(cache, k, v):
        return cache.key, cache.value

    check.write(misspelt)
    assert "AttributeError" in capsys.readouterr().out
    assert repr(Room(torch.zeros(1, 8, 2), torch.zeros(1, 8, 2), 3)) == "a cache of capacity 8 that holds 3"
