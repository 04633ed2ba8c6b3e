"""What an audit found: rows of comparisons, tests, controls, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_specdec.audit.statistics import Outcome
from hf_specdec.bench.provenance import Provenance

DOCUMENTS = "documents"
"""The stratum of tests that compare documents, not tokens."""


@dataclass(frozen=True)
class IdentityRow:
    """All documents of one arm at one temperature, compared with stock `generate`.

    Attributes:
        tokens: compared, up to and with the first difference of each document.
        ties, faults: documents that part from stock, by kind.
        worst_units: the largest gap at a difference, in units of rounding; None if there is none.
        taken_by_stock: differences at which stock takes the other token in one of its own readings.
        tokens_per_forward, acceptance: None for stock arms.
        marks_changed: documents marked otherwise than stock's text; None if no document is marked.
        places: the document of every difference, and what `Difference` says of it.
    """

    arm: str
    temperature: float
    documents: int
    tokens: int
    ties: int
    faults: int
    worst_units: float | None
    taken_by_stock: int
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
