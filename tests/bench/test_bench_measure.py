from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specdec import (
    ArgumentError,
    DraftContext,
    Lookahead,
    PromptLookup,
    Recycling,
    SpecDecError,
    SuccessorTable,
    Suffix,
    SuffixStore,
)
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
from hf_specdec.bench.arms import constant_draft_length, split_arms, with_settings
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
        if row.arm.startswith("stock"):
            assert row.draft_share is None
        else:
            assert row.draft_share is not None
            assert 0 < row.draft_share < 1
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


def test_settings_reach_the_strategy(setup: Setup) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])
    nodes = []
    handle = setup.model.register_forward_pre_hook(
        lambda module, args, kwargs: nodes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for window, widest in ((1, 3), (6, 13)):  # (window + guesses) * (ngram - 1) + 1
        nodes.clear()
        run_arm(f"lookahead:window={window}:ngram=2:guesses={widest - 1 - window}", setup, ids, torch.ones_like(ids))
        # The self-test and the prompt come first.
        assert window < max(nodes[-4:]) <= widest
    handle.remove()


def test_settings_are_changed_on_a_copy() -> None:
    before = Lookahead(window=3)
    after = with_settings(before, {"ngram": 5})
    assert after == Lookahead(window=3, ngram=5)
    assert before == Lookahead(window=3)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("lookahead:colour=3", "no setting 'colour'; it has: window, ngram, guesses"),
        ("lookahead:window=0", "window=0"),
        ("lookahead:window=many", "'window=many' is not of the form name=value"),
        ("lookahead:window", "'window' is not of the form name=value"),
        ("none:nodes=3", "it has: none"),
        ("magic:window=3", "known arms"),
        ("stock:seed=3", "known arms"),
        ("auto:parts=[]", "parts"),
        ("of_another_model", "made for 7 tokens"),
    ],
)
def test_wrong_settings_are_refused_before_any_forward(
    setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast, arm: str, message: str
) -> None:
    setup.model.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    setup = replace(setup, strategies={"of_another_model": Recycling(table=SuccessorTable(7, 2))})
    with pytest.raises(SpecDecError, match=re.escape(message)):
        next(measure_speed(setup, tiny_tokenizer, PROMPTS, ["stock", arm]))


def test_a_list_of_arms_is_split_outside_brackets() -> None:
    text = "stock,early_exit:layers=(0, 2),lookahead:window=2:ngram=3,jacobi"
    assert split_arms(text) == ["stock", "early_exit:layers=(0, 2)", "lookahead:window=2:ngram=3", "jacobi"]


def test_what_a_strategy_of_the_caller_keeps_outlives_a_prompt(
    setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    store, table = SuffixStore(), SuccessorTable(setup.model.config.vocab_size)
    kept = {"suffix_kept": Suffix(store=store, node_cost=0), "recycling_kept": Recycling(table=table, node_cost=0)}
    setup = replace(setup, strategies=kept, max_new_tokens=24)
    again = [replace(PROMPTS[0], prompt_id=str(number)) for number in (1, 2)]
    rows = list(measure_speed(setup, tiny_tokenizer, again, kept))
    forwards = {(row.arm, row.prompt_id): row.target_forwards for row in rows}
    assert all(row.identical for row in rows)
    assert len(store) > 0
    assert len(table) > 0
    for arm in kept:
        assert forwards[arm, "2"] < forwards[arm, "1"]


def test_a_warm_up_does_not_show_the_first_prompt(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Otherwise a strategy that remembers would know the beginning of the first answer."""
    prompts: list[list[int]] = []

    class Spy(PromptLookup):
        def begin(self, context: DraftContext) -> Spy:
            prompts.append(context.prompt[0].tolist())
            return super().begin(context)

    next(measure_speed(replace(setup, strategies={"spy": Spy()}), tiny_tokenizer, PROMPTS, ["spy"]))
    assert prompts[0] == prompts[1][::-1] != prompts[1]


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
    assert provenance.preparation_seconds == {}
    assert provenance.date.endswith("+00:00")
