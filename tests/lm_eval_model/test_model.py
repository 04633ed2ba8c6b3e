"""The lm-eval model gives lm-eval's own answers, whatever the strategy, and says what they took."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
)

import hf_specdec
from evaluations import PROMPTS, make_requests, plain_letters
from hf_specdec import ArgumentError, DraftContext, KeyedSampler, Scripted, SpeculationStats, Tree, drafter_names
from hf_specdec.lm_eval import RequestStats, SpeculativeLM
from hf_specdec.lm_eval.arguments import LM_EVAL_ARGUMENTS, setting_names
from hf_specdec.lm_eval.prompts import answer_seed
from hf_specdec.registry import create_drafter
from strategies import oracle

STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt_lookup": {"max_ngram": 1},
    "auto": {"nodes": 12},
    "tree": {"nodes": 12},
}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_gen_toks": 24, "until": []}
FIELDS = [field.name for field in dataclasses.fields(RequestStats)]


def make(models: dict[str, str], strategy: Any = "prompt_lookup", **arguments: Any) -> SpeculativeLM:
    if strategy == "tree":
        arguments.setdefault("assistant", models["assistant"])
    return SpeculativeLM(models["pretrained"], strategy, device="cpu", **arguments)


def make_hf(models: dict[str, str], **arguments: Any) -> HFLM:
    return HFLM(models["pretrained"], device="cpu", **arguments)


@pytest.fixture(scope="module")
def free_answers(models: dict[str, str]) -> list[str]:
    """What lm-eval's own model says without stop strings."""
    return make_hf(models).generate_until(make_requests(PROMPTS, until=[], max_gen_toks=40))


@pytest.fixture(scope="module")
def sampled(models: dict[str, str]) -> list[str]:
    """Two answers to each prompt, one at a time, without speculation."""
    return make(models, "none").generate_until(make_requests(PROMPTS, repeats=2, **SAMPLING))


class TestGreedy:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_answers_are_those_of_lm_evals_own_model(
        self, models: dict[str, str], free_answers: list[str], strategy: str, batch_size: int
    ) -> None:
        stops = [plain_letters(free_answers[0], 12), plain_letters(free_answers[4], 8)]
        settings = {"until": stops, "max_gen_toks": 40}
        expected = make_hf(models, batch_size=batch_size).generate_until(make_requests(PROMPTS, **settings))
        assert expected != free_answers

        model = make(models, strategy, batch_size=batch_size, **STRATEGIES[strategy])
        assert model.generate_until(make_requests(PROMPTS, **settings)) == expected
        accepted = model.take_report()["generate_until"]["accepted"]
        assert (accepted > 0) == (strategy != "none")

    def test_a_stop_string_inside_a_block_ends_the_text_there(
        self, models: dict[str, str], free_answers: list[str]
    ) -> None:
        """lm-eval looks back little further than a stop string is long, so every token must be shown to it."""
        tokenizer = AutoTokenizer.from_pretrained(models["pretrained"])
        target = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        prompt = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40)
        stop = plain_letters(free_answers[0], 12)
        position = next(
            n for n in range(1, 40) if stop in tokenizer.decode(text[0, prompt.shape[1] : prompt.shape[1] + n])
        )

        model = make(models, oracle(text.tolist(), depth=39))
        request = make_requests(PROMPTS[:1], until=[stop], max_gen_toks=40)
        assert model.generate_until(request) == [free_answers[0].split(stop)[0]]
        report = model.take_report()["generate_until"]
        assert report["tokens"] == position
        assert report["rounds"] == 2

    def test_chat_templates_and_left_truncation(self, models: dict[str, str]) -> None:
        for arguments in ({"batch_size": 2}, {"batch_size": 2, "max_length": 48}):
            answers = []
            for model in (make_hf(models, **arguments), make(models, "tree", **arguments)):
                prompts = [model.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
                answers.append(model.generate_until(make_requests(prompts, until=[], max_gen_toks=12)))
            assert answers[0] == answers[1]

    def test_gen_kwargs_of_generate_keep_their_meaning(self, models: dict[str, str]) -> None:
        settings = {"until": [], "max_gen_toks": 16, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
        expected = make_hf(models, batch_size=2).generate_until(make_requests(PROMPTS, **settings))
        assert make(models, "tree", batch_size=2).generate_until(make_requests(PROMPTS, **settings)) == expected

    def test_a_loaded_model_stays_as_it_was(self, models: dict[str, str], free_answers: list[str]) -> None:
        target = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        draft = AutoModelForCausalLM.from_pretrained(models["assistant"])
        before = target.generation_config.to_dict(), set(vars(target))
        strategy = Tree(nodes=6)
        model = SpeculativeLM(target, strategy, draft, width=2)
        assert model.generate_until(make_requests(PROMPTS, until=[], max_gen_toks=40)) == free_answers
        assert (target.generation_config.to_dict(), set(vars(target))) == before
        assert not hf_specdec.is_enabled(target)
        assert strategy == Tree(nodes=6)
        settings = {"nodes": 6, "depth": None, "branching": 4, "width": 2, "min_gain": 0.3, "min_score": 0.02}
        assert model.take_report()["settings"] == settings

    def test_an_adapter(self, models: dict[str, str], tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        base = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
        adapted.save_pretrained(tmp_path)
        settings = {"until": [], "max_gen_toks": 16}
        plain = make_hf(models, batch_size=2).generate_until(make_requests(PROMPTS, **settings))
        expected = make_hf(models, batch_size=2, peft=str(tmp_path)).generate_until(make_requests(PROMPTS, **settings))
        assert expected != plain
        model = make(models, "tree", batch_size=2, peft=str(tmp_path))
        assert model.generate_until(make_requests(PROMPTS, **settings)) == expected

    @pytest.mark.filterwarnings("ignore")  # what bitsandbytes says about kernels on a CPU is no business of this test
    def test_a_quantised_model(self, models: dict[str, str], tmp_path: Path) -> None:
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        quantised = AutoModelForCausalLM.from_pretrained(
            models["pretrained"], quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        quantised.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(models["pretrained"]).save_pretrained(tmp_path)
        folders = models | {"pretrained": str(tmp_path)}
        settings = {"until": [], "max_gen_toks": 16}
        hf = make_hf(folders, batch_size=2, dtype="float32")
        assert "torch.nn" not in type(hf.model.model.layers[0].mlp.up_proj).__module__
        expected = hf.generate_until(make_requests(PROMPTS, **settings))
        model = make(folders, "tree", batch_size=2, dtype="float32")
        assert model.generate_until(make_requests(PROMPTS, **settings)) == expected


class TestSampling:
    def test_they_are_those_of_stock_generate_with_keyed_noise(
        self, models: dict[str, str], sampled: list[str]
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(models["pretrained"])
        target = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        for number, prompt in enumerate(PROMPTS):
            for repeat in range(2):
                ids = tokenizer(prompt, return_tensors="pt").input_ids
                seed = answer_seed(0, prompt, repeat)
                processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), KeyedSampler([seed])])
                text = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    logits_processor=processors,
                    max_new_tokens=24,
                )
                answer = tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True)
                assert sampled[2 * number + repeat] == answer

    @pytest.mark.parametrize("batch_size", [1, 3, "auto"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_answers_depend_neither_on_the_strategy_nor_on_batches(
        self, models: dict[str, str], sampled: list[str], strategy: str, batch_size: int | str
    ) -> None:
        model = make(models, strategy, batch_size=batch_size, max_batch_size=2)
        assert model.generate_until(make_requests(PROMPTS, repeats=2, **SAMPLING)) == sampled

    def test_answers_depend_neither_on_order_nor_on_company(self, models: dict[str, str], sampled: list[str]) -> None:
        model = make(models, "tree", batch_size=3)
        backwards = model.generate_until(make_requests(PROMPTS[::-1], repeats=2, **SAMPLING))
        assert [backwards[i : i + 2] for i in range(8, -1, -2)] == [sampled[i : i + 2] for i in range(0, 10, 2)]
        assert model.generate_until(make_requests(PROMPTS[3:4], **SAMPLING)) == sampled[6:7]

    def test_repeats_and_seeds_differ(self, models: dict[str, str], sampled: list[str]) -> None:
        assert all(first != second for first, second in zip(sampled[::2], sampled[1::2], strict=True))
        other = make(models, "none", seed=1).generate_until(make_requests(PROMPTS, **SAMPLING))
        assert all(one != two for one, two in zip(other, sampled[::2], strict=True))

    def test_requests_that_ask_the_same_get_the_same(self, models: dict[str, str], sampled: list[str]) -> None:
        twice = make(models, "tree", batch_size=2).generate_until(make_requests([PROMPTS[0]] * 2, **SAMPLING))
        assert twice == [sampled[0], sampled[0]]

    def test_rejection_sampling_is_repeatable_in_any_order(self, models: dict[str, str]) -> None:
        model = make(models, "tree", verification="rejection", batch_size=1)
        answers = model.generate_until(make_requests(PROMPTS, **SAMPLING))
        assert model.generate_until(make_requests(PROMPTS[::-1], **SAMPLING)) == answers[::-1]
        assert model.take_report()["verification"] == "rejection"


class TestLogLikelihood:
    def test_scores_are_those_of_lm_evals_own_model(self, models: dict[str, str]) -> None:
        pairs = [Instance("loglikelihood", {}, (prompt, " the sea"), 0) for prompt in PROMPTS]
        texts = [Instance("loglikelihood_rolling", {}, (prompt,), 0) for prompt in PROMPTS]
        hf, model = make_hf(models, batch_size=2), make(models, batch_size=2)
        assert model.loglikelihood(pairs) == hf.loglikelihood(pairs)
        assert model.loglikelihood_rolling(texts) == hf.loglikelihood_rolling(texts)
        report = model.take_report()
        assert "generate_until" not in report
        for kind in ("loglikelihood", "loglikelihood_rolling"):
            assert report[kind]["requests"] == len(PROMPTS)
            assert "speculation played no part" in report[kind]["note"]


def counts(model: SpeculativeLM) -> tuple[int, ...]:
    report = model.take_report()["generate_until"]
    return report["rounds"], report["drafted"], report["accepted"], report["tokens"]


def engine_counts(engine: list[SpeculationStats]) -> tuple[int, ...]:
    stats = engine.pop()
    return stats.row_rounds, stats.drafted, stats.accepted, stats.emitted


class TestNumbers:
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> list[SpeculationStats]:
        """The engine's own statistics of each batch."""
        seen: list[SpeculationStats] = []
        stock = HFLM._model_generate

        def with_statistics(self: HFLM, *args: Any, **kwargs: Any) -> torch.Tensor:
            output = stock(self, *args, **kwargs, return_dict_in_generate=True)
            seen.append(output.speculation)
            return output.sequences

        monkeypatch.setattr(HFLM, "_model_generate", with_statistics)
        return seen

    def test_each_request_says_what_it_took(self, models: dict[str, str]) -> None:
        requests = make_requests(PROMPTS, repeats=2, **SAMPLING)
        model = make(models, "tree", batch_size=4)
        answers = model.generate_until(requests)
        assert [request.args[:2] for request in requests[::2]] == [(prompt, SAMPLING) for prompt in PROMPTS]
        notes = [note for request in requests[::2] for note in request.args[2]["speculation"]]
        assert len(notes) == len(answers)
        rows = [RequestStats(**{name: note[name] for name in FIELDS}) for note in notes]
        for row in rows:
            assert 1 <= row.rounds <= row.tokens <= 24
            assert row.accepted <= row.drafted
            assert row.seconds > 0
        # Each round gives its accepted tokens and one more.
        assert all(row.rounds + row.accepted == 24 for row in rows if row.tokens == 24)
        total = model.take_report()["generate_until"]
        assert total["requests"] == len(rows)
        for name in FIELDS:
            assert total[name] == pytest.approx(sum(getattr(row, name) for row in rows))
        assert total["tokens_per_forward"] == total["tokens"] / total["rounds"]

    @pytest.mark.parametrize("strategy", ["tree", "prompt_lookup", "early_exit", "lookahead"])
    def test_they_are_those_of_the_engine(
        self, models: dict[str, str], engine: list[SpeculationStats], strategy: str
    ) -> None:
        """Counted row by row, and in the engine for the whole batch."""
        arguments = {"exit_layer": 1} if strategy == "early_exit" else {}
        model = make(models, strategy, batch_size=5, **arguments)
        for settings in ({"until": [], "max_gen_toks": 40}, {"until": ["e"], "max_gen_toks": 40}, SAMPLING):
            model.generate_until(make_requests(PROMPTS, **settings))
            assert counts(model) == engine_counts(engine)

    def test_tokens_that_a_row_had_run_ahead_are_not_counted(
        self, models: dict[str, str], engine: list[SpeculationStats], free_answers: list[str]
    ) -> None:
        """One row is guessed far ahead when the other one's next token ends the batch."""
        fast, slow = free_answers[0], free_answers[2]
        stop = next(letter for letter in fast if letter.isascii() and letter in slow)
        tokenizer = AutoTokenizer.from_pretrained(models["pretrained"])
        target = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        prompt = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
        known = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40
        ).tolist()[0]

        def guess(context: DraftContext) -> list[list[list[int]]]:
            return [[known[len(text) :][:8]] if text == known[: len(text)] else [] for text in context.texts]

        model = make(models, Scripted(guess), batch_size=2)
        model.generate_until(make_requests([PROMPTS[0], PROMPTS[2]], until=[stop], max_gen_toks=40))
        assert engine[-1].emitted < 80
        assert counts(model) == engine_counts(engine)


class TestEvaluate:
    @pytest.fixture
    def tasks(self, tmp_path: Path) -> TaskManager:
        documents = tmp_path / "documents.jsonl"
        documents.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
        shared = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {documents}}}}}\ntest_split: test\n"
            'doc_to_text: "{{text}}"\nnum_fewshot: 0\n'
        )
        (tmp_path / "answer.yaml").write_text(
            shared + 'task: answer\noutput_type: generate_until\ndoc_to_target: "x"\nrepeats: 2\n'
            "generation_kwargs: {until: [], max_gen_toks: 8, do_sample: true, temperature: 0.7}\n"
            "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
            encoding="utf-8",
        )
        (tmp_path / "choose.yaml").write_text(
            shared + 'task: choose\noutput_type: multiple_choice\ndoc_to_choice: ["sun", "sea"]\ndoc_to_target: 0\n',
            encoding="utf-8",
        )
        return TaskManager(include_path=str(tmp_path), include_defaults=False)

    def test_the_numbers_stand_in_the_results_and_the_samples(
        self, models: dict[str, str], tasks: TaskManager
    ) -> None:
        model = make(models, "tree", batch_size=2, nodes=12)
        results: Any = simple_evaluate(model, tasks=["answer", "choose"], task_manager=tasks, bootstrap_iters=0)
        speculation = results["config"]["speculation"]
        assert speculation["strategy"] == "tree"
        assert speculation["settings"]["nodes"] == 12
        assert speculation["assistant"] == models["assistant"]
        assert speculation["tasks"].keys() == {"answer"}
        assert speculation["generate_until"] == speculation["tasks"]["answer"]
        assert speculation["generate_until"]["requests"] == 2 * len(PROMPTS)
        assert speculation["loglikelihood"]["requests"] == 2 * len(PROMPTS)
        json.dumps(speculation)
        for sample in results["samples"]["answer"]:
            (arguments,) = sample["arguments"]
            assert len(arguments[2]["speculation"]) == 2
        assert all(len(arguments) == 2 for arguments in results["samples"]["choose"][0]["arguments"])

        again: Any = simple_evaluate(model, tasks=["choose"], task_manager=tasks, bootstrap_iters=0)
        assert "generate_until" not in again["config"]["speculation"]

    def test_a_cache_of_answers_is_refused(self, models: dict[str, str], tasks: TaskManager, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="use_cache would replay"):
            simple_evaluate(make(models), tasks=["answer"], task_manager=tasks, use_cache=str(tmp_path / "answers"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"strategy": "tre"}, "strategy='tre' is unknown; did you mean 'tree'"),
            ({"strategy": 3}, "strategy must be a name or a Drafter object"),
            ({"strategy": "none", "nodes": 24}, "strategy none has no setting 'nodes'"),
            ({"strategy": "prompt_lookup", "nodes": 0}, r"PromptLookup\(nodes=0\)"),
            ({"nods": 24}, r"model argument 'nods' is unknown \(did you mean 'nodes'\?\)"),
            ({"strategy": "tree"}, "'tree' drafts with a second model: give assistant="),
            ({"assistant": "somewhere"}, "does not use assistant"),
            ({"verification": "hope"}, "verification='hope' is unknown"),
            ({"verification": "typical"}, "lossless=False"),
            ({"strategy": "medusa"}, "heads="),
            ({"strategy": "tree", "assistant": "somewhere", "heads": 3}, "heads must be a folder"),
            ({"verification": "rejection", "batch_size": 2}, "use batch_size=1"),
            ({"seed": "x"}, "seed must be an int"),
            ({"seed": [1, 2]}, "seed must be one int"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_wrong_arguments_are_named(self, models: dict[str, str], arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            SpeculativeLM(models["pretrained"], device="cpu", **arguments)

    def test_an_unknown_argument_beside_a_loaded_model(self, models: dict[str, str]) -> None:
        target = AutoModelForCausalLM.from_pretrained(models["pretrained"])
        with pytest.raises(ArgumentError, match="'attn_implementation' is unknown"):
            SpeculativeLM(target, attn_implementation="eager")

    def test_an_argument_of_from_pretrained_is_passed_on(self, models: dict[str, str]) -> None:
        assert make(models, attn_implementation="eager").model.config._attn_implementation == "eager"

    def test_other_type_errors_stay(self, models: dict[str, str]) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):
            make(models, chat_template_args=3, enable_thinking=False)

    def test_an_encoder_decoder_model(self, models: dict[str, str], tmp_path: Path) -> None:
        config = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        T5ForConditionalGeneration(config).save_pretrained(tmp_path)
        with pytest.raises(ArgumentError, match="t5 is an encoder-decoder model"):
            SpeculativeLM(str(tmp_path), tokenizer=models["pretrained"], device="cpu")


def test_no_setting_has_a_name_that_lm_eval_uses() -> None:
    names = {name for strategy in drafter_names() for name in setting_names(create_drafter(strategy))}
    assert {"nodes", "max_ngram"} <= names
    assert not names & LM_EVAL_ARGUMENTS


def test_the_guide_lists_every_own_argument() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/lm-eval.md").read_text(encoding="utf-8")
    own = inspect.signature(SpeculativeLM.__init__).parameters.keys() - {"self", "pretrained", "arguments"}
    assert own <= set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
