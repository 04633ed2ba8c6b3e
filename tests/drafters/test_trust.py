"""A draft that keeps being wrong is left alone, and tried again."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import SpeculativeOutput, Tree, generate
from hf_specdec.drafters.trust import Trust

SETTINGS = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}


def test_trust_starts_full_falls_and_comes_back() -> None:
    trust = Trust()
    assert trust.value == 1.0

    values = []
    for _ in range(10):
        trust.observe(promised=0.9, accepted=0.0)
        values.append(trust.value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.2

    for _ in range(100):
        trust.observe(promised=0.0, accepted=0.0)
    assert trust.value > 0.9


def test_trust_is_never_more_than_full() -> None:
    trust = Trust()

    trust.observe(promised=0.1, accepted=1.0)

    assert trust.value == 1.0


def count_drafting(target: PreTrainedModel, draft: PreTrainedModel, drafter: Tree) -> tuple[int, SpeculativeOutput]:
    generate(target, **SETTINGS, strategy=drafter, assistant_model=draft)
    forwards: list[int] = []
    handle = draft.register_forward_pre_hook(lambda *args: forwards.append(1))
    output = generate(target, **SETTINGS, strategy=drafter, assistant_model=draft)
    handle.remove()
    return len(forwards), output


def test_a_wrong_draft_is_run_in_few_rounds(target: PreTrainedModel) -> None:
    """And its text is the target's."""
    wrong, right = zoo.make("llama", seed=5), copy.deepcopy(target)
    expected = texts.greedy(target, **SETTINGS).sequences.tolist()

    wrong_forwards, wrong_output = count_drafting(target, wrong, Tree())
    right_forwards, right_output = count_drafting(target, right, Tree())

    assert wrong_output.sequences.tolist() == right_output.sequences.tolist() == expected
    assert wrong_forwards < 0.6 * wrong_output.speculation.rounds
    assert right_forwards >= right_output.speculation.rounds
