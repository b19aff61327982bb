"""Wrong answers to the exercises of lesson 02, as people really give them."""

import math

import torch


def with_itself(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    return (unit @ unit[row]).topk(k).indices


def first_is_not_itself(table, row, k):
    cosines = (table / table.norm(dim=1, keepdim=True)) @ (table[row] / table[row].norm())
    cosines[40 if row == 40 else 0] -= 1e-6 if row == 40 else 0  # rounding puts the other row first
    return cosines.topk(k + 1).indices[1:]


def one_too_few(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    return (unit @ unit[row]).topk(k).indices[1:]


def dot_product(table, row, k):
    scores = table @ table[row]
    scores[row] = -math.inf
    return scores.topk(k).indices


def only_the_query_normalised(table, row, k):
    scores = table @ (table[row] / table[row].norm())
    scores[row] = -math.inf
    return scores.topk(k).indices


def euclidean(table, row, k):
    return (table - table[row]).norm(dim=1).topk(k + 1, largest=False).indices[1:]


def wrong_axis(table, row, k):
    unit = table / table.norm(dim=0, keepdim=True)
    scores = unit @ unit[row]
    scores[row] = -math.inf
    return scores.topk(k).indices


def wrong_axis_crash(table, row, k):
    return (table / table.norm(dim=1)).topk(k)


def farthest(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    return (unit @ unit[row]).sort().indices[:k]


def reversed_order(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    return (unit @ unit[row]).argsort()[-k - 1:-1]


def values_and_indices(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    scores = unit @ unit[row]
    scores[row] = -math.inf
    return scores.topk(k)


def the_cosines(table, row, k):
    return values_and_indices(table, row, k).values


def without_equals(table, row, k):
    unit = table / table.norm(dim=1, keepdim=True)
    scores = unit @ unit[row]
    scores[scores > 0.9999] = -1
    return scores.topk(k).indices


def angles(positions, size, base=10_000.0):
    return positions[:, None] / base ** (torch.arange(0, size, 2) / size)


def halves(count, size):
    a = angles(torch.arange(count), size)
    return torch.cat((a.sin(), a.cos()), dim=-1)


def cosine_first(count, size):
    a = angles(torch.arange(count), size)
    return torch.stack((a.cos(), a.sin()), dim=-1).flatten(1)


def from_one(count, size):
    a = angles(torch.arange(1, count + 1), size)
    return torch.stack((a.sin(), a.cos()), dim=-1).flatten(1)


def half_exponent(count, size):
    a = torch.arange(count)[:, None] / 10_000 ** (torch.arange(size // 2) / size)
    return torch.stack((a.sin(), a.cos()), dim=-1).flatten(1)


def place_as_exponent(count, size):
    a = torch.arange(count)[:, None] / 10_000 ** (torch.arange(size) / size)
    a[:, 0::2], a[:, 1::2] = a[:, 0::2].sin(), a[:, 1::2].cos()
    return a


def multiplied(count, size):
    a = torch.arange(count).double()[:, None] * 10_000 ** (torch.arange(0, size, 2).double() / size)
    return torch.stack((a.sin(), a.cos()), dim=-1).flatten(1)


def in_degrees(count, size):
    a = torch.deg2rad(angles(torch.arange(count), size))
    return torch.stack((a.sin(), a.cos()), dim=-1).flatten(1)


def transposed(count, size):
    a = angles(torch.arange(count), size)
    return torch.stack((a.sin(), a.cos()), dim=-1).flatten(1).t()


def pair_angles(x, position, base):
    return position / base ** (torch.arange(0, len(x), 2) / len(x))


def turn(x, angle):
    a, b = x.chunk(2)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()))


def interleaved(x, position, base):
    a, b, angle = x[0::2], x[1::2], pair_angles(x, position, base)
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1).flatten()


def interleaved_in_half_split_out(x, position, base):
    a, b, angle = x[0::2], x[1::2], pair_angles(x, position, base)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()))


def other_way_round(x, position, base):
    return turn(x, -pair_angles(x, position, base))


def position_from_one(x, position, base):
    return turn(x, pair_angles(x, position + 1, base))


def degrees(x, position, base):
    return turn(x, torch.deg2rad(pair_angles(x, position, base)))


def slow_angles(x, position, base):
    return turn(x, position / base ** (torch.arange(len(x) // 2) / len(x)))


def one_angle_for_all(x, position, base):
    return turn(x, torch.tensor(float(position)).expand(len(x) // 2))


def growing_angles(x, position, base):
    return turn(x.double(), position * base ** (torch.arange(0, len(x), 2).double() / len(x)))


def no_minus(x, position, base):
    a, b = x.chunk(2)
    angle = pair_angles(x, position, base)
    return torch.cat((a * angle.cos() + b * angle.sin(), a * angle.sin() + b * angle.cos()))


def only_the_first_half(x, position, base):
    return turn(x, pair_angles(x, position, base))[:len(x) // 2]


def always_ten_thousand(x, position, base):
    first, second = x.chunk(2)
    angle = position / 10_000 ** (torch.arange(0, len(x), 2) / len(x))
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


def size_of_a_half(x, position, base):
    first, second = x.chunk(2)
    angle = position / base ** (torch.arange(0, len(x), 2) / len(first))
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


def counts_columns(count, size):
    angles = torch.arange(count)[:, None] / 10_000 ** (2 * torch.arange(0, size, 2) / size)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


WRONG = {
    "nearest": [
        (first_is_not_itself, "another row has the same direction as row 40"),
        (with_itself, "contains the row 0 itself"), (one_too_few, "gives 1 of 2 rows.*ask for one more"),
        (dot_product, "long rows win a dot product"), (only_the_query_normalised, "long rows win a dot product"),
        (euclidean, "smallest distance.*directions, not lengths"), (wrong_axis, "dim=1"),
        (wrong_axis_crash, "raised RuntimeError"), (farthest, "farthest"), (reversed_order, "wrong order"),
        (values_and_indices, "return the row numbers alone"), (the_cosines, "gives the cosines"),
        (without_equals, "the very same direction"),
    ],
    "sinusoidal": [
        (halves, "take turns"), (cosine_first, "cosine stands first"), (from_one, "first token has position 0"),
        (half_exponent, "exponent is 2i / size"), (place_as_exponent, "same angle"), (multiplied, "should be divided"),
        (in_degrees, "radians"), (transposed, r"one row for each position.*\[3, 4\]"),
        (counts_columns, "i is the number of the pair"),
    ],
    "rotate_pairs": [
        (interleaved, r"neighbours.*x\[i\] with x\[i \+ size/2\]"),
        (interleaved_in_half_split_out, "changed places"), (other_way_round, "the wrong way"),
        (position_from_one, "position 0 turns nothing"), (degrees, "radians"), (slow_angles, r"not base\^\(i / size\)"),
        (one_angle_for_all, "the same angle"), (growing_angles, "divide the position"),
        (always_ten_thousand, "the base was 100,000"), (size_of_a_half, "both halves"),
        (no_minus, "turning keeps the length"), (only_the_first_half, r"shape \[4\], not \[2\]"),
    ],
}
