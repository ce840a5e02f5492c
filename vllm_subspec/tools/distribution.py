"""Do drawn tokens follow the target's law? Exact tests, and how far off they could still be.

Tokens are judged given the tokens before them: under the target's own law the next token is
multinomial whatever came before, so tests of different prefixes are independent and add up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import ncx2

MIN_EXPECTED = 5.0
"""Cells that expect fewer draws are merged: the usual limit of the chi-square approximation."""
PIT_CELLS = 20
"""Cells of equal probability that every draw is sorted into, whatever came before it."""

_CONFIDENCE = 0.95
_RESAMPLES = 1000
_Floats = NDArray[np.float64]
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class NextTokenLaw:
    """The target's law of one token: its most probable values, and the rest as one.

    Attributes:
        tokens: ids, the most probable first.
        probabilities: float64 [len(tokens)], falling.
    """

    tokens: tuple[int, ...]
    probabilities: _Floats

    @classmethod
    def from_logprobs(cls, tokens: Sequence[int], logprobs: Sequence[float]) -> NextTokenLaw:
        """From log-probabilities, the highest first."""
        probabilities = np.exp(np.asarray(logprobs, dtype=np.float64))
        return cls(tuple(tokens), probabilities / max(1.0, probabilities.sum()))

    def interval(self, token: int) -> tuple[float, float]:
        """The part of [0, 1] that is the token's; the rest shares what is left at the end."""
        ends = np.cumsum(self.probabilities)
        if token not in self.tokens:
            return float(ends[-1]), 1.0
        index = self.tokens.index(token)
        return float(ends[index] - self.probabilities[index]), float(ends[index])

    def cells(self, draws: Counter[int]) -> tuple[_Floats, _Floats] | None:
        """Draws counted and expected by cell; ``None`` where fewer than two cells are expected."""
        total = draws.total()
        kept = int((self.probabilities * total >= MIN_EXPECTED).sum())
        expected = list(self.probabilities[:kept] * total)
        observed = [float(draws[token]) for token in self.tokens[:kept]]
        expected.append(total - sum(expected))
        observed.append(total - sum(observed))
        if kept and expected[-1] < MIN_EXPECTED:
            expected[-2:] = [sum(expected[-2:])]
            observed[-2:] = [sum(observed[-2:])]
        return (np.array(observed), np.array(expected)) if len(expected) > 1 else None


@dataclass(frozen=True)
class Sample:
    """What one prompt drew.

    Attributes:
        name: of the prompt, for people.
        draws: tokens of each request, all of one length.
        laws: of the next token, after each drawn prefix (the empty one among them).
    """

    name: str
    draws: Sequence[Prefix]
    laws: Mapping[Prefix, NextTokenLaw]

    @property
    def length(self) -> int:
        """Tokens of each request."""
        return len(self.draws[0])

    def by_prefix(self, position: int) -> Iterator[tuple[NextTokenLaw, Counter[int]]]:
        """Law and draws of the token at ``position`` after each prefix that was drawn."""
        after: dict[Prefix, Counter[int]] = defaultdict(Counter)
        for draw in self.draws:
            after[draw[:position]][draw[position]] += 1
        for prefix, draws in after.items():
            yield self.laws[prefix], draws


@dataclass(frozen=True)
class ChiSquare:
    """One test of the hypothesis that the draws follow the law up to rounding.

    Attributes:
        name: what was tested.
        statistic: Pearson's.
        freedom: degrees of freedom.
        draws: how many were sorted into cells.
        shift: of the statistic that rounding alone may explain (see `rounding`).
        p: probability of such a statistic, or a greater one, if the hypothesis holds.
    """

    name: str
    statistic: float
    freedom: int
    draws: int
    shift: float
    p: float


@dataclass(frozen=True)
class Distance:
    """How far the draws at one position are from the law, averaged over prefixes by draws.

    Attributes:
        position: of the token, 1 being the first after the prompt.
        draws: how many counted: those after prefixes that were drawn often enough.
        kl: Kullback-Leibler divergence in nats of the draws' law from the target's, without what
            chance alone adds.
        kl_interval: 95 %, by inversion of the likelihood ratio's noncentral chi-square law.
        tv: total variation of the draws' frequencies from the law, chance included.
        tv_interval: 95 %, of the total variation, by bootstrap.
        tv_of_exact: 95 % of exact samplers with as many draws show a ``tv`` in this interval.
    """

    position: int
    draws: int
    kl: float
    kl_interval: tuple[float, float]
    tv: float
    tv_interval: tuple[float, float]
    tv_of_exact: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """Everything that samples of one engine say about its law.

    Attributes:
        tests: all of them; each counts in the correction for multiple tests.
        distances: by position, where prefixes were drawn often enough.
        pit: draws in each of the cells of equal probability, by position.
    """

    tests: tuple[ChiSquare, ...]
    distances: tuple[Distance, ...]
    pit: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare(samples: Sequence[Sample], rounding_per_draw: float) -> Comparison:
    """Test the samples' draws against their laws.

    Args:
        samples: one a prompt, all of the same length.
        rounding_per_draw: see `rounding`.
    """
    chance = np.random.default_rng(0)
    tests: list[ChiSquare] = []
    distances: list[Distance] = []
    pit: list[tuple[int, ...]] = []
    for position in range(samples[0].length):
        counts = _pit_counts(samples, position, chance)
        pit.append(tuple(int(count) for count in counts))
        expected = np.full(PIT_CELLS, counts.sum() / PIT_CELLS)
        name = f"token {position + 1}, all prompts and prefixes"
        tests.append(_test(name, [(counts, expected)], rounding_per_draw))
        tables = []
        for sample in samples:
            found = [
                cells for law, draws in sample.by_prefix(position) if (cells := law.cells(draws))
            ]
            if found:
                name = f"token {position + 1} after {sample.name!r} and each frequent prefix"
                tests.append(_test(name, found, rounding_per_draw))
                tables += found
        if tables:
            distances.append(_distance(position + 1, tables, chance))
    return Comparison(tuple(tests), tuple(distances), tuple(pit))


def rounding(drawn: Sequence[NextTokenLaw], rescored: Sequence[NextTokenLaw]) -> float:
    """How much two computations of the same laws differ: the mean of sum p (log p - log q)^2.

    To second order this is the chi-square divergence of the two laws, so that n draws from one,
    tested against the other, have a statistic shifted by n times as much. In float32 it is nothing;
    in bfloat16 it is what another batch shape does to the last bits of the logits.

    Args:
        drawn: laws as they were when tokens were drawn one by one.
        rescored: the same laws, from one pass over the whole text.
    """
    total = 0.0
    for one, other in zip(drawn, rescored, strict=True):
        theirs = dict(zip(other.tokens, other.probabilities, strict=True))
        for token, p in zip(one.tokens, one.probabilities, strict=True):
            if token in theirs:
                total += float(p * np.log(p / theirs[token]) ** 2)
    return total / len(drawn)


def _pit_counts(
    samples: Sequence[Sample], position: int, chance: np.random.Generator
) -> NDArray[np.int64]:
    """Draws by cell of the randomised probability integral transform, uniform under the law."""
    places: list[float] = []
    for sample in samples:
        for law, draws in sample.by_prefix(position):
            for token, count in draws.items():
                start, end = law.interval(token)
                places += list(start + (end - start) * chance.random(count))
    return np.histogram(places, bins=PIT_CELLS, range=(0.0, 1.0))[0].astype(np.int64)


def _test(
    name: str, tables: Sequence[tuple[NDArray[Any], _Floats]], rounding_per_draw: float
) -> ChiSquare:
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in tables)
    freedom = sum(len(e) - 1 for _, e in tables)
    draws = round(sum(float(e.sum()) for _, e in tables))
    shift = rounding_per_draw * draws
    p = float(ncx2.sf(statistic, freedom, shift))
    return ChiSquare(name, statistic, freedom, draws, shift, p)


def _distance(
    position: int, tables: Sequence[tuple[_Floats, _Floats]], chance: np.random.Generator
) -> Distance:
    draws = round(sum(float(e.sum()) for _, e in tables))
    freedom = sum(len(e) - 1 for _, e in tables)
    ratio = sum(_likelihood_ratio(o, e) for o, e in tables)
    low, high = (_shift_at(ratio, freedom, level) for level in _tails())
    tv = sum(_variation(o, e) for o, e in tables) / draws
    resampled = _variations(tables, [o for o, _ in tables], chance) / draws
    exact = _variations(tables, [e for _, e in tables], chance) / draws
    least, most = np.quantile(resampled, _tails())
    return Distance(
        position=position,
        draws=draws,
        kl=(ratio - freedom) / (2 * draws),
        kl_interval=(low / (2 * draws), high / (2 * draws)),
        tv=tv,
        # Resampling adds chance once more; reflected at tv, the interval takes it off again.
        tv_interval=(max(0.0, 2 * tv - float(most)), max(0.0, 2 * tv - float(least))),
        tv_of_exact=(
            float(np.quantile(exact, _tails()[0])),
            float(np.quantile(exact, _tails()[1])),
        ),
    )


def _tails() -> tuple[float, float]:
    return (1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2


def _likelihood_ratio(observed: _Floats, expected: _Floats) -> float:
    seen = observed > 0
    return float(2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum())


def _shift_at(statistic: float, freedom: int, level: float) -> float:
    """The shift at which a chi-square exceeds ``statistic`` with probability ``level``."""

    def excess(shift: float) -> float:
        return float(ncx2.sf(statistic, freedom, shift)) - level

    if excess(0.0) >= 0:
        return 0.0
    bound = 2 * statistic + 100.0
    return float(brentq(excess, 0.0, bound))


def _variation(observed: _Floats, expected: _Floats) -> float:
    """Total variation times draws."""
    return float(np.abs(observed - expected).sum() / 2)


def _variations(
    tables: Sequence[tuple[_Floats, _Floats]],
    weights: Sequence[_Floats],
    chance: np.random.Generator,
) -> _Floats:
    """`_variation` over all tables, of draws from ``weights``, many times over."""
    total = np.zeros(_RESAMPLES)
    for (_, expected), weight in zip(tables, weights, strict=True):
        draws = round(float(expected.sum()))
        redrawn = chance.multinomial(draws, weight / weight.sum(), size=_RESAMPLES)
        total += np.abs(redrawn - expected).sum(axis=1) / 2
    return total
