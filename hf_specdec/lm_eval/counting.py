"""What speculation did for every single row of a batch, seen from where the strategy sits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_specdec.drafters import DraftContext, Drafter, RoundOutputs
from hf_specdec.tree import DraftTree


@dataclass
class RequestStats:
    """What one request took.

    Attributes:
        rounds: forwards of the target that the request took part in; reading the prompt is the first.
        drafted: tokens proposed.
        accepted: proposed tokens that were emitted.
        tokens: tokens emitted, the accepted ones among them. In a batch some of them may lie behind the request's stop
            string: lm-eval ends a batch when all of its requests have ended.
        seconds: the batch's time, divided equally among its requests.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
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


def counted(drafter: Drafter, rows: list[RequestStats]) -> Drafter:
    """A copy of `drafter` that proposes the same, and writes what the rows of its next call take into `rows`."""
    copied = copy.copy(drafter)

    def begin(context: DraftContext) -> Drafter:
        begun = type(drafter).begin(copied, context)
        observe, finish = begun.observe, begun.finish

        def counting_observe(tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
            count_round(rows, context, tree, accepted)
            observe(tree, accepted, outputs)

        def counting_finish(context: DraftContext) -> None:
            drop_overrun(rows, context)
            finish(context)

        _shadow(begun, "observe", counting_observe)
        _shadow(begun, "finish", counting_finish)
        return begun

    _shadow(copied, "begin", begin)
    return copied


def count_round(
    rows: list[RequestStats], context: DraftContext, tree: DraftTree, accepted: Sequence[Sequence[int]]
) -> None:
    """Add a verified round, as `Drafter.observe` gets it."""
    for row, path in enumerate(accepted):
        if path:  # empty for rows that have ended
            rows[row].rounds += 1
            rows[row].drafted += tree.num_drafted[row]
            rows[row].accepted += len(path) - 1
            rows[row].tokens = context.num_generated[row]


def drop_overrun(rows: list[RequestStats], context: DraftContext) -> None:
    """A row may have run ahead of its end, which is found when the others catch up."""
    for stats, num_generated in zip(rows, context.num_generated, strict=True):
        stats.tokens = min(stats.tokens, num_generated)


def _shadow(drafter: Drafter, name: str, function: Callable[..., object]) -> None:
    """Let one object answer in another way than its class; past the guard of frozen dataclasses."""
    object.__setattr__(drafter, name, function)
