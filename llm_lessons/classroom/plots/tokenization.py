"""Lesson 01: a text cut into tokens, what tokens cost in several languages, and which words are one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ..style import Picture, drawable, label_axes, picture

# Tokenizers have no colour of their own in this course: three greys, in the order in which they are given.
GREYS = ["#4D4D4D", "#969696", "#D4D4D4"]
BYTES_AT_DARKEST = 8
COLUMNS = 108  # characters of the widest line in `token_picture`


@dataclass(frozen=True)
class Token:
    """One token of a text: its id, its bytes, and what can be shown for them."""

    id: int
    data: bytes

    @property
    def whole(self) -> bool:
        """False for a token that holds only a part of a character."""
        try:
            self.data.decode()
        except UnicodeDecodeError:
            return False
        return True

    @property
    def label(self) -> str:
        """The text, with spaces and invisible characters made visible; nothing but "part" for a part of a character."""
        if not self.whole:
            return "part"
        signs = {" ": "·", "\n": "⏎", "\t": "⇥"}
        return "".join(signs.get(c) or (c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in self.data.decode())

    @property
    def hex(self) -> str:
        """The bytes as hexadecimal numbers; of a long token the first twelve."""
        return self.data[:12].hex(" ").upper() + (f" … {len(self.data)} bytes" if len(self.data) > 12 else "")

    @property
    def shade(self) -> str:
        """The more bytes a token covers, the darker; light enough for black text on it."""
        return to_hex(colormaps["Purples"](0.05 + 0.4 * min(len(self.data), BYTES_AT_DARKEST) / BYTES_AT_DARKEST))


def tokens_of(tokenizer, text: str) -> list[Token]:
    """The tokens of a text. `tokenizer`: the model's, a BPETokenizer, or one of tiktoken's encodings.

    Raises the tokenizer's own ValueError for a character it cannot express.
    """
    encode = getattr(tokenizer, "encode_ordinary", tokenizer.encode)
    return [Token(token, tokenizer.decode_single_token_bytes(token)) for token in encode(text)]


def in_words(tokens: Sequence[Token], text: str) -> str:
    """The costs of a text: tokens, characters, bytes."""
    size = len(text.encode(errors="replace"))
    ratio = f", {len(tokens) / len(text):.2f} tokens per character" if text else ""
    return f"{_count(len(tokens), 'token')} for {_count(len(text), 'character')} ({_count(size, 'byte')}){ratio}"


def token_picture(name: str, text: str, tokens: Sequence[Token], most: int = 120) -> Picture:
    """A text cut into tokens: under each its id and its bytes. Of a long text the first `most` tokens."""
    boxes, row, column = [], 0, 0
    for token in tokens[:most]:
        label = drawable(token.label)[:COLUMNS - 2]
        width = max(len(label), len(str(token.id)) * 0.8, len(token.hex) * 0.62) + 1.4  # the sizes of the three lines
        if column and column + width > COLUMNS - 0.5:
            row, column = row + 1, 0
        boxes.append((row, column, width, label, token))
        column += width + 0.5
    cost = in_words(tokens, text)
    shown = " | ".join(token.label if token.whole else token.hex for token in tokens[:most])
    more = f"; the first {most} shown" if len(tokens) > most else ""
    with picture(f"{name}: {cost}{more}. {shown}", height=0.75 + 0.62 * (row + 1)) as (figure, axes):
        axes.set(xlim=(0, COLUMNS), ylim=(row + 1, 0))
        axes.set_axis_off()
        axes.set_title(f"{drawable(name)}: {cost}{more}")
        for row, column, width, label, token in boxes:
            box = (column, row + 0.04), width, 0.9
            axes.add_patch(Rectangle(*box, facecolor=token.shade, edgecolor="#888888", linewidth=0.8))
            middle = column + width / 2
            slant = "normal" if token.whole else "italic"
            for y, words, size, style in ((0.26, label, 10, slant), (0.54, token.id, 8, "normal"),
                                          (0.78, token.hex, 6.2, "normal")):
                axes.text(middle, row + y, words, ha="center", va="center", fontfamily="monospace", fontsize=size,
                          style=style)
    return figure


def tokens_per_character(costs: Mapping[str, Mapping[str, float]], bytes_per_character: Mapping[str, float]) -> Picture:
    """What a character costs: tokenizer -> text -> tokens per character; and the bytes, the most it can cost."""
    texts = list(bytes_per_character)
    alt = ". ".join(f"{text}: " + ", ".join(f"{name} {cost[text]:.2f}" for name, cost in costs.items())
                    for text in texts) + " tokens per character"
    thick = 0.8 / len(costs)
    with picture(alt, height=0.7 + 0.52 * len(texts)) as (figure, axes):
        for n, ((name, cost), grey) in enumerate(zip(costs.items(), GREYS)):
            bars = axes.barh([y - 0.4 + (n + 0.5) * thick for y in range(len(texts))], [cost[text] for text in texts],
                             thick, color=grey, label=name)
            axes.bar_label(bars, [f" {cost[text]:.2f}" for text in texts], fontsize=8)
        for y, text in enumerate(texts):
            axes.vlines(bytes_per_character[text], y - 0.45, y + 0.45, color="black", linewidth=1.5,
                        label="" if y else "bytes: no merges at all")
        axes.set_yticks(range(len(texts)), texts)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.1 * max(bytes_per_character.values()))
        axes.legend(loc="upper right")
        label_axes(axes, "tokens per character (Unicode code point)", "", "What a character costs")
    return figure


def one_token_words(shares: Mapping[str, Sequence[float]], bands: Sequence[str], words: Sequence[int]) -> Picture:
    """Tokenizer -> for each band of frequency, the share of its words that are one token; `words`: how many it has."""
    alt = ". ".join(f"{name}: " + ", ".join(f"{share:.0%} of those that occur {band} ×"
                                            for band, share in zip(bands, part)) for name, part in shares.items())
    with picture(f"Words that are one token. {alt}", height=3.6) as (figure, axes):
        for (name, part), grey, marker in zip(shares.items(), GREYS, "osD"):
            axes.plot(range(len(bands)), [100 * share for share in part], color=grey, marker=marker, linewidth=2,
                      markersize=7, label=name, markeredgecolor="#4D4D4D")
        axes.set_xticks(range(len(bands)), [f"{band}\n({n} words)" for band, n in zip(bands, words)])
        axes.set_ylim(-4, 104)
        axes.legend(loc="center left")
        label_axes(axes, "how often the word occurs in the course's prose", "one token (% of the words)",
                   "Which words are one token?")
    return figure


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")
