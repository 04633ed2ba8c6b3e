"""Reading heads from a folder, a file or the Hub, whatever layout they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from hf_specdec.errors import ArgumentError
from hf_specdec.heads.checks import checked_base_model, checked_notes
from hf_specdec.heads.choices import checked_rates, checked_tree
from hf_specdec.heads.files import CONFIG, TREE, Place, TensorFiles, is_tensor_file
from hf_specdec.heads.layouts import Weights, head_tensors, is_own, parse

_OWN_SETTINGS = ("tree", "rank_rates", "base_model", "notes")


def read_heads(source: str | PathLike[str], hub_options: Mapping[str, Any]) -> Weights:
    """Read heads of any layout; of a whole model, only the shards that hold heads.

    Args:
        source: a folder, a file in one, or the name of a repository.
        hub_options: what `hf_hub_download` takes.

    Raises:
        ArgumentError: there are no heads, there are two sets of them, or they cannot be read or understood.
    """
    path = Path(source)
    if path.is_file() and not is_tensor_file(path):
        raise ArgumentError(
            f"{str(source)!r} is no file of tensors (.safetensors, .pt or .bin): give one, or its folder "
            f"{str(path.parent)!r}"
        )
    place = Place(path.parent if path.is_file() else source, dict(hub_options))
    found: list[tuple[TensorFiles, dict[str, str], bool]] = []
    for files in [place.tensor_file(path.name)] if path.is_file() else place.tensor_files():
        names = files.names()
        if wanted := head_tensors(names):
            found.append((files, wanted, len(wanted) < len(names)))
            if not place.is_local:
                break  # looking further would download further
    if not found:
        raise ArgumentError(
            f"{str(source)!r} holds no Medusa heads: no tensors such as '0.0.linear.weight' in medusa_lm_head or "
            "model files (.safetensors, .pt, .bin)"
        )
    if len(found) > 1:
        raise ArgumentError(
            f"{str(source)!r} holds heads twice, in {' and in '.join(files.name for files, _, _ in found)}: "
            "name the file, or remove one"
        )
    ((files, wanted, in_model),) = found
    config = place.read_json(CONFIG) or {}
    if not isinstance(config, dict):
        raise ArgumentError(f"{CONFIG} of {str(source)!r} holds no settings")
    try:
        weights = parse({wanted[name]: tensor for name, tensor in files.read(list(wanted)).items()}, config)
    except ArgumentError as error:
        raise ArgumentError(f"{files.name} of {str(source)!r}: {error}") from error
    settings = _settings(place, config, is_own(wanted.values()), in_model)
    _check_settings(settings, weights, str(source))
    return dataclasses.replace(weights, settings={name: value for name, (_, value) in settings.items()})


def _settings(place: Place, config: dict[str, Any], own: bool, in_model: bool) -> dict[str, tuple[str, Any]]:
    """Further arguments of the heads: name to where it is written, and its value."""
    if own:
        return {name: (f"{name} in {CONFIG}", config[name]) for name in _OWN_SETTINGS if name in config}
    base_model = config.get("base_model_name_or_path")
    if in_model:  # the target lies in the same place
        base_model = Path(place.source).resolve().name if place.is_local else str(place.source)
    return {
        "base_model": (f"base_model_name_or_path in {CONFIG}", base_model),
        "tree": (TREE, place.read_json(TREE)),
    }


def _check_settings(settings: Mapping[str, tuple[str, Any]], weights: Weights, source: str) -> None:
    """Refuse what the heads would refuse, but with the file that says it."""
    num_heads = len(weights.blocks)
    width = weights.vocab_size if weights.token_map is None else len(weights.token_map)
    checks: dict[str, Callable[[Any], object]] = {
        "tree": lambda tree: checked_tree(tree, num_heads, width),
        "rank_rates": lambda rank_rates: checked_rates(rank_rates, num_heads),
        "base_model": checked_base_model,
        "notes": checked_notes,
    }
    for name, (where, value) in settings.items():
        try:
            if value is not None:
                checks[name](value)
        except ArgumentError as error:
            raise ArgumentError(f"{source!r}: {error}; correct or remove {where}") from error
