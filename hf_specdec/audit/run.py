"""One audit from models and documents to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.audit.arms import KEYED, REJECTION, Arm, choose_arms, describe
from hf_specdec.audit.controls import LAW, Control, controls
from hf_specdec.audit.differences import is_exact
from hf_specdec.audit.documents import Document, encode_documents, fingerprint
from hf_specdec.audit.generation import clean_generation_config
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.law import ALL
from hf_specdec.audit.results import (
    AuditResults,
    Check,
    ControlRow,
    IdentityRow,
    Test,
    adjust,
    by_document,
    identity_row,
    law_tests,
    merged,
    metric_test,
)
from hf_specdec.audit.settings import AuditSettings
from hf_specdec.audit.work import STOCK, STOCK_BATCH, Progress, Work, is_fault
from hf_specdec.bench import collect_provenance
from hf_specdec.drafters import Drafter

JOURNAL = "journal.jsonl"
_PIT_POINTS = 200


@dataclass(frozen=True)
class Names:
    """What the report calls things.

    Attributes:
        model, assistant: the models in words.
        command: what repeats the run.
    """

    model: str
    assistant: str | None = None
    command: str = ""


def run_audit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    *,
    strategies: Mapping[str, Drafter] | None = None,
    assistant: PreTrainedModel | None = None,
    settings: AuditSettings | None = None,
    names: Names | None = None,
    chat: bool | None = None,
    max_prompt_tokens: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> AuditResults:
    """Compare strategies with stock `generate`.

    Args:
        model: the target, in the dtype and on the device that are to be audited. Left as it was.
        tokenizer: its tokenizer.
        documents: prompts; see `read_documents`.
        folder: holds the journal. A run that was interrupted goes on from there.
        strategies: by name; None: every registered strategy that can run.
        assistant: the draft model of the strategies that use one.
        settings: the numbers; see `AuditSettings`.
        names: for the report; by default what the models' configs say.
        chat: whether documents are wrapped in the chat template; None: if there is one.
        max_prompt_tokens: longer prompts keep their last tokens.
        progress: called with a stage, how much of it is done and how much there is.

    Raises:
        ArgumentError: documents, strategies or the folder's journal do not fit.
        SpecDecError: a strategy that was named cannot run on this model.
    """
    settings = settings or AuditSettings()
    names = names or Names(model.name_or_path or type(model).__name__, assistant.name_or_path if assistant else None)
    encoded = encode_documents(documents, tokenizer, chat=chat, max_tokens=max_prompt_tokens)
    arms, skipped = choose_arms(model, assistant, strategies)
    provenance = collect_provenance(
        model, name=names.model, draft=names.assistant, seed=settings.seed, command=names.command
    )
    described = {arm.name: describe(arm.drafter) for arm in arms}
    # What must be the same for two runs to be one. Neither date nor thread count belongs to it.
    identity = {
        **asdict(settings),
        "model": provenance.model,
        "assistant": provenance.draft,
        "dtype": provenance.dtype,
        "attention": provenance.attention,
        "versions": provenance.versions,
        "strategies": described,
        "documents": fingerprint(encoded),
    }
    journal = Journal(folder / JOURNAL, identity)
    work = Work(model, tokenizer, encoded, arms, settings, journal, progress)
    with clean_generation_config(model):
        work.identity()
        work.law()
        known = _applicable(settings)
        control_records = []
        for done, control in enumerate(known):
            progress("negative controls", done, len(known))
            control_records.append((control, work.run_control(control)))
        progress("negative controls", len(known), len(known))
    return _results(work, provenance, described, skipped, control_records)


def _applicable(settings: AuditSettings) -> list[Control]:
    """Without sampling there is no law to get wrong."""
    return [control for control in controls() if settings.sampled or control.check != LAW]


def _results(
    work: Work,
    provenance: Any,
    described: dict[str, str],
    skipped: dict[str, str],
    control_records: Sequence[tuple[Control, list[dict[str, Any]]]],
) -> AuditResults:
    settings, exact = work.settings, is_exact(work.model)
    identity = [
        _identity_row(work, temperature, name)
        for temperature in settings.temperatures
        for name in [STOCK_BATCH, *(arm.name for arm in work.arms)]
    ]
    tests, pit = _all_tests(work, exact)
    family = adjust(tests, settings.alpha)
    control_rows = [_control_row(work, control, records, len(tests)) for control, records in control_records]
    return AuditResults(
        provenance=provenance,
        settings=asdict(settings),
        documents=[one.document.document_id for one in work.documents],
        strategies=described,
        skipped=skipped,
        exact=exact,
        identity=identity,
        tests=family,
        controls=control_rows,
        pit=pit,
        checks=[
            *_identity_checks(identity, settings, exact),
            *_law_checks(family, settings),
            *_control_checks(control_rows),
        ],
    )


def _identity_row(work: Work, temperature: float, name: str) -> IdentityRow:
    ids = [one.document.document_id for one in work.documents]
    records = [work.journal[str(("identity", temperature, document, name))] for document in ids]
    references = [work.journal[str(("identity", temperature, document, STOCK))] for document in ids]
    return identity_row(name, temperature, records, references, ids)


def _all_tests(work: Work, exact: bool) -> tuple[list[Test], dict[str, list[float]]]:
    """The family, in a fixed order, and the PIT values of every sample as quantiles."""
    tests: list[Test] = []
    pit: dict[str, list[float]] = {}
    for temperature in work.settings.sampled:
        stock = list(work.law_records(temperature, STOCK, None))
        samples: list[tuple[str, Arm | None]] = [
            (STOCK, None),
            *((verification, arm) for verification in (KEYED, REJECTION) for arm in work.arms),
        ]
        for verification, arm in samples:
            records = list(work.law_records(temperature, verification, arm))
            name = STOCK if arm is None else arm.name
            law = merged(records)
            tests += law_tests(name, verification, temperature, law)
            pit[f"{name}, {verification}, {temperature}"] = _quantiles(law.pit.get(ALL, []))
            if arm is not None:
                tests += _sampled_metrics(work, name, verification, temperature, records, stock)
    if not exact:
        tests += _rounded_metrics(work)
    return tests, pit


def _sampled_metrics(
    work: Work,
    name: str,
    verification: str,
    temperature: float,
    records: Sequence[dict[str, Any]],
    stock: Sequence[dict[str, Any]],
) -> list[Test]:
    """Fresh randomness: texts differ, marks and lengths must agree on average."""
    found = []
    for metric in ("right", "lengths"):
        mine, stocks = by_document(records, metric), by_document(stock, metric)
        pairs = [(mine[document], stocks[document]) for document in sorted(mine.keys() & stocks.keys())]
        seed = work.settings.seed_of("bootstrap", name, verification, temperature, metric)
        found.append(metric_test(name, verification, temperature, metric, pairs, seed))
    return [test for test in found if test is not None]


def _rounded_metrics(work: Work) -> list[Test]:
    """In 16 bit texts may part at ties, so marks must agree on average only."""
    tests = []
    for temperature in work.settings.temperatures:
        for arm in work.arms:
            pairs = []
            for one in work.documents:
                mine, stocks = (
                    work.journal[str(("identity", temperature, one.document.document_id, name))]["right"]
                    for name in (arm.name, STOCK)
                )
                if stocks is not None:
                    pairs.append((float(mine), float(stocks)))
            seed = work.settings.seed_of("bootstrap", arm.name, temperature)
            test = metric_test(arm.name, "same seed", temperature, "right", pairs, seed)
            tests += [] if test is None else [test]
    return tests


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * _PIT_POINTS)] for i in range(_PIT_POINTS)] if ordered else []


def _control_row(work: Work, control: Control, records: list[dict[str, Any]], family_size: int) -> ControlRow:
    if control.check != LAW:
        faults = [record for record in records if is_fault(record)]
        tokens = sum(record["tokens"] for record in records)
        evidence = f"{len(records)} documents, {tokens} tokens, no difference beyond rounding"
        if faults:
            place = faults[0]["difference"]
            gap = "the text ends" if place["units"] is None else f"gap {place['units']:.3g} units of rounding"
            evidence = f"document {len(records)}, token {place['index'] + 1}: {gap}"
        return ControlRow(control.name, control.fault, control.check, bool(faults), control.intact, evidence)
    temperature = max(work.settings.sampled)
    tests = law_tests(control.name, REJECTION, temperature, merged(records))
    # As strict as the first step of Holm for the strategies' tests and these.
    level = work.settings.alpha / (family_size + len(tests))
    hits = sorted((test for test in tests if test.outcome.p_value <= level), key=lambda test: test.outcome.p_value)
    worst = min(tests, key=lambda test: test.outcome.p_value, default=None)
    evidence = "too few tokens to test"
    if worst is not None:
        evidence = (
            f"{len(hits)} of {len(tests)} tests; clearest: {worst.test}, {worst.stratum}, "
            f"statistic {worst.outcome.statistic:.3g}, p = {worst.outcome.p_value:.1e}"
        )
    return ControlRow(control.name, control.fault, control.check, bool(hits), control.intact, evidence, tests)


def _identity_checks(rows: Sequence[IdentityRow], settings: AuditSettings, exact: bool) -> list[Check]:
    checks = []
    for temperature in settings.temperatures:
        mine = [row for row in rows if row.temperature == temperature and row.arm != STOCK_BATCH]
        faulty = [row.arm for row in mine if row.faults]
        tokens = sum(row.tokens for row in mine)
        ties = sum(row.ties for row in mine)
        detail = f"{tokens} tokens compared"
        detail += "" if exact else f", {ties} ties within {settings.tie_units:g} units of rounding"
        detail += f"; faults in: {', '.join(faulty)}" if faulty else ", no fault"
        checks.append(Check(f"token identity at temperature {temperature:g}", not faulty, detail))
    changed = sum(row.marks_changed or 0 for row in rows if row.arm != STOCK_BATCH)
    if exact and any(row.marks_changed is not None for row in rows):
        checks.append(Check("task marks with the same seed", not changed, f"{changed} documents marked otherwise"))
    return checks


def _law_checks(tests: Sequence[Test], settings: AuditSettings) -> list[Check]:
    if not settings.sampled:
        return []
    refused = [test for test in tests if test.adjusted <= settings.alpha]
    smallest = min((test.outcome.p_value for test in tests), default=1.0)
    detail = f"{len(tests)} tests, smallest p = {smallest:.2g}, Holm at {settings.alpha:g}"
    detail += "".join(
        f"; {test.arm}, {test.verification}, {test.temperature:g}: {test.test}, {test.stratum}" for test in refused
    )
    return [Check("law of sampled tokens and task metrics", bool(tests) and not refused, detail)]


def _control_checks(rows: Sequence[ControlRow]) -> list[Check]:
    checks = []
    for row in rows:
        outcome = "failed" if row.failed else "passed"
        rightly = "as it should" if row.as_it_should else "as it should not"
        checks.append(Check(f"control: {row.name}", row.as_it_should, f"{outcome}, {rightly}; {row.evidence}"))
    return checks
