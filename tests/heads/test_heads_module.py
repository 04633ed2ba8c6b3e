from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import zoo
from hf_specdec import ArgumentError, MedusaHeads, UnsupportedModelError

TOKEN_MAP = torch.tensor([96, 3, 50, 4])


def trained(heads: MedusaHeads) -> MedusaHeads:
    """Heads whose blocks do something."""
    with torch.no_grad():
        for weight in heads.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    return heads


@pytest.fixture
def hidden(target: PreTrainedModel) -> torch.Tensor:
    return 0.5 * torch.randn(2, 3, target.config.hidden_size)


class TestSharedOutput:
    def test_untrained_heads_say_what_the_target_says(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = MedusaHeads.for_target(target, num_heads=3)
        logits = heads.logits(hidden, heads.output_of(target))
        assert logits.shape == (3, 2, 3, zoo.VOCAB_SIZE)
        for head in range(3):
            assert torch.equal(logits[head], target.lm_head(hidden))

    def test_formula(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = trained(MedusaHeads.for_target(target, num_heads=2, num_layers=2))
        logits = heads.logits(hidden, heads.output_of(target))
        for head in range(2):
            x = hidden
            for layer in range(2):
                linear = heads.blocks[head][layer].linear
                x = x + nn.functional.silu(x @ linear.weight.T + linear.bias)
            torch.testing.assert_close(logits[head], x @ target.lm_head.weight.T)

    def test_token_map_picks_columns(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = trained(MedusaHeads.for_target(target, num_heads=2, token_map=TOKEN_MAP))
        whole = copy.deepcopy(heads)
        whole.token_map = None
        logits = heads.logits(hidden, heads.output_of(target))
        torch.testing.assert_close(logits, whole.logits(hidden, whole.output_of(target))[..., TOKEN_MAP])
        columns = logits.argmax(-1)
        assert torch.equal(heads.token_ids(columns), TOKEN_MAP[columns])
        assert torch.equal(whole.token_ids(columns), columns)

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
    def test_token_map_of_any_kind(self, target: PreTrainedModel, kind: Callable[[list[int]], Any]) -> None:
        heads = MedusaHeads.for_target(target, token_map=kind(TOKEN_MAP.tolist()))
        assert heads.token_map is not None
        assert torch.equal(heads.token_map, TOKEN_MAP)

    @pytest.mark.parametrize(
        "token_map", ["abc", 5, {}, [], [0.5], [None], [True], [[1, 2]], [10**30], torch.tensor(1)]
    )
    def test_token_map_that_is_none(self, target: PreTrainedModel, token_map: Any) -> None:
        with pytest.raises(ArgumentError, match="token_map must be a list of tokens"):
            MedusaHeads.for_target(target, token_map=token_map)

    @pytest.mark.parametrize("family", ["phi", "gpt-j"])
    def test_bias_of_the_output(self, family: str) -> None:
        target = zoo.make(family)
        nn.init.normal_(target.lm_head.bias)
        heads = MedusaHeads.for_target(target, num_heads=1, token_map=TOKEN_MAP)
        x = torch.randn(4, 32)
        torch.testing.assert_close(heads.logits(x, heads.output_of(target))[0], target.lm_head(x)[:, TOKEN_MAP])

    def test_module_that_computes_in_its_own_way_runs_whole(self, hidden: torch.Tensor) -> None:
        class Doubled(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(input)

        target = zoo.make("llama")
        doubled = Doubled(32, zoo.VOCAB_SIZE, bias=False)
        target.set_output_embeddings(doubled)
        for token_map in (None, TOKEN_MAP):
            heads = MedusaHeads.for_target(target, num_heads=2, token_map=token_map)
            expected = doubled(hidden) if token_map is None else doubled(hidden)[..., token_map]
            assert torch.equal(heads.logits(hidden, heads.output_of(target))[1], expected)
        with pytest.raises(UnsupportedModelError, match="cannot be copied"):
            MedusaHeads.for_target(target, own_output=True)

    def test_no_gradient_reaches_the_target(self, hidden: torch.Tensor) -> None:
        target = zoo.make("llama")
        heads = MedusaHeads.for_target(target, num_heads=2)
        heads.logits(hidden, heads.output_of(target)).sum().backward()
        assert all(weight.grad is None for weight in target.parameters())
        assert all(weight.grad is not None for weight in heads.parameters())


class TestOwnOutput:
    def test_starts_as_the_target(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = MedusaHeads.for_target(target, num_heads=2, own_output=True, token_map=TOKEN_MAP)
        assert [output.weight.shape for output in heads.outputs] == [(4, 32), (4, 32)]
        expected = nn.functional.linear(hidden, target.lm_head.weight[TOKEN_MAP])
        assert torch.equal(heads.logits(hidden, heads.output_of(target))[1], expected)

    def test_heads_have_one_each(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = MedusaHeads.for_target(target, num_heads=2, own_output=True)
        before = heads.logits(hidden, heads.output_of(target))
        with torch.no_grad():
            heads.outputs[1].weight.zero_()
        after = heads.logits(hidden, heads.output_of(target))
        assert torch.equal(after[0], before[0])
        assert not after[1].any()
        assert target.lm_head.weight.any()

    def test_bias_of_the_target_cannot_be_held(self) -> None:
        with pytest.raises(UnsupportedModelError, match="has a bias"):
            MedusaHeads.for_target(zoo.make("phi"), own_output=True)


class TestCheck:
    def test_own_model_passes(self, target: PreTrainedModel) -> None:
        MedusaHeads.for_target(target).check(target)
        MedusaHeads(hidden_size=32, vocab_size=None).check(target)

    def test_other_hidden_size_names_both(self, target: PreTrainedModel) -> None:
        heads = MedusaHeads(hidden_size=48, vocab_size=zoo.VOCAB_SIZE, base_model="some/model")
        with pytest.raises(ArgumentError, match="size 48, but LlamaForCausalLM has 32; .*not for 'some/model'"):
            heads.check(target)

    def test_other_vocabulary_names_both(self, target: PreTrainedModel) -> None:
        with pytest.raises(ArgumentError, match="vocabulary of 98 tokens, but LlamaForCausalLM has 97"):
            MedusaHeads(hidden_size=32, vocab_size=98).check(target)

    def test_size_is_that_of_what_the_output_reads(self) -> None:
        """OPT may project its last hidden state before the output matrix reads it."""
        target = zoo.make("opt", word_embed_proj_dim=16)
        heads = MedusaHeads.for_target(target, num_heads=1)
        assert heads.hidden_size == 16
        assert heads.logits(torch.randn(3, 16), heads.output_of(target)).shape == (1, 3, zoo.VOCAB_SIZE)


class TestPlaced:
    def test_same_place_is_the_same_object(self, target: PreTrainedModel) -> None:
        heads = MedusaHeads.for_target(target)
        assert heads.placed(target) is heads

    def test_other_dtype_is_a_copy(self, target: PreTrainedModel, hidden: torch.Tensor) -> None:
        heads = trained(MedusaHeads.for_target(target, token_map=TOKEN_MAP)).to(torch.bfloat16)
        placed = heads.placed(target)
        assert {weight.dtype for weight in heads.parameters()} == {torch.bfloat16}
        assert {weight.dtype for weight in placed.parameters()} == {torch.float32}
        assert torch.equal(placed.token_map, TOKEN_MAP)
        assert placed.logits(hidden, placed.output_of(target)).dtype == torch.float32
        assert all(weight.requires_grad for weight in heads.parameters())

    def test_half_precision_states_meet_full_heads(self, hidden: torch.Tensor) -> None:
        target = zoo.make("llama").to(torch.bfloat16)
        heads = MedusaHeads.for_target(target)
        logits = heads.logits(hidden.to(torch.bfloat16), heads.output_of(target))
        assert logits.dtype == torch.bfloat16


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"hidden_size": 0}, "hidden_size=0"),
            ({"vocab_size": -3}, "vocab_size=-3"),
            ({"num_heads": 0}, "num_heads=0"),
            ({"num_layers": 1.5}, "num_layers=1.5"),
            ({"draft_vocab_size": True}, "draft_vocab_size=True"),
            ({"draft_vocab_size": 200}, "draft_vocab_size=200 is more than vocab_size=97"),
            ({"vocab_size": None, "own_output": True}, "vocab_size=None"),
            ({"vocab_size": None, "draft_vocab_size": 4}, "vocab_size=None"),
            ({"num_heads": 2, "tree": [[0], [0, 0], [0, 0, 0]]}, "3 nodes deep, but there are 2 heads"),
            ({"draft_vocab_size": 4, "tree": [[4]]}, "rank of 4, but heads have 4 guesses"),
            ({"num_heads": 2, "rank_rates": [[0.5]]}, "rows for 1 heads, but there are 2"),
        ],
    )
    def test_refuses(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            MedusaHeads(**{"hidden_size": 32, "vocab_size": 97} | settings)

    @pytest.mark.parametrize(
        ("token_map", "message"),
        [
            (torch.tensor([3, 97]), "from 3 to 97, but the vocabulary has 97"),
            (torch.tensor([-1, 4]), "from -1 to 4"),
            (torch.tensor([4, 4]), "twice"),
            (torch.tensor([0.5]), "torch.float32"),
            (torch.tensor([[1]]), "shape \\[1, 1\\]"),
        ],
    )
    def test_refuses_token_maps(self, target: PreTrainedModel, token_map: torch.Tensor, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            MedusaHeads.for_target(target, token_map=token_map)

    def test_assigned_trees_and_rates_are_checked(self, target: PreTrainedModel) -> None:
        heads = MedusaHeads.for_target(target, num_heads=2)
        heads.tree = [[0, 0], [0]]
        heads.rank_rates = [[0.5, 0.25], [0.5]]
        assert heads.tree == ((0,), (0, 0))
        assert heads.rank_rates == ((0.5, 0.25), (0.5,))
        with pytest.raises(ArgumentError, match="3 nodes deep"):
            heads.tree = [[0], [0, 0], [0, 0, 0]]
        assert heads.tree == ((0,), (0, 0))

    def test_token_map_is_a_copy(self, target: PreTrainedModel) -> None:
        token_map = torch.tensor([5, 6], dtype=torch.int32)
        heads = MedusaHeads.for_target(target, token_map=token_map)
        token_map[0] = 7
        assert heads.token_map.tolist() == [5, 6]
        assert heads.token_map.dtype == torch.int64
