"""What a snapshot holds, in one form for all of its generations."""

from dataclasses import dataclass
from typing import Any, NamedTuple

ACTIVE_ALLOCATED = "active_allocated"
ACTIVE_PENDING_FREE = "active_pending_free"
INACTIVE = "inactive"

Frames = tuple[str, ...]
"""A stack, innermost call first, each frame as ``file:line function``."""


class BlockRecord(NamedTuple):
    """A piece of a segment; ``requested_size`` is what the program asked for, ``size`` what it got."""

    address: int
    size: int
    requested_size: int
    state: str
    raw_frames: Any = ()

    @property
    def frames(self) -> Frames:
        return readable_frames(self.raw_frames)


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What one cudaMalloc returned, or one run of mapped pages of an expandable segment."""

    address: int
    total_size: int
    stream: int
    is_small: bool
    blocks: tuple[BlockRecord, ...]
    device: int = 0
    pool_id: tuple[int, int] = (0, 0)
    is_expandable: bool = False


class TraceEvent(NamedTuple):
    """One action of the allocator. ``address`` of an ``oom`` is the memory that was free on the device."""

    action: str
    address: int
    size: int
    stream: int
    pool_id: tuple[int, int] | None = None
    time_us: int | None = None
    raw_frames: Any = ()

    @property
    def frames(self) -> Frames:
        return readable_frames(self.raw_frames)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Segments in order of address, and for each device the recorded actions, oldest first."""

    segments: tuple[SegmentRecord, ...]
    traces: tuple[tuple[TraceEvent, ...], ...] = ()
    settings: dict[str, Any] | None = None


def readable_frames(raw: Any) -> Frames:
    """Frames as ``file:line function``; a frame that is no dictionary is shown as it is, half a surrogate escaped."""
    return tuple(
        (
            f"{frame.get('filename', '?')}:{frame.get('line', '?')} {frame.get('name', '?')}"
            if isinstance(frame, dict)
            else str(frame)
        )
        .encode(errors="backslashreplace")
        .decode()
        for frame in raw or ()
    )
