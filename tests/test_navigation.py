"""Finding one's way: from lesson to lesson, and from a word of the glossary to the section that explains it."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"- \*\*(?P<term>[^*]+)\*\*(?: \((?P<long>[^)]+)\))?: (?P<words>.+) "
                   r"\[(?P<number>\d\d) · (?P<section>.+)\]\((?P<link>[^)]+)\)")


def text_of(path) -> str:
    """A lesson's text and code; a line that begins with # is a heading, not a comment."""
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(re.sub(r"```.*?```", "", cell.source, flags=re.S) if cell.cell_type == "markdown" else
                       re.sub(r"^#", " #", cell.source, flags=re.M) for cell in cells)


def title(path) -> str:
    return text_of(path).splitlines()[0].removeprefix("# ")


def section(text: str, heading: str) -> str:
    """A heading and what stands below it, down to the next of its rank or a higher one."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.M)
    assert found, f"there is no section {heading!r}"
    return heading + re.split(rf"^#{{1,{len(found[1])}}} ", text[found.end():], flags=re.M)[0]


# --- From lesson to lesson ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_lesson_leads_to_the_one_before_the_contents_and_the_one_after(path):
    line = next(line for line in text_of(path).splitlines() if "[Contents](" in line)
    assert re.findall(r"\[Contents\]\(([^)]+)\)", line) == ["../README.md#the-lessons"]
    at = PATHS.index(path)
    for word, index in (("previous", at - 1), ("next", at + 1)):
        links = re.findall(rf"{word}: \[([^\]]+)\]\(([^)]+)\)", line)
        if 0 <= index < len(PATHS):
            other = PATHS[index]
            assert [(name.lower(), link) for name, link in links] == [(other.stem.replace("_", " "), other.name)]
        else:  # before the first there is nothing, behind the last the contents
            assert {link for _, link in links} <= {"../README.md#the-lessons"}


def test_the_contents_list_every_lesson_once_in_order_by_its_title():
    rows = re.findall(r"^\| \[([^\]]+)\]\(notebooks/([^)]+)\) \|", README.split("## The lessons")[1], re.M)
    assert rows == [(title(path).replace(" · ", " "), path.name) for path in PATHS]


# --- The claims -----------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.M)


def test_every_claim_reads_the_same_wherever_it_stands_and_is_answered_in_the_lessons_it_names():
    answered, claims = {}, {}
    for path in PATHS:
        text = text_of(path).split("## The claims")[-1].split("The whole list")[0]
        for number, claim, _ in ROW.findall(text):
            answered.setdefault(int(number), []).append(path.stem[:2])
            claims.setdefault(int(number), set()).add(claim)
    first = {int(number): (claim, lessons.split(", "))
             for number, claim, lessons in ROW.findall(text_of(PATHS[0]).split("The whole list")[1])}
    last = {int(number): (claim, re.findall(r"\[(\d\d)\]\(notebooks/\1_", where))
            for number, claim, where in ROW.findall(README.split("## What the articles claim")[1])}
    assert sorted(first) == list(range(1, 30))
    assert first == last == {number: (claim, answered[number]) for number, (claim,) in sorted(claims.items())}


# --- The glossary ---------------------------------------------------------------------------------------------------

ENTRIES = [match for line in GLOSSARY.splitlines() if line.startswith("- ") for match in [ENTRY.fullmatch(line)]]


def test_every_line_of_the_glossary_is_an_entry_and_they_are_sorted():
    assert all(ENTRIES) and len(ENTRIES) >= 40
    terms = [entry["term"].casefold() for entry in ENTRIES]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry and entry["term"])
def test_a_term_is_used_in_the_section_that_its_entry_leads_to(entry):
    path = ROOT / "docs" / entry["link"]
    assert path.exists() and path.name.startswith(entry["number"] + "_")
    text = section(text_of(path), entry["section"])
    names = [name for name in (entry["term"], entry["long"]) if name]
    assert any(re.search(rf"(?<!\w){re.escape(name)}s?(?!\w)", text, re.I) for name in names)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry and entry["term"])
def test_an_entry_is_one_or_two_sentences(entry):
    assert len(re.findall(r"[.?](?= |$)", entry["words"])) in (1, 2)
    assert len(entry["words"]) < 200


def test_the_glossary_leads_to_every_lesson_and_the_readme_to_the_glossary():
    assert {entry["number"] for entry in ENTRIES} == {path.stem[:2] for path in PATHS}
    assert "](docs/glossary.md)" in README
