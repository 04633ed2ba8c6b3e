"""What is no draft, or a damaged one, is refused with the file and the cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import zoo
from hf_specdec import ArgumentError, DraftModelError, load_draft, make_draft, save_draft
from hf_specdec.drafts import load_assistant, stock_model

TOKENS = torch.tensor([3, 90, 5, *range(10, 60)])
Tensors = dict[str, torch.Tensor]
REMOVED = object()


def write(target: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    save_draft(make_draft(target, [1], **{"token_map": TOKENS, **settings}), folder)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not REMOVED}))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()  # `load_file` maps it
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b"[1]", b"null", b'"text"', b"3"])
def test_no_config(target: PreTrainedModel, tmp_path: Path, content: bytes) -> None:
    (write(target, tmp_path) / "config.json").write_bytes(content)

    with pytest.raises(ArgumentError, match=r"config\.json of .* write it anew"):
        load_draft(tmp_path, target)
    with pytest.raises((ArgumentError, OSError), match=r"config\.json"):
        load_assistant(tmp_path, target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(target: PreTrainedModel, tmp_path: Path, name: str) -> None:
    (write(target, tmp_path) / name).unlink()

    with pytest.raises(ArgumentError, match=rf"there is no {name}; name a folder that save_draft wrote"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:100], lambda data: b"", lambda _: b"ab"]
)
def test_damaged_weights(target: PreTrainedModel, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write(target, tmp_path) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ArgumentError, match=r"model\.safetensors of .* is damaged .*save_draft"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("layers", ["abc", None, 1, [0.5], ["1"], [True], {"1": 1}]),
        ("draft_vocab_size", ["53", 53.0, 0, True]),
        ("hidden_size", [None, "32", 32.5]),
        ("num_hidden_layers", [None]),
        ("vocab_size", [[97]]),
        ("architecture", [None, 3]),
        ("own_output", [None, 1, "true"]),
        ("base_model", [3, ["a"]]),
    ],
)
def test_wrong_fields(target: PreTrainedModel, tmp_path: Path, field: str, values: list[object]) -> None:
    write(target, tmp_path)
    for value in values:
        change_config(tmp_path, **{field: value})
        with pytest.raises(ArgumentError, match=rf"config\.json is wrong: {field} .*save_draft"):
            load_draft(tmp_path, target)


def test_no_place(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write(target, tmp_path)

    with pytest.raises(ArgumentError, match="is a file; name the folder"):
        load_draft(tmp_path / "config.json", target)
    with pytest.raises(ArgumentError, match="no folder here and no repository"):
        load_draft(tmp_path / "no" / "such" / "folder", target)
    with pytest.raises(ArgumentError, match=r"owner/no-such-draft.* not in the cache"):
        load_draft("owner/no-such-draft", target)
    with pytest.raises(ArgumentError, match="not by None"):
        load_draft(None, target)


@pytest.mark.parametrize(
    ("draft_vocab_size", "tokens", "message"),
    [
        (53, None, "has no token_map, but config.json says draft_vocab_size 53"),
        (None, TOKENS, "has a token_map of 53 tokens, but config.json says draft_vocab_size null"),
        (52, TOKENS, "has a token_map of 53 tokens, but config.json says draft_vocab_size 52"),
        (53, TOKENS.float(), "token_map must be a list of tokens, not torch.float32"),
        (53, TOKENS[None], "token_map must be a list of tokens"),
        (53, TOKENS + 90, "the vocabulary has 97"),
        (53, TOKENS * 0, "holds a token twice"),
    ],
)
def test_contradicting_tokens(
    target: PreTrainedModel,
    tmp_path: Path,
    draft_vocab_size: int | None,
    tokens: torch.Tensor | None,
    message: str,
) -> None:
    write(target, tmp_path)
    change_config(tmp_path, draft_vocab_size=draft_vocab_size)
    change_tensors(tmp_path, lambda t: t.pop("token_map") if tokens is None else t.update(token_map=tokens))

    with pytest.raises(DraftModelError, match=rf"model\.safetensors of .*{message}"):
        load_draft(tmp_path, target)


NORM, QUERY, HEAD = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
EMBEDDINGS, SECOND = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("own_output", "tensors", "message"),
    [
        (True, {HEAD: None}, f"lacks {HEAD}, which"),
        (True, {HEAD: torch.zeros(52, 32)}, rf"{HEAD} in .* has shape \(52, 32\), but .*\(53, 32\)"),
        (True, {HEAD: torch.zeros(97, 32)}, rf"{HEAD} in .* has shape \(97, 32\), but .*\(53, 32\)"),
        (True, {HEAD: torch.zeros(53, 32, dtype=torch.int8)}, f"{HEAD} in .* holds torch.int8"),
        (False, {HEAD: torch.zeros(53, 32)}, f"holds {HEAD}, which"),
        (False, {NORM: None}, f"lacks {NORM}, which"),
        (False, {QUERY: None}, f"lacks {QUERY}, which"),
        (False, {QUERY: None, QUERY.replace("q_proj", "v_proj"): None}, f"lacks {QUERY} and 1 more, which"),
        (False, {QUERY: torch.zeros(32, 32, dtype=torch.int32)}, f"{QUERY} in .* holds torch.int32"),
        (False, {SECOND: torch.zeros(32, 32)}, f"holds {SECOND}, which"),
        (False, {EMBEDDINGS: torch.zeros(97, 32)}, f"holds {EMBEDDINGS}, which"),
        (False, {"other": torch.zeros(3)}, "holds other, which"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_other_tensors(
    tmp_path: Path, tied: bool, own_output: bool, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    target = zoo.make("llama", attention="sdpa", tie_word_embeddings=tied)
    write(target, tmp_path, own_output=own_output)

    def change(stored: Tensors) -> None:
        for name, value in tensors.items():
            if value is None:
                del stored[name]
            else:
                stored[name] = value

    change_tensors(tmp_path, change)
    with pytest.raises(DraftModelError, match=rf"{message}.*save_draft"):
        load_draft(tmp_path, target)


def test_own_rows_contradict_the_config(target: PreTrainedModel, tmp_path: Path) -> None:
    write(target, tmp_path)
    change_config(tmp_path, own_output=True)
    with pytest.raises(DraftModelError, match="lacks lm_head.weight"):
        load_draft(tmp_path, target)
    write(target, tmp_path, own_output=True)
    change_config(tmp_path, own_output=False)
    with pytest.raises(DraftModelError, match="holds lm_head.weight"):
        load_draft(tmp_path, target)
    change_config(tmp_path, own_output=True, draft_vocab_size=None)
    with pytest.raises(ArgumentError, match="own_output needs a token_map"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize("layers", [[0.5], "01", ["0"], [True], None, 1, torch.tensor([0])])
def test_layers_of_a_wrong_type(target: PreTrainedModel, layers: Any) -> None:
    with pytest.raises(ArgumentError, match="layers must be a list of whole numbers"):
        make_draft(target, layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_map": [1, 2]}, r"not a list; pass torch\.tensor"),
        ({"token_map": torch.tensor(3)}, "token_map must be a list of tokens"),
        ({"token_map": torch.tensor([1.0])}, "token_map must be a list of tokens"),
        ({"own_output": 1, "token_map": TOKENS}, "own_output must be true or false"),
        ({"base_model": 3}, "base_model must be the name"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating type"),
    ],
)
def test_settings_of_a_wrong_type(target: PreTrainedModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_draft(target, [0], **settings)


def test_saving_onto_a_file(target: PreTrainedModel, tmp_path: Path) -> None:
    draft, file = make_draft(target, [0]), tmp_path / "file"
    file.write_text("kept")

    for place in (file, file / "below"):
        with pytest.raises(ArgumentError, match="name a folder"):
            save_draft(draft, place)
    with pytest.raises(ArgumentError, match="dtype=torch.int8 must be a floating type"):
        save_draft(draft, tmp_path / "new", dtype=torch.int8)
    assert file.read_text() == "kept"
    assert not (tmp_path / "new").exists()


def test_save_pretrained(target: PreTrainedModel, tmp_path: Path) -> None:
    """Refused where nobody could load what it writes, also of a loaded draft; else it is a model of its own."""
    draft = make_draft(target, [0], token_map=TOKENS)
    for one in (draft, load_draft(write(target, tmp_path / "draft"), target)):
        with pytest.raises(DraftModelError, match=r"save_draft\(draft, folder\)"):
            one.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()

    ids = torch.arange(12)[None]
    for one, name in ((make_draft(target, [0]), "all"), (stock_model(draft, target), "stock")):
        one.save_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(type(target).from_pretrained(tmp_path / name)(ids).logits, one(ids).logits)
