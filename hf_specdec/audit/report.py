"""The results as JSON, as Markdown, and as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hf_specdec.atomic import replace_file
from hf_specdec.audit.plots import draw
from hf_specdec.audit.results import AuditResults
from hf_specdec.audit.sections import Table, sections, verdict
from hf_specdec.bench.tables import markdown_table

_TITLE = "Identity audit"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; vertical-align: top; }
.passed, .failed { padding: .6rem 1rem; color: white; font-weight: 600; }
.passed { background: #2e7d4f; } .failed { background: #b3362c; }
img { max-width: 100%; }
"""


def write_report(results: AuditResults, folder: Path) -> None:
    """Write `audit.json`, `audit.md` and `audit.html` into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "audit.json": json.dumps(results.to_dict(), indent=1),
        "audit.md": to_markdown(results),
        "audit.html": to_html(results),
    }
    for name, text in texts.items():
        # Processes that shared the work all write the report.
        replace_file(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))


def to_markdown(results: AuditResults) -> str:
    """All but the plots."""
    parts = [f"# {_TITLE}: {results.provenance.model}"]
    for section in sections(results):
        parts += [f"## {section.title}", section.text]
        parts += [markdown_table(table.header, [_escaped(row) for row in table.rows]) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def to_html(results: AuditResults) -> str:
    """The page, with plots and style inside."""
    title = html.escape(f"{_TITLE}: {results.provenance.model}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f'<p class="{"passed" if results.passed else "failed"}">{html.escape(verdict(results))}</p>',
    ]
    for section in sections(results):
        parts.append(f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>")
        parts += [_image(name, draw(name, results)) for name in section.plots]
        parts += [_html_table(table) for table in section.tables]
    return "\n".join([*parts, "</body></html>"])


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _image(name: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'<p><img alt="{name}" src="data:image/svg+xml;base64,{data}"></p>'
