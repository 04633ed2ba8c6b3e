"""The loop, and the object that carries it into `generate` through the public `custom_generate` hook."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from hf_specdec.call import Call, Request, build_call
from hf_specdec.compat import default_generation_settings
from hf_specdec.config import check_draft_settings, check_generation_config, check_model_inputs, check_verification
from hf_specdec.drafters import Drafter
from hf_specdec.drafters.draft_check import check_draft_model
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.outputs import SpeculativeOutput
from hf_specdec.registry import create_drafter
from hf_specdec.runner import check_attention, check_runnable
from hf_specdec.sampling import Seed, check_seed
from hf_specdec.selftest import check_tree_logits


def decode(call: Call) -> None:
    """Speculative decoding: every line is a step of the algorithm."""
    tree, output = call.prefill()
    with call.drafting():
        drafter = call.drafter.begin(call.context)
    while True:
        accepted = call.verifier.verify(tree, output.logits)
        call.keep(accepted)
        call.observe(drafter, tree, accepted, output)
        if call.emitter.done:
            with call.drafting():
                drafter.finish(call.context)
            return
        with call.drafting():
            tree = call.propose(drafter)
        output = call.forward(tree)


class Speculation:
    """A decoding method for `model.generate(..., custom_generate=Speculation("prompt_lookup"))`.

    `hf_specdec.enable(model)` does the same more comfortably. In this bare form transformers hands neither streamer
    nor tokenizer nor assistant model on, so they are given here. The streamer goes to both, to this object and to
    `generate`: transformers hands it the prompt, this object all that follows and the end.

    Args:
        strategy: a registered name, a `Drafter` that holds its settings, or trained heads: they say what drafts with
            them.
        heads: trained heads, for strategies that use some.
        assistant_model: the draft model, for strategies that use one.
        streamer: gets each token as it is emitted.
        tokenizer: the target's tokenizer; needed for `stop_strings`.
        assistant_tokenizer: the draft's tokenizer; if given, it is compared with `tokenizer`.
        stop_strings: strings that end a row.
        seed: randomness of sampling; an int, or one int a row. Drawn from torch's global generator by default.
        verification: "keyed" (the text depends on model, prompt and seed alone), "rejection" (the classical rule) or
            "typical" (Medusa's, which changes what the model says and needs `lossless=False`).
        lossless: whether the text must have the model's own law; only "typical" takes False.

    Raises:
        ArgumentError: a wrong type or value, or an unknown strategy.
    """

    def __init__(
        self,
        strategy: str | Drafter | MedusaHeads,
        *,
        heads: MedusaHeads | None = None,
        assistant_model: PreTrainedModel | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        stop_strings: str | list[str] | None = None,
        seed: Seed | None = None,
        verification: str = "keyed",
        lossless: bool = True,
    ) -> None:
        self.drafter = _drafter(strategy, heads)
        self.verification = check_verification(verification, lossless)
        if seed is not None:
            check_seed(seed)
        if streamer is not None and not isinstance(streamer, BaseStreamer):
            raise ArgumentError(
                f"streamer must be a transformers streamer, not {type(streamer).__name__}; derive it from BaseStreamer"
            )
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ArgumentError(f"tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}")
        if stop_strings is not None and tokenizer is None:
            raise ArgumentError("stop_strings needs the model's tokenizer: pass tokenizer=")
        if self.drafter.needs_draft_model and assistant_model is None:
            raise ArgumentError(f"strategy {self.drafter.name!r} drafts with a second model: pass assistant_model=")
        if assistant_model is not None and not self.drafter.needs_draft_model:
            raise ArgumentError(
                f"strategy {self.drafter.name!r} does not use assistant_model: drop it, or choose 'tree'"
            )
        self.assistant_model = assistant_model
        self.streamer = streamer
        self.tokenizer = tokenizer
        self.assistant_tokenizer = assistant_tokenizer
        self.stop_strings = stop_strings
        self.seed = seed
        self.explicit: frozenset[str] | None = None  # generation settings that this very call gives, if known

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | Tensor:
        """Called by `generate` with everything prepared. Checks all of it before the first forward."""
        start = time.perf_counter()
        check_runnable(model)
        check_generation_config(generation_config)
        check_model_inputs(model, model_kwargs, input_ids.shape[1])
        mask = model_kwargs.get("attention_mask")
        single_row = input_ids.shape[0] == 1 and (mask is None or bool(mask.all()))
        check_attention(model, self.drafter.chains_only, single_row)
        self.drafter.check(model)
        explicit = self._explicit_settings(generation_config)
        check_draft_settings(self.drafter.name, self.drafter.settings, generation_config, explicit)
        request = Request(
            model=model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=self._with_stop_strings(stopping_criteria),
            config=generation_config,
            model_kwargs=model_kwargs,
            drafter=self.drafter,
            draft_model=self._check_draft_model(model, single_row),
            streamer=self.streamer,
            seed=self.seed,
            verification=self.verification,
            explicit=explicit,
        )
        return self._run(request, start)

    def _run(self, request: Request, start: float) -> SpeculativeOutput | Tensor:
        call = build_call(request)
        for model in filter(None, (request.model, request.draft_model)):
            check_tree_logits(model)
        request.drafter.self_test(request.model)
        try:
            decode(call)
            call.settle_cache()
        except BaseException:
            call.abandon_cache()
            raise
        if self.streamer is not None:
            self.streamer.end()
        call.finish_stats(time.perf_counter() - start)
        return call.result()

    def _with_stop_strings(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        if self.stop_strings is None or self.tokenizer is None:
            return criteria
        return StoppingCriteriaList([*criteria, StopStringCriteria(self.tokenizer, self.stop_strings)])

    def _check_draft_model(self, model: PreTrainedModel, single_row: bool) -> PreTrainedModel | None:
        if self.assistant_model is None:
            return None
        return check_draft_model(
            model, self.assistant_model, self.tokenizer, self.assistant_tokenizer, self.drafter.chains_only, single_row
        )

    def _explicit_settings(self, config: GenerationConfig) -> frozenset[str]:
        """Without the wrapper, what differs from transformers' default must have been set by someone."""
        if self.explicit is not None:
            return self.explicit
        defaults = default_generation_settings(config)
        return frozenset(name for name, value in defaults.items() if getattr(config, name) != value)


def _drafter(strategy: object, heads: object) -> Drafter:
    if isinstance(strategy, MedusaHeads):
        return _drafter(create_drafter(strategy.strategy).with_heads(strategy), heads)
    drafter = create_drafter(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(drafter, Drafter):
        # By its type alone: the text of a model would fill the screen.
        given = f"the class {strategy.__name__}" if isinstance(strategy, type) else f"a {type(strategy).__name__}"
        cure = ""
        if isinstance(strategy, type) and issubclass(strategy, Drafter):
            cure = "; call it to make an object"
        elif isinstance(strategy, PreTrainedModel):
            cure = "; a draft model is passed as assistant_model="
        raise ArgumentError(f"strategy must be a name, a Drafter object or MedusaHeads, not {given}{cure}")
    if heads is None:
        return drafter
    if not isinstance(heads, MedusaHeads):
        raise ArgumentError(
            f"heads must be MedusaHeads, not {type(heads).__name__}; load them with MedusaHeads.from_pretrained"
        )
    return drafter.with_heads(heads)
