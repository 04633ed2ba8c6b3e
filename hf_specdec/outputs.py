"""What `return_dict_in_generate=True` asks for, one entry a token, as plain generation returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.emit import Emitter
from hf_specdec.runner import ForwardOutput
from hf_specdec.stats import SpeculationStats

HiddenStates = tuple[Tensor, ...]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with one more field.

    Attributes:
        speculation (`SpeculationStats`): what the call did.
    """

    speculation: SpeculationStats | None = None


class Recorder:
    """Collects scores, logits and hidden states of emitted tokens. All rows must have the same length (lock-step).

    Args:
        config: the call's generation config.
    """

    def __init__(self, config: GenerationConfig) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None
        self.hidden_states: tuple[HiddenStates, ...] | None = () if wanted and config.output_hidden_states else None
        self._prompt_states: HiddenStates | None = None
        self._round_states: HiddenStates | None = None

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return any(record is not None for record in (self.scores, self.logits, self.hidden_states))

    def add_prompt(self, output: ForwardOutput) -> None:
        """Hidden states of the prompt, `[B, k, hidden_size]` per layer; may come in chunks."""
        if self.hidden_states is not None and output.hidden_states is not None:
            self._prompt_states = _join(self._prompt_states, output.hidden_states)

    def start_round(self, output: ForwardOutput) -> None:
        """Hidden states of the round's nodes."""
        self._round_states = output.hidden_states

    def observe(
        self, emitter: Emitter, rows: Sequence[int], nodes: Sequence[int], logits: Tensor, scores: Tensor
    ) -> None:
        """Record one token of every row; stopping criteria that look at scores find them in the emitter."""
        if self.logits is not None:
            self.logits += (logits,)
        if self.scores is not None:
            self.scores += (scores,)
            emitter.scores = self.scores
        if self.hidden_states is not None:
            self.hidden_states += (self._states(rows, nodes),)

    def _states(self, rows: Sequence[int], nodes: Sequence[int]) -> HiddenStates:
        """Of the nodes; the first token comes with those of the whole prompt, as in plain generation."""
        prompt_states, self._prompt_states = self._prompt_states, None
        if prompt_states is not None:
            return prompt_states
        assert self._round_states is not None
        return tuple(layer[list(rows), list(nodes)][:, None] for layer in self._round_states)


def _join(earlier: HiddenStates | None, later: HiddenStates) -> HiddenStates:
    if earlier is None:
        return later
    return tuple(torch.cat(pair, dim=1) for pair in zip(earlier, later, strict=True))
