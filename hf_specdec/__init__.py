"""Speculative decoding for Hugging Face transformers: the same tokens, sooner."""

from hf_specdec.cache import TreeCache
from hf_specdec.candidates import DrafterCandidateGenerator, stock_assisted
from hf_specdec.drafters import (
    Assisted,
    Auto,
    DraftContext,
    Drafter,
    EarlyExit,
    GrownDrafter,
    Jacobi,
    Lookahead,
    Medusa,
    NoDraft,
    PromptLookup,
    Recycling,
    RoundOutputs,
    Scripted,
    Suffix,
    Tree,
)
from hf_specdec.drafts import load_draft, make_draft, save_draft
from hf_specdec.enable import disable, enable, enabled, generate, is_enabled
from hf_specdec.errors import (
    ArgumentError,
    DrafterError,
    DraftModelError,
    NonFiniteLogitsError,
    SpecDecError,
    UnsupportedError,
    UnsupportedModelError,
)
from hf_specdec.heads import MedusaHeads, best_tree, export_heads, load_tree
from hf_specdec.hub import hub_folder
from hf_specdec.outputs import SpeculativeOutput
from hf_specdec.registry import drafter_names, register_drafter
from hf_specdec.sampling import KeyedSampler
from hf_specdec.sources import Guess, Source, SuccessorTable, SuffixStore
from hf_specdec.speculation import Speculation
from hf_specdec.stats import SpeculationStats
from hf_specdec.tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Assisted",
    "Auto",
    "DraftContext",
    "DraftModelError",
    "DraftTree",
    "Drafter",
    "DrafterCandidateGenerator",
    "DrafterError",
    "EarlyExit",
    "GrownDrafter",
    "Guess",
    "Jacobi",
    "KeyedSampler",
    "Lookahead",
    "Medusa",
    "MedusaHeads",
    "NoDraft",
    "NonFiniteLogitsError",
    "PromptLookup",
    "Recycling",
    "RoundOutputs",
    "Scripted",
    "Source",
    "SpecDecError",
    "Speculation",
    "SpeculationStats",
    "SpeculativeOutput",
    "SuccessorTable",
    "Suffix",
    "SuffixStore",
    "Tree",
    "TreeCache",
    "UnsupportedError",
    "UnsupportedModelError",
    "best_tree",
    "disable",
    "drafter_names",
    "enable",
    "enabled",
    "export_heads",
    "generate",
    "hub_folder",
    "is_enabled",
    "load_draft",
    "load_tree",
    "make_draft",
    "register_drafter",
    "save_draft",
    "stock_assisted",
]
