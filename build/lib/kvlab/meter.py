"""What work under a byte budget holds in its hand: it arms the budget and records what happens under it."""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.device import process_memory
from kvlab.errors import KvlabError


class BudgetError(KvlabError):
    """The budget cannot be used as asked; the message says what to change."""


class BudgetUnavailable(BudgetError):
    """This machine cannot enforce a byte budget on this device."""


class BudgetTimeout(BudgetError, TimeoutError):
    """The work did not finish in time and was ended."""


@dataclass(frozen=True)
class Step:
    """One record of the work: its own fields and the memory at that moment.

    ``held_bytes`` counts from the moment the budget was armed (None before it): VmData on cpu, reserved on
    cuda, which is what the limit looks at. ``memory`` is all of ``kvlab.device.process_memory``.
    """

    fields: dict[str, Any]
    held_bytes: int | None
    memory: dict[str, int]


class Meter:
    """Arms a budget on one device; ``emit(kind, content)`` takes its records away.

    The kinds are ``armed`` with (base_bytes, limit_bytes), and ``step`` and ``note`` with a Step.
    """

    def __init__(self, device: torch.device, budget_bytes: int, emit: Callable[[str, Any], None]) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.base_bytes: int | None = None
        self.armed = False
        self._emit = emit

    @property
    def held_bytes(self) -> int | None:
        """Bytes held now above the moment of ``arm()``; None before it."""
        return None if self.base_bytes is None else self._held() - self.base_bytes

    def arm(self) -> None:
        """Start the budget: from now on the process may hold ``budget_bytes`` more than it holds now."""
        if self.armed:
            raise BudgetError("the budget is armed already; call meter.disarm() before arming it again")
        gc.collect()
        self._settle()
        base_bytes = self._held()
        limit_bytes = base_bytes + self.budget_bytes
        self._emit("armed", (base_bytes, limit_bytes))
        self._limit(limit_bytes)
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
        json.dumps(fields)  # refuses a tensor, which the record would keep alive
        self._emit(kind, Step(fields, self.held_bytes, process_memory(self.device)))

    def _held(self) -> int:
        """Bytes in use now, by the measure that the limit looks at."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Give back what is free, so that nothing freed before the budget serves under it."""
        raise NotImplementedError

    def _limit(self, limit_bytes: int) -> None:
        raise NotImplementedError

    def _lift(self) -> None:
        raise NotImplementedError


class CudaMeter(Meter):
    """A budget on what PyTorch's caching allocator may reserve on one GPU in this process.

    Free blocks inside segments that live on across ``arm()`` stay usable beyond the budget.
    """

    def __init__(self, device: torch.device, budget_bytes: int, emit: Callable[[str, Any], None]) -> None:
        super().__init__(device, budget_bytes, emit)
        self.deadline_s = float("inf")

    def step(self, **fields: Any) -> None:
        """Record one step; raises BudgetTimeout after ``deadline_s`` of the monotonic clock."""
        super().step(**fields)
        if time.monotonic() > self.deadline_s:
            raise BudgetTimeout("the work did not finish in time; pass a larger timeout_s")

    def _held(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def _settle(self) -> None:
        torch.cuda.empty_cache()

    def _limit(self, limit_bytes: int) -> None:
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        if limit_bytes > total_bytes:
            raise BudgetError(
                f"the budget would allow {limit_bytes} bytes, but {self.device} has {total_bytes}; "
                "pass a smaller budget"
            )
        self._former_fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, self.device)

    def _lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._former_fraction, self.device)
