"""Lesson 10: the ways in which users are miscounted, plans chosen badly, and the wrong culprit is named."""

import math

from llm_lessons import plan


def users(shape, gigabytes, context, weight_bits, kv_bits, heads=None, kinds=2, gb=1e9, kept=0.9, bits=8, copies=0,
          cache_bits=None, layers=None):
    numbers = kinds * (layers or shape.layers) * (heads or shape.kv_heads) * shape.head_dim
    token = numbers * kv_bits / (cache_bits or bits)
    weights = shape.parameters * weight_bits / bits
    return max(0, int((gigabytes * gb * kept - (0 if copies else weights)) // (context * token + copies * weights)))


def counts_the_query_heads(shape, *case):
    return users(shape, *case, heads=shape.heads)


def keys_without_values(*case):
    return users(*case, kinds=1)


def gib_for_gb(*case):
    return users(*case, gb=2**30)


def no_reserve(*case):
    return users(*case, kept=1)


def bits_for_bytes(*case):
    return users(*case, bits=1)


def cache_bits_for_bytes(*case):
    return users(*case, cache_bits=1)


def one_layer(*case):
    return users(*case, layers=1)


def keeps_10_percent_of_the_rest(shape, gigabytes, context, weight_bits, kv_bits):
    left = 0.9 * (gigabytes * 1e9 - shape.parameters * weight_bits / 8)
    return max(0, int(left // (context * shape.kv_bytes_per_token(kv_bits / 8))))


def gigabytes_for_bytes(*case):
    return users(*case, gb=1)


def gigabytes_for_bytes_below_0(*case):
    return int(a_fraction_of_a_user(case[0], case[1] / 1e9, *case[2:]) // 1)


def weights_for_each_user(*case):
    return users(*case, copies=1)


def forgets_the_weights(shape, gigabytes, context, weight_bits, kv_bits):
    return users(shape, gigabytes, context, 0, kv_bits)


def hidden_over_heads(shape, gigabytes, context, weight_bits, kv_bits):
    token = 2 * shape.layers * shape.kv_heads * shape.hidden // shape.heads * kv_bits / 8
    return max(0, int((gigabytes * 0.9e9 - shape.parameters * weight_bits / 8) // (context * token)))


def cache_as_wide_as_the_weights(shape, gigabytes, context, weight_bits, kv_bits):
    return users(shape, gigabytes, context, weight_bits, weight_bits)


def rounds_up(shape, gigabytes, context, weight_bits, kv_bits):
    room = gigabytes * 0.9e9 - shape.parameters * weight_bits / 8
    return math.ceil(room / (context * shape.kv_bytes_per_token(kv_bits / 8)))


def a_fraction_of_a_user(shape, gigabytes, context, weight_bits, kv_bits):
    room = gigabytes * 0.9e9 - shape.parameters * weight_bits / 8
    return room / (context * shape.kv_bytes_per_token(kv_bits / 8))


def fewer_than_nobody(*case):
    return int(a_fraction_of_a_user(*case) // 1)


def forgets_the_context(shape, gigabytes, context, weight_bits, kv_bits):
    return users(shape, gigabytes, 1, weight_bits, kv_bits)


def users_in_words(*case):
    return "nine"


def choose(good, order):
    def answer(shape, device, context, users, seconds, share):
        plans = {(count, w, kv): plan(shape, device.several(count), w, kv, context=context, users=users)
                 for count in (1, 2, 4, 8) for w in (16, 8, 4.5) for kv in (16, 8)}
        return min((c for c, p in plans.items() if good(p, seconds * share)), key=order, default=None)
    return answer


def will_do(p, seconds):
    return p.fits and p.tpot <= seconds


def cheapest_first(c):
    return c[0], -c[1], -c[2]


def forgets_the_share(*case):
    return choose(will_do, cheapest_first)(*case[:-1], 1)


def divides_the_limit_instead(*case):
    return choose(will_do, cheapest_first)(*case[:-1], 1 / case[-1])


def forgets_the_memory(*case):
    return choose(lambda p, seconds: p.tpot <= seconds, cheapest_first)(*case)


def forgets_the_time(*case):
    return choose(lambda p, seconds: p.fits, cheapest_first)(*case)


def takes_milliseconds(*case):
    return choose(lambda p, seconds: p.fits and p.tpot * 1e3 <= seconds, cheapest_first)(*case)


def fewest_bits(*case):
    return choose(will_do, lambda c: (c[0], c[1], c[2]))(*case)


def most_bits_before_fewest_devices(*case):
    return choose(will_do, lambda c: (-c[1], -c[2], c[0]))(*case)


def cache_before_weights(*case):
    return choose(will_do, lambda c: (c[0], -c[2], -c[1]))(*case)


def always_the_largest(*case):
    return 8, 16, 16


def time_of_all_users_together(*case):
    return choose(lambda p, seconds: p.fits and p.tpot * p.users <= seconds, cheapest_first)(*case)


def the_count_alone(*case):
    return choose(will_do, cheapest_first)(*case)[0]


def the_smaller_cache(*case):
    return choose(will_do, lambda c: (c[0], -c[1], c[2]))(*case)


def too_slow(plan, limit, share):
    return "device" if plan.tpot / share > limit else "program"


def never_memory(plan, measured, limit, share):
    return "fine" if measured <= limit else too_slow(plan, limit, share)


def measured_first(plan, measured, limit, share):
    if measured <= limit:
        return "fine"
    return "memory" if not plan.fits else too_slow(plan, limit, share)


def bound_first(plan, measured, limit, share):
    if not plan.fits:
        return "memory"
    return "device" if plan.tpot / share > limit else "fine" if measured <= limit else "program"


def bound_without_the_share(plan, measured, limit, share):
    return "memory" if not plan.fits else "fine" if measured <= limit else too_slow(plan, limit, 1)


def bound_times_the_share(plan, measured, limit, share):
    return "memory" if not plan.fits else "fine" if measured <= limit else too_slow(plan, limit, 1 / share)


def always_the_program(plan, measured, limit, share):
    return "memory" if not plan.fits else "fine" if measured <= limit else "program"


def always_the_device(plan, measured, limit, share):
    return "memory" if not plan.fits else "fine" if measured <= limit else "device"


def slower_than_the_plan_is_the_program(plan, measured, limit, share):
    return "memory" if not plan.fits else "program" if measured > plan.tpot else "fine"


def exactly_the_limit_is_too_slow(plan, measured, limit, share):
    return "memory" if not plan.fits else "fine" if measured < limit else too_slow(plan, limit, share)


def says_whether(plan, measured, limit, share):
    return plan.fits and measured <= limit


WRONG = {
    "users_that_fit": [
        (counts_the_query_heads, "Only the kv_heads"), (keys_without_values, "a key and a value"),
        (gib_for_gb, r"A GB is 10\^9"), (no_reserve, "nothing is kept free"), (bits_for_bytes, "a byte has 8 bits"),
        (weights_for_each_user, "share one copy"), (forgets_the_weights, "weights are forgotten"),
        (hidden_over_heads, "take shape.head_dim"), (cache_as_wide_as_the_weights, "the width of the weights"),
        (rounds_up, "Round down"), (a_fraction_of_a_user, "whole people"), (fewer_than_nobody, "nobody fits: 0"),
        (cache_bits_for_bytes, "kv_bits are bits"), (one_layer, "every layer has a cache"),
        (keeps_10_percent_of_the_rest, "of the whole memory"), (gigabytes_for_bytes, r"10\^9 of them"),
        (gigabytes_for_bytes_below_0, r"10\^9 of them"),
        (forgets_the_context, "has a context of many"), (users_in_words, "not 'nine'")],
    "cheapest": [
        (forgets_the_share, "Divide the bound by the share"),
        (divides_the_limit_instead, "Divide the bound by the share"),
        (forgets_the_memory, "does not fit: .* GB are missing"), (forgets_the_time, "too slow: at least"),
        (takes_milliseconds, "returns nothing"), (fewest_bits, "Take no fewer bits"),
        (most_bits_before_fewest_devices, "fewer devices will do"),
        (cache_before_weights, "weights of 16 bits will do"),
        (always_the_largest, "fewer devices will do"), (time_of_all_users_together, "You pay for devices"),
        (the_smaller_cache, "a cache of 16 bits will do"),
        (the_count_alone, r"return \(count, weight bits, cache bits\)")],
    "diagnose": [
        (never_memory, "will run out of memory"), (measured_first, "it is 'memory'"),
        (always_the_program, "a better one is no help"), (always_the_device, "it loses the time"),
        (bound_first, "it is 'fine'"), (bound_without_the_share, "it is 'device'"),
        (bound_times_the_share, "it is 'device'"),
        (slower_than_the_plan_is_the_program, "it is 'fine'"), (exactly_the_limit_is_too_slow, "it is 'fine'"),
        (says_whether, "return one of")],
}
