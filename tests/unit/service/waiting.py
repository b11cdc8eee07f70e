"""Waiting for what must come, however slow the machine is; and whether a process is over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0  # far more than anything here takes: who waits so long in vain has found a mistake


def until(true: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """The first value that is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process does nothing while the block runs: what others do meanwhile, they do while it is where it was."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_gone(pid: int) -> bool:
    """Ended, whether or not its parent has taken note."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True
