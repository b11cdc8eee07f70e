"""Snapshots of the CUDA caching allocator: read one that anyone may have made, measure it, compare it, draw
it."""

from kvlab.memory.snapshot.figures import address_map, memory_over_time
from kvlab.memory.snapshot.reader import Limits, SnapshotError, parse_snapshot, read_snapshot
from kvlab.memory.snapshot.records import BlockRecord, SegmentRecord, Snapshot, TraceEvent
from kvlab.memory.snapshot.summary import (
    BlockSummary,
    SnapshotComparison,
    SnapshotSummary,
    compare_snapshots,
    summarise,
)
from kvlab.memory.snapshot.timeline import Timeline, timeline

__all__ = [
    "BlockRecord",
    "BlockSummary",
    "Limits",
    "SegmentRecord",
    "Snapshot",
    "SnapshotComparison",
    "SnapshotError",
    "SnapshotSummary",
    "Timeline",
    "TraceEvent",
    "address_map",
    "compare_snapshots",
    "memory_over_time",
    "parse_snapshot",
    "read_snapshot",
    "summarise",
    "timeline",
]
