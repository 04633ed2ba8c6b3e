"""The tasks in `evals/tasks` run without a network, and their checks tell right answers from wrong ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_specdec.lm_eval import SpeculativeLM

FOLDER = Path(__file__).parents[2] / "evals/tasks"
NAMES = ["hf_specdec_editing", "hf_specdec_gsm8k", "hf_specdec_instructions"]


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tasks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


editing, gsm8k, instructions = map(load_module, ("editing", "gsm8k", "instructions"))


def stop_strings(name: str) -> list[str]:
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: node.value)
    config = yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), loader)
    return config["generation_kwargs"]["until"]


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def _gsm8k_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(4)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setenv(gsm8k.FILE_VARIABLE, str(path))


@pytest.mark.usefixtures("_gsm8k_file")
def test_all_tasks_give_the_answers_of_lm_evals_own_model(models: dict[str, str]) -> None:
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)
    arguments: dict[str, Any] = {"device": "cpu", "batch_size": 4, "max_length": 640}
    results = []
    for model in (
        HFLM(models["pretrained"], **arguments),
        SpeculativeLM(models["pretrained"], "tree", models["assistant"], **arguments),
    ):
        evaluated: Any = simple_evaluate(
            model,
            tasks=NAMES,
            task_manager=tasks,
            limit=4,
            gen_kwargs={"max_gen_toks": 16},
            bootstrap_iters=0,
        )
        results.append(evaluated)
    stock, ours = results
    for name in NAMES:
        assert len(stock["samples"][name]) == 4
        for one, other in zip(stock["samples"][name], ours["samples"][name], strict=True):
            assert one["resps"] == other["resps"]
    assert stock["results"] == ours["results"]
    assert ours["config"]["speculation"]["tasks"].keys() == set(NAMES)


@pytest.mark.parametrize("name", ["editing", "gsm8k", "instructions"])
def test_there_are_several_stop_strings(name: str) -> None:
    assert len(stop_strings(name)) >= 3


class TestEditing:
    def test_targets_score_full_and_are_never_cut_by_a_stop_string(self) -> None:
        stops = stop_strings("editing")
        for document in documents("editing"):
            assert editing.process_results(document, [document["target"] + "\n"]) == {"exact": 1.0, "similarity": 1.0}
            assert not any(stop in f"{document['target']}\n" for stop in stops)

    def test_a_near_miss_is_similar_but_not_exact(self) -> None:
        for document in documents("editing"):
            score = editing.process_results(document, [document["target"][:-3]])
            assert score["exact"] == 0.0
            assert 0.8 < score["similarity"] < 1.0

    def test_only_copies_keep_the_text(self) -> None:
        for document in documents("editing"):
            assert (document["text"] == document["target"]) == document["instruction"].startswith("Copy")


class TestGsm8k:
    @pytest.mark.parametrize(
        ("answer", "right"),
        [("So 1,000 - 4 = 996.\n#### 996", 1.0), ("#### 996.0", 1.0), ("996 or 995", 0.0), ("many", 0.0), ("", 0.0)],
    )
    def test_the_last_number_counts(self, answer: str, right: float) -> None:
        assert gsm8k.process_results({"answer": "1000-4=996\n#### 996"}, [answer]) == {"exact_match": right}

    def test_without_a_file_the_hub_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []
        monkeypatch.delenv(gsm8k.FILE_VARIABLE, raising=False)
        monkeypatch.setattr(gsm8k.datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)))
        gsm8k.load(pretrained="anything")
        assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


RULES = [
    ({"rule": "avoids", "text": "Sun"}, "rain", "the sun"),
    ({"rule": "bullets", "count": 2}, "- a\n- b\nend", "- a\nb"),
    ({"rule": "contains", "text": "boat"}, "A Boat.", "A ship."),
    ({"rule": "ends_with", "text": "all."}, "That is all.", "That is all"),
    ({"rule": "items", "count": 3}, "a, b, c,", "a, b"),
    ({"rule": "json_keys", "keys": ["a", "b"]}, '{"b": 1, "a": 2}', '{"a": 1}'),
    ({"rule": "json_keys", "keys": ["a"]}, '{"a": []}', "a: 1"),
    ({"rule": "json_keys", "keys": ["a"]}, '{"a": []}', '["a"]'),
    ({"rule": "lines", "count": 2}, "a\n\nb", "a"),
    ({"rule": "lowercase"}, "no. 3 it is", "No"),
    ({"rule": "max_words", "count": 2}, "two words", "three short words"),
    ({"rule": "min_words", "count": 2}, "two words", "one"),
    ({"rule": "paragraphs", "count": 2}, "a\nb\n \nc", "a\nb"),
    ({"rule": "sentences", "count": 2}, "It is 3.5 m. Yes!", "One."),
    ({"rule": "starts_with", "text": "The"}, "The sea", "A sea"),
    ({"rule": "uppercase"}, "HELLO, NO. 3!", "HELLo"),
]


class TestInstructions:
    @pytest.mark.parametrize(("rule", "good", "bad"), RULES, ids=lambda value: str(value)[:30])
    def test_rules_tell_good_from_bad(self, rule: dict[str, Any], good: str, bad: str) -> None:
        assert instructions.follows(good, rule)
        assert not instructions.follows(bad, rule)

    def test_every_rule_is_tested_and_every_document_can_be_scored(self) -> None:
        assert {rule["rule"] for rule, _, _ in RULES} == instructions.RULES.keys()
        used = set()
        for document in documents("instructions"):
            used |= {rule["rule"] for rule in json.loads(document["rules"])}
            assert instructions.process_results(document, [" "]) == {"all_rules": 0.0, "share_of_rules": 0.0}
        assert used == instructions.RULES.keys()

    def test_the_share_of_rules(self) -> None:
        rules = json.dumps([{"rule": "lowercase"}, {"rule": "contains", "text": "sea"}])
        assert instructions.process_results({"rules": rules}, ["The sea"]) == {"all_rules": 0.0, "share_of_rules": 0.5}
        assert instructions.process_results({"rules": rules}, ["the sea"]) == {"all_rules": 1.0, "share_of_rules": 1.0}
