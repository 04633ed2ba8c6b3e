"""A drafter that guesses what it is told to: the supported fake for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_specdec.drafters.base import DraftContext, Drafter
from hf_specdec.errors import ArgumentError, DrafterError
from hf_specdec.tree import DraftTree

Script = Callable[[DraftContext], Sequence[Sequence[Sequence[int]]]]


class Scripted(Drafter):
    """Proposes the paths that a function returns.

    Args:
        script: takes the `DraftContext`, returns for each row its guessed continuations, best first.
        chains_only: promise that the script never returns two different continuations for one row.
    """

    name = "scripted"

    def __init__(self, script: Script, chains_only: bool = False) -> None:
        if not callable(script):
            raise ArgumentError(f"script must be a function of the DraftContext, not {script!r}")
        self._script = script
        self._chains_only = chains_only

    @property
    def chains_only(self) -> bool:
        """As promised."""
        return self._chains_only

    def propose(self, context: DraftContext) -> DraftTree:
        """Merge the scripted continuations into trees."""
        paths = self._script(context)
        try:
            return DraftTree.from_paths(context.pending_tokens, paths)
        except (TypeError, ValueError) as error:
            raise DrafterError(
                f"the script must return a list of token paths for each of {context.batch_size} rows, not {paths!r}"
            ) from error
