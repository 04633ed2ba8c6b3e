"""The numbers of an evaluation: collected over requests, tasks and processes, and how lm-eval's results show them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.lm_eval.request_stats import RequestStats

NO_PART = (
    "speculation played no part in log-likelihood requests: each is one forward over a given text, as in lm-eval's hf "
    "model"
)


@dataclass
class Report:
    """What has been asked of the model since the last report.

    Attributes:
        generated: for each task the numbers of its generation requests.
        scored: how many log-likelihood requests there were, by their kind.
    """

    generated: dict[str, list[RequestStats]] = field(default_factory=dict)
    scored: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Add what another process was asked."""
        for task, requests in other.generated.items():
            self.generated.setdefault(task, []).extend(requests)
        self.scored += other.scored

    def to_dict(self) -> dict[str, Any]:
        """Totals of all tasks and of each, ready for JSON."""
        record: dict[str, Any] = {}
        if self.generated:
            everything = [one for requests in self.generated.values() for one in requests]
            record["generate_until"] = summarize(everything)
            record["tasks"] = {task: summarize(requests) for task, requests in sorted(self.generated.items())}
        for kind, count in sorted(self.scored.items()):
            record[kind] = {"requests": count, "note": NO_PART}
        return record


def summarize(requests: list[RequestStats]) -> dict[str, Any]:
    """The totals of some requests."""
    total = RequestStats()
    for request in requests:
        total.add(request)
    return {"requests": len(requests), **total.to_dict()}


def summary_line(requests: list[RequestStats], strategy: str) -> str:
    """One line for people."""
    total = RequestStats()
    for request in requests:
        total.add(request)
    return (
        f"strategy {strategy}: {len(requests)} answers, {total.tokens} tokens in {total.seconds:.1f} s, "
        f"{total.tokens_per_forward:.2f} tokens per forward, {total.accepted} of {total.drafted} drafted tokens "
        "accepted"
    )
