"""From the journal's records to findings: rows of the report, and whether each check was passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_specdec.audit.law import PIT, LawRecord
from hf_specdec.audit.statistics import (
    Outcome,
    detectable_bias,
    detectable_distance,
    holm,
    ks_test,
    paired_bootstrap,
    z_test,
)
from hf_specdec.bench.provenance import Provenance


@dataclass(frozen=True)
class IdentityRow:
    """All documents of one arm at one temperature, compared with stock `generate`.

    Attributes:
        tokens: compared, up to and with the first difference of each document.
        ties, faults: documents that part from stock, by kind.
        worst_units: the largest gap at a difference, in units of rounding; None if there is none.
        tokens_per_forward, acceptance: None for stock arms.
        marks_changed: documents marked otherwise than stock's text; None if no document is marked.
        places: the document, index, units and kind of every difference.
    """

    arm: str
    temperature: float
    documents: int
    tokens: int
    ties: int
    faults: int
    worst_units: float | None
    tokens_per_forward: float | None
    acceptance: float | None
    marks_changed: int | None
    places: list[dict[str, Any]]

    @property
    def per_thousand(self) -> float:
        """Differences of any kind per thousand tokens."""
        return 1000.0 * len(self.places) / self.tokens


@dataclass(frozen=True)
class FamilyTest:
    """One member of the family of tests.

    Attributes:
        arm, verification, temperature: what was sampled.
        test, stratum: which test, on which tokens.
        outcome: statistic, p-value, number of tokens.
        adjusted: Holm's p-value.
        detectable: the bias that a test of the law would have shown with probability 0.9.
        interval: of paired differences, the mean and its 95 % interval.
    """

    arm: str
    verification: str
    temperature: float
    test: str
    stratum: str
    outcome: Outcome
    adjusted: float = 1.0
    detectable: float | None = None
    interval: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class ControlRow:
    """What became of a negative control.

    Attributes:
        failed: whether the audit failed it.
        intact: whether there was no fault, so that it had to pass.
        evidence: where the fault was seen, in words.
        tests: its law tests, if that is its check.
    """

    name: str
    fault: str
    check: str
    failed: bool
    intact: bool
    evidence: str
    tests: list[FamilyTest] = field(default_factory=list)

    @property
    def as_it_should(self) -> bool:
        """Whether the audit treated it rightly."""
        return self.failed != self.intact


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class AuditResults:
    """Everything an audit found.

    Attributes:
        provenance: model, versions, machine, command.
        settings: the audit's numbers.
        documents: their ids.
        strategies: name and settings of each.
        skipped: registered strategies that could not run, with the reason.
        exact: whether tokens had to be equal without exception.
        identity, tests, controls: the findings.
        pit: PIT values by (arm, verification, temperature), as quantiles.
        checks: the verdict, line by line.
    """

    provenance: Provenance
    settings: dict[str, Any]
    documents: list[str]
    strategies: dict[str, str]
    skipped: dict[str, str]
    exact: bool
    identity: list[IdentityRow]
    tests: list[FamilyTest]
    controls: list[ControlRow]
    pit: dict[str, list[float]]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check was passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"passed": self.passed, **asdict(self)}


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
    units = [place["units"] for place in places if place["units"] is not None]
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
        ties=kinds.count("tie"),
        faults=kinds.count("fault"),
        worst_units=max(units) if units else None,
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
    return FamilyTest(arm, verification, temperature, metric, "documents", outcome, interval=interval)


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
