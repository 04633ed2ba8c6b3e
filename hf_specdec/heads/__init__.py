"""Trained heads that guess further tokens from the target's own hidden states."""

from hf_specdec.heads.medusa import MedusaHeads

__all__ = ["MedusaHeads"]
