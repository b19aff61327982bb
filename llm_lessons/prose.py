"""The course's own prose: original English text on how inference works, to train a tokenizer on and to score."""

from importlib.resources import files


def course_prose() -> str:
    """About 30 kB of plain text, paragraphs parted by empty lines. Written for the course (Apache-2.0)."""
    return (files(__package__) / "data" / "course_prose.txt").read_text(encoding="utf-8")
