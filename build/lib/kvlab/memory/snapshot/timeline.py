"""Allocated and reserved bytes after each event of a recorded trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.memory.snapshot.records import ACTIVE_ALLOCATED, Snapshot, TraceEvent

_RESERVED_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class Timeline:
    """One device's memory over its trace; entry 0 is the state before the first event.

    ``requested_bytes`` counts what the program asked for, because a trace does not record block sizes.
    """

    times_s: tuple[float, ...]
    requested_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    oom_events: tuple[int, ...]
    has_clock: bool


def timeline(snapshot: Snapshot, device: int = 0) -> Timeline:
    """Follow a device's trace backwards from the final state, which is known, to the first event."""
    events = snapshot.traces[device] if device < len(snapshot.traces) else ()
    segments = [s for s in snapshot.segments if s.device == device]
    requested = [sum(b.requested_size for s in segments for b in s.blocks if b.state == ACTIVE_ALLOCATED)]
    reserved = [sum(s.total_size for s in segments)]
    for event in reversed(events):
        asked = {"alloc": 1, "free_requested": -1}.get(event.action, 0) * event.size
        requested.append(requested[-1] - asked)
        reserved.append(reserved[-1] - _RESERVED_SIGN.get(event.action, 0) * event.size)
    times, has_clock = _times(events)
    return Timeline(
        times_s=times,
        requested_bytes=tuple(reversed(requested)),
        reserved_bytes=tuple(reversed(reserved)),
        oom_events=tuple(i for i, e in enumerate(events) if e.action == "oom"),
        has_clock=has_clock,
    )


def _times(events: Sequence[TraceEvent]) -> tuple[tuple[float, ...], bool]:
    """Seconds since the first event where all events have a time, else the number of the event."""
    stamps = [e.time_us for e in events]
    if not stamps or any(t is None for t in stamps) or stamps != sorted(stamps):
        return tuple(float(i) for i in range(len(events) + 1)), False
    return (0.0, *((t - stamps[0]) / 1e6 for t in stamps)), True
