"""What every check shares: run the learner's function safely, compare, and say what is wrong in words that help."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

LONGEST = 600  # characters of a verdict


class Wrong(Exception):
    """An answer is not right yet; the message says for which input, and what to look at."""


def exercise(judge: Callable) -> Callable:
    """Make a check out of `judge(answer)`: it prints one verdict, and never raises.

    The judge calls `answer` as the learner's function and raises Wrong; `NotImplementedError` means not done yet.
    """

    def verdict(fn: Callable) -> str:
        try:
            if not callable(fn):
                raise Wrong(f"pass the function itself, without calling it: check.{judge.__name__}(your_function)")
            judge(_guarded(fn))
        except NotImplementedError:
            return "not done yet"
        except Wrong as wrong:
            return f"not right yet: {_cut(str(wrong))}"
        except Exception as error:  # an answer so odd that the judge itself stumbled over it
            return _cut(f"not right yet: the check could not read your answer ({type(error).__name__}: {error})")
        return "passed"

    @functools.wraps(judge)
    def check(fn: Callable) -> None:
        print(verdict(fn))

    check.verdict = verdict  # the same without printing
    return check


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else words[:LONGEST - 1] + "…"


def _guarded(fn: Callable) -> Callable:
    """The learner's function on copies of its arguments; its own errors become words, and so do the usual slips."""

    @functools.wraps(fn)
    def answer(*arguments):
        copies = [_copy(argument) for argument in arguments]
        try:
            result = fn(*copies)
        except NotImplementedError:
            raise
        except RecursionError:
            raise Wrong(f"for {show(arguments)} your function calls itself without end") from None
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            where = f" at line {line.lineno} of your cell" if "ipykernel" in line.filename else ""
            raise Wrong(f"for {show(arguments)} your function raised {type(error).__name__}: {error}{where}") from error
        if result is None:
            raise Wrong(f"for {show(arguments)} your function returned None: is a `return` missing?")
        for before, after in zip(arguments, copies):
            if not _same(before, after):
                raise Wrong(f"your function changed its input ({show([before])}) in place: work on a copy")
        return result

    return answer


def _copy(value):
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _same(before, after) -> bool:
    if isinstance(before, Tensor):
        return before.shape == after.shape and torch.equal(before, after)
    return not isinstance(before, (list, dict, set)) or before == after


def show(values) -> str:
    """Arguments as the learner would write them; a large tensor by its shape."""
    return ", ".join(f"a tensor of shape {list(v.shape)}" if isinstance(v, Tensor) and v.numel() > 8 else
                     str(_rounded(v.tolist())) if isinstance(v, Tensor) else
                     f"{str(v)[:60]}…" if len(str(v)) > 61 else repr(v) for v in values)


def _rounded(value):
    """Floats to 4 significant digits: 0.3, where float32 holds 0.30000001192092896."""
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def as_tensor(got, what: str) -> Tensor:
    """A learner's result (number, list, list of tensors, array, tensor) as a tensor of float64."""
    try:
        if isinstance(got, (list, tuple)) and got and isinstance(got[0], Tensor):
            got = torch.stack([torch.as_tensor(part) for part in got])
        got = torch.as_tensor(got).detach().cpu()
        if got.is_complex():
            raise Wrong(f"{what} should be real numbers, not complex ones")
        return got.double()
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{what} should be numbers in a tensor or a list, not {type(got).__name__}") from None


def compare(got, want: Tensor | float, what: str, mistakes: dict[str, Tensor | float] | None = None,
            tolerance: float = 1e-4) -> None:
    """Raise Wrong unless `got` is `want`. `mistakes` maps the words for a known mistake to the result it gives.

    Extra dimensions of size 1 are no fault.
    """
    got, want = as_tensor(got, what), torch.as_tensor(want, dtype=torch.float64)
    for words, wrong in (mistakes or {}).items():
        wrong = torch.as_tensor(wrong, dtype=torch.float64)
        if _close(got, wrong, tolerance) and not _close(wrong, want, tolerance):
            raise Wrong(f"{what}: {words}")
    if got.squeeze().shape != want.squeeze().shape:
        raise Wrong(f"{what} should have the shape {list(want.shape)}, not {list(got.shape)}")
    if got.isnan().any() and not want.isnan().any():
        raise Wrong(f"{what} contains NaN: is something divided by 0, or infinite?")
    if not _close(got, want, tolerance):
        difference = (got.reshape(want.shape) - want).abs().nan_to_num(nan=0.0)
        at = tuple(int(i) for i in torch.unravel_index(difference.argmax(), want.shape))
        place = f", at [{', '.join(map(str, at))}]," if at else ""
        raise Wrong(f"{what}{place} is {got.reshape(want.shape)[at]:.4g}, and should be {want[at]:.4g}")


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.squeeze(), b.squeeze()
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
