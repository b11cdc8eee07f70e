"""The sink-and-window mask, registered with transformers: a cache that evicts says itself what a query may see.

transformers asks the cache for its mask sizes and hands the offset on, untouched, to the mask function of the
attention implementation. Our caches return a ``MaskOffset``, which knows its cache, and the registered functions let
that cache build the mask. Every other cache gets the function that was registered before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .errors import UnsupportedOperationError

IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class MaskRequest:
    """What transformers asks of a mask function, as far as a cache needs it."""

    batch: int
    query_length: int
    attention_mask: torch.Tensor | None  # (B, columns seen + q), or None for no padding
    device: torch.device
    need_mask: bool  # a mask must be returned, even where it hides nothing
    stock: Callable[[int], torch.Tensor | None]  # the plain causal mask over that many columns


class MaskBuilder(Protocol):
    """What answers for the mask of one group of layers."""

    def build_mask(self, request: MaskRequest) -> torch.Tensor | None:
        """A boolean mask (B or 1, 1, q, columns), None for none, or what ``request.stock`` returns."""


class MaskOffset:
    """What our caches return as ``kv_offset``: no number, but the builder of the mask it belongs to."""

    def __init__(self, builder: MaskBuilder):
        self.builder = builder


def register_masks() -> None:
    """Wrap every registered mask function once, for the whole process."""
    for name, current in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        if getattr(current, "func", None) is not _dispatch_mask:
            AttentionMaskInterface.register(name, partial(_dispatch_mask, name, current))


def _dispatch_mask(name: str, original: Callable, *args, kv_offset: int = 0, **kwargs):
    if not isinstance(kv_offset, MaskOffset):
        return original(*args, kv_offset=kv_offset, **kwargs)
    if name not in IMPLEMENTATIONS:
        raise UnsupportedOperationError(
            f"{name} attention takes no sink-and-window mask; use model.set_attn_implementation('sdpa')"
        )
    if kwargs.get("use_vmap"):
        raise UnsupportedOperationError(
            "this model lays another mask over the causal one (images, blocks), which a window cache cannot express; "
            "use a DynamicCache"
        )

    def stock(kv_length: int):
        return original(*args, kv_offset=0, **(kwargs | {"kv_length": kv_length, "q_offset": 0}))

    request = MaskRequest(
        batch=kwargs["batch_size"],
        query_length=kwargs["q_length"],
        attention_mask=kwargs.get("attention_mask"),
        device=kwargs.get("device", "cpu"),
        # eager attention always has one; SDPA is faster without, unless a compiled step needs one shape
        need_mask=name == "eager" or not kwargs.get("allow_is_causal_skip", True),
        stock=stock,
    )
    mask = kv_offset.builder.build_mask(request)
    if name == "eager" and mask is not None and mask.dtype == torch.bool:
        return additive(mask, kwargs.get("dtype", torch.float32))
    return mask


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What eager attention adds to its scores: 0 where ``mask``, the lowest number elsewhere."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)
