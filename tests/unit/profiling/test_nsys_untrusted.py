"""An export that anyone may have made: read without a trace, or refused in one line; nothing in it is executed.

``PYTHONPATH=src:tests python THIS_FILE COUNT [SEED]`` mutates COUNT files outside pytest and prints what came of them.
"""

import hashlib
import itertools
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from nsys_exports import SCHEMAS, recorded, write_export

from kvlab.profiling import timeline
from kvlab.profiling.nsys import Export, ExportError, summarise_export
from kvlab.profiling.nsys.export import BYTES_PER_SECOND


def refusal(path):
    with pytest.raises(ExportError) as caught:
        summarise_export(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def test_reading_leaves_the_file_and_its_folder_as_they_were(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    run(path, "PRAGMA journal_mode = WAL")  # a reader that may write would now leave two files beside it
    os.utime(path, ns=(1_000, 2_000))
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    path.chmod(0o444)
    assert summarise_export(path).api
    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


def test_odd_names_of_files_are_only_names(tmp_path):
    folder = tmp_path / "a b?mode=rwc#%41'"
    folder.mkdir()
    path = write_export(folder / "ä?vfs=x.sqlite")
    assert summarise_export(path).gpus
    assert list(folder.iterdir()) == [path]


def test_what_is_no_file_is_refused(tmp_path):
    assert "is a folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "absent.sqlite")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a file" in refusal(pipe)  # opening it would wait for ever


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0", b"PK\3\4" * 100, b"\0" * 4096])
def test_what_is_no_sqlite_file_is_refused(tmp_path, content):
    path = tmp_path / "a.sqlite"
    path.write_bytes(content)
    assert "empty" in refusal(path) if not content else "not an SQLite file" in refusal(path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_what_is_missing(tmp_path, part):
    path = write_export(tmp_path / "a.sqlite")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    assert f"of {len(whole)} bytes" in refusal(path)


def test_a_foreign_database_is_refused(tmp_path):
    path = run(
        tmp_path / "a.sqlite", "CREATE TABLE albums (id INTEGER, name TEXT)", "INSERT INTO albums VALUES (1, 'x')"
    )
    assert "no table of an nsys export" in refusal(path)


def test_changes_that_lie_beside_the_file_are_not_passed_over(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    Path(f"{path}-wal").write_bytes(b"something")
    assert "not finished" in refusal(path)


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id, hex(x) AS value FROM n"


def test_a_view_in_the_place_of_a_table_is_not_looked_into(tmp_path):
    path = write_export(tmp_path / "a.sqlite", without=("StringIds", "NVTX_EVENTS"))
    run(
        path,
        f"CREATE VIEW StringIds AS {ENDLESS}",
        f"CREATE VIEW NVTX_EVENTS AS SELECT id AS start, id AS end, 59 AS eventType, value AS text FROM ({ENDLESS})",
    )
    before_s = time.process_time()
    said = summarise_export(path)
    assert time.process_time() - before_s < 5
    assert said.nvtx == []
    assert [call.name for call in said.api] == ["0", "1", "2"]


def test_a_virtual_table_and_a_computed_column_are_not_evaluated(tmp_path):
    path = write_export(tmp_path / "a.sqlite", without=("StringIds", "NVTX_EVENTS"))
    run(
        path,
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT AS (hex(zeroblob(400000000))) VIRTUAL)",
        "CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(start, text)",
    )
    with Export(path) as export:
        assert export.columns["StringIds"] == {"id"}
        assert "NVTX_EVENTS" not in export.columns
    assert [call.name for call in summarise_export(path).api] == ["0", "1", "2"]


def test_text_in_the_place_of_a_returned_number_is_not_repeated(tmp_path):
    path = write_export(tmp_path / "a.sqlite", without=("CUPTI_ACTIVITY_KIND_RUNTIME",))
    run(
        path,
        'CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", nameId, returnValue)',
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 0, char(27) || ']0;title')",
    )
    assert [failure.said for failure in timeline.timeline_of_export(path).failures] == ["returned 0"]


def test_triggers_and_writes_cannot_happen(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    run(path, "CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM NVTX_EVENTS; END")
    with Export(path) as export:
        for statement in (
            "INSERT INTO StringIds VALUES (77, 'x')",
            "ATTACH DATABASE ':memory:' AS other",
            "PRAGMA writable_schema = ON",
            "CREATE TABLE x (y)",
        ):
            with pytest.raises(ExportError):
                list(export.rows(statement))
        assert len(list(export.rows("SELECT * FROM NVTX_EVENTS"))) == 9


def test_an_enormous_schema_is_read_or_stopped_by_the_clock(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.executemany(
        "INSERT INTO sqlite_master VALUES ('view', ?, ?, 0, ?)",
        ((f"v{i}", f"v{i}", f"CREATE VIEW v{i} AS SELECT 1") for i in range(20_000)),
    )
    connection.commit()
    connection.close()
    assert len(summarise_export(path).api) == 3
    export = Export(path, seconds=0.05 - path.stat().st_size / BYTES_PER_SECOND)
    with pytest.raises(ExportError, match="takes longer than"):
        export.__enter__()


def looped(path):
    """An export whose calls lie below twenty pages, each of which names the next one forty times."""
    page_bytes, depth, width = 512, 14, 40
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA page_size = {page_bytes}")
    connection.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, nameId INTEGER, returnValue INTEGER)"
    )
    connection.execute("CREATE TABLE spare (x BLOB)")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 3, 2)")
    connection.execute("INSERT INTO spare VALUES (zeroblob(20000))")
    connection.commit()
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name LIKE 'CUPTI%'").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    pages = [root, *range(len(data) // page_bytes - depth - 1, len(data) // page_bytes - 1)]
    leaf = data[(root - 1) * page_bytes : root * page_bytes]
    data[(pages[-1] - 1) * page_bytes : pages[-1] * page_bytes] = leaf
    for page, child in itertools.pairwise(pages):
        cells = b"".join(child.to_bytes(4, "big") + bytes([index + 1]) for index in range(width))
        start = page_bytes - len(cells)
        pointers = b"".join((start + 5 * index).to_bytes(2, "big") for index in range(width))
        header = (
            bytes([5, 0, 0]) + width.to_bytes(2, "big") + start.to_bytes(2, "big") + b"\0" + child.to_bytes(4, "big")
        )
        content = (header + pointers).ljust(start, b"\0") + cells
        data[(page - 1) * page_bytes : page * page_bytes] = content
    path.write_bytes(data)
    return path


def test_pages_that_multiply_without_end_are_stopped_by_the_clock(tmp_path):
    path = looped(tmp_path / "a.sqlite")
    with Export(path, seconds=0.3) as export, pytest.raises(ExportError, match="takes longer than"):
        list(export.rows("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME"))
    with Export(path, seconds=60) as export, pytest.raises(ExportError, match="more rows than it has room for"):
        list(export.rows("SELECT start FROM CUPTI_ACTIVITY_KIND_RUNTIME"))


def test_a_file_of_holes_gets_no_more_time_and_no_more_rows_than_what_is_stored_of_it(tmp_path):
    path = looped(tmp_path / "a.sqlite")
    whole = Export(path)
    os.truncate(path, 2 << 30)
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("no files with holes here")
    holed = Export(path)
    assert holed.limit_s < whole.limit_s + 1
    assert holed.most_rows < 2 * whole.most_rows
    path.write_bytes(write_export(tmp_path / "b.sqlite").read_bytes())
    os.truncate(path, 2 << 30)
    assert summarise_export(path) == summarise_export(tmp_path / "b.sqlite")


def mutate(data, rng):
    """A few small accidents, or one large one."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16, 64))):
        at = rng.randrange(len(out))
        match rng.randrange(6):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice((0, 1, 2, 5, 10, 13, 127, 128, 255))
            case 2:  # somewhere in a page's header, where the tree is held together
                out[min(at // 512 * 512 + rng.randrange(16), len(out) - 1)] = rng.randrange(256)
            case 3:
                size = rng.choice((1, 4, 64, 512))
                source = rng.randrange(len(out))
                piece = out[source : source + size]
                out[at : at + len(piece)] = piece
            case 4:
                out[at : at + 8] = rng.randbytes(min(8, len(out) - at))
            case 5:
                if rng.random() < 0.1:
                    del out[at:]
                    out = out or bytearray(b"S")
    return bytes(out)


def use(path):
    """Everything a user does with a file; returns what came of it."""
    outcome = "read"
    for read in (summarise_export, timeline.timeline_of_export):
        try:
            read(path)
        except ExportError as error:
            assert str(error)
            assert "\n" not in str(error), str(error)
            outcome = "refused"
    return outcome


def seeds(folder):
    files = [write_export(folder / f"{number}.sqlite", schema) for number, schema in enumerate(SCHEMAS)]
    small = folder / "small.sqlite"
    connection = sqlite3.connect(small)
    connection.execute("PRAGMA page_size = 512")
    connection.commit()
    connection.executescript("\n".join(sqlite3.connect(files[2]).iterdump()))
    connection.close()
    return [path.read_bytes() for path in [*files, small] + ([recorded()] if recorded() else [])]


def test_damaged_files_are_read_or_refused(tmp_path):
    files, rng = seeds(tmp_path), random.Random(6)
    path, outcomes = tmp_path / "mutated.sqlite", Counter()
    for number in range(600):
        path.write_bytes(mutate(files[number % len(files)], rng))
        outcomes[use(path)] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 50, outcomes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        files, rng = seeds(Path(name)), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
        path, total, slowest, start = Path(name) / "mutated.sqlite", Counter(), 0.0, time.perf_counter()
        for number in range(int(sys.argv[1])):
            path.write_bytes(mutate(files[number % len(files)], rng))
            before = time.perf_counter()
            total[use(path)] += 1
            slowest = max(slowest, time.perf_counter() - before)
        print(f"{sys.argv[1]} inputs in {time.perf_counter() - start:.0f} s, slowest {slowest:.2f} s: {dict(total)}")
