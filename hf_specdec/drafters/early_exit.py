"""A part of the target's own layers as draft (LayerSkip: Elhoushi et al. 2024; layer sets: Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checks import is_whole
from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.chain import ChainModel, draft_chains, keep_accepted
from hf_specdec.drafters.chain_length import ChainLength
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.exit_model import ExitModel
from hf_specdec.drafters.layer_search import search_layers
from hf_specdec.drafters.payoff import guess_cost
from hf_specdec.drafters.settings import require_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.layers import decoder_layers, with_layers
from hf_specdec.selftest import check_layer_set, check_split_logits
from hf_specdec.tree import DraftTree

_DEFAULT_SHARE = 4  # LayerSkip's own default for its 7B and 8B models is layer 8 of 32


@dataclass
class EarlyExit(Drafter):
    """Strategy "early_exit": some layers of the target, with its own norm and head, draft a chain.

    With `exit_layer=E` they are the first E. They share the target's cache, and verification runs the other layers
    only: what the draft computed is not computed again. With `layers=(0, 1, 5, ...)` they may be any, and keep a cache
    of their own. Neither adds weights. Only models that were trained for it (LayerSkip) guess well after few layers;
    for others, `EarlyExit.search` looks for layers that can be left out.

    The share of accepted guesses is watched, and chains are made as long as pays, down to no chain at all. A draft
    that keeps being wrong is tried ever more rarely, and the text comes about as fast as without.

    Args:
        exit_layer: the draft is the first so many layers; by default a quarter of them.
        layers: instead, indices of the layers that draft, increasing.
        num_tokens: length of the longest chain, unless the call gives `num_assistant_tokens`.
        adaptive: whether chains may be shorter, or none, where that seems to pay.

    Attributes:
        agreement: if `search` made this object, the share of the target's own tokens that the layers guessed there.
        expected_speed: what that promises, with plain decoding as 1; below 1 the draft does not pay.

    Raises:
        ArgumentError: a setting that makes no sense, or both kinds of draft.
    """

    exit_layer: int | None = None
    layers: Sequence[int] | None = None
    num_tokens: int = 6
    adaptive: bool = True
    agreement: float | None = field(default=None, init=False)
    expected_speed: float | None = field(default=None, init=False)

    name = "early_exit"
    settings = frozenset({"num_assistant_tokens", "assistant_confidence_threshold"})

    _draft: ChainModel = field(init=False, repr=False, compare=False)
    _longest: int = field(init=False, repr=False, compare=False)
    _threshold: float = field(init=False, repr=False, compare=False)
    _chain_length: ChainLength = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, "num_tokens", *(["exit_layer"] if self.exit_layer is not None else []))
        if self.layers is None:
            return
        if self.exit_layer is not None:
            raise ArgumentError(f"EarlyExit takes exit_layer={self.exit_layer} or layers={self.layers!r}, not both")
        self.layers = tuple(self.layers)
        whole = all(map(is_whole, self.layers))
        if not whole or not self.layers or self.layers[0] < 0 or sorted(set(self.layers)) != list(self.layers):
            raise ArgumentError(f"EarlyExit(layers={self.layers!r}) must be increasing indices of layers from 0")

    @classmethod
    def search(
        cls,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int] | Tensor],
        max_new_tokens: int = 48,
        progress: Callable[[Sequence[int], float, float], None] | None = None,
    ) -> Self:
        """Look for layers of a model that draft well for texts like some prompts.

        The target continues each prompt greedily. Then layers are left out, a few at a time, those first whose loss
        costs the least agreement with these texts. The best set by expected speed is returned; a guess costs the share
        of the model's weights that its draft reads, and the measured time of one more node to verify. Takes a few
        minutes for a small model on a CPU.

        Args:
            model: the target.
            prompts: token ids of a few typical prompts, each a list or an int64 tensor `[length]` or `[1, length]`.
                Of a longer one the last 96 tokens are used, so a draft is judged behind short texts only.
            max_new_tokens: length of each continuation.
            progress: called with the kept layers, their agreement and their expected speed, relative to plain
                decoding, whenever some were left out.

        Returns:
            An object with `layers` (or `exit_layer`, where they are the first ones), `num_tokens`, `agreement` and
            `expected_speed` set.

        Raises:
            ArgumentError: no prompts, or a setting that makes no sense.
            UnsupportedModelError: the layers of the model cannot be told, or this package does not serve it.
        """
        found = search_layers(model, prompts, max_new_tokens, progress)
        are_first = found.layers == tuple(range(len(found.layers)))
        drafter = cls(
            exit_layer=len(found.layers) if are_first else None,
            layers=None if are_first else found.layers,
            num_tokens=found.num_tokens,
        )
        drafter.agreement, drafter.expected_speed = found.agreement, found.speedup
        return drafter

    @property
    def chains_only(self) -> bool:
        """One guess a position."""
        return True

    def check(self, target: PreTrainedModel) -> None:
        """Compare the settings with the target's layers.

        Raises:
            ArgumentError: the target has no such layers, or no others.
            UnsupportedModelError: its layers cannot be told.
        """
        count = len(decoder_layers(target))
        if self.layers is not None and (self.layers[-1] >= count or len(self.layers) == count):
            raise ArgumentError(
                f"EarlyExit(layers={self.layers!r}) must name some of layers 0 to {count - 1} and leave out at least "
                f"one: {type(target).__name__} has {count} layers"
            )
        if self.layers is None and self._exit_layer(target) >= count:
            raise ArgumentError(
                f"EarlyExit(exit_layer={self._exit_layer(target)}) must be less than {count}, the number of layers of "
                f"{type(target).__name__}"
            )

    def num_shared_layers(self, target: PreTrainedModel) -> int:
        """The exit layer; 0 for a layer set."""
        return self._exit_layer(target) if self.layers is None else 0

    def _exit_layer(self, target: PreTrainedModel) -> int:
        return self.exit_layer or max(len(decoder_layers(target)) // _DEFAULT_SHARE, 1)

    def self_test(self, target: PreTrainedModel) -> None:
        """Check that the target computes the same in two parts, and that a part of it can be run."""
        if self.layers is None:
            check_split_logits(target, self.num_shared_layers(target))
        else:
            check_layer_set(target, self.layers)

    def begin(self, context: DraftContext) -> Self:
        """A layer set reads the prompt; an exit has read it with the target."""
        drafter = super().begin(context)
        kept = self.layers or range(self._exit_layer(context.target))
        if self.layers is None and context.lower_layers is not None:
            drafter._draft = ExitModel(context.lower_layers, context)
        else:  # also where the loop is stock generate's and shares nothing
            drafter._draft = DraftModel(with_layers(context.target, kept), context)
        given = context.explicit & self.settings
        drafter._longest = context.config.num_assistant_tokens if "num_assistant_tokens" in given else self.num_tokens
        drafter._threshold = (
            context.config.assistant_confidence_threshold if "assistant_confidence_threshold" in given else 0.0
        )
        if self.adaptive:
            cost = guess_cost(context.target, kept, context.batch_size)
            drafter._chain_length = ChainLength(cost, drafter._longest)
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Draft as long a chain as pays."""
        length = self._chain_length.value if self.adaptive else self._longest
        if not length:
            return DraftTree.roots(context.pending_tokens)
        return draft_chains(context, self._draft, length, self._threshold)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Keep the accepted nodes, and learn how often a guess is right if those before it are."""
        keep_accepted(self._draft, tree, accepted)
        if not self.adaptive:
            return
        drafted = [(len(path) - 1, count) for path, count in zip(accepted, tree.num_drafted, strict=True) if path]
        right = sum(num_right for num_right, _ in drafted)
        tried = sum(min(num_right + 1, count) for num_right, count in drafted)
        self._chain_length.observe(tried, right)
