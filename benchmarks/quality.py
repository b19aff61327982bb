"""What fewer bits cost in quality: a table over bits, groups and grids, each figure with its 95 % interval.

    python benchmarks/quality.py                         prints a table
    python benchmarks/quality.py --save quality.json     and stores it, for lesson 08
    python benchmarks/quality.py --model FOLDER          against other weights, such as the original bfloat16 ones

Every figure is measured against a baseline: the same model with its weights in float32. The course's model comes from a
file of 4 bits (Q4_1: groups of 32, each with a minimum), so "no change" in this table means: as good as that file. On
these weights the asymmetric grid of 4 bits in groups of 32 is no test, but the grid they already lie on. With 5 bits on
the same groups it is worse than a symmetric one: 31 steps lie on 15 so that weights of the lower half are always
rounded down and those of the upper half up, away from the middle, and all weights grow by 2 %. Groups of 96 span three
of the file's, and show what an asymmetric grid does otherwise.

The rows with a number of bits are simulated: float matrices, each rounded and made float again; embedding and output
head stay as they are, and have a row of their own. The last rows are what `load_pretrained(weights=...)` gives,
activations in bfloat16 included. The text is the course's own prose (2026), which the model has never seen.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import llm_lessons as ll
from llm_lessons.classroom.reference import OPENING, StoredQuality, StoredRow
from llm_lessons.classroom.style import this_machine
from llm_lessons.quality import QUESTIONS, Estimate, Score

GRIDS = (  # bits, group size (None: a whole row), symmetric; groups must divide rows of 576 and of 1536
    (8, None, True), (8, 32, True),
    (6, None, True), (6, 32, True), (6, 96, False),
    (5, None, True), (5, 32, True), (5, 96, False), (5, 32, False),
    (4, None, True), (4, 96, True), (4, 32, True), (4, 16, True), (4, None, False), (4, 96, False), (4, 32, False),
    (3, None, True), (3, 32, True), (3, 16, True), (3, 96, False),
    (2, None, True), (2, 32, True), (2, 16, True), (2, 96, False),
)
WEIGHTS = ("bfloat16", "int8", "int4", "stored")  # of load_pretrained


def label(bits: int, group: int | None, symmetric: bool) -> str:
    return f"{bits} bits, {f'groups of {group}' if group else 'rows'}, {'symmetric' if symmetric else 'asymmetric'}"


def stored_bits(model: ll.Model) -> float:
    """Bits for each weight of the blocks' linear layers, as they lie in memory."""
    halves = [half for block in model.blocks for half in (block.attention, block.ffn)]  # without the norms
    parts = ll.Shape.of(model).parts
    nbytes = sum(stored.nbytes for half in halves for stored in (*half.parameters(), *half.buffers()))
    return 8 * nbytes / (parts["attention"] + parts["ffn"])


def measure(name: str, model: ll.Model, tokenizer, ids, baseline: Score | None, **grid) -> tuple[StoredRow, Score]:
    """One row of the table; without a baseline, the row of the baseline itself."""
    found = ll.score(model, ids)
    compared = ll.compare(found, baseline or found)
    loss, extra, kl = (values[:OPENING].double().mean() for values in
                       (found.loss, compared.extra_loss, compared.divergence))
    row = StoredRow(name, perplexity=found.perplexity, ratio=compared.ratio, kl=compared.kl,
                    agreement=compared.agreement, right=ll.count_right(model, tokenizer),
                    opening=(math.exp(loss), math.exp(extra), float(kl)), **grid)
    return row, found


def rows(name: str, model: ll.Model, tokenizer, ids: list[int]) -> Iterator[StoredRow]:
    """Every row of the table, the baseline's first. `model`: the one of this name, in float32."""
    first, baseline = measure("float32, the baseline", model, tokenizer, ids, None, bits_per_weight=32)
    yield first
    candidate = None
    for bits, group, symmetric in GRIDS:
        try:
            candidate = ll.simulate(model, bits, group, symmetric, into=candidate)
        except ValueError as problem:  # groups of 96 do not divide every model's rows
            print(f"no row for {label(bits, group, symmetric)}: {problem}", file=sys.stderr)
            continue
        yield measure(label(bits, group, symmetric), candidate, tokenizer, ids, baseline, bits=bits, group=group,
                      symmetric=symmetric, bits_per_weight=ll.bits_per_weight(model, bits, group, symmetric))[0]
    del candidate  # the memory of a whole model
    head = ll.simulate(model, 8, part="head")
    yield measure("output head and embedding alone: 8 bits, rows, symmetric", head, tokenizer, ids, baseline,
                  bits_per_weight=ll.bits_per_weight(model, 8, part="head"))[0]
    del head
    for weights in WEIGHTS:
        try:
            loaded, _ = ll.load_pretrained(name, weights=weights, device="cpu")
        except ValueError as problem:
            print(f"no row for weights={weights!r}: {problem}", file=sys.stderr)
            continue
        yield measure(f"weights={weights!r}", loaded, tokenizer, ids, baseline, bits_per_weight=stored_bits(loaded))[0]


def table(measured: list[StoredRow]) -> str:
    """The rows as markdown."""
    def cell(estimate: Estimate, digits: int, factor: float = 1) -> str:
        def short(number: float) -> str:
            return f"{number:.{digits if number < 10 else 1}f}" if number < 1e4 else f"{number:.2g}"

        value, low, high = (short(number * factor) for number in estimate)
        return f"{value} ({low} to {high})"

    lines = ["| weights | bits/weight | perplexity | ÷ baseline | KL, nats | same top-1, % | right of "
             f"{len(QUESTIONS)} |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row.label} | {row.bits_per_weight:.2f} | {cell(row.perplexity, 1)} | {cell(row.ratio, 4)} | "
              f"{cell(row.kl, 4)} | {cell(row.agreement, 1, 100)} | {row.right} |" for row in measured]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name or path that load_pretrained takes")
    parser.add_argument("--positions", type=int, help="predict so many tokens of the prose, from its start (all 7,049)")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file too")
    options = parser.parse_args()
    model, tokenizer = ll.load_pretrained(options.model, device="cpu")
    ids = tokenizer.encode(ll.course_prose())[:None if options.positions is None else options.positions + 1]
    measured, start = [], time.perf_counter()
    for row in rows(options.model, model, tokenizer, ids):
        measured.append(row)
        print(f"{time.perf_counter() - start:4.0f} s  {row.label}: {row.ratio}", file=sys.stderr, flush=True)
    found = StoredQuality(
        machine=this_machine(), date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]]),
        baseline=f"{options.model}, weights=float32", text="the course's prose, ll.course_prose()",
        positions=len(ids) - 1, questions=len(QUESTIONS), rows=tuple(measured))
    print(f"{found.machine}, {found.date}; baseline: {found.baseline}; {found.positions:,} positions of {found.text}\n")
    print(table(measured))
    if options.save:
        options.save.write_text(json.dumps(found.record(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
