"""The report's plots, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

from hf_specdec.audit.law import ALL, PIT
from hf_specdec.audit.results import AuditResults, FamilyTest

_CONTROL, _STRATEGY, _LIMIT = "#b3362c", "#2c6fb3", "#777777"
_SMALLEST_P = 1e-30
_WIDTH = 9.0


def draw(name: str, results: AuditResults) -> str:
    """One plot: "law", "pit" or "ties"."""
    plot: Callable[[AuditResults], Figure] = {"law": _law, "pit": _pit, "ties": _ties}[name]
    buffer = io.StringIO()
    # Texts as texts, and ids that do not change from run to run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_specdec", "font.size": 9}):
        plot(results).savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def _law(results: AuditResults) -> Figure:
    """Every p-value of every arm, controls below the strategies."""
    groups: dict[str, list[FamilyTest]] = {}
    for test in results.tests:
        groups.setdefault(f"{test.arm}, {test.verification}", []).append(test)
    controls = {row.name: row.tests for row in results.controls if row.tests}
    lines = [*((name, tests, _STRATEGY) for name, tests in groups.items())]
    lines += [(f"control: {name}", tests, _CONTROL) for name, tests in controls.items()]
    figure, axes = _figure(0.26 * len(lines) + 1.0)
    for y, (_, tests, colour) in enumerate(lines):
        values = [max(test.outcome.p_value, _SMALLEST_P) for test in tests]
        axes.plot(values, [y] * len(values), "|", color=colour, markersize=9)
    level = results.settings["alpha"] / max(len(results.tests), 1)
    axes.axvline(level, color=_LIMIT, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlim(_SMALLEST_P / 10, 2)
    axes.set_yticks(range(len(lines)), [name for name, *_ in lines])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"p-value of each test, 1e-30 and less at the left edge; dashed: the first step of Holm, {level:.1e}"
    )
    axes.grid(axis="y", linewidth=0.3)
    return figure


def _pit(results: AuditResults) -> Figure:
    """Distribution functions of the PIT values minus the diagonal, with the band of a single test."""
    figure, axes = _figure(3.6)
    counts = [test.outcome.count for test in results.tests if test.test == PIT and test.stratum == ALL]
    for values in results.pit.values():
        if values:
            levels = (np.arange(len(values)) + 0.5) / len(values)
            axes.plot(values, levels - np.asarray(values), color=_STRATEGY, linewidth=0.7, alpha=0.6)
    if counts:
        family = max(len(results.tests), 1)
        band = float(stats.kstwo.isf(results.settings["alpha"] / family, min(counts)))
        for side in (-band, band):
            axes.axhline(side, color=_LIMIT, linewidth=1, linestyle="--")
    axes.set_xlim(0, 1)
    axes.set_xlabel("PIT value u; one line for each arm, verification and temperature")
    axes.set_ylabel("share of values below u, minus u")
    return figure


def _ties(results: AuditResults) -> Figure:
    """Gaps at first differences, stock's own batch noise beside the strategies."""
    figure, axes = _figure(2.8)
    names = list(dict.fromkeys(row.arm for row in results.identity))
    for y, name in enumerate(names):
        gaps = [place["units"] for row in results.identity if row.arm == name for place in row.places]
        known = [abs(gap) for gap in gaps if gap is not None]
        axes.plot(known, [y] * len(known), "|", color=_STRATEGY, markersize=9)
    axes.axvline(results.settings["tie_units"], color=_LIMIT, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("gap between the two candidates in units of rounding; dashed: what is a tie everywhere")
    axes.set_xlim(left=-0.2)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height))
    axes: Axes = figure.add_subplot()
    _unframe(axes, ("top", "right"))
    return figure, axes


def _unframe(axes: Axes, sides: Sequence[str]) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)
