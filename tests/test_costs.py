"""What one more node costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from hf_specdec import costs
from hf_specdec.costs import node_cost


def test_it_is_measured_once_for_a_model() -> None:
    model = zoo.make("llama")
    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    first = node_cost(model)
    measured = len(calls)
    assert node_cost(model) == first
    assert len(calls) == measured > 0
    model.double()  # another number format is another cost
    node_cost(model)
    assert len(calls) == 2 * measured
    hook.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
def test_it_fits_models_with_few_positions(family: str) -> None:
    cost = node_cost(zoo.make(family))
    assert 2**-10 <= cost <= 1
    assert torch.tensor(cost).log2() % 1 == 0


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        (1.0, 1.0, 2**-10),
        (1.0, 0.5, 2**-10),
        (1.0, 1.0 + 32 * 0.022, 2**-5),
        (1.0, 1.0 + 32 * 0.04, 2**-4),
        (1.0, 99.0, 1),
    ],
)
def test_it_is_rounded_up_to_a_power_of_two(
    one: float, many: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_seconds", lambda runner, width: one if width == 1 else many)
    assert node_cost(zoo.make("llama")) == expected
