"""The report as headings, sentences and tables, before it is Markdown or HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.audit.differences import FAULT, tie_bound
from hf_specdec.audit.law import ALL, LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT
from hf_specdec.audit.results import DOCUMENTS, AuditResults, FamilyTest, IdentityRow
from hf_specdec.audit.work import BATCH_ROWS, STOCK_BATCH

_MAX_PLACES = 60
_MAX_TESTS = 12
_NONE = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it.

    Attributes:
        plots: names of plots, for formats that have them.
    """

    title: str
    text: str
    tables: Sequence[Table] = field(default_factory=list)
    plots: Sequence[str] = field(default_factory=list)


def verdict(results: AuditResults) -> str:
    """The report's first line."""
    failed = sum(not check.passed for check in results.checks)
    return "Every check passed." if results.passed else f"FAILED: {failed} of {len(results.checks)} checks."


def sections(results: AuditResults) -> list[Section]:
    """The whole report in order."""
    parts = [_checks(results), _identity(results)]
    sampled = any(temperature > 0 for temperature in results.settings["temperatures"])
    parts += [_law(results)] if sampled else []
    parts += [_metrics(results)] if sampled or results.tests else []
    return [*parts, _controls(results), _setup(results)]


def _checks(results: AuditResults) -> Section:
    rows = [["passed" if one.passed else "FAILED", one.name, one.detail] for one in results.checks]
    return Section("Verdict", verdict(results), [Table(["", "Check", "Detail"], rows)])


def _identity(results: AuditResults) -> Section:
    text = (
        "Each strategy against stock generate, which decodes each document alone. At temperature 0 strategies do so "
        f"too; above it they decode up to {BATCH_ROWS} documents in a batch, each with the keyed noise that stock had "
        f"for it. {_rule(results)} Tokens behind a document's first difference are not compared. The arm in batches "
        "is stock generate too: its differences are this machine's own noise and fail nothing."
    )
    places = [(row, place) for row in results.identity for place in row.places]
    if len(places) > _MAX_PLACES:
        text += f" {_MAX_PLACES} of {len(places)} differences are listed, the worst first; the JSON file holds all."
    tables = [_arms(results), *([_places(places)] if places else [])]
    return Section("Token identity", text, tables, [] if results.exact else ["ties"])


def _rule(results: AuditResults) -> str:
    if results.exact:
        return "The model computes in 32 bit or more, so any difference is a fault."
    bound = tie_bound(results.settings["tie_units"])
    return (
        f"A difference is a tie if the gap between the two candidates is at most {bound}. A unit is the distance of "
        "neighbouring numbers of the format at the size of the logits. Noise is how far stock's own rounding moves "
        "the gap when it reads the same text behind several widths of padding; the other token is taken by stock, "
        "too, where stock chooses it in one of these readings. A fault whose gaps are all this small shows in the "
        "rate of differences and in how few of them stock takes, too, which fail nothing."
    )


def _arms(results: AuditResults) -> Table:
    header = (
        "T,Arm,Documents,Tokens,Differences per 1000,Ties,Faults,Largest gap,Taken by stock,Tokens per forward,"
        "Accepted,Marks changed"
    )
    rows = [
        [
            f"{row.temperature:g}",
            row.arm,
            str(row.documents),
            str(row.tokens),
            f"{row.per_thousand:.3g}",
            str(row.ties),
            str(row.faults),
            _number(row.worst_units, "{:.2g}"),
            _NONE if results.exact else str(row.taken_by_stock),
            _number(row.tokens_per_forward, "{:.2f}"),
            _number(row.acceptance, "{:.0%}"),
            _NONE if row.marks_changed is None else str(row.marks_changed),
        ]
        for row in results.identity
    ]
    return Table(header.split(","), rows)


def _places(places: Sequence[tuple[IdentityRow, dict[str, Any]]]) -> Table:
    listed = [
        [
            row.arm,
            f"{row.temperature:g}",
            place["document"],
            str(place["index"] + 1),
            _number(place["units"], "{:.2f}"),
            _number(place["noise"], "{:.2f}"),
            {None: _NONE, True: "yes", False: "no"}[place["taken_by_stock"]],
            place["kind"],
        ]
        for row, place in sorted(places, key=_rank)[:_MAX_PLACES]
    ]
    return Table(["Arm", "T", "Document", "Token", "Gap", "Noise", "Taken by stock", "Kind"], listed)


def _rank(listed: tuple[IdentityRow, dict[str, Any]]) -> tuple[bool, bool, float]:
    """Strategies before stock, faults before ties, the wider gap first; a text that ends has the widest of all."""
    row, place = listed
    units = math.inf if place["units"] is None else abs(place["units"])
    return row.arm == STOCK_BATCH, place["kind"] != FAULT, -units


def _law(results: AuditResults) -> Section:
    groups: dict[tuple[str, str, float], list[FamilyTest]] = {}
    for test in results.tests:
        if test.stratum != DOCUMENTS:
            groups.setdefault((test.arm, test.verification, test.temperature), []).append(test)
    rows = [
        [
            f"{temperature:g}",
            arm,
            verification,
            str(max(test.outcome.count for test in tests)),
            str(len(tests)),
            f"{min(test.outcome.p_value for test in tests):.2g}",
            f"{min(test.adjusted for test in tests):.2g}",
            *(_detectable(tests, name) for name in (LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT)),
        ]
        for (arm, verification, temperature), tests in groups.items()
    ]
    header = (
        "T,Arm,Verification,Tokens,Tests,Smallest p,Holm's p,Detectable: log p (nats),log q/p (nats),membership,PIT"
    )
    smallest = sorted(results.tests, key=lambda test: test.outcome.p_value)[:_MAX_TESTS]
    clearest = [
        [
            test.arm,
            test.verification,
            f"{test.temperature:g}",
            test.test,
            test.stratum,
            str(test.outcome.count),
            f"{test.outcome.statistic:.3g}",
            f"{test.outcome.p_value:.2g}",
            f"{test.adjusted:.2g}",
        ]
        for test in smallest
    ]
    text = (
        "Fresh randomness. Every sampled token is compared with the model's own probabilities from a fresh forward "
        f"over the finished text. The family has {len(results.tests)} tests; Holm bounds its error by "
        f"{results.settings['alpha']:g}. Detectable is the smallest bias per token that the test over all tokens "
        "would have shown with probability 0.9. The second table holds the smallest p-values."
    )
    tables = [
        Table(header.split(","), rows),
        Table("Arm,Verification,T,Test,Tokens in,Count,Statistic,p,Holm's p".split(","), clearest),
    ]
    return Section("Law of sampled tokens", text, tables, ["law", "pit"])


def _metrics(results: AuditResults) -> Section:
    rows = [
        [
            f"{test.temperature:g}",
            test.arm,
            test.verification,
            test.test,
            str(test.outcome.count),
            "{:+.3g} ({:+.3g} to {:+.3g})".format(*test.interval),
            f"{test.outcome.p_value:.2g}",
            f"{test.adjusted:.2g}",
        ]
        for test in results.tests
        if test.interval is not None
    ]
    text = (
        "Strategy minus stock, paired by document: share of right answers (documents with a known answer) and length "
        "in tokens, with bootstrap intervals of 95 %. These tests are in one family with those of the law and weak "
        "beside them. Ten documents at least are needed, and some twenty that differ for a test to fail."
    )
    header = "T,Arm,Verification,Metric,Documents,Mean difference,p,Holm's p".split(",")
    return Section("Task metrics", text, [Table(header, rows)] if rows else [])


def _controls(results: AuditResults) -> Section:
    rows = [
        [
            row.name,
            row.fault,
            row.check,
            "failed" if row.failed else "passed",
            "yes" if row.as_it_should else "NO",
            row.evidence,
        ]
        for row in results.controls
    ]
    text = (
        "The loop with a fault built in, judged by the same tests, as strictly. Each must fail; the two without a "
        "fault use the same drafter and must pass. A control that is not treated so fails the audit."
    )
    table = Table(["Control", "Fault", "Check", "Outcome", "As it should", "Evidence"], rows)
    return Section("Negative controls", text, [table])


def _setup(results: AuditResults) -> Section:
    provenance, settings = results.provenance, results.settings
    rows = [
        ["Model", provenance.model],
        ["Draft model", provenance.draft or "none"],
        ["Number format", provenance.dtype],
        ["Attention", provenance.attention],
        ["Device", f"{provenance.device}, {provenance.cores} cores, {provenance.threads} threads"],
        ["Versions", ", ".join(f"{name} {version}" for name, version in provenance.versions.items())],
        ["Date", provenance.date],
        ["Documents", f"{len(results.documents)}, at most {settings['max_new_tokens']} new tokens each"],
        ["Settings", ", ".join(f"{name}={value}" for name, value in settings.items())],
        *([f"Strategy {name}", text] for name, text in results.strategies.items()),
        *([f"Left out: {name}", reason] for name, reason in results.skipped.items()),
        *([["Command", provenance.command]] if provenance.command else []),
    ]
    text = (
        "Sampling means the temperature alone: penalties and nucleus sizes of the model's own generation config were "
        "switched off for all arms."
    )
    return Section("Setup", text, [Table(["", ""], rows)])


def _detectable(tests: Sequence[FamilyTest], name: str) -> str:
    whole = [test.detectable for test in tests if test.test == name and test.stratum == ALL]
    return _number(whole[0] if whole else None, "{:.2g}")


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)
