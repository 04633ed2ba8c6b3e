"""What of `generate`'s settings is honoured, and what is refused by name before any forward."""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.checks import is_whole
from hf_specdec.compat import default_generation_settings
from hf_specdec.errors import ArgumentError, UnsupportedError, UnsupportedModelError

Verification = Literal["keyed", "rejection", "typical"]
LOSSY: Verification = "typical"

# Settings of other decoding methods, and the values that leave them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "low_memory": (None, False),
    "output_attentions": (None, False),
    "use_cache": (None, True),
}
_REASONS = {
    "num_beams": "beam search is not speculative decoding; use num_beams=1",
    "assistant_ensemble_weight": "it changes what the model says; this package does not",
    "assistant_early_exit": "use stock generate for it",
    "output_attentions": "attention weights of a tree forward are not those of plain decoding; drop it",
    "use_cache": "drafts are verified on top of the key/value cache; drop use_cache=False",
    "token_healing": "heal the prompt with model.heal_tokens first",
}
_DRAFT_SETTINGS = frozenset(
    {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    }
)
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_CACHES = (None, "dynamic", "static", "hybrid")
_FORWARD_INPUTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "cache",
        "use_cache",
        "logits_to_keep",
        "output_hidden_states",
        "output_attentions",
    }
)


def check_verification(verification: object, lossless: object) -> Verification:
    """`verification`, checked; the rule that changes what the model says must be wanted twice.

    Raises:
        ArgumentError: an unknown rule, or `lossless` says another thing than the rule.
    """
    names = get_args(Verification)
    if verification not in names:
        raise ArgumentError(f"verification={verification!r} is unknown; choose one of {', '.join(map(repr, names))}")
    if not isinstance(lossless, bool):
        raise ArgumentError(f"lossless={lossless!r} must be True or False")
    if verification == LOSSY and lossless:
        raise ArgumentError(
            f"verification={LOSSY!r} changes what the model says: choose 'keyed' or 'rejection', or say "
            "lossless=False if that is wanted"
        )
    if verification != LOSSY and not lossless:
        raise ArgumentError(
            f"verification={verification!r} is lossless: drop lossless=False, or choose verification={LOSSY!r}"
        )
    return verification  # type: ignore[return-value]


def check_generation_config(config: GenerationConfig) -> None:
    """Refuse settings that the loop does not honour.

    Raises:
        UnsupportedError: names the setting and the cure.
    """
    for name, off in _OFF.items():
        value = getattr(config, name, None)
        if value not in off:
            reason = _REASONS.get(name, "it belongs to another decoding method; drop it or drop strategy=")
            raise UnsupportedError(f"{name}={value!r} is not supported with strategy=: {reason}")
    if config.cache_implementation not in _CACHES:
        raise UnsupportedError(
            f"cache_implementation={config.cache_implementation!r} cannot be rolled back exactly; "
            "drop it, or use cache_implementation='static'"
        )


def check_draft_settings(
    strategy: str, followed: frozenset[str], config: GenerationConfig, explicit: frozenset[str]
) -> None:
    """Refuse draft settings that the caller gave and the strategy does not follow.

    Args:
        strategy: its name.
        followed: names that it follows.
        config: the call's generation config.
        explicit: names that the caller gave.

    Raises:
        UnsupportedError: names the setting.
        ArgumentError: its value makes no sense.
    """
    defaults = default_generation_settings(config)
    for name in _DRAFT_SETTINGS & explicit:
        value = getattr(config, name)
        if value in (None, defaults.get(name)):
            continue
        if name not in followed:
            raise UnsupportedError(f"{name}={value!r} means nothing to strategy {strategy!r}; drop it")
        _check_draft_setting(name, value)


def _check_draft_setting(name: str, value: Any) -> None:
    if name == "num_assistant_tokens_schedule":
        valid, wanted = value in _SCHEDULES, f"one of {', '.join(map(repr, _SCHEDULES))}"
    elif name == "assistant_confidence_threshold":
        valid, wanted = isinstance(value, int | float) and 0 <= value <= 1, "a number from 0 to 1"
    else:
        valid = is_whole(value) and value >= 1
        wanted = "a whole number of at least 1"
    if not valid:
        raise ArgumentError(f"{name}={value!r} must be {wanted}")


def check_model_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any], num_prompt_columns: int) -> None:
    """Refuse forward inputs that tree forwards would lose.

    Raises:
        UnsupportedError: embeddings or modality inputs, or a model object whose input preparation was replaced.
        ArgumentError: an empty prompt.
    """
    extra = sorted(name for name, value in model_kwargs.items() if name not in _FORWARD_INPUTS and value is not None)
    if extra:
        raise UnsupportedError(
            f"{', '.join(extra)} cannot be passed on to tree forwards with strategy=; give the prompt as input_ids "
            "with attention_mask, or use stock generate"
        )
    if model_kwargs["position_ids"].dim() != 2:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives tokens positions on several axes, which tree forwards do not; "
            "use stock generate for this model"
        )
    if num_prompt_columns == 0:
        raise ArgumentError("input_ids is empty; speculation needs at least one prompt token, such as BOS")
    if "prepare_inputs_for_generation" in vars(model):
        raise UnsupportedError(
            "this model object prepares its inputs in its own way (PEFT prompt learning does), which tree forwards "
            "would bypass; merge the adapter or use stock generate"
        )
