from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hf_specdec.bench import read_results

SCRIPT = Path(__file__).parents[2] / "evals" / "speed" / "run.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_the_speed_script_stores_rows_and_tables(tiny_model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "results" / "first.jsonl"
    finished = run_script(
        f"--model={tiny_model_folder}",
        "--dtype=float32",
        "--num-prompts=1",
        "--max-new-tokens=4",
        "--arms=stock,tree",
        "--draft-layers=1",
        "--draft-tokens=2",
        "--batch",
        "--output",
        str(output),
    )
    assert finished.returncode == 0, finished.stderr
    results = read_results(output)
    assert len(results.speed) == 6 * 2
    assert all(row.identical for row in results.speed)
    assert [row.arm for row in results.batch] == ["stock", "tree"]
    assert "| tree |" in output.with_suffix(".md").read_text()
    # Stored results name files, not the folders of the machine they were made on.
    assert str(tmp_path) not in output.read_text()
    assert str(tiny_model_folder) not in output.read_text()
    assert f"--model={tiny_model_folder.name}" in results.provenance.command


def test_arms_that_remember_are_made_by_the_script(tiny_model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "kept.jsonl"
    arms = ["auto:nodes=4", "suffix_kept", "recycling_kept", "auto_kept", "auto_filled"]
    finished = run_script(
        f"--model={tiny_model_folder}",
        "--dtype=float32",
        "--num-prompts=1",
        "--max-new-tokens=4",
        f"--arms={','.join(arms)}",
        "--draft-layers=0",
        "--batch",
        "--output",
        str(output),
    )
    assert finished.returncode == 0, finished.stderr
    assert "Filled the table" in finished.stdout
    results = read_results(output)
    assert len(results.speed) == 6 * 6
    assert all(row.identical for row in results.speed)
    # What was kept would know the answers of the batch.
    assert [row.arm for row in results.batch] == ["auto:nodes=4"]
    (seconds,) = results.provenance.preparation_seconds.values()
    assert seconds > 0


def test_a_wrong_arm_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    finished = run_script(
        "--model", str(tiny_model_folder), "--draft-layers=0", "--arms=magic", "--output", str(tmp_path / "none.jsonl")
    )
    assert finished.returncode == 1
    assert "known arms" in finished.stderr
    assert "Traceback" not in finished.stderr
