"""The flight recorder: runs beside a program, and writes when memory runs out."""

import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlab.memory.nvml import Sampler, sources_here
from kvlab.printable import printable
from kvlab.recorder.failure import Failure, Told
from kvlab.recorder.shortage import chain, is_from_allocator, is_out_of_memory

KEEP_S = 60.0
INTERVAL_S = 0.1
MOST_CAUGHT = 5
"""Failures that the program itself catches are kept up to this number, the one that leaves the block always."""
HANGS_S = 5.0
ROOM_BYTES = 8 << 20
"""Memory set aside at the start and given back at the failure, so that there is some to write with."""

log = logging.getLogger(__name__)


def flight_recorder(folder: str | Path, *, kv_bytes: Callable[[], int] | None = None) -> "FlightRecorder":
    """A recorder to run a program in: ``with flight_recorder("evidence"): serve()``.

    When the program runs out of memory, a new folder below ``folder`` gets the message with its diagnosis, the
    ledger, the allocator's snapshot and counters (CUDA), the last minute of samples, and an ``index.html`` that
    shows them. The exception goes on as it was. ``kv_bytes`` is called at that moment for the ledger's first
    account, the bytes of the cache by arithmetic; on CUDA that is inside the failing allocation, so it must not wait
    for a lock.
    """
    return FlightRecorder(folder, kv_bytes)


class FlightRecorder:
    """See :func:`flight_recorder`. ``kept`` are the folders written so far.

    On CUDA the state is taken when the allocator is about to raise, before anything is unwound; it is there even
    if the program catches the exception. Elsewhere it is taken when the exception leaves the block, while its
    traceback still holds the frames. Whatever fails in the recorder is one line on standard error, once.

    Blocks of one recorder may overlap, as those of threads do: it begins with the first and ends with the last.
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
        self._open_blocks = 0
        self._renew_locks()

    def _renew_locks(self) -> None:
        self._begins_or_ends = threading.RLock()
        self._writes = threading.RLock()

    def __enter__(self) -> "FlightRecorder":
        with self._begins_or_ends:
            self._open_blocks += 1
            _handled.set((*_handled.get(), id(sys.exception())))
            try:
                if self._open_blocks == 1:
                    self._attempt(self._make_folder, self._set_room_aside, self._start_sampling, self._observe)
            except BaseException:  # Ctrl-C, for one
                self._end_block()
                raise
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            if error is not None:
                self._attempt(self._give_room_back, partial(self._look_at, error, _handled.get()[-1:]))
        finally:
            with self._begins_or_ends:
                self._end_block()

    def _end_block(self) -> None:
        _handled.set(_handled.get()[:-1])
        self._open_blocks -= 1
        if not self._open_blocks:
            self._attempt(self._stop_observing, self._stop_sampling, self._give_room_back)

    def _attempt(self, *actions: Callable[[], None]) -> None:
        for action in actions:
            try:
                action()
            except Exception as error:
                self._complain(error)

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
        self._attempt(partial(self._keep_caught, told))

    def _keep_caught(self, told: Told) -> None:
        with self._writing() as may:
            if not may:
                return
            self._caught = None
            if len(self.kept) < MOST_CAUGHT:
                self._caught = self._new_failure()
                self._caught.keep_state(self._sampler, self._kv_bytes, told)
                self._finish(self._caught)

    def _look_at(self, error: BaseException, handled_before: tuple[int, ...]) -> None:
        """Keep the failure that leaves the block, if it came of too little memory."""
        parts = list(chain(error, handled_before))
        shortage = next(filter(is_out_of_memory, parts), None)
        if shortage is None:
            return
        with self._writing() as may:
            if not may:
                return
            failure, self._caught = self._caught, None
            if failure is None or not any(map(is_from_allocator, parts)):
                failure = self._new_failure()
                failure.keep_state(self._sampler, self._kv_bytes, None)
            failure.keep_message(error, shortage)
            self._finish(failure)

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Whether a failure may be written now: not one of the recorder's own, and one at a time.

        The writer calls ``kv_bytes``, which may wait for a lock that another failing thread holds: so that thread does
        not wait here for ever.
        """
        if not self._writes.acquire(timeout=HANGS_S):
            raise TimeoutError(f"another failure is still being written after {HANGS_S:g} s; this one is not kept")
        try:
            may, self._is_writing = not self._is_writing, True
            yield may
        finally:
            self._is_writing = not may
            self._writes.release()

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


_handled: ContextVar[tuple[int, ...]] = ContextVar("handled", default=())
"""What was being handled when each open block of this thread or task began. The id alone: an exception that is kept
keeps what its frames hold."""

_recorders: list[FlightRecorder] = []


def _after_fork_in_child() -> None:
    """The threads that held locks are not there any more."""
    for recorder in _recorders:
        recorder._renew_locks()
        recorder._is_writing = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

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
