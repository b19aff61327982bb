"""Lesson 01: what goes wrong when pairs are counted and merged, texts encoded, and characters streamed."""

import codecs
from collections import Counter


def counts_without_overlap(ids):
    return Counter(pair for i, pair in enumerate(zip(ids, ids[1:]))
                   if not (i and pair == (ids[i - 1], ids[i]) and ids[i - 1] == ids[i]))


def counts_without_the_last(ids):
    return Counter((ids[i], ids[i + 1]) for i in range(len(ids) - 2))


def counts_around_the_end(ids):
    return Counter((ids[i - 1], ids[i]) for i in range(len(ids)))


def counts_each_once(ids):
    return {pair: 1 for pair in zip(ids, ids[1:])}


def counts_without_order(ids):
    return Counter(tuple(sorted(pair)) for pair in zip(ids, ids[1:]))


def counts_every_second(ids):
    return Counter(zip(ids[::2], ids[1::2]))


def counts_single_ids(ids):
    return Counter(ids)


def counts_too_far(ids):
    return Counter((ids[i], ids[i + 1]) for i in range(len(ids)))


def lists_the_pairs(ids):
    return list(zip(ids, ids[1:]))


def merges_overlapping(ids, pair, new_id):
    out = []
    for i, token in enumerate(ids):
        if tuple(ids[i:i + 2]) == pair:
            out.append(new_id)
        elif i == 0 or tuple(ids[i - 1:i + 1]) != pair:
            out.append(token)
    return out


def keeps_the_right_part(ids, pair, new_id):
    return [new_id if tuple(ids[i:i + 2]) == pair else token for i, token in enumerate(ids)]


def merges_once(ids, pair, new_id):
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            return ids[:i] + [new_id] + ids[i + 2:]
    return ids


def loses_the_last(ids, pair, new_id):
    out, i = [], 0
    while i < len(ids) - 1:
        if (ids[i], ids[i + 1]) == pair:
            out.append(new_id)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def merges_from_the_right(ids, pair, new_id):
    out, i = [], len(ids) - 1
    while i >= 0:
        if i and (ids[i - 1], ids[i]) == pair:
            out.insert(0, new_id)
            i -= 2
        else:
            out.insert(0, ids[i])
            i -= 1
    return out


def reads_behind_the_end(ids, pair, new_id):
    out, i = [], 0
    while i < len(ids):
        if ids[i] == pair[0] and ids[i + 1] == pair[1]:
            out.append(new_id)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def merges_in_place(ids, pair, new_id):
    i = 0
    while i < len(ids) - 1:
        if (ids[i], ids[i + 1]) == pair:
            ids[i:i + 2] = [new_id]
        i += 1
    return ids


def right(ids, pair, new_id):
    out, i = [], 0
    while i < len(ids):
        found = tuple(ids[i:i + 2]) == pair
        out.append(new_id if found else ids[i])
        i += 2 if found else 1
    return out


def encodes_from_the_left(ids, merges):
    i = 0
    while i < len(ids) - 1:
        if (ids[i], ids[i + 1]) in merges:
            ids = ids[:i] + [merges[ids[i], ids[i + 1]]] + ids[i + 2:]
            i = max(i - 1, 0)
        else:
            i += 1
    return ids


def encodes_the_most_frequent_first(ids, merges):
    while pairs := {pair: n for pair, n in Counter(zip(ids, ids[1:])).items() if pair in merges}:
        pair = max(pairs, key=pairs.get)
        ids = right(ids, pair, merges[pair])
    return ids


def encodes_the_latest_first(ids, merges):
    while pairs := [pair for pair in zip(ids, ids[1:]) if pair in merges]:
        pair = max(pairs, key=merges.get)
        ids = right(ids, pair, merges[pair])
    return ids


def encodes_one_merge(ids, merges):
    pairs = [pair for pair in zip(ids, ids[1:]) if pair in merges]
    if not pairs:
        return ids
    pair = min(pairs, key=merges.get)
    return right(ids, pair, merges[pair])


def encodes_each_merge_once(ids, merges):
    for pair, new_id in merges.items():
        ids = merges_once(ids, pair, new_id)
    return ids


def encodes_until_it_breaks(ids, merges):
    while len(ids) > 1:
        pair = min(zip(ids, ids[1:]), key=lambda pair: merges[pair])
        ids = right(ids, pair, merges[pair])
    return ids


def encodes_overlapping(ids, merges):
    for pair, new_id in merges.items():
        ids = merges_overlapping(ids, pair, new_id)
    return ids


def streams_each_token(tokens):
    return [token.decode(errors="replace") for token in tokens]


def streams_without_the_broken(tokens):
    return [token.decode(errors="ignore") for token in tokens]


def streams_at_the_end(tokens):
    return [b"".join(tokens).decode(errors="replace")]


def streams_whole_buffers(tokens):
    buffer = b""
    for token in tokens:
        buffer += token
        try:
            yield buffer.decode()
            buffer = b""
        except UnicodeDecodeError:
            yield ""
    yield buffer.decode(errors="replace")


def streams_by_looking_for_the_sign(tokens):
    data, shown = b"", 0
    for token in tokens:
        data += token
        text = data.decode(errors="replace").rstrip("\ufffd")
        yield text[shown:]
        shown = len(text)
    yield data.decode(errors="replace")[shown:]


def streams_without_the_rest(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(token) for token in tokens]


def streams_strictly(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(token) for token in tokens] + [decoder.decode(b"", final=True)]


def streams_bytes(tokens):
    return list(tokens)


def compares_a_list_with_a_tuple(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        found = ids[i:i + 2] == pair
        result.append(new_id if found else ids[i])
        i += 2 if found else 1
    return result


WRONG = {
    "count_pairs": [
        (counts_without_overlap, "'aaa'.*overlap"), (counts_without_the_last, "last pair is missing"),
        (counts_around_the_end, "last id and the first"), (counts_each_once, "only once"),
        (counts_without_order, "order of the two"), (counts_every_second, "every second"),
        (counts_single_ids, "pairs"), (counts_too_far, "IndexError"), (lists_the_pairs, "a dictionary")],
    "merge_pair": [
        (merges_overlapping, "'aaa'.*overlapping"), (keeps_the_right_part, "right part"),
        (merges_once, "only the first"), (loses_the_last, "last id"), (merges_from_the_right, "from the right"),
        (reads_behind_the_end, "IndexError"), (merges_in_place, "changed its input"),
        (compares_a_list_with_a_tuple, "a list never equals a tuple")],
    "bpe_encode": [
        (encodes_from_the_left, "comes first in the text"), (encodes_the_most_frequent_first, "most frequent"),
        (encodes_the_latest_first, "learned last"), (encodes_one_merge, "only one pair"),
        (encodes_each_merge_once, "only the first occurrence"), (encodes_until_it_breaks, "KeyError"),
        (encodes_overlapping, "overlapping")],
    "stream_pieces": [
        (streams_each_token, "broken"), (streams_without_the_broken, "lost"), (streams_at_the_end, "too late"),
        (streams_whole_buffers, "too late"), (streams_by_looking_for_the_sign, "character of its own"),
        (streams_without_the_rest, "vanished"), (streams_strictly, "UnicodeDecodeError"), (streams_bytes, "str")],
}
