from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import audits
import texts
from hf_specdec.audit.differences import FAULT, TIE, compare, is_exact, spacing
from hf_specdec.bench.difference import score_gap
from hf_specdec.noise import gumbel

PROMPT = torch.tensor([[5, 9, 30, 5, 9]])


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (-17.0, torch.bfloat16, 2**-3),
        (15.9, torch.bfloat16, 2**-4),
        (17.0, torch.float16, 2**-6),
        (3.0, torch.float32, 2**-22),
    ],
)
def test_spacing_is_that_of_neighbouring_numbers(value: float, dtype: torch.dtype, expected: float) -> None:
    assert spacing(value, dtype) == expected
    size = torch.tensor(abs(value), dtype=dtype)
    assert float(torch.nextafter(size, torch.tensor(torch.inf, dtype=dtype)) - size) == expected


def ranked(temperature: float) -> tuple[list[int], torch.Tensor]:
    """Tokens by score behind the prompt in bfloat16, best first, and the logits."""
    model = audits.make().to(torch.bfloat16)
    with torch.no_grad():
        logits = model(PROMPT).logits[0, -1].double()
    scores = logits if temperature == 0 else logits / temperature + gumbel(3, 0, 0, len(logits))
    return scores.argsort(descending=True).tolist(), logits


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gap_within_the_bound_is_a_tie(temperature: float) -> None:
    """The same two texts on both sides of the bound; the gap is counted in the format's numbers."""
    model = audits.make().to(torch.bfloat16)
    (best, second, *_), logits = ranked(temperature)
    arguments = {"temperature": temperature, "seed": 3}
    found = compare(model, PROMPT, [best, 1], [second, 1], **arguments, tie_units=1e6)
    assert found is not None
    assert found.units is not None
    assert (found.index, found.kind) == (0, TIE)
    strict = compare(model, PROMPT, [best, 1], [second, 1], **arguments, tie_units=0.99 * found.units)
    assert strict is not None
    assert strict.kind == FAULT
    if temperature == 0:
        unit = spacing(float(logits[[best, second]].abs().max()), torch.bfloat16)
        assert found.units == pytest.approx(float(logits[best] - logits[second]) / unit)


def test_equal_texts() -> None:
    assert compare(audits.make(), PROMPT, [1, 2], [1, 2], temperature=0, seed=0, tie_units=8) is None


def test_in_32_bit_no_gap_is_a_tie() -> None:
    found = compare(audits.make(), PROMPT, [1, 2, 3], [1, 2, 4], temperature=0, seed=0, tie_units=1e12)
    assert found is not None
    assert (found.index, found.kind) == (2, FAULT)


def test_an_early_end_is_no_tie() -> None:
    model = audits.make().to(torch.bfloat16)
    found = compare(model, PROMPT, [1, 2, 3], [1, 2], temperature=0, seed=0, tie_units=1e12)
    assert found is not None
    assert (found.index, found.units, found.kind) == (2, None, FAULT)


def test_which_models_must_agree_exactly() -> None:
    model = audits.make()
    assert is_exact(model)
    assert not is_exact(audits.make().to(torch.bfloat16))
    model.config.quantization_config = {}
    assert not is_exact(model)


def test_the_gap_is_that_of_the_place_where_texts_part() -> None:
    """With more common text in front the candidates are compared there."""
    model = audits.make().to(torch.bfloat16)
    common = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=3)[0, PROMPT.shape[1] :].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT[0].tolist(), *common]])).logits[0, -1].double()
    best, second = logits.topk(2).indices.tolist()
    found = compare(model, PROMPT, [*common, best], [*common, second], temperature=0, seed=0, tie_units=8)
    assert found is not None
    assert found.index == 3
    assert found.units == pytest.approx(
        float(logits[best] - logits[second]) / spacing(float(logits[[best, second]].abs().max()), torch.bfloat16)
    )


class Plain(LlamaForCausalLM):
    """A model that always computes the logits of all tokens."""

    def forward(self, input_ids: Any, use_cache: bool, return_dict: bool) -> Any:
        return super().forward(input_ids, use_cache=use_cache, return_dict=return_dict)


def test_only_the_logits_of_the_fork_are_computed() -> None:
    """Those of a long prompt fill the memory. A model that cannot give fewer is not asked to."""
    model = audits.make()
    shapes: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    plain = Plain(model.config).eval()
    plain.load_state_dict(model.state_dict())
    arguments = {"reference": [1, 2, 3], "other": [1, 2, 4], "temperature": 0.7, "seed": 3}
    gap = score_gap(model, PROMPT, **arguments)
    found = compare(model, PROMPT, **arguments, tie_units=8)
    assert shapes == [(1, 1, model.config.vocab_size)] * 2
    assert gap == pytest.approx(score_gap(plain, PROMPT, **arguments))
    same = compare(plain, PROMPT, **arguments, tie_units=8)
    assert found is not None
    assert same is not None
    assert found.units == pytest.approx(same.units)
