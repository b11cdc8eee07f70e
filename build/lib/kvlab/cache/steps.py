"""The three ways a step can go: the first chunk that evicts nothing, one token, and any other chunk."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .ring import Ring


class Writes:
    """Which of a chunk's tokens stay, and in which slots: the sinks, and the last W."""

    def __init__(self, ring: Ring, q: int, device):
        sinks, window = ring.sinks_count, ring.window
        pairs, sink_pairs = [], []
        for row, pads in enumerate(ring.progress.pads):
            start, end = (
                ring.progress.seen - pads,
                ring.progress.seen + q - pads,
            )  # positions [start, end) of this row's columns
            first = torch.arange(max(start, 0), max(min(end, sinks), start, 0))
            last = torch.arange(min(max(start, sinks, end - window), max(end, 0)), max(end, 0))
            sink_pairs.append((torch.full_like(first, row), first, first - start))
            pairs.append(sink_pairs[-1])
            pairs.append((torch.full_like(last, row), sinks + (last - sinks) % window, last - start))
        self.rows, self.slots, self.sources = self._join(pairs, device)
        self.sink_rows, self.sink_slots, self.sink_sources = self._join(sink_pairs, device)
        self.every_row = len(ring.progress.pads) == 1

    @staticmethod
    def _join(pairs, device):
        return tuple(torch.cat(column).to(device) for column in zip(*pairs, strict=True))

    def store(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        """Write the tokens that stay from states (B, H, q, D) into buffer (B, H, S + W, D)."""
        self._write(buffer, states, self.rows, self.slots, self.sources)

    def store_sinks(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        self._write(buffer, states, self.sink_rows, self.sink_slots, self.sink_sources)

    def _write(self, buffer, states, rows, slots, sources) -> None:
        if slots.numel() == 0:
            return
        if self.every_row:
            buffer.index_copy_(2, slots, states.index_select(2, sources))
        else:
            buffer.transpose(1, 2)[rows, slots] = states.transpose(1, 2)[rows, sources]


class FirstStep:
    """A first chunk that fits: plain causal attention over the chunk itself, which is then stored."""

    def __init__(self, ring: Ring, q: int):
        self.ring, self.q, self.writes = ring, q, None

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        ring = self.ring
        if self.writes is None:
            self.writes = Writes(ring, self.q, keys.device)
            ring.decode.set_padding(ring.progress.pads)
        self.writes.store(ring.layer_keys[layer], keys)
        self.writes.store(ring.layer_values[layer], values)
        self.writes.store_sinks(ring.layer_sinks[layer], keys)
        return keys, values


class ChunkStep:
    """Any other chunk: columns are [copies of the sinks][the old window, in slot order][the chunk].

    Its queries differ in how many tokens were evicted before them, so each distinct number e gets its own
    copy of the sinks, turned by e (StreamingLLM turns them once per chunk, which makes the output depend on
    the split).
    """

    def __init__(self, ring: Ring, q: int):
        self.ring, self.q, self.writes = ring, q, None
        self.starts = [
            ring.progress.seen - pads for pads in ring.progress.pads
        ]  # position of the chunk's first column, by row
        self.fewest = [max(0, start + 1 - ring.slots) for start in self.starts]  # evicted before its first query
        most = [max(0, start + q - ring.slots) for start in self.starts]
        self.turned = ring.turns and max(most) > 0
        self.copies = max(m - f for f, m in zip(self.fewest, most, strict=True)) + 1 if self.turned else 1
        self.old = min(max(max(self.starts) - ring.sinks_count, 0), ring.window)

    @property
    def columns(self) -> int:
        return self.copies * self.ring.sinks_count + self.old + self.q

    def most_columns(self, q: int) -> int:
        """Columns that any chunk of q tokens may attend to: sinks for each query, the window, the chunk."""
        return q * self.ring.sinks_count + self.ring.window + q

    def mask(self, device) -> torch.Tensor:
        """(B or 1, 1, q, columns): the first S and last W tokens of each query's row; pads see themselves."""
        sinks, window, q = self.ring.sinks_count, self.ring.window, self.q
        start = torch.tensor(self.starts, device=device)[:, None]  # (b, 1)
        query = (start + torch.arange(q, device=device))[:, :, None]  # (b, q, 1), positions in the row
        evicted = (query + 1 - self.ring.slots).clamp(min=0)
        copy = torch.tensor(self.fewest, device=device)[:, None] + torch.arange(self.copies, device=device)
        own_copy = (evicted == copy[:, None]) if self.turned else evicted >= 0  # (b, q, copies)
        sink_seen = own_copy[..., None] & (torch.arange(sinks, device=device) <= query)[:, :, None]
        slot = sinks + torch.arange(self.old, device=device)
        newest = start - 1
        held = (newest - (newest - slot) % window)[:, None]  # (b, 1, old), the position each slot holds
        held_seen = (held >= sinks) & (held > query - window)
        chunk = query.transpose(1, 2)  # (b, 1, q)
        chunk_seen = (chunk >= sinks) & (chunk <= query) & (chunk > query - window)
        itself = torch.eye(q, dtype=torch.bool, device=device) & (query < 0)
        return torch.cat([sink_seen.flatten(2), held_seen, chunk_seen | itself], dim=-1)[:, None]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        ring, sinks = self.ring, self.ring.sinks_count
        if self.writes is None:
            self.writes = Writes(ring, self.q, keys.device)
            ring.decode.set_padding(ring.progress.pads)
            self.turns = self._turns(keys.device)
        old = slice(sinks, sinks + self.old)
        self.writes.store_sinks(ring.layer_sinks[layer], keys)
        self.writes.store_sinks(ring.layer_values[layer], values)
        sink_values = ring.layer_values[layer][:, :, None, :sinks].expand(-1, -1, self.copies, -1, -1).flatten(2, 3)
        held_keys = torch.cat([self._sink_copies(layer), ring.layer_keys[layer][:, :, old], keys], dim=2)
        held_values = torch.cat([sink_values, ring.layer_values[layer][:, :, old], values], dim=2)
        self.writes.store(ring.layer_keys[layer], keys)
        self.writes.store(ring.layer_values[layer], values)
        return held_keys, held_values

    def _turns(self, device) -> dict:
        """Cosine and sine (b, 1, copies, 1, n) of each copy's turn, for each rotation in the ring."""
        if not self.turned:
            return {}
        distance = torch.tensor(self.fewest, device=device)[:, None] + torch.arange(self.copies, device=device)
        angles = {
            rotation: rotation.angles(distance)[:, None, :, None] for rotation in set(self.ring.rotations) - {None}
        }
        return {rotation: (angle.cos(), angle.sin()) for rotation, angle in angles.items()}

    def _sink_copies(self, layer: int) -> torch.Tensor:
        """Sink keys (B, H, copies · S, head_dim), each copy turned by its own distance."""
        sinks = self.ring.layer_sinks[layer][:, :, None, : self.ring.sinks_count].expand(-1, -1, self.copies, -1, -1)
        rotation = self.ring.rotations[layer]
        if rotation in self.turns:
            sinks = rotation.turned(sinks, *self.turns[rotation])
        return sinks.flatten(2, 3)


class DecodeStep:
    """One token: its row is written where the oldest of the window was, and the sinks are turned in place.

    Everything it needs is computed on the device, from the number of columns seen, into tensors that keep
    their address; so it can run inside ``torch.compile`` or a captured CUDA graph.
    """

    def __init__(self, ring: Ring):
        _, batch, heads, slots, _ = ring.keys.shape
        device = ring.keys.device
        self.ring = ring
        self.first = torch.zeros(batch, dtype=torch.long, device=device)  # pads of each row
        self.slot_numbers = torch.arange(slots, device=device)
        heads_of_rows = torch.arange(batch * heads, device=device).view(batch, heads)
        self.first_slot = heads_of_rows * slots  # of each row and head, in the flattened buffer of a layer
        self.first_sink = heads_of_rows * (ring.sinks_count + 1)
        self.sink_slots = (self.first_slot[..., None] + self.slot_numbers[: ring.sinks_count]).flatten()
        self.row = torch.zeros(batch * heads, dtype=torch.long, device=device)
        self.sink_row = torch.zeros(batch * heads, dtype=torch.long, device=device)
        self.shown = slots
        self.storing_sinks = True
        # neighbours that turn alike are turned by one call
        self.spans = []
        for rotation, layers in groupby(range(len(ring.rotations)), key=ring.rotations.__getitem__):
            layers = list(layers)
            if rotation is not None and ring.turns:
                self.spans.append((rotation, slice(layers[0], layers[-1] + 1)))

    def set_padding(self, pads: list[int]) -> None:
        """Remember where each row begins."""
        self.first.copy_(torch.tensor(pads))

    def prepare(self, *, filled: int | None, storing_sinks: bool, need_mask: bool) -> torch.Tensor | None:
        """Turn the sinks, find the new row; returns the mask (B, 1, 1, columns), or None if all columns are
        seen.

        ``filled``: slots in use after this token where all rows hold as many, None where the host cannot
        tell.
        """
        sinks, window, slots = self.ring.sinks_count, self.ring.window, self.ring.slots
        position = self.ring.columns - self.first  # (B,)
        slot = torch.where(position < sinks, position, sinks + (position - sinks) % window)
        torch.add(self.first_slot, slot[:, None], out=self.row.view_as(self.first_slot))
        self.storing_sinks = storing_sinks
        if storing_sinks:
            sink = position.clamp(max=sinks)
            torch.add(self.first_sink, sink[:, None], out=self.sink_row.view_as(self.first_sink))
        self._turn_sinks((position + 1 - slots).clamp(min=0), apart=torch.compiler.is_compiling())
        self.shown = slots if filled is None else filled
        if filled is not None and not need_mask:
            return None
        return (self.slot_numbers[: self.shown] <= position[:, None])[:, None, None]

    def _turn_sinks(self, distance: torch.Tensor, apart: bool) -> None:
        """Write the sinks, turned by ``distance`` (B,), where attention reads them."""
        ring, sinks = self.ring, self.ring.sinks_count
        for rotation, layers in self.spans:
            angle = rotation.angles(distance)[:, None, None]  # (B, 1, 1, n)
            cos, sin = angle.cos(), angle.sin()
            if apart:
                for layer in range(layers.start, layers.stop):
                    turned = rotation.turned(ring.layer_sinks[layer][:, :, :sinks], cos, sin)
                    _write_rows(ring.layer_keys[layer], self.sink_slots, turned)
            else:
                rotation.turn(ring.sinks[layers, :, :, :sinks], cos, sin, ring.keys[layers, :, :, :sinks])

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        ring = self.ring
        _write_rows(ring.layer_keys[layer], self.row, keys)
        _write_rows(ring.layer_values[layer], self.row, values)
        if self.storing_sinks:
            _write_rows(ring.layer_sinks[layer], self.sink_row, keys)
        return ring.layer_keys[layer][:, :, : self.shown], ring.layer_values[layer][:, :, : self.shown]


def _write_rows(buffer: torch.Tensor, rows: torch.Tensor, states: torch.Tensor) -> None:
    """Write states (B, H, n, D) into the given rows (B · H · n,) of buffer (B, H, slots, D)."""
    dim = states.shape[-1]
    buffer.view(-1, dim).index_copy_(0, rows, states.reshape(-1, dim))
