"""Quality: losses, divergence and agreement against torch's own functions on transformers' logits, intervals against
textbook ones, and simulated grids that leave their model alone."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPE, as_transformers, one_thread, random_ids, tiny_model  # noqa: F401

import llm_lessons as ll
from llm_lessons import quality
from llm_lessons.quantize import quantize


def windows(model, ids, window):
    """transformers' logits [T, vocab] for each token but the first, window by window."""
    oracle = as_transformers(model)
    with torch.no_grad():
        return torch.cat([oracle(piece[None]).logits[0] for piece in torch.tensor(ids)[:-1].split(window)])


# --- losses, divergence, agreement ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("count", "window"), [(2, 512), (3, 1), (50, 16), (49, 16), (33, 512)])
def test_losses_are_torchs_cross_entropy_of_transformers_logits(count, window):
    model, ids = tiny_model(), random_ids(count)
    found = ll.score(model, ids, window)
    expected = F.cross_entropy(windows(model, ids, window), torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-4)
    assert found.targets.tolist() == ids[1:]


def test_divergence_and_agreement_are_torchs_own():
    model, other, ids = tiny_model(0), tiny_model(0), random_ids(50)
    for block in other.blocks:
        block.ffn.down.weight += 0.05 * torch.randn(36, 40, generator=torch.Generator().manual_seed(1))
    found = ll.compare(ll.score(other, ids, 16), ll.score(model, ids, 16))
    p, q = (windows(each, ids, 16).log_softmax(-1) for each in (model, other))
    expected = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)  # torch's order: KL(p || q)
    torch.testing.assert_close(found.divergence, expected, rtol=1e-3, atol=1e-5)
    assert found.divergence.mean() > 0.01, "the two must differ for this to be a test"
    clear = torch.stack([each.topk(2).values.diff().abs()[:, 0] > 1e-3 for each in (p, q)]).all(0)
    same = p.argmax(-1) == q.argmax(-1)
    assert torch.equal(found.same[clear], same[clear]) and 0 < same.sum() < len(same)
    losses = [F.nll_loss(each, torch.tensor(ids[1:]), reduction="none") for each in (q, p)]
    torch.testing.assert_close(found.extra_loss, losses[0] - losses[1], rtol=1e-3, atol=1e-4)


def by_hand(probabilities, targets):
    """A score whose head gives these probabilities, and nothing of a model."""
    hidden = torch.tensor(probabilities).log()
    targets = torch.tensor(targets)
    return quality.Score(targets, hidden, lambda x: x + 5.0, -hidden.gather(1, targets[:, None])[:, 0])


def test_the_figures_of_two_coins_by_hand():
    fair, bent = (by_hand([coin] * 1024, [0] * 1024) for coin in ([0.5, 0.5], [0.25, 0.75]))
    assert fair.perplexity == pytest.approx((2, 2, 2)) and bent.perplexity == pytest.approx((4, 4, 4))
    found = ll.compare(bent, fair)
    assert found.ratio == pytest.approx((2, 2, 2))
    assert found.kl == pytest.approx([0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)] * 3)
    assert ll.compare(fair, bent).kl.value == pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5))
    halves = by_hand([[0.4, 0.6], [0.6, 0.4]] * 512, [0] * 1024), by_hand([[0.4, 0.6]] * 1024, [0] * 1024)
    assert ll.compare(*halves).agreement.value == 0.5


def test_positions_may_be_worked_on_in_pieces_of_any_size(monkeypatch):
    model, other, ids = tiny_model(0), tiny_model(5), random_ids(50)
    found = []
    for piece in (1, 7, 1000):
        monkeypatch.setattr(quality, "PIECE", piece)
        a, b = ll.score(model, ids, 20), ll.score(other, ids, 20)
        found.append((a.loss, ll.compare(b, a).divergence))
    for losses, divergence in found[:2]:
        torch.testing.assert_close(losses, found[2][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(divergence, found[2][1], rtol=1e-3, atol=1e-4)


def test_a_model_compared_with_itself_has_no_divergence():
    found = ll.score(tiny_model(), random_ids(200))
    same = ll.compare(found, found)
    assert not same.extra_loss.any() and not same.divergence.any() and same.same.all()


def test_texts_and_models_without_a_loss_are_refused():
    model = tiny_model()
    for ids, words in ([5], "at least two tokens"), ([[1, 2], [3, 4]], r"not ids of the shape \[2, 2\]"), \
            ([1, 97], "outside this model's vocabulary"):
        with pytest.raises(ValueError, match=words):
            ll.score(model, ids)
    with pytest.raises(ValueError, match="window"):
        ll.score(model, [1, 2, 3], 0)
    with pytest.raises(ValueError, match="different texts"):
        ll.compare(ll.score(model, [1, 2, 3]), ll.score(model, [1, 2, 4]))
    model.blocks[0].ffn.down.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        ll.score(model, [1, 2, 3])


# --- intervals ------------------------------------------------------------------------------------------------------

def test_the_interval_of_independent_values_is_the_textbooks():
    values = torch.randn(5_000, generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    found = ll.bootstrap(values, block=10)
    half = 1.96 * float(values.std()) / math.sqrt(len(values))
    assert found.value == pytest.approx(float(values.mean()))
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert found.high - found.value == pytest.approx(half, rel=0.1)


def test_neighbours_that_say_the_same_count_once():
    independent = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    found = ll.bootstrap(independent.repeat_interleave(9), block=9)  # 3,600 values, 400 witnesses
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * float(independent.std()) / 20, rel=0.1)
    naive = ll.bootstrap(independent.repeat_interleave(9), block=1)
    assert (found.high - found.low) / (naive.high - naive.low) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(("count", "block"), [(1024, 128), (1031, 128), (8, 1), (57, 8)])
def test_constant_values_have_an_interval_without_width(count, block):
    assert ll.bootstrap(torch.full((count,), 0.3), block) == pytest.approx([0.3] * 3, abs=1e-7)


def test_a_short_last_block_weighs_what_it_holds():
    values = torch.zeros(905)
    values[900:] = 100.0  # nine blocks of 100 and one of 5
    found = ll.bootstrap(values, block=100)
    assert found.value == pytest.approx(500 / 905)
    assert found.high == pytest.approx(3 * 500 / (7 * 100 + 3 * 5), rel=0.5), "not 3 blocks out of 10: 30"


def test_intervals_are_seeded_and_touch_no_global_state():
    values, state = torch.rand(2000), torch.random.get_rng_state()
    first = ll.bootstrap(values)
    assert first == ll.bootstrap(values) != ll.bootstrap(values, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_hard_for_both_drops_out_of_the_ratio():
    text, own = (torch.randn(4096, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    pair = [quality.Score(torch.zeros(4096), torch.zeros(4096, 1), None, loss)
            for loss in (4 + text + 0.01 * own, 4 + text)]
    ratio = quality.Comparison(pair[0].loss - pair[1].loss, text, text > 0).ratio
    a, b = (each.perplexity for each in pair)
    assert ratio.value == pytest.approx(a.value / b.value)
    assert (ratio.high - ratio.low) / ratio.value < 0.05 * (a.high - a.low) / a.value


@pytest.mark.parametrize(("values", "words"), [
    (torch.zeros(800), "800 tokens are 7 blocks of 128: an interval needs 8"), (torch.zeros(0), "0 tokens"),
    (torch.zeros(4, 1000), r"not \[4, 1000\]"), (torch.tensor([0.0, math.nan] * 1000), "NaN or infinity"),
    (torch.tensor([0.0, math.inf] * 1000), "NaN or infinity")])
def test_too_few_or_broken_values_have_no_interval(values, words):
    with pytest.raises(ValueError, match=words):
        ll.bootstrap(values)


# --- simulated grids ------------------------------------------------------------------------------------------------

def weights_of(model):
    return {name: weight.clone() for name, weight in model.named_parameters()}


def test_simulation_rounds_the_blocks_and_leaves_the_baseline_unchanged():
    model = tiny_model()
    before = weights_of(model)
    candidate = ll.simulate(model, 4)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    for name, weight in candidate.named_parameters():
        rounded = "norm" not in name and "blocks" in name
        assert (weight.data_ptr() == dict(model.named_parameters())[name].data_ptr()) != rounded, name
        if rounded:  # a symmetric grid by hand: 7 steps on either side
            w = before[name].double().numpy()
            step = np.abs(w).max(1, keepdims=True) / 7
            np.testing.assert_allclose(weight.numpy(), np.round(w / step) * step, atol=1e-5)


def test_a_table_needs_memory_for_one_simulation():
    model = tiny_model()
    first = ll.simulate(model, 2)
    places = [weight.data_ptr() for weight in first.parameters()]
    again = ll.simulate(model, 8, 4, False, into=first)
    assert again is first and [weight.data_ptr() for weight in first.parameters()] == places
    fresh = ll.simulate(model, 8, 4, False)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fresh.parameters())), "rounded from the baseline"


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_can_be_simulated_alone(tied):
    model = tiny_model(tied=tied)
    candidate = ll.simulate(model, 3, part="head")
    changed = {name for name, weight in candidate.named_parameters()
               if not torch.equal(weight, dict(model.named_parameters())[name])}
    assert changed == ({"embedding.weight"} if tied else {"head.weight"})
    assert (candidate.head.weight is candidate.embedding.weight) == tied


def test_what_cannot_be_simulated_is_refused_with_nothing_written():
    model = tiny_model()
    into = ll.simulate(model, 8)
    before = weights_of(into)
    for settings, words in (
            ({"group_size": 9}, "40 columns do not divide"),  # 36 do: only the last matrix of a block is refused
            ({"bits": 9}, "bits"), ({"part": "norms"}, "blocks or head"), ({"part": "head"}, "earlier simulation"),
            ({"into": model}, "earlier simulation"), ({"into": tiny_model()}, "earlier simulation"),
            ({"into": ll.simulate(model, 8, part="head")}, "earlier simulation"), ({"into": 3}, "not of 3")):
        with pytest.raises(ValueError, match=words):
            ll.simulate(model, **{"bits": 4, "into": into, **settings})
    assert all(torch.equal(weight, before[name]) for name, weight in into.named_parameters())
    model.blocks[1].ffn.down = torch.nn.Linear(40, 36, bias=False)
    with pytest.raises(ValueError, match="packed weights"):
        ll.simulate(model, 4)


def test_bits_for_each_weight_by_hand():
    model = tiny_model()  # a block: 60 and 36 and 80 rows of 36, 36 rows of 40
    weights = (60 + 36 + 80) * 36 + 36 * 40
    assert ll.bits_per_weight(model, 8) == pytest.approx(8 + 16 * (60 + 36 + 80 + 36) / weights)
    assert ll.bits_per_weight(model, 4, 4, symmetric=False) == 4 + 2 * 16 / 4
    assert ll.bits_per_weight(model, 3, 2) == 3 + 16 / 2
    assert ll.bits_per_weight(model, 8, part="head") == pytest.approx(8 + 16 / 36)


def test_the_files_own_grid_of_4_bits_loses_nothing(smollm2):
    model, _ = smollm2
    for block in (model.blocks[0], model.blocks[17]):
        for layer in (block.attention.qkv, block.attention.output, block.ffn.gate_up, block.ffn.down):
            weight = layer.weight
            largest = weight.abs().max()
            error = (quantize(weight, 4, 32, symmetric=False).dequantize() - weight).abs().max()
            assert error < 1e-6 * largest
            assert (quantize(weight, 4, 32).dequantize() - weight).abs().max() > 0.01 * largest, "other grids do"


# --- questions ------------------------------------------------------------------------------------------------------

class Words:
    """A tokenizer whose prompts are the numbers in the question, and whose text is the ids."""

    def __init__(self, stop_ids=()):
        self.stop_ids = set(stop_ids)

    def chat(self, messages):
        assert [message["role"] for message in messages] == ["user"]
        return [int(number) for number in messages[0]["content"].split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_answers_of_a_batch_are_those_of_each_question_alone():
    model, questions = tiny_model(), ["3", "5 9", " ".join(map(str, random_ids(17))), "8 8 8"]
    alone = [list(ll.generate(model, Words().chat([{"role": "user", "content": question}]), 12))
             for question in questions]
    assert ll.ask(model, Words(), questions, 12) == [Words().decode(ids) for ids in alone]
    stop = alone[2][4]
    cut = [ids[:ids.index(stop)] if stop in ids else ids for ids in alone]
    assert len(cut[2]) <= 4 and ll.ask(model, Words([stop]), questions, 12) == [Words().decode(ids) for ids in cut]
    assert ll.ask(model, Words(), questions[:1], 1) == [Words().decode(alone[0][:1])]


def test_a_right_answer_holds_the_whole_word(monkeypatch):
    answers = ["It is 7 days.", "It is 17.", "Australia", "Au.", "au", ""]
    monkeypatch.setattr(quality, "ask", lambda model, tokenizer, questions: answers)
    assert quality.count_right(None, None, [("?", word) for word in ("7", "7", "Au", "Au", "Au", "7")]) == 2


def test_questions_that_are_none_are_refused():
    for questions, tokens in ([], 16), ("What?", 16), (["3"], 0):
        with pytest.raises(ValueError, match="questions must be|max_new_tokens"):
            ll.ask(tiny_model(), Words(), questions, tokens)


def test_the_baseline_answers_all_ten_questions(smollm2):
    assert len(ll.QUESTIONS) == 10 and ll.count_right(*smollm2) == 10
