"""Open an nsys export that anyone may have made: unchanged, within a time limit, with nothing in it executed."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.printable import printable

TABLES = (
    "EXPORT_META_DATA",  # its name in schema 3.0
    "META_DATA_EXPORT",
    "StringIds",
    "TARGET_INFO_CUDA_GPU",  # its name early in 2021
    "TARGET_INFO_GPU",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUDA_GPU_MEMORY_USAGE_EVENTS",
    "NVTX_EVENTS",
)
MAGIC = b"SQLite format 3\0"
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
LONGEST_VALUE_BYTES = 1 << 26
LONGEST_NAME = 1 << 16
SMALLEST_ROW_BYTES = 8  # a time alone takes as much
BYTES_PER_SECOND = 4 << 20  # what a slow machine reads with ease; the time limit grows with the file


class ExportError(KvlabError):
    """The file is no export of nsys that can be read; the message says why and what to do."""


class Export:
    """A connection to one export, for a ``with`` statement.

    Only tables of :data:`TABLES` that are stored tables are seen, with the columns that are stored: no view, virtual
    table, generated column, trigger or function of the file is ever evaluated. The file is opened immutable, so that
    SQLite writes nothing to it or beside it. ``columns`` maps each table present to its columns.
    """

    def __init__(self, path: Path | str, *, seconds: float = 10.0):
        self.path = Path(path)
        size_bytes = _check_file(self.path)
        self.most_rows = size_bytes // SMALLEST_ROW_BYTES  # more rows are pages that lead in a circle
        self.limit_s = seconds + size_bytes / BYTES_PER_SECOND
        self.columns: dict[str, frozenset[str]] = {}

    def __enter__(self) -> Export:
        self._stop_at_s = time.monotonic() + self.limit_s
        try:
            self._connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise self._refusal(error) from None
        try:
            self._watch = threading.Timer(self.limit_s, self._connection.interrupt)
            self._watch.daemon = True
            self._watch.start()
            self._harden()
            self.columns = {table: self._stored_columns(table) for table in self._stored_tables()}
            self._connection.set_authorizer(_only_reading)
        except (sqlite3.Error, ExportError) as error:
            self.__exit__()
            raise self._refusal(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.cancel()
        self._watch.join()  # or it could interrupt a connection that is closed
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        """Whether ``table`` is there with all of ``columns``."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def rows(self, query: str, *values: Any) -> Iterator[tuple]:
        """The rows of a query over :data:`TABLES`; ExportError for a damaged file or one that takes too long."""
        try:
            for count, row in enumerate(self._connection.execute(query, values)):
                if count >= self.most_rows:
                    raise ExportError(f"{self.path} is damaged: it gives more rows than it has room for")
                yield row
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise self._refusal(error) from None

    def _harden(self) -> None:
        connection = self._connection
        connection.text_factory = lambda text: text.decode(errors="replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        # The watch interrupts a statement, wherever in SQLite it is; this one also those that begin after it.
        connection.set_progress_handler(lambda: time.monotonic() > self._stop_at_s, 10_000)
        for setting in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {setting}")

    def _stored_tables(self) -> list[str]:
        marks = ", ".join("?" * len(TABLES))
        query = f"SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 AND name IN ({marks})"
        found = sorted(name for (name,) in self.rows(query, *TABLES))
        if not found:
            raise ExportError(f"{self.path} is an SQLite file, but holds no table of an nsys export")
        return found

    def _stored_columns(self, table: str) -> frozenset[str]:
        return frozenset(name for _, name, *_, hidden in self.rows(f"PRAGMA table_xinfo({table})") if hidden == 0)

    def _refusal(self, error: Exception) -> ExportError:
        if isinstance(error, ExportError):
            return error
        if str(error) == "interrupted":
            return ExportError(
                f"{self.path} takes longer than {self.limit_s:.0f} s to read, far more than its size asks"
            )
        said = printable(str(error)[:200], " ")  # SQLite quotes the file in it
        return ExportError(f"{self.path} is damaged, or no export of nsys: {said}")


def _only_reading(action: int, *_: object) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


def _check_file(path: Path) -> int:
    """The bytes stored of what looks like a whole SQLite file; ExportError for anything else."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ExportError(
                f"{path} is {'a folder' if path.is_dir() else 'not a file'}; give an nsys export, FILE.sqlite"
            )
        with path.open("rb") as file:
            header = file.read(100)
            stored_bytes = _stored_bytes(file.fileno(), status.st_size)
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ExportError(f"cannot read {str(path)!r:.200}: {error}") from None
    if not header:
        raise ExportError(f"{path} is empty")
    if path.suffix in REPORTS:
        raise ExportError(f"{path} is a report, not its export: run nsys export --type sqlite {path}")
    if not header.startswith(MAGIC) or len(header) < 100:
        raise ExportError(f"{path} is not an SQLite file; nsys export --type sqlite writes one from a report")
    page_bytes = int.from_bytes(header[16:18], "big")
    whole_bytes = (65_536 if page_bytes == 1 else page_bytes) * int.from_bytes(header[28:32], "big")
    if status.st_size < whole_bytes:
        raise ExportError(f"{path} is truncated: {status.st_size} of {whole_bytes} bytes are there")
    for companion in ("-wal", "-journal"):
        beside = Path(f"{path}{companion}")
        if beside.exists() and os.path.getsize(beside):
            raise ExportError(f"{path} is not finished: {beside.name} beside it holds changes; export it again")
    return stored_bytes


def _stored_bytes(file: int, size_bytes: int) -> int:
    """The size without its holes: a file of a few KiB may claim terabytes, and holds no row more for it."""
    if not hasattr(os, "SEEK_HOLE"):
        return size_bytes
    stored_bytes, end = 0, 0
    while end < size_bytes:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # a hole to the end
            break
        end = os.lseek(file, start, os.SEEK_HOLE)
        stored_bytes += end - start
    return stored_bytes
