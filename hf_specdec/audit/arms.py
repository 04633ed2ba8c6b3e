"""The strategies under audit: all that can run with what was given, or those that were named."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_specdec.audit.fingerprints import class_fingerprint, weights_fingerprint
from hf_specdec.bench import named_strategy
from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError, SpecDecError
from hf_specdec.heads import MedusaHeads
from hf_specdec.registry import drafter_names
from hf_specdec.runner import check_attention
from hf_specdec.sampling import Seed
from hf_specdec.speculation import Speculation

KEYED, REJECTION = "keyed", "rejection"


@dataclass(frozen=True)
class Arm:
    """A strategy with the draft model that it runs with.

    Attributes:
        name: its name in the report.
        drafter: its settings.
        described: all that its texts depend on besides the target, in words.
        assistant: the draft model, for strategies that use one.
    """

    name: str
    drafter: Drafter
    described: str
    assistant: PreTrainedModel | None = None

    @property
    def key(self) -> str:
        """A short name for exactly this arm, the same in every process."""
        return f"{self.name}, {hashlib.sha256(self.described.encode()).hexdigest()[:12]}"

    def speculation(self, drafter: Drafter, seed: Seed, verification: str) -> Speculation:
        """What goes into `custom_generate`; `drafter` is this arm's own or one around it."""
        return Speculation(drafter, assistant_model=self.assistant, seed=seed, verification=verification)


def choose_arms(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    strategies: Mapping[str, Drafter] | None,
    heads: MedusaHeads | None = None,
) -> tuple[list[Arm], dict[str, str]]:
    """The arms, and for each registered strategy that cannot run the reason.

    Args:
        model: the target.
        assistant: the draft model, if any.
        strategies: by name, all of which must run; None: every registered strategy that can.
        heads: trained heads for the registered strategies; those that are named hold their own.

    Raises:
        SpecDecError: a strategy that was named cannot run.
        ArgumentError: no strategy is left, none uses the draft model, or heads are given to strategies that are named.
    """
    if heads is not None and strategies is not None:
        raise ArgumentError("heads= is for the registered strategies: give each strategy that is named its own heads")
    chosen, skipped = [], {}
    draft = "" if assistant is None else f", draft model {weights_fingerprint(assistant, assistant.generation_config)}"
    for name in _registered(heads) if strategies is None else strategies:
        try:
            drafter = named_strategy(name, {}, heads) if strategies is None else strategies[name]
            _check(name, drafter, model, assistant)
            described = describe(drafter) + (draft if drafter.needs_draft_model else "")
            chosen.append(Arm(name, drafter, described, assistant if drafter.needs_draft_model else None))
        except SpecDecError as error:
            if strategies is not None:
                raise
            skipped[name] = str(error)
    if not chosen:
        raise ArgumentError("no strategy is left to audit; name one")
    if assistant is not None and all(arm.assistant is None for arm in chosen):
        raise ArgumentError("none of the strategies uses the draft model: drop it, or add one such as 'tree'")
    return chosen, skipped


def describe(drafter: Drafter) -> str:
    """Its settings in words, the same in every process, and which code it is if that is not this package's."""
    if dataclasses.is_dataclass(drafter):
        fields = [(field.name, getattr(drafter, field.name)) for field in dataclasses.fields(drafter) if field.init]
    else:
        fields = [(name, value) for name, value in sorted(vars(drafter).items()) if not name.startswith("_")]
    described = f"{type(drafter).__name__}({', '.join(f'{name}={_word(value)}' for name, value in fields)})"
    code = class_fingerprint(type(drafter))
    return described if code is None else f"{described}, code {code}"


def _word(value: object) -> str:
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    if isinstance(value, Drafter):
        return describe(value)
    if isinstance(value, MedusaHeads):
        return f"{type(value).__name__}({weights_fingerprint(value, value.config)})"
    if isinstance(value, Iterable):
        return f"[{', '.join(map(_word, value))}]"
    return type(value).__name__


def _registered(heads: MedusaHeads | None) -> list[str]:
    names = drafter_names()
    return names if heads is None else [*names, "auto_heads"]


def _check(name: str, drafter: Drafter, model: PreTrainedModel, assistant: PreTrainedModel | None) -> None:
    if drafter.needs_draft_model and assistant is None:
        raise ArgumentError(f"strategy {name!r} drafts with a second model: give assistant")
    check_attention(model, drafter.chains_only, single_row=False)
    drafter.check(model)
    drafter.num_shared_layers(model)
