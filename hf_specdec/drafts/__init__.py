"""Draft models that are made of a target: some of its layers, trained or not, on its own embeddings."""

from hf_specdec.drafts.cut import cut_model, spread_layers
from hf_specdec.drafts.distilled import make_draft, own_parameters, own_tensors, stock_model
from hf_specdec.drafts.files import load_assistant, load_draft, save_draft
from hf_specdec.drafts.output import ReducedOutput

__all__ = [
    "ReducedOutput",
    "cut_model",
    "load_assistant",
    "load_draft",
    "make_draft",
    "own_parameters",
    "own_tensors",
    "save_draft",
    "spread_layers",
    "stock_model",
]
