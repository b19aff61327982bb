"""Text to token ids and back: the model's own vocabulary, chat turns, and text that streams without broken characters.

A token is a run of bytes. Byte pair encoding (BPE) cuts text into pieces by a pattern, then merges neighbouring bytes
inside each piece, most frequent pair of the training text first. `tiktoken` does the merging.
"""

from __future__ import annotations

import codecs
import operator
import re
from collections.abc import Collection, Iterable, Iterator

import tiktoken
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# How text is cut before merging. GPT-2: a word with the space before it, a number, other signs, spaces.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2: the same, except that every digit stands alone, and a run of spaces before a digit stays whole.
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
LONGEST_BLANK = 900_000  # near a million spaces in a row tiktoken runs out of stack: no `Exception`, a panic


def byte_characters() -> dict[str, int]:
    """The printable character that GPT-2's files write for each byte -> the byte.

    Bytes that are printable stand for themselves; the other 68 are numbered from U+0100 on (GPT-2's `encoder.py`).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens and its chat template.

    `ranks`: the bytes of each ordinary token -> its id; a lower id is merged first. `special_tokens`: text -> id; they
    are recognised in the chat template and where you ask for it, never in ordinary text. `template_names`: what the
    chat template may call by name, such as {"bos_token": "<s>"}.
    """

    def __init__(self, ranks: dict[bytes, int], special_tokens: dict[str, int], pattern: str = GPT2_PATTERN,
                 chat_template: str | None = None, stop_ids: Collection[int] = (), bos_id: int | None = None,
                 template_names: dict[str, str] | None = None):
        self.encoding = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens=special_tokens)
        self.special_tokens, self.stop_ids, self.bos_id = dict(special_tokens), frozenset(stop_ids), bos_id
        self.vocab = self.encoding.n_vocab
        self._chat_template, self._template_names = chat_template, template_names or {}
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        special = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)"
        self._special, self._special_start = re.compile(special), re.compile(f"(?={special}).", re.DOTALL)
        # Halves of surrogate pairs, which occur in no text: they take the place of a special token's first character.
        self._stand_in = {c: chr(0xD800 + n) for n, c in enumerate(sorted({text[0] for text in special_tokens}))}

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Text -> ids. The text of a special token is ordinary text, unless `allow_special` says otherwise.

        Raises ValueError, naming it, for a character that the vocabulary has no bytes for.
        """
        self._check(text)
        ids = [] if self.bos_id is None else [self.bos_id]
        return ids + (self._encode_marked(text) if allow_special else self.encoding.encode_ordinary(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        if not isinstance(ids, Iterable):
            raise ValueError(f"decode takes a list of ids, not {ids!r}: decode([5]) for a single one")
        return b"".join(map(self.decode_single_token_bytes, ids)).decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes only a part of a character."""
        try:
            return self.encoding.decode_single_token_bytes(operator.index(token))
        except (KeyError, OverflowError, TypeError):
            raise ValueError(f"id {token} is not in this vocabulary of {self.vocab} tokens") from None

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation as the model was trained to see it, up to where its answer begins -> ids.

        `messages`: [{"role": "user", "content": "…"}, …]; roles are system, user and assistant. Whatever the contents
        say, they can neither open nor close a turn: only the template's own special tokens become control ids.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template: use encode(text), or load an instruction-tuned model")
        if isinstance(messages, str | dict):
            raise ValueError("chat takes a list of messages: [{'role': 'user', 'content': 'Hello'}]")
        messages = [self._checked(message) for message in messages]
        if not messages:
            raise ValueError("a chat needs at least one message, such as {'role': 'user', 'content': 'Hello'}")
        for message in messages:  # until the template is rendered and cut, no content holds a special token's text
            message["content"] = self._special_start.sub(lambda m: self._stand_in[m[0]], message["content"])
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse_chat
        try:
            rendered = environment.from_string(self._chat_template).render(
                messages=messages, add_generation_prompt=True, **self._template_names)
        except TemplateError as error:
            raise ValueError(f"this model's chat template cannot be rendered: {error}") from error
        return self._encode_marked(rendered)

    def _checked(self, message: dict[str, str]) -> dict[str, str]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message is {{'role': …, 'content': text}}, not {message!r}")
        if message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"the role of a message is system, user or assistant, not {message.get('role')!r}")
        self._check(message["content"])
        return {"role": message["role"], "content": message["content"]}

    def _encode_marked(self, text: str) -> list[int]:
        """Ids with special tokens recognised, then every stand-in put back to the character it stands for."""
        ids, start, original = [], 0, {ord(stand_in): c for c, stand_in in self._stand_in.items()}
        for match in self._special.finditer(text):
            ids += self.encoding.encode_ordinary(text[start : match.start()].translate(original))
            ids.append(self.special_tokens[match[0]])
            start = match.end()
        return ids + self.encoding.encode_ordinary(text[start:].translate(original))

    def _check(self, text: str) -> None:
        """Refuse, with a ValueError, what tiktoken would drop, replace or break down on."""
        try:
            missing = set(text.encode()).intersection(self._missing)
        except AttributeError:
            hint = ": decode bytes first" if isinstance(text, bytes) else ""
            raise ValueError(f"text must be a str, not {type(text).__name__}{hint}") from None
        except UnicodeEncodeError as error:
            raise ValueError(f"character {text[error.start]!r} at position {error.start} is half of a surrogate pair, "
                             f"not text: decode the input properly first") from None
        if missing:
            position, character = next((i, c) for i, c in enumerate(text) if missing.intersection(c.encode()))
            raise ValueError(f"character {character!r} (U+{ord(character):04X}) at position {position} cannot be "
                             f"expressed: this vocabulary lacks one of its bytes, {character.encode().hex(' ')}. "
                             f"Remove it")
        if len(text) > LONGEST_BLANK and max(map(len, re.findall(r"\s+", text)), default=0) > LONGEST_BLANK:
            raise ValueError(f"more than {LONGEST_BLANK:,} spaces or line ends in a row cannot be encoded: remove some")


def _refuse_chat(message: str) -> None:
    """What a chat template calls when it cannot render a conversation."""
    raise ValueError(f"the model's chat template refuses this conversation: {message}")


def stream_text(tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as the ids arrive: one piece for each id, empty while a character is still incomplete.

    The pieces joined are `decode(ids)`, always: an incomplete character at the very end comes as one more piece,
    U+FFFD. Bytes that can never become a character are given as U+FFFD at once. `tokenizer` is anything that has
    `decode_single_token_bytes(id)`: the model's tokenizer, or one of tiktoken's own encodings.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    if rest := decoder.decode(b"", final=True):
        yield rest
