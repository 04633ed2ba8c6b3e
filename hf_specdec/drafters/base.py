"""What every strategy implements: one method that proposes a tree."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from hf_specdec.errors import ArgumentError
from hf_specdec.sampling import Sampling
from hf_specdec.tree import DraftTree

if TYPE_CHECKING:
    from hf_specdec.heads import MedusaHeads


class RoundOutputs(NamedTuple):
    """What the target computed for the nodes of a tree; in the prompt's round for its last token."""

    logits: Tensor
    """`[B, n, V]`, raw."""
    hidden_states: tuple[Tensor, ...] | None
    """Per layer `[B, n, hidden_size]`, for drafters with `needs_hidden_states`; the last one is what the target's
    output matrix reads. Drafters that ask for "last" may rely on that one alone."""


LowerLayers = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs the target's first layers, its norm and its head on new nodes; see `SplitRunner.draft`."""


@dataclass
class DraftContext:
    """What a drafter may know about the call. It reads, the loop writes.

    Attributes:
        texts: for each row the token ids of prompt and output so far, without padding; the last one is pending (not
            yet in the target's cache).
        num_generated: for each row the number of tokens generated so far.
        budgets: for each row the deepest useful node; 0 for rows that draft nothing this round.
        vocab_size: number of tokens the target knows.
        sampling: the call's randomness, for drafters that draw or rank with the target's own noise.
        score_processors: the call's processors that look at scores alone (temperature, top-k, ...).
        config: the call's generation config.
        prompt: the padded prompt, int64 `[B, columns]`.
        prompt_mask: bool `[B, columns]`, False where the prompt is padded.
        target: the target model, for drafters that share its weights. Never run it with the call's cache.
        draft_model: `assistant_model` of the call, if any.
        lower_layers: for drafters that share the target's first layers, the way to run them.
    """

    texts: list[list[int]]
    num_generated: list[int]
    budgets: list[int]
    vocab_size: int
    sampling: Sampling
    score_processors: LogitsProcessorList
    config: GenerationConfig
    prompt: Tensor
    prompt_mask: Tensor
    target: PreTrainedModel
    draft_model: PreTrainedModel | None = None
    lower_layers: LowerLayers | None = None
    explicit: frozenset[str] = field(default_factory=frozenset)
    """Names of the generation settings that the caller gave in this very call."""

    @property
    def pending_tokens(self) -> list[int]:
        """The last token of each row: the roots of the trees."""
        return [text[-1] for text in self.texts]

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return len(self.texts)


class Drafter(ABC):
    """A strategy: its settings, and how it guesses.

    A subclass needs `propose` alone. One that keeps state during a call sets it up in `begin`, which works on a copy:
    an object given to `strategy=` is never changed, and serves several threads at once.

    A bad guess costs time, never a wrong token: the target verifies everything.
    """

    name: ClassVar[str] = ""
    """The strategy's name in statistics and messages; by default the class's."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Draft settings of transformers' generation config that the strategy follows; others are refused."""
    needs_draft_model: ClassVar[bool] = False
    """Whether `assistant_model` must be given."""
    needs_hidden_states: bool | Literal["last"] = False
    """Whether `observe` wants the target's hidden states: those of all layers, or of the last one alone."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.name or cls.__name__

    @property
    def chains_only(self) -> bool:
        """Whether no proposed node ever has two children; such drafts run under any attention implementation."""
        return False

    def with_heads(self, heads: MedusaHeads) -> Self:
        """The same strategy with trained heads.

        Raises:
            ArgumentError: it does not use any, has some already, or they do not fit its settings.
        """
        raise ArgumentError(f"strategy {self.name!r} does not use heads: drop heads=, or choose 'medusa' or 'auto'")

    def check(self, target: PreTrainedModel) -> None:  # noqa: B027
        """Refuse a target that these settings do not fit; called before any forward."""

    def num_shared_layers(self, target: PreTrainedModel) -> int:
        """How many of the target's first layers the strategy runs while it drafts (`context.lower_layers`); 0: none.

        Asked before any forward.
        """
        return 0

    def self_test(self, target: PreTrainedModel) -> None:  # noqa: B027
        """Refuse a target that fails in a trial; called after the target's own self-test, before the first forward."""

    def begin(self, context: DraftContext) -> Self:
        """The drafter that serves one call; called once, after the target has read the prompt."""
        return copy.copy(self)

    @abstractmethod
    def propose(self, context: DraftContext) -> DraftTree:
        """Guess how each row goes on.

        Nodes deeper than `context.budgets[row]` are dropped; rows with budget 0 need no guesses.

        Returns:
            A tree for each row, with `context.pending_tokens` as roots.
        """

    def observe(  # noqa: B027  (a drafter that learns nothing overrides nothing)
        self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs
    ) -> None:
        """Learn from a verified round. The first one is the prompt's, whose trees are roots alone.

        Args:
            tree: what was verified: the proposal, clipped to the budgets.
            accepted: for each row the path of nodes that now stand in the text, root first, without the newest token;
                empty for rows that drafted nothing.
            outputs: the target's outputs for all nodes.
        """

    def finish(self, context: DraftContext) -> None:  # noqa: B027
        """The call has ended well: `context.texts` are complete. For drafters that keep texts for later calls."""
