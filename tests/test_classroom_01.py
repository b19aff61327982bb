"""Lesson 01: the token explorer and its pictures, whatever is typed; and the checks on other right ways of writing."""

import codecs
import html.parser
import re
from collections import Counter, defaultdict

import ipywidgets
import pytest
import tiktoken

import llm_lessons as ll
from llm_lessons import BPETokenizer, Tokenizer
from llm_lessons.bpe import merge
from llm_lessons.classroom import check, plots, widgets
from llm_lessons.classroom.plots import tokenization
from llm_lessons.classroom.widgets.token_explorer import MOST_CHARACTERS, token_html
from llm_lessons.tokenizer import GPT2_PATTERN

PNG = b"\x89PNG\r\n"
BYTES = {bytes([byte]): byte for byte in range(256)}
END = "<|endoftext|>"
WORDS = BPETokenizer.train("the token is the token of the tokens", 275)
LACKING = Tokenizer({token: i for i, token in enumerate(token for token in BYTES if token != b"\xf1")}, {})
TIKTOKEN = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=BYTES, special_tokens={END: 256})
TOKENIZERS = {"words": WORDS, "bytes": Tokenizer(BYTES, {END: 256}), "no F1": LACKING, "tiktoken": TIKTOKEN}
HOSTILE = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><b>', "&amp; & 'x' \"y\"", "</span></div>",
           END, "שלום עולם", "\u202eabc\u2066", "🦙 👨\u200d👩\u200d👧", "a\0b\x1b[31m", "$x_1$ \\frac", "\r\n\t "]


class Reader(html.parser.HTMLParser):
    """What a browser makes of HTML: the tags, the attributes, and the text."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.text = [], set(), []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text.append(data)


def explorer(text="the token", tokenizers=TOKENIZERS):
    shown = widgets.token_explorer(text, tokenizers)
    area, choice, out = shown.widget.children
    return shown, area, choice, out


def test_tokens_of_any_tokenizer_are_those_it_encodes():
    ids = WORDS.encode("the token")
    assert [token.id for token in plots.tokens_of(WORDS, "the token")] == ids
    assert b"".join(token.data for token in plots.tokens_of(WORDS, "the 🦙")).decode() == "the 🦙"
    special = [token.id for token in plots.tokens_of(TOKENIZERS["tiktoken"], END)]
    assert special == list(END.encode()), "the text of a special token is text"


def test_labels_show_what_is_there():
    label = [token.label for token in plots.tokens_of(TOKENIZERS["bytes"], " \n\ta<\x1b")]
    assert label == ["·", "⏎", "⇥", "a", "<", "⟨U+001B⟩"]
    parts = plots.tokens_of(TOKENIZERS["bytes"], "é")
    assert [(token.label, token.whole, token.hex) for token in parts] == [("part", False, "C3"), ("part", False, "A9")]
    assert tokenization.Token(1, "🦙\u200d".encode()).label == "🦙⟨U+200D⟩"
    assert tokenization.Token(1, b" " * 40).hex == " ".join(["20"] * 12) + " … 40 bytes"


def test_a_token_of_more_bytes_is_darker():
    def lightness(n):
        return sum(int(tokenization.Token(0, b"a" * n).shade[i:i + 2], 16) for i in (1, 3, 5))

    assert lightness(1) > lightness(2) > lightness(8) == lightness(99) > 3 * 150  # black text stays readable


def test_typing_and_choosing_change_what_is_shown():
    _, area, choice, out = explorer()
    assert isinstance(area, ipywidgets.Textarea) and isinstance(choice, ipywidgets.Dropdown)
    assert "2 tokens for 9 characters (9 bytes)" in out.value
    area.value = "the token of"
    assert "3 tokens for 12 characters (12 bytes), 0.25 tokens per character" in out.value
    assert f">{WORDS.encode(' of')[0]}<" in out.value
    choice.value = "bytes"
    assert "12 tokens for 12 characters" in out.value
    area.value = ""
    assert "0 tokens for 0 characters (0 bytes)." in out.value
    area.value = "é"
    assert "2 tokens for 1 character (2 bytes), 2.00 tokens per character" in out.value


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["words", "bytes", "tiktoken"])
def test_whatever_is_typed_is_shown_as_text(text, name):
    _, area, choice, out = explorer()
    choice.value, area.value = name, text
    read = Reader(out.value)
    assert set(read.tags) <= {"p", "b", "div", "span", "bdi", "br"}
    assert read.attributes <= {"style", "role"}
    assert read.tags.count("bdi") == len(plots.tokens_of(TOKENIZERS[name], text))


def test_the_text_in_the_boxes_is_the_text_that_was_typed():
    text = "<script>alert('&lt;')</script> & \"q\""
    boxes = re.findall(r"<bdi[^>]*>(.*?)</bdi>", token_html(TOKENIZERS["bytes"], text))
    assert "".join(map(html.unescape, boxes)).replace("·", " ") == text


def test_a_character_that_cannot_be_expressed_is_named_and_does_no_harm():
    _, area, choice, out = explorer()
    choice.value = "no F1"
    area.value = "<b>\U00040000"
    assert "cannot be encoded" in out.value and "U+40000" in out.value
    assert set(Reader(out.value).tags) == {"p", "b"} and out.value.count("<b>") == 1
    area.value = "fine again"
    assert "10 tokens" in out.value
    choice.value, area.value = "words", "half a pair: \ud83d"
    assert "cannot be encoded" in out.value


def test_a_long_text_is_cut_and_says_so():
    source = token_html(TOKENIZERS["bytes"], "a" * (MOST_CHARACTERS + 1))
    assert "Only the first 2,000 characters are shown" in source
    assert source.count("<bdi") == MOST_CHARACTERS


def test_the_static_twin_shows_the_starting_state():
    shown, _, _, out = explorer("the 🦙")
    assert repr(shown).startswith("Interactive: words: 6 tokens for 5 characters (8 bytes)")
    assert all(str(token.id) in [text.get_text() for text in shown.twin.axes[0].texts]
               for token in plots.tokens_of(WORDS, "the 🦙"))
    assert "6 tokens for 5 characters (8 bytes)" in shown.twin.axes[0].get_title(loc="left")
    assert "6 tokens for 5 characters (8 bytes)" in out.value
    assert shown.twin.png().startswith(PNG)


def test_an_explorer_without_a_tokenizer_says_what_is_missing():
    with pytest.raises(ValueError, match="at least one tokenizer"):
        widgets.token_explorer("a", {})


@pytest.mark.parametrize("text", [*HOSTILE, "", "你好" * 200, "x" * 3000])
def test_any_text_can_be_drawn_inside_the_picture(text, recwarn):
    shown = plots.token_picture("bytes", text, plots.tokens_of(TOKENIZERS["bytes"], text))
    assert shown.png().startswith(PNG)
    assert not recwarn.list
    for box in shown.axes[0].patches:
        assert 0 <= box.get_x() and box.get_x() + box.get_width() <= tokenization.COLUMNS


def test_a_long_token_stays_inside_the_picture():
    token = tokenization.Token(1, b"a" * 500)
    box = plots.token_picture("x", "a" * 500, [token]).axes[0].patches[0]
    assert box.get_width() <= tokenization.COLUMNS


def test_bars_are_as_long_as_the_costs():
    costs = {"yours": {"English": 0.5, "Chinese": 3.0}, "GPT-2": {"English": 0.2, "Chinese": 1.9}}
    shown = plots.tokens_per_character(costs, {"English": 1.0, "Chinese": 3.0})
    axes = shown.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.5, 3.0, 0.2, 1.9]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["English", "Chinese"]
    assert "tokens per character" in axes.get_xlabel() and "Chinese: yours 3.00, GPT-2 1.90" in repr(shown)
    assert shown.png().startswith(PNG)


def test_lines_go_through_the_shares():
    shown = plots.one_token_words({"yours": [0, 0.13, 1]}, ["1", "2–3", "4 or more"], [700, 40, 5])
    axes = shown.axes[0]
    assert list(axes.lines[0].get_ydata()) == [0, 13, 100]
    assert "(%" in axes.get_ylabel() and "700 words" in axes.get_xticklabels()[0].get_text()
    assert "13% of those that occur 2–3 ×" in repr(shown)


def counts_by_index(ids):
    counts = defaultdict(int)
    for i in range(1, len(ids)):
        counts[ids[i - 1], ids[i]] += 1
    return counts


def merges_with_a_stack(ids, pair, new_id):
    merged = []
    for token in ids:
        merged.append(token)
        if tuple(merged[-2:]) == tuple(pair):
            merged[-2:] = [new_id]
    return merged


def encodes_all_merges(ids, merges):
    for pair, new_id in merges.items():
        ids = merge(ids, pair, new_id)
    return ids


def encodes_one_place_at_a_time(ids, merges):
    ids = list(ids)
    while True:
        known = [(merges[pair], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in merges]
        if not known:
            return tuple(ids)
        new_id, i = min(known)
        ids[i:i + 2] = [new_id]


def streams_by_the_bytes(tokens):
    decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in tokens:
        pieces.append("".join(decoder.decode(bytes([byte])) for byte in token))
    return pieces + [decoder.decode(b"", True)]


def streams_by_the_error(tokens):
    """Without codecs: Python's own error says where a character is broken, and whether more bytes could mend it."""
    rest = b""
    for token in tokens:
        rest, text = rest + token, ""
        while rest:
            try:
                text, rest = text + rest.decode(), b""
            except UnicodeDecodeError as error:
                text, rest = text + rest[:error.start].decode(), rest[error.start:]
                if error.end - error.start == len(rest) and "unexpected end" in error.reason:
                    break
                text, rest = text + "\ufffd", rest[error.end - error.start:]
        if text:
            yield text
    if rest:
        yield "\ufffd"


@pytest.mark.parametrize(("name", "fn"), [
    ("count_pairs", counts_by_index), ("count_pairs", lambda ids: Counter(zip(ids, ids[1:]))),
    ("merge_pair", merges_with_a_stack), ("merge_pair", merge), ("bpe_encode", encodes_all_merges),
    ("bpe_encode", encodes_one_place_at_a_time), ("stream_pieces", streams_by_the_bytes),
    ("stream_pieces", streams_by_the_error),
    ("stream_pieces", lambda tokens: [piece for piece in streams_by_the_bytes(tokens) if piece])])
def test_the_checks_accept_other_right_ways_of_writing(name, fn, capsys):
    getattr(check, name)(fn)
    assert capsys.readouterr().out == "passed\n"


def test_a_generator_that_is_a_stub_is_not_done_yet(capsys):
    def stub(tokens):
        raise NotImplementedError
        yield

    check.stream_pieces(stub)
    assert capsys.readouterr().out == "not done yet\n"


def test_the_page_of_the_check_needs_no_other_merges_than_those_it_is_given():
    from llm_lessons.classroom.checks.tokenization import PAGE, gpt2_page

    pieces, merges, byte_ids = gpt2_page()
    assert 300 < len(merges) < 1000
    assert "".join(sorted(pieces)) and all(piece in PAGE for piece in pieces)
    few = BPETokenizer(merges, byte_ids)
    assert few.encode(PAGE) == ll.gpt2_tokenizer().encode_ordinary(PAGE)
