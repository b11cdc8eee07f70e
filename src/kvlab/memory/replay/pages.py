"""The pages of expandable segments, whose pool a trace does not name."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence

from kvlab.memory.allocator.pool import PoolId
from kvlab.memory.allocator.sizes import SMALL_REQUEST_BYTES
from kvlab.memory.replay.held import HeldSegment
from kvlab.memory.snapshot.records import SegmentRecord, TraceEvent

_OF_BLOCKS = frozenset(("alloc", "free_requested", "free_completed"))
RangeKey = tuple[int, bool, PoolId]
"""The stream, whether the pool is the small one, and the memory pool: each has one range of addresses."""


class SizeClasses:
    """Which pool pages belong to: the small one if they are no whole large pages, else that of the nearest block of
    the same stream whose size is known.

    The ranges of the small and the large pool lie further apart than any two pages of one of them.
    """

    def __init__(self, segments: Iterable[SegmentRecord], events: Iterable[TraceEvent], large_page_bytes: int) -> None:
        self._large_page_bytes = large_page_bytes
        self._seen: dict[int, list[tuple[int, bool]]] = {}
        for s in segments:
            if s.is_expandable:
                insort(self._seen.setdefault(s.stream, []), (s.address, s.is_small))
        seen = {(e.stream, e.address, e.size <= SMALL_REQUEST_BYTES) for e in events if e.action in _OF_BLOCKS}
        for stream, address, is_small in seen:
            self._seen.setdefault(stream, []).append((address, is_small))
        for places in self._seen.values():
            places.sort()

    def key(self, event: TraceEvent) -> RangeKey:
        if event.size % self._large_page_bytes:
            return event.stream, True, event.pool_id or (0, 0)
        places = self._seen.get(event.stream, [])
        at = bisect_left(places, (event.address,))
        near = places[max(at - 1, 0) : at + 1]
        is_small = min(near, key=lambda place: abs(place[0] - event.address))[1] if near else False
        return event.stream, is_small, event.pool_id or (0, 0)


class MappedPages:
    """Runs of mapped pages, in order of address."""

    def __init__(self, runs: Iterable[HeldSegment]) -> None:
        self._runs = sorted(runs, key=lambda r: r.address)

    def runs(self) -> list[HeldSegment]:
        return self._runs

    def remove(self, address: int, size: int) -> bool:
        """Take pages out of the run that holds them; False if none does."""
        place = bisect_right(self._runs, address, key=lambda r: r.address) - 1
        if place < 0 or address + size > self._runs[place].end:
            return False
        run = self._runs[place]
        rest = [(run.address, address), (address + size, run.end)]
        self._runs[place : place + 1] = [run.part(begin, end) for begin, end in rest if end > begin]
        return True

    def add(self, address: int, size: int, key: RangeKey) -> None:
        """Put pages in, joined with the runs of the same range that they touch."""
        stream, is_small, pool_id = key
        run = HeldSegment(address, size, stream, is_small, pool_id, is_expandable=True)
        at = bisect_left(self._runs, address, key=lambda r: r.address)
        self._runs.insert(at, run)
        for left in (at, at - 1):
            pair = self._runs[max(left, 0) : left + 2]
            if len(pair) == 2 and pair[0].end == pair[1].address and pair[0].range_key == pair[1].range_key:
                self._runs[left : left + 2] = [pair[0].part(pair[0].address, pair[1].end)]


def lowest_mapped(
    runs: Iterable[HeldSegment],
    segments: Iterable[SegmentRecord],
    events: Sequence[TraceEvent],
    large_page_bytes: int,
) -> dict[RangeKey, int]:
    """Where each range begins: pages are mapped from the lowest address upwards."""
    lowest: dict[RangeKey, int] = {}

    def note(key: RangeKey, address: int) -> None:
        lowest[key] = min(lowest.get(key, address), address)

    for run in runs:
        if run.is_expandable:
            note(run.range_key, run.address)
    mapped = [e for e in events if e.action in ("segment_map", "segment_unmap")]
    if mapped:
        classes = SizeClasses(segments, events, large_page_bytes)
        for event in mapped:
            note(classes.key(event), event.address)
    return lowest
