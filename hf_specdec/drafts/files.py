"""Distilled drafts on disk and on the hub: without what they share with their target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_specdec.atomic import replace_file
from hf_specdec.drafts.cut import build_cut, check_layers, check_names
from hf_specdec.drafts.distilled import as_dtype, bind, head_prefix, own_tensors, shared_weights
from hf_specdec.drafts.output import ReducedOutput
from hf_specdec.drafts.record import MODEL_TYPE, DraftRecord
from hf_specdec.errors import ArgumentError, DraftModelError
from hf_specdec.heads.checks import checked_dtype, checked_token_map
from hf_specdec.heads.files import Place

_CONFIG, _WEIGHTS, _TOKEN_MAP = "config.json", "model.safetensors", "token_map"


def save_draft(draft: PreTrainedModel, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors: layers, norm and token map, nothing that is the target's.

    Args:
        draft: what `make_draft` or `load_draft` returned.
        folder: made if need be; the files in it are replaced.
        dtype: of what is written.

    Raises:
        ArgumentError: no distilled draft, `folder` is a file, or `dtype` is no floating type.
    """
    record = DraftRecord.of(draft)
    dtype = checked_dtype(dtype) or torch.bfloat16
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(f"{str(folder)!r} is a file or lies below one; name a folder for the draft") from error
    weights = {name: as_dtype(value.cpu(), dtype).contiguous() for name, value in own_tensors(draft).items()}
    head = draft.get_output_embeddings()
    if isinstance(head, ReducedOutput):
        weights[_TOKEN_MAP] = head.token_map.to("cpu", torch.int32)  # half the size, and every vocabulary fits
    text = json.dumps(record.to_dict(), indent=2) + "\n"
    replace_file(path / _WEIGHTS, lambda place: save_file(weights, place, metadata={"format": "pt"}))
    replace_file(path / _CONFIG, lambda place: place.write_text(text, encoding="utf-8"))


def load_draft(name: str | os.PathLike[str], target: PreTrainedModel) -> PreTrainedModel:
    """A distilled draft bound to its target: a model of the target's class, for `assistant_model=` of any generate.

    Its embeddings share memory with the target's; of the output matrix it holds the rows of its vocabulary.

    Args:
        name: folder or hub id.
        target: the model that it was made for, quantised or not, which is not changed.

    Raises:
        ArgumentError: nothing is there, or it is no distilled draft, or one of its files is damaged.
        DraftModelError: it was made for another model, its two files contradict each other, or the target's output
            matrix is quantised.
    """
    place = _place(name)
    record = _read_record(place)
    record.check(target)
    check_layers(target, record.layers)
    weights = shared_weights(target)
    if not all(value.is_floating_point() for value in weights.values()):
        raise DraftModelError(
            f"embeddings or output matrix of this {type(target).__name__} are quantised, so a draft cannot share "
            "them; leave them out when you quantise the model"
        )
    source = f"{_WEIGHTS} of {str(name)!r}"
    read = _read_tensors(place, source)
    token_map = _token_map(read.pop(_TOKEN_MAP, None), record, source)
    read = {key: as_dtype(value.to(target.device), target.dtype) for key, value in read.items()}
    # Own rows have the names of the target's whole matrix, which is put in first.
    outputs = {key: value for key, value in read.items() if key.startswith(head_prefix(target))}
    others = {key: value for key, value in read.items() if key not in outputs}
    draft = build_cut(target, record.layers, weights | others, source=source)
    bind(draft, record, token_map)
    _check_tensors(read, draft, source)
    draft.load_state_dict(outputs, strict=False)
    return draft


def load_assistant(name: str | os.PathLike[str], target: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """Whatever model lies there, on the target's device: a distilled draft, or a model of its own.

    Args:
        name: folder or hub id.
        target: the model that it is to draft for.
        settings: for `AutoModelForCausalLM.from_pretrained`, if it is a model of its own.

    Raises:
        ArgumentError: a distilled draft one of whose files is damaged, or a config.json that describes nothing.
        DraftModelError: a distilled draft of another model, or one whose two files contradict each other.
        OSError: nothing is there, or its config.json is no JSON file.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except TypeError as error:  # transformers looks for fields in whatever the file holds
        raise ArgumentError(f"{_CONFIG} of {str(name)!r} does not hold the fields of a model: {error}") from error
    _check_fields(config, name)
    if config.get("model_type") == MODEL_TYPE:
        return load_draft(name, target)
    model: Any = AutoModelForCausalLM.from_pretrained(name, **settings)
    placed: PreTrainedModel = model.to(target.device)
    return placed


def _place(name: str | os.PathLike[str]) -> Place:
    if not isinstance(name, str | os.PathLike):
        raise ArgumentError(f"a draft is named by its folder or its id on the Hub, not by {name!r}")
    if Path(name).is_file():
        raise ArgumentError(
            f"{str(name)!r} is a file; name the folder that holds the draft's {_CONFIG} and {_WEIGHTS}"
        )
    return Place(name)


def _find(place: Place, name: str) -> Path:
    path = place.find(name)
    if path is None:
        raise ArgumentError(
            f"{str(place.source)!r} is no draft: there is no {name}"
            + ("" if place.is_local else ", or it is not in the cache and the Hub must not be asked")
            + "; name a folder that save_draft wrote, or such a repository"
        )
    return path


def _read_record(place: Place) -> DraftRecord:
    _find(place, _CONFIG)
    try:
        config = place.read_json(_CONFIG)
    except ArgumentError as error:
        raise ArgumentError(f"{error}; fetch it again or write it anew with save_draft") from error
    _check_fields(config, place.source)
    return DraftRecord.from_dict(config)


def _check_fields(config: object, name: str | os.PathLike[str]) -> None:
    if not isinstance(config, dict):
        raise ArgumentError(
            f"{_CONFIG} of {str(name)!r} holds {config!r}, not the fields of a model: fetch it again or write it anew"
        )


def _read_tensors(place: Place, source: str) -> dict[str, Tensor]:
    path = _find(place, _WEIGHTS)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ArgumentError(
            f"{source} is damaged ({error}): fetch it again or write it anew with save_draft"
        ) from error


def _check_tensors(read: dict[str, Tensor], draft: PreTrainedModel, source: str) -> None:
    """Are these all that a draft does not share with its target, and nothing else?"""
    own, parameters = own_tensors(draft), dict(draft.named_parameters())
    check_names(source, missing=own.keys() - read.keys(), needless=read.keys() - own.keys())
    for name, value in read.items():
        if name in parameters and not value.is_floating_point():
            raise DraftModelError(
                f"{name} in {source} holds {value.dtype}, not floating-point numbers: write it anew with save_draft"
            )
        if value.shape != own[name].shape:
            raise DraftModelError(
                f"{name} in {source} has shape {tuple(value.shape)}, but the draft's tokens and target ask for "
                f"{tuple(own[name].shape)}: fetch it again or write it anew with save_draft"
            )


def _token_map(tokens: Tensor | None, record: DraftRecord, source: str) -> Tensor | None:
    """The tokens of a file, if they are what its record promises."""
    found = None if tokens is None else tokens.numel()
    if found != record.draft_vocab_size:
        raise DraftModelError(
            f"{source} has {'no token_map' if found is None else f'a token_map of {found} tokens'}, but {_CONFIG} "
            f"says draft_vocab_size {json.dumps(record.draft_vocab_size)}: fetch both again or write them anew with "
            "save_draft"
        )
    if tokens is None:
        return None
    try:
        return checked_token_map(tokens, record.vocab_size)
    except ArgumentError as error:
        raise DraftModelError(f"{source}: {error}; write it anew with save_draft") from error
