"""The quantized cache: rows, chunks, going back, failing half-way and refusing. Every token must be where it belongs.

Lossless keys show it. They lie on the grid already, so every number must come back as it went in, wherever it has been.
"""

import numpy as np
import pytest
import torch
from cache_kinds import (
    BITS,
    MODEL,
    QUANTIZED,
    both,
    contiguous,
    expected,
    fail_in_layer,
    fed,
    feed,
    held,
    holds,
    put,
    same,
    seen,
    small,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread as one_thread
from tiny import ragged, random_ids, same_logits

import llm_lessons as ll

# --- In which place: rows, chunks, going back -------------------------------------------------------------------------

@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_done_every_token_comes_back_as_it_went_in_D2(bits, data):
    """Ragged passes with padding, passes that stop half-way, truncation, in any order. Three lists keep the books."""
    cache, rows, text = small(bits, 150, batch=3), [[], [], []], 0
    for _ in range(data.draw(st.integers(1, 6))):
        text += 1
        new = [data.draw(st.integers(0, min(100, 150 - len(row)))) for row in rows]
        todo = data.draw(st.sampled_from(["put", "put", "stop", "truncate"]))
        if todo == "truncate":
            n = data.draw(st.integers(0, max(map(len, rows))))
            cache.truncate(n)
            rows = [row[:n] for row in rows]
        elif todo == "stop" and max(new):
            put(cache, new, text, layers=1)
        elif max(new):
            put(cache, new, text, padding=data.draw(st.integers(0, 3)))
            rows = [row + [text] * count for row, count in zip(rows, new)]
        assert cache.lengths == [len(row) for row in rows]
        assert all(holds(cache, row, texts) for row, texts in enumerate(rows))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n, blocks, exact", [
    (0, 0, 0), (1, 0, 1), (31, 0, 31), (32, 1, 0), (33, 1, 1), (50, 1, 18), (63, 1, 31), (64, 2, 0), (65, 2, 1),
    (95, 2, 31), (96, 2, 32), (101, 2, 37), (102, 2, 38)])
def test_nothing_of_what_is_forgotten_stays_in_memory(bits, n, blocks, exact):
    """Of 102 tokens 64 are on the grid; those in front of n stay there, unless n cuts their block."""
    cache = small(bits, 110)
    k = torch.rand(1, 3, 102, 6, generator=torch.Generator().manual_seed(n)) + 1  # no zeros
    for layer in range(2):
        cache.update(layer, k, -k)
    cache.advance(102)
    cache.truncate(n)
    for half in (cache.keys, cache.values):
        assert half.open.ne(0).any(dim=-1).sum(dim=-1).eq(exact).all()
        for part in (half.packed, half.scale, half.minimum):
            assert part.flatten(4).ne(0).any(dim=-1).sum(dim=-1).eq(blocks).all()
    assert cache.nbytes == small(bits, 110).nbytes


@both
@pytest.mark.parametrize("n", [1, 31, 32, 33, 40, 63, 64, 65, 96, 102])
def test_another_text_behind_the_first_n_tokens_D2(new_cache, n):
    ids, other = random_ids(102), random_ids(40, seed=5)
    cache = new_cache(142)
    MODEL(ids, cache)
    cache.truncate(n)
    error = feed(other, [1, 30, 9], cache) - expected(new_cache, ids[:n] + other)[n:]
    assert error.pow(2).mean().sqrt() < {8: 0.05, 4: 0.6}[cache.bits]  # of a wrong text: about 2


def test_a_prompt_that_begins_alike_is_read_from_there_D2(monkeypatch):
    cache, first = QUANTIZED[0](120), random_ids(70, seed=7)
    exact = list(ll.generate(MODEL, first, 5, cache=contiguous(120)))
    counts = fed(monkeypatch)
    for prompt, new in ((first, 70), (first, 1), (first[:40] + [1] + first[40:], 31), (first, 30), (first[:9], 1)):
        answer = list(ll.generate(MODEL, prompt, 5, cache=cache))
        assert counts == [new, 1, 1, 1, 1] and cache.tokens == prompt + answer[:-1]
        assert answer == exact or prompt != first
        counts.clear()


@both
def test_ragged_rows_are_as_near_to_transformers_as_each_row_alone_D7(new_cache):
    rows = [random_ids(count, seed=count) for count in (90, 1, 40)]
    cache = new_cache(90, batch=3)
    for starts, lengths, logits in ragged(MODEL, cache, rows, [(40, 1, 0), (23, 0, 33), (1, 0, 7), (26, 0, 0)], 2, 3):
        for row, (start, new) in enumerate(zip(starts, lengths)):
            error = logits[row, :new] - expected(new_cache, rows[row])[start:start + new]
            assert not new or error.pow(2).mean().sqrt() < (1e-4 if start < 64 else {8: 0.05, 4: 0.6}[cache.bits])


def test_memory_that_was_never_written_is_not_seen_S9():
    cache = small(batch=2)
    for half in (cache.keys, cache.values):
        half.packed.fill_(255), half.scale.fill_(torch.nan), half.minimum.fill_(torch.nan), half.open.fill_(torch.nan)
    put(cache, [70, 3])
    assert holds(cache, 0, [0] * 70) and holds(cache, 1, [0] * 3)
    keys, _ = seen(cache)
    assert keys[1, :, 3:].eq(0).all()  # its neighbour is longer


# --- Failing half-way, and refusing -----------------------------------------------------------------------------------

@both
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("before, failed", [(63, 1), (20, 80), (65, 31), (95, 1), (100, 40)])
def test_a_pass_that_fails_when_a_block_is_on_the_grid_leaves_the_cache_as_it_was(new_cache, layer, before, failed):
    ids, cache, calm = random_ids(before + 40), new_cache(before + 80), new_cache(before + 80)
    MODEL(ids[:before], cache), MODEL(ids[:before], calm)
    hook = fail_in_layer(layer)
    with pytest.raises(KeyboardInterrupt):
        MODEL(random_ids(failed, seed=7), cache)
    hook.remove()
    same_logits(feed(ids[before:], [1, 31, 8], cache), feed(ids[before:], [1, 31, 8], calm))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("before, new, done", [
    ([20, 33], [100, 1], 0), ([20, 33], [100, 1], 1), ([20, 33], [100, 1], 2), ([20, 33], [100, 1], 3),
    ([63, 96], [1, 0], 1), ([40, 5], [60, 30], 3), ([70, 70], [26, 26], 1), ([95, 95], [1, 1], 1)])
def test_interrupted_while_it_counts_it_loses_nothing(bits, before, new, done, monkeypatch):
    """Keys and values of one row after the other go into the ring: only the first `done` of these are."""
    cache = small(bits, 150, batch=2)
    put(cache, before)
    put(cache, new, text=1, layers=2)
    slots, left = type(cache.keys).slots, iter(range(done))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return slots(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(cache.keys), "slots", interrupted)
        cache.advance(new)
    assert cache.lengths == before
    assert all(holds(cache, row, [0] * count) for row, count in enumerate(before))
    put(cache, [20, 20], text=2)
    assert all(holds(cache, row, [0] * count + [2] * 20) for row, count in enumerate(before))


def test_interrupted_while_it_forgets_it_is_right_all_the_same(monkeypatch):
    cache = small(capacity=150)
    put(cache, [140])
    for n in (90, 80, 40, 5):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ll.QuantizedCache, "_drop", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            cache.truncate(n)
        if n != 80:
            assert holds(cache, 0, [0] * n)
    put(cache, [100], text=3)
    assert holds(cache, 0, [0] * 5 + [3] * 100)


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 5, 16, -4, True, 4.0, "4", None, [4]])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits must be (8 or 4|a whole number of at least 1), not "):
        MODEL.new_cache(8, kind=ll.QuantizedCache, bits=bits)


def test_what_it_needs_is_said():
    with pytest.raises(ValueError, match=r"kind=QuantizedCache\).*missing .*'bits'"):
        MODEL.new_cache(8, kind=ll.QuantizedCache)
    cache = small(capacity=40)
    put(cache, [40])
    before = held(cache)
    with pytest.raises(ValueError, match="40 tokens, and 1 more do not fit in its capacity of 40"):
        cache.reserve([1])
    assert same(before, held(cache)) and holds(cache, 0, [0] * 40)
    assert small(bits=np.int64(8)).bits == 8


def test_keys_that_a_layer_was_never_given_are_not_counted():
    cache = small()
    put(cache, [3], layers=2)  # that pass failed behind its last layer; the next one reaches the first only
    put(cache, [3], layers=1)
    with pytest.raises(ValueError, match="some layers were given no keys"):
        cache.advance([3])
    assert cache.length == 0
