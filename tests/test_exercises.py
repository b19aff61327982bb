"""Every exercise: the folded solution passes, the stub does not, and plausible wrong answers are told what is wrong."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import wrong_answers  # noqa: E402

from llm_lessons.classroom import check  # noqa: E402
from llm_lessons.classroom.checks import core  # noqa: E402

ROOT = Path(__file__).parent.parent
CALL = re.compile(r"^check\.(\w+)\((\w+)\)", re.M)
WRONG = {name: cases for module in pkgutil.iter_modules(wrong_answers.__path__)
         for name, cases in importlib.import_module(f"wrong_answers.{module.name}").WRONG.items()}


def exercises():
    """(name of the check, name of the function, code of the stub, code of the solution, imports of the notebook)."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        imports = "\n".join(line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()
                            if re.match(r"(import|from) \w", line) and "importlib" not in line)
        for cell, after in zip(cells, cells[1:]):
            if cell.cell_type == "code" and "NotImplementedError" in cell.source and (call := CALL.search(cell.source)):
                solution = re.search(r"<summary>Solution</summary>\s*```python\n(.*?)```", after.source, re.S)
                assert solution, f"{path.name}: no folded solution behind check.{call[1]}"
                assert "<summary>Hint</summary>" in after.source, f"{path.name}: no hint for check.{call[1]}"
                found.append(pytest.param(call[1], call[2], cell.source, solution[1], imports, id=call[1]))
    return found


def run(code: str, imports: str) -> dict:
    namespace = {"check": check}
    exec(imports + "\n" + code, namespace)
    return namespace


@pytest.mark.parametrize(("name", "function", "stub", "solution", "imports"), exercises())
def test_the_solution_passes_and_the_stub_is_not_done(name, function, stub, solution, imports, capsys):
    run(stub, imports)
    assert capsys.readouterr().out == "not done yet\n"
    getattr(check, name)(run(solution, imports)[function])
    assert capsys.readouterr().out == "passed\n"


@pytest.mark.parametrize(("name", "function", "stub", "solution", "imports"), exercises())
def test_every_exercise_has_at_least_three_wrong_answers(name, function, stub, solution, imports):
    assert len(WRONG.get(name, [])) >= 3


@pytest.mark.parametrize(("name", "wrong", "words"), [pytest.param(name, fn, words, id=f"{name}-{fn.__name__}")
                                                      for name, cases in WRONG.items() for fn, words in cases])
def test_wrong_answers_are_told_what_is_wrong(name, wrong, words, capsys):
    getattr(check, name)(wrong)
    verdict = capsys.readouterr().out
    assert verdict.startswith("not right yet: ")
    assert re.search(words, verdict), verdict


@core.exercise
def double(answer):
    """A small exercise for the tests below."""
    x = torch.arange(3.0)
    core.compare(answer(x), 2 * x, "the doubled x", {"you squared it": x * x})


def returns_nothing(x):
    x * 2


def changes_its_input(x):
    return x.mul_(2)


def crashes(x):
    return x + [1]


def talks_much(x):
    raise KeyError("k" * 5000)


def calls_itself(x):
    return calls_itself(x)


@pytest.mark.parametrize(("fn", "words"), [
    (returns_nothing, "returned None"), (changes_its_input, "changed its input"), (crashes, r"raised TypeError: .+"),
    (calls_itself, "without end"), (lambda x: x * x, "you squared it"),
    (lambda x: (2 * x)[:2], r"shape \[3\], not \[2\]"),
    (lambda x: 2 * x / 0, "NaN"), (lambda x: 2 * x + (x == 1), r"the doubled x, at \[1\], is 3, and should be 2"),
    (lambda x: "six", "not str"), (lambda x: torch.complex(x, x), "real numbers, not complex"),
    (talks_much, "…$"), (3, "pass the function itself")])
def test_a_check_never_raises_and_names_the_usual_slips(fn, words, capsys):
    double(fn)
    said = capsys.readouterr().out.rstrip("\n")
    assert re.search(words, said) and len(said) < 700


@pytest.mark.parametrize("fn", [lambda x: 2 * x, lambda x: (2 * x).tolist(), lambda x: (2 * x)[None],
                                lambda x: [v + v for v in x], lambda x: (2 * x).numpy(), lambda x: (2 * x).half()])
def test_a_check_accepts_any_correct_way_of_writing_it(fn, capsys):
    double(fn)
    assert capsys.readouterr().out == "passed\n"


def yields_and_breaks(*_):
    yield 1
    raise LookupError("lost")


@pytest.mark.parametrize("answer, words", [
    (lambda ids, pair, new: "256", "return a list of ids, not '256'"),
    (lambda ids, pair, new: ["256"], "whole numbers"),
    (lambda ids, pair, new: [256.9], "256.9"), (lambda ids, pair, new: 256, "not 256"),
    (yields_and_breaks, "raised LookupError: lost")])
def test_ids_are_whole_numbers_and_a_generator_that_breaks_is_told(answer, words, capsys):
    check.merge_pair(answer)
    assert words in capsys.readouterr().out


def test_numbers_in_a_verdict_are_rounded():
    assert core.show([torch.tensor([0.3, 1 / 3]), 2]) == "[0.3, 0.3333], 2"


def test_an_error_of_the_judge_is_told_too(capsys):
    @core.exercise
    def stumbles(answer):
        """A judge with a fault."""
        raise TypeError("odd")

    stumbles(len)
    assert capsys.readouterr().out == "not right yet: the check could not read your answer (TypeError: odd)\n"
