"""The process that runs work under a cpu budget: ``python -m kvlab.budget_child DESCRIPTOR BUDGET_BYTES``."""

import ctypes
import mmap
import os
import pickle
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import cloudpickle
import torch

from kvlab.budget import MMAP_THRESHOLD_BYTES, PAGE_BYTES, Failure
from kvlab.device import process_memory
from kvlab.meter import BudgetError, BudgetUnavailable, Meter

T = TypeVar("T")

_PROBE_BYTES = 16 << 20
_LARGE_BYTES = 64 << 20
_SMALL_CHUNK_BYTES = 60_000
_PYTHON_RESERVE_BYTES = 2 << 20

_LIBC = ctypes.CDLL(None)
_LIBC.malloc.argtypes, _LIBC.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_LIBC.free.argtypes = [ctypes.c_void_p]
_LIBC.malloc_trim.argtypes = [ctypes.c_size_t]


class ProcessMeter(Meter):
    """A budget on VmData, the private writable memory of this process, which RLIMIT_DATA limits.

    See setrlimit(2). The records go through ``connection``.
    """

    def __init__(self, budget_bytes: int, connection: Connection) -> None:
        super().__init__(torch.device("cpu"), budget_bytes, self.send)
        self._connection = connection
        self._lock = threading.Lock()
        self._former_soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)

    def send(self, kind: str, content: Any) -> None:
        message = pickle.dumps((kind, content))
        with self._lock:
            self._connection.send_bytes(message)

    def _record(self, kind: str, fields: dict[str, Any]) -> None:
        self._even_when_full(partial(super()._record, kind, fields))

    def _held(self) -> int:
        return self._even_when_full(partial(process_memory, self.device))["data_bytes"]

    def _even_when_full(self, measure: Callable[[], T]) -> T:
        """Measuring needs a few kilobytes itself; where none are left, it gets them outside the budget."""
        try:
            return measure()
        except MemoryError:
            if not self.armed:
                raise
            self._lift()
            try:
                return measure()
            finally:
                self._set_soft_limit(self.base_bytes + self.budget_bytes)

    def _settle(self) -> None:
        self._python_reserve = _reserve_for_python()
        _LIBC.malloc_trim(0)
        _plug_heap(self._held)
        _reserve_small_chunks()
        if not _maps_large_chunks(self._held):
            raise BudgetUnavailable(
                "malloc here does not map large chunks one by one, so memory would not follow tensors; "
                "unset LD_PRELOAD and GLIBC_TUNABLES"
            )

    def _limit(self, limit_bytes: int) -> None:
        if self._hard != resource.RLIM_INFINITY and limit_bytes > self._hard:
            raise BudgetUnavailable(
                f"the budget needs a data limit of {limit_bytes} bytes, but the hard limit is {self._hard}; "
                "raise it (ulimit -Hd) or pass a smaller budget"
            )
        self._set_soft_limit(limit_bytes)
        if _can_map(self.budget_bytes + _PROBE_BYTES):
            self._lift()
            raise BudgetUnavailable(
                "RLIMIT_DATA is not enforced here (a sandbox or a kernel before 4.7); "
                "run this on another Linux machine or on a CUDA device"
            )

    def _lift(self) -> None:
        self._set_soft_limit(self._former_soft)

    def _set_soft_limit(self, soft_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, self._hard))


def _reserve_for_python() -> list[bytes]:
    """Give Python free room for small objects, which it otherwise maps 1 MiB at a time, an arena each.

    Returns one object of each new arena, which keeps the arena as long as it lives.
    """
    objects = [bytes(460) for _ in range(_PYTHON_RESERVE_BYTES // 512)]  # 496 bytes each with their header
    return objects[::2048]


def _plug_heap(held: Callable[[], int]) -> None:
    """Take the free chunks of the heap in which a tensor would find room, so that none is had for nothing.

    malloc searches them before it maps: after loading a tokenizer there are some 10 MB of them. What is taken
    here is never given back.
    """
    size_bytes = _LARGE_BYTES
    while size_bytes >= MMAP_THRESHOLD_BYTES:
        before_bytes = held()
        chunk = _LIBC.malloc(size_bytes)
        if chunk is None or held() - before_bytes >= size_bytes // 2:
            _LIBC.free(chunk)  # it was new memory: no free chunk of this size is left
            size_bytes //= 2


def _reserve_small_chunks() -> None:
    """Leave free chunks for what is no tensor, such as the buffers of a record: else the heap grows by pages.

    They are too small for a tensor that would be mapped; a chunk that stays keeps each apart from the next.
    """
    chunks = [_LIBC.malloc(_SMALL_CHUNK_BYTES) for _ in range(8)]
    for chunk in chunks[::2]:
        _LIBC.free(chunk)


def _maps_large_chunks(held: Callable[[], int]) -> bool:
    """Whether one large chunk costs its pages and gives them back: not so under another malloc."""
    before_bytes = held()
    chunk = _LIBC.malloc(_LARGE_BYTES)
    during_bytes = held()
    _LIBC.free(chunk)
    return (during_bytes - before_bytes, held()) == (_LARGE_BYTES + PAGE_BYTES, before_bytes)


def _can_map(size_bytes: int) -> bool:
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def main(descriptor: int, budget_bytes: int) -> int:
    """Run the pickled call on stdin; its records, and its value or error, go through ``descriptor``."""
    os.set_inheritable(descriptor, False)
    meter = ProcessMeter(budget_bytes, Connection(descriptor, readable=False))
    try:
        work, args, kwargs = _read_call()
        _settle_torch()
        value = work(meter, *args, **kwargs)
        meter.disarm()
        meter.send("value", _pickled(value))
    except BudgetError as error:
        meter.disarm()
        meter.send("misuse", error)
        return 1
    except Exception as error:
        meter.disarm()  # there may be no memory left to report with
        meter.send("error", Failure.of(error, meter))
        traceback.print_exc()
        return 1
    return 0


def _read_call() -> tuple[Any, Any, Any]:
    sys.path[:], call = pickle.load(sys.stdin.buffer)
    try:
        return pickle.loads(call)
    except Exception as error:
        raise BudgetError(
            f"the work cannot be loaded in the child process ({type(error).__name__}: {error}); "
            "define it in the notebook itself or in a module that a fresh Python can import"
        ) from error


def _pickled(value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise BudgetError(f"the result of the work cannot be sent back ({error}); return plain data") from error


def _settle_torch() -> None:
    """Start the thread team before there is a limit: libgomp ends a process that cannot have its threads.

    oneDNN goes off because it keeps objects for each shape that it has seen.
    """
    torch.backends.mkldnn.enabled = False
    square = torch.ones(512, 512)
    (square @ square).exp_().sum()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
