"""What an nsys export says in sum: GPUs, kernels, CUDA calls and which of them failed, NVTX ranges, memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvlab.profiling.nsys.export import LONGEST_NAME, Export, ExportError

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"
NVTX = "NVTX_EVENTS"

DOMAIN_CREATED = 75
RANGES = (59, 60, 70, 71)
"""Event types of NVTX_EVENTS that are ranges: push/pop and start/end, in C and in text (ENUM_NSYS_EVENT_TYPE)."""

ON_DEVICE = (2, 3, 5)
"""Kinds of memory that lie on the GPU: device, array, static (ENUM_CUDA_MEM_KIND); managed memory may lie anywhere."""

PROCESS = 0x0000_FFFF_FF00_0000
"""The bits of a globalTid that name the process."""

NEWEST_SCHEMA = (3, 24)
MOST_FAILED_CALLS = 100_000


class Operation(BaseModel):
    """All calls of one name. ``total_ns`` sums what has an end."""

    model_config = ConfigDict(frozen=True)
    name: str
    count: int
    total_ns: int


class ApiCall(Operation):
    """One function of the CUDA runtime or driver; ``errors`` returned other than 0, null if that was not recorded."""

    errors: int | None


class NvtxRange(Operation):
    """One range name of one domain (null: the default one); ``open`` of its ``count`` never ended."""

    domain: str | None
    open: int


class FailedCall(BaseModel):
    """One CUDA call that returned other than 0. 2 is out of memory; 600 says "not yet" and is no failure."""

    model_config = ConfigDict(frozen=True)
    name: str
    return_value: int
    start_ns: int


class NsysSummary(BaseModel):
    """The sums of one export, largest time first; failed calls in the order of time.

    Names are the file's own. Those of API functions carry the version of the interface that was called
    (``cudaMalloc_v3020``), which ``nsys stats`` cuts off: match them by their beginning. ``memory_peak_bytes`` is the
    most that one GPU's device memory held at once by the recorded allocations of all processes: a caching allocator's
    segments, not its tensors; null where memory was not recorded. ``notes`` says what the file does not hold.
    """

    model_config = ConfigDict(frozen=True)
    gpus: list[str]
    kernels: list[Operation]
    api: list[ApiCall]
    failed_calls: list[FailedCall]
    nvtx: list[NvtxRange]
    memory_peak_bytes: int | None
    product_version: str | None
    schema_version: str | None
    notes: list[str]


def summarise_export(path: Path | str) -> NsysSummary:
    """Read the SQLite export at ``path``, of schema 3.0 to 3.24 and what came after as far as it is alike.

    Tables and columns that are missing are left out and noted. The file is not changed. Raises ExportError, in one
    line, for what is no such file.
    """
    with Export(path) as export:
        meta = _meta(export)
        failed, noted = _failed_calls(export)
        return NsysSummary(
            gpus=_gpus(export),
            kernels=_kernels(export),
            api=_api(export),
            failed_calls=failed,
            nvtx=_nvtx(export),
            memory_peak_bytes=_memory_peak_bytes(export),
            product_version=meta.get("EXPORT_PRODUCT_VERSION"),
            schema_version=meta.get("EXPORT_SCHEMA_VERSION"),
            notes=[*noted, *_notes(export, meta.get("EXPORT_SCHEMA_VERSION"))],
        )


def name_of(export: Export, key: str) -> str:
    """SQL for the text behind ``key``, which numbers a row of StringIds or is itself the text."""
    if not export.has("StringIds", "id", "value"):
        return f"substr(CAST({key} AS TEXT), 1, {LONGEST_NAME})"
    text = f"(SELECT value FROM StringIds WHERE StringIds.id = {key} LIMIT 1)"
    return f"substr(CAST(COALESCE({text}, {key}) AS TEXT), 1, {LONGEST_NAME})"


def range_name(export: Export, text: str, number: str) -> str:
    """SQL for the name of an NVTX event: its own text, which may look like a number, or a row of StringIds."""
    return f"COALESCE(substr(CAST({text} AS TEXT), 1, {LONGEST_NAME}), {name_of(export, number)})"


def first_of(export: Export, table: str, *columns: str) -> str:
    """SQL for the first of ``columns`` that is there and not null."""
    there = [f"{table}.{column}" for column in columns if export.has(table, column)]
    return f"COALESCE({', '.join(there)}, NULL)" if there else "NULL"


def _meta(export: Export) -> dict[str, str]:
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if export.has(table, "name", "value"):
            rows = export.rows(f"SELECT name, substr(CAST(value AS TEXT), 1, 200) FROM {table} LIMIT 1000")
            return {str(name): value for name, value in rows if value is not None}
    return {}


def _gpus(export: Export) -> list[str]:
    """Names of the GPUs, one for each device."""
    for table in ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU"):
        if export.has(table, "name"):
            order = first_of(export, table, "id", "deviceId")
            rows = export.rows(f"SELECT substr(CAST(name AS TEXT), 1, 200) FROM {table} ORDER BY {order} LIMIT 1000")
            return [name or "(no name)" for (name,) in rows]
    return []


def _duration(export: Export, table: str) -> str:
    """SQL for the summed nanoseconds: exact in integers, as SUM is."""
    return f'CAST(COALESCE(SUM({table}."end" - {table}.start), 0) AS INTEGER)' if _timed(export, table) else "0"


def _timed(export: Export, table: str) -> bool:
    return export.has(table, "start", "end")


def _kernels(export: Export) -> list[Operation]:
    if KERNEL not in export.columns:
        return []
    key = first_of(export, KERNEL, "demangledName", "shortName", "mangledName")
    sums = f"SELECT {key} AS k, COUNT(*) AS n, {_duration(export, KERNEL)} AS ns FROM {KERNEL} GROUP BY 1"
    rows = export.rows(f"SELECT {name_of(export, 'k')}, n, ns FROM ({sums})")
    counted = _merged((name, [count, total_ns]) for name, count, total_ns in rows)
    return _largest_first(Operation(name=name, count=n, total_ns=ns) for name, (n, ns) in counted.items())


def _api(export: Export) -> list[ApiCall]:
    if RUNTIME not in export.columns:
        return []
    key = first_of(export, RUNTIME, "nameId")
    recorded = export.has(RUNTIME, "returnValue")
    errors = "TOTAL(returnValue <> 0)" if recorded else "0"
    sums = (
        f"SELECT {key} AS k, COUNT(*) AS n, {_duration(export, RUNTIME)} AS ns, CAST({errors} AS INTEGER) AS e "
        f"FROM {RUNTIME} GROUP BY 1"
    )
    rows = export.rows(f"SELECT {name_of(export, 'k')}, n, ns, e FROM ({sums})")
    counted = _merged((name, sums) for name, *sums in rows)
    return _largest_first(
        ApiCall(name=name, count=n, total_ns=ns, errors=e if recorded else None) for name, (n, ns, e) in counted.items()
    )


def _failed_calls(export: Export) -> tuple[list[FailedCall], list[str]]:
    if not export.has(RUNTIME, "returnValue"):
        return [], []
    start = first_of(export, RUNTIME, "start")
    name = name_of(export, first_of(export, RUNTIME, "nameId"))
    rows = export.rows(
        f"SELECT {name}, CAST(returnValue AS INTEGER), CAST({start} AS INTEGER) "
        f"FROM {RUNTIME} WHERE returnValue <> 0 ORDER BY {start} LIMIT {MOST_FAILED_CALLS + 1}"
    )
    calls = [FailedCall(name=_said(name), return_value=value or 0, start_ns=at or 0) for name, value, at in rows]
    if len(calls) <= MOST_FAILED_CALLS:
        return calls, []
    return calls[:MOST_FAILED_CALLS], [f"only the first {MOST_FAILED_CALLS} failed calls are listed"]


def _nvtx(export: Export) -> list[NvtxRange]:
    if NVTX not in export.columns:
        return []
    text, number, domain, thread = (first_of(export, NVTX, c) for c in ("text", "textId", "domainId", "globalTid"))
    process = f"{thread} & {PROCESS}"
    kind = f"WHERE eventType IN {RANGES}" if export.has(NVTX, "eventType") else ""
    end = first_of(export, NVTX, "end")
    sums = (
        f"SELECT {text} AS t, {number} AS k, {domain} AS d, {process} AS p, COUNT(*) AS n, "
        f"{_duration(export, NVTX)} AS ns, COUNT(*) - COUNT({end}) AS o FROM {NVTX} {kind} GROUP BY 1, 2, 3, 4"
    )
    rows = export.rows(f"SELECT {range_name(export, 't', 'k')}, d, p, n, ns, o FROM ({sums})")
    domains = _domains(export)
    counted = _merged(((_said(name), domains.get((d, p))), sums) for name, d, p, *sums in rows)
    return _largest_first(
        NvtxRange(name=name, count=n, total_ns=ns, domain=domain, open=o)
        for (name, domain), (n, ns, o) in counted.items()
    )


def _domains(export: Export) -> dict[tuple[int, int], str]:
    """Names of the NVTX domains by (domainId, process)."""
    if not export.has(NVTX, "eventType", "domainId"):
        return {}
    thread = first_of(export, NVTX, "globalTid")
    name = range_name(export, first_of(export, NVTX, "text"), first_of(export, NVTX, "textId"))
    rows = export.rows(
        f"SELECT domainId, {thread} & {PROCESS}, {name} FROM {NVTX} WHERE eventType = {DOMAIN_CREATED} LIMIT 100000"
    )
    return {(domain, process): _said(text) for domain, process, text in rows}


def _memory_peak_bytes(export: Export) -> int | None:
    """The highest level of any GPU; None where there are no memory events."""
    levels = device_memory(export)
    return None if levels is None else max((level for _, _, level in levels), default=0)


def device_memory(export: Export) -> Iterable[tuple[int, int, int]] | None:
    """(start in ns, device, bytes held there after the event), in the order of time; None if not recorded.

    A free takes back what was allocated at its address, so that one whose allocation came before the recording takes
    nothing from what came after.
    """
    if not export.has(MEMORY, "start", "bytes", "memoryOperationType"):
        return None
    return _levels(export)


def _levels(export: Export) -> Iterable[tuple[int, int, int]]:
    process, device, address = (first_of(export, MEMORY, c) for c in ("globalPid", "deviceId", "address"))
    kind = f"WHERE memKind IN {ON_DEVICE} OR memKind IS NULL" if export.has(MEMORY, "memKind") else ""
    rows = export.rows(
        f"SELECT CAST(start AS INTEGER), CAST({device} AS INTEGER), {process}, {address}, CAST(bytes AS INTEGER), "
        f"memoryOperationType FROM {MEMORY} {kind} ORDER BY start"
    )
    held: Counter[int | None] = Counter()
    live: dict[tuple, int] = {}
    for start, device, process, address, recorded, operation in rows:
        place, size = (process, device, address), recorded or 0
        if operation == 0:
            held[device] += size - live.get(place, 0)  # what lay there before was freed unrecorded
            if address is not None:
                live[place] = size
        elif operation == 1:
            held[device] -= live.pop(place, 0) if address is not None else size
        yield start or 0, device or 0, held[device]


def _notes(export: Export, schema: str | None) -> list[str]:
    missing = {
        RUNTIME: "no CUDA calls were recorded (--trace=cuda)",
        KERNEL: "no kernels were recorded (--trace=cuda)",
        NVTX: "no NVTX events were recorded (--trace=nvtx)",
        MEMORY: "no memory was recorded (--cuda-memory-usage=true)",
    }
    notes = [note for table, note in missing.items() if table not in export.columns]
    if schema is None:
        notes.append("the file does not say its schema")
    elif _version(schema) > NEWEST_SCHEMA:
        newest = ".".join(map(str, NEWEST_SCHEMA))
        notes.append(f"its schema {schema} is newer than {newest}, the newest that was checked")
    return notes


def _version(schema: str) -> tuple[int, ...]:
    return tuple(int(part) for part in schema.split(".")[:2] if part.isdecimal() and len(part) < 9)


def _said(name: object) -> str:
    return "(no name)" if name is None else str(name)


def _merged(rows: Iterable[tuple]) -> dict:
    """Sums of the rows under each name: several numbers may stand for one text."""
    counted: dict = defaultdict(lambda: None)
    for name, sums in rows:
        name = _said(name) if not isinstance(name, tuple) else name
        before = counted[name]
        counted[name] = list(sums) if before is None else [a + b for a, b in zip(before, sums, strict=True)]
        if len(counted) > 1_000_000:
            raise ExportError("the export has over a million different names, which no program has")
    return counted


def _largest_first(operations: Iterable) -> list:
    return sorted(operations, key=lambda one: (-one.total_ns, one.name))
