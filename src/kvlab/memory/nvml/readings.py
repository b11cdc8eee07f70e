"""What one look at a card or a process says, and the one-line errors of those that say nothing."""

from typing import Literal, NamedTuple

from kvlab.errors import KvlabError


class NvmlError(KvlabError):
    """NVML refused; the message is one line that says what and, where it is known, what to do."""


class NoDriver(NvmlError):
    """This machine has no NVIDIA driver, or none is loaded."""


class UnknownCard(NvmlError, ValueError):
    """No GPU of this index here."""


class ProcessUnreadable(KvlabError, ValueError):
    """There is no such process, it has no memory, or /proc does not show it."""


class ProcessUse(NamedTuple):
    """A process that the driver lists on a card; ``used_bytes`` is None where it does not tell, as on WSL."""

    pid: int
    used_bytes: int | None
    name: str | None = None


class CardReading(NamedTuple):
    """One card, or one MIG instance (``0:1``), at one instant. None: the driver does not tell.

    ``used_bytes`` is everybody's. ``api`` says whose figures these are: ``v2`` counts what the driver keeps for
    itself apart, as ``reserved_bytes``; ``v1`` counts it as used. ``gpu_utilisation`` and ``memory_activity``
    (0 to 1) are shares of the last sixth of a second or more in which a kernel ran, and in which memory was
    read or written: neither says how full it is. ``processes`` is None where the driver lists none to us.
    """

    card: str
    api: Literal["v2", "v1"]
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None = None
    gpu_utilisation: float | None = None
    memory_activity: float | None = None
    processes: tuple[ProcessUse, ...] | None = None


class ProcessReading(NamedTuple):
    """One process in /proc/PID/status: VmRSS, VmHWM (the most VmRSS ever was) and VmData, see proc(5).

    The kernel counts resident pages in batches for each thread, so both may be off by some hundred KiB.
    """

    pid: int
    resident_bytes: int
    peak_resident_bytes: int | None
    data_bytes: int


class Sample(NamedTuple):
    """One look at everything that is sampled, ``t_s`` seconds after the first."""

    t_s: float
    cards: tuple[CardReading, ...] = ()
    process: ProcessReading | None = None


class Mark(NamedTuple):
    """An event that the sampled program named."""

    t_s: float
    name: str


class Notice(NamedTuple):
    """Something that ended or was missing while sampling, in one line."""

    t_s: float
    message: str
