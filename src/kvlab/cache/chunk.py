"""Several tokens at once: a first chunk that evicts nothing, and any other chunk."""

from __future__ import annotations

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

    def __init__(self, q: int):
        self.q, self.writes = q, None

    def append(self, ring: Ring, layer: int, keys: torch.Tensor, values: torch.Tensor):
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
        self.q, self.writes = q, None
        # by row: the position of the chunk's first column, and what is evicted before its first and last
        # query
        self.starts = [ring.progress.seen - pads for pads in ring.progress.pads]
        self.fewest = [max(0, start + 1 - ring.slots) for start in self.starts]
        most = [max(0, start + q - ring.slots) for start in self.starts]
        self.turned = ring.turns and max(most) > 0
        self.copies = max(m - f for f, m in zip(self.fewest, most, strict=True)) + 1 if self.turned else 1
        self.old = min(max(max(self.starts) - ring.sinks_count, 0), ring.window)

    def columns(self, ring: Ring) -> int:
        return self.copies * ring.sinks_count + self.old + self.q

    def mask(self, ring: Ring, device) -> torch.Tensor:
        """(B or 1, 1, q, columns): the first S and last W tokens of each query's row; pads see themselves."""
        sinks, window, q = ring.sinks_count, ring.window, self.q
        start = torch.tensor(self.starts, device=device)[:, None]  # (b, 1)
        query = (start + torch.arange(q, device=device))[:, :, None]  # (b, q, 1), positions in the row
        evicted = (query + 1 - ring.slots).clamp(min=0)
        copies = self._copies_evicted(device)[:, None]  # (b, 1, copies)
        own_copy = evicted == copies if self.turned else evicted >= 0  # (b, q, copies)
        sink_seen = own_copy[..., None] & (torch.arange(sinks, device=device) <= query)[:, :, None]
        slot = sinks + torch.arange(self.old, device=device)
        newest = start - 1
        held = (newest - (newest - slot) % window)[:, None]  # (b, 1, old), the position each slot holds
        held_seen = (held >= sinks) & (held > query - window)
        chunk = query.transpose(1, 2)  # (b, 1, q)
        chunk_seen = (chunk >= sinks) & (chunk <= query) & (chunk > query - window)
        itself = torch.eye(q, dtype=torch.bool, device=device) & (query < 0)
        return torch.cat([sink_seen.flatten(2), held_seen, chunk_seen | itself], dim=-1)[:, None]

    def append(self, ring: Ring, layer: int, keys: torch.Tensor, values: torch.Tensor):
        sinks = ring.sinks_count
        if self.writes is None:
            self.writes = Writes(ring, self.q, keys.device)
            ring.decode.set_padding(ring.progress.pads)
            self.turns = self._turns(ring, keys.device)
        old = slice(sinks, sinks + self.old)
        self.writes.store_sinks(ring.layer_sinks[layer], keys)
        self.writes.store_sinks(ring.layer_values[layer], values)
        sink_keys, sink_values = self._sink_copies(ring, layer)
        held_keys = torch.cat([sink_keys, ring.layer_keys[layer][:, :, old], keys], dim=2)
        held_values = torch.cat([sink_values, ring.layer_values[layer][:, :, old], values], dim=2)
        self.writes.store(ring.layer_keys[layer], keys)
        self.writes.store(ring.layer_values[layer], values)
        return held_keys, held_values

    def _copies_evicted(self, device) -> torch.Tensor:
        """(b, copies): how many tokens were evicted where each copy of the sinks is seen."""
        return torch.tensor(self.fewest, device=device)[:, None] + torch.arange(self.copies, device=device)

    def _turns(self, ring: Ring, device) -> dict:
        """Cosine and sine (b, 1, copies, 1, n) of each copy's turn, for each rotation in the ring."""
        turns, evicted = {}, self._copies_evicted(device)[..., None]
        for rotation in set(ring.rotations) - {None} if self.turned else ():
            angle = (evicted * rotation.frequencies(device))[:, None, :, None]
            turns[rotation] = angle.cos(), angle.sin()
        return turns

    def _sink_copies(self, ring: Ring, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sink keys, each copy turned by its own distance, and values (B, H, copies · S, head_dim)."""
        sinks = ring.sinks_count
        keys, values = (
            states[:, :, None, :sinks].expand(-1, -1, self.copies, -1, -1)
            for states in (ring.layer_sinks[layer], ring.layer_values[layer])
        )
        rotation = ring.rotations[layer]
        if rotation in self.turns:
            keys = rotation.turned(keys, *self.turns[rotation])
        return keys.flatten(2, 3), values.flatten(2, 3)
