"""Small audits on tiny models, with fixed settings so that the outcome is always the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import zoo
from docs_hub import byte_tokenizer
from hf_specdec import (
    Assisted,
    Auto,
    Drafter,
    EarlyExit,
    Jacobi,
    Lookahead,
    Medusa,
    NoDraft,
    PromptLookup,
    Recycling,
    Suffix,
    Tree,
)
from hf_specdec.audit import AuditResults, AuditSettings, Document, run_audit
from hf_specdec.audit.differences import Difference

TOKENIZER = byte_tokenizer()
# Of every strategy one whose trees do not depend on the speed of the machine.
STRATEGIES: dict[str, Drafter] = {
    "none": NoDraft(),
    "assisted": Assisted(),
    "tree": Tree(nodes=12, min_gain=0.0, min_score=0.0),
    "prompt_lookup": PromptLookup(max_ngram=2, nodes=8),
    "jacobi": Jacobi(block=4),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3),
    "early_exit": EarlyExit(exit_layer=1, adaptive=False, num_tokens=3),
    "suffix": Suffix(nodes=8, node_cost=0),
    "recycling": Recycling(nodes=8, node_cost=0),
    "auto": Auto(nodes=8, node_cost=0),
    "medusa": Medusa(heads=zoo.make_heads(zoo.make("llama", vocab_size=len(TOKENIZER))), nodes=8, node_cost=0),
}
DOCUMENTS = [
    Document("list", "list/1", "sail, sail, sail"),
    Document("sums", "sums/1", "one and two and one and two", answer="3"),
    Document("list", "list/2", "the sea, the sun"),
    Document("sums", "sums/2", "one and one", answer="2"),
]
POSITIONS = {"gpt2": "n_positions", "gpt-j": "n_positions"}


def make(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model that knows the byte tokenizer's ids."""
    return zoo.make(
        family, vocab_size=len(TOKENIZER), **{POSITIONS.get(family, "max_position_embeddings"): 256}, **changes
    )


def settings(**changes: Any) -> AuditSettings:
    """Few tokens, wide batches."""
    small: dict[str, Any] = {
        "temperatures": (0.0, 1.0),
        "max_new_tokens": 24,
        "law_tokens": 500,
        "control_tokens": 3000,
        "rows": 32,
    }
    return AuditSettings(**(small | changes))


def part(monkeypatch: pytest.MonkeyPatch, difference: Difference) -> None:
    """Every text parts from stock's there: whether rounding makes a difference depends on the machine."""
    monkeypatch.setattr("hf_specdec.audit.work.first_difference", lambda *arguments: difference.index)
    monkeypatch.setattr("hf_specdec.audit.work.classify", lambda *arguments, **options: difference)


def audit(
    folder: Path, model: PreTrainedModel, strategies: Mapping[str, Drafter], *, changes: Any = None, **arguments: Any
) -> AuditResults:
    """Run one."""
    documents = arguments.pop("documents", DOCUMENTS)
    return run_audit(
        model,
        TOKENIZER,
        documents,
        folder,
        strategies=strategies,
        settings=settings(**(changes or {})),
        chat=False,
        **arguments,
    )
