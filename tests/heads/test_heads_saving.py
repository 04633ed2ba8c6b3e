"""The own layout, its card, and what would be uploaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import medusa_files as files
from hf_specdec import ArgumentError, MedusaHeads
from hf_specdec.heads import files as heads_files

TOKEN_MAP = torch.tensor([96, 3, 50, 4])


@pytest.fixture
def heads(target: PreTrainedModel) -> MedusaHeads:
    numbers = files.Numbers()
    heads = MedusaHeads.for_target(
        target, num_heads=2, num_layers=2, token_map=TOKEN_MAP, base_model="some/base", tree=[[0], [0, 0], [1]]
    )
    for weight in heads.parameters():
        weight.data.copy_(numbers(*weight.shape))
    heads.rank_rates = [[0.5, 0.25], [0.4, 0.1]]
    heads.notes["Training data"] = "Words of the **sea**."
    return heads


def logits(heads: MedusaHeads, target: PreTrainedModel) -> Tensor:
    return heads.logits(files.hidden_states(), heads.output_of(target))


class TestFolder:
    @pytest.mark.parametrize("own_output", [False, True])
    def test_round_trip(self, target: PreTrainedModel, heads: MedusaHeads, tmp_path: Path, own_output: bool) -> None:
        if own_output:
            heads.set_output(target)
            heads.outputs[1].weight.data *= 2
        heads.save_pretrained(tmp_path / "heads")
        assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [
            "README.md",
            "config.json",
            "model.safetensors",
        ]
        again = MedusaHeads.from_pretrained(tmp_path / "heads")
        assert again.config == heads.config
        assert torch.equal(logits(again, target), logits(heads, target))
        assert torch.equal(again.token_ids(torch.arange(4)), TOKEN_MAP)

    def test_files_as_documented(self, heads: MedusaHeads, tmp_path: Path) -> None:
        heads.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
            **{f"blocks.{head}.{layer}.linear.weight": [32, 32] for head in range(2) for layer in range(2)},
            **{f"blocks.{head}.{layer}.linear.bias": [32] for head in range(2) for layer in range(2)},
            "token_map": [4],
        }
        assert json.loads((tmp_path / "config.json").read_text()) == {
            "hidden_size": 32,
            "vocab_size": 97,
            "num_heads": 2,
            "num_layers": 2,
            "bias": True,
            "own_output": False,
            "draft_vocab_size": 4,
            "tree": [[0], [1], [0, 0]],
            "rank_rates": [[0.5, 0.25], [0.4, 0.1]],
            "base_model": "some/base",
            "notes": {"Training data": "Words of the **sea**."},
        }

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_stays(self, heads: MedusaHeads, tmp_path: Path, dtype: torch.dtype) -> None:
        heads.to(dtype).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype, torch.int64}
        assert next(MedusaHeads.from_pretrained(tmp_path).parameters()).dtype == dtype

    def test_a_write_that_fails_leaves_the_old_file(
        self, heads: MedusaHeads, tmp_path: Path, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heads.save_pretrained(tmp_path)
        before = (tmp_path / "model.safetensors").read_bytes()

        def fail(tensors: object, path: Path, metadata: object) -> None:
            path.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr("hf_specdec.heads.medusa.save_file", fail)
        with pytest.raises(OSError, match="no space left"):
            heads.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == before
        assert not list(tmp_path.glob(".*"))

    @pytest.mark.parametrize("below", ["", "further"])
    def test_a_file_in_the_folders_place(self, heads: MedusaHeads, tmp_path: Path, below: str) -> None:
        (tmp_path / "heads").write_text("mine")
        with pytest.raises(ArgumentError, match="save_directory=.* must be a folder, but .*heads' is a file"):
            heads.save_pretrained(tmp_path / "heads" / below)
        assert (tmp_path / "heads").read_text() == "mine"


class TestCard:
    def test_says_what_is_known(self, heads: MedusaHeads, tmp_path: Path) -> None:
        heads.save_pretrained(tmp_path, model_card_kwargs={"sections": {"Speed": "Not measured."}})
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == "some/base"
        assert card.data.to_dict()["library_name"] == "hf_specdec"
        assert {"medusa", "speculative-decoding"} <= set(card.data.tags)
        text = card.text
        assert "# Medusa heads for some/base" in text
        assert "| guess among | the 4 tokens of `token_map`, of 97 |" in text
        assert "| tree | 3 nodes, 2 deep |" in text
        assert "| tokens per forward that it promises | 1.95 |" in text  # 1 + .5 + .25 + .5 x .4
        assert "| head | rank 0 | rank 1 | first 2 |" in text
        assert "| 0 | 0.500 | 0.250 | 0.750 |" in text
        assert text.index("## Accuracy") < text.index("## Training data") < text.index("## Speed")
        assert "Words of the **sea**." in text

    def test_is_replaced_unless_a_person_wrote_it(self, heads: MedusaHeads, tmp_path: Path) -> None:
        heads.save_pretrained(tmp_path)
        heads.notes["Caveat"] = "Rough."
        heads.save_pretrained(tmp_path)
        assert "## Caveat" in (tmp_path / "README.md").read_text()
        (tmp_path / "README.md").write_text("Mine.")
        heads.save_pretrained(tmp_path)
        assert (tmp_path / "README.md").read_text() == "Mine."

    def test_notes_of_one_object_are_its_own(self, heads: MedusaHeads, target: PreTrainedModel) -> None:
        assert MedusaHeads.for_target(target).notes == {}

    def test_path_of_a_local_model_stays_private(self, tmp_path: Path) -> None:
        import zoo

        target = zoo.make("llama")
        (tmp_path / "my-model").mkdir()
        target.config.name_or_path = str(tmp_path / "my-model")
        heads = MedusaHeads.for_target(target)
        assert heads.base_model == "my-model"
        assert "base_model:" not in str(heads.generate_model_card())  # no name on the Hub


class Hub:
    """The Hub as far as heads meet it: a folder, and a log of what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.options: dict[str, Any] = {}

    def download(self, repo: str, name: str, **options: Any) -> str:
        assert repo == "some/heads"
        self.asked.append(name)
        self.options = options
        path = self.folder / name
        if not path.is_file():
            raise huggingface_hub.errors.EntryNotFoundError(name)
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    hub.folder.mkdir()
    monkeypatch.setattr(heads_files, "hf_hub_download", hub.download)
    return hub


class TestHub:
    def test_upload(self, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel) -> None:
        calls: dict[str, Any] = {}

        class Api:
            def __init__(self, token: str | None) -> None:
                calls["token"] = token

            def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
                calls["private"] = private
                return type("Url", (), {"repo_id": repo_id})

            def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> str:
                calls["repo"] = repo_id
                calls["names"] = sorted(path.name for path in folder_path.iterdir())
                calls["card"] = (folder_path / "README.md").read_text()
                calls["heads"] = MedusaHeads.from_pretrained(folder_path)
                return "the url"

        monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
        assert heads.push_to_hub("me/heads", private=True, token="secret") == "the url"
        assert (calls["repo"], calls["private"], calls["token"]) == ("me/heads", True, "secret")
        assert calls["names"] == ["README.md", "config.json", "model.safetensors"]
        assert 'MedusaHeads.from_pretrained("me/heads")' in calls["card"]
        assert torch.equal(logits(calls["heads"], target), logits(heads, target))

    def test_download_of_own_layout(self, hub: Hub, heads: MedusaHeads, target: PreTrainedModel) -> None:
        heads.save_pretrained(hub.folder)
        again = MedusaHeads.from_pretrained("some/heads", revision="v2", token="secret")
        assert torch.equal(logits(again, target), logits(heads, target))
        assert hub.options["revision"] == "v2"
        assert hub.options["token"] == "secret"
        assert "README.md" not in hub.asked

    def test_only_shards_with_heads_are_downloaded(self, hub: Hub, target: PreTrainedModel) -> None:
        tensors = files.fasterdecoding(2)
        shards = [
            {"model.norm.weight": torch.ones(32)},
            {f"medusa_head.{name}": tensor for name, tensor in tensors.items()},
        ]
        files.write_shards(hub.folder, shards, {"vocab_size": 97, "hidden_size": 32})
        heads = MedusaHeads.from_pretrained("some/heads")
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 2, 1, None))
        assert [name for name in hub.asked if name.startswith("model-")] == ["model-00002-of-00002.safetensors"]
        assert heads.base_model == "some/heads"

    def test_nothing_is_downloaded_beyond_the_heads(self, hub: Hub) -> None:
        files.write(hub.folder, "medusa_lm_head.safetensors", files.fasterdecoding(2))
        files.write(hub.folder, "model.safetensors", files.vllm(2))
        assert MedusaHeads.from_pretrained("some/heads").num_heads == 2
        assert not [name for name in hub.asked if name.startswith(("model", "pytorch_model"))]

    def test_no_such_name(self) -> None:
        with pytest.raises(ArgumentError, match="no folder here and no repository"):
            MedusaHeads.from_pretrained("no/such/folder")

    def test_offline_and_not_fetched_before(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="holds no Medusa heads"):
            MedusaHeads.from_pretrained("some/heads", local_files_only=True, cache_dir=tmp_path)

    def test_hub_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

        monkeypatch.setattr(heads_files, "hf_hub_download", refuse)
        monkeypatch.setattr(heads_files, "is_offline_mode", lambda: False)
        with pytest.raises(ArgumentError, match="the Hub did not answer"):
            MedusaHeads.from_pretrained("some/heads")
