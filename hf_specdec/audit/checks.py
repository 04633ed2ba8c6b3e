"""The verdict, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specdec.audit.differences import tie_bound
from hf_specdec.audit.law import ALL, LOG_LIKELIHOOD
from hf_specdec.audit.results import Check, ControlRow, FamilyTest, IdentityRow
from hf_specdec.audit.settings import AuditSettings
from hf_specdec.audit.statistics import MIN_TOKENS
from hf_specdec.audit.work import STOCK_BATCH


def identity_checks(rows: Sequence[IdentityRow], settings: AuditSettings, exact: bool) -> list[Check]:
    """One for each temperature, and one for the marks."""
    checks = []
    for temperature in settings.temperatures:
        mine = [row for row in rows if row.temperature == temperature and row.arm != STOCK_BATCH]
        faulty = [row.arm for row in mine if row.faults]
        tokens = sum(row.tokens for row in mine)
        ties = sum(row.ties for row in mine)
        detail = f"{tokens} tokens compared"
        detail += "" if exact else f", {ties} ties within {tie_bound(settings.tie_units)}"
        detail += f"; faults in: {', '.join(faulty)}" if faulty else ", no fault"
        checks.append(Check(f"token identity at temperature {temperature:g}", not faulty, detail))
    changed = sum(row.marks_changed or 0 for row in rows if row.arm != STOCK_BATCH)
    if exact and any(row.marks_changed is not None for row in rows):
        checks.append(Check("task marks with the same seed", not changed, f"{changed} documents marked otherwise"))
    return checks


SampleName = tuple[str, str, float]
"""Arm, verification, temperature."""


def law_checks(tests: Sequence[FamilyTest], samples: Sequence[SampleName], settings: AuditSettings) -> list[Check]:
    """One for the whole family; a sample of a few tokens proves nothing."""
    if not samples and not tests:
        return []
    judged = {
        (test.arm, test.verification, test.temperature)
        for test in tests
        if (test.test, test.stratum) == (LOG_LIKELIHOOD, ALL) and test.outcome.count >= MIN_TOKENS
    }
    untested = [sample for sample in samples if sample not in judged]
    refused = [test for test in tests if test.adjusted <= settings.alpha]
    smallest = min((test.outcome.p_value for test in tests), default=1.0)
    detail = f"{len(tests)} tests, smallest p = {smallest:.2g}, Holm at {settings.alpha:g}"
    detail += "".join(
        f"; {test.arm}, {test.verification}, {test.temperature:g}: {test.test}, {test.stratum}" for test in refused
    )
    detail += "".join(f"; {arm}, {rule}, {temperature:g}: too few tokens" for arm, rule, temperature in untested)
    return [Check("law of sampled tokens and task metrics", not refused and not untested, detail)]


def control_checks(rows: Sequence[ControlRow]) -> list[Check]:
    """One for each control."""
    checks = []
    for row in rows:
        seen = "fault seen" if row.failed else "no fault seen"
        rightly = "rightly" if row.as_it_should else "wrongly"
        checks.append(Check(f"control: {row.name}", row.as_it_should, f"{seen}, {rightly}; {row.evidence}"))
    return checks
