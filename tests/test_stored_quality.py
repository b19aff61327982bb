"""The stored table of quality: complete, true today, read back as written, and the benchmark that makes it."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import one_thread, random_ids, tiny_model  # noqa: F401

import llm_lessons as ll
from llm_lessons.classroom import plots, reference
from llm_lessons.classroom.reference import StoredQuality, StoredRow, stored_quality

spec = importlib.util.spec_from_file_location("quality_table", Path(__file__).parent.parent / "benchmarks/quality.py")
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def line(**changed):
    fields = dict(label="4 bits, rows, symmetric", bits_per_weight=4.02, perplexity=[60, 50, 70],
                  ratio=[1.02, 1.01, 1.03], kl=[0.02, 0.01, 0.03], agreement=[0.9, 0.8, 0.95], right=9,
                  opening=[61, 1.02, 0.02], bits=4, group=None, symmetric=True)
    return {**fields, **changed}


def table(*lines, **changed):
    fields = dict(machine="a machine", date="2026-11-30", command="python benchmarks/quality.py", baseline="float32",
                  text="prose", positions=7049, questions=10)
    return StoredQuality(**{**fields, **changed}, rows=tuple(StoredRow(**each) for each in lines or [line()]))


def test_the_committed_table_is_complete():
    found = stored_quality()
    assert "benchmarks/quality.py" in found.command and "smollm2-135m" in found.baseline
    assert found.positions >= 2048 and found.questions == 10 and "torch" in found.machine.lower()
    assert [(row.bits, row.group, row.symmetric) for row in found.rows if row.bits] == list(benchmark.GRIDS)
    assert {row.bits for row in found.rows} == {8, 6, 5, 4, 3, 2, None}
    others = [row.label for row in found.rows if not row.bits]
    assert others[0] == "float32, the baseline" and others[2:] == [f"weights={name!r}" for name in benchmark.WEIGHTS]
    assert found.rows[0].ratio == (1, 1, 1) and found.rows[0].kl == (0, 0, 0) and found.rows[0].right == 10
    assert found.row(4, 32, symmetric=False).kl.value == pytest.approx(0, abs=1e-6), "the file's own grid"
    assert plots.quality_cliff([row for row in found.rows if row.bits]).png()


def test_the_committed_figures_are_those_of_today(smollm2):
    """The first of the stored positions, scored again: the text, the model and the code have not moved apart."""
    model, tokenizer = smollm2
    ids = tokenizer.encode(ll.course_prose())
    found = stored_quality()
    assert found.positions == len(ids) - 1
    today = ll.score(model, ids[:reference.OPENING + 1]).perplexity.value
    assert today == pytest.approx(found.rows[0].opening[0], rel=1e-3)


def test_a_table_comes_back_from_its_file(tmp_path):
    path = tmp_path / "quality.json"
    assert stored_quality(path) is None
    stored = table(line(), line(label="weights='int8'", bits=None, symmetric=None, ratio=[1.0012345678, 1, 1.01]))
    path.write_text(json.dumps(stored.record()))
    found = stored_quality(path)
    assert found.rows[0] == stored.rows[0] and found.rows[1].ratio.value == 1.00123
    assert (found.machine, found.positions) == ("a machine", 7049)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": 3}'])
def test_a_file_that_is_no_table_is_named(tmp_path, monkeypatch, text):
    path = tmp_path / "quality.json"
    path.write_text(text)
    monkeypatch.setattr(reference, "QUALITY", path)
    with pytest.raises(ValueError, match="quality.json is not a stored run of benchmarks/quality.py"):
        stored_quality()


@pytest.mark.parametrize(("changed", "words"), [
    ({"label": ""}, "label"), ({"bits_per_weight": 0}, "bits_per_weight"),
    ({"perplexity": [0.5, 0.4, 2]}, "perplexity"),
    ({"ratio": [1.2, 1.3, 1.4]}, "ratio 1.2 must lie between"), ({"kl": [math.nan] * 3}, "kl"),
    ({"kl": [0.1, -0.5, 0.2]}, "kl"), ({"agreement": [0.9, 0.8, 1.2]}, "agreement"), ({"right": 11}, "more right"),
    ({"right": -1}, "right"), ({"bits": 0}, "bits"), ({"group": 1.5}, "group"), ({"symmetric": None}, "symmetric"),
    ({"bits": None}, "symmetric"), ({"opening": [60, math.inf, 0]}, "opening ratio"), ({"opening": [1.0]}, "shorter")])
def test_lines_that_cannot_be_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        table(line(**changed))


@pytest.mark.parametrize("changed", [{"machine": ""}, {"date": "yesterday"}, {"command": None}, {"positions": 0},
                                     {"baseline": ""}, {"text": 3}, {"questions": True}])
def test_tables_of_unknown_origin_are_refused(changed):
    with pytest.raises(ValueError, match=f"{next(iter(changed))}|isoformat"):
        table(**changed)


def test_a_row_is_found_by_its_grid_and_the_cheapest_by_its_tolerance():
    found = table(line(), line(bits=8, bits_per_weight=8.5, group=32, ratio=[1.001, 1.0, 1.002]),
                  line(bits=2, bits_per_weight=3, symmetric=False, ratio=[1, 1, 1], kl=[0, 0, 0]),
                  line(bits=None, bits_per_weight=3.5, symmetric=None, ratio=[1, 1, 1]))
    assert found.row(8, 32).bits_per_weight == 8.5 and found.row(4).bits == 4
    assert found.cheapest(0.03).bits == 4 and found.cheapest(0.029).bits == 8, "the upper end decides"
    with pytest.raises(ValueError, match=r"no row \(8, 32, False\); it has \(4, None, True\), \(8, 32, True\)"):
        found.row(8, 32, symmetric=False)
    with pytest.raises(ValueError, match="within 0.1%"):
        found.cheapest(0.001)


def test_the_benchmark_prints_each_figure_with_its_interval():
    rows = [StoredRow(**line()), StoredRow(**line(perplexity=[1.5e8, 1e8, 2e8], ratio=[103.64, 9.5, 3e6]))]
    lines = benchmark.table(rows).splitlines()
    assert lines[2] == ("| 4 bits, rows, symmetric | 4.02 | 60.0 (50.0 to 70.0) | 1.0200 (1.0100 to 1.0300) | "
                        "0.0200 (0.0100 to 0.0300) | 90.0 (80.0 to 95.0) | 9 |")
    assert "| 1.5e+08 (1e+08 to 2e+08) | 103.6 (9.5000 to 3e+06) |" in lines[3]


def test_the_benchmark_measures_a_row_against_its_baseline(monkeypatch):
    monkeypatch.setattr(ll, "count_right", lambda model, tokenizer: 4)
    monkeypatch.setattr(benchmark, "OPENING", 100)
    model, ids = tiny_model(), random_ids(1100)
    row, baseline = benchmark.measure("base", model, SimpleNamespace(), ids, None, bits_per_weight=32)
    assert row.ratio == (1, 1, 1) and row.right == 4 and row.opening[1:] == (1, 0)
    candidate = ll.simulate(model, 3)
    row, found = benchmark.measure("3", candidate, SimpleNamespace(), ids, baseline, bits_per_weight=3, bits=3,
                                   symmetric=True)
    assert row.ratio.value == pytest.approx(row.perplexity.value / baseline.perplexity.value)
    assert row.opening[1] == pytest.approx(math.exp((found.loss[:100] - baseline.loss[:100]).mean()), rel=1e-5)
    assert row.opening[0] == pytest.approx(math.exp(found.loss[:100].mean()), rel=1e-5)


def test_bits_as_they_lie_in_memory():
    assert benchmark.stored_bits(tiny_model()) == 32
    assert benchmark.stored_bits(tiny_model(dtype=torch.bfloat16)) == 16
