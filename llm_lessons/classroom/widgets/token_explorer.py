"""Lesson 01: type text, see its tokens."""

from __future__ import annotations

import html
from collections.abc import Mapping

import ipywidgets

from ..plots.tokenization import in_words, token_picture, tokens_of
from .core import Interactive, one_at_a_time

MOST_CHARACTERS = 2_000  # of a longer text only the beginning is cut: a page of boxes is as much as one can look at
ALL = "color:#000;font-family:monospace;text-align:left;line-height:1.25;direction:ltr"
BOX = ("display:inline-block;margin:2px;padding:2px 5px;border:1px solid #888;border-radius:3px;vertical-align:top;"
       "text-align:center;box-sizing:border-box;max-width:min(24em,calc(100% - 4px));overflow-wrap:anywhere;"
       "unicode-bidi:isolate")


def token_html(tokenizer, text: str) -> str:
    """The tokens of a text as boxes with ids and bytes, or in words what stands in the way. Nothing of it is markup."""
    shown = text[:MOST_CHARACTERS]
    try:
        tokens = tokens_of(tokenizer, shown)
    except ValueError as error:
        return f'<p role="status"><b>This text cannot be encoded.</b> {html.escape(str(error))}</p>'
    boxes = "".join(
        f'<span style="{BOX};background:{token.shade}">'
        f'<bdi style="font-style:{"normal" if token.whole else "italic"}">{html.escape(token.label)}</bdi><br>'
        f'<span style="font-size:85%">{token.id}</span><br><span style="font-size:70%">{token.hex}</span></span>'
        for token in tokens)
    more = f" Only the first {MOST_CHARACTERS:,} characters are shown." if len(text) > MOST_CHARACTERS else ""
    return f'<p role="status"><b>{in_words(tokens, shown)}.</b>{more}</p><div style="{ALL}">{boxes}</div>'


def token_explorer(text: str, tokenizers: Mapping[str, object]) -> Interactive:
    """Type text, choose one of the tokenizers (name -> tokenizer, the first to begin with), and see the tokens."""
    if not tokenizers:
        raise ValueError("token_explorer needs at least one tokenizer: {'its name': tokenizer}")
    names = list(tokenizers)
    first = tokenizers[names[0]]
    wide = ipywidgets.Layout(width="95%")
    area = ipywidgets.Textarea(value=text, description="text", layout=wide, rows=3, continuous_update=True)
    choice = ipywidgets.Dropdown(options=names, value=names[0], description="tokenizer")
    out = ipywidgets.HTML(value=token_html(first, text), layout=wide)

    @one_at_a_time
    def show(_) -> None:
        out.value = token_html(tokenizers[choice.value], area.value)

    area.observe(show, names="value")
    choice.observe(show, names="value")
    return Interactive(ipywidgets.VBox([area, choice, out]), token_picture(names[0], text, tokens_of(first, text)))
