"""Lesson 08: the ways in which numbers are put on a grid, packed, and multiplied wrongly."""

import struct

import torch


def grid(weight, bits):
    """Codes and scales as they should be."""
    last = 2 ** (bits - 1) - 1
    scale = (weight.abs().amax(1) / last).clamp_min(1e-12)
    return (weight / scale[:, None]).round(), scale


def no_care_for_zeros(weight, bits):
    scale = weight.abs().amax(1) / (2 ** (bits - 1) - 1)
    return (weight / scale[:, None]).round(), scale


def nan_to_zero_but_scale_0(weight, bits):
    scale = weight.abs().amax(1) / (2 ** (bits - 1) - 1)
    return (weight / scale[:, None]).nan_to_num().round(), scale


def guards_the_scale_too_late(weight, bits):
    scale = weight.abs().amax(1) / (2 ** (bits - 1) - 1)
    return (weight / scale[:, None]).round(), scale.clamp_min(1e-12)


def flattens_small_rows(weight, bits):
    scale = (weight.abs().amax(1) / (2 ** (bits - 1) - 1)).clamp_min(1e-3)
    return (weight / scale[:, None]).round(), scale


def one_scale_for_all(weight, bits):
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    return (weight / scale).round(), scale


def a_scale_for_each_column(weight, bits):
    scale = (weight.abs().amax(0) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
    return (weight / scale).round(), scale


def forgets_the_sign(weight, bits):
    scale = (weight.amax(1) / (2 ** (bits - 1) - 1)).clamp_min(1e-12)
    return (weight / scale[:, None]).round(), scale


def largest_on_128(weight, bits):
    scale = (weight.abs().amax(1) / 2 ** (bits - 1)).clamp_min(1e-12)
    return (weight / scale[:, None]).round(), scale


def all_steps_on_one_side(weight, bits):
    scale = (weight.abs().amax(1) / (2**bits - 1)).clamp_min(1e-12)
    return (weight / scale[:, None]).round(), scale


def upside_down_scale(weight, bits):
    scale = (2 ** (bits - 1) - 1) / weight.abs().amax(1).clamp_min(1e-12)
    return (weight * scale[:, None]).round(), scale


def scale_is_the_largest(weight, bits):
    scale = weight.abs().amax(1).clamp_min(1e-12)
    return (weight / scale[:, None]).round(), scale


def cuts_off(weight, bits):
    codes, scale = grid(weight, bits)
    return (weight / scale[:, None]).to(torch.int8), scale


def does_not_round(weight, bits):
    codes, scale = grid(weight, bits)
    return weight / scale[:, None], scale


def gives_values(weight, bits):
    codes, scale = grid(weight, bits)
    return codes * scale[:, None], scale


def codes_from_0(weight, bits):
    codes, scale = grid(weight, bits)
    return codes + 2 ** (bits - 1), scale


def scales_first(weight, bits):
    codes, scale = grid(weight, bits)
    return scale, codes


def codes_alone(weight, bits):
    return grid(weight, bits)[0]


def wraps_to_int8(weight, bits):
    codes, scale = grid(weight, bits)
    return ((weight / (scale[:, None] * 0.99)).round().int() + 128) % 256 - 128, scale


def parts(block):
    scale, minimum = struct.unpack("<ee", block[:4])
    return scale, minimum, [byte & 15 for byte in block[4:]], [byte >> 4 for byte in block[4:]]


def neighbours_in_a_byte(block):
    d, m, low, high = parts(block)
    return [d * code + m for pair in zip(low, high) for code in pair]


def high_half_first(block):
    d, m, low, high = parts(block)
    return [d * code + m for code in high + low]


def shifted_by_8(block):
    d, m, low, high = parts(block)
    return [d * (code - 8) + m for code in low + high]


def forgets_the_minimum(block):
    d, m, low, high = parts(block)
    return [d * code for code in low + high]


def exchanges_d_and_m(block):
    m, d, low, high = parts(block)
    return [d * code + m for code in low + high]


def subtracts_the_minimum(block):
    d, m, low, high = parts(block)
    return [d * code - m for code in low + high]


def codes_with_a_sign(block):
    d, m, low, high = parts(block)
    return [d * (code - 16 if code > 7 else code) + m for code in low + high]


def codes_of_the_block(block):
    d, m, low, high = parts(block)
    return low + high


def masks_the_high_half(block):
    d, m, low, high = parts(block)
    return [d * code + m for code in low + [byte & 240 for byte in block[4:]]]


def leaves_the_low_half_in(block):
    d, m, low, high = parts(block)
    return [d * code + m for code in low + list(block[4:])]


def low_half_alone(block):
    d, m, low, high = parts(block)
    return [d * code + m for code in low]


def big_endian(block):
    d, m = struct.unpack(">ee", block[:4])
    return [d * code + m for code in parts(block)[2] + parts(block)[3]]


def padded(codes, filling=8):
    odd = codes.shape[1] % 2
    return torch.cat((codes + 8, torch.full((len(codes), odd), filling)), 1)


def high_first(codes):
    shifted = padded(codes)
    return (shifted[:, 0::2] << 4 | shifted[:, 1::2]).to(torch.uint8)


def twos_complement(codes):
    cut = torch.cat((codes, codes.new_zeros(len(codes), codes.shape[1] % 2)), 1) & 15
    return (cut[:, 0::2] | cut[:, 1::2] << 4).to(torch.uint8)


def halves_of_a_row(codes):
    low, high = padded(codes).chunk(2, 1)
    return (low | high << 4).to(torch.uint8)


def loses_the_last(codes):
    shifted = codes[:, :codes.shape[1] // 2 * 2] + 8
    return (shifted[:, 0::2] | shifted[:, 1::2] << 4).to(torch.uint8)


def one_long_row(codes):
    flat = (codes + 8).flatten()
    flat = torch.cat((flat, flat.new_full((len(flat) % 2,), 8)))
    packed = (flat[0::2] | flat[1::2] << 4).to(torch.uint8)
    return packed.view(len(codes), -1) if len(packed) % len(codes) == 0 and codes.shape[1] % 2 == 0 else packed


def forgets_to_add_8(codes):
    filled = torch.cat((codes, codes.new_zeros(len(codes), codes.shape[1] % 2)), 1)
    return filled[:, 0::2] + 16 * filled[:, 1::2]


def a_byte_for_each(codes):
    return (codes + 8).to(torch.uint8)


def whole_numbers_of_64_bits(codes):
    shifted = padded(codes)
    return shifted[:, 0::2] | shifted[:, 1::2] << 4


def shifts_by_3(codes):
    shifted = padded(codes)
    return (shifted[:, 0::2] | shifted[:, 1::2] << 3).to(torch.uint8)


def whole(x):
    size = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (x / size).round(), size


def one_scale_for_all_tokens(x, codes, scale):
    size = x.abs().max() / 127
    return ((x / size).round() @ codes.float().T) * size * scale


def sums_in_8_bits(x, codes, scale):
    x8, size = whole(x)
    return (x8.to(torch.int8) @ codes.T).float() * size * scale


def forgets_the_scale_of_the_weights(x, codes, scale):
    x8, size = whole(x)
    return (x8 @ codes.float().T) * size


def forgets_the_scale_of_the_tokens(x, codes, scale):
    x8, size = whole(x)
    return (x8 @ codes.float().T) * scale


def no_scale_at_all(x, codes, scale):
    x8, size = whole(x)
    return x8.int() @ codes.int().T


def weights_only(x, codes, scale):
    return x @ (codes.float() * scale[:, None]).T


def cuts_off_x(x, codes, scale):
    x8, size = whole(x)
    return ((x / size).trunc() @ codes.float().T) * size * scale


def three_numbers_are_left(x, codes, scale):
    size = x.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return ((x / size).round() @ codes.float().T) * size * scale


def transposed(x, codes, scale):
    x8, size = whole(x)
    return ((x8 @ codes.float().T) * size * scale).T


def divides_by_zero(x, codes, scale):
    size = x.abs().amax(1, keepdim=True) / 127
    return ((x / size).round() @ codes.float().T) * size * scale


def scales_along_the_outputs(x, codes, scale):
    x8, size = whole(x)
    return (x8 @ codes.float().T) * size.flatten() * scale


WRONG = {
    "quantize_rows": [
        (no_care_for_zeros, "row of zeros is 0: it must be above 0"),
        (nan_to_zero_but_scale_0, "it must be above 0"), (guards_the_scale_too_late, r"NaN, 0 / 0.*before you divide"),
        (flattens_small_rows, "too large, and flattens the row"),
        (one_scale_for_all, r"one scale for all rows.*amax\(dim=1\)"), (a_scale_for_each_column, "columns"),
        (forgets_the_sign, r"a negative one may be larger in size"), (largest_on_128, r"lies on step 2\^\(bits-1\)"),
        (all_steps_on_one_side, "number of all steps"), (upside_down_scale, "upside down"),
        (scale_is_the_largest, r"the largest \|value\| itself"), (cuts_off, "cut off"),
        (does_not_round, "round them"), (gives_values, "values on the grid: return the codes"),
        (codes_from_0, "all above 0"), (scales_first, "exchanged"), (codes_alone, "return two things"),
        (wraps_to_int8, "its code is -128|off the grid")],
    "q4_1_block": [
        (neighbours_in_a_byte, "wrong order: byte i holds weight i"),
        (high_half_first, "weight i [+] 16, not weight i"),
        (shifted_by_8, "shifted by 8 steps"), (forgets_the_minimum, "lack the minimum"),
        (exchanges_d_and_m, "d and m exchanged"), (subtracts_the_minimum, "stored with its sign"),
        (codes_with_a_sign, "four bits count from 0 to 15"), (codes_of_the_block, "are the codes"),
        (masks_the_high_half, "16 times too large"), (leaves_the_low_half_in, "still holds the low bits"),
        (low_half_alone, "are 16, and should be 32"), (big_endian, "should be")],
    "pack_nibbles": [
        (high_first, "first code of two belongs into the low"), (twos_complement, "-2 became 14"),
        (halves_of_a_row, r"code i \+ columns / 2"), (loses_the_last, "last code of each row is lost"),
        (one_long_row, "begins in the middle of a byte"), (forgets_to_add_8, "is no byte: add 8"),
        (a_byte_for_each, "two of them fit into one"), (whole_numbers_of_64_bits, r"\.to\(torch\.uint8\)"),
        (shifts_by_3, r"is 0x\w\w, and should be 0x\w\w")],
    "int8_product": [
        (one_scale_for_all_tokens, "Give each token its own"), (sums_in_8_bits, "needs 32 bits"),
        (forgets_the_scale_of_the_weights, "lacks the scale of the weights"),
        (forgets_the_scale_of_the_tokens, "lacks the scale of the tokens"), (no_scale_at_all, "whole numbers still"),
        (weights_only, "without rounding x"), (cuts_off_x, "cut off instead of rounded"),
        (three_numbers_are_left, "only -1, 0 and 1"), (transposed, "not its transpose"),
        (divides_by_zero, "token 2 is all zeros"), (scales_along_the_outputs, "keepdim|should be|raised")],
}
