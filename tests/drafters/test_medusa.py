"""Strategy "medusa": what heads are asked, what becomes of their guesses, and heads that do not fit."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper

import hf_specdec
import texts
import zoo
from contexts import context
from hf_specdec import (
    ArgumentError,
    Auto,
    DraftTree,
    Medusa,
    MedusaHeads,
    PromptLookup,
    Recycling,
    RoundOutputs,
    Speculation,
    SpeculativeOutput,
    Suffix,
    generate,
)

PROMPT = texts.prompt(9, seed=3)  # the text behind it seldom repeats itself
HEADS = 4
NEW_TOKENS = 41


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return zoo.make("llama")


@pytest.fixture(scope="module")
def heads(target: PreTrainedModel) -> MedusaHeads:
    return zoo.make_heads(target)


class KnowingHeads(MedusaHeads):
    """They find the place of a hidden state in texts that they know, and score the tokens that stand behind it."""

    @classmethod
    def of(cls, target: PreTrainedModel, rows: Sequence[Sequence[int]], shift: int = 0, **settings: Any) -> Self:
        """Head i should know the token i + 2 behind the place; `shift` makes it know another one."""
        heads = cls.for_target(target, num_heads=HEADS, **settings)
        states, places = [], []
        for row, text in enumerate(rows):
            with torch.no_grad():
                states.append(target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0])
            places += [(row, place) for place in range(len(text))]
        heads.states, heads.places, heads.shift = torch.cat(states), places, shift
        heads.rows = [list(text) for text in rows]
        heads.asked: list[list[tuple[int, int]]] = []
        heads.score: Callable[[int, int], Tensor] = lambda row, place: (
            20 * torch.eye(zoo.VOCAB_SIZE)[heads.rows[row][min(place, len(heads.rows[row]) - 1)]]
        )
        return heads

    def logits(self, hidden_states: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        distances = (hidden_states[:, None] - self.states).abs().amax(-1)
        assert float(distances.min(-1).values.max()) < 1e-4  # a state that nobody knows was read at a wrong node
        found = [self.places[i] for i in distances.argmin(-1).tolist()]
        self.asked.append(found)
        scores = [
            torch.stack([self.score(row, place + 2 + head + self.shift) for row, place in found])
            for head in range(self.num_heads)
        ]
        return torch.stack(scores)[..., self.token_ids(torch.arange(self.num_guessable or 0))]


def run(target: PreTrainedModel, strategy: Any, prompt: Any = PROMPT, **settings: Any) -> SpeculativeOutput:
    batch = texts.inputs(prompt) if isinstance(prompt, Tensor) else prompt
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": texts.PAD} | settings
    output = generate(target, **batch, strategy=strategy, return_dict_in_generate=True, **arguments)
    assert isinstance(output, SpeculativeOutput)
    return output


def test_heads_that_know_the_text_are_accepted_to_the_last(target: PreTrainedModel) -> None:
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    output = run(target, Medusa(heads=KnowingHeads.of(target, text.tolist()), node_cost=0))
    assert output.sequences.tolist() == text.tolist()
    # The prompt's forward gives one token, each of the others those of all heads and its own.
    assert output.speculation.accepted_lengths == {0: 1, HEADS: (NEW_TOKENS - 1) // (HEADS + 1)}


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_that_know_the_wrong_place_are_not(target: PreTrainedModel, shift: int) -> None:
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    output = run(target, Medusa(heads=KnowingHeads.of(target, text.tolist(), shift), node_cost=0))
    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.accepted <= 6


def test_after_a_rejection_heads_read_the_newest_accepted_node(target: PreTrainedModel) -> None:
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    heads = KnowingHeads.of(target, text.tolist())
    known = heads.score

    def right(place: int) -> bool:
        return place % 7 not in (0, 3)

    heads.score = lambda row, place: known(row, place if right(place) else place - 1)
    repeats = {p for p in range(1, text.shape[1]) if text[0, p] == text[0, p - 1]}
    output = run(target, Medusa(heads=heads, node_cost=0))

    lengths, place = [0], PROMPT.shape[1] - 1  # of the newest accepted node
    while (left := text.shape[1] - place - 2) > 0:
        depth = 0
        while depth < min(HEADS, left - 1) and (right(place + 2 + depth) or place + 2 + depth in repeats):
            depth += 1
        lengths.append(depth)
        place += depth + 1
    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.accepted_lengths == Counter(lengths)
    assert {0, HEADS} < set(lengths)


def test_rows_that_end_early_are_not_asked_about(target: PreTrainedModel) -> None:
    batch = texts.padded([5, 12, 9])
    width = batch["input_ids"].shape[1]
    free = texts.greedy(target, **batch, max_new_tokens=NEW_TOKENS)
    first = free[0, width:].tolist()
    end = next(token for token in first[6:] if token not in first[:6])
    text = texts.greedy(target, **batch, max_new_tokens=NEW_TOKENS, eos_token_id=end)
    heads = KnowingHeads.of(target, texts.rows_without_padding(batch, free))
    output = run(target, Medusa(heads=heads, node_cost=0), batch, eos_token_id=end)
    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.tokens_per_forward > 3
    assert len(heads.asked[0]) == 3  # all rows at once
    assert len(heads.asked[-1]) < 3
    assert len(heads.asked) < output.speculation.rounds


@pytest.mark.parametrize("permuted", [False, True], ids=["all tokens", "token_map"])
def test_sampled_guesses_are_ranked_with_the_targets_own_noise(target: PreTrainedModel, permuted: bool) -> None:
    """Heads with the target's own law then guess the very token that the noise chooses."""
    text = texts.sampled(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS, temperature=1.5, top_k=30)
    with torch.no_grad():
        law = target(text).logits[0]
    token_map = torch.randperm(zoo.VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) if permuted else None
    heads = KnowingHeads.of(target, text.tolist(), token_map=token_map)
    heads.score = lambda row, place: law[min(place, len(law)) - 1]
    chain = Medusa(heads=heads, tree=[(0,) * depth for depth in range(1, HEADS + 1)])
    output = run(target, chain, do_sample=True, seed=texts.SEED, temperature=1.5, top_k=30)
    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.accepted_lengths == {0: 1, HEADS: (NEW_TOKENS - 1) // (HEADS + 1)}


def first_tree(drafter: Medusa, target: PreTrainedModel, **settings: Any) -> tuple[DraftTree, Tensor]:
    """What is drafted behind the prompt, and the heads' logits there, `[K, D]`."""
    state = context([PROMPT[0].tolist()], target, **settings)
    with torch.no_grad():
        output = target(PROMPT, output_hidden_states=True)
        begun = drafter.begin(state)
        begun.observe(
            DraftTree.roots([int(PROMPT[0, -1])]),
            [[0]],
            RoundOutputs(output.logits[:, -1:], (output.hidden_states[-1][:, -1:],)),
        )
        assert drafter.heads is not None
        hidden = output.hidden_states[-1][0, -1]
        logits = drafter.heads.logits(hidden, drafter.heads.output_of(target))
    state.texts[0].append(7)
    return begun.propose(state), logits


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens on the way to each guess."""
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0][1:], tree.parents[0][1:], strict=True):
        known.append((*known[parent], token))
    return set(known[1:])


TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 4), (0, 0, 0), (2, 4, 1)]


@pytest.mark.parametrize("form", ["list", "json", "tuned"])
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "token_map"])
def test_a_fixed_tree_is_drafted_whole(target: PreTrainedModel, form: str, reduced: bool, tmp_path: Path) -> None:
    token_map = torch.arange(3, 90, 4) if reduced else None
    heads = zoo.make_heads(target, token_map=token_map, tree=TREE if form == "tuned" else None)
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    tree: Any = {"list": TREE, "json": str(file), "tuned": "tuned"}[form]
    drafted, logits = first_tree(Medusa(heads=heads, tree=tree), target)
    best = heads.token_ids(logits.topk(5, dim=-1).indices).tolist()
    assert paths(drafted) == {tuple(best[depth][rank] for depth, rank in enumerate(node)) for node in TREE}


def test_without_a_tree_the_likeliest_products_are_drafted(target: PreTrainedModel, heads: MedusaHeads) -> None:
    drafted, logits = first_tree(Medusa(heads=heads, nodes=12, node_cost=0), target)
    probs, tokens = logits.softmax(-1).topk(10, dim=-1)
    values = {}
    for i in range(10):
        values[int(tokens[0, i]),] = float(probs[0, i])
        for j in range(10):
            values[int(tokens[0, i]), int(tokens[1, j])] = float(probs[0, i] * probs[1, j])
            for k in range(10):
                path = (int(tokens[0, i]), int(tokens[1, j]), int(tokens[2, k]))
                values[path] = float(probs[0, i] * probs[1, j] * probs[2, k])
    assert paths(drafted) == set(sorted(values, key=lambda path: -values[path])[:12])


def test_the_budget_bounds_the_depth(target: PreTrainedModel, heads: MedusaHeads) -> None:
    drafted, _ = first_tree(Medusa(heads=heads, tree=TREE), target, budgets=[1])
    assert {len(path) for path in paths(drafted)} == {1}


def test_rejection_sampling_is_offered_picked_guesses(target: PreTrainedModel, heads: MedusaHeads) -> None:
    fresh = hf_specdec.sampling.Sampling([(0, 0)], torch.Generator().manual_seed(0))
    drafted, logits = first_tree(Medusa(heads=heads, tree=TREE), target, sampling=fresh)
    assert drafted.draft_probs is None
    assert {path[0] for path in paths(drafted)} == set(logits[0].topk(3).indices.tolist())


def test_the_model_is_asked_for_no_hidden_states(heads: MedusaHeads) -> None:
    target = zoo.make("llama")
    asked: list[Any] = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    run(target, "none", max_new_tokens=4)  # the self-test has run by now
    asked.clear()
    output = run(target, Medusa(heads=heads, node_cost=0))
    assert asked == [None] * output.speculation.rounds
    assert output.speculation.accepted > 0
    # Transformers would put hooks on the layers, and leave them there.
    assert not any(module._forward_hooks for module in target.modules())


def test_hidden_states_of_all_layers_for_the_caller(target: PreTrainedModel, heads: MedusaHeads) -> None:
    settings = {"output_hidden_states": True, "max_new_tokens": 12}
    stock = texts.greedy(target, **texts.inputs(PROMPT), return_dict_in_generate=True, **settings)
    ours = run(target, Medusa(heads=heads, node_cost=0), **settings)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    for expected, step in zip(stock.hidden_states, ours.hidden_states, strict=True):
        for layer, other in zip(expected, step, strict=True):
            torch.testing.assert_close(layer, other)


def test_heads_in_another_dtype_are_converted_for_the_call(target: PreTrainedModel) -> None:
    heads = zoo.make_heads(target).to(torch.bfloat16)
    before = copy.deepcopy(heads.state_dict())
    expected = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    assert run(target, heads).sequences.tolist() == expected.tolist()
    assert all(torch.equal(weight, before[name]) for name, weight in heads.state_dict().items())
    assert {weight.dtype for weight in heads.parameters()} == {torch.bfloat16}


def test_a_target_in_16_bit(heads: MedusaHeads) -> None:
    half = zoo.make("llama").to(torch.bfloat16)
    assert run(half, Medusa(heads=heads, node_cost=0)).speculation.emitted == NEW_TOKENS


def test_threads_share_heads_and_strategy(target: PreTrainedModel, heads: MedusaHeads) -> None:
    strategy = Medusa(heads=heads, node_cost=0)
    prompts = [texts.prompt(9, seed) for seed in range(6)]
    expected = [texts.greedy(target, **texts.inputs(one), max_new_tokens=NEW_TOKENS).tolist() for one in prompts]
    alone = [run(target, strategy, one).speculation.accepted_lengths for one in prompts]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda one: run(target, strategy, one), prompts))
    assert [output.sequences.tolist() for output in outputs] == expected
    assert [output.speculation.accepted_lengths for output in outputs] == alone


def test_all_ways_to_give_heads(heads: MedusaHeads) -> None:
    target = zoo.make("llama")
    inputs = texts.inputs(PROMPT)
    expected = texts.greedy(target, **inputs, max_new_tokens=12).tolist()
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    config = GenerationConfig(strategy="medusa", **settings)
    with_heads = GenerationConfig(strategy="auto", heads=heads, **settings)
    hf_specdec.enable(target)
    outputs = [
        target.generate(**inputs, strategy="medusa", heads=heads, **settings),
        target.generate(**inputs, strategy=heads, **settings),
        target.generate(**inputs, strategy=Medusa(heads=heads), **settings),
        target.generate(**inputs, generation_config=config, heads=heads),
        target.generate(**inputs, custom_generate=Speculation("medusa", heads=heads), **settings),
        target.generate(**inputs, custom_generate=Speculation(heads), **settings),
        target.generate(**inputs, strategy="auto", heads=heads, **settings),
        target.generate(**inputs, generation_config=with_heads),
    ]
    assert [output.sequences.tolist() for output in outputs] == [expected] * 8
    assert [output.speculation.strategy for output in outputs] == ["medusa"] * 6 + ["auto"] * 2
    assert all(output.speculation.drafted > 0 for output in outputs)


def test_auto_adds_a_part_or_fills_the_one_that_waits(heads: MedusaHeads) -> None:
    added = Auto().with_heads(heads)
    assert added.parts is not None
    assert [type(part) for part in added.parts] == [Suffix, Recycling, Medusa]
    filled = Auto(parts=[Medusa(tree=[(0,), (0, 0)]), Suffix()], nodes=9).with_heads(heads)
    assert filled.parts is not None
    assert isinstance(filled.parts[0], Medusa)
    assert filled.parts[0].heads is heads
    assert len(filled.parts) == 2
    assert filled.nodes == 9
    assert (Auto().needs_hidden_states, added.needs_hidden_states, filled.needs_hidden_states) == (
        False,
        "last",
        "last",
    )


def test_in_auto_heads_take_part(target: PreTrainedModel) -> None:
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    heads = KnowingHeads.of(target, text.tolist())
    output = run(target, Auto(parts=[Suffix(), Medusa()], node_cost=0), heads=heads)
    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.tokens_per_forward > HEADS


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
@pytest.mark.parametrize("reduced", [False, True])
def test_an_adapted_target(target_modules: list[str], reduced: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=target_modules, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(zoo.make("llama", tie_word_embeddings=False), config).eval()
    plain = texts.greedy(zoo.make("llama", tie_word_embeddings=False), **texts.inputs(PROMPT), max_new_tokens=20)
    expected = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=20).tolist()
    assert expected != plain.tolist()
    heads = zoo.make_heads(model.base_model.model, token_map=torch.arange(0, 97, 3) if reduced else None)
    output = run(model, Medusa(heads=heads, node_cost=0), max_new_tokens=20)
    assert output.sequences.tolist() == expected
    assert output.speculation.drafted > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduced", [False, True])
def test_a_target_whose_output_is_quantised(reduced: bool) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = zoo.make("llama", hidden_size=64)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    assert type(model.lm_head) is not torch.nn.Linear
    expected = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=20)
    heads = zoo.make_heads(model, token_map=torch.arange(0, 97, 3) if reduced else None)
    output = run(model, Medusa(heads=heads, node_cost=0), max_new_tokens=20)
    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.drafted > 0


def test_heads_that_overflow_guess_nothing(target: PreTrainedModel) -> None:
    heads = zoo.make_heads(target)
    with torch.no_grad():
        heads.blocks[0][0].linear.weight.fill_(torch.nan)
    expected = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=12)
    assert run(target, Medusa(heads=heads), max_new_tokens=12).sequences.tolist() == expected.tolist()
    sampled = texts.sampled(target, **texts.inputs(PROMPT), max_new_tokens=12, top_h=0.9)
    ours = run(target, Medusa(heads=heads), max_new_tokens=12, do_sample=True, seed=texts.SEED, top_k=0, top_h=0.9)
    assert ours.sequences.tolist() == sampled.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "medusa"}, "heads="),
        ({"strategy": Auto(parts=[Suffix(), Medusa()])}, "heads="),
        ({"strategy": "prompt_lookup", "heads": "ours"}, "'prompt_lookup' does not use heads"),
        ({"strategy": PromptLookup(), "heads": "ours"}, "drop heads="),
        ({"strategy": "medusa", "heads": "a/folder"}, "from_pretrained"),
        ({"strategy": "ours", "heads": "ours"}, "twice"),
        ({"heads": "ours"}, "belong to strategy="),
        ({"strategy": MedusaHeads}, "MedusaHeads"),
        ({"strategy": Medusa(tree="tuned"), "heads": "ours"}, "tune-tree"),
        ({"strategy": Medusa(tree=[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]), "heads": "ours"}, "4 nodes.*3 heads"),
        ({"strategy": Medusa(tree="nowhere.json"), "heads": "ours"}, "nowhere.json"),
        ({"strategy": "medusa", "heads": zoo.make_heads(zoo.make("llama", hidden_size=64))}, "64.*32"),
        ({"strategy": "auto", "heads": zoo.make_heads(zoo.make("llama", vocab_size=50))}, "50.*97"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_forward(
    heads: MedusaHeads, arguments: dict[str, Any], message: str
) -> None:
    target = zoo.make("llama")
    target.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    given = {name: heads if value == "ours" else value for name, value in arguments.items()}
    with pytest.raises(ArgumentError, match=message):
        generate(target, **texts.inputs(PROMPT), max_new_tokens=4, **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": "a/folder"}, "heads"),
        ({"tree": 7}, "tree"),
        ({"tree": [(0,)], "nodes": 5}, "nodes=5"),
        ({"nodes": 0}, "nodes"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Medusa(**settings)


def test_processors_that_look_at_scores_alone_act_on_guesses(target: PreTrainedModel, heads: MedusaHeads) -> None:
    state = context([PROMPT[0].tolist()], target)
    state.score_processors.extend([TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)])
    drafter = Medusa(heads=heads, tree=TREE).begin(state)
    with torch.no_grad():
        output = target(PROMPT, output_hidden_states=True)
        drafter.observe(
            DraftTree.roots([5]), [[0]], RoundOutputs(output.logits[:, -1:], (output.hidden_states[-1][:, -1:],))
        )
    assert len({path[0] for path in paths(drafter.propose(state))}) == 2
