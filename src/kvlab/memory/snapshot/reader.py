"""Read a snapshot that anyone may have made: pickle or JSON, gzip or not, torch 2.0 to 2.13; nothing is executed."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.memory.snapshot.plain_pickle import PlainPickleError, load_plain
from kvlab.memory.snapshot.records import (
    ACTIVE_ALLOCATED,
    ACTIVE_PENDING_FREE,
    INACTIVE,
    BlockRecord,
    SegmentRecord,
    Snapshot,
    TraceEvent,
)

_STATES = {
    ACTIVE_ALLOCATED: ACTIVE_ALLOCATED,
    ACTIVE_PENDING_FREE: ACTIVE_PENDING_FREE,
    "active_awaiting_free": ACTIVE_PENDING_FREE,
    INACTIVE: INACTIVE,
}
_ACTIONS = frozenset(
    "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap snapshot oom".split()
)
_ADDRESS_END = 1 << 64
_MAX_FRAME_DEPTH = 4096


class SnapshotError(KvlabError, ValueError):
    """The file cannot be read as a snapshot; the message is one line that says why."""


@dataclass(frozen=True)
class Limits:
    """What a snapshot may cost: bytes of the unpacked file, and lists, dictionaries and events in it."""

    max_bytes: int = 512 << 20
    max_items: int = 8_000_000


def read_snapshot(source: str | Path | bytes, limits: Limits | None = None) -> Snapshot:
    """The snapshot in a file (or in bytes). Raises SnapshotError, in one line, for anything else."""
    limits = limits or Limits()
    if isinstance(source, bytes):
        return parse_snapshot(_load(source, limits), limits)
    path = Path(source)
    try:
        size = path.stat().st_size
        if size > limits.max_bytes:
            raise SnapshotError(f"{size:,} bytes are more than the limit of {limits.max_bytes:,}")
        return parse_snapshot(_load(path.read_bytes(), limits), limits)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from None
    except SnapshotError as error:
        raise SnapshotError(f"{path.name}: {error}") from None


def _load(data: bytes, limits: Limits) -> Any:
    """The plain object in the bytes of a file."""
    if data[:2] == b"\x1f\x8b":
        data = _gunzip(data, limits.max_bytes)
    if len(data) > limits.max_bytes:
        raise SnapshotError(f"{len(data):,} bytes are more than the limit of {limits.max_bytes:,}")
    if not data:
        raise SnapshotError("the file is empty")
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return _load_json(data, limits)
    try:
        return load_plain(data, max_containers=limits.max_items)
    except PlainPickleError as error:
        raise SnapshotError(str(error)) from None


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    """All members of a gzip file, never unpacking more than ``max_bytes`` and a little."""
    parts, left = [], max_bytes
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(data, left + 1))
        except zlib.error as error:
            raise SnapshotError(f"the gzip file is damaged ({error})") from None
        left -= len(parts[-1])
        if left < 0:
            raise SnapshotError(f"unpacked it is larger than the limit of {max_bytes:,} bytes")
        if not member.eof:
            raise SnapshotError("the gzip file is cut short")
        data = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def _load_json(data: bytes, limits: Limits) -> Any:
    if data.count(b"{") + data.count(b"[") > limits.max_items or data.count(b",") > 16 * limits.max_items:
        raise SnapshotError(f"it may hold more than {limits.max_items:,} lists and dictionaries")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise SnapshotError("the JSON is nested too deep") from None
    except ValueError as error:
        raise SnapshotError(f"the JSON is damaged ({str(error)[:80]})") from None


def parse_snapshot(raw: Any, limits: Limits | None = None) -> Snapshot:
    """The snapshot in a plain object: what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` returned."""
    return _Parser(limits or Limits()).snapshot(raw)


class _Parser:
    """Checks a plain object against the schema; counts items, because shared lists can repeat without end."""

    def __init__(self, limits: Limits) -> None:
        self._max_items = self._items_left = limits.max_items
        self._known_frames: set[int] = set()
        self._pools: dict[tuple, tuple[int, int]] = {}

    def snapshot(self, raw: Any) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        if not isinstance(raw, dict) or "segments" not in raw:
            raise SnapshotError("this is no snapshot: it has no list of segments")
        segments = [self._segment(s) for s in self._list(raw["segments"], "segments")]
        segments.sort(key=lambda s: s.address)
        for before, after in zip(segments, segments[1:], strict=False):
            if before.address + before.total_size > after.address:
                raise SnapshotError(f"segments overlap at {after.address:#x}")
        settings = raw.get("allocator_settings")
        return Snapshot(
            segments=tuple(segments),
            traces=tuple(self._trace(t) for t in self._list(raw.get("device_traces") or [], "device_traces")),
            settings=settings if isinstance(settings, dict) else None,
            annotations=tuple(self._list(raw.get("external_annotations") or [], "external_annotations")),
        )

    def _segment(self, raw: Any) -> SegmentRecord:
        self._spend(1)
        if not isinstance(raw, dict):
            raise SnapshotError("this is no snapshot: a segment is not a dictionary")
        address, total = _natural(raw, "address"), _natural(raw, "total_size")
        kind = raw.get("segment_type")
        if kind not in ("small", "large"):
            raise SnapshotError(f"a segment is neither small nor large but {str(kind)[:40]!r}")
        blocks, at = [], address
        for raw_block in self._list(raw.get("blocks"), "blocks"):
            block = self._block(raw_block, at)
            at += block.size
            blocks.append(block)
        if at != address + total or at > _ADDRESS_END:
            raise SnapshotError(
                f"the blocks of the segment at {address:#x} add up to {at - address:,} bytes, not to {total:,}"
            )
        return SegmentRecord(
            address=address,
            total_size=total,
            stream=_natural(raw, "stream", 0),
            is_small=kind == "small",
            blocks=tuple(blocks),
            device=_natural(raw, "device", 0),
            pool_id=self._pool_id(raw.get("segment_pool_id")) or (0, 0),
            is_expandable=raw.get("is_expandable") is True,
        )

    def _block(self, raw: Any, expected_address: int) -> BlockRecord:
        """A block; torch 2.0 gives no address and keeps frames and request in a ``history``."""
        self._spend(1)
        if not isinstance(raw, dict):
            raise SnapshotError("a block is not a dictionary")
        size = _natural(raw, "size")
        if _natural(raw, "address", expected_address) != expected_address:
            raise SnapshotError(f"a block lies at {raw['address']:#x} where {expected_address:#x} is due")
        state = _STATES.get(raw.get("state")) if isinstance(raw.get("state"), str) else None
        if state is None:
            raise SnapshotError(f"a block has the unknown state {str(raw.get('state'))[:40]!r}")
        history = raw.get("history")
        if isinstance(history, list) and history and isinstance(history[0], dict):
            frames, requested = history[0].get("frames"), _natural(history[0], "real_size", size)
        else:
            frames, requested = raw.get("frames"), _natural(raw, "requested_size", size)
        return BlockRecord(expected_address, size, requested, state, self._frames(frames))

    def _trace(self, raw: Any) -> tuple[TraceEvent, ...]:
        entries = self._list(raw, "a device trace")
        self._spend(len(entries))
        return tuple(map(self._event, entries))

    def _event(self, raw: Any) -> TraceEvent:
        if type(raw) is not dict:
            raise SnapshotError("a trace entry is not a dictionary")
        get = raw.get
        action, size, stream, address = get("action"), get("size"), get("stream", 0), get("addr")
        if address is None:
            address = get("device_free", 0)
        if action not in _ACTIONS:
            raise SnapshotError(f"a trace entry has the unknown action {str(action)[:40]!r}")
        for number in (size, stream, address):
            if type(number) is not int or not 0 <= number < _ADDRESS_END:
                raise SnapshotError(f"a trace entry ({action}) holds {str(number)[:40]!r} where a size is due")
        time_us, frames = get("time_us"), get("frames")
        return TraceEvent(
            action,
            address,
            size,
            stream,
            self._pool_id(get("pool_id")),
            time_us if type(time_us) is int else None,
            self._frames(frames) if frames else (),
        )

    def _frames(self, raw: Any) -> Any:
        """Frames as they are, once they are known to be a flat list of flat dictionaries."""
        if not raw or id(raw) in self._known_frames:
            return raw or ()
        frames = self._list(raw, "frames")
        self._spend(len(frames))
        if len(frames) > _MAX_FRAME_DEPTH:
            raise SnapshotError(f"a stack of {len(frames):,} frames is too deep to be one")
        for frame in frames:
            values = frame.values() if isinstance(frame, dict) else (frame,)
            if not all(isinstance(v, str | int | float | bool | None) for v in values):
                raise SnapshotError("a stack frame holds more than texts and numbers")
        self._known_frames.add(id(raw))
        return frames

    def _pool_id(self, raw: Any) -> tuple[int, int] | None:
        if raw is None:
            return None
        if (
            not isinstance(raw, tuple | list)
            or len(raw) != 2
            or not all(type(n) is int and 0 <= n < _ADDRESS_END for n in raw)
        ):
            raise SnapshotError(f"{str(raw)[:40]!r} is no memory pool id")
        return (raw[0], raw[1])

    def _list(self, raw: Any, what: str) -> Iterable[Any]:
        if not isinstance(raw, list):
            raise SnapshotError(f"{what} should be a list")
        return raw

    def _spend(self, items: int) -> None:
        self._items_left -= items
        if self._items_left < 0:
            raise SnapshotError(f"it holds more than {self._max_items:,} segments, blocks and events")


def _natural(raw: dict, key: str, default: int | None = None) -> int:
    """A non-negative integer below 2^64."""
    number = raw.get(key, default)
    if type(number) is not int or not 0 <= number < _ADDRESS_END:
        raise SnapshotError(f"{key} should be a whole number, not {str(number)[:40]!r}")
    return number
