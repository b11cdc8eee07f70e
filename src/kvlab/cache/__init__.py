"""Key/value caches; each one is a transformers ``Cache``."""

from .errors import (
    BatchChangedError,
    CacheError,
    CapacityError,
    PaddingError,
    PolicyError,
    PrefillChunkError,
    ReuseError,
    TornForwardError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from .policy import CachePolicy
from .shift import ShiftingKVCache
from .sliding import SlidingWindowCache
from .static import StaticKVCache

__all__ = [
    "BatchChangedError",
    "CacheError",
    "CachePolicy",
    "CapacityError",
    "PaddingError",
    "PolicyError",
    "PrefillChunkError",
    "ReuseError",
    "ShiftingKVCache",
    "SlidingWindowCache",
    "StaticKVCache",
    "TornForwardError",
    "UnsupportedModelError",
    "UnsupportedOperationError",
]
