"""A sampler: looks at fixed moments, in a thread of its own, and keeps what it saw in memory and in a file."""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from kvlab.errors import KvlabError
from kvlab.memory.nvml.cards import GpuSource
from kvlab.memory.nvml.file import SampleWriter
from kvlab.memory.nvml.process import ProcessSource
from kvlab.memory.nvml.readings import Mark, Notice, NvmlError, ProcessUnreadable, Sample

SHORTEST_INTERVAL_S = 0.02
LONGEST_INTERVAL_S = 1.0
HANGS_S = 5.0


class IntervalError(KvlabError, ValueError):
    """The interval is no number of seconds between SHORTEST_INTERVAL_S and LONGEST_INTERVAL_S."""


@dataclass
class Sources:
    """What is sampled: cards, a process, or both. ``notices`` are the lines that were not said yet."""

    gpus: GpuSource | None = None
    process: ProcessSource | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return bool(self.process or (self.gpus and self.gpus.cards))

    def read(self, t_s: float) -> Sample:
        """One sample of what still answers; what does not is dropped with a notice."""
        cards = self.gpus.read(t_s) if self.gpus else ()
        process = None
        if self.process:
            try:
                process = self.process.read()
            except ProcessUnreadable as error:
                self.process.close()
                self.process = None
                self.notices.append(str(error))
        return Sample(t_s, cards, process)

    def take_notices(self) -> list[str]:
        """The notices since the last call."""
        found, self.notices = self.notices, []
        if self.gpus:
            found += self.gpus.notices
            self.gpus.notices = []
        return found

    def describe(self) -> list[str]:
        """One line for each source: which card by which call, which process."""
        cards = self.gpus.cards if self.gpus else ()
        lines = [f"GPU {card.key}: {card.name or 'unnamed'} (memory by NVML {card.api})" for card in cards]
        if self.process:
            lines.append(f"process {self.process.pid}: resident memory, from /proc")
        return lines

    def close(self) -> None:
        for source in (self.gpus, self.process):
            if source:
                source.close()


def sources_here(*, gpus: Sequence[str] | None = None, pid: int | None = None) -> Sources:
    """The cards of this machine, or this process where there are none, with a notice that says so.

    ``gpus`` names cards and then nothing else will do; ``pid`` samples that process too. Raises NvmlError for
    named cards that cannot be read and ProcessUnreadable for the process.
    """
    sources = Sources(process=None if pid is None else ProcessSource(pid))
    try:
        sources.gpus = GpuSource(gpus)
    except NvmlError as error:
        if gpus is not None:
            sources.close()
            raise
        if sources.process is None:
            sources.process = ProcessSource()
        sources.notices.append(f"{error}; sampling process {sources.process.pid} instead")
    return sources


def checked_interval(interval_s: float) -> float:
    if not SHORTEST_INTERVAL_S <= interval_s <= LONGEST_INTERVAL_S:
        raise IntervalError(
            f"an interval of {interval_s:g} s is out of range: {SHORTEST_INTERVAL_S:g} to {LONGEST_INTERVAL_S:g} s"
        )
    return interval_s


class StopRequest:
    """Ends ``follow``; a signal handler may make it, at any moment.

    ``threading.Event`` may not: its ``set`` takes a lock that the wait it interrupts may be holding, and then both
    wait for ever. ``SimpleQueue.put`` is reentrant.
    """

    def __init__(self) -> None:
        self._made = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def make(self) -> None:
        self._made = True
        self._wake.put(None)

    @property
    def is_made(self) -> bool:
        return self._made

    def wait(self, timeout_s: float) -> None:
        """Until it is made or the time is up; for one waiter."""
        with contextlib.suppress(Empty):
            if not self._made:
                self._wake.get(timeout=max(0.0, timeout_s))


def follow(
    sources: Sources, interval_s: float, stop: StopRequest, duration_s: float = math.inf
) -> Iterator[Sample | Notice]:
    """Samples at multiples of ``interval_s`` until ``stop`` is made, time is up or no source is left.

    A moment that was slept through is left out, not made up for: ``t_s`` says when a sample was taken.
    """
    began_s = time.monotonic()
    due_s = 0.0
    while not stop.is_made:
        t_s = time.monotonic() - began_s
        sample = sources.read(t_s)
        if sample.cards or sample.process:
            yield sample
        for message in sources.take_notices():
            yield Notice(t_s, message)
        if not sources.is_alive:
            return
        due_s = max(due_s + interval_s, math.floor((time.monotonic() - began_s) / interval_s) * interval_s)
        if due_s > duration_s:
            stop.wait(began_s + duration_s - time.monotonic())
            return
        stop.wait(began_s + due_s - time.monotonic())


class Sampler:
    """Samples in a thread of its own while the block runs.

    ``samples``, ``marks`` and ``notices`` are what was seen; only the last ``keep_s`` seconds of them, all by
    default. ``path`` also keeps them in a file of JSON lines, for ``read_samples``. Nothing that goes wrong
    while it samples reaches the program: it becomes a notice. ``cpu_s_per_sample`` is what a sample has cost
    in time of this thread. A forked child has no such thread: there nothing is sampled, written or waited for.
    """

    def __init__(
        self,
        sources: Sources | None = None,
        *,
        interval_s: float = 0.1,
        path: str | Path | None = None,
        keep_s: float = math.inf,
    ) -> None:
        self.interval_s = checked_interval(interval_s)
        kept = None if math.isinf(keep_s) else math.ceil(keep_s / interval_s)
        self.samples: deque[Sample] = deque(maxlen=kept)
        self.marks: deque[Mark] = deque(maxlen=kept)
        self.notices: deque[Notice] = deque(maxlen=kept)
        self.taken = 0
        self.cpu_s = 0.0
        self.sources = sources or sources_here()
        self._writer = SampleWriter(path) if path else None
        self._pid = os.getpid()
        self._stop = StopRequest()
        self._thread = threading.Thread(target=self._run, name="kvlab-sampler", daemon=True)
        self._began_s = time.monotonic()

    @property
    def cpu_s_per_sample(self) -> float:
        return self.cpu_s / self.taken if self.taken else 0.0

    def __enter__(self) -> "Sampler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        if self._writer:
            self._writer.start(self.interval_s, self.sources.describe())
        self._began_s, self._pid = time.monotonic(), os.getpid()
        self._thread.start()

    def stop(self) -> None:
        """End the sampling and close its file; a second call does nothing.

        A driver or a disk that hangs does not hang the program: the thread is left behind after ``HANGS_S``.
        """
        if self._is_in_forked_child:
            return
        self._stop.make()
        if self._thread.ident is not None:
            self._thread.join(HANGS_S)
        if self._writer and not self._thread.is_alive():
            self._writer.close()

    def mark(self, name: str) -> None:
        """Note an event of the program, now."""
        mark = Mark(time.monotonic() - self._began_s, name)
        self.marks.append(mark)
        self._write(mark)

    @property
    def _is_in_forked_child(self) -> bool:
        """Where the file is the parent's, and its lock may be held by a thread that is not there."""
        return os.getpid() != self._pid

    def _run(self) -> None:
        try:
            for entry in follow(self.sources, self.interval_s, self._stop):
                if isinstance(entry, Sample):
                    self.samples.append(entry)
                    self.taken += 1
                else:
                    self.notices.append(entry)
                self._write(entry)
                self.cpu_s = time.thread_time()
        except Exception as error:  # whatever it is, it is not the program's
            self.notices.append(Notice(time.monotonic() - self._began_s, f"sampling ended: {error!r:.200}"))
        finally:
            self.sources.close()

    def _write(self, entry: Sample | Mark | Notice) -> None:
        if not self._writer or self._is_in_forked_child:
            return
        try:
            self._writer.write(entry)
        except OSError as error:
            self.notices.append(Notice(entry.t_s, f"the samples are no longer written: {error.strerror}"))
