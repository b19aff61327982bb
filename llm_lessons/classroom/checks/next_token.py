"""Lesson 04: RMSNorm, SwiGLU, temperature and top-p by hand."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .core import Wrong, as_tensor, compare, exercise


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _temperature(logits: Tensor, t: float) -> Tensor:
    if t == 0:
        return F.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    return (logits / t).softmax(-1)


def _top_p(probabilities: Tensor, p: float) -> Tensor:
    sorted_, order = probabilities.sort(descending=True, stable=True)
    kept = sorted_.cumsum(-1) - sorted_ < p
    kept[0] = True
    left = torch.zeros_like(probabilities)
    left[order[kept]] = sorted_[kept]
    return left / left.sum()


OURS = {"rms_norm": _rms_norm, "swiglu": _swiglu, "temperature": _temperature, "top_p": _top_p}


def yours_or_ours(yours: Callable) -> Callable:
    """Your function once it passes its check; until then the course's own of the same name. One line says which."""
    name = getattr(yours, "__name__", str(yours))
    if name not in OURS:
        raise ValueError(f"there is no exercise called {name}: pass your {', '.join(list(OURS)[:-1])} or "
                         f"{list(OURS)[-1]}, under that name")
    with contextlib.redirect_stdout(io.StringIO()):  # what your function prints is not shown here
        verdict = globals()[name].verdict(yours)
    if verdict != "passed":
        print(f"using the course's {name}")
        return OURS[name]
    print(f"using your {name}")

    @functools.wraps(yours)
    def converted(first, *others):
        got = yours(first, *others)
        if isinstance(got, (list, tuple)) and got and isinstance(got[0], Tensor):
            got = torch.stack([torch.as_tensor(part) for part in got])
        return torch.as_tensor(got).to(first)

    return converted


def _keeps_the_type(answer: Callable, numbers: list[float], setting: float, want: Tensor, what: str) -> None:
    """One input in float64, the sampler's type: an answer that fails only there is told so."""
    words = f"{what} in float64 your function fails, and in float32 it does not: keep the type of what you get " \
            f"(torch.zeros_like makes zeros of the same type)"
    try:
        got = answer(torch.tensor(numbers, dtype=torch.float64), setting)
    except Wrong as wrong:
        raise Wrong(f"{words}. {wrong}") from None
    compare(got, want, f"{what} in float64 the result")
    if isinstance(got, Tensor) and got.is_floating_point() and got.dtype != torch.float64:
        raise Wrong(f"{what} in float64 the result is {str(got.dtype).removeprefix('torch.')}: keep the type of what "
                    f"you get (torch.zeros_like makes zeros of the same type)")


@exercise
def rms_norm(answer: Callable) -> None:
    """`answer(x, weight, eps)`: each vector divided by its root mean square, then scaled; float32 inside."""
    x, eps = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-2.0, 0.0, 1.0, 6.0]]), 1e-5
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
    square = x.pow(2).mean(-1, keepdim=True)
    plain = x * square.rsqrt()
    centred = x - x.mean(-1, keepdim=True)
    try:
        got = answer(x, weight, eps)
    except Wrong as wrong:
        if "must match the size" in str(wrong):
            raise Wrong(f"{wrong}. The mean needs a dimension of size 1 to divide by: mean(-1, keepdim=True)") from None
        raise
    compare(got, _rms_norm(x, weight, eps), "for x = [[1, 2, 3, 4], [-2, 0, 1, 6]] the result", {
        "the weight is missing: multiply by it at the end": plain,
        "you multiplied by 1 + weight, as Gemma does; this model's weight is the whole factor": plain * (1 + weight),
        "you divided by the mean of the numbers; it must be the root of the mean of their squares":
            x / x.mean(-1, keepdim=True) * weight,
        "you divided by the mean of the absolute values; it must be the root of the mean of the squares":
            x / x.abs().mean(-1, keepdim=True) * weight,
        "you divided by the mean of the squares: take its root": x / square * weight,
        "you multiplied by the root mean square: divide by it": x * square.sqrt() * weight,
        "you divided by the root of the sum of the squares (the vector's length); it must be the root of their mean":
            F.normalize(x, dim=-1) * weight,
        "you took one mean over the whole tensor; each vector has its own: mean(-1, keepdim=True)":
            x * x.pow(2).mean().rsqrt() * weight,
        "you took the mean over the tokens (dim 0); each vector has its own mean, over its last dimension":
            x * x.pow(2).mean(0).rsqrt() * weight,
        "you subtracted the mean, as LayerNorm does; RMSNorm does not": F.layer_norm(x, (4,)) * weight,
        "you subtracted the mean and divided by the standard deviation, as LayerNorm does; RMSNorm does not":
            centred / x.std(-1, keepdim=True) * weight,
        "you subtracted the mean first; RMSNorm divides x as it is": centred * square.rsqrt() * weight,
    })
    shape = list(as_tensor(got, "the result").shape)
    if shape != [2, 4]:
        raise Wrong(f"for x of shape [2, 4] the result has the shape {shape}; it must be that of x")
    small = torch.tensor([[1e-3, -1e-3, 2e-3, 0.0]])
    root = small.pow(2).mean(-1, keepdim=True).sqrt()
    compare(answer(small, weight, eps), _rms_norm(small, weight, eps), "for [0.001, -0.001, 0.002, 0] the result", {
        "eps is missing: it is added to the mean of the squares, under the root": small / root * weight,
        "you added eps to the root; it belongs under it, added to the mean of the squares":
            small / (root + eps) * weight,
    })
    compare(answer(small, weight, 1e-3), _rms_norm(small, weight, 1e-3), "for eps = 0.001 the result", {
        "your eps is always 1e-5: use the argument": _rms_norm(small, weight, 1e-5)})
    zeros = torch.zeros(2, 4)
    compare(answer(zeros, weight, eps), zeros, "for a vector of zeros the result")
    large, ones = torch.tensor([1000.0, -1000.0, 1000.0, 1000.0]).half(), torch.ones(4).half()
    for dtype in (torch.float64, torch.bfloat16):
        got = answer(x.to(dtype), weight.to(dtype), eps)
        if isinstance(got, Tensor) and got.dtype != dtype:
            before, after = (str(kind).removeprefix("torch.") for kind in (dtype, got.dtype))
            raise Wrong(f"a {before} x came back as {after}: compute in float32, then give the result x's own type, "
                        f".to(x.dtype)")
    got = answer(large, ones, eps)
    compare(got, torch.tensor([1.0, -1.0, 1.0, 1.0]), "for the float16 vector [1000, -1000, 1000, 1000] the result", {
        "your answer is all zeros: 1000² is more than float16 can hold (65,504). Begin with x.float()": torch.zeros(4),
    }, tolerance=1e-3)
    if isinstance(got, Tensor) and got.dtype != torch.float16:
        raise Wrong(f"a float16 x came back as {str(got.dtype).removeprefix('torch.')}: compute in float32, then give "
                    f"the result x's own type, .to(x.dtype)")


@exercise
def swiglu(answer: Callable) -> None:
    """`answer(x, gate, up, down)`: (silu(x gateᵀ) · x upᵀ) downᵀ."""
    generator = torch.Generator().manual_seed(4)
    x, gate, up, down = (torch.randn(size, generator=generator) for size in ((2, 3), (4, 3), (4, 3), (3, 4)))
    g, u = F.linear(x, gate), F.linear(x, up)
    want = _swiglu(x, gate, up, down)
    what = "for 2 tokens of 3 numbers and 4 hidden units the result"
    try:
        got = answer(x, gate, up, down)
    except Wrong as wrong:
        if _multiplies_matrices(answer):
            raise Wrong("gate and up both have the shape [tokens, hidden units]: multiply place by place, with *, "
                        "not with @") from None
        if "shapes cannot be multiplied" in str(wrong) or "size mismatch" in str(wrong):
            raise Wrong("the matrices do not fit: a weight is stored [outputs, inputs], so it is F.linear(x, gate), or "
                        "x @ gate.T; and down comes last, after the product") from None
        raise
    if tuple(as_tensor(got, what).shape) == (2, 4):
        raise Wrong("the result has 4 numbers for each token: down, which leads back to 3, is missing")
    compare(got, want, what, {
        "you put silu on up; it belongs on gate": F.linear(g * F.silu(u), down),
        "you put silu on the product; it belongs on gate alone": F.linear(F.silu(g * u), down),
        "you put silu on both; it belongs on gate alone": F.linear(F.silu(g) * F.silu(u), down),
        "silu is missing: gate goes through it before it is multiplied with up": F.linear(g * u, down),
        "you used sigmoid alone, as the older GLU does; silu(z) is z · sigmoid(z)":
            F.linear(torch.sigmoid(g) * u, down),
        "you used gelu (that makes a GeGLU); this model uses silu": F.linear(F.gelu(g) * u, down),
        "you used the tanh form of gelu; this model uses silu": F.linear(F.gelu(g, approximate="tanh") * u, down),
        "you used relu; this model uses silu": F.linear(F.relu(g) * u, down),
        "you added gate and up; gate *multiplies* up": F.linear(F.silu(g) + u, down),
        "up is missing: silu(gate) decides how much of up passes": F.linear(F.silu(g), down),
        "gate is not used: silu(gate) decides how much of up passes": F.linear(u, down),
        "you added x to the result; that is the block's task, not this part's": want + x,
    })


def _multiplies_matrices(answer: Callable) -> bool:
    """True when square matrices, which fit any product, show that the answer has @ where * belongs."""
    generator = torch.Generator().manual_seed(5)
    x, gate, up, down = (torch.randn(3, 3, generator=generator) for _ in range(4))
    try:
        got = as_tensor(answer(x, gate, up, down), "the result").float()
    except Exception:
        return False
    g, u = F.silu(F.linear(x, gate)), F.linear(x, up)
    return any(got.shape == wrong.shape and torch.allclose(got, wrong, atol=1e-4)
               for product in (g @ u, g @ u.T) for wrong in (F.linear(product, down), product @ down))


@exercise
def temperature(answer: Callable) -> None:
    """`answer(logits, t)`: softmax of logits / t; all the probability on the best token, the lowest id, when t is 0."""
    logits = torch.tensor([1.0, 2.0, 0.0, -1.0])
    plain = logits.softmax(-1)
    for t in (1.0, 0.5, 2.0):
        got = answer(logits, t)
        if as_tensor(got, "the result").numel() == 1:
            raise Wrong("your answer is one number; return the probabilities of all tokens: drawing comes later")
        compare(got, _temperature(logits, t), f"for logits [1, 2, 0, -1] the result at temperature {t}", {
            "you returned the scaled logits: softmax is missing": logits / t,
            "you multiplied the logits by the temperature: divide them by it": (logits * t).softmax(-1),
            "you changed the probabilities after softmax; the logits are divided, before it": plain / t,
            "dividing the probabilities and making their sum 1 again changes nothing: divide the logits": plain,
            "you took softmax twice: divide the logits, then take softmax once": (plain / t).softmax(-1),
        })
    for at_zero, best in (([1.0, 2.0, 0.0, -1.0], 1), ([3.0, 3.0, 1.0], 0), ([-5.0, -2.0, -2.0, -9.0], 1)):
        case, got = f"for logits {at_zero} at temperature 0", answer(torch.tensor(at_zero), 0)
        values = as_tensor(got, case)
        if values.isnan().any():
            raise Wrong(f"{case} you divided by 0, and the result holds NaN: treat 0 as a case of its own")
        if values.numel() == 1:
            raise Wrong(f"{case} you returned one number; return probabilities here, too: 1 for the best token, else 0")
        one_hot = torch.eye(len(at_zero))
        ties = torch.tensor([float(score == max(at_zero)) for score in at_zero])
        compare(got, one_hot[best], f"{case} the result", {
            "you shared the probability among the best tokens; only one of them is taken, the one with the lowest id":
                ties / ties.sum(),
            "every best token got probability 1; only one of them is taken, the one with the lowest id": ties,
            "several tokens have the highest logit, and you took the last of them; take the one with the lowest id":
                one_hot[max(i for i, score in enumerate(at_zero) if score == max(at_zero))],
            "you left the probabilities as they are; temperature 0 puts all of it on the best token":
                torch.tensor(at_zero).softmax(-1),
        })
    large = torch.tensor([300.0, 299.0, 0.0])
    got, case = answer(large, 0.1), "for logits [300, 299, 0] at temperature 0.1 the result"
    if as_tensor(got, case).isnan().any():
        raise Wrong(f"{case} holds NaN: exp overflows. Use torch's softmax, or take the largest logit away first")
    compare(got, (large / 0.1).softmax(-1), case)
    for t in (0.5, 0):
        _keeps_the_type(answer, logits.tolist(), t, _temperature(logits, t),
                        f"for logits [1, 2, 0, -1] at temperature {t}")


@exercise
def top_p(answer: Callable) -> None:
    """`answer(probabilities, p)`: only the most probable tokens that together hold p, at least one; their sum is 1."""
    probabilities = torch.tensor([0.3, 0.05, 0.4, 0.1, 0.15])
    shown = "[0.3, 0.05, 0.4, 0.1, 0.15]"

    def keep(*ids, among=probabilities):
        left = torch.zeros(len(among)).index_fill(0, torch.tensor(ids), 1.0) * among
        return left / left.sum()

    got, want, what = answer(probabilities, 0.55), keep(0, 2), f"for {shown} and p = 0.55 the result"
    if as_tensor(got, what).numel() == 2:
        raise Wrong(f"{what} has only the two kept tokens; give it one place for each token, with 0 for the others")
    if as_tensor(got, what).isnan().any():
        raise Wrong(f"{what} holds NaN, it is 0 / 0: no token alone holds 0.55. Add them up, the most probable first, "
                    f"until they hold it together")
    compare(got, want, what, {
        "it says which tokens to keep; return their probabilities, and 0 for the others": (want > 0).double(),
        "it no longer sums to 1: divide what is left by its sum": (want > 0) * probabilities,
        "it is in sorted order; position i must hold the probability of token i": want.sort(descending=True).values,
        "it lacks the token with which the sum reaches 0.55, the last to be kept (0.4 alone is less than 0.55)":
            keep(2),
        "it keeps one token too many: 0.4 and 0.3 already hold 0.55": keep(0, 2, 4),
        "it comes from summing in the order of the ids: sort first, most probable first": keep(0, 1, 2),
        "it comes from summing in the order of the ids: sort first, the most probable first": keep(0, 1),
        "it comes from sorting the least probable first": keep(0, 1, 3, 4),
        "it comes from sorting the least probable first; begin with the most probable": keep(1, 3, 4),
        "it keeps every token": probabilities,
    })
    for p in (1e-9, 0):
        compare(answer(probabilities, p), keep(2), f"for {shown} and p = {p} the result", {
            "it is 0 / 0, no token is left: the most probable one is always kept": torch.full((5,), torch.nan),
            "it keeps no token: the most probable one is always kept": torch.zeros(5),
            "it keeps every token; only the most probable one is left": probabilities,
        })
    edge = torch.tensor([0.125, 0.25, 0.5, 0.125])
    compare(answer(edge, 0.5), keep(2, among=edge), "for [0.125, 0.25, 0.5, 0.125] and p = 0.5 the result", {
        "it keeps one token too many: token 2 alone holds 0.5": keep(1, 2, among=edge)})
    compare(answer(edge, 0.75), keep(1, 2, among=edge), "for [0.125, 0.25, 0.5, 0.125] and p = 0.75 the result", {
        "it lacks the token with which the sum reaches p": keep(2, among=edge)})
    compare(answer(probabilities, 1.0), probabilities, f"for {shown} and p = 1 every token is kept; the result")
    _keeps_the_type(answer, edge.tolist(), 0.5, keep(2, among=edge), "for [0.125, 0.25, 0.5, 0.125] and p = 0.5")
