"""The benchmark's own arithmetic: operations by hand, and a table that divides the right way."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

from tiny import SHAPE

import llm_lessons as ll

spec = importlib.util.spec_from_file_location("engines", Path(__file__).parent.parent / "benchmarks" / "engines.py")
engines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engines)

SMOLLM2 = ll.ModelConfig(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, context=8192)


def operations(tokens):
    matrices = 30 * (576 * 576 * 2 + 2 * 192 * 576 + 3 * 576 * 1536)  # q and output, k and v, gate, up and down
    pairs = sum(range(1, tokens + 1))  # query i sees i + 1 keys
    attention = 30 * 9 * pairs * (2 * 64 + 2 * 64)  # scores, and mixing the values
    return 2 * matrices * tokens + attention + 2 * 49152 * 576


def test_the_table_has_tokens_per_second_ratios_and_shares():
    rivals = [SimpleNamespace(name="ours", dtype="float32", weight_bytes=2e9),
              SimpleNamespace(name="transformers float32", dtype="float32", weight_bytes=2e9)]
    found = {("ours", "decode", 32): 0.1, ("transformers float32", "decode", 32): 0.25,
             ("ours", "prefill", 128): 2.0, ("transformers float32", "prefill", 128): 1.0}
    roof = ll.Roofline({"float32": 2 * operations(128)}, 40e9, {})
    lines = engines.table(found, rivals, ll.Shape.of(SMOLLM2), roof).splitlines()
    assert "| decode | 32 | ours | 10.0 | 2.50 | 50% of bandwidth (weights alone) |" in lines
    assert "| prefill | 128 | ours | 64.0 | 0.50 | 25% of float32 arithmetic |" in lines
    assert "| prefill | 128 | transformers float32 | 128.0 | 1.00 | 50% of float32 arithmetic |" in lines


def test_the_course_is_timed_with_prefill_and_decode_apart(monkeypatch):
    course = engines.Course.__new__(engines.Course)
    course.model = ll.Model.random(ll.ModelConfig(**SHAPE))
    monkeypatch.setattr(ll, "timed", lambda tokens: [(token, second) for token, second in zip(tokens, (5.0, 1.0, 3.0))])
    assert course.seconds([1, 2, 3], 2) == (5.0, 2.0)


def test_the_record_says_where_its_figures_come_from():
    found = {("ours", "decode", 32): 0.08, ("ours", "prefill", 512): 2.0}
    record = engines.record(found, "a machine")
    assert record["machine"] == "a machine" and record["date"][:2] == "20"
    assert "benchmarks/engines.py" in record["command"]
    assert record["results"] == [
        {"job": "decode", "tokens": 32, "engine": "ours", "tokens_per_second": 12.5},
        {"job": "prefill", "tokens": 512, "engine": "ours", "tokens_per_second": 256.0}]
