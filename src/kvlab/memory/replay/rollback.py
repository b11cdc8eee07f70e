"""Undo a recorded trace from the final snapshot back to the moment before its first event."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvlab.errors import KvlabError
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.allocator.sizes import SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, round_size
from kvlab.memory.replay.held import HeldBlock, HeldSegment, InitialState
from kvlab.memory.replay.pages import MappedPages, SizeClasses
from kvlab.memory.snapshot.records import ACTIVE_PENDING_FREE, INACTIVE, SegmentRecord, TraceEvent

_NO_MAX_SPLIT = 1 << 64


class InconsistentTraceError(KvlabError):
    """The trace does not lead to the state it was saved with, so nothing can be concluded from it."""


def roll_back(
    segments: Sequence[SegmentRecord], events: Sequence[TraceEvent], settings: AllocatorSettings
) -> InitialState:
    """The state from which ``events`` lead to ``segments``.

    A block that was allocated before the recording and freed within it shows only the size of its request;
    the rest it may have absorbed is found by ``_settle_sizes``. Raises InconsistentTraceError.
    """
    state = _final_state(segments)
    blocks = state.blocks
    held = {s.address: s for s in state.segments if not s.is_expandable}
    pages = MappedPages(s for s in state.segments if s.is_expandable)
    classes: SizeClasses | None = None
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
            classes = classes or SizeClasses(segments, events, settings.large_segment_bytes)
            pages.add(address, size, classes.key(event))
    state.segments = sorted((*held.values(), *pages.runs()), key=lambda s: s.address)
    for before, after in pairwise(state.segments):
        if before.end > after.address:
            raise InconsistentTraceError(f"the trace puts two segments at {after.address:#x}")
    _settle_sizes(state, events, settings)
    return state


def _final_state(segments: Iterable[SegmentRecord]) -> InitialState:
    state = InitialState()
    for s in segments:
        state.segments.append(HeldSegment(s.address, s.total_size, s.stream, s.is_small, s.pool_id, s.is_expandable))
        for b in s.blocks:
            if b.state != INACTIVE:
                state.blocks[b.address] = HeldBlock(b.size, b.requested_size, b.state == ACTIVE_PENDING_FREE)
    return state


def _contradiction(place: int, event: TraceEvent, why: str) -> InconsistentTraceError:
    return InconsistentTraceError(
        f"the trace does not lead to the final state: event {place} is {event.action} of {event.size:,} bytes"
        f" at {event.address:#x}, {why}"
    )


def _settle_sizes(state: InitialState, events: Sequence[TraceEvent], settings: AllocatorSettings) -> None:
    """Find the rest of up to 1 MiB that a block of the large pool may have absorbed when it was allocated.

    A free block of the large pool is always larger than 1 MiB, so a smaller gap after a block is part of
    it. In front of a larger gap the first allocation into that gap shows where it begins.
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
            oversize = block.size >= (settings.max_split_size_bytes or _NO_MAX_SPLIT)
            most = settings.max_non_split_rounding_bytes if oversize else SMALL_REQUEST_BYTES
            if 0 < gap <= most:
                block.size += gap
            elif gap > 0:
                open_ends[addresses[place] + block.size] = addresses[place]
    if open_ends:
        never_shown = _watch_gaps(state, events, open_ends)
        state.unsettled = [s for s in state.segments if any(s.address <= begin < s.end for begin in never_shown)]


def _watch_gaps(state: InitialState, events: Sequence[TraceEvent], open_ends: dict[int, int]) -> set[int]:
    """Settle what can be; returns the addresses of the blocks that went before anything showed their end."""
    ends, unsettled = sorted(open_ends), set(open_ends.values())
    for event in events:
        if event.action == "alloc":
            place = bisect_right(ends, event.address) - 1
            if place >= 0 and event.address - ends[place] <= SMALL_REQUEST_BYTES:
                begin = open_ends[ends.pop(place)]
                state.blocks[begin].size = event.address - begin
                unsettled.discard(begin)
        elif event.action == "free_completed" and event.address in state.blocks:
            end = event.address + state.blocks[event.address].size
            place = bisect_left(ends, end)
            if place < len(ends) and ends[place] == end:
                del ends[place]
        if not ends:
            break
    return unsettled
