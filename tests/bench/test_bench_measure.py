from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specdec import ArgumentError
from hf_specdec.bench import (
    DEFAULT_ARMS,
    ForwardClock,
    MemoryTask,
    Prompt,
    Setup,
    collect_provenance,
    first_difference,
    measure_batch,
    measure_memory,
    measure_speed,
    run_arm,
    score_gap,
)
from hf_specdec.bench.arms import constant_draft_length
from hf_specdec.bench.batch import trim
from hf_specdec.bench.memory import MeasurementError
from hf_specdec.demo_model import make_layer_draft

PROMPTS = [
    Prompt("qa", "1", "the boat leaves the harbour and then the boat returns"),
    Prompt("rag", "2", "a gull follows the boat"),
]


@pytest.fixture
def model(tiny_model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder)


@pytest.fixture
def setup(model: PreTrainedModel) -> Setup:
    return Setup(model, make_layer_draft(model, 1), draft_tokens=3, max_new_tokens=12)


def test_every_arm_gives_a_row_for_every_prompt_and_the_same_text(
    setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = list(measure_speed(setup, tiny_tokenizer, PROMPTS, DEFAULT_ARMS))
    assert [(row.prompt_id, row.arm) for row in rows] == [
        (prompt.prompt_id, arm) for prompt in PROMPTS for arm in DEFAULT_ARMS
    ]
    for row in rows:
        assert row.identical, row
        assert row.score_gap is None
        assert 0 < row.new_tokens <= 12
        assert 0 < row.forward_seconds < row.seconds
        assert 0 < row.host_share < 1
        assert (row.draft_forwards > 0) == (row.arm in ("stock_assisted", "assisted", "tree"))
    stock = [row for row in rows if row.arm == "stock"]
    assert [row.target_forwards for row in stock] == [row.new_tokens for row in stock]


def test_stock_always_runs(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = list(measure_speed(setup, tiny_tokenizer, PROMPTS[:1], ["none"]))
    assert [row.arm for row in rows] == ["stock", "none"]


@pytest.mark.parametrize("arm", ["stock_assisted", "tree"])
def test_an_arm_with_a_draft_needs_one(
    model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, arm: str
) -> None:
    setup = Setup(model, None, draft_tokens=3, max_new_tokens=4)
    with pytest.raises(ArgumentError, match="needs a draft model"):
        next(measure_speed(setup, tiny_tokenizer, PROMPTS, [arm]))


def test_an_unknown_arm_is_refused_with_the_known_ones(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ArgumentError, match="known arms: stock, .*prompt_lookup"):
        next(measure_speed(setup, tiny_tokenizer, PROMPTS, ["magic"]))


def test_both_assisted_arms_draft_the_same_number_of_tokens(setup: Setup) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for arm in ("stock_assisted", "assisted"):
        with ForwardClock(setup.model, setup.draft) as clock:
            run_arm(arm, setup, ids, torch.ones_like(ids))
        # Each round drafts 3 tokens at most; rounds number as many as target forwards, up to the prompt's own.
        assert clock.draft_forwards <= 3 * clock.target_forwards + 1, arm
        assert clock.draft_forwards > clock.target_forwards, arm


def test_the_draft_gets_its_configuration_back(setup: Setup) -> None:
    draft = setup.draft
    assert draft is not None
    before = draft.generation_config

    def fail_inside() -> None:
        with constant_draft_length(draft, 7):
            assert draft.generation_config.num_assistant_tokens == 7
            assert draft.generation_config.assistant_confidence_threshold == 0
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert draft.generation_config is before


def test_the_clock_counts_each_model_and_survives_an_error(setup: Setup) -> None:
    ids = torch.tensor([[5, 6]])
    assert setup.draft is not None
    with ForwardClock(setup.model, setup.draft) as clock:
        setup.model(ids)
        setup.draft(ids)
        setup.draft(ids)
        with pytest.raises(ValueError, match="exactly one"):
            setup.model()
    setup.model(ids)
    assert (clock.target_forwards, clock.draft_forwards) == (2, 2)
    assert clock.forward_seconds > 0


def test_batches_equal_single_runs(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [prompt.text for prompt in PROMPTS]
    rows = measure_batch(setup, tiny_tokenizer, texts, ["stock", "prompt_lookup", "tree"])
    assert [row.arm for row in rows] == ["stock", "prompt_lookup", "tree"]
    for row in rows:
        assert row.identical_rows == row.rows == 2
        assert 0 < row.new_tokens <= 24
        assert row.batch_seconds > 0
        assert row.single_seconds > 0


def test_stock_arms_without_batches_are_refused(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ArgumentError, match="batch size 1 only"):
        measure_batch(setup, tiny_tokenizer, ["the sea"], ["stock_prompt_lookup"])


def test_trim_drops_what_follows_the_end(setup: Setup) -> None:
    assert trim([5, 6, 1, 0, 0], setup) == [5, 6, 1]
    assert trim([5, 6], setup) == [5, 6]


def test_memory_is_measured_in_a_fresh_process(tiny_model_folder: Path) -> None:
    task = MemoryTask(str(tiny_model_folder), "prompt_lookup", context_tokens=64, new_tokens=4, dtype="float32")
    (row,) = measure_memory([task])
    assert (row.arm, row.context_tokens, row.kind) == ("prompt_lookup", 64, "resident")
    assert 0 < row.new_tokens <= 4
    # A process with torch in it holds more than 50 MiB, and a peak is no less than what was there before.
    assert 50 * 2**20 < row.loaded_bytes <= row.peak_bytes


def test_a_failing_process_reports_its_error(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no-model"):
        measure_memory([MemoryTask(str(tmp_path / "no-model"), "stock")])


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_score_gap_is_the_distance_of_the_logits_at_the_fork(model: PreTrainedModel) -> None:
    prompt = torch.tensor([[5, 6]])
    logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
    gap = score_gap(model, prompt, [7, 8, 9], [7, 10, 9])
    assert gap == pytest.approx(float(logits[8] - logits[10]))
    assert score_gap(model, prompt, [7, 8], [7, 8]) is None
    assert score_gap(model, prompt, [7, 8], [7]) is None


def test_score_gap_when_sampling_is_positive_for_the_token_that_keyed_noise_chose(
    model: PreTrainedModel, setup: Setup
) -> None:
    from hf_specdec import generate

    prompt = torch.tensor([[5, 6]])
    text = generate(
        model,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        strategy="none",
        do_sample=True,
        temperature=0.7,
        top_k=0,
        seed=3,
        max_new_tokens=4,
    )[0, 2:].tolist()
    for other in range(model.config.vocab_size):
        if other != text[0]:
            gap = score_gap(model, prompt, text, [other], temperature=0.7, seed=3)
            assert gap is not None
            assert gap > 0


def test_provenance_describes_model_and_machine(model: PreTrainedModel) -> None:
    provenance = collect_provenance(model, name="tiny", draft=None, seed=4, command="python run.py")
    assert (provenance.model, provenance.dtype, provenance.attention) == ("tiny", "float32", "sdpa")
    assert {"python", "torch", "transformers", "hf_specdec"} <= provenance.versions.keys()
    assert provenance.device
    assert provenance.cores >= 1
    assert provenance.threads >= 1
    assert (provenance.seed, provenance.command) == (4, "python run.py")
    assert provenance.date.endswith("+00:00")
