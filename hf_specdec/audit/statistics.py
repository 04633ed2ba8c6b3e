"""The tests: sums of martingale differences, Kolmogorov-Smirnov, Holm, and what a run could have detected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

_POWER = 0.9
# With fewer tokens, or a sum as skewed as this, a tail of 1e-6 cannot be computed from three moments.
_MIN_TOKENS = 30
_MAX_SKEWNESS = 0.5


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
        return self.third / self.variance**1.5 if self.variance > 0 else math.inf

    @property
    def z(self) -> float:
        """The excess in standard deviations."""
        return self.excess / math.sqrt(self.variance)

    @property
    def testable(self) -> bool:
        """Whether a p-value far in the tail can be trusted."""
        return self.tokens >= _MIN_TOKENS and abs(self.skewness) <= _MAX_SKEWNESS


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        statistic: standard deviations of a z-test, or the Kolmogorov-Smirnov distance.
        p_value: two-sided.
        count: tokens, or documents.
        spread: standard deviation of the mean of f; for Kolmogorov-Smirnov that of the distribution function at most.
    """

    statistic: float
    p_value: float
    count: int
    spread: float


def z_test(sums: Sums) -> Outcome | None:
    """Whether f is on average what p says; None where that cannot be tested.

    Under the right law the terms are martingale differences with known moments. The tail is the larger one of a
    normal law and of a Pearson III law with the sum's own skewness: the latter is right on the side of the long tail,
    and would promise too much on the other.
    """
    if not sums.testable:
        return None
    skewed = stats.pearson3(sums.skewness)
    upper = max(float(skewed.sf(sums.z)), float(stats.norm.sf(sums.z)))
    lower = max(float(skewed.cdf(sums.z)), float(stats.norm.cdf(sums.z)))
    p_value = min(1.0, 2 * min(upper, lower))
    return Outcome(sums.z, p_value, sums.tokens, math.sqrt(sums.variance) / sums.tokens)


def ks_test(values: Sequence[float]) -> Outcome | None:
    """Whether numbers are uniform on [0, 1]; None for too few of them."""
    if len(values) < _MIN_TOKENS:
        return None
    result = stats.kstest(values, "uniform")
    return Outcome(float(result.statistic), float(result.pvalue), len(values), 0.5 / math.sqrt(len(values)))


def paired_bootstrap(differences: Sequence[float], seed: int) -> tuple[float, float, float, float] | None:
    """Mean of paired differences: the mean, its 95 % interval, and a p-value from the bootstrap's standard error.

    None for fewer than ten pairs. Differences that are all equal leave nothing to resample: all 0 is agreement.
    """
    if len(differences) < 10:
        return None
    mean = float(np.mean(differences))
    if len(set(differences)) == 1:
        return mean, mean, mean, 1.0 if mean == 0 else 0.0
    result = stats.bootstrap(
        (np.asarray(differences),), np.mean, method="percentile", rng=np.random.default_rng(seed), vectorized=True
    )
    p_value = 2 * float(stats.t.sf(abs(mean) / result.standard_error, len(differences) - 1))
    return mean, float(result.confidence_interval.low), float(result.confidence_interval.high), p_value


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
    """The smallest bias that this test would have shown with probability 0.9, in the strictest step of Holm.

    Of the mean of f for a z-test; of the distribution function of the PIT values for Kolmogorov-Smirnov.
    """
    level, quantile = alpha / family_size, float(stats.norm.ppf(_POWER))
    return (float(stats.norm.isf(level / 2)) + quantile) * outcome.spread


def detectable_distance(outcome: Outcome, alpha: float, family_size: int) -> float:
    """The same for Kolmogorov-Smirnov: its critical distance and the error of the distribution function on top."""
    critical = float(stats.kstwo.isf(alpha / family_size, outcome.count))
    return critical + float(stats.norm.ppf(_POWER)) * outcome.spread
