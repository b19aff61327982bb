"""Lesson 03: the attention explorer. Choose one of all heads, then a token: where does it look, and who looks at it?"""

from __future__ import annotations

from pathlib import Path

import anywidget
import torch
import torch.nn.functional as F
import traitlets
from torch import Tensor

from ...model import Model
from ...trace import Trace, trace
from ..plots.attention import explorer_view
from .core import Interactive, readable

MOST_TOKENS = 200  # a map has T x T weights: beyond this neither the picture nor a label could be read
THUMBNAIL = 24  # pixels


class AttentionExplorer(anywidget.AnyWidget):
    """The maps of every head as thumbnails, sent once; the full maps of one layer, sent when it is chosen.

    Everything that the browser draws travels as bytes. It sets `layer`, `head` and `token`; the answer to a new layer
    is `maps`, [heads, T, T] weights of 0 to 255 in one piece, together with `maps_layer`, which says whose they are.
    """

    _esm = Path(__file__).with_suffix(".js")
    _css = Path(__file__).with_suffix(".css")

    tokens = traitlets.List(traitlets.Unicode()).tag(sync=True)
    layers = traitlets.Int().tag(sync=True)
    heads = traitlets.Int().tag(sync=True)
    thumbnails = traitlets.Bytes().tag(sync=True)  # [layers, heads, n, n], n = thumbnail_size
    thumbnail_size = traitlets.Int().tag(sync=True)
    maps = traitlets.Bytes().tag(sync=True)
    maps_layer = traitlets.Int().tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    head = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(0).tag(sync=True)

    def __init__(self, seen: Trace, tokens: list[str], layer: int = 0, head: int = 0, token: int = 0):
        self._seen = seen
        maps = torch.stack([thumbnails(seen.attention(number)) for number in range(len(seen.hidden) - 1)])
        layers, heads, size, _ = maps.shape
        super().__init__(tokens=tokens, layers=layers, heads=heads, thumbnails=maps.numpy().tobytes(),
                         thumbnail_size=size, layer=layer, head=head, token=token,
                         maps=self._bytes_of(layer), maps_layer=layer)

    def __repr__(self) -> str:
        return f"AttentionExplorer: layer {self.layer}, head {self.head}, {len(self.tokens)} tokens"

    @traitlets.observe("layer")
    def _send_maps(self, change) -> None:
        if self.layer != self.maps_layer:
            with self.hold_sync():  # both in one message: the browser never sees one layer's maps under another's name
                self.maps, self.maps_layer = self._bytes_of(self.layer), self.layer

    @traitlets.validate("layer", "head", "token")
    def _in_range(self, proposal) -> int:
        name, value = proposal["trait"].name, proposal["value"]
        count = {"layer": self.layers, "head": self.heads, "token": len(self.tokens)}[name]
        if not 0 <= value < count:
            raise traitlets.TraitError(f"there is no {name} {value}: choose 0 to {count - 1}")
        return value

    def _bytes_of(self, layer: int) -> bytes:
        return as_bytes(self._seen.attention(layer)).numpy().tobytes()


class Explorer(Interactive):
    """The widget and its twin. Colab, besides, must be told where to find the code for widgets of this kind."""

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        return super()._repr_mimebundle_(), self.widget._repr_mimebundle_()[1]


def as_bytes(weights: Tensor) -> Tensor:
    """Numbers from 0 to 1 -> whole numbers from 0 to 255 in one byte each."""
    return (weights.float().cpu() * 255).round().to(torch.uint8)


def thumbnails(weights: Tensor) -> Tensor:
    """Maps [heads, T, T] -> [heads, n, n] bytes, n at most 24: square roots, so that weak lines are seen.

    A pixel shows the largest weight it stands for: a mean would wipe out a line that is one token wide.
    """
    size = min(THUMBNAIL, weights.shape[-1])
    return as_bytes(F.adaptive_max_pool2d(weights.float().sqrt(), size))


def token_label(piece: bytes) -> str:
    """A token as the explorer writes it: its text, or its bytes if they are not whole characters."""
    try:
        return readable(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return f"⟨{piece.hex(' ').upper()}⟩"


def attention_explorer(model: Model, tokenizer, text: str, layer: int = 0, head: int = 0,
                       token: int | None = None) -> Interactive:
    """Explore what every head of `model` does with `text` (1 to 200 tokens), from the head and token (last) given."""
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the text is empty: the explorer needs at least one token")
    if len(ids) > MOST_TOKENS:
        raise ValueError(f"the text has {len(ids)} tokens, and the explorer shows at most {MOST_TOKENS}: pass a "
                         f"shorter text, such as tokenizer.decode(tokenizer.encode(text)[:{MOST_TOKENS}])")
    token = len(ids) - 1 if token is None else token
    for name, value, count in (("layer", layer, model.config.layers), ("head", head, model.config.heads),
                               ("token", token, len(ids))):
        if not 0 <= value < count:
            raise ValueError(f"there is no {name} {value}: choose 0 to {count - 1}")
    seen = trace(model, ids)
    labels = [token_label(tokenizer.decode_single_token_bytes(i)) for i in ids]
    widget = AttentionExplorer(seen, labels, layer, head, token)
    small = torch.frombuffer(bytearray(widget.thumbnails), dtype=torch.uint8)
    small = small.reshape(widget.layers, widget.heads, widget.thumbnail_size, widget.thumbnail_size)
    return Explorer(widget, explorer_view(small, seen.attention(layer)[head].cpu(), labels, layer, head, token))
