"""A byte budget that a real allocator refuses to exceed.

On cpu the work runs in a child process under ``RLIMIT_DATA``, where the kernel refuses PyTorch's own allocator; on
cuda it runs in this process under ``torch.cuda.set_per_process_memory_fraction``.
"""

import contextlib
import gc
import json
import os
import pickle
import platform
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
from typing import Any

import cloudpickle
import torch

from kvlab.device import parse_bytes, process_memory, resolve_device
from kvlab.errors import KvlabError

# With these, glibc maps every tensor from MMAP_THRESHOLD_BYTES up on its own and unmaps it when it is freed, so
# that VmData follows the tensors. One arena: each further one would reserve 64 MiB of its own.
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
    r"(?:tried to allocate|requested size:|unable to allocate)\s+([\d.]+)\s*(bytes|[KMGTP]iB)", re.IGNORECASE
)


class BudgetError(KvlabError):
    """The budget cannot be used as asked; the message says what to change."""


class BudgetUnavailable(BudgetError):
    """This machine cannot enforce a byte budget on this device."""


class BudgetTimeout(BudgetError, TimeoutError):
    """The work did not finish in time and was ended."""


@dataclass(frozen=True)
class Step:
    """One record of the work: its own fields and the memory at that moment.

    ``held_bytes`` counts from the moment the budget was armed (None before): VmData on cpu, reserved on cuda.
    ``memory`` is ``kvlab.device.process_memory``.
    """

    fields: dict[str, Any]
    held_bytes: int | None
    memory: dict[str, int]


@dataclass(frozen=True)
class Failure:
    """How the work ended when it did not return.

    ``is_refusal``: an allocator refused memory after the budget was armed. ``tried_bytes``: what the message says
    was asked for, None where it does not say.
    """

    type_name: str
    message: str
    tried_bytes: int | None = None
    is_refusal: bool = False
    traceback: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of the work; ``steps`` and ``notes`` are complete up to its end, however it ended.

    ``base_bytes`` is what the process held when the budget was armed and ``limit_bytes`` that plus the budget; both
    are None when it never was. ``exit_code`` is the child's, or minus the number of the signal that ended it; on
    cuda, 0 or 1 in its stead. ``log`` is the tail of the child's stdout and stderr.
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

    From then on ``work`` may hold ``budget_bytes`` more than at that moment; the allocation that would exceed it
    fails with the allocator's own exception. Load the model and run every shape once before arming. An exception
    that leaves ``work`` becomes ``Outcome.error``; one that it catches is its own business.

    cpu: ``work`` runs in a fresh Python, so it may be a function of a notebook, and it, its arguments and its result
    travel by pickle. oneDNN is off there, because its scratch memory comes and goes with shapes.
    cuda: ``work`` runs here, ``meter.step()`` looks at ``timeout_s``, and the memory fraction is set back afterwards.

    Raises BudgetUnavailable where a budget cannot be enforced, BudgetTimeout when time is up, and BudgetError for a
    budget that is not positive, for work that never arms it, and for what cannot be pickled.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes <= 0:
        raise BudgetError(
            f"a budget of {budget_bytes!r} bytes is impossible; pass a positive whole number of bytes"
        )
    device = resolve_device(device)
    run = _run_here if device.type == "cuda" else _run_in_child
    outcome = run(work, args, kwargs, budget_bytes, device, timeout_s)
    if outcome.ok and outcome.base_bytes is None:
        raise BudgetError(
            "the work never called meter.arm(), so no budget was in force; arm it after the warm-up"
        )
    return outcome


def page_rounded_bytes(tensor_bytes: int) -> int:
    """Bytes that one CPU tensor of this size adds to VmData under the budget's malloc settings.

    PyTorch asks for 64-byte alignment (c10/core/impl/alloc_cpu.cpp). glibc pads the chunk by that and by MINSIZE,
    32, rounds up to 16 and maps it with 8 bytes more in whole pages (malloc/malloc.c: ``_int_memalign``,
    ``sysmalloc``). Tensors whose chunk stays under the mmap threshold share heap pages; for them this is the size
    of the chunk, and no rule by tensor is exact.
    """
    padded_bytes = _chunk_bytes(_chunk_bytes(tensor_bytes) + 64 + 32)
    if padded_bytes < MMAP_THRESHOLD_BYTES:
        return _chunk_bytes(tensor_bytes)
    return -(-(padded_bytes + 8) // PAGE_BYTES) * PAGE_BYTES


def _chunk_bytes(request_bytes: int) -> int:
    """glibc's ``request2size`` on 64-bit machines: an 8-byte header, in multiples of 16."""
    return (request_bytes + 8 + 15) // 16 * 16


class Meter:
    """What ``work`` holds in its hand: it arms the budget and records what happens under it.

    ``emit(kind, content)`` takes each record away: kinds ``armed``, ``step`` and ``note``.
    """

    def __init__(self, device: torch.device, budget_bytes: int, emit: Callable[[str, Any], None]) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.base_bytes: int | None = None
        self.armed = False
        self._emit = emit

    @property
    def held_bytes(self) -> int | None:
        """Bytes held now above the moment of ``arm()``, by the measure that the limit looks at; None before."""
        return None if self.base_bytes is None else self._held() - self.base_bytes

    def arm(self) -> None:
        """Start the budget: from now on the process may hold ``budget_bytes`` more than now."""
        if self.armed:
            raise BudgetError("the budget is armed already; call meter.disarm() before arming it again")
        gc.collect()
        self._return_free_memory()
        base_bytes = self._held()
        self._emit("armed", (base_bytes, base_bytes + self.budget_bytes))
        self._limit(base_bytes + self.budget_bytes)
        self.base_bytes, self.armed = base_bytes, True

    def disarm(self) -> None:
        """End the budget if it is in force."""
        if self.armed:
            self._lift()
            self.armed = False

    def step(self, **fields: Any) -> None:
        """Record one step: small JSON-able fields of the caller's choice, and the memory at this moment."""
        self._record("step", fields)

    def note(self, **fields: Any) -> None:
        """Record a fact that is not a step, such as an exception that the work caught."""
        self._record("note", fields)

    def _record(self, kind: str, fields: dict[str, Any]) -> None:
        json.dumps(fields)  # a tensor among them would travel, and would be kept alive
        self._emit(kind, Step(fields, self.held_bytes, process_memory(self.device)))

    def _held(self) -> int:
        raise NotImplementedError

    def _return_free_memory(self) -> None:
        raise NotImplementedError

    def _limit(self, limit_bytes: int) -> None:
        raise NotImplementedError

    def _lift(self) -> None:
        raise NotImplementedError


class CudaMeter(Meter):
    """A budget on what PyTorch's caching allocator may reserve on one GPU.

    Free blocks inside segments that were reserved before ``arm()`` stay usable beyond the budget.
    """

    def __init__(self, *args: Any, timeout_s: float) -> None:
        super().__init__(*args)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def step(self, **fields: Any) -> None:
        super().step(**fields)
        if time.monotonic() > self._deadline:
            raise BudgetTimeout(
                f"the work did not finish within {self._timeout_s:g} s; pass a larger timeout_s"
            )

    def _held(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def _return_free_memory(self) -> None:
        torch.cuda.empty_cache()

    def _limit(self, limit_bytes: int) -> None:
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        if limit_bytes > total_bytes:
            raise BudgetError(
                f"{self.device} has {total_bytes} bytes, fewer than the {limit_bytes} that the budget allows; "
                "pass a smaller budget"
            )
        self._former_fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, self.device)

    def _lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._former_fraction, self.device)


class _Records:
    """Collects what meters emit."""

    def __init__(self) -> None:
        self.taken: dict[str, list[Any]] = {"armed": [], "step": [], "note": []}
        self.taken |= {"value": [], "error": [], "misuse": []}

    def take(self, kind: str, content: Any) -> None:
        self.taken[kind].append(content)

    def outcome(self, **rest: Any) -> Outcome:
        base_bytes, limit_bytes = self.taken["armed"][-1] if self.taken["armed"] else (None, None)
        return Outcome(
            steps=self.taken["step"],
            notes=self.taken["note"],
            base_bytes=base_bytes,
            limit_bytes=limit_bytes,
            **rest,
        )


def failure_of(error: Exception, *, after_arming: bool) -> Failure:
    """The record of an exception: text alone, so that nothing keeps the tensors of its frames alive."""
    message = str(error)
    refused = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in message
    tried = _TRIED.search(message)
    return Failure(
        type_name=type(error).__name__,
        message=message,
        tried_bytes=parse_bytes(tried[1] + tried[2].lower().replace("bytes", "B")) if tried else None,
        is_refusal=refused and after_arming,
        traceback="".join(traceback.format_exception(error)),
    )


def _run_here(
    work: Callable[..., Any],
    args: Any,
    kwargs: Any,
    budget_bytes: int,
    device: torch.device,
    timeout_s: float,
) -> Outcome:
    records = _Records()
    meter = CudaMeter(device, budget_bytes, records.take, timeout_s=timeout_s)
    try:
        return records.outcome(value=work(meter, *args, **kwargs))
    except BudgetError:
        raise
    except Exception as error:
        failure = failure_of(error, after_arming=meter.base_bytes is not None)
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


def _run_in_child(
    work: Callable[..., Any],
    args: Any,
    kwargs: Any,
    budget_bytes: int,
    device: torch.device,
    timeout_s: float,
) -> Outcome:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise BudgetUnavailable(
            "a byte budget on cpu needs Linux with glibc; run this in a Linux container or with --device cuda"
        )
    deadline = time.monotonic() + timeout_s
    records = _Records()
    receiver, sender = Pipe(duplex=False)
    with receiver, tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as log:
        payload.write(_pickled(work, args, kwargs))
        payload.seek(0)
        with sender:
            child = subprocess.Popen(
                [sys.executable, "-m", "kvlab.budget_child", str(sender.fileno()), str(budget_bytes)],
                stdin=payload,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[sender.fileno()],
                env=_child_environment(),
                start_new_session=True,
            )
        try:
            _receive(receiver, records, deadline)
            child.wait(max(0.1, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise BudgetTimeout(
                f"the work did not finish within {timeout_s:g} s and was ended after "
                f"{len(records.taken['step'])} steps; pass a larger timeout_s"
            ) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return _outcome_of_child(records, child.returncode, _tail(log))


def _pickled(work: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """The child's first sys.path, then the call, which may need that path to be read."""
    try:
        return pickle.dumps((sys.path, cloudpickle.dumps((work, args, kwargs))))
    except Exception as error:
        raise BudgetError(
            f"the work or its arguments cannot be sent to the child process ({error}); "
            "pass plain data and build the rest inside the work"
        ) from error


def _child_environment() -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": path}


def _receive(receiver: Connection, records: _Records, deadline: float) -> None:
    """Take records until the child closes its end, which it also does by dying."""
    with contextlib.suppress(EOFError, ConnectionError):
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            records.take(*pickle.loads(receiver.recv_bytes()))
        raise TimeoutError


def _outcome_of_child(records: _Records, exit_code: int, log: str) -> Outcome:
    misuse, errors, values = (records.taken[kind] for kind in ("misuse", "error", "value"))
    if misuse:
        raise misuse[0]
    if errors:
        return records.outcome(error=errors[0], exit_code=exit_code, log=log)
    if values and exit_code == 0:
        return records.outcome(value=pickle.loads(values[0]), exit_code=exit_code, log=log)
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    last_line = log.strip().rpartition("\n")[2]
    message = f"the process ended with {how} before it returned" + (f": {last_line}" if last_line else "")
    return records.outcome(error=Failure(how, message), exit_code=exit_code, log=log)


def _tail(log: Any) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_TAIL_BYTES))
    return log.read().decode(errors="replace")
