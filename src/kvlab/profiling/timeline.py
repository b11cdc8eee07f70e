"""One timeline from two sources: an nsys export, or a trace of torch.profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.profiling.nsys.export import Export
from kvlab.profiling.nsys.summary import KERNEL, NVTX, RANGES, RUNTIME, device_memory, first_of, name_of, range_name

MOST_TRACE_BYTES = 1 << 30
NOT_READY = 600  # what cudaEventQuery answers while work goes on


class TraceError(KvlabError):
    """The file is no trace of torch.profiler."""


@dataclass(frozen=True)
class Span:
    """One stretch of time, in seconds from the timeline's first event."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Failure:
    """A call or an allocation that failed. ``said``: what the recorder kept of it."""

    name: str
    at_s: float
    said: str


@dataclass(frozen=True)
class Timeline:
    """What ran when. ``memory`` is (seconds, bytes held) after each event that changed it, empty if not recorded."""

    ranges: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    calls_are: str = "CUDA calls"

    def between(self, start_s: float, end_s: float) -> Timeline:
        """The part that touches this stretch, its clock set to 0 at ``start_s``; spans are cut at its edges."""

        def cut(spans: list[Span]) -> list[Span]:
            inside = [span for span in spans if span.end_s >= start_s and span.start_s <= end_s]
            return [Span(s.name, max(s.start_s, start_s) - start_s, min(s.end_s, end_s) - start_s) for s in inside]

        before = [held for at, held in self.memory if at < start_s][-1:]
        memory = [(at - start_s, held) for at, held in self.memory if start_s <= at <= end_s]
        return Timeline(
            ranges=cut(self.ranges),
            calls=cut(self.calls),
            kernels=cut(self.kernels),
            memory=[(0.0, held) for held in before] + memory,
            failures=[Failure(f.name, f.at_s - start_s, f.said) for f in self.failures if start_s <= f.at_s <= end_s],
            calls_are=self.calls_are,
        )


def timeline_of_export(path: Path | str) -> Timeline:
    """The timeline of an nsys export; raises ExportError as ``summarise_export`` does."""
    with Export(path) as export:
        range_named = range_name(export, first_of(export, NVTX, "text"), first_of(export, NVTX, "textId"))
        call_named = name_of(export, first_of(export, RUNTIME, "nameId"))
        kernel_named = name_of(export, first_of(export, KERNEL, "demangledName", "shortName", "mangledName"))
        failed = f"returnValue NOT IN (0, {NOT_READY})"
        return _from_ns(
            [row[:3] for row in _rows(export, NVTX, range_named, f"eventType IN {RANGES}", needs="eventType")],
            [row[:3] for row in _rows(export, RUNTIME, call_named)],
            [row[:3] for row in _rows(export, KERNEL, kernel_named)],
            [(start, held) for start, _, held in device_memory(export) or ()],
            [
                (name, start, f"returned {value}")
                for name, start, _, value in _rows(export, RUNTIME, call_named, failed, needs="returnValue")
            ],
            "CUDA calls",
        )


def _rows(export: Export, table: str, name: str, condition: str = "1", needs: str = "start") -> Iterable[tuple]:
    """(name, start, end, returnValue) in ns; nothing where the table or a column it needs is missing."""
    if not export.has(table, "start", "end", needs):
        return ()
    value = first_of(export, table, "returnValue")
    rows = export.rows(
        f'SELECT {name}, CAST(start AS INTEGER), CAST("end" AS INTEGER), CAST({value} AS INTEGER) FROM {table} '
        f"WHERE {condition} ORDER BY start"
    )
    # Not asked in SQL: a damaged file has nulls in columns whose declaration says that there are none.
    return ((str(name), start, end, value) for name, start, end, value in rows if None not in (start, end))


def timeline_of_trace(path: Path | str) -> Timeline:
    """The timeline of what ``torch.profiler.profile.export_chrome_trace`` wrote, ``.json`` or ``.json.gz``.

    Ranges are ``record_function``'s, calls the CUDA calls or, where there are none, PyTorch's operators. Memory needs
    ``profile_memory=True``; the events of the allocator that refused are then failures. Raises TraceError.
    """
    events = _trace_events(Path(path))
    spans: dict[str, list] = defaultdict(list)
    memory, failures = [], []
    for event in events:
        start, arguments = _ns(event.get("ts")), event.get("args") or {}
        if event.get("ph") == "X":
            spans[event.get("cat")].append((str(event.get("name")), start, start + _ns(event.get("dur"))))
        elif event.get("name") == "[memory]":
            memory.append((start, arguments.get("Total Allocated", 0)))
        elif event.get("name") == "[OutOfMemory]":
            failures.append(("allocation", start, f"{arguments.get('Bytes', 0):,} bytes refused"))
    calls = spans["cuda_runtime"] + spans["cuda_driver"]
    return _from_ns(
        sorted(spans["user_annotation"], key=_start),
        sorted(calls or spans["cpu_op"], key=_start),
        sorted(spans["kernel"], key=_start),
        sorted(memory),
        failures,
        "CUDA calls" if calls else "operators",
    )


def _trace_events(path: Path) -> list[dict[str, Any]]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = file.read(MOST_TRACE_BYTES + 1)
        if len(content) > MOST_TRACE_BYTES:
            raise TraceError(f"{path} is larger than {MOST_TRACE_BYTES} bytes")
        events = json.loads(content)["traceEvents"]
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, RecursionError):
        raise TraceError(f"{path} is no trace of torch.profiler (export_chrome_trace writes one)") from None
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


def _ns(microseconds: Any) -> float:
    return 1e3 * microseconds if isinstance(microseconds, int | float) else 0.0


def _start(span: tuple) -> float:
    return span[1]


def _from_ns(ranges: list, calls: list, kernels: list, memory: list, failures: list, calls_are: str) -> Timeline:
    first = min((row[1] for row in [*ranges, *calls, *kernels, *failures]), default=0)
    first = min(first, memory[0][0]) if memory else first

    def spans(rows: list) -> list[Span]:
        return [Span(name, (start - first) / 1e9, (end - first) / 1e9) for name, start, end in rows]

    return Timeline(
        ranges=spans(ranges),
        calls=spans(calls),
        kernels=spans(kernels),
        memory=[((at - first) / 1e9, held) for at, held in memory],
        failures=[Failure(name, (at - first) / 1e9, said) for name, at, said in failures],
        calls_are=calls_are,
    )
