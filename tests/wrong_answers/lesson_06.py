"""Lesson 06: the ways in which the bytes, the ceiling, the positions and the work without a cache are miscounted."""


def weights(c, table=1, up=3, kv_rows=None):
    kv_rows = c.kv_heads * c.head_dim if kv_rows is None else kv_rows
    layer = 2 * c.hidden * c.heads * c.head_dim + 2 * c.hidden * kv_rows + up * c.hidden * c.ffn
    return c.layers * layer + table * c.vocab * c.hidden


def cache(c, context, heads=None, kinds=2):
    return kinds * c.layers * (c.kv_heads if heads is None else heads) * c.head_dim * context


def cache_of_the_query_heads(config, context, bytes_per_value):
    return (weights(config) + cache(config, context, config.heads)) * bytes_per_value


def cache_of_the_hidden_size(config, context, bytes_per_value):
    return (weights(config) + 2 * config.layers * config.hidden * context) * bytes_per_value


def keys_without_values(config, context, bytes_per_value):
    return (weights(config) + cache(config, context, kinds=1)) * bytes_per_value


def embedding_twice(config, context, bytes_per_value):
    return (weights(config, table=2) + cache(config, context)) * bytes_per_value


def embedding_when_untied(config, context, bytes_per_value):
    return (weights(config, table=1 if config.tied else 2) + cache(config, context)) * bytes_per_value


def no_head(config, context, bytes_per_value):
    return (weights(config, table=0) + cache(config, context)) * bytes_per_value


def no_head_when_tied(config, context, bytes_per_value):
    return (weights(config, table=0 if config.tied else 1) + cache(config, context)) * bytes_per_value


def no_cache(config, context, bytes_per_value):
    return weights(config) * bytes_per_value


def no_weights(config, context, bytes_per_value):
    return cache(config, context) * bytes_per_value


def one_layer_of_cache(config, context, bytes_per_value):
    return (weights(config) + cache(config, context) / config.layers) * bytes_per_value


def square_key_and_value_matrices(config, context, bytes_per_value):
    return (weights(config, kv_rows=config.hidden) + cache(config, context)) * bytes_per_value


def two_matrices_of_the_ffn(config, context, bytes_per_value):
    return (weights(config, up=2) + cache(config, context)) * bytes_per_value


def output_forgotten(config, context, bytes_per_value):
    missing = config.layers * config.hidden * config.heads * config.head_dim
    return (weights(config) - missing + cache(config, context)) * bytes_per_value


def hidden_for_the_heads(config, context, bytes_per_value):
    wrong = 2 * config.layers * config.hidden * (config.hidden - config.heads * config.head_dim)
    return (weights(config) + wrong + cache(config, context)) * bytes_per_value


def megabytes(config, context, bytes_per_value):
    return (weights(config) + cache(config, context)) * bytes_per_value / 1e6


def numbers_instead_of_bytes(config, context, bytes_per_value):
    return weights(config) + cache(config, context)


def bits(config, context, bytes_per_value):
    return 8 * (weights(config) + cache(config, context)) * bytes_per_value


def operations(config, context, bytes_per_value):
    return 2 * (weights(config) + cache(config, context))


def seconds_of_a_step(weight_bytes, cache_bytes, batch, bandwidth):
    return (weight_bytes + batch * cache_bytes) / bandwidth


def milliseconds_of_a_step(weight_bytes, cache_bytes, batch, bandwidth):
    return 1000 * seconds_of_a_step(weight_bytes, cache_bytes, batch, bandwidth)


def steps_per_second(weight_bytes, cache_bytes, batch, bandwidth):
    return bandwidth / (weight_bytes + batch * cache_bytes)


def weights_for_each_request(weight_bytes, cache_bytes, batch, bandwidth):
    return batch * bandwidth / (batch * (weight_bytes + cache_bytes))


def one_cache_for_all(weight_bytes, cache_bytes, batch, bandwidth):
    return batch * bandwidth / (weight_bytes + cache_bytes)


def shared_cache(weight_bytes, cache_bytes, batch, bandwidth):
    return batch * bandwidth / (weight_bytes + cache_bytes / batch)


def weights_alone(weight_bytes, cache_bytes, batch, bandwidth):
    return batch * bandwidth / weight_bytes


def added_times(weight_bytes, cache_bytes, batch, bandwidth):
    return bandwidth / weight_bytes + batch * bandwidth / cache_bytes


def step_numbers(prompt_length, steps):
    return list(range(steps))


def step_numbers_from_one(prompt_length, steps):
    return [step + 1 for step in range(steps)]


def one_too_late(prompt_length, steps):
    return [prompt_length + step + 1 for step in range(steps)]


def one_too_early(prompt_length, steps):
    return [prompt_length - 1 + step for step in range(steps)]


def prompt_again_after_the_first(prompt_length, steps):
    offset, found = prompt_length, []
    for step in range(steps):
        found.append(offset)
        offset += prompt_length + 1 if step == 0 else 1
    return found


def prompt_twice(prompt_length, steps):
    return [2 * prompt_length + step for step in range(steps)]


def never_growing(prompt_length, steps):
    return [prompt_length] * steps


def with_the_prompt(prompt_length, steps):
    return list(range(prompt_length + steps))


def only_the_last(prompt_length, steps):
    return prompt_length + steps - 1


def every_pass_like_the_first(shape, prompt, new):
    return new * shape.prefill_flops(prompt)


def one_token_too_long(shape, prompt, new):
    return sum(shape.prefill_flops(prompt + i) for i in range(1, new + 1))


def the_last_pass_alone(shape, prompt, new):
    return shape.prefill_flops(prompt + new - 1)


def one_pass_too_many(shape, prompt, new):
    return sum(shape.prefill_flops(prompt + i) for i in range(new + 1))


def with_a_cache(shape, prompt, new):
    return shape.prefill_flops(prompt) + sum(shape.flops_per_token(prompt + i) for i in range(1, new))


def without_the_prompt(shape, prompt, new):
    return sum(shape.flops_per_token(prompt + i) for i in range(new))


def all_logits(shape, prompt, new):
    return sum(shape.prefill_flops(prompt + i, all_logits=True) for i in range(new))


def a_single_pass(shape, prompt, new):
    return shape.prefill_flops(prompt + new)


def from_no_tokens_on(shape, prompt, new):
    return sum(shape.prefill_flops(i) for i in range(new))


def the_new_tokens_alone(shape, prompt, new):
    return sum(shape.prefill_flops(i + 1) for i in range(new))


def a_list_of_passes(shape, prompt, new):
    return [shape.prefill_flops(prompt + i) for i in range(new)]


def whole_matrix(shape, prompt, new):
    return sum(shape.prefill_flops(prompt + i, causal=False) for i in range(new))


WRONG = {
    "bytes_per_step": [
        (cache_of_the_query_heads, "query heads"), (cache_of_the_hidden_size, "query heads"),
        (keys_without_values, "keys and values: 2"), (embedding_twice, "counted twice"),
        (embedding_when_untied, "looks up one row"), (no_head, "head is missing"),
        (no_head_when_tied, "head is missing"), (no_cache, "cache is missing"), (no_weights, "weights are missing"),
        (one_layer_of_cache, "every layer"), (square_key_and_value_matrices, "fewer than the queries"),
        (two_matrices_of_the_ffn, "gate, up and down"), (numbers_instead_of_bytes, "not bytes"),
        (bits, "these are bits"), (operations, "these are the operations"), (megabytes, "these are MB"),
        (output_forgotten, "two matrices; one of them"), (hidden_for_the_heads, "a small model .*need not be hidden")],
    "ceiling": [
        (seconds_of_a_step, "seconds of one step"), (milliseconds_of_a_step, "milliseconds"),
        (steps_per_second, "steps in a second"), (weights_for_each_request, "read once for all"),
        (one_cache_for_all, "cache of its own"), (shared_cache, "not shared"), (weights_alone, "cache is missing"),
        (added_times, "should be")],
    "positions": [
        (step_numbers, "numbers of the steps; the prompt"), (step_numbers_from_one, "from 1"),
        (one_too_late, "one too late"), (one_too_early, "one too early"),
        (prompt_again_after_the_first, "added twice after the first step"), (prompt_twice, "added twice"),
        (never_growing, "must grow"), (with_the_prompt, "prompt's own positions"), (only_the_last, "shape")],
    "recompute_flops": [
        (every_pass_like_the_first, "text grows"), (one_token_too_long, "from the prompt alone"),
        (the_last_pass_alone, "pass of its own"), (one_pass_too_many, "too many"), (with_a_cache, "with a cache"),
        (without_the_prompt, "over the prompt, too"), (all_logits, "only the last row"),
        (a_list_of_passes, "shape"), (whole_matrix, "mask forbids"),
        (a_single_pass, "a single pass .* every new token needs one"),
        (from_no_tokens_on, "the prompt is missing, so your first pass"),
        (the_new_tokens_alone, "the prompt is missing: every pass")],
}
