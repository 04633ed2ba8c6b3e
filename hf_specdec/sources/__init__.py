"""Cheap models of what comes next, and the tree that grows from them."""

from hf_specdec.sources.base import Guess, Source
from hf_specdec.sources.store import SuffixStore
from hf_specdec.sources.successors import SuccessorTable

__all__ = ["Guess", "Source", "SuccessorTable", "SuffixStore"]
