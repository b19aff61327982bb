"""Lesson 02: nearest rows, added positions, rotated pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .core import Wrong, as_tensor, compare, exercise


@exercise
def nearest(answer) -> None:
    """`nearest(table, row, k)`: ids of the k rows with the highest cosine with a row, without it, nearest first."""
    drawn = torch.randn(60, 16, generator=torch.Generator().manual_seed(2))
    drawn = drawn * torch.linspace(0.5, 3.0, 60)[:, None]  # rows of very different length
    drawn[7] = 2 * drawn[40]  # another token with the same direction: a neighbour like any other
    small = torch.tensor([[-3.0, 0, 2], [3, 2, 1], [4, 2, 0], [1, -2, -1], [0, -3, -2], [1, -1, 0]])
    for name, table, row, k in (("a table of 6 rows", small, 0, 2), ("a table of 60 rows", drawn, 59, 8),
                                ("a table of 60 rows", drawn, 40, 5)):
        got, what = answer(table, row, k), f"nearest(table, {row}, {k}) for {name}"
        if isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], Tensor) and got[0].numel() > 1:
            raise Wrong("return the row numbers alone: topk gives (values, indices), and the indices are wanted")
        got = as_tensor(got, "the ids of the neighbours").flatten()
        if not got.equal(got.round()):
            raise Wrong(f"{what} gives the cosines; the numbers of the rows are wanted")
        if got.numel() == k and row in got.tolist():
            cosines = _unit(table) @ _unit(table)[row]
            cosines[row] = -math.inf
            if cosines.max() > 0.9999 and int(cosines.argmax()) not in got.tolist():
                raise Wrong(f"{what} contains the row {row} itself: another row has the same direction as row {row}, "
                            f"so the first is not always the row itself. Leave it out by its number")
            raise Wrong(f"{what} contains the row {row} itself: every row is nearest to itself, so leave it out")
        if got.numel() == k - 1:
            raise Wrong(f"{what} gives {k - 1} of {k} rows: when the row itself is dropped, ask for one more")
        unit, columns = _unit(table), table / table.norm(dim=0)
        want, cosines = _best(unit @ unit[row], row, k), unit @ unit[row]
        if sorted(got.tolist()) == sorted(want.tolist()) and got.tolist() != want.tolist():
            raise Wrong(f"{what} has the right rows in the wrong order: the nearest comes first")
        mistakes = {
            "long rows win a dot product: divide by the lengths of the rows first": table @ table[row],
            "these rows have the smallest distance; a cosine compares directions, not lengths":
                -(table - table[row]).norm(dim=1),
            "you divided each column by its length; divide each row: dim=1": columns @ columns[row],
            "these rows are the farthest: the highest cosine is the nearest": -cosines,
            "another row has the very same direction, and is a neighbour too: leave out the row itself by its number":
                cosines.masked_fill(cosines > 0.999, -1)}
        compare(got, want, what, {words: _best(scores, row, k) for words, scores in mistakes.items()})


def _unit(table: Tensor) -> Tensor:
    return table / table.norm(dim=1, keepdim=True)


def _best(scores: Tensor, row: int, k: int) -> Tensor:
    return scores.index_fill(0, torch.tensor([row]), -math.inf).topk(k).indices


def _waves(positions: Tensor, size: int, exponent: float = 2.0, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Sines and cosines [positions, size / 2] of position / base^(exponent · i / size)."""
    angles = positions[:, None].double() / base ** (exponent * torch.arange(size // 2).double() / size)
    return angles.sin(), angles.cos()


def _woven(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


@exercise
def sinusoidal(answer) -> None:
    """`sinusoidal(count, size)`: [count, size], sin(p / 10000^(2i/size)) at place 2i, its cosine at place 2i + 1."""
    for count, size in ((3, 4), (50, 8), (7, 6)):
        positions = torch.arange(count)
        sin, cos = _waves(positions, size)
        got = as_tensor(answer(count, size), "the positions")
        if tuple(got.shape) == (size, count) and count != size:
            raise Wrong(f"for {count} positions of size {size} the shape is {list(got.shape)}; one row for each "
                        f"position was asked for: [{count}, {size}]")
        compare(got, _woven(sin, cos), f"sinusoidal({count}, {size})", {
            "all sines stand first, then all cosines; here they take turns: sin, cos, sin, cos":
                torch.cat((sin, cos), -1),
            "the cosine stands first; the sine belongs at the even places, the cosine at the odd": _woven(cos, sin),
            "your rows begin at position 1; the first token has position 0": _woven(*_waves(positions + 1, size)),
            "each pair is too slow or too fast: the exponent is 2i / size, with i the number of the pair":
                _woven(*_waves(positions, size, exponent=1.0)),
            "each pair is too slow: in 2i / size, i is the number of the pair, 0 to size / 2 - 1":
                _woven(*_waves(positions, size, exponent=4.0)),
            "sine and cosine of a pair must have the same angle: 2i is the same for both":
                torch.stack([f(positions.double() / 10_000 ** (j / size)) for j in range(size)
                             for f in [torch.cos if j % 2 else torch.sin]], dim=-1),
            "the position is multiplied by 10000^(2i / size) where it should be divided":
                _woven(*_waves(positions, size, exponent=-2.0)),
            "sin and cos take radians: do not convert to degrees or from them": _woven(*_waves(
                positions.double() * math.pi / 180, size))}, 1e-3)


def _turned(x: Tensor, position: float, base: float, sign: int = 1, exponent: float = 2.0) -> Tensor:
    """Half-split rotation of x [size] in float64."""
    first, second = x.double().chunk(2)
    angle = sign * position / base ** (exponent * torch.arange(len(first)).double() / len(x))
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


@exercise
def rotate_pairs(answer) -> None:
    """`rotate_pairs(x, position, base)`: each pair (x[i], x[i + size/2]) turned by position / base^(2i/size)."""
    for x, position, base in ((torch.tensor([1.0, 2.0, 3.0, 4.0]), 0, 10_000.0),
                              (torch.tensor([1.0, 0.0, 0.0, 0.0]), 1, 10_000.0),
                              (torch.tensor([1.0, 2.0, 3.0, 4.0]), 3, 10_000.0),
                              (torch.randn(64, generator=torch.Generator().manual_seed(3)), 17, 100_000.0)):
        shown = x.tolist() if x.numel() <= 4 else f"{x.numel()} numbers"
        what = f"rotate_pairs({shown}, position={position}, base={base:.0f})"
        got = as_tensor(answer(x, position, base), "the rotated vector")
        want = _turned(x, position, base)
        if got.numel() == x.numel() and (got.norm() - want.norm()).abs() > 1e-3 * want.norm():
            raise Wrong(f"{what} has the length {got.norm():.3f}, and x has {x.norm():.3f}; turning keeps the length: "
                        f"a pair (a, b) becomes (a·cos - b·sin, a·sin + b·cos)")
        woven = x.reshape(-1, 2).t().reshape(-1)  # neighbours (x[2i], x[2i + 1]), as if they were half-split pairs
        compare(got, want, what, {
            "the numbers changed places: each half of a pair goes back to where it came from":
                _turned(woven, position, base),
            "your pairs are neighbours, (x[0], x[1]), …; this model pairs x[i] with x[i + size/2]":
                _turned(woven, position, base).reshape(2, -1).t().reshape(-1),
            **({} if base == 10_000 else {f"you used 10,000 where the base was {base:,.0f}: take `base`":
                                          _turned(x, position, 10_000.0)}),
            "the angles fall too fast: in 2i / size, size is the length of x, both halves":
                _turned(x, position, base, exponent=4.0),
            "the hands turn the wrong way: the first of a pair becomes a·cos - b·sin": _turned(x, position, base, -1),
            "position 0 turns nothing: your positions begin at 1": _turned(x, position + 1, base),
            "cos and sin take radians: do not convert to degrees or from them":
                _turned(x, position * math.pi / 180, base),
            "the angles fall too slowly: pair i has base^(2i / size), not base^(i / size)":
                _turned(x, position, base, exponent=1.0),
            "every pair turns by the same angle; pair i turns by position / base^(2i / size)":
                _turned(x, position, base, exponent=0.0),
            "the angles grow from pair to pair: divide the position by base^(2i / size)":
                _turned(x, position, base, exponent=-2.0)})
