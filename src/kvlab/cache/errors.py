"""What a cache refuses, each with the numbers and with what to do instead."""

from kvlab.errors import KvlabError


class CacheError(KvlabError):
    """Base of every refusal of a kvlab cache."""


class PolicyError(CacheError, ValueError):
    """The policy is missing, or meant for another cache."""


class UnsupportedModelError(CacheError):
    """The model (or one of its layers) does not fit a window cache."""


class UnsupportedOperationError(CacheError):
    """An operation that a bounded cache cannot undo or express: crop, assisted decoding, custom masks."""


class CapacityError(CacheError):
    """A fixed buffer was asked to hold more tokens than it has rows."""


class ReuseError(CacheError):
    """A cache that already holds a text was given another one without ``reset()``."""


class BatchChangedError(CacheError):
    """The batch size, dtype or shape of the keys changed after the first token."""


class TornForwardError(CacheError):
    """A forward died after some layers had stored their keys; the layers no longer hold the same text."""


class PaddingError(CacheError):
    """The attention mask is not left padding followed by real tokens."""


class PrefillChunkError(CacheError):
    """A prefill chunk needs more room than the cache was allowed."""
