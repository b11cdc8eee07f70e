"""CachePolicy: how many tokens a cache keeps, which, and when it drops the others."""

from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedConfig

from .errors import PolicyError, UnsupportedModelError

DEFAULT_SINKS = 4  # StreamingLLM, arXiv 2309.17453, table 2: four sinks recover what more would


def check_dtype(kept: torch.dtype | None, computed: torch.dtype) -> None:
    """Refuse a model that computes its keys in another type than the policy keeps (None: any)."""
    if kept not in (None, computed):
        raise UnsupportedModelError(
            f"the policy keeps {kept}, the model computes keys in {computed}; load the model in {kept}, or leave "
            "dtype out of the policy"
        )


def _shifts(given: dict) -> bool:
    return given["eviction"] == "shift"


class CachePolicy(BaseModel):
    """What a bounded cache keeps of each sequence.

    ``max_total_tokens``: tokens held per sequence: ``sinks`` first ones plus a window of the last ones.
    ``eviction``: ``ring`` overwrites the oldest token of the window; ``shift`` moves everything to the front.
    ``sinks``: first tokens that are never evicted (StreamingLLM, arXiv 2309.17453). Default 4; 0 for ``shift``.
    ``high_water``, ``low_water``: ``shift`` only, in tokens. When ``high_water`` tokens are held, the next one first
    drops the oldest until ``low_water`` are left. Defaults: ``max_total_tokens``, and one less (a shift per token).
    ``rotate_sinks``: move sink keys to the distance they would have, had the evicted tokens never been.
    ``dtype``: what keys and values must come in, such as ``bfloat16``; None takes the model's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_total_tokens: int = Field(gt=0)
    eviction: Literal["ring", "shift"] = "ring"
    sinks: int = Field(default_factory=lambda given: 0 if _shifts(given) else DEFAULT_SINKS, ge=0)
    high_water: int | None = Field(
        default_factory=lambda given: given["max_total_tokens"] if _shifts(given) else None, gt=0
    )
    low_water: int | None = Field(
        default_factory=lambda given: given["high_water"] - 1 if _shifts(given) else None, ge=0
    )
    rotate_sinks: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sinks >= self.max_total_tokens:
            raise ValueError(
                f"sinks={self.sinks} leave no window in max_total_tokens={self.max_total_tokens}; use at most "
                f"{self.max_total_tokens - 1} sinks"
            )
        (self._check_shift if self.eviction == "shift" else self._check_ring)()
        return self

    def _check_ring(self) -> None:
        if self.high_water is not None or self.low_water is not None:
            raise ValueError(
                f"water marks (high {self.high_water}, low {self.low_water}) belong to eviction='shift', not 'ring'"
            )

    def _check_shift(self) -> None:
        if self.sinks:
            raise ValueError(f"eviction='shift' keeps no sinks, got sinks={self.sinks}; use eviction='ring'")
        if self.high_water > self.max_total_tokens:
            raise ValueError(f"high_water={self.high_water} exceeds max_total_tokens={self.max_total_tokens}")
        if self.low_water >= self.high_water:
            raise ValueError(f"low_water={self.low_water} must be below high_water={self.high_water}")

    @property
    def window(self) -> int:
        """W: how many of the last tokens are held, beside the sinks."""
        return self.max_total_tokens - self.sinks

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)

    def to_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Store this policy in ``config.cache``, where ``save_pretrained`` writes it; returns ``config``."""
        config.cache = self.model_dump(mode="json")
        return config

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> Self:
        """The policy stored in ``config.cache``. Raises ``PolicyError`` if there is none."""
        stored = getattr(config, "cache", None)
        if stored is None:
            raise PolicyError(f"{type(config).__name__} has no `cache` entry; store one with CachePolicy.to_config")
        return cls.model_validate(stored)
