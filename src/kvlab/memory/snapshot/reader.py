"""Read a snapshot anyone may have made, executing nothing: pickle, JSON, gzip; torch 2.0 to 2.13."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
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
    (
        *("alloc", "free_requested", "free_completed", "oom", "snapshot", "workspace_snapshot", "user_defined"),
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    )
)
_ADDRESS_END = 1 << 64
_SIZE_END = 1 << 60
_MAX_DEVICES = 1024
_MAX_DEPTH = 32
_new_event = tuple.__new__  # a quarter of the time of TraceEvent(...), and a trace has millions
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
    """The snapshot in a plain object: what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()``
    returned."""
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
        for key, value in raw.items():
            if key not in ("segments", "device_traces"):
                _require_shallow(value)
        segments = [self._segment(s) for s in self._list(raw["segments"], "segments")]
        segments.sort(key=lambda s: s.address)
        for before, after in pairwise(segments):
            if before.address + before.total_size > after.address:
                raise SnapshotError(f"segments overlap at {after.address:#x}")
        settings = raw.get("allocator_settings")
        traces = self._list(raw.get("device_traces") or [], "device_traces")
        if len(traces) > _MAX_DEVICES:
            raise SnapshotError(f"it has traces of {len(traces):,} devices")
        return Snapshot(
            segments=tuple(segments),
            traces=tuple(map(self._trace, traces)),
            settings=settings if isinstance(settings, dict) else None,
        )

    def _segment(self, raw: Any) -> SegmentRecord:
        self._spend(1)
        if not isinstance(raw, dict):
            raise SnapshotError("this is no snapshot: a segment is not a dictionary")
        address, total = _natural(raw, "address"), _natural(raw, "total_size")
        kind = raw.get("segment_type")
        if not isinstance(kind, str) or kind not in ("small", "large"):
            raise SnapshotError(f"a segment is neither small nor large but {_brief(kind)}")
        blocks, at = [], address
        for raw_block in self._list(raw.get("blocks"), "blocks"):
            block = self._block(raw_block, at)
            at += block.size
            blocks.append(block)
        if at != address + total or at > _ADDRESS_END:
            raise SnapshotError(
                f"the blocks of the segment at {address:#x} add up to {at - address:,} bytes, not {total:,}"
            )
        return SegmentRecord(
            address=address,
            total_size=total,
            stream=_natural(raw, "stream", 0),
            is_small=kind == "small",
            blocks=tuple(blocks),
            device=_natural(raw, "device", 0, end=_MAX_DEVICES),
            pool_id=self._pool_id(raw.get("segment_pool_id")) or (0, 0),
            is_expandable=raw.get("is_expandable") is True,
        )

    def _block(self, raw: Any, expected_address: int) -> BlockRecord:
        """A block; torch 2.0 gives no address and keeps frames and request in a ``history``."""
        self._spend(1)
        if not isinstance(raw, dict):
            raise SnapshotError("a block is not a dictionary")
        size = _natural(raw, "size")
        address = _natural(raw, "address", expected_address)
        if address != expected_address:
            raise SnapshotError(f"a block lies at {address:#x} where {expected_address:#x} is due")
        state = _STATES.get(raw.get("state")) if isinstance(raw.get("state"), str) else None
        if state is None:
            raise SnapshotError(f"a block has the unknown state {_brief(raw.get('state'))}")
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
        if type(action) is not str or action not in _ACTIONS:
            raise SnapshotError(f"a trace entry has the unknown action {_brief(action)}")
        if not type(size) is type(stream) is type(address) is int:
            size, stream, address = map(_from_text, (size, stream, address))
        if not (
            type(size) is type(stream) is type(address) is int
            and 0 <= size < _SIZE_END
            and 0 <= stream < _ADDRESS_END
            and 0 <= address < _ADDRESS_END
        ):
            raise SnapshotError(
                f"a trace entry ({action}) should hold numbers of bytes, not size {_brief(size)}, address"
                f" {_brief(address)}, stream {_brief(stream)}"
            )
        time_us, frames, pool_id = get("time_us"), get("frames"), get("pool_id")
        return _new_event(
            TraceEvent,
            (
                action,
                address,
                size,
                stream,
                None if pool_id is None else self._pool_id(pool_id),
                time_us if type(time_us) is int else None,
                self._frames(frames) if frames else (),
            ),
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
            or not all(type(_from_text(n)) is int and 0 <= _from_text(n) < _ADDRESS_END for n in raw)
        ):
            raise SnapshotError(f"{_brief(raw)} is no memory pool id")
        return (_from_text(raw[0]), _from_text(raw[1]))

    def _list(self, raw: Any, what: str) -> Iterable[Any]:
        if not isinstance(raw, list):
            raise SnapshotError(f"{what} should be a list")
        return raw

    def _spend(self, items: int) -> None:
        self._items_left -= items
        if self._items_left < 0:
            raise SnapshotError(f"it holds more than {self._max_items:,} segments, blocks and events")


def _natural(raw: dict, key: str, default: int | None = None, end: int = _ADDRESS_END) -> int:
    """A whole number from 0 to below ``end``."""
    number = _from_text(raw.get(key, default))
    if type(number) is not int or not 0 <= number < end:
        raise SnapshotError(f"{key} should be a whole number below {end:,}, not {_brief(number)}")
    return number


def _from_text(value: Any) -> Any:
    """JSON from a program whose numbers cannot hold an address writes it as a text."""
    return int(value) if type(value) is str and len(value) < 24 and value.isascii() and value.isdecimal() else value


def _require_shallow(value: Any) -> None:
    """Refuse a part that is not read here but nested to death; shared parts are looked at once a level."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = {id(v): v for outer in level for v in _contents(outer)}
        level = [v for v in inner.values() if isinstance(v, dict | list | tuple)]
        if not level:
            return
    raise SnapshotError(f"it is nested more than {_MAX_DEPTH} deep")


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _brief(value: Any) -> str:
    """A value for a message; a container by its type, because it may be nested without end."""
    if isinstance(value, str | int | float | bool | None):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
