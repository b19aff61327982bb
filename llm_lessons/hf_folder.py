"""Read a model from a folder as Hugging Face lays it out: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .gguf_file import token_ranks
from .model import ModelConfig
from .tokenizer import DIGITS_PATTERN, GPT2_PATTERN, Tokenizer

NAMES = {  # our name of a matrix -> its name in the files; {} is the layer
    "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight", "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight", "v": "model.layers.{}.self_attn.v_proj.weight",
    "output": "model.layers.{}.self_attn.o_proj.weight", "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight", "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
PLAIN = {  # settings that change what the model computes -> the only value that this course computes
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "quantization_config": None, "rope_scaling": None,
}


class HuggingFaceFolder:
    """An open folder. `config` and `tokenizer` are read at once, each tensor when `tensor(name)` asks for it."""

    names = NAMES

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._read_config()
        # Files of old versions of transformers also hold the rotary frequencies, and a head beside a tied embedding.
        old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(self.config.layers)}
        self.ignorable = frozenset(old | ({NAMES["head"]} if self.config.tied else set()))
        self._files = self._find_tensors()
        self.tokenizer = self._read_tokenizer()

    @property
    def tensor_names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """The tensor that we call `name`, as it is stored."""
        stored = self.names[name].format(layer)
        with safe_open(self._files[stored], framework="pt") as file:
            values = file.get_tensor(stored)
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{stored} is stored as {values.dtype}; this course reads float32, bfloat16 and float16")
        return values

    def _json(self, name: str, required: bool = True) -> dict:
        path = self.folder / name
        if not path.exists():
            if required:
                raise FileNotFoundError(f"{self.folder} lacks {name}: a model folder has config.json, *.safetensors "
                                        f"and tokenizer.json")
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__}, not an object")
            return values
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from error

    def _read_config(self) -> ModelConfig:
        raw = self._json("config.json")
        for key, plain in PLAIN.items():
            if (value := raw.get(key, plain)) != plain:
                raise ValueError(f"config.json says {key} = {value!r}; this course runs {plain!r} only")
        rope = raw.get("rope_parameters") or {}  # transformers 5; earlier versions: rope_theta beside the rest
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"config.json says rope_type = {rope['rope_type']!r}; this course runs 'default' only")
        missing = [key for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                                   "vocab_size", "max_position_embeddings", "rms_norm_eps") if key not in raw]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = raw["num_attention_heads"]
        return ModelConfig(
            layers=raw["num_hidden_layers"], hidden=raw["hidden_size"], heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // (heads or 1), ffn=raw["intermediate_size"],
            vocab=raw["vocab_size"], context=raw["max_position_embeddings"],
            tied=raw.get("tie_word_embeddings", False), norm_eps=raw["rms_norm_eps"],
            rope_base=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0))

    def _find_tensors(self) -> dict[str, Path]:
        index = self._json("model.safetensors.index.json", required=False).get("weight_map")
        if index is None:
            return dict.fromkeys(self._names_in("model.safetensors"), self.folder / "model.safetensors")
        for name in set(index.values()):
            absent = {tensor for tensor, file in index.items() if file == name} - self._names_in(name)
            if absent:
                raise ValueError(f"{self.folder / name} lacks {', '.join(sorted(absent)[:3])}: fetch it again")
        return {tensor: self.folder / file for tensor, file in index.items()}

    def _names_in(self, file: str) -> set[str]:
        if not (self.folder / file).exists():
            raise FileNotFoundError(f"{self.folder} lacks {file}: a model folder has its weights in model.safetensors, "
                                    f"or in parts that model.safetensors.index.json lists")
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                return set(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{self.folder / file} is not a complete safetensors file ({error}): fetch it "
                             f"again") from error

    def _read_tokenizer(self) -> Tokenizer:
        raw, settings = self._json("tokenizer.json"), self._json("tokenizer_config.json", required=False)
        model = raw.get("model", {})
        odd = [name for name in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
               if model.get(name)] + ["normalizer"] * bool(raw.get("normalizer"))
        if model.get("type") != "BPE" or odd:
            raise ValueError(f"tokenizer.json is not a plain byte-level BPE: model {model.get('type')!r}"
                             + "".join(f", {name}" for name in odd))
        added = {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        ranks = token_ranks({text: token for text, token in model["vocab"].items() if text not in added}, merges,
                            model.get("ignore_merges", False))
        if (largest := max([*ranks.values(), *added.values()])) >= self.config.vocab:
            raise ValueError(f"the tokenizer has ids up to {largest}, the model a vocabulary of {self.config.vocab}")
        template = self.folder / "chat_template.jinja"
        template = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        names = {name: settings.get(name) for name in ("bos_token", "eos_token")}
        names = {name: text["content"] if isinstance(text, dict) else text for name, text in names.items() if text}
        return Tokenizer(ranks, added, split_pattern(raw.get("pre_tokenizer") or {}), template, self._stop_ids(),
                         leading_token(raw.get("post_processor"), added), names)

    def _stop_ids(self) -> set[int]:
        """Every id that ends an answer: generation_config.json may list more than config.json's one."""
        ids = set()
        for name in ("generation_config.json", "config.json"):
            value = self._json(name, required=False).get("eos_token_id")
            ids |= set(value if isinstance(value, list) else [] if value is None else [value])
        return ids


def split_pattern(pre_tokenizer: dict) -> str:
    """The regular expression by which a tokenizer.json cuts text before merging."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if kinds and kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return GPT2_PATTERN
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
            return DIGITS_PATTERN
        split = steps[0]
        if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True) and "Regex" in split["pattern"] \
                and split.get("behavior") == "Isolated" and not split.get("invert"):
            return split["pattern"]["Regex"]
    raise ValueError(f"tokenizer.json cuts text by {kinds}; this course knows ByteLevel, Digits + ByteLevel and "
                     f"Split + ByteLevel")


def leading_token(post_processor: dict | None, special_tokens: dict[str, int]) -> int | None:
    """The id that a tokenizer.json puts before every text (a "beginning of sequence" token), or None."""
    if post_processor is None:
        return None
    steps = post_processor.get("processors", [post_processor])
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if len(templates) + sum(step["type"] == "ByteLevel" for step in steps) != len(steps) or len(templates) > 1:
        raise ValueError(f"tokenizer.json post-processes ids by {[step['type'] for step in steps]}, which this course "
                         f"does not")
    if not templates:
        return None
    parts = templates[0]["single"]
    if len(parts) == 1 and "Sequence" in parts[0]:
        return None
    if len(parts) == 2 and "SpecialToken" in parts[0] and "Sequence" in parts[1]:
        return special_tokens[parts[0]["SpecialToken"]["id"]]
    raise ValueError(f"tokenizer.json adds tokens to every text in a way that this course does not: {parts}")
