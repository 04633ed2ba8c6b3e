"""`--gen_kwargs` and the `generation_kwargs` of a task: what is wrong in them is said before anything is generated."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from hf_specdec.config import check_draft_settings, check_generation_config
from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError
from hf_specdec.lm_eval.arguments import known_settings

# By their names in `--model_args`; transformers calls the second one assistant_model.
_OWN_ARGUMENTS = frozenset({"strategy", "assistant", "assistant_model", "heads", "seed", "verification", "lossless"})


def check_gen_kwargs(gen_kwargs: Mapping[str, Any], drafter: Drafter, config: GenerationConfig) -> None:
    """Refuse what a request asks of `generate` and the strategy cannot give.

    Args:
        gen_kwargs: of one request.
        drafter: the strategy.
        config: the target's generation config.

    Raises:
        ArgumentError: names a model argument, or a draft setting whose value makes no sense.
        UnsupportedError: names a setting that is not honoured.
    """
    for name in gen_kwargs:
        if name in _OWN_ARGUMENTS | known_settings(drafter):
            own = name.removesuffix("_model")
            raise ArgumentError(f"{name} cannot be given in gen_kwargs: give {own} in model_args")
    settings = copy.copy(config)
    vars(settings).update(gen_kwargs, use_cache=True)  # as lm-eval says in each call
    check_generation_config(settings)
    explicit = frozenset(name for name, value in gen_kwargs.items() if value is not None)
    check_draft_settings(drafter.name, drafter.settings, settings, explicit)
