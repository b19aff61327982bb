"""From logits to a token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

The order is fixed, the same for one sequence and for many, and the one Hugging Face transformers uses: repetition
penalty, temperature, top-k, top-p, min-p; each filter works on what the one before it left, renormalised. (llama.cpp
by default applies the temperature last, which keeps more tokens below temperature 1.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Draws the next token: `sampler(logits, history) -> id`.

    temperature 0 takes the most probable token, the lowest id of several, and uses no randomness; that is the default.
    top_k None or 0, top_p None or 1, min_p None or 0 and repetition_penalty 1 switch a step off. A filter always
    leaves at least the most probable token. The same seed draws the same numbers; where logits differ by rounding
    (another device, dtype or batch) the token may differ. Without a seed no two samplers agree. torch's global random
    state is never touched. Settings cannot be changed: make another sampler.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        self._require("temperature", lambda t: t >= 0 and math.isfinite(t), "a number from 0 up")
        self._require("top_k", lambda k: k is None or (k >= 0 and k % 1 == 0), "a whole number, or None (or 0) for all")
        self._require("top_p", lambda p: p is None or 0 <= p <= 1, "between 0 and 1, or None")
        self._require("min_p", lambda p: p is None or 0 <= p <= 1, "between 0 and 1, or None")
        self._require("repetition_penalty", lambda r: 1e-6 < r < 1e6, "above 0 (1 changes nothing)")
        self._require("seed", lambda s: s is None or (-2**63 <= s < 2**64 and s % 1 == 0),
                      "a whole number of at most 64 bits, or None")
        object.__setattr__(self, "_generator", torch.Generator())
        if self.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(self.seed))

    def _require(self, name: str, holds: Callable, wanted: str) -> None:
        value = getattr(self, name)
        try:
            good = not isinstance(value, bool) and bool(holds(value))
        except (TypeError, OverflowError, ValueError, RuntimeError):
            good = False
        if not good:
            raise ValueError(f"{name} must be {wanted}, not {value!r}")

    def restarted(self) -> Sampler:
        """The same settings with the generator back at its seed (without a seed: at a new random state)."""
        fresh = copy.copy(self)
        Sampler.__post_init__(fresh)
        return fresh

    def __call__(self, logits: Tensor, history: Sequence[int] = ()) -> int:
        """logits [vocab] -> a token id. `history` (prompt and answer so far) serves the repetition penalty alone."""
        if self.temperature == 0:
            return greedy(self._penalized(check_logits(logits), history))
        return int(torch.multinomial(self.stages(logits, history)[-1][1], 1, generator=self._generator))

    def _penalized(self, scores: Tensor, history: Sequence[int]) -> Tensor:
        return scores if self.repetition_penalty == 1 else penalize(scores, history, self.repetition_penalty)

    def stages(self, logits: Tensor, history: Sequence[int] = ()) -> list[tuple[str, Tensor]]:
        """The probabilities [vocab] after each step that is switched on, with its name; the last is drawn from."""
        scores = check_logits(logits)
        stages, scores = [("model", scores.softmax(-1))], self._penalized(scores, history)
        if self.repetition_penalty != 1:
            stages.append(("repetition penalty", scores.softmax(-1)))
        if self.temperature == 0:
            best = torch.tensor([greedy(scores)])
            return stages + [("greedy", torch.zeros_like(scores).index_fill(0, best, 1.0))]
        # The maximum goes first: a tiny temperature then gives 0 and -inf, never inf - inf.
        probabilities = ((scores - scores.max()) / self.temperature).softmax(-1)
        stages.append(("temperature", probabilities))
        for name, keep in (("top-k", keep_top_k), ("top-p", keep_top_p), ("min-p", keep_min_p)):
            limit = getattr(self, name.replace("-", "_"))
            if limit is not None:
                probabilities = torch.where(keep(probabilities, limit), probabilities, 0.0)
                probabilities = probabilities / probabilities.sum()
                stages.append((name, probabilities))
        return stages


def check_logits(logits: Tensor) -> Tensor:
    """The logits as float64 on the CPU, or a ValueError: nothing can be drawn from NaN, or where no token can be."""
    logits = torch.as_tensor(logits)
    if logits.dim() != 1 or logits.numel() == 0:
        raise ValueError(f"a sampler takes the logits [vocab] of one token, not a tensor of shape {list(logits.shape)}")
    scores = logits.detach().to("cpu", torch.float64)
    largest = float(scores.max())  # NaN as soon as there is one NaN
    if math.isnan(largest) or largest == math.inf:
        raise ValueError("the logits contain NaN or infinity: the model's arithmetic went wrong before sampling")
    if largest == -math.inf:
        raise ValueError("every logit is -inf: a filter ruled out the whole vocabulary")
    return scores


def greedy(scores: Tensor) -> int:
    """The id of the largest score [vocab], the lowest of several."""
    return int((scores == scores.max()).nonzero()[0])


def penalize(scores: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Make each token of the history less likely: positive scores are divided by the penalty, negative multiplied.

    Keskar et al. 2019, https://arxiv.org/abs/1909.05858.
    """
    seen = torch.tensor(sorted(set(history)), dtype=torch.long)
    if len(seen) and not 0 <= int(seen[0]) <= int(seen[-1]) < len(scores):
        raise ValueError(f"the history has ids from {seen[0]} to {seen[-1]}, the logits only 0 to {len(scores) - 1}")
    old = scores[seen]
    return scores.index_put((seen,), torch.where(old > 0, old / penalty, old * penalty))


def keep_top_k(probabilities: Tensor, k: int) -> Tensor:
    """True for the k most probable tokens [vocab], the lower ids of equals; for all when k is 0 or not below vocab."""
    if k == 0 or k >= probabilities.numel():
        return torch.ones_like(probabilities, dtype=torch.bool)
    smallest = probabilities.topk(int(k)).values[-1]
    above, equal = probabilities > smallest, probabilities == smallest
    return above | (equal & (equal.cumsum(-1) <= k - above.sum()))


def keep_top_p(probabilities: Tensor, p: float) -> Tensor:
    """True for the smallest set of most probable tokens that holds p of the probability [vocab]; at least one token.

    Holtzman et al. 2019, https://arxiv.org/abs/1904.09751.
    """
    if p == 1:
        return torch.ones_like(probabilities, dtype=torch.bool)
    # Only tokens that an earlier filter left need sorting: 50 after a top-k of 50, not the whole vocabulary.
    left = probabilities.nonzero()[:, 0]
    order = left[probabilities[left].sort(descending=True, stable=True).indices]
    before = probabilities[order].cumsum(-1).roll(1)  # what the more probable tokens hold; the first has none of them
    kept = before < p
    kept[0] = True
    return torch.zeros_like(probabilities, dtype=torch.bool).index_fill(0, order[kept], True)


def keep_min_p(probabilities: Tensor, p: float) -> Tensor:
    """True for tokens at least p times as probable as the most probable one [vocab] (https://arxiv.org/abs/2407.01082)."""
    return probabilities >= p * probabilities.max()
