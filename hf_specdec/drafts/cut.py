"""A model with some of another's decoder layers and everything else of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.compat import attention_implementation
from hf_specdec.drafts.quiet import quiet_loading
from hf_specdec.errors import ArgumentError, DraftModelError
from hf_specdec.layers import decoder_layers, with_layers

_PROBE_TOKENS = 8


def spread_layers(model: PreTrainedModel, count: int) -> tuple[int, ...]:
    """`count` layers of a model at even distances, the first and the last among them.

    Raises:
        ArgumentError: it has fewer.
    """
    last = model.config.get_text_config(decoder=True).num_hidden_layers - 1
    if not 1 <= count <= last + 1:
        raise ArgumentError(f"a draft of {count} layers cannot be made of a model with {last + 1}")
    return (0,) if count == 1 else tuple(round(index * last / (count - 1)) for index in range(count))


def cut_model(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the same class that has only some layers.

    All its parameters share memory with the model's, which is not changed; do not train it without copying them.

    Args:
        model: a decoder-only model.
        layers: indices of the layers, in rising order.

    Raises:
        ArgumentError: layers that are no whole numbers.
        DraftModelError: no such layers, or a model that a few of its layers do not make a model of.
    """
    check_layers(model, layers)
    if not all(weight.is_floating_point() for weight in model.parameters()):
        raise DraftModelError(
            f"{type(model).__name__} is quantised, and quantised layers cannot be trained; make the draft from the "
            "same model in 16 or 32 bit, it serves the quantised one too"
        )
    draft = build_cut(model, layers, _cut_weights(model, layers))
    if not _same_output(draft, with_layers(model, layers)):
        raise _inseparable(model, layers)
    return draft


def build_cut(
    model: PreTrainedModel,
    layers: Sequence[int],
    weights: dict[str, Tensor],
    *,
    untied: bool = False,
    source: str | None = None,
) -> PreTrainedModel:
    """The cut with weights from elsewhere, which it shares.

    Args:
        model: says what kind of model it is.
        layers: see `cut_model`.
        weights: all tensors by the names that they have in the cut.
        untied: whether the output matrix is not the embeddings', even if it is in the model.
        source: the file that the tensors of the layers are from, if they are not the model's own.

    Raises:
        DraftModelError: these are not the tensors that the cut has.
    """
    config = _cut_config(model.config, layers)
    if untied:
        config.tie_word_embeddings = False
    # The constructor alone would draw random weights first, which takes seconds for a large vocabulary.
    with quiet_loading():
        loaded: Any = type(model).from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=model.dtype,
            attn_implementation=attention_implementation(model),
            ignore_mismatched_sizes=True,  # told below
            output_loading_info=True,
        )
    draft: PreTrainedModel = loaded[0]
    info: dict[str, set[Any]] = loaded[1]
    for name, given, wanted in sorted(info.pop("mismatched_keys")):
        raise DraftModelError(
            f"{name} has shape {tuple(given)}, but {tuple(wanted)} in this {type(model).__name__}: the draft was made "
            "for another model"
        )
    if source is not None:
        check_names(source, missing=info["missing_keys"], needless=info["unexpected_keys"])
    wrong = sorted(str(key) for keys in info.values() for key in keys)
    if wrong:
        raise _inseparable(model, layers, wrong[0])
    _share(draft, weights)
    draft.to(model.device)  # type: ignore[arg-type]
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft


def check_names(source: str, *, missing: Collection[str], needless: Collection[str]) -> None:
    """Does a file hold the tensors of a draft, and no others?

    Raises:
        DraftModelError: no.
    """
    if missing:
        raise DraftModelError(
            f"{source} lacks {min(missing)}{_and_others(missing)}, which a draft of these layers has: fetch it again "
            "or write it anew with save_draft"
        )
    if needless:
        raise DraftModelError(
            f"{source} holds {min(needless)}{_and_others(needless)}, which a draft as its config.json describes it "
            "has not: fetch both files again or write them anew with save_draft"
        )


def check_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Can these layers be cut out of a model?

    Raises:
        ArgumentError: they are no whole numbers.
        DraftModelError: no.
    """
    require_whole_layers(layers)
    if model.config.get_text_config(decoder=True) is not model.config or model.config.is_encoder_decoder:
        raise DraftModelError(f"{type(model).__name__} is more than a decoder of text; its layers cannot be cut out")
    total = model.config.num_hidden_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= total:
        raise DraftModelError(
            f"layers must be different numbers from 0 to {total - 1} in rising order, not {tuple(layers)}"
        )


def layers_prefix(model: PreTrainedModel) -> str:
    """What the names of the parameters of decoder layers begin with, such as "model.layers."."""
    first = decoder_layers(model)[0]
    return str(next(name for name, module in model.named_modules() if module is first)).removesuffix("0")


def require_whole_layers(layers: object) -> None:
    """Check that layers are a list of numbers.

    Raises:
        ArgumentError: no.
    """
    whole = isinstance(layers, Sequence) and all(type(layer) is int for layer in layers)
    if not whole:
        raise ArgumentError(f"layers must be a list of whole numbers such as [0, 15, 29], not {layers!r}")


def _and_others(names: Collection[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _inseparable(model: PreTrainedModel, layers: Sequence[int], detail: str = "other logits") -> DraftModelError:
    return DraftModelError(
        f"layers {', '.join(map(str, layers))} of {type(model).__name__} do not make a model of their own ({detail}): "
        "its layers differ by number in a way that the config of a smaller model cannot express; try other layers"
    )


def _cut_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    cut = copy.deepcopy(config)
    total = config.num_hidden_layers
    cut.num_hidden_layers = len(layers)
    if getattr(cut, "quantization_config", None) is not None:
        del cut.quantization_config
    # What is said of each layer is a list: its kind of attention, whether it turns positions, ...
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == total:
            setattr(cut, name, [value[index] for index in layers])
    return cut


def _cut_weights(model: PreTrainedModel, layers: Sequence[int]) -> dict[str, Tensor]:
    """The model's own tensors under the names that they have in the cut."""
    prefix = layers_prefix(model)
    numbers = {str(old): str(new) for new, old in enumerate(layers)}
    weights = {}
    for name, value in model.state_dict().items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if number not in numbers:
                continue
            name = f"{prefix}{numbers[number]}.{rest}"
        weights[name] = value
    return weights


def _share(draft: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Let the parameters be these tensors themselves, on whatever device they are."""
    shared: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for name, parameter in list(draft.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        own = shared.setdefault(parameter, nn.Parameter(weights[name].detach(), requires_grad=False))
        setattr(draft.get_submodule(owner), attribute, own)


@torch.no_grad()
def _same_output(draft: PreTrainedModel, view: PreTrainedModel) -> bool:
    """Whether the cut computes what the model computes when its other layers hand on what they are given."""
    if view.training:  # dropout may be on, and switching it off would change the model
        return True
    tokens = torch.arange(_PROBE_TOKENS, device=view.device)[None] % draft.config.vocab_size
    ours, theirs = (model(input_ids=tokens, use_cache=False).logits for model in (draft, view))
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
