"""What cannot be run faithfully, or is damaged, is refused by an error that names it; nothing is loaded halfway."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from checkpoints import BYTE_LEVEL, byte_level_bpe, change_json, random_llama, write_folder, write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import llm_lessons as ll


def refused(path, message, error=ValueError, **settings):
    with pytest.raises(error, match=message) as caught:
        ll.load_pretrained(path, device="cpu", **settings)
    assert type(caught.value) is error


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, random_llama(tie_word_embeddings=False))


# --- The call -------------------------------------------------------------------------------------------------------

def test_unknown_weights_and_names_are_refused_with_those_that_exist(tmp_path):
    for weights in ("int3", "INT8", 8, None, torch.bfloat16):
        refused("smollm2-135m", "weights must be one of float32, bfloat16, int8, int4, stored, not "
                + re.escape(repr(weights)), weights=weights)
    refused("smollm3", "no model 'smollm3': pass 'smollm2-135m', a folder", FileNotFoundError)
    refused(tmp_path / "absent.gguf", "no model '.*absent.gguf'", FileNotFoundError)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_it_needs_is_refused_by_the_files_name(folder, name):
    (folder / name).unlink()
    refused(folder, f"lacks {name}: a model folder has", FileNotFoundError)


# --- config.json ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("setting, value", [
    ("model_type", "mistral"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
    ("rope_scaling", {"type": "linear", "factor": 2.0}), ("quantization_config", {"bits": 4})])
def test_a_setting_that_changes_the_computation_is_refused_by_name(folder, setting, value):
    change_json(folder / "config.json", **{setting: value})
    refused(folder, f"{setting} = {re.escape(repr(value))}")


def test_rope_scaling_of_transformers_5_is_refused_by_name(folder):
    change_json(folder / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0})
    refused(folder, "rope_type = 'yarn'")


@pytest.mark.parametrize("setting", ["hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_setting_that_is_missing_is_named(folder, setting):
    change_json(folder / "config.json", **{setting: None})
    refused(folder, f"config.json lacks {setting}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json",
                                  "model.safetensors.index.json"])
def test_truncated_json_is_refused_by_the_files_name(tmp_path, name):
    folder = write_folder(tmp_path, max_shard_size="500KB")
    text = (folder / name).read_text()
    for damaged in (text[: len(text) // 2], "", "[]"):
        (folder / name).write_text(damaged)
        refused(folder, f"{name} is not valid JSON.*fetch it again")


# --- Weights in safetensors -----------------------------------------------------------------------------------------

def with_tensors(folder, **changes):
    """Change, add (or, by None, take out) tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def test_a_head_that_is_missing_though_it_is_not_tied_is_refused_by_name_B6(folder):
    refused(with_tensors(folder, **{"lm_head.weight": None}), "the weights lack lm_head.weight$")


def test_missing_and_unexpected_tensors_are_refused_by_name(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    refused(with_tensors(folder, **{name: None}), f"the weights lack {name}$")
    bias = "model.layers.0.self_attn.q_proj.bias"
    refused(with_tensors(folder, **{name: weight, bias: torch.zeros(288)}), f"the weights hold {bias}, which")
    with_tensors(folder, **{bias: None, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})
    ll.load_pretrained(folder, device="cpu")  # old files repeat what the configuration says: nothing is lost


@pytest.mark.parametrize("name, shape", [
    ("lm_head.weight", [303, 288]), ("model.norm.weight", [1]), ("model.layers.0.self_attn.k_proj.weight", [96, 287]),
    ("model.layers.1.mlp.down_proj.weight", [64, 288])])
def test_a_wrong_shape_is_refused_by_name_even_where_it_would_broadcast(folder, name, shape):
    refused(with_tensors(folder, **{name: torch.zeros(shape)}), f"{name} has the shape {re.escape(str(shape))}, but")


def test_weights_of_an_unknown_type_are_refused_by_name(folder):
    integers = torch.zeros(288, dtype=torch.int8)
    refused(with_tensors(folder, **{"model.norm.weight": integers}), "model.norm.weight is stored as torch.int8")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_safetensors_file_is_refused_by_its_name(folder, kept):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(kept * len(data)) if kept == 0.5 else kept])
    refused(folder, "model.safetensors is not a complete safetensors file.*fetch it again")


def test_a_part_that_is_absent_truncated_or_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    folder = write_folder(tmp_path, max_shard_size="500KB")
    part = sorted(folder.glob("model-*.safetensors"))[-1]
    data, tensors = part.read_bytes(), load_file(part)
    part.write_bytes(data[:-1])
    refused(folder, f"{part.name} is not a complete safetensors file")
    left_out = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != left_out}, part)
    refused(folder, f"{part.name} lacks {left_out}")
    part.unlink()
    refused(folder, f"lacks {part.name}", FileNotFoundError)


# --- tokenizer.json -------------------------------------------------------------------------------------------------

def test_tokenizers_that_are_no_byte_level_bpe_are_refused(folder):
    sentencepiece = byte_level_bpe()
    sentencepiece.normalizer = normalizers.Prepend("▁")
    fallback = json.loads(byte_level_bpe().to_str())
    fallback["model"]["byte_fallback"] = True
    for tokenizer, message in (
            (Tokenizer(models.Unigram([("<unk>", 0.0)], 0)), "not a plain byte-level BPE: model 'Unigram'"),
            (Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), "model 'WordPiece'"),
            (sentencepiece, "model 'BPE', normalizer"),
            (Tokenizer.from_str(json.dumps(fallback)), "model 'BPE', byte_fallback"),
            (Tokenizer(models.BPE({"é": 0, "▁": 1}, [])), "not byte-level: '▁' stands for no byte")):
        tokenizer.save(str(folder / "tokenizer.json"))
        refused(folder, message)


@pytest.mark.parametrize("cut, kinds", [
    (pre_tokenizers.Whitespace(), "'Whitespace'"), (pre_tokenizers.ByteLevel(add_prefix_space=True), "'ByteLevel'"),
    (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), "'ByteLevel'"),
    (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), BYTE_LEVEL]), "'Digits', 'ByteLevel'"),
    (pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL]), "'Split', 'ByteLevel'")], ids=repr)
def test_an_unknown_way_to_cut_text_is_refused(folder, cut, kinds):
    tokenizer = byte_level_bpe()
    tokenizer.pre_tokenizer = cut
    tokenizer.save(str(folder / "tokenizer.json"))
    refused(folder, rf"cuts text by \[{kinds}\]")


def test_tokens_added_around_every_text_in_an_unknown_way_are_refused(folder):
    for processor, message in (
            (processors.TemplateProcessing("$A <|end|>", special_tokens=[("<|end|>", 0)]), "adds tokens to every text"),
            (processors.BertProcessing(("<|end|>", 0), ("<|start|>", 1)), "post-processes ids by .*BertProcessing")):
        tokenizer = byte_level_bpe()
        tokenizer.post_processor = processor
        tokenizer.save(str(folder / "tokenizer.json"))
        refused(folder, message)


def test_merges_that_tiktoken_would_apply_otherwise_are_refused(folder):
    content = json.loads(byte_level_bpe().to_str())
    content["model"]["merges"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(folder, "merges are not in the order of its ids")
    content["model"]["merges"].reverse()
    content["model"]["vocab"]["xyz"] = 300  # `tokenizers` never makes it; tiktoken would, of just these letters
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert 300 not in Tokenizer.from_file(str(folder / "tokenizer.json")).encode("xyz").ids
    refused(folder, "no merge of the tokenizer makes its token 'xyz'")
    content["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ll.load_pretrained(folder, device="cpu")[1].encode("xyz xyz") == oracle.encode("xyz xyz").ids


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path):
    write_folder(tmp_path, random_llama(vocab_size=299))
    refused(tmp_path, "ids up to 299, the model a vocabulary of 299")


# --- GGUF files -----------------------------------------------------------------------------------------------------

NORM, BIAS, SQUARE = np.ones(288, np.float32), np.zeros(288, np.float32), np.ones((288, 288), np.float32)


@pytest.mark.parametrize("changes, message", [
    (dict(architecture="qwen2"), "architecture 'qwen2'; this course runs 'llama'"),
    (dict(fields={"llama.rope.scaling.type": "linear"}), "llama.rope.scaling.type is 'linear'"),
    (dict(fields={"llama.expert_count": 8}), "llama.expert_count is 8"),
    (dict(fields={"llama.rope.dimension_count": 16}), "llama.rope.dimension_count is 16"),
    (dict(fields={"llama.context_length": None}), "lacks llama.context_length"),
    (dict(fields={"tokenizer.ggml.tokens": None}), "lacks tokenizer.ggml.tokens"),
    (dict(fields={"tokenizer.ggml.pre": "qwen2"}), "cut by 'qwen2'"),
    (dict(fields={"tokenizer.ggml.pre": None}), "cut by 'default'"),
    (dict(fields={"tokenizer.ggml.model": "llama"}), "tokenizer is 'llama'"),  # what llama.cpp calls SentencePiece
    (dict(tensors={"blk.0.attn_q.bias": BIAS}), "the weights hold blk.0.attn_q.bias, which"),
    (dict(tensors={"rope_freqs.weight": BIAS[:16]}), "the weights hold rope_freqs.weight, which"),
    (dict(tensors={"blk.1.ffn_up.weight": None}), "the weights lack blk.1.ffn_up.weight$"),
    (dict(tensors={"output_norm.weight": NORM[:1]}), r"output_norm.weight has the shape \[1\], but .* \[288\]"),
    (dict(tensors={"blk.0.attn_q.weight": SQUARE[:287]}), r"attn_q.weight has the shape \[287, 288\]"),
    (dict(tensors={"blk.0.attn_k.weight": SQUARE}), r"attn_k.weight has the shape \[288, 288\]"),
    (dict(tensors={"output_norm.weight": NORM.astype(np.int32)}), "output_norm.weight is stored as I32"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_gguf_file_that_cannot_be_run_faithfully_is_refused_by_the_reason(tmp_path, changes, message):
    refused(write_gguf(tmp_path / "model.gguf", random_llama(), **changes), message)


def test_a_truncated_gguf_file_is_refused_by_its_name_wherever_it_ends(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_llama(num_hidden_layers=1))
    data, start = path.read_bytes(), min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)
    for kept in [0, 3, 4, 8, 20, 24, *range(30, start, 997), start - 1, start + 1, len(data) // 2, len(data) - 33]:
        path.write_bytes(data[:kept])
        refused(path, "model.gguf is not a complete GGUF file.*fetch it again")
    path.write_bytes(b"PK\x03\x04" + data[4:])
    refused(path, "model.gguf is not a complete GGUF file")
