"""The numbers of one audit, checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hf_specdec.checks import is_finite, require_not_negative, require_seed, require_whole
from hf_specdec.errors import ArgumentError

_COUNTS = ("max_new_tokens", "law_tokens", "control_tokens", "rows")


@dataclass(frozen=True)
class AuditSettings:
    """What is compared, and how strictly.

    Attributes:
        temperatures: 0 is greedy decoding; law tests run at those above 0.
        max_new_tokens: length of every text at most.
        law_tokens: sampled tokens of each law test at least.
        control_tokens: sampled tokens of each negative control of the law at least.
        rows: rows of the batches in which law tests sample.
        seed: of everything random.
        alpha: error of the whole family of tests.
        tie_units: in 16 bit, the largest gap between two candidates that is put down to rounding everywhere, in its
            units; up to twice as much is where stock's own readings of the place scatter.

    Raises:
        ArgumentError: a value that makes no sense.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 128
    law_tokens: int = 20_000
    control_tokens: int = 4_000
    rows: int = 8
    seed: int = 0
    alpha: float = 1e-3
    tie_units: float = 8.0

    def __post_init__(self) -> None:
        values = self.temperatures
        if isinstance(values, float | int | str) or not values or not all(is_finite(t) and t >= 0 for t in values):
            raise ArgumentError(f"temperatures={values!r} must be a list of finite numbers, none below 0")
        object.__setattr__(self, "temperatures", tuple(float(value) for value in values))
        if len(set(values)) < len(values):
            raise ArgumentError(f"temperatures={values!r} names one temperature twice")
        require_whole(**{name: getattr(self, name) for name in _COUNTS})
        require_seed(seed=self.seed)
        if not is_finite(self.alpha) or not 0 < self.alpha < 1:
            raise ArgumentError(f"alpha={self.alpha!r} must lie between 0 and 1")
        require_not_negative(tie_units=self.tie_units)

    @property
    def sampled(self) -> list[float]:
        """The temperatures above 0."""
        return [temperature for temperature in self.temperatures if temperature > 0]

    def seed_of(self, *parts: object) -> int:
        """A seed for one piece of work, from the audit's seed and the name of the piece alone."""
        digest = hashlib.sha256(repr((self.seed, *parts)).encode()).digest()
        return int.from_bytes(digest[:7])
