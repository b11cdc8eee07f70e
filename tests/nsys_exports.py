"""Exports as nsys writes them, made by hand for several versions of its schema: one scene, told by each.

The scene: a prefill and two decode steps, the second of which is cut off; three kernels; two cudaMalloc calls that
succeed and one that returns 2; memory that rises to 30 MiB, falls, and ends at 26 MiB.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared_data import at_hand

MIB = 1 << 20
PROCESS = 0x0001_0000_2A00_0000  # a globalPid: machine 1, process 42
OTHER = 0x0001_0000_2B00_0000
PINNED, DEVICE = 1, 2


@dataclass(frozen=True)
class Schema:
    """What differs between the versions."""

    version: str
    product: str
    meta: str = "META_DATA_EXPORT"
    gpu: str = "TARGET_INFO_GPU"
    gpu_number: str = "id"
    kernel_extra: str = ""
    memory_extra: str = ""


SCHEMAS = {
    "2021": Schema("2.7.1", "2021.1.1.66", "EXPORT_META_DATA", "TARGET_INFO_CUDA_GPU", "deviceId"),
    "3.0": Schema("3.0.0", "2022.4.2.1", "EXPORT_META_DATA"),
    "3.16": Schema("3.16.1", "2024.6.2.225", kernel_extra=", greenContextId INTEGER"),
    "3.24": Schema(
        "3.24.14",
        "2026.1.1.204",
        kernel_extra=", greenContextId INTEGER",
        memory_extra=", streamId INTEGER, localMemoryPoolSize INTEGER, localMemoryPoolUtilizedSize INTEGER",
    ),
}

STRINGS = ["cudaMalloc_v3020", "cudaLaunchKernel_v7000", "cudaEventQuery_v3020", "gemm<float, 128>", "gemm", "prefill"]
CALLS = [  # start, end, name, value returned
    (1_000, 3_000, "cudaMalloc_v3020", 0),
    (3_000, 3_400, "cudaLaunchKernel_v7000", 0),
    (4_000, 4_500, "cudaLaunchKernel_v7000", 0),
    (5_000, 5_100, "cudaEventQuery_v3020", 600),
    (6_000, 8_000, "cudaMalloc_v3020", 0),
    (8_000, 8_300, "cudaLaunchKernel_v7000", 0),
    (9_000, 9_900, "cudaMalloc_v3020", 2),
]
KERNELS = [(3_500, 3_900), (4_600, 5_000), (8_400, 8_800)]
RANGES = [  # start, end, text, number of a string, type, domain, process
    (500, 5_500, None, "prefill", 59, 0, PROCESS),
    (5_500, 7_000, "decode", None, 59, 0, PROCESS),
    (7_000, None, "decode", None, 60, 0, PROCESS),
    (400, 9_950, "request", None, 60, 0, PROCESS),
    (600, None, "server", None, 75, 1, PROCESS),
    (610, None, "client", None, 75, 1, OTHER),
    (700, 900, "decode", None, 59, 1, PROCESS),
    (700, 800, "decode", None, 59, 1, OTHER),
    (650, None, "a mark", None, 34, 0, PROCESS),
]
MEMORY = [  # start, device, address, bytes, kind, operation
    (900, 0, 0x100, 5 * MIB, DEVICE, 1),  # allocated before the recording began
    (2_900, 0, 0x200, 20 * MIB, DEVICE, 0),
    (3_000, 0, 0x900, 64 * MIB, PINNED, 0),
    (6_900, 0, 0x300, 10 * MIB, DEVICE, 0),
    (7_000, 0, 0x300, 10 * MIB, DEVICE, 1),
    (7_500, 0, 0x400, 6 * MIB, DEVICE, 0),
    (7_600, 1, 0x200, 25 * MIB, DEVICE, 0),
]


def write_export(path: Path, schema: str = "3.16", *, without: tuple[str, ...] = ()) -> Path:
    """The scene in one version's tables, those named in ``without`` left out."""
    chosen = SCHEMAS[schema]
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    for name, columns, rows in _tables(chosen):
        if name not in without:
            connection.execute(f"CREATE TABLE {name} ({columns})")
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    connection.commit()
    connection.close()
    return path


def _tables(schema: Schema):
    number = {text: index for index, text in enumerate(STRINGS)}
    spare = [None] * 10
    yield (
        schema.meta,
        "name TEXT NOT NULL, value TEXT",
        [("EXPORT_PRODUCT_VERSION", schema.product), ("EXPORT_SCHEMA_VERSION", schema.version)],
    )
    yield "StringIds", "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL", [(n, s) for s, n in number.items()]
    gpus = [(1, "NVIDIA B"), (0, "NVIDIA A")]
    yield schema.gpu, f"{schema.gpu_number} INTEGER NOT NULL, name TEXT", gpus
    yield (
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER",
        [(start, end, 0, PROCESS, i, number[name], value, None) for i, (start, end, name, value) in enumerate(CALLS)],
    )
    yield (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, "
        "correlationId INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER"
        + schema.kernel_extra,
        [
            (start, end, 0, 7, i, number["gemm<float, 128>"], number["gemm"], None, *spare[: bool(schema.kernel_extra)])
            for i, (start, end) in enumerate(KERNELS)
        ],
    )
    yield (
        "NVTX_EVENTS",
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, "
        "textId INTEGER, domainId INTEGER",
        [
            (start, end, kind, text, process + 5, number.get(string), domain)
            for start, end, text, string, kind, domain, process in RANGES
        ],
    )
    yield (
        "CUDA_GPU_MEMORY_USAGE_EVENTS",
        "start INTEGER NOT NULL, globalPid INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "address INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER NOT NULL, "
        "memoryOperationType INTEGER NOT NULL, name TEXT, correlationId INTEGER" + schema.memory_extra,
        [
            (
                at,
                PROCESS,
                device,
                1,
                address,
                size,
                kind,
                operation,
                None,
                None,
                *spare[: 3 * bool(schema.memory_extra)],
            )
            for at, device, address, size, kind, operation in MEMORY
        ],
    )


def recorded() -> Path | None:
    """An export of a real run, if it is at hand; it is another's and not part of the project."""
    folder = at_hand("nsys")
    return next(iter(sorted(folder.glob("*.sqlite"))), None) if folder else None


needs_recorded = pytest.mark.skipif(
    recorded() is None, reason="no export of a real GPU at hand (KVLAB_SHARED_DATA names its folder)"
)
