"""The flight recorder: runs beside a program, and writes when memory runs out."""

import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlab.memory.nvml import Sampler, sources_here
from kvlab.memory.oom import diagnose
from kvlab.printable import printable
from kvlab.recorder.failure import Failure, Told

KEEP_S = 60.0
INTERVAL_S = 0.1
MOST_CAUGHT = 5
"""Failures that the program itself catches are kept up to this number, the one that leaves the block always."""
ROOM_BYTES = 8 << 20
"""Memory set aside at the start and given back at the failure, so that there is some to write with."""

log = logging.getLogger(__name__)


def flight_recorder(folder: str | Path, *, kv_bytes: Callable[[], int] | None = None) -> "FlightRecorder":
    """A recorder to run a program in: ``with flight_recorder("evidence"): serve()``.

    When the program runs out of memory, a new folder below ``folder`` gets the message with its diagnosis, the
    ledger, the allocator's snapshot and counters (CUDA), the last minute of samples, and an ``index.html`` that
    shows them. The exception goes on as it was. ``kv_bytes`` is called at that moment for the ledger's first
    account, the bytes of the cache by arithmetic.
    """
    return FlightRecorder(folder, kv_bytes)


class FlightRecorder:
    """See :func:`flight_recorder`. ``kept`` are the folders written so far.

    On CUDA the state is taken when the allocator is about to raise, before anything is unwound; it is there even
    if the program catches the exception. Elsewhere it is taken when the exception leaves the block, while its
    traceback still holds the frames. Whatever fails in the recorder is one line on standard error, once.
    """

    def __init__(self, folder: str | Path, kv_bytes: Callable[[], int] | None = None) -> None:
        self.folder = Path(folder)
        self.kept: list[Path] = []
        self._kv_bytes = kv_bytes
        self._sampler: Sampler | None = None
        self._room: mmap.mmap | None = None
        self._caught: Failure | None = None
        self._complained = False
        self._is_writing = False
        self._lock = threading.RLock()

    def __enter__(self) -> "FlightRecorder":
        for begin in (self._make_folder, self._set_room_aside, self._start_sampling, self._observe):
            try:
                begin()
            except Exception as error:
                self._complain(error)
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            shortage = next(filter(is_out_of_memory, chain(error)), None) if error is not None else None
            if shortage is not None:
                self._give_room_back()
                self._keep(error, shortage)
        except Exception as own:
            self._complain(own)
        for end in (self._stop_observing, self._stop_sampling, self._give_room_back):
            try:
                end()
            except Exception as own:
                self._complain(own)

    @property
    def cpu_s(self) -> float:
        """Processor time that sampling has cost since the block began."""
        return self._sampler.cpu_s if self._sampler is not None else 0.0

    def mark(self, name: str) -> None:
        """Note an event of the program, to be found again among the samples."""
        if self._sampler is not None:
            self._sampler.mark(name)

    def _make_folder(self) -> None:
        self.folder = self.folder.absolute()  # the program may go to another folder before it fails
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(13, os.strerror(13), str(self.folder))

    def _set_room_aside(self) -> None:
        self._room = mmap.mmap(-1, ROOM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _give_room_back(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None

    def _start_sampling(self) -> None:
        self._sampler = Sampler(sources_here(pid=os.getpid()), interval_s=INTERVAL_S, keep_s=KEEP_S)
        self._sampler.start()

    def _stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def _observe(self) -> None:
        _attach_once()
        _recorders.append(self)

    def _stop_observing(self) -> None:
        if self in _recorders:
            _recorders.remove(self)

    def about_to_raise(self, told: Told) -> None:
        """PyTorch's allocator has found no memory on a CUDA device and will raise."""
        with self._lock:
            if self._is_writing:  # what the recorder itself asks for was refused
                return
            self._is_writing = True
            try:
                self._caught = None
                if len(self.kept) < MOST_CAUGHT:
                    self._caught = self._new_failure()
                    self._caught.keep_state(self._sampler, self._kv_bytes, told)
                    self._finish(self._caught)
            except Exception as error:
                self._complain(error)
            finally:
                self._is_writing = False

    def _keep(self, error: BaseException, shortage: BaseException) -> None:
        """Keep the failure that leaves the block; ``shortage`` is the part of its chain that ran out of memory."""
        with self._lock:
            failure, self._caught = self._caught, None
            if failure is None or not any(map(_is_from_allocator, chain(error))):
                failure = self._new_failure()
                self._is_writing = True
                try:
                    failure.keep_state(self._sampler, self._kv_bytes, None)
                finally:
                    self._is_writing = False
            failure.keep_message(error, shortage)
            self._finish(failure)

    def _new_failure(self) -> Failure:
        failure = Failure.in_new_folder(self.folder)
        self.kept.append(failure.folder)
        return failure

    def _finish(self, failure: Failure) -> None:
        failure.write_index()
        if failure.lost:
            self._complain(f"{failure.folder} lacks " + "; ".join(f"{k} ({v})" for k, v in failure.lost.items()))
        log.info("out of memory; what was kept: %s", failure.folder)

    def _complain(self, what: object) -> None:
        """Say once, in one line, that the recorder cannot do its work."""
        if self._complained or sys.stderr is None:  # print would take standard output for None
            return
        self._complained = True
        try:
            text = f"{type(what).__name__}: {what}" if isinstance(what, BaseException) else str(what)
            line = printable(" ".join(text.split())[:500])
            print(f"kvlab flight recorder: {line}", file=sys.stderr, flush=True)
        except Exception:  # standard error may be closed, full or gone
            pass


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, those it came from, and those in its groups, each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        context = None if one.__suppress_context__ else one.__context__
        waiting += [each for each in (one.__cause__, context) if each is not None]
        if isinstance(one, BaseExceptionGroup):  # others may have an attribute of this name too
            waiting += one.exceptions


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this one exception says that memory ran out, by its type or by its message."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    try:
        text = str(error)
    except Exception:  # an exception that cannot say what it is
        return False
    return diagnose(f"{type(error).__name__}: {text}").is_oom is True


def _is_from_allocator(error: BaseException) -> bool:
    """Whether it is of the type that PyTorch's observers are told of beforehand."""
    torch = sys.modules.get("torch")
    return bool(torch) and isinstance(error, torch.OutOfMemoryError)


_recorders: list[FlightRecorder] = []
_attached = False


def _attach_once() -> None:
    """Have PyTorch call ``_tell``. There is no way to detach it again, so it is attached once for all recorders.

    ``torch.cuda._lazy_call`` runs it now if CUDA is in use and else when it first is: a recorder creates no context.
    """
    global _attached
    torch = sys.modules.get("torch")
    attach = torch and getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach and not _attached:
        torch.cuda._lazy_call(partial(_attach, attach))
        _attached = True


def _attach(attach: Callable[[Any], None]) -> None:
    try:
        attach(_tell)
    except Exception:  # or it would break the program's first use of CUDA
        log.info("PyTorch's out-of-memory observer could not be attached", exc_info=True)


def _tell(device: int, tried_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """PyTorch's observer, called without the allocator's lock: who runs now is told, innermost first."""
    told = Told(device, tried_bytes, total_bytes, free_bytes)
    for recorder in reversed(_recorders):
        recorder.about_to_raise(told)
