"""Distilled draft models: made of a target's layers, and bound to its embeddings and to rows of its output matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafts.cut import build_cut, cut_model, layers_prefix
from hf_specdec.drafts.output import ReducedOutput
from hf_specdec.drafts.record import MODEL_TYPE, DraftRecord
from hf_specdec.errors import ArgumentError, DraftModelError
from hf_specdec.heads.checks import checked_dtype, checked_token_map


def make_draft(
    target: PreTrainedModel,
    layers: Sequence[int],
    *,
    token_map: Tensor | None = None,
    own_output: bool = False,
    dtype: torch.dtype | None = None,
    base_model: str | None = None,
) -> PreTrainedModel:
    """An untrained draft: copies of some of the target's layers and of its final norm, on its embeddings.

    It is a model of the target's class, for `assistant_model=` of any generate. Its embeddings share memory with the
    target's. Parameters of layers and norm require gradients, all others do not.

    Args:
        target: a decoder-only model, which is not changed.
        layers: indices of its layers, in rising order.
        token_map: int64 `[D]`, the tokens that the draft can guess, whose rows of the target's output matrix it takes;
            None for all, and the whole matrix is shared.
        own_output: make these rows the draft's own, which are then trained and stored as well.
        dtype: of layers and norm; by default the target's.
        base_model: name of the target, for whoever loads the draft.

    Raises:
        ArgumentError: a setting of a wrong type; tokens that the target does not know or that come twice; or own rows
            without a `token_map`.
        DraftModelError: a model that cannot be cut so.
    """
    if token_map is not None and not isinstance(token_map, Tensor):
        raise ArgumentError(
            f"token_map must be an int64 tensor [D], not a {type(token_map).__name__}; pass torch.tensor(token_map)"
        )
    dtype = checked_dtype(dtype)
    draft = cut_model(target, layers)
    if token_map is not None:
        token_map = checked_token_map(token_map, target.config.vocab_size)
    config = target.config
    record = DraftRecord(
        architecture=type(target).__name__,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        layers=tuple(layers),
        draft_vocab_size=None if token_map is None else len(token_map),
        own_output=own_output,
        base_model=base_model,
    )
    bind(draft, record, token_map)
    for parameter in own_parameters(draft).values():
        parameter.data = parameter.detach().to(dtype or parameter.dtype, copy=True)
        parameter.requires_grad_(True)
    return draft


def bind(draft: PreTrainedModel, record: DraftRecord, token_map: Tensor | None) -> None:
    """Give a cut model its smaller head, and its record.

    Args:
        draft: what `cut_model` or `build_cut` returned, which is changed.
        record: what it was made of.
        token_map: as `checked_token_map` returns it, or None for all tokens.

    Raises:
        DraftModelError: a head that has no rows to take.
    """
    if token_map is not None:
        head = draft.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise DraftModelError(
                f"the head of {type(draft).__name__} is a {type(head).__name__}, of which no rows can be taken; "
                "draft with all tokens"
            )
        rows = token_map.to(head.weight.device)
        bias = None if head.bias is None else head.bias.detach()[rows]
        draft.set_output_embeddings(ReducedOutput(head.weight.detach()[rows], bias, rows, draft.config.vocab_size))
        # Nothing may take the small head for the embeddings' twin again.
        draft.config.tie_word_embeddings = False
        draft.all_tied_weights_keys = {}
        vars(draft)["save_pretrained"] = _refuse_to_save
    setattr(draft.config, MODEL_TYPE, record.to_dict())


def own_parameters(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What a distilled draft does not share with its target: all but embeddings and, unless it owns one, the head."""
    shared = {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    if not DraftRecord.of(draft).own_output:
        shared |= {id(weight) for weight in draft.get_output_embeddings().parameters()}
    return {name: weight for name, weight in draft.named_parameters() if id(weight) not in shared}


def own_tensors(draft: PreTrainedModel) -> dict[str, Tensor]:
    """The same and the buffers of its layers, detached: what must be stored."""
    own, prefix = own_parameters(draft), layers_prefix(draft)
    return {name: value for name, value in draft.state_dict().items() if name in own or name.startswith(prefix)}


def stock_model(draft: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """The draft as a model that needs neither its target nor this package: all embeddings, the whole output matrix.

    It guesses among all tokens. Save it with `save_pretrained`; until then it shares memory with draft and target.

    Raises:
        ArgumentError: no distilled draft.
        DraftModelError: not the target that the draft was made for.
    """
    record = DraftRecord.of(draft)
    record.check(target)
    weights = shared_weights(target)
    head = draft.get_output_embeddings()
    for name, value in own_tensors(draft).items():
        value = as_dtype(value.to(target.device), target.dtype)
        if name.startswith(head_prefix(target)):
            assert isinstance(head, ReducedOutput)
            value = weights[name].index_copy(0, head.token_map, value)
        weights[name] = value
    return build_cut(target, record.layers, weights, untied=record.own_output)


def shared_weights(target: PreTrainedModel) -> dict[str, Tensor]:
    """The target's tensors outside of its layers."""
    prefix = layers_prefix(target)
    return {name: value for name, value in target.state_dict().items() if not name.startswith(prefix)}


def as_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a floating-point format, if it holds such numbers."""
    return value.to(dtype) if value.is_floating_point() else value


def head_prefix(model: PreTrainedModel) -> str:
    """What the names of the head's parameters begin with, such as "lm_head."."""
    head = model.get_output_embeddings()
    return str(next(name for name, module in model.named_modules() if module is head)) + "."


def _refuse_to_save(*args: object, **settings: object) -> None:
    """In place of a draft's `save_pretrained`, which would write an output matrix that no model class can load."""
    raise DraftModelError(
        "this draft has fewer output rows than its config has tokens, so from_pretrained could not load what "
        "save_pretrained writes; use hf_specdec.save_draft(draft, folder), and load_draft to load it"
    )
