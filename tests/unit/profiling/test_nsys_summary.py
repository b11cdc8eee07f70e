"""The sums of an export are those of the file, in each version of the schema and with parts of it missing."""

import csv
import io
import shutil
import sqlite3
import subprocess
from collections import Counter

import pytest
from nsys_exports import CALLS, KERNELS, MIB, SCHEMAS, needs_recorded, recorded, write_export

from kvlab.profiling.nsys import ExportError, summarise_export
from kvlab.profiling.timeline import timeline_of_export


def dumped(operations, *fields):
    return [tuple(getattr(one, field) for field in fields) for one in operations]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_tells_the_scene(tmp_path, schema):
    said = summarise_export(write_export(tmp_path / "scene.sqlite", schema))
    assert said.gpus == ["NVIDIA A", "NVIDIA B"]
    assert dumped(said.kernels, "name", "count", "total_ns") == [("gemm<float, 128>", len(KERNELS), 1_200)]
    assert dumped(said.api, "name", "count", "total_ns", "errors") == [
        ("cudaMalloc_v3020", 3, 4_900, 1),
        ("cudaLaunchKernel_v7000", 3, 1_200, 0),
        ("cudaEventQuery_v3020", 1, 100, 1),
    ]
    assert dumped(said.failed_calls, "name", "return_value", "start_ns") == [
        ("cudaEventQuery_v3020", 600, 5_000),
        ("cudaMalloc_v3020", 2, 9_000),
    ]
    assert dumped(said.nvtx, "domain", "name", "count", "total_ns", "open") == [
        (None, "request", 1, 9_550, 0),
        (None, "prefill", 1, 5_000, 0),
        (None, "decode", 2, 1_500, 1),
        ("server", "decode", 1, 200, 0),
        ("client", "decode", 1, 100, 0),
    ]
    assert said.memory_peak_bytes == 30 * MIB
    assert (said.product_version, said.schema_version) == (SCHEMAS[schema].product, SCHEMAS[schema].version)
    assert said.notes == []


@pytest.mark.parametrize(
    ("table", "empty", "noted"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "api", "no CUDA calls"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "kernels", "no kernels"),
        ("NVTX_EVENTS", "nvtx", "no NVTX events"),
        ("TARGET_INFO_GPU", "gpus", None),
    ],
)
def test_a_missing_table_leaves_its_part_empty_and_the_rest_whole(tmp_path, table, empty, noted):
    whole = summarise_export(write_export(tmp_path / "whole.sqlite"))
    said = summarise_export(write_export(tmp_path / "part.sqlite", without=(table,)))
    assert getattr(said, empty) == []
    for part in {"gpus", "kernels", "api", "nvtx", "memory_peak_bytes"} - {empty}:
        assert getattr(said, part) == getattr(whole, part)
    assert [note for note in said.notes if noted and note.startswith(noted)] or noted is None


def test_memory_that_was_not_recorded_is_null_and_memory_without_events_is_zero(tmp_path):
    path = write_export(tmp_path / "a.sqlite", without=("CUDA_GPU_MEMORY_USAGE_EVENTS",))
    assert summarise_export(path).memory_peak_bytes is None
    change(write_export(path), "DELETE FROM CUDA_GPU_MEMORY_USAGE_EVENTS")
    assert summarise_export(path).memory_peak_bytes == 0


def test_names_without_a_table_of_strings_are_their_numbers(tmp_path):
    said = summarise_export(write_export(tmp_path / "a.sqlite", without=("StringIds",)))
    assert [call.name for call in said.api] == ["0", "1", "2"]
    assert "decode" in {one.name for one in said.nvtx}


@pytest.mark.parametrize(
    ("change_made", "part", "expected"),
    [
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN returnValue", "errors", None),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN end", "total_ns", 0),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN nameId", "name", "(no name)"),
    ],
)
def test_a_missing_column_is_missed_only_where_it_counts(tmp_path, change_made, part, expected):
    said = summarise_export(change(write_export(tmp_path / "a.sqlite"), change_made))
    assert getattr(said.api[0], part) == expected
    assert sum(call.count for call in said.api) == len(CALLS)
    assert said.memory_peak_bytes == 30 * MIB


def test_a_renamed_kernel_column_gives_way_to_the_short_name(tmp_path):
    path = change(
        write_export(tmp_path / "a.sqlite"),
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN demangledName TO fullName",
    )
    assert dumped(summarise_export(path).kernels, "name", "count") == [("gemm", len(KERNELS))]


def test_two_numbers_for_one_text_are_one_operation(tmp_path):
    path = change(
        write_export(tmp_path / "a.sqlite"),
        "INSERT INTO StringIds VALUES (99, 'gemm<float, 128>')",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 99 WHERE start > 4000",
    )
    assert dumped(summarise_export(path).kernels, "count", "total_ns") == [(3, 1_200)]


def test_a_range_whose_text_is_a_number_keeps_it(tmp_path):
    path = change(write_export(tmp_path / "a.sqlite"), "UPDATE NVTX_EVENTS SET text = '5' WHERE text = 'request'")
    assert summarise_export(path).nvtx[0].name == "5"  # string number 5 is another name
    assert timeline_of_export(path).ranges[0].name == "5"


def test_a_schema_newer_than_any_checked_is_read_and_noted(tmp_path):
    path = change(
        write_export(tmp_path / "a.sqlite"),
        "UPDATE META_DATA_EXPORT SET value = '4.1.0' WHERE name = 'EXPORT_SCHEMA_VERSION'",
    )
    said = summarise_export(path)
    assert "4.1.0 is newer" in said.notes[0]
    assert len(said.api) == 3


def test_a_free_takes_back_what_lay_at_its_address(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    memory = "UPDATE CUDA_GPU_MEMORY_USAGE_EVENTS SET bytes = 0 WHERE memoryOperationType = 1"
    assert summarise_export(change(path, memory)).memory_peak_bytes == 30 * MIB
    kept = "DELETE FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE start = 7000"  # the free of the 10 MiB
    assert summarise_export(change(path, kept)).memory_peak_bytes == 36 * MIB


def change(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


@needs_recorded
def test_a_recorded_export_gives_what_plain_sql_gives():
    said = summarise_export(recorded())
    connection = sqlite3.connect(f"{recorded().as_uri()}?mode=ro&immutable=1", uri=True)

    def sql(query):
        return sorted(connection.execute(query))

    api = "SELECT value, COUNT(*), SUM(end - start), SUM(returnValue != 0) FROM CUPTI_ACTIVITY_KIND_RUNTIME "
    assert sorted(dumped(said.api, "name", "count", "total_ns", "errors")) == sql(
        f"{api} JOIN StringIds ON id = nameId GROUP BY value"
    )
    assert sorted(dumped(said.kernels, "name", "count", "total_ns")) == sql(
        "SELECT value, COUNT(*), SUM(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL "
        "JOIN StringIds ON id = demangledName GROUP BY value"
    )
    assert sorted(dumped(said.nvtx, "name", "count", "total_ns")) == sql(
        "SELECT COALESCE(text, value) AS n, COUNT(*), SUM(end - start) FROM NVTX_EVENTS "
        "LEFT JOIN StringIds ON id = textId WHERE eventType IN (59, 60) GROUP BY n"
    )
    assert [(name,) for name in said.gpus] == sql("SELECT name FROM TARGET_INFO_GPU")
    assert said.failed_calls == []
    assert (said.memory_peak_bytes, said.schema_version) == (None, "3.16.1")
    assert len(said.api) > 5
    assert len(said.nvtx) > 5
    connection.close()


@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed here")
@needs_recorded
def test_a_recorded_export_gives_what_nsys_stats_gives(tmp_path):
    copy = tmp_path / "copy.sqlite"
    shutil.copyfile(recorded(), copy)
    said = summarise_export(copy)
    api, ranges = stats(copy, "cudaapisum", "cuda_api_sum"), stats(copy, "nvtxsum", "nvtx_sum")
    ours = Counter({cut(call.name): call.total_ns for call in said.api})
    assert ours == Counter({row["Name"]: int(row["Total Time (ns)"]) for row in api})
    assert Counter({one.name: one.count for one in said.nvtx}) == Counter(
        {row["Range"].removeprefix(":"): int(row["Instances"]) for row in ranges}
    )
    assert sum(ours.values()) > 0


def cut(name):
    """As nsys stats cuts the version off: four digits and no other number."""
    return name[:-6] if name[-6:-4] == "_v" else name


def stats(path, *names):
    """The rows of a report, which has had two names."""
    for name in names:
        done = subprocess.run(
            ["nsys", "stats", "--report", name, "--format", "csv", "--quiet", str(path)], capture_output=True, text=True
        )
        start = done.stdout.find("Time (%)")
        if done.returncode == 0 and start >= 0:
            return [row for row in csv.DictReader(io.StringIO(done.stdout[start:])) if row.get("Total Time (ns)")]
    pytest.skip(f"this nsys has no report {' or '.join(names)} for this schema")


def test_a_report_is_no_export(tmp_path):
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"whatever")
    with pytest.raises(ExportError, match="nsys export --type sqlite"):
        summarise_export(report)
