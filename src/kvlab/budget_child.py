"""The process in which work runs under a cpu byte budget: ``python -m kvlab.budget_child FD BUDGET_BYTES``."""

import ctypes
import mmap
import os
import pickle
import resource
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from kvlab.budget import MMAP_THRESHOLD_BYTES, BudgetError, BudgetUnavailable, Meter, failure_of
from kvlab.device import process_memory

_PROBE_BYTES = 16 << 20
_LARGEST_PLUG_BYTES = 64 << 20


class ProcessMeter(Meter):
    """A budget on VmData, the private writable memory of this process, enforced by RLIMIT_DATA (setrlimit(2))."""

    def __init__(self, budget_bytes: int, connection: Connection) -> None:
        super().__init__(torch.device("cpu"), budget_bytes, self._send)
        self._connection = connection
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._former_soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)

    def _send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps((kind, content)))

    def _record(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            super()._record(kind, fields)
        except MemoryError:  # the record must get through when nothing is left
            if not self.armed:
                raise
            self._lift()
            try:
                super()._record(kind, fields)
            finally:
                self._set_soft_limit(self.base_bytes + self.budget_bytes)

    def _held(self) -> int:
        return process_memory("cpu")["data_bytes"]

    def _return_free_memory(self) -> None:
        self._libc.malloc_trim(0)
        self._plug_heap()

    def _plug_heap(self) -> None:
        """Take the free chunks of the heap in which a tensor would find room, so that none is had for nothing.

        malloc searches them before it maps; a tokenizer leaves 10 MB of them behind. They are never given back.
        """
        size_bytes = _LARGEST_PLUG_BYTES
        while size_bytes >= MMAP_THRESHOLD_BYTES:
            before_bytes = self._held()
            chunk = self._libc.malloc(size_bytes)
            if self._held() - before_bytes >= size_bytes // 2:
                self._libc.free(chunk)  # it was new memory: the heap has no chunk of this size left
                size_bytes //= 2

    def _limit(self, limit_bytes: int) -> None:
        if self._hard != resource.RLIM_INFINITY and limit_bytes > self._hard:
            raise BudgetUnavailable(
                f"the budget needs a data limit of {limit_bytes} bytes, but the hard limit here is {self._hard}; "
                "raise it (ulimit -Hd) or pass a smaller budget"
            )
        self._set_soft_limit(limit_bytes)
        if self._fits(self.budget_bytes + _PROBE_BYTES):
            self._lift()
            raise BudgetUnavailable(
                "this kernel or container does not enforce RLIMIT_DATA; run this on another Linux machine or with "
                "--device cuda"
            )

    def _lift(self) -> None:
        self._set_soft_limit(self._former_soft)

    def _set_soft_limit(self, soft_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, self._hard))

    @staticmethod
    def _fits(size_bytes: int) -> bool:
        try:
            mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return False
        return True


def main(descriptor: int, budget_bytes: int) -> int:
    """Run the pickled call on stdin and send its records, then its value or error, through ``descriptor``."""
    os.set_inheritable(descriptor, False)
    meter = ProcessMeter(budget_bytes, Connection(descriptor, readable=False))
    try:
        work, args, kwargs = _read_call()
        _settle_torch()
        value = work(meter, *args, **kwargs)
        meter.disarm()
        meter._send("value", _pickled(value))
    except BudgetError as error:
        meter.disarm()
        meter._send("misuse", error)
        return 1
    except Exception as error:
        meter.disarm()  # there may be no memory left to report with
        meter._send("error", failure_of(error, after_arming=meter.base_bytes is not None))
        traceback.print_exc()
        return 1
    return 0


def _read_call() -> tuple[Any, Any, Any]:
    sys.path[:], call = pickle.load(sys.stdin.buffer)
    try:
        return pickle.loads(call)
    except Exception as error:
        raise BudgetError(
            f"the work cannot be loaded in the child process ({type(error).__name__}: {error}); define it in the "
            "notebook itself or in a module that a fresh Python can import"
        ) from error


def _pickled(value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise BudgetError(f"the result cannot be sent back ({error}); return plain data") from error


def _settle_torch() -> None:
    """Start the thread team before there is a limit: libgomp ends the process when it cannot start a thread.

    oneDNN goes off because it keeps objects for each shape that it has seen.
    """
    torch.backends.mkldnn.enabled = False
    square = torch.ones(512, 512)
    (square @ square).exp_().sum()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
