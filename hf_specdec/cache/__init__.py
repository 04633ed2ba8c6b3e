"""Everything that knows cache layers: the preallocated cache, its view during a call, loans of users' caches."""

from hf_specdec.cache.layers import TreeCache
from hf_specdec.cache.loan import CacheLoan
from hf_specdec.cache.view import CacheView

__all__ = ["CacheLoan", "CacheView", "TreeCache"]
