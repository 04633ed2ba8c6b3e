"""Heads in every published layout, from files written by hand."""

from __future__ import annotations

import json
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import medusa_files as files
from hf_specdec import ArgumentError, MedusaHeads
from medusa_files import HIDDEN, VOCAB

CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/base"}
TOKEN_MAP = torch.tensor([90, 2, 41, 7, 8])


def logits(heads: MedusaHeads, target: PreTrainedModel) -> Tensor:
    return heads.logits(files.hidden_states(), heads.output_of(target))


class TestFasterDecoding:
    @pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
    def test_first_version(self, target: PreTrainedModel, tmp_path: Path, name: str) -> None:
        """Published configs say 2 heads where there are 5: the weights decide."""
        tensors = files.fasterdecoding(5)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, name, tensors, CONFIG))
        assert (heads.num_heads, heads.num_layers, heads.own_output) == (5, 1, True)
        assert (heads.hidden_size, heads.vocab_size, heads.base_model) == (HIDDEN, VOCAB, "some/base")
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 5, 1, None))
        heads.check(target)

    def test_second_version_shares_the_output(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = files.fasterdecoding(3, output=False)
        files.write(tmp_path, "medusa_lm_head.safetensors", tensors, CONFIG | {"version": "2"})
        heads = MedusaHeads.from_pretrained(str(tmp_path))
        assert (heads.num_heads, heads.own_output, heads.vocab_size) == (3, False, None)
        expected = files.fasterdecoding_logits(tensors, 3, 1, target.lm_head.weight)
        assert torch.equal(logits(heads, target), expected)

    @pytest.mark.parametrize("output", [False, True])
    def test_several_layers(self, target: PreTrainedModel, tmp_path: Path, output: bool) -> None:
        tensors = files.fasterdecoding(2, output=output, layers=3)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "medusa_lm_head.pt", tensors, CONFIG))
        assert (heads.num_layers, heads.own_output) == (3, output)
        expected = files.fasterdecoding_logits(tensors, 2, 3, None if output else target.lm_head.weight)
        assert torch.equal(logits(heads, target), expected)

    def test_repeated_block_in_a_pickle(self, target: PreTrainedModel, tmp_path: Path) -> None:
        """The published code applies one block several times, so its tensors share memory."""
        tensors = files.fasterdecoding(2)
        for head in range(2):
            tensors[f"{head}.2.weight"] = tensors.pop(f"{head}.1.weight")
            for part in ("weight", "bias"):
                tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "medusa_lm_head.pt", tensors, CONFIG))
        assert heads.num_layers == 2
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 2, 2, None))
        heads.save_pretrained(tmp_path / "own")  # safetensors would refuse memory that is shared
        assert torch.equal(logits(MedusaHeads.from_pretrained(tmp_path / "own"), target), logits(heads, target))

    def test_repeated_block_that_is_kept_once(self, target: PreTrainedModel, tmp_path: Path) -> None:
        """Writers of safetensors drop what repeats; the index of the output matrix says how often."""
        tensors = files.fasterdecoding(2)
        for head in range(2):
            tensors[f"{head}.2.weight"] = tensors.pop(f"{head}.1.weight")
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "medusa_lm_head.safetensors", tensors, CONFIG))
        whole = dict(tensors)
        for head in range(2):
            for part in ("weight", "bias"):
                whole[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(whole, 2, 2, None))

    def test_whole_model_in_shards(self, target: PreTrainedModel, tmp_path: Path) -> None:
        """Shards without heads are not opened: here they are not even there."""
        tensors = files.fasterdecoding(2)
        prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        first = {name: prefixed.pop(name) for name in list(prefixed)[:2]}
        shards = [
            {"model.norm.weight": torch.ones(HIDDEN)},
            first | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)},
            prefixed,
        ]
        config = {"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2}
        files.write_shards(tmp_path, shards, config | CONFIG)
        (tmp_path / "model-00001-of-00003.safetensors").unlink()
        heads = MedusaHeads.from_pretrained(tmp_path)
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 2, 1, None))
        assert heads.base_model == tmp_path.name  # the target lies beside them

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_whole_model_in_one_file(self, target: PreTrainedModel, tmp_path: Path, name: str) -> None:
        tensors = files.fasterdecoding(2)
        model = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        model["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, name, model))
        assert torch.equal(logits(heads, target), files.fasterdecoding_logits(tensors, 2, 1, None))

    def test_published_tree_beside_the_heads(self, tmp_path: Path) -> None:
        files.write(tmp_path, "medusa_lm_head.pt", files.fasterdecoding(2), CONFIG)
        (tmp_path / "medusa_choices.json").write_text("[[0], [0, 0], [1]]")
        assert MedusaHeads.from_pretrained(tmp_path).tree == ((0,), (1,), (0, 0))
        (tmp_path / "medusa_choices.json").write_text("[[0], [0, 0], [0, 0, 0]]")
        with pytest.raises(ArgumentError, match="3 nodes deep, but there are 2 heads"):
            MedusaHeads.from_pretrained(tmp_path)


class TestVllm:
    @pytest.mark.parametrize("prefix", ["", "medusa_heads."])
    @pytest.mark.parametrize(("layers", "bias"), [(1, False), (2, True)])
    def test_matrix_for_each_head(
        self, target: PreTrainedModel, tmp_path: Path, prefix: str, layers: int, bias: bool
    ) -> None:
        tensors = files.vllm(3, layers, bias)
        config = files.vllm_config(3, layers, medusa_fc_bias=bias)
        files.write(tmp_path, "model.safetensors", {prefix + name: tensor for name, tensor in tensors.items()}, config)
        heads = MedusaHeads.from_pretrained(tmp_path)
        assert (heads.num_heads, heads.num_layers, heads.bias, heads.own_output) == (3, layers, bias, True)
        assert torch.equal(logits(heads, target), files.vllm_logits(tensors, 3, layers))

    @pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
    def test_copy_of_the_targets_matrix(self, target: PreTrainedModel, tmp_path: Path, name: str) -> None:
        tensors = {key: tensor for key, tensor in files.vllm(2).items() if key.startswith("blocks")}
        tensors[name] = target.lm_head.weight.detach().clone()
        config = files.vllm_config(2, original_lm_head=True)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "model.safetensors", tensors, config))
        assert not heads.own_output
        expected = files.vllm_logits(tensors | {"lm_head.weight": tensors[name]}, 2, 1)
        assert torch.equal(logits(heads, target), expected)

    @pytest.mark.parametrize("rows", [VOCAB, len(TOKEN_MAP)])
    def test_token_map(self, target: PreTrainedModel, tmp_path: Path, rows: int) -> None:
        """Matrices of all tokens are cut to those of the map."""
        tensors = files.vllm(2, rows=rows)
        config = files.vllm_config(2, truncated_vocab_size=len(TOKEN_MAP))
        files.write(tmp_path, "model.safetensors", tensors | {"token_map": TOKEN_MAP}, config)
        heads = MedusaHeads.from_pretrained(tmp_path)
        assert torch.equal(logits(heads, target), files.vllm_logits(tensors, 2, 1, TOKEN_MAP))
        assert heads.token_ids(torch.tensor([0, 4])).tolist() == [90, 8]
        assert heads.vocab_size == VOCAB

    def test_token_map_of_the_targets_matrix(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = {key: tensor for key, tensor in files.vllm(2).items() if key.startswith("blocks")}
        tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
        config = files.vllm_config(2, truncated_vocab_size=len(TOKEN_MAP), original_lm_head=True)
        files.write(tmp_path, "model.safetensors", tensors | {"token_map": TOKEN_MAP}, config)
        heads = MedusaHeads.from_pretrained(tmp_path)
        assert torch.equal(logits(heads, target), files.vllm_logits(tensors, 2, 1, TOKEN_MAP))

    def test_token_map_that_vllm_ignores(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = files.vllm(2)
        config = files.vllm_config(2, truncated_vocab_size=VOCAB)
        files.write(tmp_path, "model.safetensors", tensors | {"token_map": TOKEN_MAP}, config)
        heads = MedusaHeads.from_pretrained(tmp_path)
        assert heads.token_map is None
        assert torch.equal(logits(heads, target), files.vllm_logits(tensors, 2, 1))


class TestDtype:
    def test_that_of_the_file_or_that_asked_for(self, tmp_path: Path) -> None:
        tensors = {name: tensor.to(torch.float16) for name, tensor in files.fasterdecoding(2).items()}
        files.write(tmp_path, "medusa_lm_head.pt", tensors, CONFIG)
        for dtype, expected in (
            (None, torch.float16),
            ("auto", torch.float16),
            ("bfloat16", torch.bfloat16),
            (torch.float32, torch.float32),
        ):
            heads = MedusaHeads.from_pretrained(tmp_path, dtype=dtype)
            assert {weight.dtype for weight in heads.parameters()} == {expected}
            assert not heads.training
        for wrong in ("int8", "nonsense", torch.int64):
            with pytest.raises(ArgumentError, match="dtype="):
                MedusaHeads.from_pretrained(tmp_path, dtype=wrong)

    def test_mixed_files_take_the_wider(self, tmp_path: Path) -> None:
        tensors = files.fasterdecoding(1)
        tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].to(torch.float16)
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "medusa_lm_head.pt", tensors, CONFIG))
        assert {weight.dtype for weight in heads.parameters()} == {torch.float32}


class Exploit:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


class TestRefused:
    @pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
    def test_pickle_with_code_is_not_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        torch.save({"0.0.linear.weight": Exploit()}, tmp_path / name)
        with pytest.raises(ArgumentError, match="could run code"):
            MedusaHeads.from_pretrained(tmp_path)
        (tmp_path / name).write_bytes(pickle.dumps(Exploit(), protocol=2))
        with pytest.raises(ArgumentError, match="could run code"):
            MedusaHeads.from_pretrained(tmp_path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("content", [{"0.0.linear.weight": Exploit()}, "bytes"])
    def test_torch_does_not_advise_to_run_the_code(self, tmp_path: Path, content: object) -> None:
        torch.save(content, tmp_path / "medusa_lm_head.pt")
        if content == "bytes":
            (tmp_path / "medusa_lm_head.pt").write_bytes(b"no tensors at all")
        with pytest.raises(ArgumentError, match="medusa_lm_head.pt was not read") as raised:
            MedusaHeads.from_pretrained(tmp_path)
        shown = "".join(traceback.format_exception(raised.value))
        assert "weights_only" not in shown.replace("weights_only=True", "")
        assert ("(it names getattr)" in str(raised.value)) == (content != "bytes")  # what the pickle would have run

    @pytest.mark.parametrize("name", ["config.json", "README.md", "medusa_choices.json"])
    def test_file_that_is_none_of_tensors(self, tmp_path: Path, name: str) -> None:
        files.write(tmp_path, "medusa_lm_head.pt", files.fasterdecoding(2), CONFIG)
        (tmp_path / name).write_text("{}")
        with pytest.raises(ArgumentError, match="is no file of tensors .*: give one, or its folder") as raised:
            MedusaHeads.from_pretrained(tmp_path / name)
        assert str(raised.value).endswith(repr(str(tmp_path)))

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("protocol", [2, 3])
    def test_pickles_of_another_protocol_are_read_in_silence(
        self, tmp_path: Path, protocol: int, zipped: bool
    ) -> None:
        path = tmp_path / "medusa_lm_head.pt"
        tensors = files.fasterdecoding(2)
        torch.save(tensors, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert MedusaHeads.from_pretrained(tmp_path).num_heads == 2
            assert MedusaHeads.from_pretrained(path).num_heads == 2

    @pytest.mark.parametrize("protocol", [4, 5])
    def test_pickles_that_torch_does_not_read_safely(self, tmp_path: Path, protocol: int) -> None:
        torch.save(files.fasterdecoding(2), tmp_path / "medusa_lm_head.pt", pickle_protocol=protocol)
        with pytest.raises(ArgumentError, match="perhaps of pickle protocol 4 or above.*convert it to safetensors"):
            MedusaHeads.from_pretrained(tmp_path)

    @pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
    def test_damaged_file(self, tmp_path: Path, name: str) -> None:
        files.write(tmp_path, name, files.fasterdecoding(2), CONFIG)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ArgumentError, match=name):
            MedusaHeads.from_pretrained(tmp_path)

    def test_pickle_of_something_else(self, tmp_path: Path) -> None:
        torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
        with pytest.raises(ArgumentError, match="no dictionary of tensors"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_old_pickles_are_read(self, tmp_path: Path) -> None:
        torch.save(files.fasterdecoding(2), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
        assert MedusaHeads.from_pretrained(tmp_path).num_heads == 2

    def test_no_heads(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="holds no Medusa heads"):
            MedusaHeads.from_pretrained(tmp_path)
        files.write(tmp_path, "model.safetensors", {"model.norm.weight": torch.ones(3)}, {})
        with pytest.raises(ArgumentError, match="holds no Medusa heads"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_heads_twice_and_the_way_out(self, target: PreTrainedModel, tmp_path: Path) -> None:
        published, vllm = files.fasterdecoding(2), files.vllm(3)
        files.write(tmp_path, "medusa_lm_head.pt", published)
        files.write(tmp_path, "model.safetensors", vllm)
        with pytest.raises(ArgumentError, match="twice, in medusa_lm_head.pt and in model.safetensors"):
            MedusaHeads.from_pretrained(tmp_path)
        heads = MedusaHeads.from_pretrained(tmp_path / "model.safetensors")
        assert torch.equal(logits(heads, target), files.vllm_logits(vllm, 3, 1))
        assert MedusaHeads.from_pretrained(tmp_path / "medusa_lm_head.pt").num_heads == 2

    def test_safe_file_goes_before_its_pickle(self, tmp_path: Path) -> None:
        files.write(tmp_path, "medusa_lm_head.pt", files.fasterdecoding(2))
        files.write(tmp_path, "medusa_lm_head.safetensors", files.fasterdecoding(3))
        assert MedusaHeads.from_pretrained(tmp_path).num_heads == 3

    def test_base_model_beside_heads_is_no_conflict(self, tmp_path: Path) -> None:
        files.write(tmp_path, "medusa_lm_head.safetensors", files.fasterdecoding(2))
        files.write(tmp_path, "model.safetensors", {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)})
        assert MedusaHeads.from_pretrained(tmp_path).num_heads == 2

    @pytest.mark.parametrize(
        ("remove", "add", "message"),
        [
            (["0.0.linear.weight"], {}, "head 0 of 2 has a weight for the layers \\[\\]"),
            (["1.0.linear.bias"], {}, "head 1 of 2 has a bias for the layers \\[\\]"),
            (["1.1.weight"], {}, "2 heads, but output matrices for the heads \\[0\\]"),
            ([], {"3.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}, "head 2 of 4"),
            ([], {"1.0.linear.weight": torch.zeros(HIDDEN, 8)}, "must all be \\[32, 32\\], but one is \\[32, 8\\]"),
            ([], {"1.0.linear.bias": torch.zeros(8)}, "must all be \\[32\\], but one is \\[8\\]"),
            ([], {"1.1.weight": torch.zeros(96, HIDDEN)}, "must all be \\[97, 32\\], but one is \\[96, 32\\]"),
            ([], {"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)}, "torch.int8"),
            (
                [],
                {"0.0.linear.weight": torch.tensor(1.0)},
                "'0.0.linear.weight' .* 2 dimensions, but its shape is \\[\\]",
            ),
            ([], {"0.0.linear.bias": torch.tensor(1.0)}, "'0.0.linear.bias' .* 1 dimensions, but its shape is \\[\\]"),
            ([], {"0.1.weight": torch.tensor(1.0)}, "'0.1.weight' .* 2 dimensions, but its shape is \\[\\]"),
            ([], {"token_map": torch.tensor(1)}, "'token_map' .* 1 dimensions, but its shape is \\[\\]"),
            ([], {"0.1.bias": torch.zeros(VOCAB)}, "'0.1.bias' that no known layout"),
            ([], {"sequential.weight": torch.zeros(3)}, "'sequential.weight' that no known layout"),
        ],
    )
    def test_inconsistent_tensors(
        self, tmp_path: Path, remove: list[str], add: dict[str, Tensor], message: str
    ) -> None:
        tensors = {name: tensor for name, tensor in files.fasterdecoding(2).items() if name not in remove} | add
        files.write(tmp_path, "medusa_lm_head.pt", tensors)
        with pytest.raises(ArgumentError, match=message):
            MedusaHeads.from_pretrained(tmp_path)

    def test_different_numbers_of_layers(self, tmp_path: Path) -> None:
        tensors = files.fasterdecoding(2, output=False)
        tensors |= files.fasterdecoding(1, output=False, layers=2)
        files.write(tmp_path, "medusa_lm_head.pt", tensors)
        with pytest.raises(ArgumentError, match="different numbers of layers: \\[2, 1\\]"):
            MedusaHeads.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 64}, "hidden_size=64, but weights have 32"),
            ({"vocab_size": 100}, "vocab_size=100, but output matrices have 97 rows"),
            ({"hidden_size": "32"}, "hidden_size='32', which must be a whole number"),
            ({"vocab_size": "97"}, "vocab_size='97', which must be a whole number"),
            ({"truncated_vocab_size": [97]}, "truncated_vocab_size=\\[97\\], which must be a whole number"),
            ({"original_lm_head": "false"}, "original_lm_head='false', which must be true or false"),
            (
                {"base_model_name_or_path": 5},
                "base_model=5 .*correct or remove base_model_name_or_path in config.json",
            ),
        ],
    )
    def test_config_that_contradicts(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        files.write(tmp_path, "model.safetensors", files.vllm(2), files.vllm_config(2, **changes))
        with pytest.raises(ArgumentError, match=message):
            MedusaHeads.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tree", 5),
            ("tree", "abc"),
            ("tree", [[96], [97]]),
            ("tree", {"0": 1}),
            ("rank_rates", 5),
            ("rank_rates", "ab"),
            ("rank_rates", [[None]]),
            ("rank_rates", [[0.5]]),
            ("base_model", 5),
            ("base_model", ["some/base"]),
            ("notes", "a text"),
            ("notes", ["a list"]),
            ("notes", {"title": 5}),
            ("notes", []),
        ],
    )
    def test_settings_of_a_wrong_type(self, target: PreTrainedModel, tmp_path: Path, name: str, value: object) -> None:
        MedusaHeads.for_target(target, num_heads=2).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(ArgumentError, match=f": {name}.*; correct or remove {name} in config.json") as raised:
            MedusaHeads.from_pretrained(tmp_path)
        assert str(raised.value).startswith(repr(str(tmp_path)))
        with pytest.raises(ArgumentError, match=f"^{name}"):
            MedusaHeads.for_target(target, num_heads=2, **{name: value})

    @pytest.mark.parametrize("tree", ["5", "[5]", '"abc"', "[[0], [97]]"])
    def test_tree_file_that_holds_none(self, tmp_path: Path, tree: str) -> None:
        files.write(tmp_path, "medusa_lm_head.pt", files.fasterdecoding(2), CONFIG)
        (tmp_path / "medusa_choices.json").write_text(tree)
        with pytest.raises(ArgumentError, match=": tree.*; correct or remove medusa_choices.json"):
            MedusaHeads.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("rows", "token_map", "config", "message"),
        [
            (5, TOKEN_MAP, {}, "token_map needs a config.json"),
            (7, TOKEN_MAP, files.vllm_config(2, truncated_vocab_size=5), "7 rows, neither 5 as token_map nor 97"),
            (5, TOKEN_MAP, files.vllm_config(2, truncated_vocab_size=6), "promises .* 6 tokens, but token_map has 5"),
            (
                97,
                TOKEN_MAP + 7,
                files.vllm_config(2, truncated_vocab_size=5),
                "from 9 to 97, but the vocabulary has 97",
            ),
            (97, TOKEN_MAP + 0.5, files.vllm_config(2, truncated_vocab_size=5), "must be a list of tokens"),
            (
                5,
                TOKEN_MAP + 7,
                files.vllm_config(2, truncated_vocab_size=5),
                "from 9 to 97, but the vocabulary has 97",
            ),
        ],
    )
    def test_token_map_that_does_not_fit(
        self, tmp_path: Path, rows: int, token_map: Tensor, config: dict[str, Any], message: str
    ) -> None:
        files.write(tmp_path, "model.safetensors", files.vllm(2, rows=rows) | {"token_map": token_map}, config)
        with pytest.raises(ArgumentError, match=message):
            MedusaHeads.from_pretrained(tmp_path)

    def test_token_map_that_is_missing(self, tmp_path: Path) -> None:
        config = files.vllm_config(2, truncated_vocab_size=5)
        files.write(tmp_path, "model.safetensors", files.vllm(2, rows=5), config)
        with pytest.raises(ArgumentError, match="there is no token_map, and the vocabulary has 97"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        tensors = {f"medusa_head.{name}": tensor for name, tensor in files.fasterdecoding(2).items()}
        files.write_shards(tmp_path, [tensors], {})
        (tmp_path / "model-00001-of-00001.safetensors").unlink()
        with pytest.raises(ArgumentError, match="names model-00001-of-00001.safetensors, which is missing"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_shard_that_lacks_a_tensor(self, tmp_path: Path) -> None:
        tensors = {f"medusa_head.{name}": tensor for name, tensor in files.fasterdecoding(2).items()}
        files.write_shards(tmp_path, [tensors], {})
        tensors.popitem()
        save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
        with pytest.raises(ArgumentError, match="model-00001-of-00001.safetensors cannot be read"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_index_does_not_lead_out_of_the_folder(self, tmp_path: Path) -> None:
        index = {"weight_map": {"medusa_head.0.0.linear.weight": "../elsewhere.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ArgumentError, match="outside its folder"):
            MedusaHeads.from_pretrained(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_config_that_is_none(self, tmp_path: Path, text: str) -> None:
        files.write(tmp_path, "medusa_lm_head.pt", files.fasterdecoding(2))
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ArgumentError, match="config.json of"):
            MedusaHeads.from_pretrained(tmp_path)

    def test_wrong_base_model(self, target: PreTrainedModel, tmp_path: Path) -> None:
        tensors = {name: tensor for name, tensor in files.fasterdecoding(2).items() if "linear" in name}
        tensors |= {f"{head}.1.weight": torch.zeros(50, HIDDEN) for head in range(2)}
        heads = MedusaHeads.from_pretrained(files.write(tmp_path, "medusa_lm_head.pt", tensors, CONFIG))
        with pytest.raises(ArgumentError, match="50 tokens, but LlamaForCausalLM has 97; .*'some/base'"):
            heads.check(target)
