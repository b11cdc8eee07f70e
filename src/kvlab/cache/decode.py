"""One token: written where the oldest of the window was, with the sinks turned in place."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .ring import Ring


class DecodeStep:
    """The step that runs once per generated token, for all rows.

    Everything it needs is computed on the device, from the number of columns seen, into tensors that keep
    their address; so it never waits for the host, and runs inside ``torch.compile`` or a captured CUDA graph.
    """

    def __init__(self, ring: Ring):
        _, batch, heads, slots, _ = ring.keys.shape
        device = ring.keys.device
        self.first = torch.zeros(batch, dtype=torch.long, device=device)  # pads of each row
        heads_of_rows = torch.arange(batch * heads, device=device).view(batch, heads)
        self.first_slot = heads_of_rows * slots  # of each row and head, in the flattened buffer of a layer
        self.first_sink = heads_of_rows * (ring.sinks_count + 1)
        self.sink_slots = (self.first_slot[..., None] + torch.arange(ring.sinks_count, device=device)).flatten()
        self.row = torch.zeros(batch * heads, dtype=torch.long, device=device)
        self.sink_row = torch.zeros(batch * heads, dtype=torch.long, device=device)
        self.shown = slots
        self.storing_sinks = True
        self.spans = list(_spans(ring)) if ring.turns else []

    def set_padding(self, pads: list[int]) -> None:
        """Remember where each row begins."""
        self.first.copy_(torch.tensor(pads))

    def prepare(self, ring: Ring, *, filled: int | None, storing_sinks: bool, need_mask: bool) -> torch.Tensor | None:
        """Turn the sinks and find the new row; returns the mask (B, 1, 1, columns), None if all are seen.

        ``filled``: slots in use after this token, if all rows use as many and the host knows; else None.
        """
        sinks, window, slots = ring.sinks_count, ring.window, ring.slots
        position = ring.columns - self.first  # (B,)
        slot = torch.where(position < sinks, position, sinks + (position - sinks) % window)
        torch.add(self.first_slot, slot[:, None], out=self.row.view_as(self.first_slot))
        self.storing_sinks = storing_sinks
        if storing_sinks:
            sink = position.clamp(max=sinks)
            torch.add(self.first_sink, sink[:, None], out=self.sink_row.view_as(self.first_sink))
        self._turn_sinks(ring, (position + 1 - slots).clamp(min=0), apart=torch.compiler.is_compiling())
        self.shown = slots if filled is None else filled
        if filled is not None and not need_mask:
            return None
        return (torch.arange(self.shown, device=position.device) <= position[:, None])[:, None, None]

    def _turn_sinks(self, ring: Ring, distance: torch.Tensor, apart: bool) -> None:
        """Write the sinks, turned by ``distance`` (B,), where attention reads them."""
        sinks = ring.sinks_count
        for rotation, frequencies, layers in self.spans:
            angle = (distance[:, None] * frequencies)[:, None, None]  # (B, 1, 1, n)
            cos, sin = angle.cos(), angle.sin()
            if apart:
                for layer in range(layers.start, layers.stop):
                    turned = rotation.turned(ring.layer_sinks[layer][:, :, :sinks], cos, sin)
                    _write_rows(ring.layer_keys[layer], self.sink_slots, turned)
            else:
                rotation.turn(ring.sinks[layers, :, :, :sinks], cos, sin, ring.keys[layers, :, :, :sinks])

    def append(self, ring: Ring, layer: int, keys: torch.Tensor, values: torch.Tensor):
        _write_rows(ring.layer_keys[layer], self.row, keys)
        _write_rows(ring.layer_values[layer], self.row, values)
        if self.storing_sinks:
            _write_rows(ring.layer_sinks[layer], self.sink_row, keys)
        held_keys, held_values = ring.layer_keys[layer], ring.layer_values[layer]
        if self.shown == ring.slots:
            return held_keys, held_values
        return held_keys[:, :, : self.shown], held_values[:, :, : self.shown]


def _spans(ring: Ring):
    """Neighbouring layers that turn alike, which one call can turn: rotation, its frequencies, the layers."""
    frequencies = {rotation: rotation.frequencies(ring.keys.device) for rotation in set(ring.rotations) - {None}}
    for rotation, layers in groupby(range(len(ring.rotations)), key=ring.rotations.__getitem__):
        layers = list(layers)
        if rotation is not None:
            yield rotation, frequencies[rotation], slice(layers[0], layers[-1] + 1)


def _write_rows(buffer: torch.Tensor, rows: torch.Tensor, states: torch.Tensor) -> None:
    """Write states (B, H, n, D) into the given rows (B · H · n,) of buffer (B, H, slots, D)."""
    dim = states.shape[-1]
    buffer.view(-1, dim).index_copy_(0, rows, states.reshape(-1, dim))
