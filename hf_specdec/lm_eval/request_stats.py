"""What one request took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_specdec.drafters.counted import RowCounts


@dataclass
class RequestStats(RowCounts):
    """What one request took.

    Attributes:
        rounds: forwards of the target that the request took part in; reading the prompt is the first.
        drafted: tokens proposed.
        accepted: proposed tokens that were emitted.
        tokens: tokens emitted, the accepted ones among them. In a batch some of them may lie behind the request's stop
            string: lm-eval ends a batch when all of its requests have ended.
        seconds: the batch's time, divided equally among its requests.
    """

    seconds: float = 0.0

    def add(self, other: RequestStats) -> None:
        """Add the numbers of another request."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.tokens += other.tokens
        self.seconds += other.seconds

    @property
    def tokens_per_forward(self) -> float:
        """Tokens gained in one forward of the target; 1.0 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed tokens that were emitted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and rates, ready for JSON."""
        return asdict(self) | {"tokens_per_forward": self.tokens_per_forward, "acceptance_rate": self.acceptance_rate}
