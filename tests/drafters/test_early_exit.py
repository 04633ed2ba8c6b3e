"""Early exit: settings, what is run how often, what is left behind on the model, and the search for layers."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_specdec
import texts
import zoo
from contexts import context
from hf_specdec import (
    ArgumentError,
    DrafterCandidateGenerator,
    EarlyExit,
    SpeculativeOutput,
    TreeCache,
    UnsupportedModelError,
    generate,
    stock_assisted,
)
from hf_specdec.bench.clock import ForwardClock
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.layer_search import search_layers
from hf_specdec.drafters.payoff import best_length, guess_cost, speedup
from hf_specdec.layers import decoder_layers, layers_cost, with_layers

PROMPT = texts.prompt(9)
NEW_TOKENS = 20
SETTINGS = {**texts.inputs(PROMPT), "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": texts.PAD}
LAYERS = 4
NODE_COST = 2**-5


@pytest.fixture(autouse=True)
def cost_of_a_node(monkeypatch: pytest.MonkeyPatch) -> float:
    """So that no test depends on what is measured."""
    monkeypatch.setattr("hf_specdec.drafters.payoff.node_cost", lambda model: NODE_COST)
    return NODE_COST


@pytest.fixture
def model() -> PreTrainedModel:
    """Four layers whose last two change little, so that an exit after two is often right."""
    return talkative()


def talkative(family: str = "llama", **changes: Any) -> PreTrainedModel:
    made = zoo.make(family, num_hidden_layers=LAYERS, **changes)
    with torch.no_grad():
        for layer in made.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return made


def run(model: PreTrainedModel, strategy: EarlyExit, **settings: Any) -> SpeculativeOutput:
    return generate(model, **(SETTINGS | settings), strategy=strategy, return_dict_in_generate=True)


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that hangs on the modules, by identity; the config by value."""
    return {
        "objects": {name: {key: id(value) for key, value in vars(one).items()} for name, one in model.named_modules()},
        "children": {name: [id(child) for child in one.children()] for name, one in model.named_modules()},
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
    }


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"exit_layer": 0}, r"EarlyExit\(exit_layer=0\) must be a whole number of at least 1"),
    "a negative layer": ({"exit_layer": -1}, r"exit_layer=-1"),
    "half a layer": ({"exit_layer": 1.5}, r"exit_layer=1.5"),
    "unsorted": ({"layers": (2, 1)}, r"layers=\(2, 1\)\) must be increasing"),
    "twice": ({"layers": (1, 1)}, r"layers=\(1, 1\)"),
    "negative": ({"layers": (-1, 1)}, r"layers=\(-1, 1\)"),
    "none": ({"layers": ()}, r"layers=\(\)"),
    "not whole": ({"layers": (0.0, 1)}, r"layers=\(0.0, 1\)"),
    "both": ({"exit_layer": 1, "layers": (0,)}, r"exit_layer=1 or layers=\(0,\), not both"),
    "no tokens": ({"num_tokens": 0}, r"num_tokens=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_make_no_sense(case: str) -> None:
    settings, message = WRONG[case]
    with pytest.raises(ArgumentError, match=message):
        EarlyExit(**settings)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (EarlyExit(exit_layer=4), r"exit_layer=4\) must be less than 4"),
        (EarlyExit(exit_layer=9), r"exit_layer=9\) must be less than 4"),
        (EarlyExit(layers=(0, 4)), r"layers=\(0, 4\)\) must name some of layers 0 to 3.*has 4 layers"),
        (EarlyExit(layers=range(4)), r"leave out at least one"),
    ],
    ids=str,
)
def test_layers_that_the_model_does_not_have(model: PreTrainedModel, strategy: EarlyExit, message: str) -> None:
    model.register_forward_pre_hook(lambda *args: pytest.fail("a forward was run"))

    with pytest.raises(ArgumentError, match=message):
        run(model, strategy)


def test_a_model_whose_layers_cannot_be_told(model: PreTrainedModel) -> None:
    model.register_forward_pre_hook(lambda *args: pytest.fail("a forward was run"))
    model.others = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(LAYERS))

    for strategy in (EarlyExit(exit_layer=1), EarlyExit(layers=(0,)), "early_exit"):
        with pytest.raises(UnsupportedModelError, match="holds 2 lists of 4 modules"):
            generate(model, **SETTINGS, strategy=strategy)


def test_the_default_is_a_quarter_of_the_layers() -> None:
    for layers, expected in ((2, 1), (4, 1), (8, 2), (11, 2)):
        assert EarlyExit().num_shared_layers(zoo.make("llama", num_hidden_layers=layers)) == expected
    with pytest.raises(ArgumentError, match=r"exit_layer=1\) must be less than 1"):
        EarlyExit().check(zoo.make("llama", num_hidden_layers=1))


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_nothing_is_run_twice(model: PreTrainedModel, exit_layer: int, num_tokens: int) -> None:
    """Each layer runs the prompt, and in each round the pending token and every guess, once."""
    strategy = EarlyExit(exit_layer=exit_layer, num_tokens=num_tokens, adaptive=False)
    run(model, strategy)
    calls, rows = [0] * LAYERS, [0] * LAYERS
    for index, layer in enumerate(decoder_layers(model)):

        def count(module: Any, args: Any, output: Tensor, index: int = index) -> None:
            calls[index] += 1
            rows[index] += output.shape[1]

        layer.register_forward_hook(count)

    stats = run(model, strategy).speculation

    assert stats.drafted > 0
    assert rows == [9 + stats.rounds - 1 + stats.drafted] * LAYERS
    # The last guess of a chain is not drafted from, so the first layers run it when it is verified; the last round of
    # the text has room for no guess.
    assert calls[exit_layer:] == [stats.rounds] * (LAYERS - exit_layer)
    assert all(
        stats.drafted + stats.rounds - 1 <= count <= stats.drafted + stats.rounds for count in calls[:exit_layer]
    )


def test_nothing_is_run_twice_in_lock_step(model: PreTrainedModel) -> None:
    """Padding behind a row that has ended is drafted as it is verified."""
    batch = texts.padded([9, 5])
    plain = texts.greedy(model, **batch, max_new_tokens=NEW_TOKENS)[:, batch["input_ids"].shape[1] :].tolist()
    ends = next(step for step in range(3, NEW_TOKENS) if plain[1][step] not in plain[0] + plain[1][:step])
    settings = {**batch, "eos_token_id": plain[1][ends], "output_scores": True}
    strategy = EarlyExit(exit_layer=2, num_tokens=3, adaptive=False)
    expected = run(model, strategy, **settings).sequences
    rows = [0] * LAYERS
    for index, layer in enumerate(decoder_layers(model)):

        def count(module: Any, args: Any, output: Tensor, index: int = index) -> None:
            rows[index] += output.shape[1]

        layer.register_forward_hook(count)

    output = run(model, strategy, **settings)

    assert output.sequences.tolist() == expected.tolist()
    assert ends < NEW_TOKENS - 5
    assert (output.sequences[1, -4:] == texts.PAD).all()
    assert output.speculation.accepted > 0
    assert rows == [rows[-1]] * LAYERS


def test_hooks_fire_once_for_a_verification(model: PreTrainedModel) -> None:
    """So benchmarks count the target's forwards as for any strategy."""
    strategy = EarlyExit(exit_layer=2, adaptive=False)
    run(model, strategy)
    heard: list[object] = []
    model.register_forward_hook(lambda module, args, output: heard.append(module))

    with ForwardClock(model) as clock:
        stats = run(model, strategy).speculation

    assert stats.drafted > 0
    assert clock.target_forwards == len(heard) == stats.rounds
    assert clock.draft_forwards == 0
    assert set(heard) == {model}
    assert stats.seconds_draft > 0


@pytest.mark.parametrize("strategy", [EarlyExit(2, adaptive=False), EarlyExit(layers=(1, 3), adaptive=False)], ids=str)
@pytest.mark.parametrize("batch", [False, True])
def test_the_cache_afterwards_is_the_text(model: PreTrainedModel, strategy: EarlyExit, batch: bool) -> None:
    prompt = texts.padded([9, 5]) if batch else texts.inputs(PROMPT)
    cache = DynamicCache()
    expected = texts.greedy(model, **prompt, max_new_tokens=NEW_TOKENS)

    output = run(model, strategy, **prompt, cache=cache)

    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.accepted > 0
    fresh = TreeCache()
    new = expected.shape[1] - prompt["input_ids"].shape[1] - 1
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, new), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(input_ids=expected[:, :-1], attention_mask=mask, position_ids=positions, cache=fresh)
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        for ours, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert ours.shape == other.shape
            torch.testing.assert_close(
                ours.transpose(1, 2)[mask.bool()], other.transpose(1, 2)[mask.bool()], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("strategy", [EarlyExit(2), EarlyExit(layers=(1, 3))], ids=str)
def test_a_second_turn(model: PreTrainedModel, strategy: EarlyExit) -> None:
    cache = DynamicCache()
    first = run(model, strategy, cache=cache).sequences
    two = {"input_ids": torch.cat([first, texts.prompt(4, seed=9)], dim=1), "attention_mask": None}
    expected = texts.greedy(model, **two, max_new_tokens=NEW_TOKENS)

    assert run(model, strategy, **two, cache=cache).sequences.tolist() == expected.tolist()
    assert cache.get_seq_length() == expected.shape[1] - 1


class Fails(StoppingCriteria):
    """Raises when the text has so many columns."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] >= self.columns:
            raise ArithmeticError("criteria")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("strategy", [EarlyExit(2, adaptive=False), EarlyExit(layers=(1, 3), adaptive=False)], ids=str)
@pytest.mark.parametrize("accident", ["none", "criteria", "draft", "verification"])
def test_nothing_is_left_on_the_model(model: PreTrainedModel, strategy: EarlyExit, accident: str) -> None:
    """Neither afterwards nor, as another thread would see it, in the middle of any forward."""
    text = run(model, strategy).sequences
    seen: list[dict[str, Any]] = []
    # The second layer belongs to every draft, the third to none: they tell draft and verification apart.
    interrupted = {"draft": 1, "verification": 2}.get(accident)
    handles = []
    for index, layer in enumerate(decoder_layers(model)):

        def look(module: Any, args: Any, index: int = index) -> None:
            seen.append(state(model))
            if index == interrupted and len(seen) > 30:
                raise KeyboardInterrupt

        handles.append(layer.register_forward_pre_hook(look))
    before = state(model)
    cache = DynamicCache()
    extra = {"stopping_criteria": StoppingCriteriaList([Fails(16)])} if accident == "criteria" else {}
    error = {"none": None, "criteria": ArithmeticError}.get(accident, KeyboardInterrupt)

    if error is None:
        run(model, strategy, cache=cache)
    else:
        with pytest.raises(error):
            run(model, strategy, cache=cache, **extra)

    assert len(seen) > 20
    assert all(one == before for one in seen)
    assert state(model) == before
    for handle in handles:
        handle.remove()
    held = cache.get_seq_length()
    assert 9 <= held < text.shape[1]
    assert {layer.get_seq_length() for layer in cache.layers} == {held}
    rest = {"input_ids": text[:, : held + 1], "attention_mask": None, "max_new_tokens": text.shape[1] - held - 1}
    if rest["max_new_tokens"]:
        assert texts.greedy(model, **rest, cache=cache).tolist() == text.tolist()
    assert run(model, strategy).sequences.tolist() == text.tolist()


def test_threads_with_different_layers_on_one_model(model: PreTrainedModel) -> None:
    prompts = [texts.prompt(9, seed=seed) for seed in range(4)]
    expected = [texts.greedy(model, **texts.inputs(one), max_new_tokens=40).tolist() for one in prompts]
    strategies = [
        EarlyExit(1, adaptive=False),
        EarlyExit(3, adaptive=False),
        EarlyExit(layers=(0, 2), adaptive=False),
        EarlyExit(2),
    ]
    results: dict[int, list[Any]] = {index: [] for index in range(4)}
    barrier = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(3):
            one = run(model, strategies[index], **texts.inputs(prompts[index]), max_new_tokens=40)
            results[index].append(one.sequences.tolist())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert results == {index: [text] * 3 for index, text in enumerate(expected)}


@pytest.mark.parametrize("strategy", [EarlyExit(2, adaptive=False), EarlyExit(layers=(1, 3), adaptive=False)], ids=str)
def test_hidden_states(model: PreTrainedModel, strategy: EarlyExit) -> None:
    wanted = {"output_hidden_states": True, "output_logits": True}
    stock = model.generate(**SETTINGS, **wanted, return_dict_in_generate=True)

    ours = run(model, strategy, **wanted)

    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert ours.speculation.accepted > 0
    torch.testing.assert_close(ours.hidden_states, stock.hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits, stock.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("setting", ["object", "call"])
def test_chain_length(model: PreTrainedModel, setting: str) -> None:
    strategy = EarlyExit(3, num_tokens=2 if setting == "object" else 9, adaptive=False)
    given = {} if setting == "object" else {"num_assistant_tokens": 2}

    stats = run(model, strategy, **given).speculation

    # The first round is the prompt's, and the last ones have less room.
    assert 2 * (stats.rounds - 3) <= stats.drafted <= 2 * (stats.rounds - 1)
    assert max(stats.accepted_lengths) == 2


def test_confidence_threshold(model: PreTrainedModel) -> None:
    strategy = EarlyExit(3, adaptive=False)
    free, unsure, never_sure = (
        run(model, strategy, assistant_confidence_threshold=threshold).speculation for threshold in (0.0, 0.2, 1.0)
    )

    assert free.drafted / free.rounds > unsure.drafted / unsure.rounds
    assert max(unsure.accepted_lengths) > 1
    assert max(never_sure.accepted_lengths) == 1


def test_other_draft_settings_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(hf_specdec.UnsupportedError, match="num_assistant_tokens_schedule"):
        run(model, EarlyExit(2), num_assistant_tokens_schedule="heuristic")
    with pytest.raises(ArgumentError, match="does not use assistant_model"):
        run(model, EarlyExit(2), assistant_model=zoo.make("llama"))


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_a_hopeless_exit_is_tried_in_few_rounds(exit_layer: int) -> None:
    """Random layers of an untrained model guess nothing; its last layer changes everything."""
    target = zoo.make("llama", num_hidden_layers=LAYERS, seed=3)
    settings = {"max_new_tokens": 100}
    always, wary = (run(target, EarlyExit(exit_layer, adaptive=one), **settings).speculation for one in (False, True))

    assert always.accepted < 0.1 * always.drafted
    assert wary.drafted <= 10
    assert wary.accepted_lengths[0] > 80


class Contradicts:
    """On the last layer: turns the target's logits around, in so many of its forwards."""

    def __init__(self, forwards: float) -> None:
        self.forwards = forwards

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        self.forwards -= 1
        return output if self.forwards < 0 else -output


@pytest.mark.parametrize("strategy", [EarlyExit(1), EarlyExit(layers=(0, 2))], ids=str)
def test_a_draft_is_run_by_what_it_was_good_for(strategy: EarlyExit) -> None:
    """Useless for good: rarely. Useless for 100 forwards: soon again in every round."""
    target = without_effect(zoo.make("llama", num_hidden_layers=LAYERS, max_position_embeddings=512), 1, 2, 3)
    run(target, strategy)
    calls = [0, 0]
    for which, index in enumerate((0, 3)):  # the layer that drafts, and one that verifies alone

        def count(module: Any, args: Any, output: Tensor, which: int = which) -> None:
            calls[which] += 1

        decoder_layers(target)[index].register_forward_hook(count)

    draft_forwards, stats = {}, {}
    for forwards in (math.inf, 100):
        calls[:] = [0, 0]
        handle = decoder_layers(target)[3].register_forward_hook(Contradicts(forwards))
        stats[forwards] = run(target, strategy, max_new_tokens=400).speculation
        handle.remove()
        assert calls[1] == stats[forwards].rounds
        draft_forwards[forwards] = calls[0] - calls[1]

    assert stats[math.inf].accepted <= 2
    assert draft_forwards[math.inf] <= 14
    # After the change: a pause of 64 rounds at most, some rounds of short chains, and then seven tokens a round.
    assert stats[100].rounds <= 100 + 64 + (400 - 164) / 4
    assert draft_forwards[100] > 150


def test_a_good_exit_stays_in_use(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.01
            layer.mlp.down_proj.weight *= 0.01

    stats = run(model, EarlyExit(1), max_new_tokens=60).speculation

    assert stats.tokens_per_forward > 3


def test_payoff() -> None:
    assert speedup(0.0, 0.5, 0) == 1
    assert speedup(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)
    assert speedup(1.0, 0.0, 6) == 7
    assert best_length(1.0, 0.9, 6) == 6
    assert best_length(0.0, 0.0, 6) == 0
    assert best_length(0.3, 0.5, 6) == 0
    assert best_length(0.5, 0.25, 6) == 1
    values = [speedup(0.8, 0.1, length) for length in range(7)]
    assert best_length(0.8, 0.1, 6) == max(range(7), key=values.__getitem__)


@pytest.mark.parametrize("verification", ["keyed", "rejection"])
@pytest.mark.parametrize("strategy", [EarlyExit(3, adaptive=False), EarlyExit(layers=(0, 2), adaptive=False)], ids=str)
def test_sampling(model: PreTrainedModel, strategy: EarlyExit, verification: str) -> None:
    """Keyed: the text is that of no draft. Rejection: guesses come with the law they were drawn from."""
    mode = {
        "do_sample": True,
        "seed": 5,
        "temperature": 0.7,
        "top_k": 0,
        "verification": verification,
        "max_new_tokens": 60,
    }
    trees: list[Any] = []

    class Looks(EarlyExit):
        def propose(self, context: Any) -> Any:
            trees.append(super().propose(context))
            return trees[-1]

    ours = run(model, Looks(strategy.exit_layer, strategy.layers, adaptive=False), **mode)

    assert ours.speculation.accepted > 10
    if verification == "keyed":
        plain = generate(model, **(SETTINGS | mode), strategy="none")
        assert ours.sequences.tolist() == plain.tolist()
        assert all(tree.draft_probs is None for tree in trees)
        return
    tree = trees[0]
    text = ours.sequences[:, :10]  # prompt and pending token
    kept = strategy.layers or range(strategy.exit_layer)
    with torch.no_grad():
        for node in range(tree.width - 1):
            logits = with_layers(model, kept)(input_ids=text, use_cache=False).logits[0, -1]
            law = torch.softmax(logits.double() / 0.7, dim=-1)
            torch.testing.assert_close(tree.draft_probs[0][node], law, atol=1e-5, rtol=1e-4)
            text = torch.cat([text, torch.tensor([[tree.tokens[0][node + 1]]])], dim=1)


@pytest.mark.parametrize("strategy", [EarlyExit(1), EarlyExit(layers=(1, 3))], ids=str)
def test_inside_stock_generate(model: PreTrainedModel, strategy: EarlyExit) -> None:
    expected = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    generator = DrafterCandidateGenerator(strategy, model)

    with stock_assisted(model, generator):
        ours = model.generate(**SETTINGS, prompt_lookup_num_tokens=1)

    assert ours.tolist() == expected.tolist()


def test_a_row_that_is_done_at_the_last_position() -> None:
    """While the other goes on, it must not be drafted on behind the position that the model has last."""
    target = zoo.make("gpt2")
    with torch.no_grad():
        for projection in (target.transformer.h[1].attn.c_proj, target.transformer.h[1].mlp.c_proj):
            projection.weight *= 0.3  # the exit is often right
    batch = {**texts.padded([100, 40]), "max_new_tokens": zoo.POSITIONS - 100}
    expected = texts.greedy(target, **batch)

    for recorded in ({}, {"output_scores": True}):  # rows that finish at their own time, and in step
        output = run(target, EarlyExit(1, adaptive=False), **batch, **recorded)
        assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_layer_set_without_the_first_layer(family: str) -> None:
    """Of two layers only one other set than the first layer is left; few of its guesses are right."""
    target = zoo.make(family, attention="eager")
    for batch in (texts.padded([9]), texts.padded([4, 13, zoo.WINDOW])):
        expected = texts.greedy(target, **batch, max_new_tokens=14)
        output = run(target, EarlyExit(layers=(1,), adaptive=False), **batch, max_new_tokens=14)
        assert output.sequences.tolist() == expected.tolist()
        assert output.speculation.drafted > 0


@torch.no_grad()
def test_a_layer_set_reads_a_long_prompt_in_chunks(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer stores nothing, and it is the one that the model asks for the length of the text."""
    monkeypatch.setattr("hf_specdec.drafters.draft_model._PREFILL_CHUNK", 3)
    text = PROMPT[0].tolist()
    view = with_layers(model, (1, 3))

    scores = DraftModel(view, context([text], model)).catch_up([text])

    torch.testing.assert_close(scores, view(input_ids=PROMPT, use_cache=False).logits[:, -1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(sys.platform == "darwin", reason="bitsandbytes quantises on Linux and Windows")
@pytest.mark.parametrize(
    "quantisation",
    [
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ],
    ids=["8-bit", "4-bit"],
)
def test_quantised_layers(tmp_path: Path, quantisation: BitsAndBytesConfig) -> None:
    pytest.importorskip("bitsandbytes")
    talkative(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    quantised = LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    ).eval()
    for strategy in (EarlyExit(2, adaptive=False), EarlyExit(layers=(0, 2), adaptive=False)):
        for batch in (texts.padded([9]), texts.padded([7, 12])):
            expected = texts.greedy(quantised, **batch, max_new_tokens=NEW_TOKENS)
            output = run(quantised, strategy, **batch)
            assert output.sequences.tolist() == expected.tolist()
            assert output.speculation.accepted > 0


@pytest.mark.parametrize("way", ["peft", "injected"])
def test_adapted_layers(model: PreTrainedModel, way: str) -> None:
    """The draft sees the adapter: with it switched off it would guess for another model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "up_proj"])
    plain = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS).tolist()
    if way == "peft":
        adapted = peft.get_peft_model(model, config)
        hf_specdec.enable(adapted)
    else:
        adapted = model
        peft.inject_adapter_in_model(config, model)
    for weight in (one for name, one in adapted.named_parameters() if "lora" in name):
        torch.nn.init.normal_(weight, std=0.3)
    expected = type(adapted).generate(adapted, **SETTINGS).tolist()
    assert expected != plain

    for strategy in (EarlyExit(2, adaptive=False), EarlyExit(layers=(0, 1), adaptive=False)):
        if way == "peft":
            ours = adapted.generate(**SETTINGS, strategy=strategy, return_dict_in_generate=True)
        else:
            ours = run(adapted, strategy)
        assert ours.sequences.tolist() == expected
        assert ours.speculation.accepted > 0


def without_effect(model: PreTrainedModel, *layers: int) -> PreTrainedModel:
    """Some layers hand on what they are given."""
    with torch.no_grad():
        for index in layers:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    return model


def test_search_leaves_out_what_has_no_effect() -> None:
    target = without_effect(zoo.make("llama", num_hidden_layers=6), 1, 3, 4)
    before = state(target)
    seen: list[tuple[tuple[int, ...], float, float]] = []

    found = EarlyExit.search(
        target,
        [PROMPT, texts.prompt(7, seed=2)[0].tolist()],
        max_new_tokens=12,
        progress=lambda *args: seen.append(args),
    )

    assert found.layers == (0, 2, 5)
    assert (found.exit_layer, found.agreement, found.num_tokens) == (None, 1.0, 6)
    assert found.expected_speed == pytest.approx(7 / (1 + 6 * (layers_cost(target, found.layers) + NODE_COST)))
    assert [layers for layers, _, _ in seen][:3] == [(0, 1, 2, 3, 5), (0, 1, 2, 5), (0, 2, 5)]
    assert all(agreement == 1 for _, agreement, _ in seen[:3])
    after = state(target)
    assert after["children"] == before["children"]
    assert after["config"] == before["config"]
    stats = run(target, found).speculation
    assert stats.accepted == stats.drafted > 0


def test_search_finds_an_exit() -> None:
    target = without_effect(zoo.make("llama", num_hidden_layers=5), 2, 3, 4)

    found = EarlyExit.search(target, [PROMPT], max_new_tokens=12)

    assert (found.exit_layer, found.layers, found.agreement) == (2, None, 1.0)


def test_the_agreement_of_a_search_is_that_of_the_layers(model: PreTrainedModel) -> None:
    found = search_layers(model, [PROMPT], 16, None)
    text = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=16)

    with torch.no_grad():
        guesses = with_layers(model, found.layers)(input_ids=text, use_cache=False).logits.argmax(-1)

    right = int((guesses[0, 8:-1] == text[0, 9:]).sum())
    assert found.agreement == right / 16
    assert found.speedup == speedup(found.agreement, guess_cost(model, found.layers), found.num_tokens)


BAD_SEARCHES: dict[str, tuple[Sequence[Any], dict[str, Any], str]] = {
    "no prompts": ([], {}, "prompts must be"),
    "an empty prompt": ([[1, 2], []], {}, "prompts must be"),
    "numbers that are no ids": ([[0.5]], {}, "prompts must be"),
    "no tokens": ([[1, 2]], {"max_new_tokens": 0}, "max_new_tokens=0"),
}


@pytest.mark.parametrize("case", BAD_SEARCHES)
def test_searches_that_make_no_sense(model: PreTrainedModel, case: str) -> None:
    prompts, settings, message = BAD_SEARCHES[case]
    with pytest.raises(ArgumentError, match=message):
        EarlyExit.search(model, prompts, **settings)


def test_search_in_a_single_layer() -> None:
    with pytest.raises(ArgumentError, match="has 1 layer"):
        EarlyExit.search(zoo.make("llama", num_hidden_layers=1), [PROMPT])


def test_the_expected_number_of_tokens(model: PreTrainedModel) -> None:
    """Rounds follow from how many guesses in a row are right, with no other effect."""
    text = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    with torch.no_grad():
        guesses = with_layers(model, (0, 1))(input_ids=text, use_cache=False).logits[0].argmax(-1)
    right = (guesses[:-1] == text[0, 1:]).tolist()
    rounds, column = 1, 10
    while column < text.shape[1]:
        room = min(3, text.shape[1] - column - 1)
        column += next((n for n in range(room) if not right[column - 1 + n]), room) + 1
        rounds += 1

    stats = run(model, EarlyExit(2, num_tokens=3, adaptive=False)).speculation

    assert stats.rounds == rounds
    assert rounds < math.ceil(NEW_TOKENS * 0.9)


@pytest.mark.parametrize("strategy", [EarlyExit(2, adaptive=False), EarlyExit(layers=(1, 3), adaptive=False)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-mixed"])
def test_attention_that_takes_no_mask(family: str, strategy: EarlyExit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with flash kernels: the model asks its cache for lengths, and each part must hear its own."""
    target = talkative(family)
    expected = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS)
    with_masks = run(target, strategy).speculation
    monkeypatch.setattr("hf_specdec.runner.TREE_ATTENTION", ("eager",))
    monkeypatch.setattr("hf_specdec.selftest.TREE_ATTENTION", ("eager",))

    output = run(target, strategy)

    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.accepted_lengths == with_masks.accepted_lengths
