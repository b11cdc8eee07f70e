"""Replay a recorded run on the model: does it decide as the GPU did, would another card have held it?"""

from dataclasses import replace
from pathlib import Path

from kvlab.memory.allocator.settings import AllocatorSettings, TieBreak
from kvlab.memory.replay.ages import OrderOfAges
from kvlab.memory.replay.card import run_on_card
from kvlab.memory.replay.compare import Comparison, Recording, compare
from kvlab.memory.replay.result import ReplayOom, ReplayResult
from kvlab.memory.snapshot.reader import read_snapshot
from kvlab.memory.snapshot.records import Snapshot

__all__ = ["ReplayOom", "ReplayResult", "replay"]

_MOST_LESSONS = 3
_ORDERS: tuple[TieBreak, ...] = ("address", "segment_age", "block_age")


def replay(source: str | Path | bytes | Snapshot, gpu_memory_bytes: int | None = None) -> ReplayResult:
    """Replay a snapshot's trace from its first event and compare.

    Requests, frees and the addresses that cudaMalloc returned come from the recording; every address of a
    block, and when and how large a cudaMalloc is needed, is the model's own decision. With
    ``gpu_memory_bytes`` (what PyTorch may reserve, nothing subtracted) the same requests also run on a card
    of that size (``run_on_card``).

    Raises SnapshotError if the source is no snapshot.
    """
    snapshot = source if isinstance(source, Snapshot) else read_snapshot(source)
    recordings = _per_device(snapshot)
    runs = [_best_order(recording, snapshot) for recording in recordings]
    oom = None
    if gpu_memory_bytes is not None:
        for recording, run in zip(recordings, runs, strict=True):
            if oom is None and run.initial is not None:
                oom = run_on_card(recording, run.initial, run.settings, gpu_memory_bytes)
    return _result(recordings, runs, oom, settings_known=snapshot.settings is not None)


def _per_device(snapshot: Snapshot) -> list[Recording]:
    count = max([s.device + 1 for s in snapshot.segments] + [len(snapshot.traces)], default=0)
    recordings = [
        Recording(
            tuple(s for s in snapshot.segments if s.device == device),
            snapshot.traces[device] if device < len(snapshot.traces) else (),
        )
        for device in range(count)
    ]
    return [r for r in recordings if r.segments or r.events]


def _best_order(recording: Recording, snapshot: Snapshot) -> Comparison:
    """The replay under the tie-break of the torch that recorded; a snapshot does not name its version.

    Traces of 2.13 and newer name the memory pool, and are tried first with that version's rule.
    """
    names_pool = bool(recording.events) and recording.events[-1].pool_id is not None
    orders = sorted(_ORDERS, key=lambda order: order != "segment_age") if names_pool else _ORDERS
    settings = _settings_of(recording, snapshot)
    best: Comparison | None = None
    for order in orders:
        run = compare(recording, replace(settings, tie_break=order))
        if best is None or run.alloc_addresses_matched > best.alloc_addresses_matched:
            best = run
        if run.disagreement is None or run.initial is None:
            return run
    for order in orders:
        if order != "address":
            run = _with_learned_ages(recording, replace(settings, tie_break=order))
            if run.disagreement is None:
                return run
    assert best is not None
    return best


def _settings_of(recording: Recording, snapshot: Snapshot) -> AllocatorSettings:
    """What the snapshot records; one without settings (torch 2.0) still shows whether segments are expandable."""
    settings = AllocatorSettings.from_snapshot(snapshot.settings)
    mapped = any(s.is_expandable for s in recording.segments) or any(
        e.action == "segment_map" for e in recording.events
    )
    return replace(settings, expandable_segments=True) if mapped and snapshot.settings is None else settings


def _with_learned_ages(recording: Recording, settings: AllocatorSettings) -> Comparison:
    """A replay with the order of what was there before, as far as the recording shows it.

    What is learned late may undo what was decided early, so the order counts only if a replay from the first
    event with it agrees.
    """
    order = OrderOfAges()
    for _ in range(_MOST_LESSONS):
        compare(recording, settings, order, learn=True)
        run = compare(recording, settings, order)
        if run.disagreement is None:
            break
    return run


def _result(
    recordings: list[Recording], runs: list[Comparison], oom: ReplayOom | None, *, settings_known: bool
) -> ReplayResult:
    exact, reason = _verdict(recordings, runs, settings_known=settings_known)
    return ReplayResult(
        events=sum(len(r.events) for r in recordings),
        alloc_events=sum(r.alloc_events for r in runs),
        alloc_addresses_matched=sum(r.alloc_addresses_matched for r in runs),
        segment_allocs=sum(r.segment_allocs for r in runs),
        segment_allocs_matched=sum(r.segment_allocs_matched for r in runs),
        final_allocated_bytes=sum(r.allocated_bytes for r in runs),
        final_reserved_bytes=sum(r.reserved_bytes for r in runs),
        recorded_allocated_bytes=sum(r.allocated_bytes for r in recordings),
        recorded_reserved_bytes=sum(r.reserved_bytes for r in recordings),
        exact=exact,
        reason=reason,
        tie_break=runs[0].settings.tie_break if runs else "address",
        oom=oom,
    )


def _unknown_ages(run: Comparison) -> str:
    """A reason beyond the model's control: age breaks ties since 2.12, and a snapshot does not record it."""
    segments = run.initial.segments if run.initial else []
    if run.settings.tie_break == "address" or not segments:
        return ""
    return f"; the order in which the {len(segments)} segments from before the recording came is not recorded"


def _verdict(
    recordings: list[Recording], runs: list[Comparison], *, settings_known: bool
) -> tuple[bool | None, str | None]:
    """True, False or None (nothing to judge), and the reason."""
    if not any(run.alloc_events for run in runs):
        events = sum(len(r.events) for r in recordings)
        return None, f"the trace holds no allocation to judge ({events} events in all)"
    for run in runs:
        if run.initial is None:
            return False, run.disagreement
    apart = [run for run in runs if run.disagreement is not None]
    for run in sorted(apart, key=lambda run: run.unknown is not None):
        unknown = run.unknown or (None if settings_known else "the snapshot does not record the allocator's settings")
        if unknown is not None:
            return False, f"{run.disagreement}; but {unknown}, so this need not be the model's error"
        return False, run.disagreement + _unknown_ages(run)
    return True, None
