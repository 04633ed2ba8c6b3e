"""Views of a model: right numbers, shared weights, and an original that nobody touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import UnsupportedModelError
from hf_specdec.layers import SplitModel, decoder_layers, layers_cost, with_layers

TOKENS = texts.prompt(9)


@pytest.fixture
def model() -> PreTrainedModel:
    return zoo.make("llama", num_hidden_layers=4)


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that hangs on the model's modules, by identity, and its config."""
    objects = {name: {key: id(value) for key, value in vars(one).items()} for name, one in model.named_modules()}
    children = {name: {key: id(value) for key, value in one._modules.items()} for name, one in model.named_modules()}
    hooks = {name: list(one._forward_hooks) for name, one in model.named_modules()}
    return {"objects": objects, "children": children, "hooks": hooks, "config": model.config.to_dict()}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("kept", [(0, 1, 2), (1,), (0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "opt"])
def test_a_view_runs_the_kept_layers(family: str, kept: tuple[int, ...]) -> None:
    """As a model does from which the others were deleted. Falcon's layers return tuples."""
    model = zoo.make(family, num_hidden_layers=4)
    before = state(model)

    ours = logits(with_layers(model, kept))

    assert state(model) == before
    layers = decoder_layers(model)
    for index in set(range(4)) - set(kept):
        tuples = family == "falcon"
        layers[index].forward = lambda hidden_states, *args, _tuples=tuples, **kwargs: (
            (hidden_states, None) if _tuples else hidden_states
        )
    torch.testing.assert_close(ours, logits(model))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_layers_are_found_by_structure(family: str) -> None:
    model = zoo.make(family, attention="eager")

    assert len(decoder_layers(model)) == 2
    assert all(sum(p.numel() for p in layer.parameters()) > 1000 for layer in decoder_layers(model))


def test_weights_are_shared(model: PreTrainedModel) -> None:
    view = with_layers(model, [0])

    assert {id(weight) for weight in view.parameters()} <= {id(weight) for weight in model.parameters()}
    assert view.config is model.config


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_a_split_model_is_the_model(model: PreTrainedModel, exit_layer: int) -> None:
    before = state(model)
    split = SplitModel(model, exit_layer)

    torch.testing.assert_close(logits(split.lower), logits(with_layers(model, range(exit_layer))))
    torch.testing.assert_close(logits(split.upper), logits(model))

    split.hidden_states = torch.zeros_like(split.hidden_states)
    assert not torch.allclose(logits(split.upper), logits(model))
    assert state(model) == before


def test_hooks_of_the_model_hear_the_upper_part_alone(model: PreTrainedModel) -> None:
    heard: list[tuple[str, nn.Module]] = []
    model.register_forward_pre_hook(lambda module, args: heard.append(("before", module)))
    model.register_forward_hook(lambda module, args, kwargs, output: heard.append(("after", module)), with_kwargs=True)
    model.model.register_forward_hook(lambda module, args, output: heard.append(("inner", module)))
    split = SplitModel(model, 2)
    heard.clear()

    logits(split.lower)
    assert heard == []
    logits(split.upper)
    assert heard == [("before", model), ("inner", model.model), ("after", model)]


def test_hooks_of_layers_are_called_where_the_layer_runs(model: PreTrainedModel) -> None:
    heard: list[nn.Module] = []
    layers = decoder_layers(model)
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: heard.append(module))
    split = SplitModel(model, 2)
    heard.clear()

    logits(split.lower)
    assert heard == layers[:2]
    logits(split.upper)
    assert heard == layers


def test_forwards_that_accelerate_put_on_the_modules(model: PreTrainedModel) -> None:
    """Its hooks sit in the object's own `forward`, bound to the object."""
    hooks = pytest.importorskip("accelerate.hooks")
    expected = logits(with_layers(model, [0]))
    whole = logits(model)
    for module in (model, model.model, *decoder_layers(model)):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    before = state(model)
    split = SplitModel(model, 1)

    torch.testing.assert_close(logits(split.lower), expected)
    torch.testing.assert_close(logits(split.upper), whole)
    assert state(model) == before


def test_a_compiled_call_is_not_taken_for_the_view(model: PreTrainedModel) -> None:
    expected = logits(with_layers(model, [0]))
    compiled = lambda *args, **kwargs: pytest.fail("the whole model ran")  # noqa: E731
    vars(model)["_compiled_call_impl"] = compiled

    torch.testing.assert_close(logits(with_layers(model, [0])), expected)
    assert vars(model)["_compiled_call_impl"] is compiled


def test_a_forward_of_unknown_origin_is_refused(model: PreTrainedModel) -> None:
    original = model.model.forward
    model.model.forward = lambda *args, **kwargs: original(*args, **kwargs)

    with pytest.raises(UnsupportedModelError, match="forward of this LlamaModel object was replaced"):
        with_layers(model, [0])


@pytest.mark.parametrize("fault", ["none", "two"])
def test_layers_that_cannot_be_told(model: PreTrainedModel, fault: str) -> None:
    if fault == "two":
        model.model.others = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    else:
        model.model.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})

    with pytest.raises(UnsupportedModelError, match=f"holds {2 if fault == 'two' else 0} lists of 4 modules"):
        decoder_layers(model)


def test_lists_inside_layers_are_not_taken_for_the_layers() -> None:
    model = zoo.make("qwen2", num_hidden_layers=2)
    for layer in decoder_layers(model):
        layer.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    assert [type(layer).__name__ for layer in decoder_layers(model)] == ["Qwen2DecoderLayer"] * 2


def test_cost(model: PreTrainedModel) -> None:
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()

    assert layers_cost(model, [1, 2]) == pytest.approx((2 * layer + head) / (4 * layer + head))
    assert layers_cost(model, range(4)) == 1
