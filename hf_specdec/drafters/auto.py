"""Several strategies at once, in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.grown import GrownDrafter
from hf_specdec.drafters.medusa import Medusa
from hf_specdec.drafters.recycling import Recycling
from hf_specdec.drafters.suffix import Suffix
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.sources.base import Source


@dataclass
class Auto(GrownDrafter):
    """Strategy "auto": the text itself, the target's recycled scores and what else is given, merged into one tree.

    Each source is believed as far as it has been right in this call, so the node budget goes to whoever earns it.
    While none earns its time the text comes by plain decoding.

    Args:
        parts: strategies whose sources are merged; `Suffix()` and `Recycling()` by default, and `Medusa` if the call
            gives `heads`. They have no `nodes`, `depth` or `node_cost` of their own.
        nodes, depth, node_cost: see `GrownDrafter`.
    """

    parts: Sequence[GrownDrafter] | None = None

    name = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts is None:
            return
        if not isinstance(self.parts, Sequence) or not self.parts:
            raise ArgumentError(f"Auto(parts={self.parts!r}) must be a list of strategies, such as [Suffix()]")
        for part in self.parts:
            if not isinstance(part, GrownDrafter):
                raise ArgumentError(
                    f"Auto(parts=...) takes strategies that draw on sources, such as Suffix(), not {part!r}"
                )
            for one in fields(GrownDrafter):
                value = getattr(part, one.name) if one.init else one.default
                if value != one.default:
                    raise ArgumentError(
                        f"{one.name}={value!r} of {part.name} in Auto(parts=...) would play no part, since all parts "
                        f"grow one tree: give it as Auto({one.name}={value!r})"
                    )
        wanted = {part.needs_hidden_states for part in self.parts}
        self.needs_hidden_states = True if True in wanted else "last" if "last" in wanted else False

    @property
    def _parts(self) -> Sequence[GrownDrafter]:
        return self.parts or [Suffix(), Recycling()]

    def with_heads(self, heads: MedusaHeads) -> Self:
        """The same parts, and heads: in the part that waits for them, or in one more."""
        given = [part for part in self._parts if isinstance(part, Medusa)]
        if not given:
            return replace(self, parts=[*self._parts, Medusa(heads=heads)])
        return replace(self, parts=[part.with_heads(heads) if part in given else part for part in self._parts])

    def check(self, target: PreTrainedModel) -> None:
        """Refuse what one of the parts refuses."""
        for part in self._parts:
            part.check(target)

    def sources(self, context: DraftContext) -> list[Source]:
        """Those of all parts."""
        return [source for part in self._parts for source in part.sources(context)]
