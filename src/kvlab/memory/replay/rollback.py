"""Undo a recorded trace from the final snapshot back to the moment before its first event."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvlab.errors import KvlabError
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.allocator.sizes import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, round_size
from kvlab.memory.snapshot.records import ACTIVE_PENDING_FREE, INACTIVE, SegmentRecord, TraceEvent


class InconsistentTraceError(KvlabError):
    """The trace does not lead to the state it was saved with, so nothing can be concluded from it."""


@dataclass(slots=True)
class HeldBlock:
    """A block in use before the first event. ``size_known`` is False if only its request was recorded."""

    size: int
    requested: int
    pending: bool
    size_known: bool = True


@dataclass(slots=True)
class HeldSegment:
    """A segment, or a run of mapped pages, that existed before the first event."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: tuple[int, int]
    is_expandable: bool


@dataclass
class InitialState:
    """Everything the allocator held before the first event; what no block covers was free."""

    segments: list[HeldSegment] = field(default_factory=list)
    blocks: dict[int, HeldBlock] = field(default_factory=dict)


def roll_back(
    segments: Iterable[SegmentRecord], events: Sequence[TraceEvent], settings: AllocatorSettings
) -> InitialState:
    """The state from which ``events`` lead to ``segments``.

    A block that was allocated before the recording and freed within it shows only the size of its request; the
    rest it may have absorbed is found by ``_settle_sizes``. Raises InconsistentTraceError.
    """
    state = _final_state(segments)
    blocks = state.blocks
    held = {s.address: s for s in state.segments if not s.is_expandable}
    pages = _Pages(s for s in state.segments if s.is_expandable)
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        action, address, size = event.action, event.address, event.size
        if action == "free_completed":
            if address in blocks:
                raise _contradiction(place, event, "but the block was in use afterwards")
            rounded = round_size(size, settings.divisions(size))
            blocks[address] = HeldBlock(rounded, size, pending=True, size_known=False)
        elif action == "free_requested":
            block = blocks.get(address)
            if block is None or not block.pending:
                raise _contradiction(place, event, "but no free block follows from it")
            block.pending = False
        elif action == "alloc":
            block = blocks.pop(address, None)
            if block is None:
                raise _contradiction(place, event, "but the block was not in use afterwards")
        elif action == "segment_alloc":
            segment = held.pop(address, None)
            if segment is None or segment.size != size:
                raise _contradiction(place, event, "but no such segment existed afterwards")
        elif action == "segment_free":
            is_small = size == SMALL_SEGMENT_BYTES
            pool_id = event.pool_id or (0, 0)
            held[address] = HeldSegment(address, size, event.stream, is_small, pool_id, is_expandable=False)
        elif action == "segment_map":
            if not pages.remove(address, size):
                raise _contradiction(place, event, "but these pages were not mapped afterwards")
        elif action == "segment_unmap":
            pages.add(address, size, event, events, place)
    state.segments = sorted((*held.values(), *pages.runs()), key=lambda s: s.address)
    _settle_sizes(state, events, settings)
    return state


def _final_state(segments: Iterable[SegmentRecord]) -> InitialState:
    state = InitialState()
    for s in segments:
        state.segments.append(
            HeldSegment(s.address, s.total_size, s.stream, s.is_small, s.pool_id, s.is_expandable)
        )
        for b in s.blocks:
            if b.state != INACTIVE:
                state.blocks[b.address] = HeldBlock(b.size, b.requested_size, b.state == ACTIVE_PENDING_FREE)
    return state


def _contradiction(place: int, event: TraceEvent, why: str) -> InconsistentTraceError:
    return InconsistentTraceError(
        f"the trace does not lead to the final state: event {place} is {event.action} of {event.size:,} bytes at"
        f" {event.address:#x}, {why}"
    )


class _Pages:
    """Runs of mapped pages of expandable segments, in order of address."""

    def __init__(self, runs: Iterable[HeldSegment]) -> None:
        self._runs = sorted(runs, key=lambda r: r.address)

    def runs(self) -> list[HeldSegment]:
        return self._runs

    def remove(self, address: int, size: int) -> bool:
        place = bisect_right(self._runs, address, key=lambda r: r.address) - 1
        if place < 0:
            return False
        run = self._runs[place]
        end, run_end = address + size, run.address + run.size
        if end > run_end:
            return False
        parts = []
        for begin, stop in ((run.address, address), (end, run_end)):
            if stop > begin:
                parts.append(
                    HeldSegment(begin, stop - begin, run.stream, run.is_small, run.pool_id, is_expandable=True)
                )
        self._runs[place : place + 1] = parts
        return True

    def add(
        self, address: int, size: int, event: TraceEvent, events: Sequence[TraceEvent], place: int
    ) -> None:
        is_small = self._pool_of(address, size, event, events, place)
        run = HeldSegment(address, size, event.stream, is_small, event.pool_id or (0, 0), is_expandable=True)
        at = bisect_left(self._runs, address, key=lambda r: r.address)
        self._runs.insert(at, run)
        for left in (at, at - 1):
            if 0 <= left < len(self._runs) - 1:
                a, b = self._runs[left], self._runs[left + 1]
                if a.address + a.size == b.address and (a.stream, a.is_small) == (b.stream, b.is_small):
                    a.size += b.size
                    del self._runs[left + 1]

    def _pool_of(
        self, address: int, size: int, event: TraceEvent, events: Sequence[TraceEvent], place: int
    ) -> bool:
        """Whether unmapped pages were the small pool's: what lay in them before says so, or the next run."""
        for earlier in range(place - 1, -1, -1):
            past = events[earlier]
            if past.action == "alloc" and address <= past.address < address + size:
                return past.size <= SMALL_REQUEST_BYTES
        same_stream = [r for r in self._runs if r.stream == event.stream]
        if same_stream:
            return min(same_stream, key=lambda r: abs(r.address - address)).is_small
        return size % (10 * SMALL_SEGMENT_BYTES) != 0


def _settle_sizes(state: InitialState, events: Sequence[TraceEvent], settings: AllocatorSettings) -> None:
    """Find the rest of up to 1 MiB that a block of the large pool may have absorbed when it was allocated.

    A free block of the large pool is always larger than 1 MiB, so a smaller gap after a block is part of it. In
    front of a larger gap the first allocation into that gap shows where it begins.
    """
    open_ends: dict[int, int] = {}
    addresses = sorted(state.blocks)
    for segment in state.segments:
        if segment.is_small or segment.is_expandable:
            continue
        end = segment.address + segment.size
        first, last = bisect_left(addresses, segment.address), bisect_left(addresses, end)
        for place in range(first, last):
            block = state.blocks[addresses[place]]
            if block.size_known:
                continue
            stop = addresses[place + 1] if place + 1 < last else end
            gap = stop - addresses[place] - block.size
            if 0 < gap <= SMALL_REQUEST_BYTES:
                block.size += gap
            elif gap > 0:
                open_ends[addresses[place] + block.size] = addresses[place]
    if open_ends:
        _watch_gaps(state, events, open_ends)


def _watch_gaps(state: InitialState, events: Sequence[TraceEvent], open_ends: dict[int, int]) -> None:
    ends = sorted(open_ends)
    for event in events:
        if event.action == "alloc":
            place = bisect_right(ends, event.address) - 1
            if place >= 0 and event.address - ends[place] <= SMALL_REQUEST_BYTES:
                begin = open_ends[ends.pop(place)]
                state.blocks[begin].size = event.address - begin
        elif event.action == "free_completed" and event.address in state.blocks:
            end = event.address + state.blocks[event.address].size
            place = bisect_left(ends, end)
            if place < len(ends) and ends[place] == end:
                del ends[place]
        if not ends:
            return
