"""`hf-specdec lm-eval` from end to end, alone and under `accelerate launch`, and what happens without lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluations import PROMPTS, make_requests
from hf_specdec.lm_eval import SpeculativeLM

TASKS = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
num_fewshot: 0
"""
ANSWER = """\
output_type: generate_until
doc_to_target: "x"
repeats: 2
generation_kwargs: {until: ["a", "e"], max_gen_toks: 8, do_sample: true, temperature: 0.7}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """\
output_type: multiple_choice
doc_to_choice: ["sun", "sea"]
doc_to_target: 0
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    for name, rest in (("answer", ANSWER), ("choose", CHOOSE)):
        text = TASKS.format(name=name, documents=documents) + rest
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: lm-eval sets up logging and the environment for good."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
    )


def lm_eval_run(models: dict[str, str], tasks: Path, output: Path) -> list[str]:
    model_args = f"pretrained={models['pretrained']},assistant={models['assistant']},strategy=tree,nodes=12"
    return (
        "hf_specdec.cli lm-eval run --model hf-specdec --device cpu --batch_size 2 --tasks answer,choose --log_samples"
        f" --include_path {tasks} --model_args {model_args} --output_path {output}"
    ).split()


def read(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results and the samples of task "answer" in the order of its documents."""
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_answer_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return json.loads(results.read_text(encoding="utf-8")), sorted(rows, key=lambda row: row["doc_id"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation(models: dict[str, str], tasks: Path, tmp_path: Path, processes: int) -> None:
    command = ["-m", *lm_eval_run(models, tasks, tmp_path)]
    if processes == 2:
        # accelerate has one launcher for several processes on one machine and names it after GPUs.
        launch = "accelerate.commands.launch --multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no"
        command = ["-m", *launch.split(), "--num_processes", "2", "--main_process_port", "0", *command]
    result = run(command, tasks, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("|answer") == 1
    for rank in range(2):  # each process says which part of the requests it takes
        assert (f"for answer on rank {rank}" in result.stderr) == (rank < processes)
    assert "speculation played no part in log-likelihood requests" in result.stderr
    results, samples = read(tmp_path)

    speculation = results["config"]["speculation"]
    assert speculation["settings"]["nodes"] == 12
    assert speculation["generate_until"]["requests"] == 2 * len(PROMPTS)
    assert speculation["loglikelihood"]["requests"] >= 2 * len(PROMPTS)
    assert [row["doc"]["text"] for row in samples] == PROMPTS
    notes = [note for row in samples for note in row["arguments"]["gen_args_0"]["arg_2"]["speculation"]]
    for name in ("rounds", "drafted", "accepted", "tokens"):
        assert sum(note[name] for note in notes) == speculation["generate_until"][name]

    # Neither speculation nor the sharing of requests changes an answer.
    alone = SpeculativeLM(models["pretrained"], "none", device="cpu")
    settings = {"until": ["a", "e"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7}
    expected = alone.generate_until(make_requests(PROMPTS, repeats=2, **settings))
    answers = [row["resps"][0][:2] for row in samples]  # a process with fewer requests repeats its last one
    assert answers == [expected[number : number + 2] for number in range(0, len(expected), 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [("strategy=tre", "strategy='tre' is unknown"), ("strategy=none,window=3", "no setting 'window'")],
)
def test_a_wrong_model_argument_is_one_line(
    models: dict[str, str], tasks: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    command = ["-m", *lm_eval_run(models, tasks, tmp_path)]
    place = command.index("--model_args") + 1
    command[place] = f"pretrained={models['pretrained']},{arguments}"
    result = run(command, tasks)
    assert result.returncode == 1
    last = result.stderr.rstrip().rpartition("Error: ")[2]
    assert message in " ".join(last.split())
    assert "Traceback" not in result.stderr


def test_help_is_lm_evals(tmp_path: Path) -> None:
    result = run(["-m", "hf_specdec.cli", "lm-eval", "--help"], tmp_path)
    assert result.returncode == 0
    assert "usage: lm-eval" in result.stdout


def test_without_the_extra_the_command_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None; from hf_specdec.cli import main; "
        "sys.argv = ['hf-specdec', 'lm-eval', 'run']; main()"
    )
    result = run(["-c", code], tmp_path)
    assert result.returncode == 1
    assert 'pip install "hf_specdec[lm-eval]"' in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_the_package_does_not_import_lm_eval(tmp_path: Path) -> None:
    code = "import sys, hf_specdec, hf_specdec.cli; print({'lm_eval', 'datasets'} & set(sys.modules))"
    assert run(["-c", code], tmp_path).stdout.strip() == "set()"
