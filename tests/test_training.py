"""What training costs: FLOPs as torch counts them, bytes as torch keeps them, and published training runs."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from test_capacity import TINY
from tiny import as_transformers, random_ids, tiny_model
from tiny import one_thread as one_thread
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llm_lessons import SHAPES, Shape, training_flops, training_memory

LLAMA_3_405B = Shape(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, tied=False)


def trainable(**change):
    model = tiny_model(**change)
    return model.requires_grad_(True)


def loss(logits):
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1].numel(), dtype=torch.long))


# --- FLOPs ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change", [{}, {"tied": False}, {"kv_heads": 9}, {"head_dim": 10}])
def test_forward_and_backward_are_three_times_the_forward_pass(change):
    model, ids = trainable(**change), torch.tensor(random_ids(33))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        value = loss(model(ids))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        value.backward()
    assert forward.get_total_flops() == Shape.of(model).prefill_flops(33, all_logits=True, causal=False)
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    assert all(weight.grad is not None for weight in model.parameters())


def test_sequences_add_up():
    one, short = (3 * TINY.prefill_flops(tokens, all_logits=True) for tokens in (32, 7))
    assert training_flops(TINY, 32, 32) == one
    assert training_flops(TINY, 64, 32) == 2 * one
    assert training_flops(TINY, 71, 32) == 2 * one + short  # the last sequence is shorter
    assert training_flops(TINY, 7, 32) == short


def test_six_flops_for_each_weight_and_token_and_attention_on_top():
    streamed = 3 * (3456 + 4320) + 97 * 36
    scores = 4 * 3 * 9 * 4 * (32 * 33 // 2)  # 4 · L · H · D for each pair that the mask lets through
    assert training_flops(TINY, 32, 32) == 6 * streamed * 32 + 3 * scores


def test_llama_3_405b_took_3_8e25():
    # 405B parameters, 15.6T tokens, 3.8 × 10^25 FLOPs: Llama Team 2024, section 1, https://arxiv.org/abs/2407.21783
    assert LLAMA_3_405B.parameters == pytest.approx(405e9, rel=0.003)
    assert training_flops(LLAMA_3_405B, 15_600_000_000_000, 8192) == pytest.approx(3.8e25, rel=0.05)


def test_gpt_3_took_3_14e23():
    # 175B parameters, 300B tokens, sequences of 2,048, 3.14E+23 FLOPs: Brown et al. 2020, tables 2.1 and D.1,
    # https://arxiv.org/abs/2005.14165. Its two FFN matrices of 4 · hidden are three of 8/3 · hidden here.
    gpt_3 = Shape(layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=12288 * 8 // 3, vocab=50257)
    assert gpt_3.parameters == pytest.approx(174.6e9, rel=0.003)
    assert training_flops(gpt_3, 300_000_000_000, 2048) == pytest.approx(3.14e23, rel=0.05)


def test_training_is_inference_of_three_times_as_many_tokens():
    shape = SHAPES["llama-3-8b"]
    tokens = 15 * 10**12
    answers = shape.prefill_flops(8192, all_logits=True)
    assert training_flops(shape, tokens, 8192) / answers == pytest.approx(3 * tokens / 8192, rel=1e-6)


# --- Memory -----------------------------------------------------------------------------------------------------------

def test_16_bytes_for_each_parameter():
    # A 7.5B model takes 120 GB: ZeRO, figure 1, https://arxiv.org/abs/1910.02054
    shape = dataclasses.replace(SHAPES["llama-3-8b"], vocab=63_544)  # 7.5 billion parameters
    assert shape.parameters == pytest.approx(7.5e9, rel=1e-4)
    parts = training_memory(shape, 1)
    assert sum(parts[name] for name in ("weights", "gradients", "optimizer")) == pytest.approx(120e9, rel=1e-4)
    assert parts["optimizer"] == 6 * parts["weights"] == 6 * parts["gradients"]
    assert list(parts) == ["weights", "gradients", "optimizer", "activations"]


def test_adam_of_torch_keeps_two_numbers_for_each_weight():
    model = trainable()
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model(random_ids(5))).backward()
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    copy = 4 * TINY.parameters  # of the weights in float32, which a model in 16 bits has beside them
    assert kept + copy == training_memory(TINY, 5)["optimizer"]


def kept_for_backward(model, run):
    """Bytes of all that autograd keeps of run(), without the weights."""
    weights, kept = {weight.untyped_storage().data_ptr() for weight in model.parameters()}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that its address is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(run())
    assert value.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("change", [{"ffn": 160}, {"hidden": 72, "ffn": 200, "vocab": 997},
                                    {"ffn": 200, "kv_heads": 1}])
def test_activations_that_torch_keeps(change):
    model = trainable(**change)
    shape, ids = Shape.of(model), torch.tensor([random_ids(100, seed) for seed in range(3)])
    loss_alone = 300 * 4 * shape.vocab
    expected = (training_memory(shape, 100, batch=3)["activations"] - loss_alone) * 2 + loss_alone  # float32 here
    assert 1 < kept_for_backward(model, lambda: model(ids)) / expected < 2  # its norms are made for inference
    eager = as_transformers(model)
    eager.config._attn_implementation = "sdpa"  # there is no public way in all versions
    oracle = type(eager)(eager.config).requires_grad_(True)
    kept = kept_for_backward(oracle, lambda: oracle(ids, use_cache=False).logits)
    assert 1 < kept / expected < 1.3  # 1.09 to 1.12 in transformers 5.24, 1.26 in 4.56


def test_activations_by_hand():
    layer = 4 * 36 + 2 * (9 + 3) * 4 + 4 * 40
    one = 2 * (3 * layer + 2 * 36) + 4 * 97
    assert training_memory(TINY, 1)["activations"] == one
    assert training_memory(TINY, 10, batch=7)["activations"] == 70 * one


# --- Refusals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("count", [0, -1, 2.5, "4", None, True, float("nan")])
def test_counts(count):
    for what, name in ((lambda: training_memory(TINY, count), "tokens"),
                       (lambda: training_memory(TINY, 5, batch=count), "batch"),
                       (lambda: training_flops(TINY, count, 5), "tokens"),
                       (lambda: training_flops(TINY, 5, count), "context")):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {count!r}"):
            what()


@pytest.mark.parametrize("other", ["llama-3-8b", None, 8e9])
def test_what_is_no_shape(other):
    for what in (lambda: training_memory(other, 5), lambda: training_flops(other, 5, 5)):
        with pytest.raises(ValueError, match=r"shape must be a Shape, such as ll.SHAPES\['llama-3-8b'\]"):
            what()
