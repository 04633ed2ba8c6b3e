"""Drafts made of a target: what they share with it, how they are stored, and that the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, PreTrainedModel

import test_sampling_law as law
import texts
import zoo
from hf_specdec import ArgumentError, Assisted, DraftModelError, Tree, generate, load_draft, make_draft, save_draft
from hf_specdec.candidates import DrafterCandidateGenerator, stock_assisted
from hf_specdec.drafts import ReducedOutput, cut_model, load_assistant, own_parameters, spread_layers, stock_model

TOKENS = torch.tensor([3, 90, 5, *range(10, 60)])
IDS = torch.arange(12)[None]
SETTINGS = {**texts.inputs(texts.prompt(9)), "max_new_tokens": texts.NEW_TOKENS, "pad_token_id": texts.PAD}
# Layers of these differ by number: the first is dense, or the others are.
INSEPARABLE = {"deepseek-v3"}


def make(family: str = "llama", **changes: Any) -> PreTrainedModel:
    attention = "eager" if family in ("gpt-oss", "gemma2") else "sdpa"
    return zoo.make(family, attention=attention, **changes)


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def trained(draft: PreTrainedModel) -> PreTrainedModel:
    """As after a training: its own parameters are others."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in own_parameters(draft).values():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return draft


@pytest.mark.parametrize("family", sorted(zoo.FAMILIES.keys() - INSEPARABLE))
def test_families(family: str, tmp_path: Path) -> None:
    """Cut, restricted, stored and loaded, for every kind of model; text and target are as before."""
    target = make(family)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    draft = trained(make_draft(target, [1], token_map=TOKENS))

    save_draft(draft, tmp_path, dtype=torch.float32)
    loaded = load_draft(tmp_path, target)

    torch.testing.assert_close(logits(loaded), logits(draft))
    assert loaded.get_input_embeddings().weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert type(loaded) is type(target)
    assert not loaded.training
    output = generate(
        target, **SETTINGS, do_sample=False, strategy=Tree(min_gain=0.0, min_score=0.0), assistant_model=loaded
    )
    assert output.tolist() == texts.greedy(target, **SETTINGS).tolist()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert all(weight.requires_grad for weight in target.parameters())
    assert target.config.num_hidden_layers == 2


def test_what_is_own(target: PreTrainedModel) -> None:
    draft = make_draft(target, [1], token_map=TOKENS)
    own = own_parameters(draft)

    assert set(own) == {name for name in draft.state_dict() if ".layers.0." in name} | {"model.norm.weight"}
    assert all(weight.requires_grad == (name in own) for name, weight in draft.named_parameters())
    theirs = dict(target.named_parameters())
    for name, weight in own.items():
        original = theirs[name.replace(".layers.0.", ".layers.1.")]
        assert torch.equal(weight, original)
        assert weight.data_ptr() != original.data_ptr()


def test_the_reduced_output(target: PreTrainedModel) -> None:
    """The same scores for its tokens, and probability zero for all others."""
    whole, reduced = (logits(make_draft(target, [0], token_map=tokens)) for tokens in (None, TOKENS))

    torch.testing.assert_close(reduced[..., TOKENS], whole[..., TOKENS])
    others = torch.ones(zoo.VOCAB_SIZE, dtype=torch.bool).index_fill_(0, TOKENS, False)
    assert bool((reduced[..., others] == -torch.inf).all())
    assert bool((reduced.softmax(-1)[..., others] == 0).all())


def test_tied_embeddings(tmp_path: Path) -> None:
    """Nothing ties the small head to the embeddings again."""
    target = make(tie_word_embeddings=True)
    draft = trained(make_draft(target, [0, 1], token_map=TOKENS))
    expected = logits(draft)
    draft.tie_weights()

    assert isinstance(draft.get_output_embeddings(), ReducedOutput)
    assert torch.equal(logits(draft), expected)
    whole = make_draft(target, [0, 1])
    assert whole.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    save_draft(whole, tmp_path, dtype=torch.float32)
    assert torch.equal(logits(load_draft(tmp_path, target)), logits(target))


def test_the_cut_runs_its_layers_in_order() -> None:
    target = make(num_hidden_layers=4)
    draft = cut_model(target, [0, 2, 3])
    target_layers = target.model.layers
    states = target.model(IDS, output_hidden_states=True).hidden_states[1]  # behind layer 0
    rotary = target.model.rotary_emb(states, IDS)
    for layer in (target_layers[2], target_layers[3]):
        states = layer(states, position_embeddings=rotary)

    torch.testing.assert_close(logits(draft), target.lm_head(target.model.norm(states)).detach())


def test_per_layer_settings_follow_their_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    target = make("gemma3", num_hidden_layers=4, layer_types=kinds)
    draft = cut_model(target, [0, 1, 3])

    assert draft.config.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert target.config.layer_types == kinds


def test_even_layers() -> None:
    for total, count, expected in ((30, 3, (0, 14, 29)), (4, 2, (0, 3)), (4, 4, (0, 1, 2, 3)), (7, 1, (0,))):
        assert spread_layers(make(num_hidden_layers=total), count) == expected
    with pytest.raises(ArgumentError, match="5"):
        spread_layers(make(num_hidden_layers=4), 5)


@pytest.mark.parametrize("own_output", [False, True])
def test_files(target: PreTrainedModel, tmp_path: Path, own_output: bool) -> None:
    """bfloat16, and nothing that is the target's."""
    draft = trained(make_draft(target, [0], token_map=TOKENS, own_output=own_output, base_model="owner/name"))
    save_draft(draft, tmp_path)
    save_draft(draft, tmp_path)  # again into the same folder

    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    num_own = sum(weight.numel() for weight in own_parameters(draft).values())
    assert num_own * 2 < (tmp_path / "model.safetensors").stat().st_size < num_own * 2 + len(TOKENS) * 4 + 2500
    assert json.loads((tmp_path / "config.json").read_text())["base_model"] == "owner/name"
    loaded = load_draft(tmp_path, target)
    for name, weight in own_parameters(loaded).items():
        assert torch.equal(weight, dict(own_parameters(draft))[name].bfloat16().float())
    assert torch.equal(loaded.get_output_embeddings().token_map, TOKENS)
    assert len(own_parameters(loaded)) == len(own_parameters(draft))


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stock_model(tmp_path: Path, own_output: bool, tied: bool) -> None:
    """It needs neither target nor package, and scores the draft's tokens as the draft does."""
    target = make(tie_word_embeddings=tied)
    draft = trained(make_draft(target, [1], token_map=TOKENS, own_output=own_output))
    expected = logits(target)
    stock_model(draft, target).save_pretrained(tmp_path)
    full = type(target).from_pretrained(tmp_path)

    torch.testing.assert_close(logits(full)[..., TOKENS], logits(draft)[..., TOKENS])
    assert full.config.vocab_size == zoo.VOCAB_SIZE
    assert torch.equal(logits(target), expected)


@pytest.mark.parametrize("kind", ["distilled", "whole"])
def test_load_assistant(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    draft = make_draft(target, [0], token_map=TOKENS)
    if kind == "distilled":
        save_draft(draft, tmp_path, dtype=torch.float32)
    else:
        draft = zoo.make_draft(target)
        draft.save_pretrained(tmp_path)

    assert torch.equal(logits(load_assistant(tmp_path, target, dtype=torch.float32)), logits(draft))


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"hidden_size": 64}, ("hidden size 32", "64")),
        ({"vocab_size": 101}, ("vocabulary 97", "101")),
        ({"num_hidden_layers": 3}, ("number of layers 2", "3")),
    ],
)
def test_a_wrong_target(target: PreTrainedModel, tmp_path: Path, changes: dict[str, int], numbers: Any) -> None:
    """Refused with both numbers, before any forward."""
    save_draft(make_draft(target, [0], token_map=TOKENS, base_model="owner/name"), tmp_path)
    other = make(**changes)
    other.register_forward_pre_hook(lambda *args: pytest.fail("a forward was run"))

    with pytest.raises(DraftModelError) as caught:
        load_draft(tmp_path, other)
    assert all(number in str(caught.value) for number in (*numbers, "owner/name"))


def test_another_architecture(target: PreTrainedModel, tmp_path: Path) -> None:
    save_draft(make_draft(target, [0]), tmp_path)

    with pytest.raises(DraftModelError, match=r"LlamaForCausalLM.*Qwen2ForCausalLM"):
        load_draft(tmp_path, make("qwen2"))


def test_other_sizes_inside(target: PreTrainedModel, tmp_path: Path) -> None:
    """The same class, hidden size and vocabulary, but other layers."""
    save_draft(make_draft(target, [0]), tmp_path)

    with pytest.raises(DraftModelError, match=r"mlp.*\(32, 64\).*\(32, 80\)"):
        load_draft(tmp_path, make(intermediate_size=80))


@pytest.mark.parametrize("layers", [[], [2], [-1], [1, 0], [0, 0]])
def test_wrong_layers(target: PreTrainedModel, layers: list[int]) -> None:
    with pytest.raises(DraftModelError, match="from 0 to 1 in rising order"):
        make_draft(target, layers)


@pytest.mark.parametrize("tokens", [[], [97], [-1], [[1]], [4, 4]])
def test_wrong_tokens(target: PreTrainedModel, tokens: list[Any]) -> None:
    with pytest.raises(ArgumentError, match="token_map"):
        make_draft(target, [0], token_map=torch.tensor(tokens, dtype=torch.int64))


def test_refusals(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="own_output needs a token_map"):
        make_draft(target, [0], own_output=True)
    with pytest.raises(ArgumentError, match="no distilled draft"):
        save_draft(target, tmp_path)
    with pytest.raises(DraftModelError, match="do not make a model of their own"):
        make_draft(make("deepseek-v3"), [1])
    with pytest.raises(DraftModelError, match="more than a decoder"):
        make_draft(make("t5"), [1])
    target.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"'llama'.*AutoModelForCausalLM"):
        load_draft(tmp_path, target)
    (tmp_path / "config.json").write_text('{"model_type": "hf_specdec_draft", "layers": [0]}')
    with pytest.raises(ArgumentError, match="lacks .*vocab_size"):
        load_draft(tmp_path, target)


@pytest.fixture(scope="module")
def half(target: PreTrainedModel) -> PreTrainedModel:
    """All layers, a little disturbed, and half of the vocabulary: often right, and often unable to be."""
    draft = trained(make_draft(target, [0, 1], token_map=torch.arange(0, zoo.VOCAB_SIZE, 2)))
    draft.generation_config.assistant_confidence_threshold = 0
    return draft


@pytest.mark.parametrize("strategy", [Assisted(), Tree(min_gain=0.0, min_score=0.0)])
@pytest.mark.parametrize("sampling", [None, {"temperature": 0.8, "top_k": 20}])
def test_keyed_text(target: PreTrainedModel, half: PreTrainedModel, strategy: Any, sampling: Any) -> None:
    """Token for token, and some guesses right; no guess is a token that the draft cannot guess."""
    arguments = {"do_sample": False} if sampling is None else {"do_sample": True, "seed": texts.SEED, **sampling}
    output = generate(
        target,
        **SETTINGS,
        strategy=strategy,
        assistant_model=half,
        return_dict_in_generate=True,
        **arguments,
    )

    expected = texts.greedy(target, **SETTINGS) if sampling is None else texts.sampled(target, **SETTINGS, **sampling)
    assert output.sequences.tolist() == expected.tolist()
    assert 0 < output.speculation.accepted < output.speculation.drafted


def test_stock_assisted(target: PreTrainedModel, half: PreTrainedModel) -> None:
    expected = texts.greedy(target, **SETTINGS)

    stock = target.generate(**SETTINGS, do_sample=False, assistant_model=half)
    with stock_assisted(target, DrafterCandidateGenerator(Assisted(), target, half)) as same:
        ours = same.generate(**SETTINGS, do_sample=False, prompt_lookup_num_tokens=1)

    assert stock.tolist() == ours.tolist() == expected.tolist()
    torch.manual_seed(0)
    assert target.generate(**SETTINGS, do_sample=True, assistant_model=half).shape == expected.shape


@pytest.mark.parametrize("verification", ["keyed", "rejection"])
@pytest.mark.parametrize("strategy", ["assisted", "tree"])
def test_processors_may_forbid_all_its_tokens(
    target: PreTrainedModel, half: PreTrainedModel, strategy: str, verification: str
) -> None:
    """Then it drafts nothing; only odd tokens are allowed, and it guesses even ones."""
    allowed = list(range(1, zoo.VOCAB_SIZE, 2))
    output = generate(
        target,
        **SETTINGS,
        do_sample=True,
        logits_processor=LogitsProcessorList([PrefixConstrainedLogitsProcessor(lambda row, ids: allowed, 1)]),
        strategy=strategy,
        assistant_model=half,
        seed=texts.SEED,
        verification=verification,
    )

    assert output.shape[1] == 9 + texts.NEW_TOKENS
    assert set(output[0, 9:].tolist()) <= set(allowed)


@pytest.mark.parametrize("strategy", ["assisted", "tree"])
def test_the_law(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling with tokens that the draft never guesses: the joint law of three tokens."""
    target, draft = law.models()
    small = make_draft(draft, [0, 1], token_map=torch.tensor([4, 0, 3]))
    monkeypatch.setattr(law, "models", lambda: (target, small))
    observed, rate = law.sample(strategy, "plain", verification="rejection")
    monkeypatch.undo()

    assert 0.1 < rate < 0.9
    assert law.p_value(observed, "plain") > law.ALPHA
