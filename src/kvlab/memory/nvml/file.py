"""Samples as JSON lines: one object a line, its ``kind`` start, sample, mark or notice."""

import json
import threading
import time
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.memory.nvml.readings import CardReading, Mark, Notice, ProcessReading, ProcessUse, Sample


class SampleFileError(KvlabError, ValueError):
    """The file cannot be read as samples."""


class SampleWriter:
    """Writes entries into a file line by line, so that what was written is whole whenever the program dies.

    Without a buffer: a forked child would write what lies in it once more.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: FileIO = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by close)
        self._lock = threading.Lock()

    def start(self, interval_s: float, sources: list[str]) -> None:
        self._line(start_line(interval_s, sources))

    def write(self, entry: Sample | Mark | Notice) -> None:
        self._line(line_of(entry))

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _line(self, text: str) -> None:
        """Nothing once the file is closed, as it is after a failure: behind a line that was cut there is no other."""
        line = memoryview(f"{text}\n".encode())
        with self._lock:
            if self._file.closed:
                return
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.close()
                raise


def start_line(interval_s: float, sources: list[str]) -> str:
    """The first line: when ``t_s`` was 0, how often is sampled, and what."""
    return json.dumps({"kind": "start", "unix_s": time.time(), "interval_s": interval_s, "sources": sources})


def line_of(entry: Sample | Mark | Notice) -> str:
    """One entry as a JSON object without a line break. Seconds are rounded to 10 microseconds."""
    return json.dumps({"kind": type(entry).__name__.lower()} | _plain(entry) | {"t_s": round(entry.t_s, 5)})


def _plain(record: Any) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in record._asdict().items()}


def _plain_value(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return _plain(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@dataclass
class Recording:
    """A file of samples, read back."""

    unix_s: float | None = None
    interval_s: float | None = None
    sources: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def read_samples(path: str | Path) -> Recording:
    """Read a file of samples; a last line that was cut short, as by a full disk, is left out.

    Raises SampleFileError for any other line that is no entry, and for a file that cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SampleFileError(f"{path} is not a file of samples: {error}") from None
    recording = Recording()
    for number, line in enumerate(lines, start=1):
        try:
            _take(recording, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise SampleFileError(f"{path}, line {number} is no sample: {error!r:.100}") from None
    return recording


def _take(recording: Recording, entry: dict[str, Any]) -> None:
    kind = entry.pop("kind")
    if kind == "start":
        recording.unix_s, recording.interval_s = entry["unix_s"], entry["interval_s"]
        recording.sources = entry["sources"]
    elif kind == "sample":
        recording.samples.append(_sample(**entry))
    elif kind == "mark":
        recording.marks.append(Mark(**entry))
    elif kind == "notice":
        recording.notices.append(Notice(**entry))
    else:
        raise ValueError(f"unknown kind {kind!r:.40}")


def _sample(t_s: float, cards: list[dict], process: dict | None) -> Sample:
    return Sample(t_s, tuple(_card(**card) for card in cards), ProcessReading(**process) if process else None)


def _card(processes: list[dict] | None = None, **rest: Any) -> CardReading:
    return CardReading(processes=None if processes is None else tuple(ProcessUse(**p) for p in processes), **rest)
