"""What one call did: counts and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """Counts over all rows of one call.

    Attributes:
        strategy: the strategy's name.
        verification: "greedy", "keyed", "rejection" or "typical".
        lossless: whether the text has the model's own law; False for "typical" alone.
        rounds: forwards of the target; reading the prompt is the first, and drafts nothing.
        row_rounds: the same, counted once for every row that was still open.
        drafted: tokens proposed.
        accepted: proposed tokens that were emitted.
        emitted: tokens emitted, the accepted ones among them.
        accepted_lengths: how often a row accepted so many tokens in one round.
        seconds_draft: time in drafting.
        seconds_verify: time in the target's forwards.
        seconds_rest: everything else. On a GPU forwards are queued, so waiting for them counts here.
    """

    strategy: str = "none"
    verification: str = "greedy"
    lossless: bool = True
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_rest: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a row gains in one forward of the target; 1.0 is plain decoding."""
        return self.emitted / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed tokens that were emitted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count_round(self, drafted: list[int], accepted: list[int]) -> None:
        """Add one round: for each open row how many tokens were proposed and how many of them emitted."""
        self.rounds += 1
        self.row_rounds += len(drafted)
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        for length in accepted:
            self.accepted_lengths[length] = self.accepted_lengths.get(length, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """All fields and rates, ready for JSON."""
        return asdict(self) | {"tokens_per_forward": self.tokens_per_forward, "acceptance_rate": self.acceptance_rate}
