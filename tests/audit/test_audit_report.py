from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import audits
import zoo
from hf_specdec import Assisted, PromptLookup
from hf_specdec.audit import AuditResults, write_report
from hf_specdec.audit.differences import FAULT, TIE, Difference
from hf_specdec.audit.law import ALL, LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT
from hf_specdec.audit.statistics import detectable_bias, detectable_distance, holm

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> AuditResults:
    model = audits.make()
    return audits.audit(
        tmp_path_factory.mktemp("audit"),
        model,
        {"lookup <b>&": PromptLookup(max_ngram=2), "assisted": Assisted()},
        assistant=zoo.make_draft(model),
        changes={"control_tokens": 400, "max_new_tokens": 12},
    )


def test_the_page_needs_nothing_beside_it(results: AuditResults, tmp_path: Path) -> None:
    write_report(results, tmp_path / "new")
    source = (tmp_path / "new" / "audit.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    page.close()
    assert page.open == []
    assert len(page.references) == 2
    for reference in page.references:
        kind, data = reference.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(data))
        assert root.tag.endswith("svg")
    assert not re.search(r"url\(|@import|<script|<link", source)
    # A name is text, whatever it holds.
    assert any("lookup <b>&" in text for text in page.text)


def test_json_holds_everything(results: AuditResults, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    record = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert record["passed"] == results.passed
    assert len(record["tests"]) == len(results.tests)
    assert [row["arm"] for row in record["identity"]] == [row.arm for row in results.identity]
    assert record["provenance"]["dtype"] == "float32"
    assert record["documents"] == ["list/1", "sums/1", "list/2", "sums/2"]


def test_the_printed_power_is_that_of_the_whole_family(results: AuditResults, tmp_path: Path) -> None:
    alpha, family = results.settings["alpha"], len(results.tests)
    assert family > 20
    laws = [test for test in results.tests if test.interval is None and test.outcome.spread > 0]
    for test in laws:
        detectable = detectable_distance if test.test == PIT else detectable_bias
        assert test.detectable == detectable(test.outcome, alpha, family)
    assert [test.adjusted for test in results.tests] == holm([test.outcome.p_value for test in results.tests])
    assert all(test.detectable is None for test in results.tests if test not in laws)
    write_report(results, tmp_path)
    lines = (tmp_path / "audit.md").read_text(encoding="utf-8").splitlines()
    for arm, rule in (("stock", "stock"), ("assisted", "keyed"), ("assisted", "rejection")):
        (line,) = [line for line in lines if line.startswith(f"| 1 | {arm} | {rule} | ") and line.count("|") == 12]
        by_name = {test.test: test for test in laws if (test.arm, test.verification, test.stratum) == (arm, rule, ALL)}
        printed = [
            "-" if name not in by_name else f"{by_name[name].detectable:.2g}"
            for name in (LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT)
        ]
        assert line.endswith(f"| {' | '.join(printed)} |")


def test_markdown_tables_are_whole(results: AuditResults, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    text = (tmp_path / "audit.md").read_text(encoding="utf-8")
    for title in ("Verdict", "Token identity", "Law of sampled tokens", "Negative controls", "Setup"):
        assert f"\n## {title}\n" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert "residual from p" in text


def test_plots_come_out_alike(results: AuditResults, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_report(results, tmp_path / folder)
    assert (tmp_path / "one/audit.html").read_bytes() == (tmp_path / "two/audit.html").read_bytes()


def test_the_tie_table_of_16_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies before stock; faults before ties, the wider gap first, and first of all a text that ends."""
    answers = dict(zip([2.5, -9.0, 4.0, None], audits.DOCUMENTS, strict=True))
    prompts = {audits.TOKENIZER(one.text).input_ids[-1]: gap for gap, one in answers.items()}
    assert len(prompts) == 4

    def told(model: Any, prompt: torch.Tensor, *arguments: Any, **options: Any) -> Difference:
        units = prompts[int(prompt[0, -1])]
        kind = FAULT if units in (None, 4.0) else TIE
        return Difference(4, units, kind, *((None, None) if units is None else (3.25, kind == TIE)))

    monkeypatch.setattr("hf_specdec.audit.work.first_difference", lambda *arguments: 4)
    monkeypatch.setattr("hf_specdec.audit.work.classify", told)
    monkeypatch.setattr("hf_specdec.audit.run.controls", list)
    model = audits.make().to(torch.bfloat16)
    changes = {"temperatures": (0.0,), "max_new_tokens": 8}
    tied = audits.audit(tmp_path / "run", model, {"lookup": PromptLookup()}, changes=changes)
    write_report(tied, tmp_path)
    text = (tmp_path / "audit.md").read_text(encoding="utf-8")
    table = text[text.index("| Arm | T | Document | Token | Gap | Noise | Taken by stock | Kind |") :].splitlines()
    cells = [line.strip("| ").split(" | ") for line in table[2:10]]
    expected = [
        ["-", "-", "-", "fault"],
        ["4.00", "3.25", "no", "fault"],
        ["-9.00", "3.25", "yes", "tie"],
        ["2.50", "3.25", "yes", "tie"],
    ]
    assert [row[0] for row in cells] == ["lookup"] * 4 + ["stock, batch of 8"] * 4
    assert [row[4:] for row in cells] == expected * 2
    assert "at most 8 units of rounding, in noisy places 2 times the noise up to 16 units. " in text
    assert 'alt="ties"' in (tmp_path / "audit.html").read_text(encoding="utf-8")
