"""The tests: sums of martingale differences, Kolmogorov-Smirnov, Holm, and what a run could have detected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

_POWER = 0.9
MIN_TOKENS = 30
# With fewer tokens, or a sum as skewed as this, a tail of 1e-6 cannot be computed from three moments.
_MAX_SKEWNESS = 0.5
# Below it stand rounding errors of certain tokens.
_LEAST_VARIANCE = 1e-12


class Sums(NamedTuple):
    """Sums over tokens of f(x) minus its mean under p, and of the variance and third central moment of f under p."""

    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0
    third: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        return Sums(
            self.tokens + other.tokens,
            self.excess + other.excess,
            self.variance + other.variance,
            self.third + other.third,
        )

    @property
    def skewness(self) -> float:
        """Skewness of the standardised excess if the law is right."""
        return self.third / math.pow(max(self.variance, _LEAST_VARIANCE), 1.5)

    @property
    def z(self) -> float:
        """The excess in standard deviations."""
        return self.excess / math.sqrt(max(self.variance, _LEAST_VARIANCE))


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        statistic: standard deviations of a z-test, or the Kolmogorov-Smirnov distance.
        p_value: two-sided.
        count: tokens, or documents.
        spread: standard deviation of the mean of f, or of paired differences; for Kolmogorov-Smirnov that of the
            distribution function at most.
        skewness: of a z-test's sum.
    """

    statistic: float
    p_value: float
    count: int
    spread: float
    skewness: float = 0.0


def z_test(sums: Sums) -> Outcome:
    """Whether f is on average what p says.

    Under the right law the terms are martingale differences with known moments. The tail is the larger one of a
    normal law and of a Pearson III law with the sum's own skewness: the latter is right on the side of the long tail,
    and would promise too much on the other. Where three moments do not suffice, for few tokens and for sums that a
    single token can decide, it is Chebyshev's bound, which holds for every law.
    """
    z, skewness = sums.z, sums.skewness
    if _is_almost_normal(sums.tokens, skewness):
        skewed = stats.pearson3(skewness)
        upper = max(float(skewed.sf(z)), float(stats.norm.sf(z)))
        lower = max(float(skewed.cdf(z)), float(stats.norm.cdf(z)))
        p_value = min(1.0, 2 * min(upper, lower))
    else:
        p_value = min(1.0, 1.0 / z**2) if z else 1.0
    return Outcome(z, p_value, sums.tokens, math.sqrt(sums.variance) / sums.tokens, skewness)


def _critical_z(outcome: Outcome, level: float) -> float:
    """The smallest z, on the side of the longer tail, whose p-value in `z_test` is at most `level`."""
    if not _is_almost_normal(outcome.count, outcome.skewness):
        return 1.0 / math.sqrt(level)
    skewed = stats.pearson3(abs(outcome.skewness))
    return max(float(skewed.isf(level / 2)), float(stats.norm.isf(level / 2)))


def _is_almost_normal(tokens: int, skewness: float) -> bool:
    return tokens >= MIN_TOKENS and abs(skewness) <= _MAX_SKEWNESS


def ks_test(values: Sequence[float]) -> Outcome:
    """Whether numbers are uniform on [0, 1]."""
    result = stats.kstest(values, "uniform")
    return Outcome(float(result.statistic), float(result.pvalue), len(values), 0.5 / math.sqrt(len(values)))


def paired_bootstrap(differences: Sequence[float], seed: int) -> tuple[Outcome, tuple[float, float]] | None:
    """Mean of paired differences, with a p-value from the bootstrap's standard error, and the mean's 95 % interval.

    Differences without a direction all have the same sign once in 2^(k - 1) times, k being those that are not 0. No
    p-value is smaller than that, however narrow the interval of a few equal differences may be.

    None for fewer than ten pairs.
    """
    count = len(differences)
    if count < 10:
        return None
    mean, least = float(np.mean(differences)), 0.5 ** (np.count_nonzero(differences) - 1)
    if len(set(differences)) == 1:  # leaves nothing to resample
        return Outcome(mean, float(min(1.0, least)), count, 0.0), (mean, mean)
    result = stats.bootstrap(
        (np.asarray(differences),), np.mean, method="percentile", rng=np.random.default_rng(seed), vectorized=True
    )
    error, interval = float(result.standard_error), result.confidence_interval
    p_value = max(2 * float(stats.t.sf(abs(mean) / error, count - 1)), least)
    return Outcome(mean, float(min(1.0, p_value)), count, error), (float(interval.low), float(interval.high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: reject those at most alpha, and the family errs at most so often.

    Holm (1979), a step-down form of Bonferroni that needs no independence.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def detectable_bias(outcome: Outcome, alpha: float, family_size: int) -> float:
    """The smallest bias of the mean of f that a z-test would have shown, whichever its direction.

    With probability 0.9, in the strictest step of Holm.
    """
    return (_critical_z(outcome, alpha / family_size) + float(stats.norm.ppf(_POWER))) * outcome.spread


def detectable_distance(outcome: Outcome, alpha: float, family_size: int) -> float:
    """The same of the PIT's distribution function: the critical distance of Kolmogorov-Smirnov and an error on top."""
    critical = float(stats.kstwo.isf(alpha / family_size, outcome.count))
    return critical + float(stats.norm.ppf(_POWER)) * outcome.spread
