"""The cards of this machine through NVML, the library that nvidia-smi prints."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pynvml

from kvlab.memory.nvml.readings import CardReading, NoDriver, NvmlError, ProcessUse, UnknownCard

SLOW_READ_S = 0.25
"""How often utilisation and processes are read. NVML averages utilisation over a sixth of a second or more,
and listing processes costs more than everything else."""

_NOT_AVAILABLE = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
_REASONS = {
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission: ask as root, or give the container the GPU",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: it no longer answers the driver; look for Xid in dmesg",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and library differ in version: reload the driver or reboot",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "this GPU does not tell (it may share the memory of the host)",
}


class GpuSource:
    """Reads the cards, all or those named in ``only`` (``"0"``; a MIG instance is ``"0:1"``; or a UUID).

    Where a card is divided by MIG its instances are read as cards of their own, and the card itself only if
    the driver allows it. ``notices`` collects, one line each, what could not be read. Raises NoDriver,
    UnknownCard, or NvmlError when no card at all can be read.
    """

    def __init__(self, only: Sequence[str] | None = None) -> None:
        self.notices: list[str] = []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _no_session(error) from None
        try:
            self.cards = self._find(only)
        except BaseException:
            self.close()
            raise

    def read(self, t_s: float) -> tuple[CardReading, ...]:
        """One reading of each card that still answers; one that does not is dropped with a notice."""
        readings = []
        for card in list(self.cards):
            try:
                readings.append(card.read(t_s))
            except pynvml.NVMLError as error:
                self.cards.remove(card)
                self.notices.append(f"GPU {card.key} is no longer sampled: {_reason(error)}")
        return tuple(readings)

    def close(self) -> None:
        _quietly(pynvml.nvmlShutdown)

    def _find(self, only: Sequence[str] | None) -> "list[Card]":
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise _no_session(error) from None
        found = [card for index in range(count) for card in self._cards_at(index)]
        if only is None:
            if not found:
                raise NvmlError("; ".join(self.notices) or "the NVIDIA driver lists no GPU here")
            return found
        chosen = {name: card for card in found for name in (card.key, card.uuid) if name is not None}
        if absent := [name for name in only if name not in chosen]:
            there = ", ".join(card.key for card in found) or "none that can be read"
            raise UnknownCard("; ".join([f"no GPU {absent[0]} here; there are: {there}", *self.notices]))
        return list({chosen[name].key: chosen[name] for name in only}.values())

    def _cards_at(self, index: int) -> "list[Card]":
        """The card of an index, and its MIG instances; what cannot be read leaves a notice."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            self.notices.append(f"GPU {index} cannot be sampled: {_reason(error)}")
            return []
        instances = _mig_instances(handle)
        named = [(f"{index}", handle)] + [(f"{index}:{place}", instance) for place, instance in instances or ()]
        cards = []
        for key, each in named:
            try:
                cards.append(Card(key, each))
            except pynvml.NVMLError as error:
                divided = f" as a whole ({len(instances)} MIG instances)" if each is handle and instances else ""
                self.notices.append(f"GPU {key} cannot be sampled{divided}: {_reason(error)}")
        return cards


class Card:
    """One card or MIG instance. Which of NVML's two memory calls answers is found once, at the start."""

    def __init__(self, key: str, handle: Any) -> None:
        self.key = key
        self.name = _quietly(pynvml.nvmlDeviceGetName, handle)
        self.uuid = _quietly(pynvml.nvmlDeviceGetUUID, handle)
        self._handle = handle
        self._version = self._memory_version()
        self._names: dict[int, str | None] = {}
        self._slow_until_s = -1.0
        self._slow: dict[str, Any] = {}

    @property
    def api(self) -> Literal["v2", "v1"]:
        return "v2" if self._version else "v1"

    def read(self, t_s: float) -> CardReading:
        if t_s >= self._slow_until_s:
            self._slow_until_s = t_s + SLOW_READ_S
            self._slow = self._utilisation() | {"processes": self._processes()}
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._version)
        return CardReading(
            card=self.key,
            api=self.api,
            total_bytes=_told(memory.total),
            used_bytes=_told(memory.used),
            free_bytes=_told(memory.free),
            reserved_bytes=_told(memory.reserved) if self._version else None,
            **self._slow,
        )

    def _memory_version(self) -> int | None:
        """v2 where there is: drivers before 510 lack it, and under WSL it has been seen to answer "unknown"."""
        try:
            pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        except pynvml.NVMLError:
            pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            return None
        return pynvml.nvmlMemory_v2

    def _utilisation(self) -> dict[str, float | None]:
        rates = _quietly(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        if rates is None:
            return {"gpu_utilisation": None, "memory_activity": None}
        return {"gpu_utilisation": rates.gpu / 100, "memory_activity": rates.memory / 100}

    def _processes(self) -> tuple[ProcessUse, ...] | None:
        """Who is listed, the largest first; a process that both computes and draws stands in both lists."""
        compute, drawing = (self._listed(kind) for kind in ("Compute", "Graphics"))
        if compute is None and drawing is None:
            return None
        used: dict[int, int | None] = {}
        for entry in [*(compute or ()), *(drawing or ())]:
            told, before = _told(entry.usedGpuMemory), used.get(entry.pid)
            used[entry.pid] = before if told is None else max(told, before or 0)
        # Kept while a process is listed: asked once, and not of the process that later has its number.
        self._names = {pid: self._names[pid] if pid in self._names else _name_of(pid) for pid in used}
        listed = (ProcessUse(pid, size, self._names[pid]) for pid, size in used.items())
        return tuple(sorted(listed, key=lambda process: -(process.used_bytes or 0)))

    def _listed(self, kind: str) -> list[Any] | None:
        """One of the driver's lists. By version, because pynvml gives up on the unversioned call of an old one."""
        for version in (3, 2):
            listed = _quietly(getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v{version}"), self._handle)
            if listed is not None:
                return listed
        return None


def _name_of(pid: int) -> str | None:
    return _quietly(pynvml.nvmlSystemGetProcessName, pid) or None


def _mig_instances(handle: Any) -> list[tuple[int, Any]] | None:
    """The handles of a card's MIG instances with their places; None where MIG is off or unknown."""
    mode = _quietly(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    places = range(_quietly(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    found = ((place, _quietly(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)) for place in places)
    return [(place, instance) for place, instance in found if instance is not None]


def _told(value: int | None) -> int | None:
    """A figure of NVML, or None where it stands for "not available"."""
    return None if value is None or value == _NOT_AVAILABLE else value


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns that not every card, driver or user may make; None where it is refused."""
    try:
        return call(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None


def _reason(error: pynvml.NVMLError) -> str:
    known = _REASONS.get(error.value)
    return f"{known} (NVML: {error})" if known else f"NVML: {error}"


def _no_session(error: pynvml.NVMLError) -> NvmlError:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NoDriver("no NVIDIA driver here (its library libnvidia-ml.so.1 is not found)")
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return NoDriver("an NVIDIA driver is installed but not loaded (NVML: Driver Not Loaded)")
    return NvmlError(f"the NVIDIA driver does not answer: {_reason(error)}")
