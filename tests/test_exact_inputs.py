"""Prompts that are not plain: masks with holes, positions of one's own; other dtypes; other drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import Tree, generate
from strategies import STRATEGIES

SETTINGS = {"max_new_tokens": 14}


def both(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, batch: dict[str, Any], **settings: Any
) -> tuple[list[list[int]], list[list[int]]]:
    settings = SETTINGS | settings
    expected = texts.greedy(target, **batch, **settings)
    rows = texts.rows_without_padding(batch, expected)
    arguments = STRATEGIES[strategy](draft, rows)
    ours = generate(target, **batch, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)
    return ours.tolist(), expected.tolist()


MASKS = {
    "holes": [[1, 1, 0, 1, 0, 1, 1, 1, 1]],
    "padding and holes": [[0, 0, 1, 1, 0, 1, 1, 1, 1]],
    "one token left": [[0, 0, 0, 0, 0, 0, 0, 0, 1]],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_masked_prompts(family: str, mask: str, strategy: str) -> None:
    target = zoo.make(family)
    batch = {"input_ids": texts.prompt(9), "attention_mask": torch.tensor(MASKS[mask])}

    ours, expected = both(target, zoo.make_draft(target), strategy, batch)

    assert ours == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_dtype_of_the_mask(target: PreTrainedModel, draft: PreTrainedModel, dtype: torch.dtype) -> None:
    batch = texts.padded([9, 4])
    expected = texts.greedy(target, **batch, **SETTINGS)

    typed = batch | {"attention_mask": batch["attention_mask"].to(dtype)}
    ours = generate(target, **typed, **SETTINGS, strategy="tree", assistant_model=draft, do_sample=False)

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_of_the_caller(family: str, strategy: str) -> None:
    target = zoo.make(family)
    batch = texts.inputs(texts.prompt(9)) | {"position_ids": torch.arange(3, 12)[None] + torch.arange(9) // 5}
    assert texts.greedy(target, **batch, **SETTINGS).tolist() != (
        texts.greedy(target, **texts.inputs(texts.prompt(9)), **SETTINGS).tolist()
    )

    ours, expected = both(target, zoo.make_draft(target), strategy, batch)

    assert ours == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_mask(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    ids = texts.prompt(9)
    expected = texts.greedy(target, input_ids=ids, **SETTINGS)

    arguments = STRATEGIES[strategy](draft, expected.tolist())
    ours = generate(target, ids, **SETTINGS, do_sample=False, pad_token_id=texts.PAD, **arguments)

    assert ours.tolist() == expected.tolist()


def other_vocabulary(target: PreTrainedModel, size: int) -> PreTrainedModel:
    """The draft of `target` with fewer or more token ids; it likes the additional ones best."""
    draft = zoo.make_draft(target)
    other = zoo.make("llama", seed=3, vocab_size=size)
    shared = min(size, zoo.VOCAB_SIZE)
    with torch.no_grad():
        for name, weight in other.state_dict().items():
            source = draft.state_dict()[name]
            if weight.shape == source.shape:
                weight.copy_(source)
            else:
                weight[:shared] = source[:shared]
                weight[shared:] *= 20
    other.generation_config.assistant_confidence_threshold = 0
    return other


@pytest.mark.parametrize("mode", ["greedy", "keyed", "rejection"])
@pytest.mark.parametrize("size", [60, 90, 128, 1000])
@pytest.mark.parametrize("strategy", ["assisted", "tree"])
def test_drafts_with_a_padded_or_a_shorter_vocabulary(
    target: PreTrainedModel, strategy: str, size: int, mode: str
) -> None:
    """Ids that only one model knows are never proposed, and reading them does not break a smaller draft."""
    draft = other_vocabulary(target, size)
    batch = texts.inputs(texts.prompt(9))
    arguments = STRATEGIES[strategy](draft, [])
    if mode == "greedy":
        expected = texts.greedy(target, **batch, **SETTINGS)
        sampling: dict[str, Any] = {"do_sample": False}
    else:
        expected = texts.sampled(target, **batch, **SETTINGS)
        sampling = {"do_sample": True, "seed": texts.SEED, "top_k": 0}
    assert expected.max() > 60
    if mode == "rejection":
        sampling["verification"] = "rejection"

    output = generate(target, **batch, **SETTINGS, **sampling, **arguments, return_dict_in_generate=True)

    assert output.speculation.drafted > 0
    if mode != "rejection":
        assert output.sequences.tolist() == expected.tolist()
        assert output.speculation.accepted > 0 or size < zoo.VOCAB_SIZE


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_dtypes(dtype: torch.dtype, attention: str) -> None:
    """Double precision is exact; in 16 bits the text runs to its end, ties apart.

    Without padding: stock eager attention in double precision computes NaN for padded rows.
    """
    target = zoo.make("llama", attention=attention).to(dtype)
    draft = zoo.make_draft(target)
    batch = texts.padded([9, 9])
    expected = texts.greedy(target, **batch, **SETTINGS)

    ours = generate(
        target, **batch, **SETTINGS, do_sample=False, strategy=Tree(min_gain=0.0, min_score=0.0), assistant_model=draft
    )

    assert ours.shape == expected.shape
    if dtype == torch.float64:
        assert ours.tolist() == expected.tolist()


def test_a_draft_of_another_dtype_and_family(target: PreTrainedModel) -> None:
    for draft in (
        zoo.make("gpt2").to(torch.bfloat16),
        zoo.make("gemma2", attention="eager"),
        zoo.make("opt").double(),
    ):
        draft.generation_config.assistant_confidence_threshold = 0
        batch = texts.padded([9, 4])
        expected = texts.greedy(target, **batch, **SETTINGS)

        for strategy in ("assisted", "tree"):
            ours = generate(
                target,
                **batch,
                **SETTINGS,
                do_sample=False,
                pad_token_id=texts.PAD,
                **STRATEGIES[strategy](draft, []),
            )
            assert ours.tolist() == expected.tolist()


def test_a_draft_with_fewer_positions_than_the_text(target: PreTrainedModel) -> None:
    """A draft with learned positions ends where they end; the target goes on."""
    draft = zoo.make("gpt2", n_positions=16)
    batch = texts.inputs(texts.prompt(9))
    expected = texts.greedy(target, **batch, max_new_tokens=24)

    ours = generate(
        target, **batch, max_new_tokens=24, do_sample=False, pad_token_id=texts.PAD, **STRATEGIES["tree"](draft, [])
    )

    assert ours.tolist() == expected.tolist()


def test_the_same_model_as_its_own_draft(target: PreTrainedModel) -> None:
    """Nothing is gained but nothing goes wrong: the two caches are separate."""
    batch = texts.inputs(texts.prompt(9))
    expected = texts.greedy(target, **batch, **SETTINGS)

    for strategy in ("assisted", "tree"):
        ours = generate(target, **batch, **SETTINGS, do_sample=False, **STRATEGIES[strategy](target, []))
        assert ours.tolist() == expected.tolist()


def test_gradients_are_not_recorded(target: PreTrainedModel) -> None:
    output = generate(
        target,
        **texts.inputs(texts.prompt(9)),
        max_new_tokens=4,
        strategy="prompt_lookup",
        return_dict_in_generate=True,
        output_logits=True,
    )

    assert not any(logits.requires_grad for logits in output.logits)
    assert not any(layer.keys.requires_grad for layer in output.cache.layers)
