"""Lesson 09: the ways in which a scheduler, its figures and its keys go wrong."""


def needs(waiting, block_size):
    return [-(-(tokens + 1) // block_size) for tokens in waiting]


def starters(blocks, free, places):
    count = 0
    for need in blocks[:max(0, places)]:
        if need > free:
            break
        free, count = free - need, count + 1
    return count


def overtakes(waiting, free_blocks, free_places, block_size):
    count = 0
    for need in needs(waiting, block_size):
        if need <= free_blocks and count < free_places:
            free_blocks, count = free_blocks - need, count + 1
    return count


def forgets_the_places(waiting, free_blocks, free_places, block_size):
    return starters(needs(waiting, block_size), free_blocks, len(waiting))


def takes_nothing_away(waiting, free_blocks, free_places, block_size):
    count = 0
    for need in needs(waiting, block_size)[:free_places]:
        if need > free_blocks:
            break
        count += 1
    return count


def no_room_for_the_next_token(waiting, free_blocks, free_places, block_size):
    return starters([-(-tokens // block_size) for tokens in waiting], free_blocks, free_places)


def rounds_down(waiting, free_blocks, free_places, block_size):
    return starters([(tokens + 1) // block_size for tokens in waiting], free_blocks, free_places)


def always_one_more(waiting, free_blocks, free_places, block_size):
    return starters([(tokens + 1) // block_size + 1 for tokens in waiting], free_blocks, free_places)


def tokens_against_blocks(waiting, free_blocks, free_places, block_size):
    return starters([tokens + 1 for tokens in waiting], free_blocks, free_places)


def leaves_a_block(waiting, free_blocks, free_places, block_size):
    return starters(needs(waiting, block_size), free_blocks - 1, free_places)


def gives_the_requests(waiting, free_blocks, free_places, block_size):
    return waiting[:starters(needs(waiting, block_size), free_blocks, free_places)]


def only_one_a_step(waiting, free_blocks, free_places, block_size):
    return min(1, starters(needs(waiting, block_size), free_blocks, free_places))


def chunks(unread, budget):
    plan = []
    for tokens in unread:
        plan.append(min(tokens, budget))
        budget -= plan[-1]
    return plan


def decode_is_free(decoding, unread, budget):
    return chunks(unread, budget)


def a_budget_for_each(decoding, unread, budget):
    return [min(tokens, budget - decoding) for tokens in unread]


def whole_prompts_only(decoding, unread, budget):
    left, plan = budget - decoding, []
    for tokens in unread:
        plan.append(tokens if tokens <= left else 0)
        left -= plan[-1]
    return plan


def youngest_first(decoding, unread, budget):
    return chunks(unread[::-1], budget - decoding)[::-1]


def shared_evenly(decoding, unread, budget):
    return [min(tokens, (budget - decoding) // len(unread)) for tokens in unread]


def everything_at_once(decoding, unread, budget):
    return list(unread)


def leaves_out_who_waits(decoding, unread, budget):
    return [chunk for chunk in chunks(unread, budget - decoding) if chunk]


def goes_below_zero(decoding, unread, budget):
    left, plan = budget - decoding, []
    for tokens in unread:
        plan.append(min(tokens, left))
        left -= tokens
    return plan


def the_total(decoding, unread, budget):
    return min(sum(unread), budget - decoding)


def mean(values):
    return sum(values) / max(1, len(values))


def leaves_out_who_was_never_answered(requests, ttft_limit, tpot_limit):
    return mean([times[0] - start <= ttft_limit and
                 (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_limit for start, times in requests if times])


def first_limit_alone(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and times[0] - start <= ttft_limit for start, times in requests])


def second_limit_alone(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_limit
                 for start, times in requests])


def either_limit(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and (times[0] - start <= ttft_limit or
                                  (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_limit)
                 for start, times in requests])


def divides_by_the_tokens(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and times[0] - start <= ttft_limit and
                 (times[-1] - times[0]) / len(times) <= tpot_limit for start, times in requests])


def tpot_with_the_wait(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and times[0] - start <= ttft_limit and
                 (times[-1] - start) / len(times) <= tpot_limit for start, times in requests])


def judges_the_average(requests, ttft_limit, tpot_limit):
    ttft = mean([times[0] - start if times else 1e9 for start, times in requests])
    tpot = mean([(times[-1] - times[0]) / max(1, len(times) - 1) for _, times in requests if times])
    return float(ttft <= ttft_limit and tpot <= tpot_limit)


def counts_them(requests, ttft_limit, tpot_limit):
    return sum(bool(times) and times[0] - start <= ttft_limit and
               (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_limit for start, times in requests)


def stumbles_over_no_answer(requests, ttft_limit, tpot_limit):
    return mean([times[0] - start <= ttft_limit and
                 (times[-1] - times[0]) / max(1, len(times) - 1) <= tpot_limit for start, times in requests])


def single_tokens_fail(requests, ttft_limit, tpot_limit):
    return mean([len(times) > 1 and times[0] - start <= ttft_limit and
                 (times[-1] - times[0]) / (len(times) - 1) <= tpot_limit for start, times in requests])


def limits_of_its_own(requests, ttft_limit, tpot_limit):
    return mean([bool(times) and times[0] - start <= 1.0 and (times[-1] - times[0]) / max(1, len(times) - 1) <= 0.1
                 for start, times in requests])


WRONG = {
    "admit": [
        (lambda waiting, free, places, size: sum(sum(n + 1 for n in waiting[:k + 1]) <= free * size
                                                 for k in range(min(places, len(waiting)))), "never share a block"),
        (overtakes, "overtook one that did not fit"), (forgets_the_places, "forgot the places"),
        (takes_nothing_away, "takes its blocks away"), (no_room_for_the_next_token, "room for one token more"),
        (rounds_down, "round up"), (always_one_more, "one block too many where a text fills"),
        (tokens_against_blocks, "compared tokens with blocks"), (leaves_a_block, "may take the last free block"),
        (gives_the_requests, "a number, not the requests"), (only_one_a_step, "it should be 3, not 1")],
    "plan_step": [
        (decode_is_free, "take a token each from the budget"), (a_budget_for_each, "one for all prompts together"),
        (whole_prompts_only, "read in part: that is the point"), (youngest_first, "the oldest has waited longest"),
        (shared_evenly, "the oldest takes what it can use"), (everything_at_once, "whatever the budget"),
        (leaves_out_who_waits, "a prompt that must wait gets 0"), (goes_below_zero, "a number below 0"),
        (the_total, "a list, a number of tokens for each prompt")],
    "within_limits": [
        (lambda requests, first, later: sum(
            bool(t) and t[0] - at <= first and all(b - a <= later for a, b in zip(t, t[1:])) for at, t in requests)
         / len(requests), "not for the longest"),
        (leaves_out_who_was_never_answered, "count it as missed"), (first_limit_alone, "the later tokens have a limit"),
        (second_limit_alone, "the time in which it waited included"),
        (either_limit, "the time in which it waited included"),
        (divides_by_the_tokens, "two gaps between them"), (tpot_with_the_wait, "what came before is TTFT"),
        (judges_the_average, "judged the mean"), (counts_them, "divide by the number of requests"),
        (stumbles_over_no_answer, "raised IndexError"), (single_tokens_fail, "has no gap that could be too long"),
        (limits_of_its_own, "may be others than 1.0 and 0.1")],
    "block_key": [
        (lambda tenant, before, tokens: tokens, "the tenant belongs into the key"),
        (lambda tenant, before, tokens: (before, tokens), "could tell from the time that she sent this text"),
        (lambda tenant, before, tokens: (tenant, tokens), "the block before belongs into the key"),
        (lambda tenant, before, tokens: (tenant, before), "other tokens: they belong"),
        (lambda tenant, before, tokens: (tenant, before, tuple(sorted(tokens))), "in another order"),
        (lambda tenant, before, tokens: (tenant, before, sum(tokens)), "in another order"),
        (lambda tenant, before, tokens: (tenant, before, tuple(dict.fromkeys(tokens))), "how often a token stands"),
        (lambda tenant, before, tokens: f"{tenant} {before} " + "".join(map(str, tokens)), "both read 123"),
        (lambda tenant, before, tokens: f"{tenant}{before}{tokens}", "choose its name"),
        (lambda tenant, before, tokens: f"{tenant}/{before}/{tokens}", "are two tenants"),
        (lambda tenant, before, tokens: (tenant or "None", before, tokens), "who is called"),
        (lambda tenant, before, tokens: (tenant or 0, before, tokens), "tenant 0, and no tenant, are two"),
        (lambda tenant, before, tokens: hash((tenant, before, tokens)), "A hash says where to look"),
        (lambda tenant, before, tokens: [tenant, before, tokens], "cannot be the key of a dictionary"),
        (lambda tenant, before, tokens: object(), "nobody finds anything")],
}
