"""A byte budget that a real allocator refuses to exceed.

On cpu the work runs in a child process under ``RLIMIT_DATA``, where the kernel refuses PyTorch's allocator;
on cuda it runs in this process under ``torch.cuda.set_per_process_memory_fraction``.
"""

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import torch

from kvlab.device import parse_bytes, resolve_device
from kvlab.meter import BudgetError, BudgetTimeout, BudgetUnavailable, CudaMeter, Meter, Step

__all__ = [
    "MMAP_THRESHOLD_BYTES",
    "BudgetError",
    "BudgetTimeout",
    "BudgetUnavailable",
    "Failure",
    "Meter",
    "Outcome",
    "Step",
    "page_rounded_bytes",
    "run_under_budget",
]

# With these, glibc maps every tensor from MMAP_THRESHOLD_BYTES up on its own and unmaps it when it is freed,
# so that VmData follows the tensors. One arena: each further one would reserve 64 MiB of its own.
MMAP_THRESHOLD_BYTES = 65_536
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}
PAGE_BYTES = 4_096
LOG_TAIL_BYTES = 65_536

_TRIED = re.compile(
    r"(?:tried to allocate|requested size:|unable to allocate)\s+([\d.]+)\s*(bytes|[KMGT]iB)", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """How the work ended when it did not return: an exception, or the death of its process.

    ``is_refusal``: an allocator refused memory after the budget was armed. ``tried_bytes``: what the message
    says was asked for, None where it does not say.
    """

    type_name: str
    message: str
    tried_bytes: int | None = None
    is_refusal: bool = False
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, meter: Meter) -> "Failure":
        """The record of an exception: text alone, so that nothing keeps the tensors of its frames alive."""
        message = str(error)
        refused = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in message
        tried = _TRIED.search(message)
        return cls(
            type_name=type(error).__name__,
            message=message,
            tried_bytes=parse_bytes(tried[1] + tried[2].replace("bytes", "B")) if tried else None,
            is_refusal=refused and meter.base_bytes is not None,
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True)
class Outcome:
    """What became of the work; ``steps`` and ``notes`` are complete up to its end, however it ended.

    ``base_bytes`` is what the process held when the budget was armed and ``limit_bytes`` that plus the
    budget; both are None when it never was. ``exit_code`` is the child's, or minus the number of the signal
    that ended it; on cuda, 0 or 1 in its stead. ``log`` is the tail of the child's stdout and stderr.
    """

    value: Any = None
    error: Failure | None = None
    steps: list[Step] = field(default_factory=list)
    notes: list[Step] = field(default_factory=list)
    base_bytes: int | None = None
    limit_bytes: int | None = None
    exit_code: int = 0
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None


def run_under_budget(
    work: Callable[..., Any],
    /,
    *args: Any,
    budget_bytes: int,
    device: str | torch.device = "cpu",
    timeout_s: float = 120.0,
    **kwargs: Any,
) -> Outcome:
    """Call ``work(meter, *args, **kwargs)`` under a budget that begins at ``meter.arm()``.

    From then on ``work`` may hold ``budget_bytes`` more than at that moment; the allocation that would exceed
    it fails with the allocator's own exception. Load the model and run every shape once before arming. An
    exception that leaves ``work`` becomes ``Outcome.error``; one that it catches is its own business.

    cpu: ``work`` runs in a fresh Python, so it may be a function of a notebook, and it, its arguments and its
    result travel by pickle. oneDNN is off there, because its scratch memory comes and goes with shapes. What
    is held agrees with ``page_rounded_bytes`` to the page; the refusal can come up to 64 KiB late, because
    glibc, refused a mapping, still tries the free end of its heap.
    cuda: ``work`` runs here, ``meter.step()`` watches ``timeout_s``, and the memory fraction is set back.

    Raises BudgetUnavailable where a budget cannot be enforced, BudgetTimeout when time is up, and BudgetError
    for a budget that is not positive, for work that never arms it, and for what cannot be pickled.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes <= 0:
        raise BudgetError(f"a budget of {budget_bytes!r} bytes is impossible; pass a positive whole number")
    device = resolve_device(device)
    if device.type == "cuda":
        outcome = _run_here(work, args, kwargs, device, budget_bytes, timeout_s)
    else:
        outcome = _run_in_child(_pickled(work, args, kwargs), budget_bytes, timeout_s)
    if outcome.ok and outcome.base_bytes is None:
        raise BudgetError("the work never called meter.arm(), so no budget was in force; arm after the warm-up")
    return outcome


def page_rounded_bytes(tensor_bytes: int) -> int:
    """Bytes that one CPU tensor of this size adds to VmData under the budget's malloc settings.

    PyTorch asks for 64-byte alignment (c10/core/impl/alloc_cpu.cpp). glibc pads the chunk by that and by
    MINSIZE, 32, rounds up to 16, and maps it with 8 bytes more in whole pages (malloc/malloc.c:
    ``_int_memalign``, ``sysmalloc``). Tensors whose chunk stays under the mmap threshold share heap pages;
    for them this is the size of the chunk, and no rule by tensor is exact.
    """
    padded_bytes = _chunk_bytes(_chunk_bytes(tensor_bytes) + 64 + 32)
    if padded_bytes < MMAP_THRESHOLD_BYTES:
        return _chunk_bytes(tensor_bytes)
    return -(-(padded_bytes + 8) // PAGE_BYTES) * PAGE_BYTES


def _chunk_bytes(request_bytes: int) -> int:
    """glibc's ``request2size`` on 64-bit machines: an 8-byte header, in multiples of 16."""
    return (request_bytes + 8 + 15) // 16 * 16


class _Records:
    """Collects what a meter emits, by kind."""

    def __init__(self) -> None:
        self.armed: list[tuple[int, int]] = []
        self.step: list[Step] = []
        self.note: list[Step] = []
        self.value: list[bytes] = []
        self.error: list[Failure] = []
        self.misuse: list[BudgetError] = []

    def take(self, kind: str, content: Any) -> None:
        getattr(self, kind).append(content)

    def outcome(self, **rest: Any) -> Outcome:
        base_bytes, limit_bytes = self.armed[-1] if self.armed else (None, None)
        return Outcome(steps=self.step, notes=self.note, base_bytes=base_bytes, limit_bytes=limit_bytes, **rest)


def _run_here(
    work: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    budget_bytes: int,
    timeout_s: float,
) -> Outcome:
    records = _Records()
    meter = CudaMeter(device, budget_bytes, records.take)
    meter.deadline_s = time.monotonic() + timeout_s
    try:
        return records.outcome(value=work(meter, *args, **kwargs))
    except BudgetError:
        raise
    except Exception as error:
        failure = Failure.of(error, meter)
        _release_frames(error)
    finally:
        meter.disarm()
    gc.collect()
    torch.cuda.empty_cache()
    return records.outcome(error=failure, exit_code=1)


def _release_frames(error: BaseException | None) -> None:
    """Let go of the local variables that an exception and those behind it hold through their tracebacks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run_in_child(payload: bytes, budget_bytes: int, timeout_s: float) -> Outcome:
    _require_glibc()
    deadline_s = time.monotonic() + timeout_s
    records = _Records()
    with tempfile.TemporaryFile() as log:
        child, receiver = _start_child(payload, budget_bytes, log)
        try:
            with receiver:
                _receive(receiver, records, deadline_s)
            child.wait(max(0.1, deadline_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise BudgetTimeout(
                f"the work did not finish within {timeout_s:g} s and was ended after {len(records.step)} "
                "steps; pass a larger timeout_s"
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return _outcome_of_child(records, child.returncode, _tail(log))


def _require_glibc() -> None:
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        libc = ""
    if sys.platform != "linux" or not libc.startswith("glibc"):
        raise BudgetUnavailable(
            "a byte budget on cpu needs Linux with glibc; run this in a Linux container or on a CUDA device"
        )


def _pickled(work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The sys.path that the call needs to be read, then the call."""
    try:
        return pickle.dumps((sys.path, cloudpickle.dumps((work, args, kwargs))))
    except Exception as error:
        raise BudgetError(
            f"the work or its arguments cannot be sent to the child process ({error}); "
            "pass plain data and build the rest inside the work"
        ) from error


def _start_child(payload: bytes, budget_bytes: int, log: BinaryIO) -> tuple[subprocess.Popen, Connection]:
    receiver, sender = Pipe(duplex=False)
    package_parent = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    with sender, tempfile.TemporaryFile() as call:
        call.write(payload)
        call.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "kvlab.budget_child", str(sender.fileno()), str(budget_bytes)],
            stdin=call,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[sender.fileno()],
            # threads sleep at a barrier: on busy cores, spinning ones made a token ten times slower
            env={"OMP_WAIT_POLICY": "passive", **os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": path},
            start_new_session=True,
        )
    return child, receiver


def _receive(receiver: Connection, records: _Records, deadline_s: float) -> None:
    """Take records as they come until the child closes its end, which it also does by dying, perhaps within one."""
    while (left_s := deadline_s - time.monotonic()) > 0 and receiver.poll(left_s):
        try:
            record = receiver.recv_bytes()
        except (EOFError, OSError):
            return
        records.take(*pickle.loads(record))
    raise TimeoutError


def _outcome_of_child(records: _Records, exit_code: int, log: str) -> Outcome:
    if records.misuse:
        raise records.misuse[0]
    if records.error:
        return records.outcome(error=records.error[0], exit_code=exit_code, log=log)
    if records.value and exit_code == 0:
        return records.outcome(value=_unpickled(records.value[0]), log=log)
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    last_line = log.strip().rpartition("\n")[2]
    message = f"the process ended with {how} before the work returned" + (last_line and f": {last_line}")
    return records.outcome(error=Failure(how, message), exit_code=exit_code, log=log)


def _unpickled(value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise BudgetError(f"the result of the work cannot be read here ({error}); return plain data") from error


def _tail(log: BinaryIO) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
    return log.read().decode(errors="replace")
