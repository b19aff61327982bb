"""Small random models for the tests, and the outside oracle that they are compared with.

`Model.random` draws weights so small that attention is almost uniform and positions hardly matter: a test on it would
miss a wrong mask. The weights here are large enough for every fault to show in the logits.
"""

from __future__ import annotations

import pytest
import torch

from llm_lessons import KVCache, Model, ModelConfig

SHAPE = dict(layers=3, hidden=36, heads=9, kv_heads=3, head_dim=4, ffn=40, vocab=97, context=1024, tied=True,
             rope_base=500.0, norm_eps=1e-3)


@pytest.fixture(autouse=True)
def one_thread(request):
    """One thread, in each module that imports this: matrices this small take many times longer on several."""
    threads = torch.get_num_threads()
    if "smollm2" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **shape) -> Model:
    """A random model whose logits depend strongly on every token and on its position."""
    model, generator = Model(ModelConfig(**SHAPE | shape), dtype), torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        values = torch.empty(weight.shape).normal_(generator=generator)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif name in ("embedding.weight", "head.weight"):
            values *= 0.3
        else:
            values *= (1.5 if "qkv" in name else 1.0) / weight.shape[1] ** 0.5
        weight.copy_(values)
    return model


def as_transformers(model: Model):
    """transformers' own Llama with the weights of a model of ours: written by people who never saw this course."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    oracle = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        max_position_embeddings=c.context, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied,
        rope_theta=c.rope_base, rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},  # version 4; 5
        bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager")).eval()
    state = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight,
             "lm_head.weight": model.head.weight}
    for number, block in enumerate(model.blocks):
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv, gate_up = block.attention.qkv.weight, block.ffn.gate_up.weight
        state |= {f"model.layers.{number}.{name}.weight": weight for name, weight in {
            "self_attn.q_proj": qkv[:q], "self_attn.k_proj": qkv[q:q + kv], "self_attn.v_proj": qkv[q + kv:],
            "self_attn.o_proj": block.attention.output.weight, "mlp.gate_proj": gate_up[:c.ffn],
            "mlp.up_proj": gate_up[c.ffn:], "mlp.down_proj": block.ffn.down.weight,
            "input_layernorm": block.attention_norm.weight, "post_attention_layernorm": block.ffn_norm.weight}.items()}
    oracle.load_state_dict({name: weight.float() for name, weight in state.items()}, strict=True)
    return oracle


def random_ids(count: int, seed: int = 0, vocab: int = SHAPE["vocab"]) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same_logits(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Equal to the tolerance, and the same greedy ids except where the two best are nearer than that (D7)."""
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    best = expected.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 4 * tolerance * (1 + best[..., 0].abs())
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])


def feed(model: Model, ids: list[int], sizes: int | list[int], cache) -> torch.Tensor:
    """Logits [T, V] of ids that are read in pieces of these sizes."""
    return torch.cat([model(piece, cache) for piece in torch.tensor(ids).split(sizes)])


def ragged(model: Model, cache, rows: list[list[int]], calls: list[tuple[int, ...]], padding: int, seed: int):
    """Read the rows in ragged calls (calls[i][row] tokens each), padded with junk: yields starts, lengths, logits."""
    junk = torch.Generator().manual_seed(seed)
    for lengths in calls:
        ids = torch.randint(model.config.vocab, (len(rows), max(lengths) + padding), generator=junk)
        starts = list(cache.lengths)
        for row, (start, new) in enumerate(zip(starts, lengths)):
            ids[row, :new] = torch.tensor(rows[row][start:start + new])
        yield starts, lengths, model(ids, cache, list(lengths))


def snapshot(cache: KVCache) -> tuple:
    """All that a cache holds, to see that a refused call left it as it was."""
    return cache.keys.clone(), cache.values.clone(), list(cache.lengths), list(cache.tokens)


def unchanged(cache: KVCache, before: tuple) -> bool:
    keys, values, lengths, tokens = before
    return (torch.equal(cache.keys, keys) and torch.equal(cache.values, values)
            and cache.lengths == lengths and cache.tokens == tokens)
