"""Every kind of cache, made for the tiny model, with what transformers says about it; and pools of blocks."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import tiny
import torch
from tiny import SHAPE, as_transformers, same_logits, tiny_model

import llm_lessons as ll

MODEL = tiny_model()
WINDOW = 5


def contiguous(capacity, batch=1):
    return MODEL.new_cache(capacity, batch)


def growing(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.GrowingCache)


def sliding(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.SlidingCache, window=WINDOW)


def sliding_far(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.SlidingCache, window=1000)


def paged(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.PagedCache)


def paged_by_4(capacity, batch=1):
    pool = ll.BlockPool.of(MODEL, blocks=-(-capacity // 4) * batch, block_size=4)
    return MODEL.new_cache(capacity, batch, kind=ll.PagedCache, pool=pool)


def quantized_8(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.QuantizedCache, bits=8)


def quantized_4(capacity, batch=1):
    return MODEL.new_cache(capacity, batch, kind=ll.QuantizedCache, bits=4)


KINDS = [contiguous, growing, sliding, sliding_far, paged, paged_by_4]
QUANTIZED = [quantized_8, quantized_4]  # exact for the first 63 tokens only: test_quantized_cache.py
every_kind = pytest.mark.parametrize("new_cache", KINDS, ids=lambda kind: kind.__name__)


@cache
def oracle(window):
    """transformers' Llama; with a window, its Mistral, which is a Llama whose attention slides."""
    llama = as_transformers(MODEL)
    if window is None:
        return llama
    from transformers import MistralConfig, MistralForCausalLM

    settings = {name: value for name, value in llama.config.to_dict().items() if name not in (
        "architectures", "model_type", "attention_bias", "mlp_bias", "pretraining_tp", "transformers_version")}
    mistral = MistralForCausalLM(MistralConfig(**settings | {"sliding_window": window})).eval()
    mistral.load_state_dict(llama.state_dict(), strict=True)
    assert mistral.config.sliding_window == window and mistral.config.head_dim == SHAPE["head_dim"]
    return mistral


@cache
def _logits(ids, window):
    with torch.no_grad():
        return oracle(window)(torch.tensor([ids])).logits[0]


def expected(new_cache, ids):
    """Logits [T, V] of transformers for a whole sequence, as a model with this kind of cache must see it."""
    return _logits(tuple(ids), WINDOW if new_cache is sliding else None)


def feed(ids, sizes, cache):
    return tiny.feed(MODEL, ids, sizes, cache)


def fed(monkeypatch):
    """A list that fills with the number of tokens of each call of the model."""
    counts, body = [], MODEL.body
    monkeypatch.setattr(MODEL, "body", lambda ids, *rest: counts.append(len(ids)) or body(ids, *rest))
    return counts


def fail_in_layer(layer, times=1):
    """The next forward passes stop behind the attention of this layer. Returns the hook, to be removed."""
    left = [times]

    def stop(*_):
        left[0] -= 1
        if left[0] >= 0:
            raise KeyboardInterrupt

    return MODEL.blocks[layer].attention.register_forward_hook(stop)


def held(cache):
    """All that can be seen of a cache, to find that a refused call left it as it was."""
    if isinstance(cache, ll.PagedCache):
        tensors = cache.pool.keys, cache.pool.values, torch.tensor(cache.pool.users)
        where = [list(row.blocks) for row in cache.rows]
    elif isinstance(cache, ll.GrowingCache):
        tensors, where = cache.keys + cache.values, None
    elif isinstance(cache, ll.QuantizedCache):
        tensors, where = [part for half in (cache.keys, cache.values) for part in vars(half).values()
                          if isinstance(part, torch.Tensor)], list(cache._blocks)
    else:
        tensors = cache.keys, cache.values
        where = cache.positions.tolist() if isinstance(cache, ll.SlidingCache) else None
    return [tensor.clone() for tensor in tensors], where, list(cache.lengths), list(cache.tokens)


def same(before, after):
    alike = (torch.equal(a.nan_to_num(12345), b.nan_to_num(12345)) for a, b in zip(before[0], after[0]))  # NaN: poison
    return all(alike) and before[1:] == after[1:]


# --- Pools of blocks ------------------------------------------------------------------------------------------------

X, Y = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]  # two blocks of 4 each (D3)


def new_pool(blocks, block_size=4):
    return ll.BlockPool.of(MODEL, blocks, block_size)


def on_pool(pool, capacity=40, **settings):
    return MODEL.new_cache(capacity, kind=ll.PagedCache, pool=pool, **settings)


def right(ids):
    """The logits that transformers gives for the token after the last."""
    return expected(contiguous, ids)[-1]


def read(cache, ids):
    """Prefill a prompt as `generate` does -> how many of its tokens were reused. The logits are checked."""
    known = ll.keep_shared_prefix(cache, ids)
    same_logits(ll.prefill(MODEL, ids[known:], cache), right(ids))
    return known


def consistent(pool, *caches):
    """Every block is counted as often as it is held; it is free when it is held by none; block 0 is nobody's."""
    tables = [row for cache in caches for row in cache.rows]
    holders = Counter(block for table in tables for block in table.blocks)
    assert 0 not in holders and pool.keys[:, 0].eq(0).all() and pool.values[:, 0].eq(0).all()
    assert pool.users == [holders[block] for block in range(pool.blocks + 1)]
    assert pool.free_blocks == sum(users == 0 for users in pool.users[1:])
    return True


# --- Quantized: keys that lie on the grid already, so that every number must come back as it went in -----------------

BITS = (8, 4)
LAST = {8: 255, 4: 15}  # steps on the grid
both = pytest.mark.parametrize("new_cache", QUANTIZED, ids=lambda kind: kind.__name__)


def small(bits=4, capacity=100, batch=1, layers=2, dtype=torch.float32, head_dim=6):
    return ll.QuantizedCache(layers, 3, head_dim, capacity, batch, dtype, bits=bits)


def lossless(bits, row, start, count, text=0):
    """Keys [3, count, 6], multiples of the grid's step 1: every token and every block has both ends of the grid."""
    p, c, h = torch.arange(start, start + count)[:, None], torch.arange(6), torch.arange(3)[:, None, None]
    numbers = (5 * p + 7 * c + 3 * h + 11 * row + text * (c + 1)) % 16
    numbers = numbers.where(p % 32 > 1, 15 * (p % 32)) * (LAST[bits] // 15)
    numbers[..., 0], numbers[..., 1] = 0, LAST[bits]
    return numbers.float()


def stack(bits, rows, width):
    """rows: (start, count, text) each -> keys [batch, 3, width, 6], behind each row's own tokens junk."""
    k = torch.full((len(rows), 3, width, 6), torch.nan)
    for row, (start, count, text) in enumerate(rows):
        k[row, :, :count] = lossless(bits, row, start, count, text)
    return k


def put(cache, new, text=0, padding=0, layers=None):
    """new[row] lossless tokens into the rows -> all keys and values of the last layer. `layers`: it stops there."""
    width = max(new) + padding
    cache.reserve(new)
    k = stack(cache.bits, [(length, count, text) for length, count in zip(cache.lengths, new)], width)
    for layer in range(cache.layers if layers is None else layers):
        keys, values = cache.update(layer, k, -k)
    if layers is None:
        cache.advance(new)
        return keys, values


def seen(cache, layer=0):
    """What the next pass will see of the tokens held, [batch, kv_heads, length, head_dim] each."""
    nothing = torch.empty(len(cache.lengths), cache.kv_heads, 0, cache.head_dim, dtype=cache.dtype)
    cache.reserve([0] * len(cache.lengths))
    return cache.update(layer, nothing, nothing)


def holds(cache, row, texts):
    """Are the tokens of this row lossless(texts[position]), in every layer?"""
    length, right = cache.lengths[row], torch.empty(3, len(texts), 6)
    for text in set(texts):
        places = torch.tensor(texts) == text
        right[:, places] = lossless(cache.bits, row, 0, len(texts), text)[:, places]
    pairs = (seen(cache, layer) for layer in range(cache.layers))
    return all(torch.equal(keys[row, :, :length], right) and torch.equal(values[row, :, :length], -right)
               for keys, values in pairs)
