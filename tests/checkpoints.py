"""Small random models on disk, written by other people's libraries: what the reader's tests read back.

Nothing here uses our own reader or model: `transformers` and `safetensors` write folders, `gguf` writes GGUF files,
`tokenizers` trains the tokenizer, and transformers' own Llama gives the logits that are expected.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLE = "The theory of the thing: 1234 thirsty thieves, 3 of them thin.\n\n  They said “then” — it's 99 % 🦙 true.  \n"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS = {  # how a tokenizer cuts text before merging
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "llama-3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}


def random_llama(**settings) -> LlamaForCausalLM:
    """A small Llama whose logits depend strongly on every weight. Its values are exact in float16, and in q8_0."""
    config = dict(
        vocab_size=304, hidden_size=288, intermediate_size=64, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=128, rms_norm_eps=1e-3, tie_word_embeddings=True,
        rope_theta=777.0, rope_parameters={"rope_type": "default", "rope_theta": 777.0},  # version 4; 5
        bos_token_id=None, eos_token_id=0)
    model, generator = LlamaForCausalLM(LlamaConfig(**config | settings)).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            whole = torch.randint(-126, 127, weight.shape, generator=generator).float()
            if weight.dim() == 2:
                whole.view(-1, 32)[:, 0] = 127  # q8_0 scales each block of 32 by its largest: here by 2^-9
            weight.copy_(1 + whole / 512 if "norm" in name else whole / 512)
    return model


def byte_level_bpe(cut: str = "smollm") -> Tokenizer:
    """A byte-level BPE of 300 tokens, trained on a sentence; ids 0 and 1 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[cut], decoders.ByteLevel()
    tokenizer.train_from_iterator([SAMPLE], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>", "<|start|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def write_folder(folder: Path, model: LlamaForCausalLM | None = None, tokenizer: Tokenizer | None = None,
                 **saving) -> Path:
    """A model folder in Hugging Face layout."""
    (tokenizer or byte_level_bpe()).save(str(folder / "tokenizer.json"))
    (model or random_llama()).save_pretrained(folder, **saving)
    return folder


def change_json(path: Path, **values) -> None:
    """Set values in a JSON file; None takes one out."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_gguf(path: Path, model: LlamaForCausalLM, kind: str = "F32", architecture: str = "llama",
               tensors: dict[str, np.ndarray | None] | None = None, fields: dict | None = None) -> Path:
    """A GGUF file as llama.cpp's converter writes it, its matrices stored as `kind`.

    `tensors` and `fields` are set on top (None leaves one out), to make files that are wrong.
    """
    config, vocabulary = model.config, json.loads(byte_level_bpe().to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    values = {
        "llama.block_count": config.num_hidden_layers, "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size, "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.attention.key_length": config.head_dim, "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim, "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.tokens": tokens + [f"<|unused {n}|>" for n in range(len(tokens), config.vocab_size)],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2) + [3] * (config.vocab_size - len(tokens)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocabulary["merges"]]}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**values, **(fields or {})}.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add[type(value)](key, value)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {}
    for name, weight in model.named_parameters():
        weight = weight.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py
            weight = weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        stored[names.get_name(name, try_suffixes=(".weight",))] = np.ascontiguousarray(weight)
    for name, weight in {**stored, **(tensors or {})}.items():
        if weight is None:
            continue
        type_ = gguf.GGMLQuantizationType[kind if weight.ndim == 2 and weight.dtype == np.float32 else "F32"]
        if weight.dtype == np.float32:
            writer.add_tensor(name, gguf.quants.quantize(weight, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
