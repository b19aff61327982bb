"""Byte pair encoding by hand: learn a vocabulary from text, turn text into its ids, and ids back into text.

Sennrich et al. 2016 (arXiv:1508.07909) did it on characters; GPT-2 (2019) on bytes, in pieces cut by a pattern.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import regex

from .tokenizer import GPT2_PATTERN

Pair = tuple[int, int]
GONE = -1  # stands where an id was merged into the one on its left, and after the end of a piece; in no pair


def pre_split(text: str, pattern: str = GPT2_PATTERN) -> list[str]:
    """Cut text into pieces: a word with the space before it, a number, other signs, spaces. Joined, they are the text.

    Merging never crosses a cut, so no token is the end of one word and the start of the next.
    """
    pieces = [match[0] for match in regex.finditer(pattern, text)]
    if sum(map(len, pieces)) != len(text):
        raise ValueError(f"the pattern {pattern!r} leaves out parts of the text: it must match every character")
    return pieces


def count_pairs(ids: Sequence[int]) -> Counter[Pair]:
    """How often each pair of neighbours occurs: [97, 97, 97] -> {(97, 97): 2}."""
    return Counter(zip(ids, ids[1:]))


def merge(ids: Sequence[int], pair: Pair, new_id: int) -> list[int]:
    """Replace each occurrence of the pair by the new id, from left to right: [97, 97, 97] -> [256, 97].

    BPE in its plain form is `count_pairs` and `merge` in a loop. `BPETokenizer` gives the same, without going through
    the whole text again after each merge.
    """
    merged, i = [], 0
    while i < len(ids):
        found = i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair
        merged.append(new_id if found else ids[i])
        i += 2 if found else 1
    return merged


class BPETokenizer:
    """A byte-level BPE vocabulary: the 256 bytes, and the merges learned on top of them.

    `merges`: pair of ids -> the id of the token that it becomes, in the order in which they were learned; ids ascend.
    `byte_ids[byte]`: the id of each single byte. Bytes are their own ids unless you say otherwise, as GPT-2 does.
    `tokens`: id -> its bytes. There are no special tokens here: the text `<|endoftext|>` is text like any other.

    Raises ValueError for a merge of ids that are not there yet, or whose own id is not above all before it.
    """

    def __init__(self, merges: dict[Pair, int], byte_ids: Sequence[int] = range(256), pattern: str = GPT2_PATTERN):
        self.merges, self.byte_ids, self.pattern = dict(merges), list(byte_ids), pattern
        if len(self.byte_ids) != 256 or len(set(self.byte_ids)) != 256 or min(self.byte_ids) < 0:
            raise ValueError("byte_ids must give each of the 256 bytes an id of its own, 0 or more")
        self.tokens = {token: bytes([byte]) for byte, token in enumerate(self.byte_ids)}
        last = max(self.byte_ids)
        for (left, right), new_id in self.merges.items():
            if left not in self.tokens or right not in self.tokens or new_id <= last:
                raise ValueError(f"merge {(left, right)} -> {new_id}: its parts come before it, and ids ascend")
            self.tokens[new_id] = self.tokens[left] + self.tokens[right]
            last = new_id

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @classmethod
    def train(cls, text: str, vocab_size: int = 512, pattern: str = GPT2_PATTERN) -> BPETokenizer:
        """Merge the most frequent pair of neighbours into a new token, again and again, up to `vocab_size` tokens.

        Of equally frequent pairs the one with the smaller ids comes first (left id, then right id), as in Hugging
        Face's BpeTrainer: the result depends on how often each piece occurs, not on where it stands in the text.
        Training stops early when every piece has become one token; an empty text gives the 256 bytes and no merges.
        Raises ValueError for a `vocab_size` below 256.
        """
        if not isinstance(vocab_size, int) or vocab_size < 256:
            raise ValueError(f"vocab_size must be at least 256, one token for each byte, not {vocab_size}")
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, not {type(text).__name__}")
        ids, weight = [], []  # every different piece once, and at each of its positions how often the text has it
        for piece, n in Counter(pre_split(text, pattern)).items():
            data = piece.encode()
            ids += [*data, GONE]
            weight += [n] * (len(data) + 1)
        before, after = _neighbours(len(ids))
        counts: Counter[Pair] = Counter()
        places: dict[Pair, list[int]] = defaultdict(list)  # where a pair begins, or began: ascending positions
        for left, pair in enumerate(zip(ids, ids[1:])):
            if GONE not in pair:
                counts[pair] += weight[left]
                places[pair].append(left)
        queue = [(-n, pair) for pair, n in counts.items()]  # a heap gives the smallest: most frequent, then lowest ids
        heapify(queue)
        merges: dict[Pair, int] = {}
        while len(merges) < vocab_size - 256 and queue and queue[0][0] < 0:
            minus_count, pair = heappop(queue)
            if -minus_count != counts[pair]:  # other merges took some of its occurrences since it was queued
                heappush(queue, (-counts[pair], pair))
                continue
            merges[pair] = new_id = 256 + len(merges)
            new_pairs: set[Pair] = set()
            for left in places.pop(pair):
                right = after[left]
                if (ids[left], ids[right]) != pair:
                    continue  # the pair that began here is gone, as the second one of "aaa" is
                previous, following, n = before[left], after[right], weight[left]
                counts[ids[previous], pair[0]] -= n  # the two pairs around it go (a pair with GONE: nobody asks) …
                counts[pair[1], ids[following]] -= n
                ids[left], ids[right] = new_id, GONE
                after[left], before[following] = following, left
                for first, second in ((previous, left), (left, following)):  # … and two new ones come
                    new_pair = ids[first], ids[second]
                    if GONE not in new_pair:
                        counts[new_pair] += n
                        places[new_pair].append(first)
                        new_pairs.add(new_pair)
            for new_pair in new_pairs:  # no other pair can have become more frequent
                heappush(queue, (-counts[new_pair], new_pair))
        return cls(merges, pattern=pattern)

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int], pattern: str = GPT2_PATTERN) -> BPETokenizer:
        """A vocabulary that others have trained, as tiktoken stores it: the bytes of each token -> its id.

        The ranks do not say which pair a token was merged from. But a lower id was merged first, so its two parts are
        what the lower ids make of its bytes. Raises ValueError where these are not two, or a single byte is missing.
        """
        if missing := bytes(byte for byte in range(256) if bytes([byte]) not in ranks):
            raise ValueError(f"the ranks lack the single bytes {missing.hex(' ')}")
        tokenizer = cls({}, [ranks[bytes([byte])] for byte in range(256)], pattern)
        for token, new_id in sorted(ranks.items(), key=lambda item: item[1]):
            if len(token) != 1:
                parts = tokenizer._merge_piece(token)
                if len(parts) != 2:
                    raise ValueError(f"token {new_id}, {token!r}, is not two lower tokens merged: they give {parts}")
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
        """The ids of one piece: again and again merge the pair that was learned first, wherever it occurs.

        Going through the piece again after each merge would take n² steps for n bytes. Here each id knows its
        neighbours and each merge its places, so the steps grow with n, even for a million equal letters.
        """
        ids = [*(self.byte_ids[byte] for byte in piece), GONE]
        before, after = _neighbours(len(ids))
        places: dict[int, list[int]] = defaultdict(list)  # new id -> where its pair begins, or began
        for left, pair in enumerate(zip(ids, ids[1:])):
            if pair in self.merges:
                places[self.merges[pair]].append(left)
        queue = list(places)
        heapify(queue)
        while queue:
            new_id = heappop(queue)
            for left in places.pop(new_id):
                right = after[left]
                if self.merges.get((ids[left], ids[right])) != new_id:
                    continue  # the pair that began here is gone, as the second one of "aaa" is
                ids[left], ids[right] = new_id, GONE
                after[left], before[after[right]] = after[right], left
                for first, second in ((before[left], left), (left, after[left])):
                    later = self.merges.get((ids[first], ids[second]))  # above new_id, as ids ascend
                    if later is not None:
                        if later not in places:
                            heappush(queue, later)
                        places[later].append(first)
        return [token for token in ids if token != GONE]

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id that is not in `tokens`."""
        return b"".join(map(self.decode_single_token_bytes, ids)).decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes only a part of a character."""
        try:
            return self.tokens[operator.index(token)]
        except (KeyError, TypeError):
            raise ValueError(f"id {token} is not in this vocabulary of {self.vocab} tokens") from None


def _neighbours(n: int) -> tuple[list[int], list[int]]:
    """For n positions, the one before and the one after each. Before the first comes -1: the last one, a GONE."""
    return list(range(-1, n - 1)), list(range(1, n + 1))
