"""Quality as a regression test: does a model with changed weights still predict as its baseline does?

    perplexity    exp of the mean loss on a held-out text: as unsure as a choice among so many equally likely tokens
    KL divergence of the candidate's probabilities from the baseline's, in nats a token: 0 where nothing changed
    agreement     the share of positions where both hold the same token for the most probable one
    questions     ten that the baseline answers right: how many does the candidate?

Each comes with a 95 % bootstrap interval (the questions do not: ten out of ten still allows a true rate of 74 %,
0.05^(1/10)). Perplexity needs the text alone, so a model may be better or worse than its baseline at it by luck; KL and
agreement compare the two models directly, and see small changes that the text does not.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_cache import whole_number
from .linear import Linear
from .model import Model, check_ids
from .quantize import check_bits, quantize

WINDOW = 512  # tokens that the model sees at most
PIECE = 32  # positions whose logits exist at the same time: 49,152 numbers each, 6 MB in all
BLOCK = 128  # neighbouring tokens that are resampled together; see `bootstrap`
MIN_BLOCKS = 8
PARTS = ("blocks", "head")
SCALE_BITS = 16  # of a scale or a minimum, as files have them; quantize itself keeps them in float32

QUESTIONS = (  # and a word that stands in a right answer
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Japan?", "Tokyo"),
    ("How many days are in a week?", "7"),
    ("What is the chemical symbol for gold?", "Au"),
    ("What is the chemical formula of water?", "H2O"),
    ("What is the opposite of hot?", "cold"),
    ("What is the longest river in Africa?", "Nile"),
    ("Who was the first person to walk on the Moon?", "Armstrong"),
    ("What is the plural of mouse?", "mice"),
    ("In which year did the Second World War end?", "1945"),
)


class Estimate(NamedTuple):
    """A mean, and the interval from `low` to `high` that holds 95 % of its bootstrap resamples."""

    value: float
    low: float
    high: float

    def exp(self) -> Estimate:
        """Of a mean loss this makes the perplexity: exp keeps the order, so it may be taken of the ends, too."""
        return Estimate(*map(math.exp, self))

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap(values: Tensor, block: int = BLOCK, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The mean of one figure for each token, `values` [tokens], with its 95 % interval.

    What if another text of this kind had been scored? Draw as many blocks of the text as there are, with replacement,
    take the mean, and again, 2,000 times: the middle 95 % of these means are the interval (the percentile bootstrap,
    Efron 1979, https://doi.org/10.1214/aos/1176344552). Blocks, because neighbours are no independent witnesses: a hard
    paragraph is hard for many tokens in a row. Drawn one by one, the tokens of the course's prose would give intervals
    a third too narrow; from blocks of 128 on they hardly grow any more (Künsch 1989, on blocks:
    https://doi.org/10.1214/aos/1176347265). The same seed draws the same blocks, so figures of two models can be
    compared, and the interval of a difference is best had from the differences of each token.

    The interval speaks of other texts. It does not know of other models, nor of other grids that round as coarsely.
    """
    values = torch.as_tensor(values).detach().cpu().double()
    if values.dim() != 1 or not values.isfinite().all():
        raise ValueError(f"bootstrap takes one finite number for each token [tokens], not {list(values.shape)}"
                         + (" with NaN or infinity" if values.dim() == 1 else ""))
    parts = values.split(whole_number("block", block))
    if len(parts) < MIN_BLOCKS:
        raise ValueError(f"{len(values)} tokens are {len(parts)} blocks of {block}: an interval needs {MIN_BLOCKS}, so "
                         f"score a longer text, or choose smaller blocks")
    sums = torch.stack([part.sum() for part in parts])  # [blocks]
    sizes = torch.tensor([len(part) for part in parts])  # the last may be shorter
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(parts), (whole_number("resamples", resamples), len(parts)), generator=generator)
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)  # [resamples]
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return Estimate(float(values.mean()), low, high)


@dataclass(frozen=True)
class Score:
    """What a model makes of a text of T + 1 tokens; `score` makes it.

    `targets` [T]: the tokens to be predicted, all but the first. `hidden` [T, hidden]: the model's final vectors, from
    which `head` makes logits again; to keep those, 4 bytes times 49,152 a token, would take 1.4 GB for the course's
    prose. `loss` [T]: -log of the probability that each target was given, in nats.
    """

    targets: Tensor
    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    loss: Tensor

    @property
    def perplexity(self) -> Estimate:
        return bootstrap(self.loss).exp()


@torch.no_grad()
def score(model: Model, ids, window: int = WINDOW) -> Score:
    """Let a model predict each token of a text, `ids` [T + 1], from those before it, and keep the losses.

    The text is cut into windows of 512 tokens, and each is read from an empty cache: no token sees more than 511
    before the one that predicts it, and those at the start of a window see few. Perplexities of another window are
    other numbers. ValueError when the model's logits hold NaN or infinity.
    """
    ids, window = check_ids(ids, model.config.vocab), whole_number("window", window)
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(f"score takes one text of at least two tokens, not ids of the shape {list(ids.shape)}")
    hidden = torch.cat([model.body(piece) for piece in ids[:-1].split(window)])  # [T, hidden]
    targets = ids[1:].to(hidden.device)
    loss = torch.empty(len(targets), device=hidden.device)  # made first: what stays must not lie between what goes
    for vectors, target, out in zip(hidden.split(PIECE), targets.split(PIECE), loss.split(PIECE)):
        out.copy_(-log_probabilities(model.head, vectors).gather(-1, target[:, None])[:, 0])
    if not loss.isfinite().all():
        raise ValueError("the model's logits hold NaN or infinity: no loss can be computed from them")
    return Score(targets, hidden, model.head, loss)


def log_probabilities(head: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
    """Final vectors [T, hidden] -> log of the probability of every token [T, vocab], float32."""
    return head(vectors).float().log_softmax(-1)


@dataclass(frozen=True)
class Comparison:
    """A candidate beside its baseline, token by token; `compare` makes it.

    `extra_loss` [T]: the candidate's loss minus the baseline's. `divergence` [T]: KL(baseline || candidate) in nats.
    `same` [T]: is the most probable token the same?
    """

    extra_loss: Tensor
    divergence: Tensor
    same: Tensor

    @property
    def ratio(self) -> Estimate:
        """The candidate's perplexity over the baseline's: 1.02 is 2 % worse.

        Paired: both have read the same text, so what makes the text easy or hard for both drops out of the
        difference, and the interval is far narrower than those of the two perplexities.
        """
        return bootstrap(self.extra_loss).exp()

    @property
    def kl(self) -> Estimate:
        return bootstrap(self.divergence)

    @property
    def agreement(self) -> Estimate:
        """A share, 0 to 1."""
        return bootstrap(self.same)


@torch.no_grad()
def compare(candidate: Score, baseline: Score) -> Comparison:
    """Compare what two models make of the same text; ValueError when it was not the same."""
    if not torch.equal(candidate.targets, baseline.targets):
        raise ValueError("candidate and baseline were scored on different texts: score both on the same ids")
    divergence, same = torch.empty_like(baseline.loss), torch.empty_like(baseline.targets, dtype=torch.bool)
    for vectors, baseline_vectors, kl, alike in zip(*(whole.split(PIECE) for whole in (
            candidate.hidden, baseline.hidden, divergence, same))):
        q = log_probabilities(candidate.head, vectors)  # [PIECE, vocab]
        p = log_probabilities(baseline.head, baseline_vectors)
        alike.copy_(p.argmax(-1) == q.argmax(-1))
        kl.copy_(q.neg_().add_(p).mul_(p.exp_()).sum(-1))  # Σ p · log(p / q), in the memory of q and p
    return Comparison(candidate.loss - baseline.loss, divergence, same)


@torch.no_grad()
def simulate(model: Model, bits: int, group_size: int | None = None, symmetric: bool = True, part: str = "blocks",
             into: Model | None = None) -> Model:
    """A model of floats that computes what quantized weights would: each matrix becomes `quantize(...).dequantize()`.

    `part`: the matrices of the "blocks", or the "head" (which, where tied, is the embedding table as well). All that
    is not rounded is shared with `model`, which stays as it is. `into`: an earlier simulation of the same model and
    part, to be overwritten: a whole table needs memory for one. ValueError for what `quantize` refuses.
    """
    matrices = _matrices(model, part)
    for weight in matrices:
        quantize(weight[:1], bits, group_size, symmetric)  # refused now, before anything is written
    rounded = {id(weight) for weight in matrices}
    shared = {id(weight): weight for weight in model.parameters() if id(weight) not in rounded}
    if into is None:
        into = copy.deepcopy(model, dict(shared))  # what is listed there is not copied
    targets, held = _matrices(into, part), {id(weight) for weight in into.parameters()}
    if rounded & held or shared.keys() - held:
        raise ValueError(f"into must be an earlier simulation of this model's {part}")
    for weight, target in zip(matrices, targets):
        target.copy_(quantize(weight, bits, group_size, symmetric).dequantize())
    return into


def bits_per_weight(model: Model, bits: int, group_size: int | None = None, symmetric: bool = True,
                    part: str = "blocks") -> float:
    """Bits for each weight of a part of the model: the codes, and a scale (and a minimum) of 16 bits for each group.

    As a file would have them, without padding; `ll.quantize` itself stores 3 bits in 4, and 5 to 7 in 8.
    """
    matrices = _matrices(model, part)
    groups = sum(weight.numel() // (group_size or weight.shape[1]) for weight in matrices)
    return check_bits(bits) + groups * SCALE_BITS * (1 if symmetric else 2) / sum(w.numel() for w in matrices)


def _matrices(model: Model, part: str) -> list[Tensor]:
    if not isinstance(model, Model) or part not in PARTS:
        raise ValueError(f"the matrices are those of a model's {' or '.join(PARTS)}, not of {model!r:.40}, {part!r}")
    layers = [layer for block in model.blocks for layer in
              (block.attention.qkv, block.attention.output, block.ffn.gate_up, block.ffn.down)]
    layers = layers if part == "blocks" else [model.head]
    if not all(type(layer) is Linear for layer in layers):
        raise ValueError(f"the {part} of this model hold packed weights: simulate rounds weights=\"float32\"")
    return [layer.weight for layer in layers]


@torch.no_grad()
def ask(model: Model, tokenizer, questions: Sequence[str], max_new_tokens: int = 16) -> list[str]:
    """The beginnings of a chat model's greedy answers. All questions form one batch, padded on the right."""
    if not questions or isinstance(questions, str):
        raise ValueError(f"questions must be a list of at least one text, not {questions!r}")
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])  # [B, longest]
    cache = model.new_cache(max(lengths) + max_new_tokens, batch=len(prompts))
    last = torch.tensor(lengths) - 1
    hidden = model.body(ids, cache, lengths)[torch.arange(len(prompts)), last]  # [B, hidden]
    tokens = [model.head(hidden).argmax(-1)]  # [B] each
    while len(tokens) < max_new_tokens:
        tokens.append(model.head(model.body(tokens[-1][:, None], cache)[:, 0]).argmax(-1))
    answers = torch.stack(tokens, dim=1).tolist()  # [B, max_new_tokens]; a row that has stopped writes on for nobody
    ends = [next((i for i, token in enumerate(row) if token in tokenizer.stop_ids), len(row)) for row in answers]
    return [tokenizer.decode(row[:end]) for row, end in zip(answers, ends)]


def count_right(model: Model, tokenizer, questions: Sequence[tuple[str, str]] = QUESTIONS) -> int:
    """How many of the questions are answered with the expected word (a whole word; upper and lower case count)."""
    answers = ask(model, tokenizer, [question for question, _ in questions])
    return sum(bool(re.search(rf"\b{re.escape(word)}\b", answer)) for answer, (_, word) in zip(answers, questions))
