"""Keep the committed notebooks in order: `python tools/notebooks.py run [files]`, `python tools/notebooks.py links`.

`run` executes notebooks from a fresh kernel and stores their outputs, the reading copy. Live widgets are left out of
it (a front end without a kernel would show an error in their place); their pictures stay, with their words as `alt`.
`links` writes the address of the repository, which stands in pyproject.toml alone, into every badge and set-up cell.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"


def repository() -> str:
    """The project's address, as pyproject.toml has it."""
    return re.search(r'^Repository = "(https://github\.com/[^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def links(name: str) -> str:
    """The line under a lesson's title that opens it elsewhere."""
    slug = repository().removeprefix("https://github.com/")
    return (f"[Open in Binder](https://mybinder.org/v2/gh/{slug}/main?urlpath=lab/tree/notebooks/{name}) · "
            f"[Open in Colab](https://colab.research.google.com/github/{slug}/blob/main/notebooks/{name})")


def set_up() -> str:
    """The source of every set-up cell: it does nothing where the package is already there."""
    return ('import importlib.util\n'
            'if importlib.util.find_spec("llm_lessons") is None:  # on Colab: fetch the course\'s package, once\n'
            f'    %pip install -q "llm-lessons[classroom] @ git+{repository()}"')


def write_links(path: Path) -> bool:
    """Bring a notebook's badges and set-up cell up to date; True when something changed."""
    book = nbformat.read(path, as_version=4)
    before = nbformat.writes(book)
    first = book.cells[0]
    first.source = re.sub(r"^\[Open in Binder\].*$", links(path.name), first.source, flags=re.M)
    book.cells[1].source = set_up()
    if nbformat.writes(book) == before:
        return False
    nbformat.write(book, path)
    return True


def run(path: Path) -> float:
    """Execute a notebook in its folder and store it with its outputs; returns the seconds it took."""
    book = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}},
                   store_widget_state=False).execute()
    seconds = time.perf_counter() - start
    tidy(book)
    nbformat.write(book, path)
    return seconds


def tidy(book: nbformat.NotebookNode) -> None:
    """Drop what differs from run to run, or shows an error where no kernel is."""
    book.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}})
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
                describe(output)


def describe(output: nbformat.NotebookNode) -> None:
    """Say what a picture shows where nbconvert looks for it: its words become the `alt` text of the HTML page."""
    data = output.get("data", {})
    if "image/png" in data and ": " in data.get("text/plain", ""):  # "Picture: ..." or "Interactive: ..."
        output.metadata["image/png"] = {"alt": data["text/plain"].split(": ", 1)[1]}


def joined(outputs: list) -> list:
    """What a cell printed as one output: the kernel sends it in pieces, cut anew in every run."""
    whole: list = []
    for output in outputs:
        if whole and output.output_type == "stream" and output.name == whole[-1].get("name"):
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def main(arguments: list[str]) -> int:
    command, paths = arguments[0] if arguments else "", [Path(name).resolve() for name in arguments[1:]]
    paths = paths or sorted(NOTEBOOKS.glob("*.ipynb"))
    if command == "run":
        for path in paths:
            print(f"{path.name}: {run(path):.0f} s")
    elif command == "links":
        for path in paths:
            print(f"{path.name}: {'changed' if write_links(path) else 'up to date'}")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
