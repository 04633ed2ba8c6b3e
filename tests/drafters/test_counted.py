"""Counts row by row: they add up to the engine's, whatever drafts, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

import strategies
import texts
from hf_specdec import NoDraft, PromptLookup, generate
from hf_specdec.drafters.counted import Counted, RowCounts
from hf_specdec.registry import create_drafter

NEW_TOKENS = 14
FIELDS = ("rounds", "drafted", "accepted")


def totals(rows: list[RowCounts]) -> tuple[int, ...]:
    return tuple(sum(getattr(row, name) for row in rows) for name in FIELDS)


@pytest.mark.parametrize("in_step", [False, True], ids=["ragged", "in step"])
@pytest.mark.parametrize("lengths", [(9,), (7, 12, 4)], ids=str)
@pytest.mark.parametrize("name", sorted(strategies.STRATEGIES.keys() - {"auto_measured"}))  # its trees follow a clock
def test_rows_add_up(
    target: PreTrainedModel, draft: PreTrainedModel, name: str, lengths: tuple[int, ...], in_step: bool
) -> None:
    """Also where one row ends early, and waits or is padded for the others."""
    batch = texts.padded(lengths)
    eos = int(texts.greedy(target, **batch, max_new_tokens=NEW_TOKENS)[0, max(lengths) + 9])
    settings: dict[str, Any] = {**batch, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "pad_token_id": texts.PAD}
    expected = texts.greedy(target, **settings)
    settings |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": in_step}
    settings |= strategies.STRATEGIES[name](draft, texts.rows_without_padding(batch, expected))
    drafter = settings.pop("strategy")
    drafter = create_drafter(drafter) if isinstance(drafter, str) else drafter
    rows: list[RowCounts] = []

    output = generate(target, **settings, strategy=Counted(drafter, rows))
    plain = generate(target, **settings, strategy=drafter).speculation

    assert output.sequences.tolist() == expected.tolist()
    stats = output.speculation
    for one in (stats, plain):
        assert totals(rows) == (one.row_rounds, one.drafted, one.accepted)
    assert max(row.rounds for row in rows) == stats.rounds
    assert stats.strategy == drafter.name
    new = output.sequences[:, max(lengths) :].tolist()
    for row, text in zip(rows, new, strict=True):
        end = text.index(eos) + 1 if eos in text else len(text)
        assert row.tokens == end


def test_each_call_begins_afresh(target: PreTrainedModel) -> None:
    rows: list[RowCounts] = []
    counted = Counted(NoDraft(), rows)
    for length in (3, 5):
        generate(target, **texts.inputs(texts.prompt(9)), max_new_tokens=length, strategy=counted)
        assert rows == [RowCounts(rounds=length, tokens=length)]


def test_it_asks_the_strategy(target: PreTrainedModel) -> None:
    counted = Counted(PromptLookup(branches=1), [])
    assert counted.chains_only
    assert counted.name == "prompt_lookup"
    assert counted.settings == PromptLookup.settings
