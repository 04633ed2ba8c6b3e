"""`model.generate(..., strategy=...)`: a thin, reversible wrapper around the model's own generate."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError, UnsupportedError
from hf_specdec.heads import MedusaHeads
from hf_specdec.outputs import SpeculativeOutput
from hf_specdec.sampling import Seed
from hf_specdec.speculation import Speculation

# Settings that transformers acts on, or fails at, before the loop is asked.
_EARLY = (
    ("cache_implementation", "paged"),
    ("cache_implementation", "quantized"),
    ("token_healing", True),
    ("synced_gpus", True),
)
_SIGNATURE = inspect.signature(GenerationMixin.generate)


def enable(model: PreTrainedModel) -> None:
    """Let `model.generate` take `strategy=` and what belongs to it. Calls without `strategy` stay stock.

    Args:
        model: any object with transformers' `generate`, a PEFT-wrapped model too. Enabling twice changes nothing.

    Raises:
        ArgumentError: not such an object, or its `generate` was replaced by somebody else.
    """
    _check_model(model)
    if _is_replaced(model):
        raise ArgumentError(
            "this model object's generate was replaced already; use custom_generate=Speculation(...) instead"
        )
    vars(model)["generate"] = types.MethodType(generate, model)


def _is_replaced(model: PreTrainedModel) -> bool:
    """Whether somebody else put a generate on this object. Unpickling leaves the class's own there, which is none."""
    ours: tuple[Any, ...] = (generate, getattr(type(model), "generate", None))
    bound = vars(model).get("generate")
    return bound is not None and getattr(bound, "__func__", None) not in ours


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`; a model that is not enabled stays as it is."""
    if is_enabled(model):
        del vars(model)["generate"]


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether `enable` is in force for this object."""
    bound = vars(model).get("generate")
    return isinstance(bound, types.MethodType) and bound.__func__ is generate


@contextmanager
def enabled(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`with enabled(model):` enables inside the block and leaves the model as it was before.

    Blocks for one model must not overlap in threads: enable it once, or call `hf_specdec.generate(model, ...)`.
    """
    before = is_enabled(model)
    enable(model)
    try:
        yield model
    finally:
        if not before:
            disable(model)


def generate(
    model: PreTrainedModel,
    *args: Any,
    strategy: str | Drafter | MedusaHeads | None = None,
    heads: MedusaHeads | None = None,
    seed: Seed | None = None,
    verification: str | None = None,
    lossless: bool | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """`model.generate` with speculation; on an enabled model this is `model.generate` itself.

    Args:
        model: the target.
        args, kwargs: everything else that transformers' `generate` takes.
        strategy: a registered name, a `Drafter` or trained heads; None is stock generate. A `generation_config` passed
            to this call may hold a name too, with `heads`, `seed`, `verification` and `lossless` beside it; the
            model's own config is not asked.
        heads: trained heads, for strategies that use some.
        seed, verification, lossless: see `Speculation`; they govern sampling and change nothing in greedy decoding.
        assistant_model, streamer, tokenizer, assistant_tokenizer: as in transformers.

    Raises:
        ArgumentError: a wrong argument.
        UnsupportedError: a feature that is not honoured, named, with the cure.
    """
    own: dict[str, Any] = {
        "assistant_model": assistant_model,
        "streamer": streamer,
        "tokenizer": tokenizer,
        "assistant_tokenizer": assistant_tokenizer,
    }
    _check_model(model)
    settings: dict[str, Any] = {"heads": heads, "seed": seed, "verification": verification, "lossless": lossless}
    config = _config_of([*args, kwargs.get("generation_config")])
    if strategy is None and config.get("strategy") is not None:
        strategy = config["strategy"]
        settings = {name: config.get(name) if value is None else value for name, value in settings.items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    if strategy is None:
        if settings:
            raise ArgumentError(
                "heads=, seed=, verification= and lossless= belong to strategy=; without one, use "
                "transformers.set_seed"
            )
        given = {name: value for name, value in own.items() if value is not None}
        return _stock_generate(model, *args, **kwargs, **given)
    kwargs = _by_name(model, args, kwargs)
    _refuse_early(kwargs)
    explicit = _explicit_settings(kwargs)
    stop_strings = _take_stop_strings(model, kwargs)
    speculation = Speculation(strategy, stop_strings=stop_strings, **settings, **own)
    speculation.explicit = explicit
    kwargs["custom_generate"] = speculation
    if streamer is not None:
        kwargs["streamer"] = streamer  # stock generate hands it the prompt, the loop everything after
    return _stock_generate(model, **kwargs)


def _stock_generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> SpeculativeOutput | Tensor:
    """The class's own generate, whatever the object's says."""
    method: Any = type(model).generate  # type: ignore[attr-defined]  # a mixin that PreTrainedModel does not declare
    output: SpeculativeOutput | Tensor = method(model, *args, **kwargs)
    return output


def _by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; one that is given twice is a TypeError, as in any call."""
    bound = _SIGNATURE.bind_partial(model, *args, **kwargs).arguments
    named: dict[str, Any] = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    return {**named, **bound.get("kwargs", {})}


def _config_of(arguments: list[Any]) -> dict[str, Any]:
    """What a `GenerationConfig(strategy="...", seed=...)` among the arguments holds; it keeps unknown names."""
    configs = (one for one in arguments if isinstance(one, GenerationConfig))
    return next((vars(config) for config in configs), {})


def _check_model(model: object) -> None:
    if not callable(getattr(type(model), "generate", None)):
        raise ArgumentError(
            f"{type(model).__name__} has no generate(): pass a causal language model, such as AutoModelForCausalLM "
            "loads; of a compiled model, the one inside"
        )


def _refuse_early(kwargs: dict[str, Any]) -> None:
    """What transformers itself would do, or fail at, before the loop is asked."""
    if kwargs.get("custom_generate") is not None:
        raise ArgumentError("pass strategy= or custom_generate=, not both")
    config = kwargs.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise ArgumentError(f"generation_config must be a GenerationConfig, not {type(config).__name__}")
    for name, value in _EARLY:
        if value in (kwargs.get(name), getattr(config, name, None)):
            raise UnsupportedError(f"{name}={value!r} is not supported with strategy=: drop one of the two")


def _explicit_settings(kwargs: dict[str, Any]) -> frozenset[str]:
    config = kwargs.get("generation_config")
    named = {name for name, value in vars(config).items() if value is not None} if config is not None else set()
    return frozenset(named | {name for name, value in kwargs.items() if value is not None})


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> str | list[str] | None:
    """Transformers drops the tokenizer on this path and then misses it, so the loop handles stop strings alone."""
    configs = [kwargs.get("generation_config"), getattr(model, "generation_config", None)]
    found = next((c.stop_strings for c in configs if c is not None and c.stop_strings is not None), None)
    own: str | list[str] | None = kwargs.pop("stop_strings", None)
    if found is not None:
        kwargs["stop_strings"] = None  # overrules the config in transformers' merge
    return own if own is not None else found
