"""A GGUF file's own 4- and 8-bit weights: read as the gguf library reads them, and run without a float model.

Blocks are written and de-quantized by the gguf library; expected logits come from transformers.
"""

import importlib
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from checkpoints import random_llama, write_folder, write_gguf
from gguf.quants import dequantize
from tiny import random_ids

import llm_lessons as ll
from llm_lessons.gguf_file import BLOCKS, GGUFFile

packed = importlib.import_module("llm_lessons.packed_linear")

HAS_KERNELS = all(packed._works(kind, "cpu") for kind in (ll.Int4Linear, ll.Int8Linear))
KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}
MATRICES = ("q", "k", "v", "output", "gate", "up", "down")
HALVES = {"Q4_1": (0, 2), "Q8_0": (0,)}  # where a block has float16 numbers; the others are codes


def load(path, weights="stored"):
    return ll.load_pretrained(path, weights=weights, device="cpu")[0]


def refused(path, message, weights="stored"):
    with pytest.raises(ValueError, match=message):
        load(path, weights)


def random_blocks(kind, rows, blocks, seed=0):
    """Bytes of a matrix, drawn at random: every code appears, scales and minima of all sizes and of both signs."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[KINDS[kind]][1]), np.uint8)
    for at in HALVES[kind]:
        numbers = generator.normal(size=(rows, blocks)) * 2.0 ** generator.integers(-24, 8, (rows, blocks))
        data[..., at:at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def check_values(weight, expected):
    """Code · scale + minimum is the very number of the gguf library: 4 or 8 bits times 11, plus 11, rounded once."""
    values = weight.codes.float().unflatten(-1, (-1, 32)).mul_(weight.scale[..., None])
    if weight.minimum is not None:
        values += weight.minimum[..., None]
    assert np.array_equal(values.flatten(-2).numpy(), expected)


# --- Blocks -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows, blocks", [(1, 1), (1, 3), (5, 1), (97, 9)])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_the_values_that_the_gguf_library_gives(kind, rows, blocks):
    data = random_blocks(kind, rows, blocks)
    before = data.copy()
    weight = BLOCKS[kind](data, 32 * blocks)
    assert np.array_equal(data, before) and weight.shape == (rows, 32 * blocks) and weight.group_size == 32
    assert (weight.bits, weight.symmetric) == {"Q4_1": (4, False), "Q8_0": (8, True)}[kind]
    expected = dequantize(data, KINDS[kind])
    check_values(weight, expected)
    torch.testing.assert_close(weight.dequantize(), torch.from_numpy(expected), rtol=1e-6, atol=1e-38)
    if rows == 97:
        codes = 2 ** (weight.bits - 1) * weight.symmetric + weight.codes
        assert codes.unique().tolist() == list(range(2**weight.bits))  # -128 too, which quantize never gives


def test_every_weight_of_the_real_file_is_the_gguf_librarys(gguf_path):
    """The rows of q and k stand in another order there: of a head's, row 2i is our row i, row 2i + 1 our D/2 + i."""
    file = GGUFFile(gguf_path)
    reorder = {"q": 9, "k": 3}
    for name, layer in [("embedding", None), *((name, layer) for layer in range(30) for name in MATRICES)]:
        tensor = file._tensors[file.names[name].format(layer)]
        expected = dequantize(tensor.data, tensor.tensor_type)
        if name in reorder:
            places = np.arange(len(expected)).reshape(reorder[name], 32, 2)
            expected = expected[np.concatenate((places[..., 0], places[..., 1]), axis=1).ravel()]
        check_values(file.quantized(name, layer), expected)


# --- Small files ------------------------------------------------------------------------------------------------------

def on_the_files_grid(model, kind):
    """What the gguf library makes of each matrix when it writes it as `kind` and reads it again."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                blocks = gguf.quants.quantize(weight.numpy(), KINDS[kind])
                weight.copy_(torch.from_numpy(dequantize(blocks, KINDS[kind])))
    return model


def uneven(model):
    """Blocks of very different sizes in a row: with one scale a row, small ones keep few bits."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.view(-1, 32).mul_(2.0 ** torch.arange(weight.numel() // 32).remainder(3)[:, None] / 2)
    return model


def distance(ours, expected):
    return float((ours - expected).norm() / expected.norm())


def logits(oracle, ids):
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("settings", [
    dict(), dict(tie_word_embeddings=False), dict(num_key_value_heads=1, head_dim=64)], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("change", [lambda model: model, uneven], ids=["", "uneven"])
def test_logits_are_those_of_the_files_weights(tmp_path, kind, settings, change):
    oracle = change(random_llama(**settings))
    path = write_gguf(tmp_path / "model.gguf", oracle, kind)
    ids = random_ids(70, vocab=304)
    expected = logits(on_the_files_grid(oracle, kind), ids)
    for model in (load(path), load(path, "bfloat16")):
        assert distance(model(ids).float(), expected) < 0.04
    kernels = {block.ffn.down.kernel for block in load(path).blocks}
    assert kernels == ({"Q4_1": {"int4"}, "Q8_0": {"int8"}}[kind] if HAS_KERNELS else {"plain"})


def test_bytes_are_those_of_the_files_codes_and_of_bfloat16_scales_B6(tmp_path):
    """2 layers of 480·288, 288·288, 128·288 and 288·64 weights; 304 · 288 in the table, 3 scales a row; 5 norms."""
    rows, weights, table = 480 + 288 + 128 + 288, 480 * 288 + 288 * 288 + 128 * 288 + 288 * 64, 304 * (288 + 3 * 2)
    for kind, block_bytes in (("Q4_1", weights // 2 + weights // 32 * 4), ("Q8_0", weights + rows * 2)):
        for tied in (True, False):
            model = load(write_gguf(tmp_path / f"{kind}{tied}.gguf", random_llama(tie_word_embeddings=tied), kind))
            if HAS_KERNELS:
                assert model.nbytes == 2 * block_bytes + table * (2 - tied) + 5 * 288 * 2
            assert (model.embedding.table is model.head) == tied


def patched(path, tensor, at, value):
    """Write bytes into a tensor of a file."""
    start = next(int(stored.data_offset) for stored in gguf.GGUFReader(path).tensors if stored.name == tensor)
    with open(path, "r+b") as file:
        file.seek(start + at)
        file.write(value)
    return path


def test_a_code_of_minus_128_is_run_as_it_is_E3(tmp_path):
    oracle = random_llama()
    path = write_gguf(tmp_path / "model.gguf", oracle, "Q8_0")
    patched(path, "blk.1.ffn_down.weight", 2, b"\x80" * 32)  # the first block: 32 times -128 · 2^-9
    with torch.no_grad():
        oracle.model.layers[1].mlp.down_proj.weight[0, :32] = -0.25
    ids = random_ids(70, vocab=304)
    assert distance(load(path)(ids), logits(oracle, ids)) < 0.04
    assert load(path).blocks[1].ffn.down.rows(torch.tensor([0]))[0, :32].tolist() == [-0.25] * 32


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_0", "Q5_1", "F16", "BF16", "F32"])
def test_other_kinds_of_blocks_are_refused_by_name(tmp_path, kind):
    path = write_gguf(tmp_path / "model.gguf", random_llama(), kind)
    refused(path, rf"^token_embd.weight is stored as {kind}; weights='stored' runs Q4_1 and Q8_0: use another kind")
    load(path, "int8")  # as that says


def test_one_matrix_of_another_kind_is_refused_by_its_name(tmp_path):
    half = np.ones((96, 288), np.float16)
    path = write_gguf(tmp_path / "model.gguf", random_llama(), "Q4_1", tensors={"blk.1.attn_v.weight": half})
    refused(path, "^blk.1.attn_v.weight is stored as F16; ")


def test_q_k_and_v_in_different_kinds_are_refused_by_the_layers_name(tmp_path, monkeypatch):
    path, read = write_gguf(tmp_path / "model.gguf", random_llama(), "Q4_1"), GGUFFile.quantized
    monkeypatch.setattr(GGUFFile, "quantized", lambda self, name, layer: (
        ll.quantize(torch.ones(96, 288), 8, 32) if (name, layer) == ("v", 1) else read(self, name, layer)))
    refused(path, "^blocks.1.attention.qkv: these matrices are quantized in different ways .*use another kind")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind, at", [(kind, at) for kind in HALVES for at in HALVES[kind]])
def test_scales_and_minima_that_are_no_numbers_are_refused_by_name(tmp_path, kind, at, bad):
    for name in ("blk.1.ffn_down.weight", "token_embd.weight"):
        path = write_gguf(tmp_path / "model.gguf", random_llama(), kind)
        refused(patched(path, name, at, np.float16(bad).tobytes()), f"^{name} holds NaN or infinity")


@pytest.mark.parametrize("changes, message", [
    ({"blk.1.ffn_up.weight": None}, "the weights lack blk.1.ffn_up.weight$"),
    ({"blk.0.attn_q.bias": np.zeros(288, np.float32)}, "the weights hold blk.0.attn_q.bias, which"),
    ({"output_norm.weight": np.ones(1, np.float32)}, r"output_norm.weight has the shape \[1\], but .* \[288\]"),
    ({"blk.0.attn_q.weight": np.ones((256, 288), np.float32)}, r"blk.0.attn_q.weight has the shape \[256, 288\], but"),
    ({"blk.0.ffn_down.weight": np.ones((288, 96), np.float32)}, r"ffn_down.weight has the shape \[288, 96\], but"),
    ({"token_embd.weight": np.ones((303, 288), np.float32)}, r"token_embd.weight has the shape \[303, 288\], but"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_missing_unexpected_and_misshapen_tensors_are_refused_by_name(tmp_path, changes, message):
    refused(write_gguf(tmp_path / "model.gguf", random_llama(), "Q8_0", tensors=changes), message)


def test_a_truncated_file_and_a_folder_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_llama(num_hidden_layers=1), "Q4_1")
    data = path.read_bytes()
    for kept in (0, 100, len(data) // 2, len(data) - 33):
        path.write_bytes(data[:kept])
        refused(path, "model.gguf is not a complete GGUF file.*fetch it again")
    (tmp_path / "folder").mkdir()
    write_folder(tmp_path / "folder")
    refused(tmp_path / "folder", "^weights='stored' runs .* of a GGUF file.*use 'bfloat16', 'int8' or 'int4'")


@pytest.mark.parametrize("weights, bytes_each", [("int8", 1 + 2 / 288), ("int4", 0.5 + 4 / 32)])
def test_int8_and_int4_are_quantized_from_any_checkpoint(tmp_path, weights, bytes_each):
    oracle = random_llama(tie_word_embeddings=False)
    ids = random_ids(70, vocab=304)
    for path in (write_folder(tmp_path, oracle), write_gguf(tmp_path / "model.gguf", oracle)):
        model = load(path, weights)
        assert distance(model(ids), logits(oracle, ids)) < {"int8": 0.04, "int4": 0.25}[weights]
        if HAS_KERNELS:
            layer = model.blocks[1].attention.output
            assert layer.kernel == weights
            assert sum(part.nbytes for part in layer.buffers()) == 288 * 288 * bytes_each


# --- The real model ---------------------------------------------------------------------------------------------------

def test_the_stored_weights_agree_with_the_float32_model(smollm2):
    """On 2,000 positions of a text outside its training: same top-1 on 95 %, KL below 0.005, perplexity to 1 %."""
    baseline, tokenizer = smollm2
    model = load("smollm2-135m")
    ids = torch.tensor(tokenizer.encode(ll.course_prose())[4000:6001])
    same, divergence, losses = 0, 0.0, torch.zeros(2)
    for read, wanted in zip(ids[:-1].split(500), ids[1:].split(500)):
        p, q = (each(read).log_softmax(-1) for each in (baseline, model))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float((p.exp() * (p - q)).sum())
        losses -= torch.stack([each.gather(1, wanted[:, None]).sum() for each in (p, q)])
    assert same >= 0.95 * 2000 and divergence < 0.005 * 2000
    assert abs(math.exp((losses[1] - losses[0]) / 2000) - 1) < 0.01


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_loading_and_writing_needs_less_memory_than_the_float32_weights_alone(gguf_path):
    """They are 513 MiB; torch itself, once imported, takes about 200."""
    result = subprocess.run([sys.executable, "-c", """if True:
        import llm_lessons as ll
        model, tokenizer = ll.load_pretrained(weights="stored", device="cpu")
        written = list(ll.generate(model, tokenizer.encode("The capital of France is"), max_new_tokens=32))
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(len(written), model.nbytes, int(peak.split()[1]) * 1024)
        """], capture_output=True, text=True)
    written, weights, peak = map(int, result.stdout.split())
    assert written == 32 and weights < 96 * 2**20 and weights < peak < 450 * 2**20, result.stderr
