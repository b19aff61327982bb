"""Byte pair encoding by hand: learn a vocabulary from text, turn text into its ids, and ids back into text.

Sennrich et al. 2016 (arXiv:1508.07909) on characters; on bytes, and cut by a pattern first, since GPT-2 (2019).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import regex

from .tokenizer import GPT2_PATTERN

Pair = tuple[int, int]


def pre_split(text: str, pattern: str = GPT2_PATTERN) -> list[str]:
    """Cut text into pieces: a word with the space before it, a number, other signs, spaces. Joined, they are the text.

    Merging never crosses a cut, so no token is the end of one word and the start of the next.
    """
    return [match[0] for match in regex.finditer(pattern, text)]


def count_pairs(ids: Sequence[int]) -> Counter[Pair]:
    """How often each pair of neighbours occurs: [97, 97, 97] -> {(97, 97): 2}."""
    return Counter(zip(ids, ids[1:]))


def merge(ids: Sequence[int], pair: Pair, new_id: int) -> list[int]:
    """Replace each occurrence of the pair by the new id, from left to right: [97, 97, 97] -> [256, 97]."""
    merged, i = [], 0
    while i < len(ids):
        if ids[i] == pair[0] and i + 1 < len(ids) and ids[i + 1] == pair[1]:
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


class BPETokenizer:
    """A byte-level BPE vocabulary: the 256 bytes and the merges learned on top of them.

    `merges`: pair of ids -> the id of the token that it becomes, in the order in which they were learned; ids ascend.
    `byte_ids[byte]`: the id of each single byte. Bytes are their own ids unless you say otherwise, as GPT-2 does.
    `tokens`: id -> its bytes. There are no special tokens here: the text `<|endoftext|>` is text like any other.

    Raises ValueError for a merge of ids that are not there yet, or whose own id is not above all before it.
    """

    def __init__(self, merges: dict[Pair, int], byte_ids: Sequence[int] = range(256), pattern: str = GPT2_PATTERN):
        self.merges, self.byte_ids, self.pattern = dict(merges), list(byte_ids), pattern
        if len(set(self.byte_ids)) != 256:
            raise ValueError(f"byte_ids gives each of the 256 bytes an id of its own, not {len(set(self.byte_ids))} ids")
        self.tokens = {token: bytes([byte]) for byte, token in enumerate(self.byte_ids)}
        last = max(self.byte_ids)
        for (left, right), new_id in self.merges.items():
            if left not in self.tokens or right not in self.tokens or new_id <= last:
                raise ValueError(f"merge {(left, right)} -> {new_id}: both parts must come before it, and ids must ascend")
            self.tokens[new_id] = self.tokens[left] + self.tokens[right]
            last = new_id

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @classmethod
    def train(cls, text: str, vocab_size: int = 512, pattern: str = GPT2_PATTERN) -> BPETokenizer:
        """Merge the most frequent pair of neighbours into a new token, again and again, up to `vocab_size` tokens.

        Of equally frequent pairs the one with the smallest ids is merged first (compared left id, then right id), as
        in Hugging Face's BpeTrainer: the result depends on how often each piece occurs, not on where it stands.
        Training stops early when every piece has become one token; an empty text gives the 256 bytes and no merges.
        Raises ValueError for a `vocab_size` below 256.
        """
        if vocab_size < 256:
            raise ValueError(f"vocab_size must be at least 256, one token for each byte, not {vocab_size}")
        pieces = Counter(pre_split(text, pattern))  # a word that occurs 5000 times is merged once and counted 5000 times
        words, word_counts = [list(piece.encode()) for piece in pieces], list(pieces.values())
        pair_counts: Counter[Pair] = Counter()
        words_with: dict[Pair, set[int]] = defaultdict(set)

        def count(word: int, sign: int) -> None:
            for pair in zip(words[word], words[word][1:]):
                pair_counts[pair] += sign * word_counts[word]
                if sign > 0:
                    words_with[pair].add(word)

        for word in range(len(words)):
            count(word, +1)
        queue = [(-n, pair) for pair, n in pair_counts.items()]  # a heap: smallest first, so most frequent, then lowest ids
        heapify(queue)
        merges: dict[Pair, int] = {}
        while queue and 256 + len(merges) < vocab_size:
            n, pair = heappop(queue)
            if -n != pair_counts[pair]:  # other merges took some of its occurrences since it was queued
                if pair_counts[pair]:
                    heappush(queue, (-pair_counts[pair], pair))
                continue
            merges[pair] = new_id = 256 + len(merges)
            new_pairs: set[Pair] = set()
            for word in words_with.pop(pair):
                count(word, -1)
                words[word] = merge(words[word], pair, new_id)
                count(word, +1)
                new_pairs.update(pair for pair in zip(words[word], words[word][1:]) if new_id in pair)
            for pair in new_pairs:  # all others can only have become rarer
                heappush(queue, (-pair_counts[pair], pair))
        return cls(merges, pattern=pattern)

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int], pattern: str = GPT2_PATTERN) -> BPETokenizer:
        """A vocabulary that others have trained, as tiktoken stores it: the bytes of each token -> its id.

        It does not say which pair a token was merged from. But a lower id was merged first, so the two parts are what
        the lower ids make of its bytes. Raises ValueError where that is not exactly two, or a single byte is missing.
        """
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"the ranks lack the single bytes {bytes(missing).hex(' ')}")
        tokenizer = cls({}, [ranks[bytes([byte])] for byte in range(256)], pattern)
        for token, new_id in sorted(ranks.items(), key=lambda item: item[1]):
            if len(token) > 1:
                parts = tokenizer._merge_piece(token)
                if len(parts) != 2:
                    raise ValueError(f"token {new_id} {token!r} is not a merge of two earlier tokens, but {parts}")
                tokenizer.merges[parts[0], parts[1]] = new_id
        return cls(tokenizer.merges, tokenizer.byte_ids, pattern)

    def encode(self, text: str) -> list[int]:
        """Text -> ids; the empty text gives []. Raises ValueError for half of a surrogate pair, which is not text."""
        ids: list[int] = []
        known: dict[str, list[int]] = {}  # text repeats its words
        for piece in pre_split(text, self.pattern):
            if piece not in known:
                known[piece] = self._merge_piece(piece.encode())
            ids += known[piece]
        return ids

    def _merge_piece(self, piece: bytes) -> list[int]:
        """The ids of one piece: of all pairs that can be merged, the one learned first, and of those the leftmost.

        Looking through the piece again after each merge would take n² steps for n bytes. Here a queue holds the pairs
        that can be merged, and each id knows its living neighbours: n log n steps, even for a million equal letters.
        """
        ids: list[int | None] = [self.byte_ids[byte] for byte in piece]  # None: merged into the id on its left
        before, after = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
        queue = [(self.merges[pair], left) for left, pair in enumerate(zip(ids, ids[1:])) if pair in self.merges]
        heapify(queue)
        while queue:
            new_id, left = heappop(queue)
            right = after[left]
            if right == len(ids) or self.merges.get((ids[left], ids[right])) != new_id:
                continue  # one of the two has been merged with its other neighbour since
            ids[left], ids[right] = new_id, None
            after[left] = after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first >= 0 and second < len(ids) and (new := self.merges.get((ids[first], ids[second]))) is not None:
                    heappush(queue, (new, first))
        return [token for token in ids if token is not None]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id that is not in `tokens`."""
        return b"".join(map(self.decode_single_token_bytes, ids)).decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes only a part of a character."""
        try:
            return self.tokens[int(token)]
        except KeyError:
            raise ValueError(f"id {token} is not in this vocabulary of {self.vocab} tokens") from None
