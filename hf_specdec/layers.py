"""Views of a model: the same modules, with some left out or listened to. The model itself is never touched."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import UnsupportedModelError

Module = TypeVar("Module", bound=nn.Module)

_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

_tuple_lengths: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, first to last.

    Raises:
        UnsupportedModelError: they cannot be told by the model's structure.
    """
    return list(_modules_on(model, _path(model))[-1].children())


def layers_cost(model: PreTrainedModel, kept: Collection[int]) -> float:
    """Weights that a view with these layers and the model's head reads, as a share of those of all layers and head."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)]
    head = model.get_output_embeddings()
    head_size = 0 if head is None else sum(weight.numel() for weight in head.parameters())
    return (sum(sizes[index] for index in kept) + head_size) / (sum(sizes) + head_size)


def with_layers(model: PreTrainedModel, kept: Collection[int]) -> PreTrainedModel:
    """A view in which only some layers run; the others hand on what they are given.

    Layers keep their numbers, so a cache of the view has empty places where the model has layers that do not run.
    Hooks on the model itself are not called by the view.

    Args:
        model: the model; a probe of one token is run when it is seen first.
        kept: indices of the layers that run.
    """
    return _view(model, _skipped(model, set(range(len(decoder_layers(model)))) - set(kept)))


class SplitModel:
    """A model as two views: its first layers with norm and head, and all the rest, fed with what the first left.

    Attributes:
        lower: runs the first `exit_layer` layers, then norm and head. Hooks on the model are not called.
        upper: runs the other layers, norm and head on `hidden_states`. Hooks on the model are called as by the model.
        hidden_states: `[B, n, hidden_size]` behind layer `exit_layer - 1`; each run of `lower` leaves its own here.
    """

    def __init__(self, model: PreTrainedModel, exit_layer: int) -> None:
        layers = decoder_layers(model)
        last = exit_layer - 1
        tuple_length = _tuple_length(model)
        self._note = _Note()
        above, below = range(exit_layer, len(layers)), range(last)
        recording = _replaced(layers[last], partial(_record, self._note, layers[last]))
        injecting = _replaced(layers[last], partial(_inject, self._note, tuple_length))
        self.lower = _view(model, _skipped(model, above) | {last: recording})
        self.upper = _view(model, _skipped(model, below) | {last: injecting}, keep_hooks=True)

    @property
    def hidden_states(self) -> Tensor:
        """See the class."""
        return self._note.hidden_states

    @hidden_states.setter
    def hidden_states(self, hidden_states: Tensor) -> None:
        self._note.hidden_states = hidden_states


class OutputTap:
    """A model as a view that leaves what its output matrix read.

    `output_hidden_states` would give the same, but transformers then puts hooks on the model's layers for good.

    Attributes:
        model: the view. Hooks on the model are called as by the model.
        hidden_states: `[B, n, hidden_size]` of the positions whose logits the latest forward returned.

    Raises:
        UnsupportedModelError: the model has no output matrix that could be listened to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        output = model.get_output_embeddings()
        path = next((name for name, one in model.named_modules() if one is output), None)
        if path is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no output matrix that heads could listen to")
        self._note = _Note()
        listening = _replaced(output, partial(_listen, self._note, output))
        self.model = _with_module(model, path.split("."), listening, keep_hooks=True)

    @property
    def hidden_states(self) -> Tensor:
        """See the class."""
        return self._note.hidden_states


class _Note:
    """What a view leaves. Views know it and not the object that holds them, which would close a circle."""

    def __init__(self) -> None:
        self.hidden_states = torch.empty(0)


def _record(note: _Note, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = layer(*args, **kwargs)
    note.hidden_states = output[0] if isinstance(output, tuple) else output
    return output


def _inject(note: _Note, tuple_length: int, *args: Any, **kwargs: Any) -> Any:
    return _as_output(note.hidden_states, tuple_length)


def _listen(note: _Note, output: nn.Module, hidden_states: Tensor) -> Any:
    note.hidden_states = hidden_states
    return output(hidden_states)


def _path(model: PreTrainedModel) -> list[str]:
    """Attribute names from the model to the list of its decoder layers."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [name for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds {len(outermost)} lists of {count} modules where its decoder layers should "
            "be the only one, so a part of its layers cannot draft; use another strategy for this model"
        )
    path: list[str] = outermost[0].split(".")
    return path


def _modules_on(model: nn.Module, path: list[str]) -> list[nn.Module]:
    modules = [model]
    for name in path:
        modules.append(modules[-1].get_submodule(name))
    return modules


def _view(model: PreTrainedModel, replaced: Mapping[int, nn.Module], keep_hooks: bool = False) -> PreTrainedModel:
    """Shallow copies of the modules on the way to the layers; everything else is shared."""
    path = _path(model)
    layers: nn.Module = _twin(_modules_on(model, path)[-1])
    layers._modules.update({str(index): layer for index, layer in replaced.items()})
    return _with_module(model, path, layers, keep_hooks)


def _with_module(model: PreTrainedModel, path: list[str], twin: nn.Module, keep_hooks: bool) -> PreTrainedModel:
    """A view with another module at a place."""
    parents = _modules_on(model, path)[:-1]
    for parent, name in zip(reversed(parents), reversed(path), strict=True):
        _check_forward(parent)
        parent_twin = _twin(parent, keep_hooks)
        parent_twin._modules[name] = twin
        twin = parent_twin
    assert isinstance(twin, PreTrainedModel)
    return twin


def _skipped(model: PreTrainedModel, indices: Collection[int]) -> dict[int, nn.Module]:
    layers, tuple_length = decoder_layers(model), _tuple_length(model)

    def hand_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _as_output(hidden_states, tuple_length)

    return {index: _replaced(layers[index], hand_on) for index in indices}


def _replaced(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A stand-in for a layer: attributes that the model may read are the layer's, what it computes is not."""
    twin = _twin(layer)
    vars(twin)["forward"] = forward
    return twin


def _twin(module: Module, keep_hooks: bool = False) -> Module:
    twin: Module = type(module).__new__(type(module))
    # A compiled call would run the original; methods that were put on the object are the original's too.
    vars(twin).update({name: _rebound(value, module, twin) for name, value in vars(module).items()})
    vars(twin).update(_modules=dict(module._modules), _compiled_call_impl=None)
    for name in _FORWARD_HOOKS:
        hooks = getattr(module, name) if keep_hooks else {}
        # A hook must be told of the module that it was put on.
        vars(twin)[name] = OrderedDict((key, partial(_call_for, module, hook)) for key, hook in hooks.items())
    return twin


def _call_for(module: nn.Module, hook: Callable[..., Any], twin: nn.Module, *args: Any) -> Any:
    return hook(module, *args)


def _rebound(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """Methods that were put on a module (accelerate does so to place it on devices), bound to its twin."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, partial) and any(argument is module for argument in value.args):
        own = partial(value.func, *(twin if a is module else a for a in value.args), **value.keywords)
        vars(own).update(vars(value))
        return own
    return value


def _check_forward(module: nn.Module) -> None:
    forward = vars(module).get("forward")
    if forward is not None and _rebound(forward, module, module) is forward:
        raise UnsupportedModelError(
            f"the forward of this {type(module).__name__} object was replaced by {forward!r}, which would run the "
            "model and not a view of it; restore it, or use another strategy"
        )


def _as_output(hidden_states: Tensor, tuple_length: int) -> Any:
    return (hidden_states, *[None] * (tuple_length - 1)) if tuple_length else hidden_states


@torch.no_grad()
def _tuple_length(model: PreTrainedModel) -> int:
    """How many values the model's layers return in a tuple; 0 if it is a tensor. Seen in a forward of one token."""
    if model not in _tuple_lengths:
        seen: list[Any] = []
        layer = decoder_layers(model)[0]

        def look(*args: Any, **kwargs: Any) -> Any:
            seen.append(layer(*args, **kwargs))
            return seen[0]

        view = _view(model, {0: _replaced(layer, look)})
        view(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
        _tuple_lengths[model] = len(seen[0]) if isinstance(seen[0], tuple) else 0
    return _tuple_lengths[model]
