"""What is written for other programs, judged by their own formulas and names, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

import medusa_files as files
import zoo
from hf_specdec import ArgumentError, MedusaHeads
from hf_specdec.cli import app
from hf_specdec.heads import export_heads
from medusa_files import HIDDEN, VOCAB

TOKEN_MAP = torch.tensor([90, 2, 41, 7, 8])


def trained(target: PreTrainedModel, **settings: Any) -> MedusaHeads:
    heads = MedusaHeads.for_target(target, **{"num_heads": 2, "base_model": "some/base"} | settings)
    numbers = files.Numbers(5)
    for weight in heads.parameters():
        weight.data.copy_(numbers(*weight.shape))
    return heads


def logits(heads: MedusaHeads, target: PreTrainedModel) -> Tensor:
    return heads.logits(files.hidden_states(), heads.output_of(target))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


class TestFasterDecoding:
    def test_own_matrices_are_the_first_version(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target, own_output=True)
        names = export_heads(heads, tmp_path / "out", "fasterdecoding")
        assert names == ["config.json", "medusa_lm_head.safetensors"]
        tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
        assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
            "0.0.linear.weight": [HIDDEN, HIDDEN],
            "0.0.linear.bias": [HIDDEN],
            "0.1.weight": [VOCAB, HIDDEN],
            "1.0.linear.weight": [HIDDEN, HIDDEN],
            "1.0.linear.bias": [HIDDEN],
            "1.1.weight": [VOCAB, HIDDEN],
        }
        assert torch.equal(files.fasterdecoding_logits(tensors, 2, 1, None), logits(heads, target))
        assert read_config(tmp_path / "out") == {
            "medusa_num_heads": 2,
            "medusa_num_layers": 1,
            "base_model_name_or_path": "some/base",
        }

    def test_shared_matrix_is_the_second_version(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target)
        export_heads(heads, tmp_path, "fasterdecoding")
        tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
        assert set(tensors) == {f"{head}.0.linear.{part}" for head in range(2) for part in ("weight", "bias")}
        expected = files.fasterdecoding_logits(tensors, 2, 1, target.lm_head.weight)
        assert torch.equal(expected, logits(heads, target))
        assert read_config(tmp_path)["version"] == "2"

    def test_shared_matrix_is_copied_when_asked(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target)
        export_heads(heads, tmp_path, "fasterdecoding", base=target, own_output=True)
        tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
        assert torch.equal(files.fasterdecoding_logits(tensors, 2, 1, None), logits(heads, target))
        assert "version" not in read_config(tmp_path)
        assert not heads.own_output  # the object stays as it is

    def test_blocks_without_bias_get_zeros(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target, bias=False)
        export_heads(heads, tmp_path, "fasterdecoding")
        tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
        assert not tensors["1.0.linear.bias"].any()
        expected = files.fasterdecoding_logits(tensors, 2, 1, target.lm_head.weight)
        torch.testing.assert_close(expected, logits(heads, target))

    def test_tree_goes_beside_them(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target, tree=[[0], [1], [0, 0]])
        export_heads(heads, tmp_path, "fasterdecoding")
        assert json.loads((tmp_path / "medusa_choices.json").read_text()) == [[0], [1], [0, 0]]
        assert MedusaHeads.from_pretrained(tmp_path).tree == heads.tree

    def test_one_block_several_times(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target, num_layers=2)
        with pytest.raises(ArgumentError, match="cannot hold 2 different blocks"):
            export_heads(heads, tmp_path / "out", "fasterdecoding")
        for block in heads.blocks:
            block[1].load_state_dict(block[0].state_dict())
        export_heads(heads, tmp_path / "out", "fasterdecoding")
        tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
        expected = files.fasterdecoding_logits(tensors, 2, 2, target.lm_head.weight)
        assert torch.equal(expected, logits(heads, target))

    @pytest.mark.parametrize("own_output", [False, True])
    def test_reduced_vocabulary_is_refused(self, target: PreTrainedModel, tmp_path: Path, own_output: bool) -> None:
        heads = trained(target, token_map=TOKEN_MAP, own_output=own_output)
        with pytest.raises(ArgumentError, match="no place for a reduced vocabulary of 5 tokens"):
            export_heads(heads, tmp_path / "out", "fasterdecoding", base=target)
        assert not (tmp_path / "out").exists()

    def test_reduced_vocabulary_may_be_dropped(self, target: PreTrainedModel, tmp_path: Path) -> None:
        heads = trained(target, token_map=TOKEN_MAP)
        export_heads(heads, tmp_path, "fasterdecoding", full_vocabulary=True)
        again = MedusaHeads.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(again, target)[..., TOKEN_MAP], logits(heads, target))
        assert heads.token_map is not None


class TestVllm:
    @pytest.mark.parametrize("bias", [False, True])
    def test_own_matrices(self, target: PreTrainedModel, tmp_path: Path, bias: bool) -> None:
        heads = trained(target, own_output=True, num_layers=2, bias=bias)
        assert export_heads(heads, tmp_path, "vllm") == ["config.json", "model.safetensors"]
        tensors = load_file(tmp_path / "model.safetensors")
        assert {"blocks.1.layers.1.weight", "lm_heads.1.weight"} <= set(tensors)
        assert ("blocks.0.layers.0.bias" in tensors) == bias
        assert torch.equal(files.vllm_logits(tensors, 2, 2), logits(heads, target))
        assert read_config(tmp_path) == {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": "some/base",
            "dtype": "float32",
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "truncated_vocab_size": VOCAB,
            "medusa_fc_bias": bias,
            "original_lm_head": False,
        }

    @pytest.mark.parametrize("token_map", [None, TOKEN_MAP])
    def test_shared_matrix_is_copied(self, target: PreTrainedModel, tmp_path: Path, token_map: Tensor | None) -> None:
        heads = trained(target, token_map=token_map)
        with pytest.raises(ArgumentError, match="base: the target is needed"):
            export_heads(heads, tmp_path, "vllm")
        export_heads(heads, tmp_path, "vllm", base=target)
        tensors = load_file(tmp_path / "model.safetensors")
        config = read_config(tmp_path)
        assert config["original_lm_head"]
        assert config["truncated_vocab_size"] == (VOCAB if token_map is None else 5)
        assert torch.equal(files.vllm_logits(tensors, 2, 1, token_map), logits(heads, target))
        again = MedusaHeads.from_pretrained(tmp_path)
        assert torch.equal(logits(again, target), logits(heads, target))
        assert not again.own_output

    def test_vocabulary_that_heads_do_not_know_is_that_of_the_target(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        tensors = files.fasterdecoding(2, output=False)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path / "in", "medusa_lm_head.pt", tensors))
        export_heads(heads, tmp_path / "out", "vllm", base=target)
        assert read_config(tmp_path / "out")["vocab_size"] == VOCAB

    def test_half_precision(self, target: PreTrainedModel, tmp_path: Path) -> None:
        export_heads(trained(target).to(torch.bfloat16), tmp_path, "vllm", base=target)
        assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
        assert read_config(tmp_path)["dtype"] == "bfloat16"


class TestEveryLayout:
    @pytest.mark.parametrize("layout", ["own", "fasterdecoding", "vllm"])
    @pytest.mark.parametrize("own_output", [False, True])
    def test_round_trip(self, target: PreTrainedModel, tmp_path: Path, layout: str, own_output: bool) -> None:
        heads = trained(target, own_output=own_output)
        export_heads(heads, tmp_path, layout, base=target)
        again = MedusaHeads.from_pretrained(tmp_path)
        assert again.own_output == own_output
        assert torch.equal(logits(again, target), logits(heads, target))

    def test_published_file_through_every_layout(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = files.fasterdecoding(3)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path / "in", "medusa_lm_head.pt", tensors))
        for layout in ("vllm", "own", "fasterdecoding"):
            export_heads(heads, tmp_path / layout, layout)
            heads = MedusaHeads.from_pretrained(tmp_path / layout)
        last = load_file(tmp_path / "fasterdecoding" / "medusa_lm_head.safetensors")
        assert last.keys() == tensors.keys()
        assert all(torch.equal(last[name], tensor) for name, tensor in tensors.items())

    def test_folder_must_be_new_or_empty(self, target: PreTrainedModel, tmp_path: Path) -> None:
        (tmp_path / "medusa_lm_head.pt").touch()
        with pytest.raises(ArgumentError, match="new or empty folder"):
            export_heads(trained(target), tmp_path, "own")

    def test_unknown_layout(self, target: PreTrainedModel, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="layout='gguf' must be own, fasterdecoding or vllm"):
            export_heads(trained(target), tmp_path, "gguf")

    def test_wrong_base(self, target: PreTrainedModel, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="size 32, but LlamaForCausalLM has 16"):
            export_heads(trained(target), tmp_path, "vllm", base=zoo.make("llama", hidden_size=16))

    @pytest.mark.parametrize("option", ["own_output", "full_vocabulary"])
    def test_options_without_an_effect(self, target: PreTrainedModel, tmp_path: Path, option: str) -> None:
        with pytest.raises(ArgumentError, match="these have their own"):
            export_heads(trained(target, own_output=True), tmp_path, "own", base=target, **{option: True})
        if option == "full_vocabulary":
            with pytest.raises(ArgumentError, match="guess among all tokens already"):
                export_heads(trained(target), tmp_path, "own", full_vocabulary=True)


def convert(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["convert-heads", *map(str, arguments)])


class TestCommand:
    def test_published_to_own(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = files.fasterdecoding(3)
        source = files.write(tmp_path / "in", "medusa_lm_head.pt", tensors, {"base_model_name_or_path": "some/base"})
        result = convert(source, tmp_path / "out", "--json")
        assert result.exit_code == 0, result.stderr
        record = json.loads(result.stdout)
        assert record["files"] == ["README.md", "config.json", "model.safetensors"]
        assert (record["heads"], record["layers"], record["own_output"]) == (3, 1, True)
        assert record["base_model"] == "some/base"
        heads = MedusaHeads.from_pretrained(tmp_path / "out")
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 3, 1, None))

    def test_own_to_vllm_with_a_base(self, tiny_model_folder: Path, tmp_path: Path) -> None:
        target = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        heads = trained(target, token_map=torch.tensor([3, 1, 7]), base_model=None)
        heads.save_pretrained(tmp_path / "own")
        result = convert(tmp_path / "own", tmp_path / "out", "--layout", "vllm", "--base", tiny_model_folder)
        assert result.exit_code == 0, result.stderr
        assert "draft vocab size  3" in result.stdout
        assert read_config(tmp_path / "out")["base_model_name_or_path"] == tiny_model_folder.name
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(files.vllm_logits(tensors, 2, 1), logits(heads, target))

    def test_number_format(self, target: PreTrainedModel, tmp_path: Path) -> None:
        trained(target).save_pretrained(tmp_path / "own")
        assert convert(tmp_path / "own", tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
        assert load_file(tmp_path / "out" / "model.safetensors")["blocks.0.0.linear.bias"].dtype == torch.bfloat16

    def test_error_is_one_line(self, target: PreTrainedModel, tmp_path: Path) -> None:
        trained(target).save_pretrained(tmp_path / "own")
        result = convert(tmp_path / "own", tmp_path / "out", "--layout", "vllm")
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: base: the target is needed")
        assert len(result.stderr.splitlines()) == 1
