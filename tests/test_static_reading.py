"""The committed notebooks without a kernel, without JavaScript and without a network: as HTML, on GitHub, in print.

A page made by nbconvert must show all that a notebook holds: every picture, also those that stand for widgets, with
its words for a screen reader; every printed line; hints and solutions; formulas that need no typesetting program.
"""

import base64
import re
import socket
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter

PATHS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
CODE = re.compile(r"```.*?```|`[^`]*`", re.S)


class Page(HTMLParser):
    """What stands in a page's <main>: its pictures, as (source, alt); its tags; its text, and that in <details>."""

    def __init__(self, html: str):
        super().__init__()
        self.pictures, self.tags, self.attributes, self.text, self.folded, self._open = [], set(), [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag in ("main", "details"):
            self._open.append(tag)
        if self._open:
            found = dict(attributes)
            self.tags.add(tag)
            self.attributes += attributes
            if tag == "img":
                self.pictures.append((found.get("src"), found.get("alt")))

    def handle_endtag(self, tag):
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.text.append(data)
        if self._open and self._open[-1] == "details":
            self.folded.append(data)


@cache
def page(path, template="lab") -> Page:
    def refuse(*arguments):
        raise AssertionError("this page needs the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        html, _ = HTMLExporter(template_name=template).from_filename(str(path))
    return Page(html)


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def outputs(path):
    return [output for cell in cells(path, "code") for output in cell.outputs]


@every_notebook
def test_every_picture_is_in_the_page_with_its_words(path):
    expected = []
    for output in outputs(path):
        if "image/png" in output.get("data", {}):
            png = base64.b64decode(output.data["image/png"])
            assert png.startswith(b"\x89PNG\r\n\x1a\n")
            words = re.match(r"(?:Picture|Interactive): (.{20,})", output.data["text/plain"], re.S)
            assert words, f"say what it shows: {output.data['text/plain']}"
            expected.append((png, words[1]))
    assert expected, "a lesson has a picture"
    for template in ("lab", "classic"):
        shown = page(path, template).pictures
        assert all(source.startswith("data:image/png;base64,") for source, _ in shown)
        assert [base64.b64decode(source.split(",")[1]) for source, _ in shown] == [png for png, _ in expected]
    # nbconvert's other template, lab, writes no alternative text of ours, nor do GitHub and JupyterLab.
    assert [alt for _, alt in shown] == [words for _, words in expected], "run: python tools/notebooks.py run"


@every_notebook
def test_what_to_see_is_said_below_every_picture(path):
    book = nbformat.read(path, as_version=4)
    for number, cell in enumerate(book.cells):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert "**What to see:**" in book.cells[number + 1].source, cell.source


@every_notebook
def test_outputs_are_text_and_pictures(path):
    kinds = {kind for output in outputs(path) for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "image/png"}, "GitHub and print show neither HTML with scripts nor live widgets"


@every_notebook
def test_the_page_runs_and_loads_nothing(path):
    assert not page(path).tags & {"script", "iframe", "object", "embed", "link", "form", "video", "audio"}
    for name, value in page(path).attributes:
        assert not name.startswith("on"), f"{name}={value}"
        assert name != "src" or value.startswith("data:"), value
        assert name != "href" or not value.startswith(("javascript:", "data:")), value


@every_notebook
def test_every_printed_line_is_in_the_page(path):
    text = "".join(page(path).text)
    for output in outputs(path):
        printed = output.get("text") or ("" if "image/png" in output.data else output.data["text/plain"])
        assert printed.strip() in text


@every_notebook
def test_formulas_can_be_read_without_mathjax(path):
    for number, cell in enumerate(cells(path, "markdown")):
        for line in CODE.sub("", cell.source).splitlines():
            assert "$" not in line, f"markdown cell {number}: write it as code, or in words: {line}"


@every_notebook
def test_hints_and_solutions_unfold(path):
    """They are plain <details>; the solution in it is rendered as code, not as the Markdown it was written in."""
    source = "".join(cell.source for cell in cells(path, "markdown"))
    solutions = re.findall(r"<summary>Solution</summary>\n\n```python\n(.*?)\n```", source, re.S)
    folded = "".join(page(path).folded)
    summaries = re.findall(r"<details><summary>(.+?)</summary>", source)
    assert source.count("<details>") == source.count("</details>") == len(summaries)
    assert len(solutions) == summaries.count("Solution")
    assert all(CODE.sub("", summary) in folded for summary in summaries)
    for solution in solutions:
        assert solution.strip() in folded
    assert "```" not in folded
