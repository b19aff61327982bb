"""Lesson 02: look up the neighbours of any word, and turn a query and a key by hand."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

import ipywidgets
import torch
from torch import Tensor

from ..plots.embeddings import neighbour_bars, rope_dial
from .core import Interactive, breakable, image_box, one_at_a_time, readable

COUNT = 8  # neighbours that are shown


def nearest(table: Tensor, vector: Tensor, k: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
    """The k rows of a table [rows, size] nearest to a vector [size], as (row, cosine), nearest first."""
    cosines = (table @ vector) / (table.norm(dim=1) * vector.norm())
    cosines[cosines.isnan()] = -1.5  # a row of zeros has no direction: after every other, before those left out
    cosines[list(without)] = -2.0  # below every cosine
    values, rows = cosines.topk(k)
    return list(zip(rows.tolist(), values.tolist()))


def token_text(tokenizer, token: int) -> str:
    """A token's text; the bytes in hexadecimal where they are only a part of a character."""
    raw = tokenizer.decode_single_token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"⟨{raw.hex(' ').upper()}⟩"


def look_up(tokenizer, typed: str) -> tuple[str, list[int], str]:
    """A typed word -> how it is looked up, its ids, and what the reader must know. ValueError when it has no ids.

    A word inside a sentence carries the space before it, so that is tried first; then the word without it. A word of
    several tokens has no row of its own: its ids are those of all its tokens.
    """
    if not (word := typed.strip()):
        raise ValueError("type a word")
    pieces = []
    for text in (f" {word}", word):
        pieces.append((text, [token for token in tokenizer.encode(text) if token != tokenizer.bos_id]))
        if len(pieces[-1][1]) == 1:
            return text, pieces[-1][1], "one token" if text != word else "one token, without a space in front"
    text, ids = pieces[0]
    parts = " | ".join(readable(token_text(tokenizer, token)) for token in ids[:12])
    parts += " and more" if len(ids) > 12 else ""
    return text, ids, f"{len(ids)} tokens: {parts}. It has no row of its own: these are the neighbours of their mean"


def neighbour_finder(table: Tensor, tokenizer, word: str) -> Interactive:
    """Type a word, see the tokens whose rows of the embedding table [vocab, hidden] have the highest cosine with it."""
    table = table.detach()[:tokenizer.vocab]  # some models pad their table with rows that stand for no token

    def draw(typed: str):
        text, ids, note = look_up(tokenizer, typed)
        found = nearest(table, torch.nn.functional.normalize(table[ids], dim=-1).mean(0), COUNT, without=ids)
        bars = neighbour_bars(text, [(token_text(tokenizer, row), cosine) for row, cosine in found])
        return bars, readable(text), note

    first, shown, note = draw(word)
    field = ipywidgets.Text(value=word, description="word", continuous_update=False)
    line = ipywidgets.HTML(value=_told(shown, note))
    image = image_box(first.png())

    @one_at_a_time
    def show(_) -> None:
        try:
            drawn, shown, note = draw(field.value)
        except ValueError as error:  # nothing typed, or a character that this vocabulary has no bytes for
            line.value = breakable(f"<i>{escape(str(error))}</i>")
            image.layout.visibility = "hidden"  # no picture of another word under this message
        else:
            image.value, line.value, image.layout.visibility = drawn.png(), _told(shown, note), "visible"

    field.observe(show, names="value")
    return Interactive(ipywidgets.VBox([field, line, image]), first)


def _told(text: str, note: str) -> str:
    return breakable(f"<code>{escape(text if len(text) <= 60 else text[:60] + '…')}</code> is {escape(note)}.")


def rope_dials(q: Tensor, k: Tensor, base: float, q_at: int = 3, k_at: int = 1) -> Interactive:
    """Three sliders: the query's position, the key's, and a shift of both, which leaves the score as it is."""
    for name, at in (("q_at", q_at), ("k_at", k_at)):
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= 20:
            raise ValueError(f"{name}={at}: a whole number from 0 to 20 is needed")
    first = rope_dial(q, k, q_at, k_at, base)
    sliders = [ipywidgets.IntSlider(value=value, min=0, max=top, description=name, continuous_update=True)
               for name, value, top in (("query at", q_at, 20), ("key at", k_at, 20), ("both plus", 0, 100))]
    line = ipywidgets.HTML(value=escape(first.alt))
    image = image_box(first.png())

    @one_at_a_time
    def show(_) -> None:
        query, key, both = (slider.value for slider in sliders)
        drawn = rope_dial(q, k, query + both, key + both, base)
        line.value, image.value = escape(drawn.alt), drawn.png()

    for slider in sliders:
        slider.observe(show, names="value")
    return Interactive(ipywidgets.VBox([*sliders, line, image]), first)
