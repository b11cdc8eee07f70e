"""Run the events of a recording through the model and compare every address and every cudaMalloc."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.memory.allocator import expandable
from kvlab.memory.allocator.core import CachingAllocator, InvalidPointerError
from kvlab.memory.allocator.device import Device
from kvlab.memory.allocator.pool import ALLOCATED, DEFAULT_POOL, FREE, Block, PoolId
from kvlab.memory.allocator.reclaim import release_segment
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.replay.ages import OrderOfAges
from kvlab.memory.replay.held import InitialState
from kvlab.memory.replay.pages import RangeKey, lowest_mapped
from kvlab.memory.replay.restore import restore
from kvlab.memory.replay.rollback import InconsistentTraceError, roll_back
from kvlab.memory.snapshot.records import ACTIVE_ALLOCATED, INACTIVE, SegmentRecord, TraceEvent

_UNBOUNDED_BYTES = 1 << 60
_UNRECORDED_ADDRESS = 1 << 64
DURING_A_FLUSH = frozenset(("free_completed", "segment_free", "segment_alloc"))


@dataclass(frozen=True)
class Recording:
    """One device's part of a snapshot."""

    segments: Sequence[SegmentRecord]
    events: Sequence[TraceEvent]

    @property
    def reserved_bytes(self) -> int:
        return sum(s.total_size for s in self.segments)

    @property
    def allocated_bytes(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.state == ACTIVE_ALLOCATED)

    def range_begins(self, state: InitialState, settings: AllocatorSettings) -> dict[RangeKey, int]:
        return lowest_mapped(state.segments, self.segments, self.events, settings.large_segment_bytes)

    def pool_ids(self) -> list[PoolId]:
        """The memory pool of every event. Older traces do not name it; there the segment tells."""
        private = [s for s in self.segments if s.pool_id != DEFAULT_POOL]
        begins = [s.address for s in private]

        def of(event: TraceEvent) -> PoolId:
            if event.pool_id is not None or not private:
                return event.pool_id or DEFAULT_POOL
            place = bisect_right(begins, event.address) - 1
            inside = place >= 0 and event.address < begins[place] + private[place].total_size
            return private[place].pool_id if inside else DEFAULT_POOL

        return [of(event) for event in self.events]


@dataclass
class Comparison:
    """One replay: what agreed, the first thing that did not, and its initial state (None: no replay).

    ``unknown``: what the recording does not show and the disagreement may come from, where there is such a thing.
    """

    settings: AllocatorSettings
    alloc_events: int = 0
    alloc_addresses_matched: int = 0
    segment_allocs: int = 0
    segment_allocs_matched: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    initial: InitialState | None = None
    disagreement: str | None = None
    unknown: str | None = None

    def disagree(self, what: str, unknown: str | None = None) -> None:
        """Note the first disagreement, and what it may come from that the recording does not show."""
        if self.disagreement is None:
            self.disagreement, self.unknown = what, unknown


class _RecordedDevice(Device):
    """A card that gives the model the addresses the recording got, when it asks for the same at the same
    time."""

    def __init__(self) -> None:
        super().__init__(total_bytes=_UNBOUNDED_BYTES, next_address=_UNRECORDED_ADDRESS)
        self.recorded: deque[TraceEvent] = deque()
        self.matched = 0

    def malloc(self, size_bytes: int) -> int | None:
        if not self._is_next("segment_alloc", size_bytes):
            return super().malloc(size_bytes)
        self.held_bytes += size_bytes
        self.matched += 1
        return self.recorded.popleft().address

    def reserve_addresses(self, size_bytes: int) -> int:
        if self.recorded and self.recorded[0].action == "segment_map":
            return self.recorded[0].address
        return super().reserve_addresses(size_bytes)

    def map(self, address: int, size_bytes: int) -> bool:
        if self._is_next("segment_map", size_bytes) and self.recorded[0].address == address:
            self.recorded.popleft()
            self.matched += 1
        return super().map(address, size_bytes)

    def _is_next(self, action: str, size_bytes: int) -> bool:
        return bool(self.recorded) and self.recorded[0].action == action and self.recorded[0].size == size_bytes


def compare(
    recording: Recording, settings: AllocatorSettings, order: OrderOfAges | None = None, *, learn: bool = False
) -> Comparison:
    """Replay one device. A trace that contradicts its own final state is not replayed; the result says so.

    ``order`` is that of what was there before the first event; with ``learn`` this replay adds to it.
    """
    result = Comparison(settings)
    events = recording.events
    result.alloc_events = sum(e.action == "alloc" for e in events)
    result.segment_allocs = sum(e.action in ("segment_alloc", "segment_map") for e in events)
    device = _RecordedDevice()
    allocator = CachingAllocator(device, settings)
    try:
        state = roll_back(recording.segments, events, settings)
        waiting = restore(allocator, state, recording.range_begins(state, settings))
    except InconsistentTraceError as error:
        result.disagree(str(error))
        return result
    result.initial = state
    if order is not None:
        order.impose(allocator, waiting)
    _Follower(recording, allocator, device, waiting, result, order if learn else None).run()
    result.segment_allocs_matched = device.matched
    result.allocated_bytes = allocator.stats.all.allocated_bytes.current
    result.reserved_bytes = allocator.reserved_bytes
    _compare_layout(recording.segments, [*allocator.blocks(), *waiting.values()], result)
    return result


@dataclass
class _Follower:
    """Feeds the model one recorded event after the other."""

    recording: Recording
    allocator: CachingAllocator
    device: _RecordedDevice
    waiting: dict[int, Block]
    result: Comparison
    order: OrderOfAges | None
    moved: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        allocator, device, waiting, moved = self.allocator, self.device, self.waiting, self.moved
        malloc, free_request, free_complete = (
            allocator.malloc,
            allocator.free_request,
            allocator.free_complete,
        )
        matched, order = 0, self.order
        pool_ids = self.recording.pool_ids()
        for place, event in enumerate(self.recording.events):
            action, address, size, stream = event[:4]
            try:
                if action == "alloc":
                    if order is not None:
                        order.watch(allocator, *allocator.served_from(size, pool_ids[place]), stream, address)
                    hidden = self._hide_what_came_too_late(place, pool_ids[place]) if device.recorded else ()
                    got = malloc(size, stream, pool_id=pool_ids[place])
                    for block in hidden:
                        block.pool.put(block)
                    if got == address:
                        matched += 1
                    else:
                        moved[address] = got
                        self.result.disagree(
                            f"event {place} allocates {size:,} bytes at {address:#x}, the model at {got:#x}",
                            self._unknown(place, address, got),
                        )
                    if device.recorded:
                        self._not_asked_for(place)
                elif action == "free_requested":
                    waiting[address] = free_request(moved.pop(address, address))
                elif action == "free_completed":
                    free_complete(waiting.pop(address))
                elif action in ("segment_alloc", "segment_map"):
                    device.recorded.append(event)
                elif action == "segment_free":
                    self._release(place, event)
                elif action == "segment_unmap":
                    self._unmap(place, event)
            except (InvalidPointerError, KeyError):
                self.result.disagree(f"event {place} ({action}) names a block that the model does not have")
        self.result.alloc_addresses_matched = matched

    def _hide_what_came_too_late(self, place: int, pool_id: PoolId) -> list[Block]:
        """Blocks that became free when the card was flushed on behalf of this allocation: by then PyTorch had
        searched its pool, and it does not search again."""
        events, at = self.recording.events, place - 1
        while at >= 0 and events[at].action in DURING_A_FLUSH:
            at -= 1
        during = events[at + 1 : place]
        late = [e.address for e in during if e.action == "free_completed"]
        if not late or not any(e.action == "segment_free" for e in during):
            return []
        event, hidden = events[place], []
        pool, size = self.allocator.served_from(event.size, pool_id)
        while True:
            free, first = pool.at_least(size, event.stream)
            block = free[first][3] if first < len(free) else None
            if block is None or block.expandable or not _holds_any(block, late):
                return hidden
            pool.remove(block)
            hidden.append(block)

    def _unknown(self, place: int, address: int, got: int) -> str | None:
        """What the recording leaves open that may have led the model elsewhere."""
        initial, asked = self.result.initial, self.device.recorded
        if place == 0:
            return "the history begins in the middle of this allocation"
        if initial.is_unsettled(address) or initial.is_unsettled(got):
            return "how much a block from before the recording had absorbed there is not recorded"
        if asked and asked[0].action == "segment_map" and not self._continues_pages(asked[0].address):
            return "the card's addresses for this pool were used up, and how many they were is not recorded"
        return None

    def _continues_pages(self, address: int) -> bool:
        return any(b.expandable and b.mapped and b.address + b.size == address for b in self.allocator.blocks())

    def _not_asked_for(self, place: int) -> None:
        asked = self.device.recorded
        self.result.disagree(
            f"before event {place} the GPU asked for a segment of {asked[0].size:,} bytes, the model did not"
        )
        asked.clear()

    def _release(self, place: int, event: TraceEvent) -> None:
        for block in self.allocator.free_blocks_at_least(event.size, event.stream):
            if block.address == event.address and block.size == event.size and not block.is_split:
                release_segment(self.allocator, block)
                return
        self.result.disagree(f"event {place} frees a segment at {event.address:#x} that is not idle in the model")

    def _unmap(self, place: int, event: TraceEvent) -> None:
        for block in self.allocator.free_blocks_at_least(event.size, event.stream):
            if block.expandable is not None and block.address <= event.address < block.address + block.size:
                if expandable.release(self.allocator, block) == (event.address, event.size):
                    return
                break
        self.result.disagree(f"event {place} unmaps pages at {event.address:#x} that are not idle in the model")


def _holds_any(block: Block, addresses: Sequence[int]) -> bool:
    return any(block.address <= address < block.address + block.size for address in addresses)


def _compare_layout(segments: Sequence[SegmentRecord], blocks: list[Block], result: Comparison) -> None:
    recorded = {(b.address, b.size, b.state != INACTIVE) for s in segments for b in s.blocks}
    model = {(b.address, b.size, b.state != FREE) for b in blocks if b.mapped}
    if recorded != model:
        result.disagree(f"the final layout differs in {len(recorded ^ model)} blocks")
    in_use = {b.address for b in blocks if b.state == ALLOCATED}
    if in_use != {b.address for s in segments for b in s.blocks if b.state == ACTIVE_ALLOCATED}:
        result.disagree("other blocks are allocated at the end")
