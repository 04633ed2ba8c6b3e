"""`hf-specdec audit` as a user meets it."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

import audits
from docs_hub import DRAFT, build_hub
from hf_specdec.audit import AuditDependencyError, read_documents
from hf_specdec.audit.differences import Difference
from hf_specdec.audit.documents import encode_documents
from hf_specdec.audit.extras import require_extras
from hf_specdec.cli import app
from hf_specdec.cli.audit_progress import audit_progress


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose choices are not near-ties, so that faults show."""
    folder = tmp_path_factory.mktemp("hub")
    build_hub(folder)
    return folder / DRAFT


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    prompts = ["the boat leaves the harbour and then the boat", "a gull follows the boat", "the sun sleeps at night"]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def small(model_folder: Path, tasks: Path, tmp_path: Path) -> list[object]:
    """A greedy audit of a strategy, in seconds."""
    return [
        "--model", model_folder, "--tasks", tasks, "--output", tmp_path / "report", "--temperatures", "0",
        "--strategies", "none", "prompt_lookup:nodes=4,max_ngram=2", "--max-new-tokens", "24", "--no-chat",
    ]  # fmt: skip


def test_a_passed_audit(small: list[object], tmp_path: Path, model_folder: Path) -> None:
    result = invoke(*small)
    assert result.exit_code == 0, result.output
    assert "token identity at temperature 0" in result.stdout
    assert "audit.html" in result.stderr.replace("\n", "")
    # No terminal: a line for each tenth that is new.
    lines = [line for line in result.stderr.splitlines() if "%" in line]
    assert lines == [
        *(f"Token identity: {percent} %" for percent in (10, 30, 50, 100)),
        *(f"Negative controls: {percent} %" for percent in (30, 60, 100)),
    ]
    record = json.loads((tmp_path / "report/audit.json").read_text())
    assert record["passed"]
    assert list(record["strategies"]) == ["none", "prompt_lookup:nodes=4,max_ngram=2"]
    assert "nodes=4" in record["strategies"]["prompt_lookup:nodes=4,max_ngram=2"]
    assert len(record["documents"]) == 3
    # Reports name files, not the folders of the machine they were made on.
    for name in ("audit.json", "audit.md", "audit.html"):
        text = (tmp_path / "report" / name).read_text()
        assert str(model_folder) not in text
        assert str(tmp_path) not in text


def test_bars_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    monkeypatch.setattr("hf_specdec.cli.audit_progress.message_console", lambda: console)
    with audit_progress() as report:
        report("token identity", 1, 2)
        report("token identity", 2, 2)
        report("negative controls", 1, 3)
    shown = written.getvalue()
    assert "Token identity" in shown
    assert "100%" in shown
    assert "33%" in shown


def test_a_failed_check_is_exit_status_1(small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audits.part(monkeypatch, Difference(2, None, "fault"))
    result = invoke(*small)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "FAILED" in (tmp_path / "report/audit.md").read_text()


def test_all_strategies_and_several_values_behind_one_option(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    result = invoke(
        "--model", model_folder, "--output", tmp_path / "all", "--tasks", f"{tasks}:2", "--strategies", "all",
        "--temperatures", "0", "1.5", "--max-new-tokens", "6", "--law-tokens", "40", "--control-tokens", "41",
        "--rows", "4", "--tie-units", "3", "--seed", "5", "--max-prompt-tokens", "9",
    )  # fmt: skip
    # So few tokens cannot show the faults of the law, and the audit says so.
    assert result.exit_code == 1
    record = json.loads((tmp_path / "all/audit.json").read_text())
    assert record["settings"] == {
        "temperatures": [0.0, 1.5],
        "max_new_tokens": 6,
        "law_tokens": 40,
        "control_tokens": 41,
        "rows": 4,
        "tie_units": 3.0,
        "seed": 5,
        "alpha": 1e-3,
    }
    assert set(record["skipped"]) == {"assisted", "medusa", "tree"}
    assert {row["temperature"] for row in record["identity"]} == {0.0, 1.5}
    assert not [check for check in record["checks"] if not check["passed"] and "control" not in check["name"]]
    # What was run: batches of so many rows, behind prompts of so many tokens.
    lines = [json.loads(line) for line in (tmp_path / "all/journal.jsonl").read_text().splitlines()[1:]]
    assert {len(line["value"]["lengths"]) for line in lines if "law" in line["value"]} == {4}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    encoded = encode_documents(read_documents(tasks, 2), tokenizer, max_prompt_tokens=9)
    assert [one.input_ids.shape[1] for one in encoded] == [9, 9]
    assert all(any(one.key in line["key"] for one in encoded) for line in lines)


def test_another_audit_in_the_folder_is_refused(small: list[object]) -> None:
    assert invoke(*small).exit_code == 0
    assert invoke(*small).exit_code == 0
    result = invoke(*small, "--seed", 3)
    assert result.exit_code == 1
    assert "differs in: seed" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("changed", "value", "status", "message"),
    [
        ("--tasks", "nowhere.jsonl", 1, "no file at"),
        ("--model", "/nowhere", 1, "nowhere"),
        ("--strategies", "magic", 2, "magic"),
        ("--strategies", "none:colour=1", 2, "no setting"),
        ("--strategies", "tree", 1, "give assistant"),
        ("--strategies", "prompt_lookup:num_tokens=x", 2, "--strategies"),
        ("--strategies", ["all", "none"], 2, "stands alone"),
        ("--strategies", ["none", "none"], 2, "named twice"),
        ("--max-new-tokens", "4000", 1, "fewer new tokens"),
        ("--max-new-tokens", "1020", 1, "max_prompt_tokens=4 or less"),
        ("--output", __file__, 2, "--output"),
        ("--temperatures", "warm", 2, "--temperatures"),
        ("--dtype", "int8", 2, "dtype"),
        ("--law-tokens", "0", 2, "law-tokens"),
        ("--device", "toaster", 2, "device"),
        *([] if torch.cuda.is_available() else [("--device", "cuda:0", 2, "--device")]),
    ],
)
def test_mistakes_are_one_line(
    changed: str, value: str | list[str], status: int, message: str, model_folder: Path, tasks: Path, tmp_path: Path
) -> None:
    options: dict[str, object] = {"--model": model_folder, "--tasks": tasks, "--output": tmp_path / "out"}
    options[changed] = value
    words = [[name, *(value if isinstance(value, list) else [value])] for name, value in options.items()]
    result = invoke(*(word for option in words for word in option))
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name))
    with pytest.raises(AuditDependencyError, match=r"scipy: pip install 'hf_specdec\[bench\]'"):
        require_extras()


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    """In a process of its own, which cannot find the packages; other commands still work."""
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('scipy', 'matplotlib') else find(name, *a)\n"
        "from hf_specdec.cli import main\n"
        f"sys.argv = ['hf-specdec', 'audit', '--model', 'x', '--tasks', 'y', '--output', {str(tmp_path)!r}]\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "hf_specdec[bench]" in result.stderr.replace("\n", "")
    assert "Traceback" not in result.stderr
