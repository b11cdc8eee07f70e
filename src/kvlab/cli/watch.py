"""``kvlab watch``: what a card or a process holds, live or as JSON lines."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table

from kvlab.cli.base import app
from kvlab.errors import KvlabError
from kvlab.printable import printable

if TYPE_CHECKING:
    from kvlab.memory.nvml import CardReading, Mark, Notice, Sample, Sources, StopRequest

    Entry = Sample | Mark | Notice

_MIB = 2**20
_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 60
_REFRESH_S = 0.1
_SAME_SIGNAL_S = 0.5


@app.command()
def watch(
    interval: Annotated[float, typer.Option(help="Seconds between samples, 0.02 to 1.")] = 0.1,
    duration: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="A card: 0, a MIG instance 0:1, a UUID. Repeatable.")] = None,
    pid: Annotated[int | None, typer.Option(help="Sample this process too: its resident memory.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the samples into this file, as JSON lines.")] = None,
    json_lines: Annotated[bool, typer.Option("--json-lines", help="Print one JSON object a line.")] = False,
) -> None:
    """Watch memory while something runs.

    That of the cards, or of a process where there is no card.

    Ctrl-C, SIGTERM, SIGHUP, --duration and the end of the process end it in order, with status 0; the loss of every
    card with 1.
    """
    with _stopped_by_signals() as stop:
        from kvlab.memory.nvml import follow, sources_here
        from kvlab.memory.nvml.sampler import checked_interval

        checked_interval(interval)
        if duration is not None and not 0 < duration < math.inf:
            raise KvlabError(f"a duration of {duration:g} s is no length of time: pass seconds above 0")
        sources = sources_here(gpus=gpu, pid=pid)
        is_terminal = sys.stdout.isatty()
        views = [_JsonLines() if json_lines else _Screen() if is_terminal and _redraws() else _Lines()]
        try:
            views += [_SampleFile(out)] if out else []
            with ExitStack() as ends:
                for view in views:
                    ends.callback(view.end)
                    view.begin(interval, sources)
                for entry in follow(sources, interval, stop, math.inf if duration is None else duration):
                    for view in views:
                        view.add(entry)
        except OSError as error:
            # The reader had enough, as `head` does, or the terminal was closed.
            if error.errno != errno.EPIPE and not (error.errno == errno.EIO and is_terminal):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        finally:
            sources.close()
    if sources.gpus and not sources.gpus.cards:
        raise typer.Exit(1)


@contextmanager
def _stopped_by_signals() -> Iterator[StopRequest]:
    """A request that SIGINT, SIGTERM and SIGHUP make; a later signal also ends what is not looking at it.

    timeout(1) and terminals send one signal twice, to the process and to its group. A signal that is ignored, as
    SIGHUP under nohup, stays so.
    """
    from kvlab.memory.nvml import StopRequest

    stop = StopRequest()
    first_s = math.inf

    def ask(number: int, frame: Any) -> None:
        nonlocal first_s
        if time.monotonic() - first_s > _SAME_SIGNAL_S:
            raise KeyboardInterrupt
        first_s = min(first_s, time.monotonic())
        stop.make()

    there = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    former = {number: signal.signal(number, ask) for number in there if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _notify(message: str) -> None:
    with suppress(OSError):  # standard error may be full or gone, and its lines are not what is watched
        print(f"kvlab watch: {printable(message)}", file=sys.stderr, flush=True)


def _redraws() -> bool:
    """Whether the terminal goes up again to draw anew; on others, as that of Emacs, Live is silent until its end."""
    console = Console()
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


class _Lines:
    """A line of text a sample, for a pipe and for a terminal that cannot redraw."""

    def begin(self, interval_s: float, sources: Sources) -> None:
        for line in sources.describe():
            print(line)

    def add(self, entry: Entry) -> None:
        if hasattr(entry, "message"):
            sys.stdout.flush()
            _notify(entry.message)
            return
        parts = [f"GPU {card.card} {_memory(card)}, {_busy(card)}" for card in entry.cards]
        if entry.process:
            parts.append(f"process {entry.process.pid} {_resident(entry)}")
        print(f"{entry.t_s:9.2f} s  {'; '.join(parts)}", flush=True)

    def end(self) -> None:
        pass


class _JsonLines:
    """A JSON object a line, for a program; a notice goes to standard error as well."""

    def begin(self, interval_s: float, sources: Sources) -> None:
        from kvlab.memory.nvml.file import start_line

        print(start_line(interval_s, sources.describe()), flush=True)

    def add(self, entry: Entry) -> None:
        from kvlab.memory.nvml.file import line_of

        print(line_of(entry), flush=True)
        if hasattr(entry, "message"):
            _notify(entry.message)

    def end(self) -> None:
        pass


class _SampleFile:
    """The samples in a file, for ``read_samples``."""

    def __init__(self, path: Path) -> None:
        from kvlab.memory.nvml.file import SampleWriter

        self._path = path
        self._writer = SampleWriter(path)

    def begin(self, interval_s: float, sources: Sources) -> None:
        with self._named():
            self._writer.start(interval_s, sources.describe())

    def add(self, entry: Entry) -> None:
        with self._named():
            self._writer.write(entry)

    def end(self) -> None:
        self._writer.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvlabError(f"{self._path} can no longer be written: {error.strerror}") from None


class _Screen:
    """A table that stays in its place on a terminal, with the last samples as bars."""

    def __init__(self) -> None:
        self._live = Live(console=Console(markup=False, highlight=False), auto_refresh=False, transient=False)
        self._history: dict[str, deque[int]] = {}
        self._peaks: dict[str, int] = {}
        self._notices: list[str] = []
        self._drawn_s = -math.inf

    def begin(self, interval_s: float, sources: Sources) -> None:
        self._live.start()

    def add(self, entry: Entry) -> None:
        if hasattr(entry, "message"):
            self._notices.append(entry.message)
            self._live.refresh()
            return
        for card in entry.cards:
            self._keep(f"GPU {card.card}", card.used_bytes)
        if entry.process:
            self._keep(f"process {entry.process.pid}", entry.process.resident_bytes)
        if entry.t_s - self._drawn_s >= _REFRESH_S:
            if not sys.stdout.isatty():  # Live would keep silent from here on
                raise BrokenPipeError(errno.EPIPE, "the terminal was closed")
            self._drawn_s = entry.t_s
            self._live.update(self._table(entry), refresh=True)

    def end(self) -> None:
        self._live.stop()

    def _keep(self, name: str, size: int | None) -> None:
        if size is not None:
            self._history.setdefault(name, deque(maxlen=_BARS_SHOWN)).append(size)
            self._peaks[name] = max(size, self._peaks.get(name, 0))

    def _table(self, sample: Sample) -> Group:
        table = Table("watched", "now", Column("most seen", justify="right"), "last samples")
        for card in sample.cards:
            self._row(table, f"GPU {card.card}", f"{_memory(card)}, {_busy(card)}")
            for process in card.processes or ():
                table.add_row(f"  pid {process.pid}", _mib(process.used_bytes), "", printable(process.name or ""))
        if sample.process:
            self._row(table, f"process {sample.process.pid}", _resident(sample))
        return Group(table, f"{sample.t_s:.1f} s", *self._notices)

    def _row(self, table: Table, name: str, now: str) -> None:
        table.add_row(name, now, _mib(self._peaks.get(name)), _bars(self._history.get(name, ())))


def _memory(card: CardReading) -> str:
    kept = "" if card.reserved_bytes is None else f", {_mib(card.reserved_bytes)} kept by the driver"
    return f"{_mib(card.used_bytes)} of {_mib(card.total_bytes)} used{kept} ({card.api})"


def _busy(card: CardReading) -> str:
    return "utilisation not told" if card.gpu_utilisation is None else f"busy {card.gpu_utilisation:.0%}"


def _resident(sample: Sample) -> str:
    peak = sample.process.peak_resident_bytes
    return f"{_mib(sample.process.resident_bytes)} resident, {_mib(peak)} at its peak"


def _mib(size: int | None) -> str:
    return "not told" if size is None else f"{size / _MIB:,.0f} MiB"


def _bars(sizes: Any) -> str:
    """Sizes as bars from 0 to the largest."""
    top = max(sizes, default=0) or 1
    return "".join(_BARS[size * (len(_BARS) - 1) // top] for size in sizes)
