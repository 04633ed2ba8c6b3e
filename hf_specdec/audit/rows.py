"""From the journal's records to rows of the report and members of the family of tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hf_specdec.audit.differences import FAULT, TIE
from hf_specdec.audit.law import PIT, LawRecord
from hf_specdec.audit.results import DOCUMENTS, FamilyTest, IdentityRow
from hf_specdec.audit.statistics import detectable_bias, detectable_distance, holm, ks_test, paired_bootstrap, z_test


def identity_row(
    arm: str,
    temperature: float,
    records: Sequence[dict[str, Any]],
    references: Sequence[dict[str, Any]],
    ids: Sequence[str],
) -> IdentityRow:
    """Put the records of one arm together; `references` are stock's on the same documents."""
    places = [
        {"document": name, **record["difference"]}
        for name, record in zip(ids, records, strict=True)
        if record["difference"] is not None
    ]
    kinds = [place["kind"] for place in places]
    units = [abs(place["units"]) for place in places if place["units"] is not None]
    rounds, accepted, drafted = (
        sum(record.get(name, 0) for record in records) for name in ("rounds", "accepted", "drafted")
    )
    marked = [
        (record["right"], reference["right"])
        for record, reference in zip(records, references, strict=True)
        if reference["right"] is not None
    ]
    return IdentityRow(
        arm=arm,
        temperature=temperature,
        documents=len(records),
        tokens=sum(record["tokens"] for record in records),
        ties=kinds.count(TIE),
        faults=kinds.count(FAULT),
        worst_units=max(units) if units else None,
        taken_by_stock=sum(bool(place["taken_by_stock"]) for place in places),
        tokens_per_forward=(rounds + accepted) / rounds if rounds else None,
        acceptance=accepted / drafted if drafted else None,
        marks_changed=sum(mine != stocks for mine, stocks in marked) if marked else None,
        places=places,
    )


def law_tests(arm: str, verification: str, temperature: float, law: LawRecord) -> list[FamilyTest]:
    """All tests of one arm."""
    outcomes = [
        (test, stratum, z_test(sums)) for test, strata in law.sums.items() for stratum, sums in sorted(strata.items())
    ]
    outcomes += [(PIT, stratum, ks_test(values)) for stratum, values in sorted(law.pit.items())]
    return [FamilyTest(arm, verification, temperature, *outcome) for outcome in outcomes]


def metric_test(
    arm: str, verification: str, temperature: float, metric: str, pairs: Sequence[tuple[float, float]], seed: int
) -> FamilyTest | None:
    """A paired bootstrap of (strategy, stock), one pair a document."""
    result = paired_bootstrap([mine - stocks for mine, stocks in pairs], seed)
    if result is None:
        return None
    outcome, (low, high) = result
    interval = (outcome.statistic, low, high)
    return FamilyTest(arm, verification, temperature, metric, DOCUMENTS, outcome, interval=interval)


def adjust(tests: Sequence[FamilyTest], alpha: float) -> list[FamilyTest]:
    """The same tests with Holm's p-values and the bias each could have detected."""
    adjusted = holm([test.outcome.p_value for test in tests])
    return [
        replace(test, adjusted=p_value, detectable=_detectable(test, alpha, len(tests)))
        for test, p_value in zip(tests, adjusted, strict=True)
    ]


def _detectable(test: FamilyTest, alpha: float, family_size: int) -> float | None:
    if test.outcome.spread == 0 or test.interval is not None:
        return None
    find = detectable_distance if test.test == PIT else detectable_bias
    return find(test.outcome, alpha, family_size)


def merged(records: Iterable[dict[str, Any]]) -> LawRecord:
    """The law records of several batches as one."""
    law = LawRecord()
    for record in records:
        law.merge(LawRecord.from_dict(record["law"]))
    return law


def by_document(records: Iterable[dict[str, Any]], name: str) -> dict[str, float]:
    """Mean of what each document's texts hold under a name; documents without it are left out."""
    values: dict[str, list[float]] = {}
    for record in records:
        known = [float(value) for value in record[name] if value is not None]
        if known:
            values.setdefault(record["document"], []).extend(known)
    return {document: sum(found) / len(found) for document, found in values.items()}
