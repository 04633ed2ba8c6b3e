"""What is wrong in a request's gen_kwargs is said before any request is answered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from evaluations import PROMPTS, make_requests
from hf_specdec import ArgumentError, SpecDecError, Tree, UnsupportedError
from hf_specdec.lm_eval import SpeculativeLM


@pytest.fixture(scope="module")
def model(models: dict[str, str]) -> SpeculativeLM:
    return SpeculativeLM(models["pretrained"], device="cpu", batch_size=2)


def refusal(model: SpeculativeLM, **gen_kwargs: Any) -> SpecDecError:
    """What comes of a wrong request behind good ones of another group; nothing was run by then."""
    requests = make_requests(PROMPTS, until=[]) + make_requests(PROMPTS[:1], until=[], **gen_kwargs)
    forwards: list[torch.nn.Module] = []
    handle = model.model.register_forward_pre_hook(lambda module, _: forwards.append(module))
    try:
        with pytest.raises(SpecDecError) as caught:
            model.generate_until(requests)
    finally:
        handle.remove()
    assert not forwards
    assert all(len(request.args) == 2 for request in requests)
    return caught.value


@pytest.mark.parametrize(
    "name",
    ["strategy", "assistant", "heads", "seed", "verification", "lossless"]
    + [field.name for field in dataclasses.fields(Tree) if field.init],
)
def test_model_arguments(model: SpeculativeLM, name: str) -> None:
    error = refusal(model, **{name: 1})
    assert isinstance(error, ArgumentError)
    assert str(error) == f"{name} cannot be given in gen_kwargs: give {name} in model_args"


def test_transformers_name_of_the_assistant(model: SpeculativeLM) -> None:
    message = "assistant_model cannot be given in gen_kwargs: give assistant in model_args"
    assert str(refusal(model, assistant_model="somewhere")) == message


@pytest.mark.parametrize(
    ("gen_kwargs", "kind", "message"),
    [
        ({"num_beams": 4}, UnsupportedError, "num_beams=4 is not supported"),
        ({"penalty_alpha": 0.6}, UnsupportedError, "penalty_alpha=0.6 is not supported"),
        ({"cache_implementation": "quantized"}, UnsupportedError, "cache_implementation='quantized'"),
        ({"num_assistant_tokens": 3}, UnsupportedError, "means nothing to strategy 'prompt_lookup'"),
        ({"prompt_lookup_num_tokens": -1}, ArgumentError, "must be a whole number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_speculation_does_not_honour(
    model: SpeculativeLM, gen_kwargs: dict[str, Any], kind: type[SpecDecError], message: str
) -> None:
    error = refusal(model, **gen_kwargs)
    assert type(error) is kind
    assert message in str(error)


def test_what_it_honours(model: SpeculativeLM) -> None:
    """Settings that are off, and draft settings of the strategy. A checkpoint that keeps no cache by default, too."""
    plain = model.generate_until(make_requests(PROMPTS, until=[], max_gen_toks=8))
    config = model.model.generation_config
    before = config.to_dict()
    config.use_cache = False
    try:
        settings = {"num_beams": 1, "num_assistant_tokens": None, "prompt_lookup_num_tokens": 2}
        assert model.generate_until(make_requests(PROMPTS, until=[], max_gen_toks=8, **settings)) == plain
    finally:
        config.use_cache = before["use_cache"]
    assert config.to_dict() == before
