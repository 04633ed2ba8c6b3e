"""From the finished work to the results: rows, the family of tests, controls, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hf_specdec.audit.arms import REJECTION, Arm
from hf_specdec.audit.checks import SampleName, control_checks, identity_checks, law_checks
from hf_specdec.audit.controls import LAW, Control
from hf_specdec.audit.differences import is_exact
from hf_specdec.audit.law import ALL
from hf_specdec.audit.results import AuditResults, ControlRow, FamilyTest, IdentityRow
from hf_specdec.audit.rows import adjust, by_document, identity_row, law_tests, merged, metric_test
from hf_specdec.audit.work import STOCK, STOCK_BATCH, Work, is_fault
from hf_specdec.bench import Provenance

_PIT_POINTS = 200


def collect(work: Work, provenance: Provenance, skipped: dict[str, str], controls: Sequence[Control]) -> AuditResults:
    """Everything that the journal of a finished run says."""
    settings, exact = work.settings, is_exact(work.model)
    identity = [row for temperature in settings.temperatures for row in _identity_rows(work, temperature)]
    tests, pit = _all_tests(work, exact)
    family = adjust(tests, settings.alpha)
    control_rows = [_control_row(work, control, len(tests)) for control in controls]
    return AuditResults(
        provenance=provenance,
        settings=asdict(settings),
        documents=[one.document.document_id for one in work.documents],
        strategies={arm.name: arm.described for arm in work.arms},
        skipped=skipped,
        exact=exact,
        identity=identity,
        tests=family,
        controls=control_rows,
        pit=pit,
        checks=[
            *identity_checks(identity, settings, exact),
            *law_checks(family, _sample_names(work), settings),
            *control_checks(control_rows),
        ],
    )


def _identity_rows(work: Work, temperature: float) -> list[IdentityRow]:
    """Stock in batches, then the arms."""
    groups = work.groups()
    found = {STOCK_BATCH: [one for group in groups for one in work.stock_batch_records(temperature, group)]}
    for arm in work.arms:
        found[arm.name] = [one for group in groups for one in work.identity_records(temperature, group, arm)]
    documents = [one for group in groups for one in group]
    references = [work.reference(temperature, one) for one in documents]
    ids = [one.document.document_id for one in documents]
    return [identity_row(name, temperature, records, references, ids) for name, records in found.items()]


def _samples(work: Work) -> list[tuple[float, str, Arm | None]]:
    return [(temperature, *sample) for temperature in work.settings.sampled for sample in work.samples()]


def _sample_names(work: Work) -> list[SampleName]:
    return [(_arm_name(arm), verification, temperature) for temperature, verification, arm in _samples(work)]


def _arm_name(arm: Arm | None) -> str:
    return STOCK if arm is None else arm.name


def _all_tests(work: Work, exact: bool) -> tuple[list[FamilyTest], dict[str, list[float]]]:
    """The family, in a fixed order, and the PIT values of every sample as quantiles."""
    tests: list[FamilyTest] = []
    pit: dict[str, list[float]] = {}
    for temperature, verification, arm in _samples(work):
        records = list(work.law_records(temperature, verification, arm))
        name = _arm_name(arm)
        law = merged(records)
        tests += law_tests(name, verification, temperature, law)
        pit[f"{name}, {verification}, {temperature}"] = _quantiles(law.pit.get(ALL, []))
        if arm is None:
            stock = records
        else:
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
) -> list[FamilyTest]:
    """Fresh randomness: texts differ, marks and lengths must agree on average."""
    found = []
    for metric in ("right", "lengths"):
        mine, stocks = by_document(records, metric), by_document(stock, metric)
        pairs = [(mine[document], stocks[document]) for document in sorted(mine.keys() & stocks.keys())]
        seed = work.settings.seed_of("bootstrap", name, verification, temperature, metric)
        found.append(metric_test(name, verification, temperature, metric, pairs, seed))
    return [test for test in found if test is not None]


def _rounded_metrics(work: Work) -> list[FamilyTest]:
    """In 16 bit texts may part at ties, so marks must agree on average only."""
    tests = []
    for temperature in work.settings.temperatures:
        for arm in work.arms:
            pairs = []
            for one in work.documents:
                (mine,), stocks = work.identity_records(temperature, [one], arm), work.reference(temperature, one)
                if stocks["right"] is not None:
                    pairs.append((float(mine["right"]), float(stocks["right"])))
            seed = work.settings.seed_of("bootstrap", arm.name, temperature)
            test = metric_test(arm.name, "same seed", temperature, "right", pairs, seed)
            tests += [] if test is None else [test]
    return tests


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * _PIT_POINTS)] for i in range(_PIT_POINTS)] if ordered else []


def _control_row(work: Work, control: Control, family_size: int) -> ControlRow:
    return _law_control(work, control, family_size) if control.check == LAW else _identity_control(work, control)


def _identity_control(work: Work, control: Control) -> ControlRow:
    records = work.control_records(control)
    faults = [record for record in records if is_fault(record)]
    if faults:
        place = faults[0]["difference"]
        evidence = f"document {len(records)}, token {place['index'] + 1}: {_gap(place)}"
    else:
        tokens = sum(record["tokens"] for record in records)
        evidence = f"{len(records)} documents, {tokens} tokens, no difference beyond rounding"
        evidence += "" if control.intact else "; a fault may need more or longer documents to show"
    return ControlRow(control.name, control.fault, control.check, bool(faults), control.intact, evidence)


def _gap(place: dict[str, Any]) -> str:
    if place["units"] is None:
        return "a text ends, or a score is not finite"
    noise = "" if place["noise"] is None else f", noise {place['noise']:.3g}"
    return f"gap {place['units']:.3g} units of rounding{noise}"


def _law_control(work: Work, control: Control, family_size: int) -> ControlRow:
    law = merged(work.control_records(control))
    tests = law_tests(control.name, REJECTION, max(work.settings.sampled), law)
    # As strict as the first step of Holm for the strategies' tests and these.
    level = work.settings.alpha / (family_size + len(tests))
    hits = [test for test in tests if test.outcome.p_value <= level]
    worst = min(tests, key=lambda test: test.outcome.p_value)
    evidence = (
        f"{len(hits)} of {len(tests)} tests; clearest: {worst.test}, {worst.stratum}, "
        f"statistic {worst.outcome.statistic:.3g}, p {_p_word(worst.outcome.p_value)}"
    )
    evidence += "" if hits or control.intact else "; a fault may need more control tokens to show"
    return ControlRow(control.name, control.fault, control.check, bool(hits), control.intact, evidence, tests)


def _p_word(p_value: float) -> str:
    return f"= {p_value:.1e}" if p_value > 0 else "too small for a float"
