"""The committed notebooks as a reading copy: complete, tidy, short cells, links that lead somewhere.

That they run and give the stored outputs is nbval's part: pytest collects every notebook itself.
"""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
sys.path.insert(0, str(ROOT / "tools"))
import notebooks as tool  # noqa: E402

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
# Cells whose output differs between runs or machines: they time something, or show something that was timed.
TIMED = re.compile(r"seconds|stopwatch|token_times|answer_stepper|perf_counter|measure_|times")


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_notebooks():
    assert PATHS, "no notebooks: the tests below would pass without looking at anything"


@every_notebook
def test_every_cell_was_run_once_in_order_without_an_error(path):
    code = cells(path)
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run it whole: tools/notebooks.py run"
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error", output.get("evalue")
            assert output.get("name") != "stderr", output.get("text")


@every_notebook
def test_cells_are_short_and_tags_have_a_reason(path):
    for number, cell in enumerate(cells(path), 1):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        limit = 20 if "NotImplementedError" in cell.source else 14
        assert 0 < len(lines) <= limit, f"code cell {number} has {len(lines)} lines"
        for tag in cell.metadata.get("tags", []):
            assert tag == "nbval-ignore-output", f"code cell {number}: {tag}"
            assert TIMED.search(cell.source), f"code cell {number} is not compared, but times nothing"


@every_notebook
def test_nothing_is_stored_that_a_reader_without_a_kernel_would_stumble_over(path):
    text = path.read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert tool.WIDGET not in text
    assert len(text) < 1_500_000, f"{len(text) / 1e6:.1f} MB"
    assert not re.search(r"/home/|/root/|/work/|/tmp/|[A-Z]:\\\\Users", text), "a path of the machine it was made on"


@every_notebook
def test_widgets_have_a_static_twin(path):
    for cell in cells(path):
        if re.search(r"^widgets\.\w+\(", cell.source, re.M):
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source


@every_notebook
def test_the_first_cells_say_what_this_is_and_set_up(path):
    book = nbformat.read(path, as_version=4)
    first = book.cells[0].source
    assert first.startswith(f"# {path.stem[:2]} · ")
    for part in ("**The question.**", "After this lesson you can", " minutes", "next:"):
        assert part in first, part
    assert book.cells[1].source == tool.set_up()
    assert not book.cells[1].outputs


@every_notebook
def test_badges_lead_to_this_notebook_at_the_one_address(path):
    assert not tool.write_links(path), "run: python tools/notebooks.py links"
    assert tool.links(path.name) in cells(path, "markdown")[0].source


@every_notebook
def test_every_lesson_ends_with_numbers_a_mistake_and_a_question(path):
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    for part in ("## Predict", "## What to remember", "## A mistake people make", "**The next question.**"):
        assert part in text, part


@pytest.mark.parametrize("path", [*PATHS, ROOT / "README.md"], ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8") if path.suffix == ".md" else \
        "\n".join(cell.source for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    broken = [link for link in links if not (path.parent / link).exists()]
    assert not broken
    assert links


def test_the_tool_keeps_pictures_and_drops_live_widgets():
    output = nbformat.v4.new_output("display_data", {tool.WIDGET: {"model_id": "x"}, "image/png": "aGk="})
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])], metadata={"widgets": {}})
    tool.tidy(book)
    assert set(book.cells[0].outputs[0].data) == {"image/png"}
    assert "widgets" not in book.metadata


def test_the_tool_joins_what_a_cell_printed():
    pieces = [nbformat.v4.new_output("stream", name=name, text=text)
              for name, text in (("stdout", "a"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d"))]
    assert [(o.name, o.text) for o in tool.joined(pieces)] == [("stdout", "ab\n"), ("stderr", "c"), ("stdout", "d")]


def test_the_tool_explains_itself_when_called_wrongly():
    command = [sys.executable, ROOT / "tools" / "notebooks.py", "nonsense"]
    called = subprocess.run(command, capture_output=True, text=True)
    assert called.returncode == 2
    assert "run" in called.stderr
