"""The built-in strategies, one file each."""

from hf_specdec.drafters.assisted import Assisted
from hf_specdec.drafters.auto import Auto
from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.early_exit import EarlyExit
from hf_specdec.drafters.grown import GrownDrafter
from hf_specdec.drafters.jacobi import Jacobi
from hf_specdec.drafters.lookahead import Lookahead
from hf_specdec.drafters.medusa import Medusa
from hf_specdec.drafters.none import NoDraft
from hf_specdec.drafters.prompt_lookup import PromptLookup
from hf_specdec.drafters.recycling import Recycling
from hf_specdec.drafters.scripted import Scripted
from hf_specdec.drafters.suffix import Suffix
from hf_specdec.drafters.tree import Tree
from hf_specdec.registry import register_drafter

__all__ = [
    "Assisted",
    "Auto",
    "DraftContext",
    "Drafter",
    "EarlyExit",
    "GrownDrafter",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "NoDraft",
    "PromptLookup",
    "Recycling",
    "RoundOutputs",
    "Scripted",
    "Suffix",
    "Tree",
]

register_drafter("none", NoDraft)
register_drafter("assisted", Assisted)
register_drafter("tree", Tree)
register_drafter("prompt_lookup", PromptLookup)
register_drafter("jacobi", Jacobi)
register_drafter("lookahead", Lookahead)
register_drafter("early_exit", EarlyExit)
register_drafter("suffix", Suffix)
register_drafter("recycling", Recycling)
register_drafter("medusa", Medusa)
register_drafter("auto", Auto)
