"""How target, draft and heads come in: as names, paths or objects, in which form, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import zoo
from evaluations import PROMPTS, make_requests
from hf_specdec import ArgumentError, DraftModelError, Tree
from hf_specdec.lm_eval import SpeculativeLM

SETTINGS: dict[str, Any] = {"until": [], "max_gen_toks": 12}


def make(models: dict[str, str], assistant: object = None, **arguments: Any) -> SpeculativeLM:
    return SpeculativeLM(
        arguments.pop("pretrained", models["pretrained"]),
        arguments.pop("strategy", "tree"),
        models["assistant"] if assistant is None else assistant,  # type: ignore[arg-type]  # some are wrong
        **{"device": "cpu", "batch_size": 2, **arguments},
    )


def answers(model: HFLM) -> list[str]:
    return model.generate_until(make_requests(PROMPTS, **SETTINGS))


def test_paths(models: dict[str, str], tmp_path: Path) -> None:
    expected = answers(HFLM(models["pretrained"], device="cpu", batch_size=2))
    model = make(models, Path(models["assistant"]), pretrained=Path(models["pretrained"]))
    assert answers(model) == expected
    assert model.take_report()["assistant"] == models["assistant"]

    zoo.make_heads(AutoModelForCausalLM.from_pretrained(models["pretrained"])).save_pretrained(tmp_path)
    headed = SpeculativeLM(Path(models["pretrained"]), "medusa", heads=tmp_path, device="cpu", batch_size=2)
    assert answers(headed) == expected
    assert headed.take_report()["heads"] == str(tmp_path)


class TestTheDraftIsLoadedLikeTheTarget:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", torch.bfloat16])
    def test_dtype(self, models: dict[str, str], dtype: str | torch.dtype) -> None:
        model = make(models, dtype=dtype)
        assert model.assistant is not None
        assert model.assistant.dtype == model.model.dtype == getattr(torch, str(dtype).removeprefix("torch."))
        assert model.assistant.device == model.model.device

    def test_its_own_code_runs_where_it_is_trusted(
        self, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "draft"
        AutoModelForCausalLM.from_pretrained(models["assistant"]).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "model_type": "sailor",
            "auto_map": {"AutoConfig": "code.Sailor", "AutoModelForCausalLM": "code.Boat"},
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "code.py").write_text(
            "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
            "class Sailor(LlamaConfig):\n    model_type = 'sailor'\n\n\n"
            "class Boat(LlamaForCausalLM):\n    config_class = Sailor\n"
        )
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(tmp_path / "modules")

        with pytest.raises(ArgumentError, match="(?s)assistant=.*trust_remote_code"):
            make(models, folder)
        model = make(models, folder, trust_remote_code=True)
        assert type(model.assistant).__name__ == "Boat"
        assert answers(model) == answers(HFLM(models["pretrained"], device="cpu", batch_size=2))

    def test_a_device_map(self, models: dict[str, str], tmp_path: Path) -> None:
        """Half of the target is read from disk in each forward; lm-eval heeds a map if it is told to split a model."""
        split: dict[str, Any] = {"parallelize": True, "offload_folder": str(tmp_path)}
        here = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
        places = {**dict.fromkeys(here, "cpu"), "model.layers.1": "disk"}
        expected = answers(HFLM(models["pretrained"], device="cpu", batch_size=2, device_map=places, **split))
        model = make(models, device_map=places, **split)
        assert model.model.hf_device_map == places
        assert next(model.model.model.layers[1].parameters()).is_meta
        assert model.assistant is not None
        assert model.assistant.device == torch.device("cpu")
        assert answers(model) == expected


class TestRefusals:
    @pytest.mark.parametrize("name", ["pretrained", "assistant", "heads"])
    @pytest.mark.parametrize("value", [3, b"folder", Tree], ids=["int", "bytes", "class"])
    def test_no_names_and_no_models(self, models: dict[str, str], name: str, value: object) -> None:
        with pytest.raises(
            ArgumentError, match=rf"^{name} must be a folder, a hub id or .*, not (int|bytes|the class)"
        ):
            make(models, **{name: value})

    def test_no_target(self, models: dict[str, str]) -> None:
        with pytest.raises(ArgumentError, match="pretrained must be .*, not NoneType"):
            make(models, pretrained=None)

    def test_a_strategy_that_is_none_is_named_by_its_type(self, models: dict[str, str]) -> None:
        with pytest.raises(ArgumentError, match="not the class Tree$"):
            make(models, strategy=Tree)
        with pytest.raises(ArgumentError, match="not LlamaForCausalLM$"):
            make(models, strategy=zoo.make("llama"))

    @pytest.mark.parametrize("name", ["/nowhere/x", "nowhere", "a/b/c/d", ""])
    def test_there_is_no_draft(self, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ArgumentError, match=f"^assistant='{name}' cannot be loaded"):
            make(models, name)

    @pytest.mark.parametrize("content", ["{}", "{", '{"model_type": "nothing"}'])
    def test_a_folder_without_a_model(self, models: dict[str, str], tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ArgumentError, match="^assistant='.*' cannot be loaded as a causal language model: "):
            make(models, tmp_path)

    def test_a_draft_of_another_kind(self, models: dict[str, str], tmp_path: Path) -> None:
        config = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        T5ForConditionalGeneration(config).save_pretrained(tmp_path)
        with pytest.raises(ArgumentError, match="^assistant='.*' cannot be loaded as a causal language model: "):
            make(models, tmp_path)

    def test_drafts_that_cannot_serve_are_refused_at_the_start(self, models: dict[str, str]) -> None:
        with pytest.raises(DraftModelError, match="different tokenizers"):
            make(models, zoo.make("llama", vocab_size=4000))
        with pytest.raises(ArgumentError, match=r"not Linear; load it with .* \(and unwrap PEFT"):
            make(models, nn.Linear(2, 2))
