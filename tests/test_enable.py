"""Switching on and off, and every way into the loop."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
    pipeline,
    set_seed,
)
from transformers.generation.utils import GenerationMixin

import hf_specdec
import texts
import zoo
from hf_specdec import ArgumentError, Assisted, PromptLookup, Speculation, Tree
from strategies import STRATEGIES, oracle

PROMPT = texts.prompt(9)
SETTINGS = {**texts.inputs(PROMPT), "max_new_tokens": 12, "do_sample": False}


def state(model: PreTrainedModel) -> dict[str, object]:
    """Everything about a model that a call might change."""
    return {
        "attributes": set(vars(model)),
        "class": type(model),
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "weights": {name: weight.clone() for name, weight in model.state_dict().items()},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "training": model.training,
    }


def assert_same_state(model: PreTrainedModel, before: dict[str, object]) -> None:
    after = state(model)
    weights, old_weights = after.pop("weights"), before["weights"]
    assert after == {name: value for name, value in before.items() if name != "weights"}
    assert weights.keys() == old_weights.keys()
    assert all(torch.equal(weights[name], old_weights[name]) for name in weights)


def test_enable_and_disable_restore_the_model() -> None:
    model = zoo.make("llama")
    before = state(model)

    hf_specdec.enable(model)
    hf_specdec.enable(model)
    assert hf_specdec.is_enabled(model)
    assert isinstance(model, PreTrainedModel)
    model.generate(**SETTINGS, strategy="prompt_lookup")
    hf_specdec.disable(model)
    hf_specdec.disable(model)

    assert not hf_specdec.is_enabled(model)
    assert model.generate.__func__ is type(model).generate
    assert_same_state(model, before)


def fail_inside(model: PreTrainedModel) -> None:
    with hf_specdec.enabled(model) as same:
        assert same is model
        assert hf_specdec.is_enabled(model)
        raise KeyError


@pytest.mark.parametrize("before", [False, True])
def test_the_context_manager_leaves_the_model_as_it_was(before: bool) -> None:
    model = zoo.make("llama")
    if before:
        hf_specdec.enable(model)

    with pytest.raises(KeyError):
        fail_inside(model)

    assert hf_specdec.is_enabled(model) is before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_leaves_a_trace(strategy: str) -> None:
    """Neither on the target nor on the draft: no attribute, no setting, no hook, no weight."""
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    states = state(target), state(draft)
    text = texts.greedy(target, **SETTINGS)

    with hf_specdec.enabled(target):
        target.generate(**SETTINGS, **STRATEGIES[strategy](draft, text.tolist()))

    assert_same_state(target, states[0])
    assert_same_state(draft, states[1])


def test_calls_without_strategy_are_stock(target: PreTrainedModel, enabled: PreTrainedModel) -> None:
    torch.manual_seed(3)
    expected = texts.greedy(target, **(SETTINGS | {"do_sample": True}))
    torch.manual_seed(3)
    assert torch.equal(enabled.generate(**(SETTINGS | {"do_sample": True})), expected)
    output = enabled.generate(**SETTINGS, num_beams=2, return_dict_in_generate=True)
    assert type(output).__name__ == "GenerateBeamDecoderOnlyOutput"
    assert enabled.generate(**SETTINGS, prompt_lookup_num_tokens=3).shape == (1, 21)


def test_an_enabled_model_saves_and_loads(tmp_path: Path) -> None:
    model = zoo.make("llama")
    hf_specdec.enable(model)

    model.save_pretrained(tmp_path)

    loaded = type(model).from_pretrained(tmp_path)
    assert texts.greedy(loaded, **SETTINGS).tolist() == texts.greedy(model, **SETTINGS).tolist()
    assert "strategy" not in loaded.generation_config.to_dict()


def test_a_copy_of_an_enabled_model_generates_with_its_own_weights() -> None:
    model = zoo.make("llama")
    hf_specdec.enable(model)
    twin = copy.deepcopy(model)
    expected = texts.greedy(model, **SETTINGS).tolist()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()

    assert twin.generate(**SETTINGS, strategy="prompt_lookup").tolist() == expected


def test_settings_objects_can_be_pickled() -> None:
    for strategy in (Assisted(), Tree(nodes=7), PromptLookup(branches=2), hf_specdec.NoDraft()):
        assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_the_bare_form(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """transformers' public hook alone: nothing of the model is touched."""
    expected = texts.greedy(target, **SETTINGS).tolist()

    for speculation in (
        Speculation("prompt_lookup"),
        Speculation(PromptLookup(branches=1)),
        Speculation("tree", assistant_model=draft),
        Speculation("assisted", assistant_model=draft),
    ):
        assert target.generate(**SETTINGS, custom_generate=speculation).tolist() == expected
    assert "generate" not in vars(target)


def test_the_bare_form_reads_the_settings_of_the_call(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """`num_assistant_tokens` given to generate overrules the draft's own."""
    counts = {}
    for tokens in (1, 4):
        output = target.generate(
            **SETTINGS,
            num_assistant_tokens=tokens,
            custom_generate=Speculation("assisted", assistant_model=draft),
            return_dict_in_generate=True,
        )
        counts[tokens] = max(output.speculation.accepted_lengths)
        assert output.speculation.drafted <= tokens * output.speculation.rounds
    assert counts[1] == 1 < counts[4]


def test_the_bare_form_stops_at_strings(target: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    words = {"suppress_tokens": list(range(78, zoo.VOCAB_SIZE)), "max_new_tokens": 40}
    expected = texts.greedy(target, **(SETTINGS | words), stop_strings="aa", tokenizer=letters)

    ours = target.generate(
        **(SETTINGS | words), custom_generate=Speculation("prompt_lookup", stop_strings="aa", tokenizer=letters)
    )

    assert ours.tolist() == expected.tolist()


def test_the_hub_form(target: PreTrainedModel, draft: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    """The folder that a model repository can carry gets everything that the call was given."""
    folder = hf_specdec.hub_folder()
    expected = texts.greedy(target, **SETTINGS).tolist()

    assert target.generate(**SETTINGS, custom_generate=folder, trust_remote_code=True).tolist() == expected
    ours = target.generate(
        **SETTINGS, custom_generate=folder, trust_remote_code=True, strategy="tree", assistant_model=draft
    )
    assert ours.tolist() == expected
    words = {"suppress_tokens": list(range(78, zoo.VOCAB_SIZE)), "max_new_tokens": 40}
    stopped = texts.greedy(target, **(SETTINGS | words), stop_strings="aa", tokenizer=letters)
    ours = target.generate(
        **(SETTINGS | words), custom_generate=folder, trust_remote_code=True, stop_strings="aa", tokenizer=letters
    )
    assert ours.tolist() == stopped.tolist()


def test_the_hub_form_needs_no_enabled_model(target: PreTrainedModel) -> None:
    target.generate(**SETTINGS, custom_generate=hf_specdec.hub_folder(), trust_remote_code=True, strategy="none")

    assert "generate" not in vars(target)


def test_positional_arguments(target: PreTrainedModel, enabled: PreTrainedModel) -> None:
    """In the order of transformers' generate."""
    config = GenerationConfig(max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
    expected = texts.greedy(target, **SETTINGS, repetition_penalty=1.3)

    assert enabled.generate(PROMPT, config, LogitsProcessorList(), strategy="prompt_lookup").tolist() == (
        expected.tolist()
    )
    with pytest.raises(TypeError):
        enabled.generate(PROMPT, config, inputs=PROMPT, strategy="prompt_lookup")


def test_generation_config_carries_settings_and_strategy(target: PreTrainedModel, enabled: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, repetition_penalty=1.3, strategy="prompt_lookup")
    before = config.to_dict()
    expected = texts.greedy(target, **SETTINGS, repetition_penalty=1.3)

    output = enabled.generate(PROMPT, generation_config=config, return_dict_in_generate=True)

    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.strategy == "prompt_lookup"
    assert config.to_dict() == before
    other = enabled.generate(PROMPT, generation_config=config, strategy="none", return_dict_in_generate=True)
    assert other.speculation.strategy == "none"


def test_settings_of_the_model_are_honoured(draft: PreTrainedModel) -> None:
    """Checkpoints come with sampling settings of their own."""
    model = zoo.make("llama")
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=10, repetition_penalty=1.2, eos_token_id=[1])
    expected = texts.sampled(model, **texts.inputs(PROMPT), max_new_tokens=12, temperature=0.6, top_k=10)

    with hf_specdec.enabled(model):
        ours = model.generate(**texts.inputs(PROMPT), max_new_tokens=12, seed=texts.SEED, strategy="prompt_lookup")

    assert ours.tolist() == expected.tolist()


def test_set_seed_governs_sampling(enabled: PreTrainedModel) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 12, "do_sample": True, "strategy": "prompt_lookup"}

    def run(global_seed: int, **more: object) -> list[list[list[int]]]:
        set_seed(global_seed)
        return [enabled.generate(**settings, **more).tolist() for _ in range(2)]

    first = run(1)
    assert run(1) == first
    assert first[0] != first[1]
    assert run(2) != first
    assert run(1, seed=5)[0] == run(2, seed=5)[0]
    rejection = run(1, verification="rejection")
    assert run(1, verification="rejection") == rejection
    assert rejection[0] != rejection[1]


def test_greedy_decoding_draws_nothing(enabled: PreTrainedModel) -> None:
    """The global generator is the caller's."""
    before = torch.get_rng_state()

    enabled.generate(**SETTINGS, strategy="prompt_lookup")
    enabled.generate(**(SETTINGS | {"do_sample": True}), strategy="prompt_lookup", seed=1)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["assisted", "tree", "prompt_lookup"])
def test_threads_share_a_strategy_object(target: PreTrainedModel, draft: PreTrainedModel, kind: str) -> None:
    """State lives in the call, not in the settings object, nor on the models."""
    drafter = {"assisted": Assisted(), "tree": Tree(min_gain=0.0, min_score=0.0), "prompt_lookup": PromptLookup()}[
        kind
    ]
    assistant = {} if kind == "prompt_lookup" else {"assistant_model": draft}
    before = copy.copy(vars(drafter))
    prompts = [texts.prompt(7 + i, seed=i) for i in range(6)]
    expected = [texts.greedy(target, **(SETTINGS | texts.inputs(ids))).tolist() for ids in prompts]
    results: dict[int, list[list[int]]] = {}

    def work(numbers: range) -> None:
        for i in numbers:
            settings = SETTINGS | texts.inputs(prompts[i])
            results[i] = hf_specdec.generate(target, **settings, strategy=drafter, **assistant).tolist()

    threads = [Thread(target=work, args=(range(start, 6, 2),)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [results[i] for i in range(6)] == expected
    assert vars(drafter) == before


def test_pipeline(target: PreTrainedModel, letters: PreTrainedTokenizerFast, enabled: PreTrainedModel) -> None:
    """Arguments of the pipeline's call reach generate."""
    text = letters.decode(texts.prompt(9)[0] % 78)
    generator: TextGenerationPipeline = pipeline("text-generation", model=enabled, tokenizer=letters)
    settings = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": list(range(78, zoo.VOCAB_SIZE))}
    expected = generator(text, **settings)

    assert generator(text, **settings, strategy="prompt_lookup") == expected
    two = generator([text, text[:7]], batch_size=2, **settings)
    assert generator([text, text[:7]], batch_size=2, **settings, strategy="prompt_lookup") == two


@pytest.fixture(scope="module")
def adapted() -> PreTrainedModel:
    """A model with an untrained LoRA whose second matrix is random, so that it says something else."""
    torch.manual_seed(0)
    model = get_peft_model(zoo.make("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.eval()


def test_peft_model(adapted: PreTrainedModel, draft: PreTrainedModel) -> None:
    expected = adapted.generate(**SETTINGS)
    assert expected.tolist() != texts.greedy(zoo.make("llama"), **SETTINGS).tolist()
    before = set(vars(adapted)), set(vars(adapted.base_model.model))

    with hf_specdec.enabled(adapted):
        for strategy in STRATEGIES:
            arguments = STRATEGIES[strategy](draft, expected.tolist())
            assert adapted.generate(**SETTINGS, **arguments).tolist() == expected.tolist(), strategy

    assert (set(vars(adapted)), set(vars(adapted.base_model.model))) == before


def test_the_base_model_inside_a_peft_model(adapted: PreTrainedModel) -> None:
    expected = adapted.generate(**SETTINGS)

    inner = adapted.base_model.model
    assert hf_specdec.generate(inner, **SETTINGS, strategy="prompt_lookup").tolist() == expected.tolist()
    with adapted.disable_adapter():
        off = hf_specdec.generate(inner, **SETTINGS, strategy="prompt_lookup").tolist()
    assert off == texts.greedy(zoo.make("llama"), **SETTINGS).tolist()


def test_a_peft_model_as_target_of_its_own_base(adapted: PreTrainedModel, target: PreTrainedModel) -> None:
    """The usual draft of a fine-tuned model: the model that it came from."""
    expected = adapted.generate(**SETTINGS)

    with hf_specdec.enabled(adapted):
        ours = adapted.generate(**SETTINGS, strategy="tree", assistant_model=target)

    assert ours.tolist() == expected.tolist()


def test_not_a_model() -> None:
    for call in (hf_specdec.enable, hf_specdec.generate):
        with pytest.raises(ArgumentError, match="Linear has no generate\\(\\): pass a causal language model"):
            call(torch.nn.Linear(2, 2))


def test_a_foreign_wrapper_is_left_alone() -> None:
    model = zoo.make("llama")
    model.generate = lambda *args, **kwargs: "theirs"

    with pytest.raises(ArgumentError, match="replaced"):
        hf_specdec.enable(model)

    assert model.generate() == "theirs"


def test_the_wrapper_names_its_own_arguments() -> None:
    named = inspect.signature(hf_specdec.generate).parameters

    assert {"strategy", "seed", "verification", "assistant_model", "streamer", "tokenizer"} <= named.keys()
    assert not {"strategy", "seed", "verification"} & inspect.signature(GenerationMixin.generate).parameters.keys()


@pytest.mark.slow
def test_import_is_quiet_and_changes_nothing() -> None:
    """Importing the package touches no class of transformers and prints nothing."""
    code = (
        "from transformers.generation.utils import GenerationMixin as M; before = dict(vars(M)); "
        "import hf_specdec; assert dict(vars(M)) == before"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_oracle_through_every_door(target: PreTrainedModel) -> None:
    """Function, method, hook: the same text, the same counts."""
    text = texts.greedy(target, **SETTINGS)
    drafter = oracle(text.tolist())
    settings = {**SETTINGS, "return_dict_in_generate": True}
    outputs = [
        hf_specdec.generate(target, **settings, strategy=drafter),
        target.generate(**settings, custom_generate=Speculation(drafter)),
    ]
    with hf_specdec.enabled(target):
        outputs.append(target.generate(**settings, strategy=drafter))

    assert all(output.sequences.tolist() == text.tolist() for output in outputs)
    assert [output.speculation.accepted_lengths for output in outputs] == [{0: 1, 5: 1, 4: 1}] * 3


def test_an_enabled_model_that_was_pickled_can_be_enabled_again() -> None:
    model = zoo.make("llama")
    hf_specdec.enable(model)

    loaded = pickle.loads(pickle.dumps(model))
    hf_specdec.enable(loaded)

    assert hf_specdec.is_enabled(loaded)
    hf_specdec.disable(loaded)
    assert "generate" not in vars(loaded)


def test_a_config_carries_seed_and_verification(target: PreTrainedModel) -> None:
    config = GenerationConfig(
        max_new_tokens=6, do_sample=True, strategy="prompt_lookup", seed=3, verification="rejection"
    )
    settings = {**texts.inputs(texts.prompt(9)), "pad_token_id": texts.PAD}

    runs = [hf_specdec.generate(target, **settings, generation_config=config) for _ in range(3)]

    assert runs[0].tolist() == runs[1].tolist() == runs[2].tolist()
    named = hf_specdec.generate(
        target,
        **settings,
        max_new_tokens=6,
        do_sample=True,
        strategy="prompt_lookup",
        seed=3,
        verification="rejection",
        return_dict_in_generate=True,
    )
    assert named.speculation.verification == "rejection"
    assert named.sequences.tolist() == runs[0].tolist()
