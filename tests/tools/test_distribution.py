"""Tests of drawn tokens: exact samplers pass as often as they should, others are found."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom, chi2

from vllm_subspec.tools.distribution import (
    MIN_EXPECTED,
    PIT_CELLS,
    NextTokenLaw,
    Sample,
    compare,
    rounding,
)

VOCAB, NAMED, LENGTH = 40, 12, 3


@cache
def law_of(prefix: tuple[int, ...], temperature: float = 1.0) -> np.ndarray:
    """A peaked law over the whole vocabulary, another one after each prefix."""
    scores = np.random.default_rng([*prefix, 99]).gumbel(size=VOCAB) * 2 / temperature
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def named(probabilities: np.ndarray, size: int = NAMED) -> NextTokenLaw:
    order = np.argsort(-probabilities)[:size]
    return NextTokenLaw.from_logprobs(order.tolist(), np.log(probabilities[order]).tolist())


def sample(seed: int, draws: int = 600, temperature: float = 1.0, name: str = "a") -> Sample:
    """Draws at a temperature, and the laws at temperature 1."""
    chance = np.random.default_rng(seed)
    drawn: list[tuple[int, ...]] = []
    laws: dict[tuple[int, ...], NextTokenLaw] = {}
    for _ in range(draws):
        prefix: tuple[int, ...] = ()
        for _ in range(LENGTH):
            laws.setdefault(prefix, named(law_of(prefix)))
            prefix += (int(chance.choice(VOCAB, p=law_of(prefix, temperature))),)
        drawn.append(prefix)
    return Sample(name, drawn, laws)


def test_exact_sampler_fails_as_rarely_as_it_should() -> None:
    tests = [test for seed in range(60) for test in compare([sample(seed, 200)], 0.0).tests]
    low, high = binom.interval(0.9999, len(tests), 0.1)
    assert len(tests) >= 300
    assert low <= sum(test.p < 0.1 for test in tests) <= high


def test_exact_sampler_of_several_prompts_passes() -> None:
    found = compare([sample(1), sample(2, name="b")], 0.0)
    assert min(test.p for test in found.tests) > 1e-3
    assert [sum(counts) for counts in found.pit] == [1200] * LENGTH
    assert {len(counts) for counts in found.pit} == {PIT_CELLS}
    for distance in found.distances:
        low, high = distance.tv_of_exact
        assert low <= distance.tv <= high
        assert distance.kl_interval[0] < 1e-3
        assert distance.kl_interval[0] <= max(0.0, distance.kl) <= distance.kl_interval[1] < 0.1


@pytest.mark.parametrize("temperature", [0.75, 1.35])
def test_another_temperature_is_found(temperature: float) -> None:
    found = compare([sample(3, temperature=temperature)], 0.0)
    pooled, by_prefix = found.tests[0], found.tests[1]
    assert max(pooled.p, by_prefix.p) < 1e-4
    [first] = [distance for distance in found.distances if distance.position == 1]
    assert first.tv > first.tv_of_exact[1]
    assert first.tv_interval[0] > 0 < first.kl_interval[0]


def test_kl_interval_holds_the_true_divergence() -> None:
    law, other = law_of(()), law_of((), temperature=1.4)
    whole = named(law, VOCAB)
    kept = whole.probabilities * 600 >= MIN_EXPECTED
    tokens = [token for token, keep in zip(whole.tokens, kept, strict=True) if keep]
    p = np.append(law[tokens], 1 - law[tokens].sum())
    q = np.append(other[tokens], 1 - other[tokens].sum())
    truth = float((q * np.log(q / p)).sum())
    held = 0
    for seed in range(100):
        draws = np.random.default_rng(seed).choice(VOCAB, 600, p=other)
        found = compare([Sample("a", [(int(t),) for t in draws], {(): whole})], 0.0).distances[0]
        held += found.kl_interval[0] <= truth <= found.kl_interval[1]
    assert held >= binom.ppf(1e-4, 100, 0.95)


def test_token_out_of_the_named_ones_shares_the_end() -> None:
    law = NextTokenLaw((7, 3), np.array([0.5, 0.3]))
    assert law.interval(7) == (0.0, 0.5)
    assert law.interval(3) == (0.5, 0.8)
    assert law.interval(1) == (0.8, 1.0)


def test_cells_are_merged_until_all_expect_enough() -> None:
    law = NextTokenLaw((7, 3, 4), np.array([0.7, 0.25, 0.04]))
    observed, expected = law.cells(Counter({7: 66, 3: 30, 4: 3, 9: 1}))  # 4 and the rest: 5 draws
    assert observed.tolist() == [66, 30, 4]
    assert expected.tolist() == pytest.approx([70, 25, 5])
    observed, expected = law.cells(Counter({7: 40, 3: 10}))  # the rest alone expects 2.5
    assert observed.tolist() == [40, 10]
    assert expected.tolist() == pytest.approx([35, 15])
    assert law.cells(Counter({7: 4})) is None
    assert NextTokenLaw((7,), np.array([0.99])).cells(Counter({7: 100})) is None


def test_rounding_is_the_second_order_of_the_divergence() -> None:
    p, q = np.array([0.6, 0.4]), np.array([0.61, 0.39])
    one, other = NextTokenLaw((1, 2), p), NextTokenLaw((1, 2), q)
    assert rounding([one], [one]) == 0.0
    assert rounding([one, one], [other, one]) == pytest.approx(
        ((p - q) ** 2 / p).sum() / 2, rel=0.1
    )


def test_what_rounding_explains_is_no_difference() -> None:
    """Laws that differ by rounding fail a test without allowance, and pass one with it."""
    given = sample(5, 4000)
    chance = np.random.default_rng(0)

    def rounded(law: NextTokenLaw) -> NextTokenLaw:
        noisy = law.probabilities * np.exp(chance.normal(0, 0.2, len(law.probabilities)))
        return NextTokenLaw(law.tokens, noisy / noisy.sum() * law.probabilities.sum())

    laws = {prefix: rounded(law) for prefix, law in given.laws.items()}
    size = rounding(list(given.laws.values()), [laws[prefix] for prefix in given.laws])
    off = Sample("a", given.draws, laws)
    assert min(test.p for test in compare([off], 0.0).tests) < 1e-9
    tests = compare([off], size).tests
    assert min(test.p for test in tests) > 1e-4
    assert tests[0].shift == pytest.approx(4000 * size)


def test_no_allowance_is_the_plain_chi_square_test() -> None:
    test = compare([sample(6)], 0.0).tests[0]
    assert test.freedom == PIT_CELLS - 1
    assert test.p == pytest.approx(chi2.sf(test.statistic, test.freedom))
