"""The audit in small: every family, strategy and control; and what makes it fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import audits
import hf_specdec
import zoo
from hf_specdec import ArgumentError, Assisted, NoDraft, PromptLookup, Suffix
from hf_specdec.audit import AuditResults, Document, checks, run
from hf_specdec.audit.arms import choose_arms, describe
from hf_specdec.audit.controls import controls
from hf_specdec.audit.differences import TIE, Difference
from hf_specdec.audit.generation import generate_texts
from hf_specdec.audit.sections import sections
from hf_specdec.audit.work import STOCK_BATCH
from hf_specdec.verify import Rejection, SampleAndMatch, Step


def failed(results: AuditResults) -> list[str]:
    return [check.name for check in results.checks if not check.passed]


def test_every_strategy_is_in_the_short_audit() -> None:
    assert set(audits.STRATEGIES) == set(hf_specdec.drafter_names())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_short_audit(family: str, tmp_path: Path) -> None:
    model = audits.make(family)
    kept = model.generation_config
    results = audits.audit(tmp_path, model, audits.STRATEGIES, assistant=zoo.make_draft(model))

    assert results.passed, [check for check in results.checks if not check.passed]
    assert {row.name for row in results.controls if row.failed} == {
        "typical acceptance",
        "residual from p",
        "double draw",
        "bonus temperature",
        "shifted position",
        "short rollback",
    }
    assert {row.name for row in results.controls if row.intact} == {"intact, identity", "intact, law"}
    # Nothing is proved by drafts that were never tried.
    accepted = {row.arm for row in results.identity if row.acceptance}
    assert accepted >= {"assisted", "tree", "jacobi", "recycling", "auto", "early_exit"}
    assert {test.test for test in results.tests} >= {"log p", "log q/p", "membership", "PIT"}
    assert model.generation_config is kept


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_short_audit_of_greedy_text(family: str, tmp_path: Path) -> None:
    """Every strategy on every family, under the one attention that all of them have."""
    model = audits.make(family, attention="eager")
    results = audits.audit(
        tmp_path,
        model,
        audits.STRATEGIES,
        assistant=zoo.make_draft(model),
        documents=audits.DOCUMENTS[:2],
        changes={"temperatures": (0.0,), "max_new_tokens": 16},
    )
    assert results.passed, [check for check in results.checks if not check.passed]
    assert {row.name for row in results.controls if row.failed} == {"shifted position", "short rollback"}
    assert {row.arm for row in results.identity if row.acceptance} >= {"assisted", "tree"}


def test_a_strategy_that_changes_greedy_text_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier takes every first guess."""
    rule = SampleAndMatch.rule

    def gullible(self: SampleAndMatch, tree: Any, logits: Any) -> Any:
        decide = rule(self, tree, logits)

        def believe(rows: Any, nodes: Any) -> list[Step]:
            return [
                Step(tree.tokens[row][child[0]], child[0]) if (child := tree.children[row][node]) else step
                for row, node, step in zip(rows, nodes, decide(rows, nodes), strict=True)
            ]

        return believe

    monkeypatch.setattr(SampleAndMatch, "rule", gullible)
    changes = {"temperatures": (1.0,), "control_tokens": 100, "law_tokens": 100}
    results = audits.audit(tmp_path, audits.make(), {"lookup": PromptLookup(max_ngram=1)}, changes=changes)
    assert "token identity at temperature 1" in failed(results)
    (row,) = [row for row in results.identity if row.arm == "lookup"]
    assert row.faults == len(row.places) > 0
    assert row.places[0]["kind"] == "fault"


def test_a_rule_that_changes_the_law_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused guesses are replaced by draws from p: token identity cannot see it, the law tests do."""

    def residual_is_p(self: Rejection, tree: Any, row: int, node: int, p: torch.Tensor) -> Step:
        for child in tree.children[row][node]:
            token = tree.tokens[row][child]
            if self._uniform() * float(tree.draft_probs[row][node][token]) < float(p[token]):
                return Step(token, child)
        return Step(self._draw(p), None)

    model = audits.make()
    monkeypatch.setattr(Rejection, "rule", Rejection._node_rule)
    monkeypatch.setattr(Rejection, "_try_children", residual_is_p)
    results = audits.audit(
        tmp_path,
        model,
        {"assisted": Assisted()},
        assistant=zoo.make_draft(model, noise=0.1),
        changes={"law_tokens": 4000, "control_tokens": 100},
    )
    assert "law of sampled tokens and task metrics" in failed(results)
    assert not [name for name in failed(results) if name.startswith("token identity")]
    refused = [test for test in results.tests if test.adjusted <= 1e-3]
    assert {test.verification for test in refused} == {"rejection"}


def test_a_control_that_passes_fails_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults are taken out of the controls, and the fault of one is put into an intact one."""
    named = {control.name: control for control in controls()}
    harmless = dataclasses.replace(named["shifted position"], tamper=lambda call: None)
    broken = dataclasses.replace(named["intact, identity"], tamper=named["short rollback"].tamper)
    monkeypatch.setattr(run, "controls", lambda: [harmless, broken])
    results = audits.audit(tmp_path, audits.make(), {"none": NoDraft()}, changes={"temperatures": (0.0,)})
    assert failed(results) == ["control: shifted position", "control: intact, identity"]


def test_a_sample_of_a_few_tokens_fails(tmp_path: Path) -> None:
    """No test refused it, because none could."""
    changes = {"temperatures": (1.0,), "law_tokens": 1, "control_tokens": 1, "max_new_tokens": 4, "rows": 2}
    results = audits.audit(tmp_path, audits.make(), {"none": NoDraft()}, changes=changes)
    assert results.tests
    assert all(test.adjusted == 1 for test in results.tests)
    (law,) = [check for check in results.checks if check.name.startswith("law")]
    assert not law.passed
    assert law.detail.endswith(
        "; stock, stock, 1: too few tokens; none, keyed, 1: too few tokens; none, rejection, 1: too few tokens"
    )


def test_greedy_alone_leaves_the_law_out(tmp_path: Path) -> None:
    results = audits.audit(tmp_path, audits.make(), {"none": NoDraft()}, changes={"temperatures": (0.0,)})
    assert results.passed
    assert results.tests == []
    assert {row.check for row in results.controls} == {"identity"}


def test_ties_in_16_bit_pass_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = audits.make().to(torch.bfloat16)
    for units, kind in ((2.0, "tie"), (20.0, "fault")):
        audits.part(monkeypatch, Difference(4, units, kind, noise=1.0, taken_by_stock=kind == TIE))
        changes = {"temperatures": (0.0,), "max_new_tokens": 8}
        results = audits.audit(tmp_path / kind, model, {"none": NoDraft()}, changes=changes)
        (row,) = [row for row in results.identity if row.arm == "none"]
        assert not results.exact
        assert (row.ties, row.faults, row.taken_by_stock) == ((4, 0, 4) if kind == "tie" else (0, 4, 0))
        assert row.per_thousand == 200.0
        assert ("token identity at temperature 0" in failed(results)) == (kind == "fault")


@pytest.mark.parametrize("changed", [False, True])
def test_in_16_bit_marks_must_agree_on_average(changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All say the same, or the strategy alone says the right answer each time; sampling plays no part."""
    (seven,) = audits.TOKENIZER("7").input_ids
    documents = [Document("sums", f"sums/{i}", f"{i} and so on", answer="7") for i in range(12)]

    def answer(*arguments: Any, **options: Any) -> list[list[int]]:
        return [[seven] for _ in generate_texts(*arguments, **options)]

    if changed:
        monkeypatch.setattr("hf_specdec.audit.work.generate_texts", answer)
    audits.part(monkeypatch, Difference(0, 1.0, TIE, noise=1.0))
    results = audits.audit(
        tmp_path,
        audits.make().to(torch.bfloat16),
        {"none": NoDraft()},
        documents=documents,
        changes={"temperatures": (0.0,), "max_new_tokens": 4},
    )
    (test,) = results.tests
    assert (test.arm, test.verification, test.test, test.outcome.count) == ("none", "same seed", "right", 12)
    assert test.interval == ((1.0, 1.0, 1.0) if changed else (0.0, 0.0, 0.0))
    assert ("law of sampled tokens and task metrics" in failed(results)) == changed
    assert "token identity at temperature 0" not in failed(results)
    titles = [section.title for section in sections(results)]
    assert "Task metrics" in titles
    assert "Law of sampled tokens" not in titles


def test_batch_noise_fails_nothing(tmp_path: Path) -> None:
    results = audits.audit(tmp_path, audits.make(), {"none": NoDraft()}, changes={"temperatures": (0.0,)})
    (row,) = [row for row in results.identity if row.arm == STOCK_BATCH]
    noisy = dataclasses.replace(row, faults=3)
    assert all(check.passed for check in checks.identity_checks([noisy], audits.settings(temperatures=(0.0,)), True))


def test_marks_are_compared_document_by_document(tmp_path: Path) -> None:
    """Twelve questions, so that the paired bootstrap has something to work with."""
    documents = [Document("sums", f"sums/{i}", f"{i} and {i}", answer=str(2 * i)) for i in range(12)]
    results = audits.audit(
        tmp_path,
        audits.make(),
        {"lookup": PromptLookup(max_ngram=2)},
        documents=documents,
        changes={"max_new_tokens": 6, "law_tokens": 2400, "control_tokens": 100},
    )
    assert {row.marks_changed for row in results.identity} == {0}
    assert "task marks with the same seed" not in failed(results)
    metrics = [test for test in results.tests if test.interval is not None]
    assert {(test.verification, test.test) for test in metrics} == {
        (verification, metric) for verification in ("keyed", "rejection") for metric in ("right", "lengths")
    }
    assert {test.outcome.count for test in metrics} == {12}


def test_strategies_that_cannot_run_are_named_with_the_reason(target: Any) -> None:
    arms, skipped = choose_arms(target, None, None)
    assert set(skipped) == {"assisted", "medusa", "tree"}
    assert "second model" in skipped["tree"]
    assert "none" in [arm.name for arm in arms]
    one_layer = zoo.make("llama", num_hidden_layers=1)
    assert "early_exit" in choose_arms(one_layer, None, None)[1]


def test_a_named_strategy_must_run(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="drafts with a second model"):
        choose_arms(target, None, {"assisted": Assisted()})
    with pytest.raises(ArgumentError, match="no strategy"):
        choose_arms(target, None, {})
    with pytest.raises(ArgumentError, match="none of the strategies uses"):
        choose_arms(target, zoo.make_draft(target), {"none": NoDraft()})
    with pytest.raises(ArgumentError, match="one of the audit's own"):
        audits.audit(tmp_path, audits.make(), {"double draw": NoDraft()})


def test_settings_are_described_alike_in_every_process() -> None:
    assert describe(PromptLookup(nodes=3)) == (
        "PromptLookup(nodes=3, num_tokens=20, max_ngram=5, branches=2, tokens_per_match=4)"
    )
    assert "store=SuffixStore" in describe(Suffix(store=hf_specdec.SuffixStore()))
    assert describe(hf_specdec.Scripted(lambda context: [])) == "Scripted()"
