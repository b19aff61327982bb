"""Lesson 04: what people write instead of RMSNorm, SwiGLU, temperature and top-p."""

import torch
import torch.nn.functional as F


# --- rms_norm(x, weight, eps=1e-5) ---
def mean_instead_of_squares(x, weight, eps=1e-5):
    return x / (x.mean(-1, keepdim=True) + eps) * weight


def absolute_values(x, weight, eps=1e-5):
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight


def layer_norm(x, weight, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, eps=eps)


def layer_norm_by_hand(x, weight, eps=1e-5):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) * weight


def centred_but_not_by_its_deviation(x, weight, eps=1e-5):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def eps_outside_the_root(x, weight, eps=1e-5):
    x = x.float()
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight


def no_eps(x, weight, eps=1e-5):
    x = x.float()
    return x / x.pow(2).mean(-1, keepdim=True).sqrt() * weight


def no_weight(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def no_root(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps) * weight


def sum_instead_of_mean(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps) * weight


def one_mean_for_all(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).mean() + eps) * weight


def mean_over_the_tokens(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).mean(0) + eps) * weight


def no_keepdim(x, weight, eps=1e-5):
    return x / torch.sqrt(x.pow(2).mean(-1) + eps) * weight


def multiplied(x, weight, eps=1e-5):
    return x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def gemmas_weight(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def in_half_precision(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def stays_float32(x, weight, eps=1e-5):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def widens(x, weight, eps=1e-5):
    wide = x.double()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    return out if x.dtype != torch.float16 else out.half()


# --- swiglu(x, gate, up, down) ---
def no_gate(x, gate, up, down):
    return (x @ up.T) @ down.T


def silu_on_up(x, gate, up, down):
    return ((x @ gate.T) * F.silu(x @ up.T)) @ down.T


def silu_on_the_product(x, gate, up, down):
    return F.silu((x @ gate.T) * (x @ up.T)) @ down.T


def silu_on_both(x, gate, up, down):
    return (F.silu(x @ gate.T) * F.silu(x @ up.T)) @ down.T


def no_silu(x, gate, up, down):
    return ((x @ gate.T) * (x @ up.T)) @ down.T


def sigmoid(x, gate, up, down):
    return (torch.sigmoid(x @ gate.T) * (x @ up.T)) @ down.T


def gelu(x, gate, up, down):
    return (F.gelu(x @ gate.T) * (x @ up.T)) @ down.T


def relu(x, gate, up, down):
    return (F.relu(x @ gate.T) * (x @ up.T)) @ down.T


def added(x, gate, up, down):
    return (F.silu(x @ gate.T) + x @ up.T) @ down.T


def no_up(x, gate, up, down):
    return F.silu(x @ gate.T) @ down.T


def matrix_product(x, gate, up, down):
    return (F.silu(x @ gate.T) @ (x @ up.T)) @ down.T


def matrix_product_transposed(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) @ F.linear(x, up).T, down)


def no_down(x, gate, up, down):
    return F.silu(x @ gate.T) * (x @ up.T)


def not_transposed(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def with_the_residual(x, gate, up, down):
    return x + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


# --- temperature(logits, t) ---
def multiplies(logits, t):
    return (logits * t).softmax(-1)


def no_softmax(logits, t):
    return logits / t


def divides_by_zero(logits, t):
    return (logits / t).softmax(-1)


def scales_the_probabilities(logits, t):
    probabilities = logits.softmax(-1) / t
    return probabilities / probabilities.sum()


def softmax_twice(logits, t):
    return (logits.softmax(-1) / t).softmax(-1)


def returns_the_token(logits, t):
    return logits.argmax()


def returns_the_token_at_zero(logits, t):
    return logits.argmax() if t == 0 else (logits / t).softmax(-1)


def shares_a_tie(logits, t):
    return (logits / max(t, 1e-6)).softmax(-1)


def ignores_zero(logits, t):
    return logits.softmax(-1) if t == 0 else (logits / t).softmax(-1)


def marks_every_best(logits, t):
    return (logits == logits.max()).float() if t == 0 else (logits / t).softmax(-1)


def takes_the_last_of_a_tie(logits, t):
    if t == 0:
        return F.one_hot((logits == logits.max()).nonzero()[-1, 0], len(logits)).float()
    return (logits / t).softmax(-1)


# --- top_p(probabilities, p) ---
def _nucleus(probabilities, p, descending=True, shifted=True, at_least_one=True, edge=torch.lt):
    values, order = probabilities.sort(descending=descending)
    before = values.cumsum(-1) - (values if shifted else 0)
    kept = edge(before, p)
    kept[0] |= at_least_one
    return torch.zeros_like(probabilities).index_fill(0, order[kept], 1.0) * probabilities


def _normal(probabilities):
    return probabilities / probabilities.sum()


def drops_the_crossing_token(probabilities, p):
    return _normal(_nucleus(probabilities, p, shifted=False))


def may_keep_none(probabilities, p):
    values, order = probabilities.sort(descending=True)
    first = int((values.cumsum(-1) < p).sum()) + (p > 1e-6)
    return _normal(torch.zeros_like(probabilities).index_fill(0, order[:first], 1.0) * probabilities)


def no_sort(probabilities, p):
    return _normal(torch.where(probabilities.cumsum(-1) - probabilities < p, probabilities, 0.0))


def no_sort_and_unshifted(probabilities, p):
    return _normal(torch.where(probabilities.cumsum(-1) <= p, probabilities, 0.0))


def ascending(probabilities, p):
    return _normal(_nucleus(probabilities, p, descending=False))


def ascending_and_unshifted(probabilities, p):
    return _normal(_nucleus(probabilities, p, descending=False, shifted=False))


def not_renormalised(probabilities, p):
    return _nucleus(probabilities, p)


def in_sorted_order(probabilities, p):
    return _normal(_nucleus(probabilities, p)).sort(descending=True).values


def only_the_kept(probabilities, p):
    left = _nucleus(probabilities, p)
    return _normal(left[left > 0])


def a_mask(probabilities, p):
    return _nucleus(probabilities, p) > 0


def one_too_many_at_the_edge(probabilities, p):
    return _normal(_nucleus(probabilities, p, edge=torch.le))


def one_too_many(probabilities, p):
    values, order = probabilities.sort(descending=True)
    count = int((values.cumsum(-1) < p).sum()) + 2
    return _normal(torch.zeros_like(probabilities).index_fill(0, order[:count], 1.0) * probabilities)


def a_fixed_threshold(probabilities, p):
    return _normal(torch.where(probabilities >= p, probabilities, 0.0))


def min_p_instead(probabilities, p):
    return _normal(torch.where(probabilities >= p * probabilities.max(), probabilities, 0.0))


def zeros_of_float32(probabilities, p):
    values, order = probabilities.sort(descending=True)
    kept = values.cumsum(-1) - values < p
    kept[0] = True
    left = torch.zeros(len(probabilities))
    left[order[kept]] = values[kept]
    return left / left.sum()


def one_hot_of_float32(logits, t):
    if t == 0:
        return F.one_hot(logits.argmax(), len(logits)).float()
    return (logits / t).softmax(-1)


def fixed_eps(x, weight, eps=1e-5):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def one_dimension_more(x, weight, eps=1e-5):
    wide = x.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight).unsqueeze(-1)


def exp_overflows(logits, t):
    if t == 0:
        return F.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    return (logits / t).exp() / (logits / t).exp().sum()


WRONG = {
    "rms_norm": [
        (mean_instead_of_squares, "mean of the numbers"), (absolute_values, "absolute values"),
        (layer_norm, "LayerNorm"), (layer_norm_by_hand, "LayerNorm"),
        (centred_but_not_by_its_deviation, "subtracted the mean first"), (eps_outside_the_root, "eps.*under it"),
        (no_eps, "eps is missing"), (no_weight, "weight is missing"), (no_root, "take its root"),
        (sum_instead_of_mean, "root of the sum"), (one_mean_for_all, "one mean over the whole"),
        (mean_over_the_tokens, "dim 0"), (no_keepdim, "keepdim=True"), (multiplied, "divide by it"),
        (gemmas_weight, "Gemma"), (in_half_precision, "float16 can hold"), (widens, "bfloat16 x came back as float64"),
        (stays_float32, r"\.to\(x\.dtype\)"), (fixed_eps, "always 1e-5"),
        (one_dimension_more, r"shape \[2, 4, 1\]")],
    "swiglu": [
        (silu_on_up, "silu on up"), (silu_on_the_product, "silu on the product"), (silu_on_both, "silu on both"),
        (no_silu, "silu is missing"), (sigmoid, "sigmoid alone"), (gelu, "gelu"), (relu, "relu"), (added, "multiplies"),
        (no_up, "up is missing"), (no_gate, "gate is not used"),
        (matrix_product, "place by place"), (matrix_product_transposed, "place by place"),
         (no_down, "down.* is missing"), (not_transposed, r"\[outputs, inputs\]"),
        (with_the_residual, "added x")],
    "temperature": [
        (one_hot_of_float32, "zeros_like"),
        (multiplies, "divide them"), (no_softmax, "softmax is missing"), (divides_by_zero, "divided by 0"),
        (scales_the_probabilities, "changes nothing"), (softmax_twice, "softmax twice"),
        (returns_the_token, "one number"), (returns_the_token_at_zero, "one number"), (shares_a_tie, "shared"),
        (ignores_zero, "as they are"), (marks_every_best, "every best token"),
        (takes_the_last_of_a_tie, "the last of them"), (exp_overflows, "exp overflows")],
    "top_p": [
        (zeros_of_float32, "zeros_like"),
        (drops_the_crossing_token, "lacks the token with which"), (may_keep_none, "always kept"),
        (no_sort, "order of the ids"), (no_sort_and_unshifted, "order of the ids"), (ascending, "least probable first"),
        (ascending_and_unshifted, "least probable first"), (not_renormalised, "sums to 1"),
        (in_sorted_order, "sorted order"), (only_the_kept, "one place for each"), (a_mask, "says which"),
        (one_too_many_at_the_edge, "one token too many"), (one_too_many, "one token too many"),
        (a_fixed_threshold, "Add them up"), (min_p_instead, "every token")],
}
