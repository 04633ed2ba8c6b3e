"""Trained heads that guess further tokens from the target's own hidden states."""

from hf_specdec.heads.choices import Choices, best_tree, checked_rates, checked_tree, expected_tokens, load_tree
from hf_specdec.heads.export import Layout, export_heads
from hf_specdec.heads.medusa import MedusaHeads

__all__ = [
    "Choices",
    "Layout",
    "MedusaHeads",
    "best_tree",
    "checked_rates",
    "checked_tree",
    "expected_tokens",
    "export_heads",
    "load_tree",
]
