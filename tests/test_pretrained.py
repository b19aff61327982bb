"""Reading models: the real one against transformers' own GGUF loader, random ones written by transformers and by gguf.

Nothing here compares our reader with itself: weights are written, and logits computed, by other people's libraries.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import CUTS, SAMPLE, byte_level_bpe, change_json, random_llama, write_folder, write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import llm_lessons as ll
from llm_lessons.model import Model, ModelConfig


def load(path, **settings):
    return ll.load_pretrained(path, device="cpu", **settings)


def same_logits(model, oracle):
    ids = torch.randint(300, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3  # far from uniform
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


# --- The real model -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def expected(gguf_path, smollm2):
    """300 ids of this file's text, and the logits after each of them by transformers' own GGUF loader."""
    ids = smollm2[1].encode(Path(__file__).read_text(encoding="utf-8"))[:300]
    oracle = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    with torch.no_grad():
        return ids, oracle(torch.tensor([ids])).logits[0]


def relative_error(logits, expected):
    return (logits - expected).norm(dim=-1) / expected.norm(dim=-1)


def test_logits_of_the_real_model_equal_those_of_transformers_at_every_position(smollm2, expected):
    ids, logits = expected
    ours = smollm2[0](ids)
    assert relative_error(ours, logits).max() < 1e-4
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=5e-4)


def test_the_real_model_has_the_published_shape_and_its_head_is_its_embedding_B6(smollm2):
    model, tokenizer = smollm2
    assert model.config == ModelConfig(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152,
                                       context=8192, tied=True, rope_base=100_000.0, norm_eps=1e-5)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert tokenizer.stop_ids == {2} and tokenizer.bos_id is None and tokenizer.decode([2]) == "<|im_end|>"


def test_bfloat16_is_the_same_model_rounded_in_half_the_bytes(smollm2, expected):
    model, (ids, logits) = smollm2[0], expected
    half, _ = load("smollm2-135m", weights="bfloat16")
    for (name, weight), rounded in zip(model.named_parameters(), half.parameters()):
        assert rounded.dtype == torch.bfloat16 and torch.equal(weight.bfloat16(), rounded), name
    assert half.head.weight.data_ptr() == half.embedding.weight.data_ptr()
    size, half_size = (sum(weight.nbytes for weight in m.parameters()) for m in (model, half))
    assert (size, half_size) == (538_060_032, 269_030_016)
    rough = half(ids[:100]).float()
    assert relative_error(rough, logits[:100]).mean() < 0.03
    assert (rough.argmax(-1) == logits[:100].argmax(-1)).float().mean() > 0.9


def run(code, **settings):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, **settings)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_loading_the_real_model_needs_less_than_1_2_GiB_F3(gguf_path):
    result = run("""if True:
        import llm_lessons as ll
        model, _ = ll.load_pretrained(device="cpu")
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(sum(weight.nbytes for weight in model.parameters()), int(peak.split()[1]) * 1024)
        """)
    weights, peak = map(int, result.stdout.split())
    assert weights < peak < 1.2 * 2**30, result.stderr


def test_importing_needs_no_reader_and_no_notebook_fetches_nothing_and_sets_nothing(tmp_path):
    result = run("""if True:
        import sys, torch
        torch.set_num_threads(1)
        before = torch.random.get_rng_state()
        import llm_lessons
        assert torch.equal(before, torch.random.get_rng_state()) and torch.get_num_threads() == 1
        print(*{"gguf", "matplotlib", "IPython", "ipywidgets", "anywidget", "transformers"} & set(sys.modules))
        """, env={"PATH": "", "HOME": str(tmp_path), "LLM_LESSONS_CACHE": str(tmp_path / "cache")})
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")
    assert not list(tmp_path.iterdir())


# --- Folders that transformers writes -------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    dict(num_key_value_heads=1), dict(num_key_value_heads=3), dict(num_key_value_heads=9), dict(head_dim=64),
    dict(tie_word_embeddings=False), dict(tie_word_embeddings=False, num_key_value_heads=1, head_dim=96)], ids=str)
@pytest.mark.parametrize("shard", ["5GB", "500KB"])
def test_a_model_that_transformers_wrote_has_the_logits_that_transformers_gives(tmp_path, settings, shard):
    oracle = random_llama(**settings)
    model, _ = load(write_folder(tmp_path, oracle, max_shard_size=shard))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "500KB")
    same_logits(model, oracle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_stored_in_half_the_bytes_loads_as_float32(tmp_path, dtype):
    stored, oracle = random_llama().to(dtype), random_llama()
    oracle.load_state_dict(stored.state_dict())
    model, _ = load(write_folder(tmp_path, stored))
    same_logits(model, oracle)
    assert model.norm.weight.dtype == torch.float32


def test_the_configuration_of_transformers_4_is_understood(tmp_path):
    oracle = random_llama()
    write_folder(tmp_path, oracle)
    change_json(tmp_path / "config.json", rope_parameters=None, head_dim=None, attention_bias=None, mlp_bias=None,
                dtype=None, rope_theta=777.0, torch_dtype="float32")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"rope_scaling": None}))
    same_logits(load(tmp_path)[0], oracle)


def test_a_tied_head_is_the_embedding_even_where_the_file_repeats_it_B6(tmp_path):
    oracle = random_llama()
    write_folder(tmp_path, oracle)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = load(tmp_path)
    same_logits(model, oracle)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert sum(weight.numel() for weight in model.parameters()) == oracle.num_parameters()


def test_logits_of_a_tied_head_are_products_with_the_embedding_B6():
    model = Model(ModelConfig(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, ffn=1, vocab=3, context=1))
    model.embedding.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
    assert model.head(torch.tensor([2.0, 3.0])).tolist() == [2, 3, 5]


@pytest.mark.parametrize("generation, config, expected", [
    (None, 0, {0}), ([0, 1], 0, {0, 1}), (1, None, {1}), ([1], [0, 1], {0, 1}), (None, None, set())])
def test_every_stop_id_of_generation_config_is_known_D5(tmp_path, generation, config, expected):
    write_folder(tmp_path)
    change_json(tmp_path / "config.json", eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(tmp_path)[1].stop_ids == expected


@pytest.mark.parametrize("begins", [False, True], ids=["", "begins with a token"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_tokenizer_file_gives_the_ids_of_the_tokenizers_library(tmp_path, cut, begins):
    oracle = byte_level_bpe(cut)
    template = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    oracle.post_processor = processors.Sequence([processors.ByteLevel()] + [template] * begins)
    _, tokenizer = load(write_folder(tmp_path, tokenizer=oracle))
    for text in (SAMPLE, "", "thin  12345 \n\n x\t", "IT'S they'll\r\n", "中文 ½"):
        ids = oracle.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("where", ["chat_template.jinja", "text", "list"])
def test_a_folders_chat_template_gives_the_ids_that_transformers_gives(tmp_path, where):
    template = """{{ bos_token }}{% for m in messages %}
        {% if m['content'] %}
[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}
        {% endif %}
    {% endfor %}{% if add_generation_prompt %}<|start|>[assistant]{% endif %}"""
    write_folder(tmp_path)
    PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|start|>", eos_token="<|end|>",
                            chat_template=template).save_pretrained(tmp_path)
    messages = [{"role": "system", "content": " be good "}, {"role": "user", "content": "the 12 thieves"}]
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False)
    if where != "chat_template.jinja":
        (tmp_path / "chat_template.jinja").unlink()
        choice = [{"name": "tools", "template": "wrong"}, {"name": "default", "template": template}]
        change_json(tmp_path / "tokenizer_config.json", chat_template=template if where == "text" else choice,
               eos_token={"content": "<|end|>", "__type": "AddedToken"})
    assert load(tmp_path)[1].chat(messages) == expected


# --- GGUF files that the gguf library writes ------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    dict(), dict(tie_word_embeddings=False), dict(num_key_value_heads=9), dict(num_key_value_heads=1, head_dim=64),
], ids=str)
def test_a_gguf_file_has_the_logits_that_transformers_gives_to_what_was_written(tmp_path, settings):
    oracle = random_llama(**settings)
    model, _ = load(write_gguf(tmp_path / "model.gguf", oracle))
    same_logits(model, oracle)
    assert (model.head.weight.data_ptr() == model.embedding.weight.data_ptr()) == oracle.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_matrices_stored_in_other_types_have_the_same_values(tmp_path, kind):
    oracle = random_llama(tie_word_embeddings=False)
    write_gguf(tmp_path / "model.gguf", oracle, kind)
    assert (tmp_path / "model.gguf").stat().st_size < 0.6 * sum(weight.nbytes for weight in oracle.parameters())
    same_logits(load(tmp_path / "model.gguf")[0], oracle)


def test_matrices_stored_as_bfloat16_are_read(tmp_path):
    oracle = random_llama()
    write_gguf(tmp_path / "model.gguf", oracle, "BF16")  # 127 / 512 needs seven bits: bfloat16 has eight
    same_logits(load(tmp_path / "model.gguf")[0], oracle)


def test_a_gguf_tokenizer_gives_the_ids_of_the_tokenizers_library(tmp_path):
    fields = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eot_token_id": 303,
              "tokenizer.ggml.token_type": [3, 3] + [1] * 298 + [4] * 4,  # 4: a token that its authors added
              "tokenizer.chat_template":
              "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"}
    _, tokenizer = load(write_gguf(tmp_path / "model.gguf", random_llama(), fields=fields))
    oracle = byte_level_bpe()
    assert tokenizer.encode(SAMPLE) == oracle.encode(SAMPLE).ids
    assert tokenizer.chat([{"role": "user", "content": SAMPLE}]) == [1, *oracle.encode(SAMPLE).ids, 0]
    assert tokenizer.encode("<|unused 300|>", allow_special=True) == [300]
    assert tokenizer.stop_ids == {0, 303}  # "end of sequence" and "end of turn"


def test_loading_twice_gives_equal_weights_and_leaves_torchs_random_numbers_alone(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_llama(), "Q8_0")
    state = torch.random.get_rng_state()
    first, second = (load(tmp_path / "model.gguf")[0].state_dict() for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
