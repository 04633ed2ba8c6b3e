from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import audits
import texts
import zoo
from hf_specdec.audit import differences
from hf_specdec.audit.differences import FAULT, TIE, classify, is_exact, spacing
from hf_specdec.audit.readings import PADDINGS, stock_logits
from hf_specdec.bench.difference import Candidates, score_gap
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
    found = classify(model, PROMPT, [best, 1], [second, 1], 0, **arguments, tie_units=1e6)
    assert found.units is not None
    assert (found.index, found.kind) == (0, TIE)
    strict = classify(model, PROMPT, [best, 1], [second, 1], 0, **arguments, tie_units=0.99 * found.units)
    assert strict.kind == FAULT
    if temperature == 0:
        unit = spacing(float(logits[[best, second]].abs().max()), torch.bfloat16)
        assert found.units == pytest.approx(float(logits[best] - logits[second]) / unit)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    ("gap", "readings", "noise", "kind", "taken"),
    [
        # In nats; a unit is 1/8 of one, so what is a tie everywhere ends at 1.
        (1.5, [1.5, 1.5, 1.5], 0.0, FAULT, False),
        (1.5, [1.5, 1.0, 1.7], 5.6, FAULT, False),
        (1.5, [1.5, 1.0, 1.8], 6.4, TIE, False),
        (1.5, [1.5, -0.1, 1.5], 12.8, TIE, True),
        (-1.5, [-1.5, -1.0, -1.8], 6.4, TIE, True),
        (-1.5, [-1.5, -1.5, -1.5], 0.0, FAULT, True),
        (2.0, [2.0, -9.0, 2.0], 88.0, TIE, True),
        (2.25, [2.25, -9.0, 2.25], 90.0, FAULT, True),  # twice what is a tie everywhere is no tie anywhere
        (1.0, [1.0, 1.0, 1.0], 0.0, TIE, False),
        (1.5, [1.5], None, FAULT, False),  # one reading has no range
        (1.5, [1.5, math.inf], None, FAULT, False),
        (1.5, [1.5, math.nan], None, FAULT, False),
    ],
)
def test_noise_of_stock_widens_the_bound(
    gap: float,
    readings: list[float],
    noise: float | None,
    kind: str,
    taken: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token 1 is the reference's and token 3 the other one; with keyed noise their logits have another gap."""
    keyed = torch.zeros(6).double() if temperature == 0 else temperature * gumbel(7, 0, 1, 6)

    def logits_of(gap: float) -> torch.Tensor:
        scores = torch.zeros(6).double()
        scores[1], scores[3] = 20, 20 - gap
        return scores - keyed

    asked: list[Any] = []

    def read(model: Any, text: torch.Tensor) -> torch.Tensor:
        asked.append(text.tolist())
        return torch.stack([logits_of(reading) for reading in readings])

    pair = Candidates(torch.tensor([20.0, 19.0]).double(), torch.tensor([gap, 0.0]).double() / (temperature or 1.0))
    monkeypatch.setattr(differences, "candidates", lambda *a, **k: pair)
    monkeypatch.setattr(differences, "stock_logits", read)
    model = audits.make().to(torch.bfloat16)
    found = classify(model, PROMPT, [7, 1, 2], [7, 3], 1, temperature=temperature, seed=7, tie_units=8)
    assert asked == [[[*PROMPT[0].tolist(), 7]]]
    assert found.units == pytest.approx(gap * 8)
    assert found.noise == (None if noise is None else pytest.approx(noise))
    assert found.kind == kind
    if math.isfinite(sum(readings)):
        assert found.taken_by_stock == taken


@pytest.mark.parametrize(
    ("readings", "taken"),
    [
        ([{1: 5.0, 3: 4.0}, {1: 5.0, 3: 4.9}], False),
        ([{1: 5.0, 3: 4.0}, {1: 5.0, 3: 5.1}], True),
        ([{1: 5.0, 3: 5.0}, {1: 5.0, 3: 5.0}], False),  # of equal ones stock takes the first
        ([{1: 5.0, 3: 5.1, 4: 6.0}, {1: 5.0, 3: 5.1, 4: 6.0}], False),  # stock takes a third one
    ],
)
def test_what_stock_takes_is_what_it_would_choose(
    readings: list[dict[int, float]], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.zeros(len(readings), 6).double()
    for row, values in zip(rows, readings, strict=True):
        row[list(values)] = torch.tensor(list(values.values())).double()
    monkeypatch.setattr(differences, "stock_logits", lambda *a: rows)
    model = audits.make().to(torch.bfloat16)
    found = classify(model, PROMPT, [1], [3], 0, temperature=0, seed=0, tie_units=8)
    assert found.taken_by_stock == taken


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_no_rounding(score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([2.0, score]).double()
    monkeypatch.setattr(differences, "candidates", lambda *a, **k: Candidates(logits, logits))
    model = audits.make().to(torch.bfloat16)
    found = classify(model, PROMPT, [1], [2], 0, temperature=0, seed=0, tie_units=1e12)
    assert (found.units, found.noise, found.kind) == (None, None, FAULT)


def test_without_ties_noise_excuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]).double()
    monkeypatch.setattr(differences, "stock_logits", lambda *a: rows)
    model = audits.make().to(torch.bfloat16)
    assert classify(model, PROMPT, [1], [2], 0, temperature=0, seed=0, tie_units=0).kind == FAULT


@pytest.mark.parametrize(("family", "attention"), zoo.VARIANTS)
def test_padding_changes_stock_by_rounding_alone(family: str, attention: str) -> None:
    """In 32 bit all readings agree with a plain forward, whatever the family makes of positions and windows."""
    model = audits.make(family, attention=attention)
    text = torch.randint(1, 100, (1, 4 * zoo.WINDOW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(text).logits[0, -1].double()
    readings = stock_logits(model, text)
    assert readings.dtype == torch.float64
    torch.testing.assert_close(readings, logits.expand(len(PADDINGS), -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("length", "count"), [(256, 1), (255, 2), (254, 3), (250, 5), (100, 8)])
def test_padding_leaves_the_text_within_the_models_positions(length: int, count: int) -> None:
    text = torch.randint(1, 100, (1, length), generator=torch.Generator().manual_seed(0))
    assert stock_logits(audits.make(), text).shape == (count, len(audits.TOKENIZER))


def test_in_16_bit_padding_moves_logits() -> None:
    """By little."""
    model = audits.make().to(torch.bfloat16)
    text = torch.randint(1, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    readings = stock_logits(model, text)
    assert 0 < float((readings.amax(dim=0) - readings.amin(dim=0)).max()) < 0.2


def test_in_32_bit_no_gap_is_a_tie() -> None:
    found = classify(audits.make(), PROMPT, [1, 2, 3], [1, 2, 4], 2, temperature=0, seed=0, tie_units=1e12)
    assert (found.index, found.kind) == (2, FAULT)


def test_an_early_end_is_no_tie() -> None:
    model = audits.make().to(torch.bfloat16)
    found = classify(model, PROMPT, [1, 2, 3], [1, 2], 2, temperature=0, seed=0, tie_units=1e12)
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
    found = classify(model, PROMPT, [*common, best], [*common, second], 3, temperature=0, seed=0, tie_units=8)
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
    found = classify(model, PROMPT, **arguments, index=2, tie_units=8)
    assert shapes == [(1, 1, model.config.vocab_size)] * 2
    assert gap == pytest.approx(score_gap(plain, PROMPT, **arguments))
    same = classify(plain, PROMPT, **arguments, index=2, tie_units=8)
    assert found.units == pytest.approx(same.units)
