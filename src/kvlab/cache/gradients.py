"""Gradients end at a cache that overwrites: a backward pass that reaches it is told so."""

import torch

from .errors import UnsupportedOperationError


def without_gradients(held: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``held`` itself or, where ``states`` carry gradients, with a backward that raises, not loses them."""
    if torch.is_grad_enabled() and states.requires_grad:
        return tuple(_NoBackward.apply(tensor, states) for tensor in held)
    return held


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, states):
        return held.view_as(held)

    @staticmethod
    def backward(ctx, gradient):
        raise UnsupportedOperationError(
            "gradients do not pass through a cache that overwrites what it held; train without a cache"
        )
