"""Sampling against transformers' own processors, against known distributions, and at the edges of floating point."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llm_lessons import Sampler
from llm_lessons.sampling import keep_min_p, keep_top_k, keep_top_p, penalize

INF, NAN = math.inf, math.nan
FOUR = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def kept(probabilities, **settings):
    """The ids that a sampler at temperature 1 would still draw from."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    return Sampler(temperature=1.0, **settings).stages(logits)[-1][1].nonzero().flatten().tolist()


def draws(sampler, logits, count):
    return [sampler(logits) for _ in range(count)]


# --- Against transformers -------------------------------------------------------------------------------------------

@st.composite
def logits_without_ties(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    size, scale = draw(st.integers(1, 200)), draw(st.sampled_from([0.1, 1.0, 3.0, 10.0]))
    return torch.empty(size, dtype=torch.float64).normal_(std=scale, generator=generator)


def processed(logits, *processors, history=(0,)):
    """Probabilities after transformers' processors, in the order given."""
    from transformers import LogitsProcessorList

    return LogitsProcessorList(processors)(torch.tensor([list(history)]), logits.clone()[None]).softmax(-1)[0]


def far_from(values, limit):
    """No value is so near to the limit that rounding decides on which side it is."""
    assume(bool(((values - limit).abs() > 1e-9).all()))


def test_temperature_equals_transformers():
    from transformers import TemperatureLogitsWarper

    logits = torch.tensor([3.0, -1.0, 0.5, -INF], dtype=torch.float64)
    for temperature in (0.1, 0.5, 1.0, 1.7, 100.0):
        torch.testing.assert_close(Sampler(temperature=temperature).stages(logits)[-1][1],
                                   processed(logits, TemperatureLogitsWarper(temperature)))


@settings(max_examples=60, deadline=None)
@given(logits=logits_without_ties(), k=st.integers(1, 250))
def test_top_k_equals_transformers_C3(logits, k):
    from transformers import TopKLogitsWarper

    torch.testing.assert_close(Sampler(temperature=1.0, top_k=k).stages(logits)[-1][1],
                               processed(logits, TopKLogitsWarper(k)))


@settings(max_examples=100, deadline=None)
@given(logits=logits_without_ties(), p=st.floats(0.001, 0.999))
def test_top_p_equals_transformers(logits, p):
    from transformers import TopPLogitsWarper

    far_from(logits.softmax(-1).sort(descending=True).values.cumsum(-1), p)
    torch.testing.assert_close(Sampler(temperature=1.0, top_p=p).stages(logits)[-1][1],
                               processed(logits, TopPLogitsWarper(p)))


@settings(max_examples=60, deadline=None)
@given(logits=logits_without_ties(), p=st.floats(0.001, 1.0))
def test_min_p_equals_transformers(logits, p):
    from transformers import MinPLogitsWarper

    probabilities = logits.softmax(-1)
    far_from(probabilities[probabilities < probabilities.max()] / probabilities.max(), p)
    torch.testing.assert_close(Sampler(temperature=1.0, min_p=p).stages(logits)[-1][1],
                               processed(logits, MinPLogitsWarper(p)))


@settings(max_examples=60, deadline=None)
@given(logits=logits_without_ties(), penalty=st.floats(0.5, 2.0), places=st.lists(st.integers(0, 199), max_size=20))
def test_repetition_penalty_equals_transformers(logits, penalty, places):
    from transformers import RepetitionPenaltyLogitsProcessor

    history = [place % len(logits) for place in places] or [0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits[None].clone())[0]
    torch.testing.assert_close(penalize(logits, history, penalty), expected)
    assert Sampler(repetition_penalty=penalty)(logits, history) == int(expected.argmax())
    torch.testing.assert_close(Sampler(temperature=1.0, repetition_penalty=penalty).stages(logits, history)[-1][1],
                               expected.softmax(-1))


@settings(max_examples=100, deadline=None)
@given(logits=logits_without_ties(), temperature=st.floats(0.2, 3.0), k=st.integers(1, 60),
       top_p=st.floats(0.05, 0.95), min_p=st.floats(0.01, 0.5))
def test_all_steps_together_equal_transformers_in_its_order_C5(logits, temperature, k, top_p, min_p):
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    first = (RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(temperature), TopKLogitsWarper(k))
    before_p = processed(logits, *first)
    far_from(before_p.sort(descending=True).values.cumsum(-1), top_p)
    before_min = processed(logits, *first, TopPLogitsWarper(top_p))
    far_from(before_min[before_min < before_min.max()] / before_min.max(), min_p)
    sampler = Sampler(temperature, k, top_p, min_p, repetition_penalty=1.3)
    stages = sampler.stages(logits, [0])
    assert [name for name, _ in stages] == ["model", "repetition penalty", "temperature", "top-k", "top-p", "min-p"]
    expected = processed(logits, *first, TopPLogitsWarper(top_p), MinPLogitsWarper(min_p))
    torch.testing.assert_close(stages[-1][1], expected)
    assert sampler(logits, [0]) in stages[-1][1].nonzero()


# --- Filters by hand ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("top_p, expected", [(1e-9, [0]), (0, [0]), (0.5, [0]), (0.51, [0, 1]), (0.79, [0, 1]),
                                             (0.9, [0, 1, 2]), (0.96, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3]),
                                             (None, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_set_that_holds_p_and_at_least_one_C1(top_p, expected):
    assert kept(FOUR.tolist(), top_p=top_p) == expected
    if top_p is not None:
        assert keep_top_p(FOUR[[3, 1, 0, 2]], top_p).tolist() == [i in expected for i in (3, 1, 0, 2)]


def test_top_p_that_is_exactly_the_first_probability_keeps_one():
    for probabilities in ([0.4, 0.3, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.6, 0.2, 0.1, 0.1]):
        only_the_first = keep_top_p(torch.tensor(probabilities, dtype=torch.float64), probabilities[0])
        assert only_the_first.tolist() == [True, False, False, False]  # though (0.4 + 0.3) - 0.3 < 0.4 in floats


@pytest.mark.parametrize("k, expected", [(50, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (1, [3]), (2, [1, 3]),
                                         (0, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_top_k_beyond_the_vocabulary_or_switched_off_filters_nothing_C3(k, expected):
    assert kept([0.1, 0.2, 0.1, 0.45, 0.15], top_k=k) == expected


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 4), min_size=1, max_size=12), k=st.integers(1, 14), p=st.floats(0.05, 0.99))
def test_of_equal_tokens_the_lower_ids_are_kept(weights, k, p):
    probabilities = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    ranking = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    assert sorted(ranking[:k]) == keep_top_k(probabilities, k).nonzero().flatten().tolist()
    held = [sum(weights[i] for i in ranking[:n]) / sum(weights) for n in range(1, len(weights) + 1)]
    far_from(torch.tensor(held, dtype=torch.float64), p)
    size = next(n for n, mass in enumerate(held, start=1) if mass >= p)
    assert sorted(ranking[:size]) == keep_top_p(probabilities, p).nonzero().flatten().tolist()


def test_of_many_equal_tokens_the_lower_ids_are_kept():
    """Short lists come out in order from any sort, long ones only from a stable one."""
    uniform = torch.full((1000,), 0.001, dtype=torch.float64)
    assert keep_top_k(uniform, 10).nonzero().flatten().tolist() == list(range(10))
    assert keep_top_p(uniform, 0.0095).nonzero().flatten().tolist() == list(range(10))


def test_min_p_is_a_share_of_the_most_probable_token():
    assert keep_min_p(FOUR, 0.1).tolist() == [True] * 4  # 0.05 is a tenth of 0.5, and still in
    assert keep_min_p(FOUR, 0.2).tolist() == [True, True, True, False]
    assert keep_min_p(FOUR, 1.0).tolist() == [True, False, False, False]
    assert keep_min_p(FOUR, 0).tolist() == [True] * 4


def test_temperature_comes_before_top_p_C5():
    logits = torch.tensor([3.0, 2.0, 1.0])
    stages = dict(Sampler(temperature=0.5, top_p=0.8).stages(logits))
    assert stages["model"].tolist() == pytest.approx([0.6652, 0.2447, 0.0900], abs=1e-4)
    assert stages["temperature"].tolist() == pytest.approx([0.8668, 0.1173, 0.0159], abs=1e-4)
    assert stages["top-p"].tolist() == [1, 0, 0]  # temperature last, as in llama.cpp, would have kept two
    assert dict(Sampler(temperature=1.0, top_p=0.8).stages(logits))["top-p"].count_nonzero() == 2


def test_top_k_renormalises_before_top_p_C5():
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == [0]  # 0.4 / 0.7 = 0.571 holds 0.55
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55) == [0, 1]


@pytest.mark.parametrize("settings_", [dict(top_p=1.0), dict(min_p=0.0), dict(top_k=0), dict(repetition_penalty=1.0)])
def test_a_step_that_is_switched_off_changes_nothing(settings_):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    plain = Sampler(temperature=0.7, seed=1)
    ours = Sampler(temperature=0.7, seed=1, **settings_)
    torch.testing.assert_close(ours.stages(logits, [3])[-1][1], plain.stages(logits)[-1][1])
    assert draws(ours, logits, 20) == draws(plain, logits, 20)


# --- Greedy and nearly greedy (C4) ----------------------------------------------------------------------------------

@pytest.mark.parametrize("logits, expected", [([1, 2, 0, -1], 1), ([3, 3, 1], 0), ([-INF, -5, -5], 1), ([0], 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_temperature_0_takes_the_lowest_id_of_the_best_and_no_randomness_C4(logits, expected, dtype):
    sampler = Sampler(temperature=0, top_k=2, top_p=0.5, seed=3)
    before = sampler._generator.get_state()
    assert draws(sampler, torch.tensor(logits, dtype=dtype), 5) == [expected] * 5
    assert torch.equal(sampler._generator.get_state(), before)
    name, probabilities = sampler.stages(torch.tensor(logits, dtype=dtype))[-1]
    assert name == "greedy" and probabilities.nonzero().tolist() == [[expected]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 5e-324, 1e-10])
def test_a_tiny_temperature_is_greedy_and_not_NaN_C4(temperature):
    logits = torch.tensor([1.0, 2.0, 0.0, -INF, 1.999])
    sampler = Sampler(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1)
    assert draws(sampler, logits, 20) == [1] * 20
    halves = Sampler(temperature=temperature).stages(torch.tensor([3.0, 1.0, 3.0]))[-1][1]
    assert halves.tolist() == [0.5, 0, 0.5]


def test_a_huge_temperature_makes_all_tokens_alike():
    probabilities = Sampler(temperature=1e300).stages(torch.tensor([50.0, -50.0, 0.0]))[-1][1]
    assert probabilities.tolist() == pytest.approx([1 / 3] * 3)


def test_extreme_logits_stay_probabilities():
    logits = torch.tensor([1e308, -1e308, 0.0], dtype=torch.float64)
    assert Sampler(temperature=1.0, top_p=0.9).stages(logits)[-1][1].tolist() == [1, 0, 0]
    assert Sampler(temperature=1.0)(torch.tensor([6e4, -6e4], dtype=torch.float16)) == 0


# --- Drawing --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings_, expected", [
    (dict(), FOUR), (dict(top_k=2), torch.tensor([0.625, 0.375, 0, 0])),
    (dict(temperature=0.5), FOUR**2 / (FOUR**2).sum()),
    (dict(top_p=0.9), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95)], ids=["plain", "top-k", "temperature", "top-p"])
def test_tokens_come_as_often_as_their_probability_says(settings_, expected):
    """Pearson's chi-square: above 16.3 (3 degrees of freedom) a right sampler gets once in a thousand seeds."""
    count = 20_000
    ids = draws(Sampler(**{"temperature": 1.0, "seed": 11} | settings_), FOUR.log(), count)
    observed, expected = torch.bincount(torch.tensor(ids), minlength=4).double(), expected.double() * count
    possible = expected > 0
    assert observed[~possible].sum() == 0
    assert ((observed - expected)[possible] ** 2 / expected[possible]).sum() < 16.3


def test_a_seed_gives_the_same_ids_alone_and_among_others_C7():
    logits, state = torch.zeros(1000), torch.get_rng_state()
    alone = draws(Sampler(temperature=1.0, seed=42), logits, 8)
    for other_seed in (7, None, 42):
        ours, other = Sampler(temperature=1.0, seed=42), Sampler(temperature=1.0, seed=other_seed)
        assert [(other(logits), ours(logits))[1] for _ in range(8)] == alone
        ours = ours.restarted()
        assert [(ours(logits), other(logits))[0] for _ in range(8)] == alone
    assert len(set(alone)) > 4
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    assert draws(Sampler(temperature=1.0, seed=42), logits, 8) == alone


def test_samplers_without_a_seed_or_with_another_differ_C7():
    logits, seeds = torch.zeros(1000), (None, None, None, 1, 2)
    runs = {tuple(draws(Sampler(temperature=1.0, seed=seed), logits, 8)) for seed in seeds}
    unseeded = Sampler(temperature=1.0)
    runs |= {tuple(draws(unseeded, logits, 8)), tuple(draws(unseeded.restarted(), logits, 8))}
    assert len(runs) == 7


# --- What is refused ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("logits, message", [
    ([-INF, -INF], "every logit is -inf"), ([0.0, NAN], "NaN"), ([0.0, INF], "infinity"), ([], r"\[0\]"),
    ([[0.0, 1.0]], r"\[1, 2\]")], ids=str)
@pytest.mark.parametrize("temperature", [0, 1e-45, 1.0])
def test_nothing_is_drawn_where_nothing_can_be_C1(logits, message, temperature):
    with pytest.raises(ValueError, match=message):
        Sampler(temperature=temperature, top_k=3, top_p=0.5)(torch.tensor(logits))


@pytest.mark.parametrize("name, value", [
    ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("top_k", -1), ("top_k", 2.5), ("top_k", INF),
    ("top_k", NAN), ("top_p", -0.1), ("top_p", 1.1), ("top_p", NAN), ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", NAN), ("repetition_penalty", INF),
    ("seed", 1.5), ("seed", 2**64), ("seed", NAN)])
def test_settings_out_of_range_are_refused_with_their_name_and_value_C1_C3_C4(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, not {value}$"):
        Sampler(**{name: value})
