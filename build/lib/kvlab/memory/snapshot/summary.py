"""A snapshot in numbers: what is in use, what is free and in how large pieces, and what changed between
two."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvlab.memory.snapshot.reader import read_snapshot
from kvlab.memory.snapshot.records import ACTIVE_ALLOCATED, INACTIVE, BlockRecord, SegmentRecord, Snapshot


class BlockSummary(BaseModel):
    """One block in use; ``frames`` is the stack that asked for it, innermost call first, empty if not
    recorded."""

    model_config = ConfigDict(frozen=True)

    address: int
    size_bytes: int
    requested_bytes: int
    state: str
    stream: int
    frames: tuple[str, ...] = ()


class SnapshotSummary(BaseModel):
    """The state of the allocator in bytes.

    ``free_bytes`` is cached memory that no one uses: reserved minus active. ``releasable_bytes`` is the
    part of it that lies in wholly idle segments, which ``empty_cache`` or a retry gives back; the rest is
    held in place by the blocks around it. ``rounding_bytes`` is what blocks in use hold beyond what was
    asked for.

    ``fragmentation`` is 1 - largest_free_block / free_bytes, from 0 (all free memory is one block, or none
    is free) towards 1 (many small ones): the share of the free memory that the largest request it can serve
    leaves.
    """

    model_config = ConfigDict(frozen=True)

    segment_count: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    free_bytes: int
    releasable_bytes: int
    rounding_bytes: int
    largest_free_block_bytes: int
    free_block_count: int
    fragmentation: float
    event_counts: dict[str, int]
    top_blocks: tuple[BlockSummary, ...]


class Change(BaseModel):
    """A number before and after, and the difference."""

    model_config = ConfigDict(frozen=True)

    before: int | float
    after: int | float
    difference: int | float


class SnapshotComparison(BaseModel):
    """What happened between two snapshots of one process. A block is the same if address and size are."""

    model_config = ConfigDict(frozen=True)

    numbers: dict[str, Change]
    segments_added: int
    segments_removed: int
    appeared_bytes: int
    vanished_bytes: int
    top_appeared: tuple[BlockSummary, ...]
    top_vanished: tuple[BlockSummary, ...]


def summarise(source: str | Path | bytes | Snapshot, *, top: int = 10) -> SnapshotSummary:
    """Measure a snapshot; ``top`` is how many of the largest blocks in use to name. Raises SnapshotError."""
    snapshot = source if isinstance(source, Snapshot) else read_snapshot(source)
    used = list(_used(snapshot))
    free = [b.size for s in snapshot.segments for b in s.blocks if b.state == INACTIVE]
    free_bytes, largest = sum(free), max(free, default=0)
    allocated = sum(b.size for _, b in used if b.state == ACTIVE_ALLOCATED)
    active = sum(b.size for _, b in used)
    requested = sum(b.requested_size for _, b in used)
    return SnapshotSummary(
        segment_count=len(snapshot.segments),
        reserved_bytes=sum(s.total_size for s in snapshot.segments),
        allocated_bytes=allocated,
        active_bytes=active,
        requested_bytes=requested,
        free_bytes=free_bytes,
        releasable_bytes=sum(s.total_size for s in snapshot.segments if _is_idle(s)),
        rounding_bytes=active - requested,
        largest_free_block_bytes=largest,
        free_block_count=len(free),
        fragmentation=1 - largest / free_bytes if free_bytes else 0.0,
        event_counts=dict(Counter(e.action for trace in snapshot.traces for e in trace)),
        top_blocks=_largest(used, top),
    )


def compare_snapshots(
    before: str | Path | bytes | Snapshot, after: str | Path | bytes | Snapshot, *, top: int = 10
) -> SnapshotComparison:
    """What grew and what went between two snapshots, with the largest new and gone blocks. Raises
    SnapshotError."""
    first, second = (s if isinstance(s, Snapshot) else read_snapshot(s) for s in (before, after))
    old, new = ({(b.address, b.size): (s, b) for s, b in _used(snap)} for snap in (first, second))
    appeared = [new[key] for key in new.keys() - old.keys()]
    vanished = [old[key] for key in old.keys() - new.keys()]
    old_segments, new_segments = ({(s.address, s.total_size) for s in snap.segments} for snap in (first, second))
    return SnapshotComparison(
        numbers=_changes(summarise(first, top=0), summarise(second, top=0)),
        segments_added=len(new_segments - old_segments),
        segments_removed=len(old_segments - new_segments),
        appeared_bytes=sum(b.size for _, b in appeared),
        vanished_bytes=sum(b.size for _, b in vanished),
        top_appeared=_largest(appeared, top),
        top_vanished=_largest(vanished, top),
    )


def _changes(before: SnapshotSummary, after: SnapshotSummary) -> dict[str, Change]:
    return {
        name: Change(before=old, after=(new := getattr(after, name)), difference=new - old)
        for name, old in before
        if isinstance(old, int | float)
    }


def _used(snapshot: Snapshot) -> Iterator[tuple[SegmentRecord, BlockRecord]]:
    return ((s, b) for s in snapshot.segments for b in s.blocks if b.state != INACTIVE)


def _is_idle(segment: SegmentRecord) -> bool:
    return all(b.state == INACTIVE for b in segment.blocks)


def _largest(used: list[tuple[SegmentRecord, BlockRecord]], top: int) -> tuple[BlockSummary, ...]:
    order = sorted(used, key=lambda pair: (-pair[1].size, pair[1].address))
    return tuple(
        BlockSummary(
            address=b.address,
            size_bytes=b.size,
            requested_bytes=b.requested_size,
            state=b.state,
            stream=s.stream,
            frames=b.frames,
        )
        for s, b in order[:top]
    )
