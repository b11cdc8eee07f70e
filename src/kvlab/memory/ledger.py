"""One instant accounted for four ways: the cache by arithmetic, allocated, reserved, and used on the device.

Each account differs from the next, and a :class:`Ledger` names every difference it can. What no name covers is
shown as unexplained and not hidden in one of the names.
"""

import gc
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from kvlab.memory.allocator.sizes import round_size
from kvlab.memory.snapshot.reader import parse_snapshot
from kvlab.memory.snapshot.records import ACTIVE_ALLOCATED, ACTIVE_PENDING_FREE, INACTIVE, SegmentRecord

if TYPE_CHECKING:
    import torch

    from kvlab.memory.allocator import CachingAllocator
    from kvlab.memory.nvml import CardReading


class Account(BaseModel):
    """One answer to "how much is in use"; ``bytes`` None where this machine cannot tell."""

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int | None
    how: str


class Difference(BaseModel):
    """A named part of what one account holds and the one before it does not; negative where it holds less."""

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int
    how: str


class Step(BaseModel):
    """From one account to the next. ``unexplained_bytes`` is what the names leave; None without both accounts."""

    model_config = ConfigDict(frozen=True)

    begin: str
    end: str
    differences: tuple[Difference, ...]
    unexplained_bytes: int | None

    def bytes_of(self, name: str) -> int:
        """The bytes of a difference by its name, 0 where there is none."""
        return sum(part.bytes for part in self.differences if part.name == name)


class Ledger(BaseModel):
    """The accounts in order, smallest first by rights, and the steps between them. ``notes`` say what is missing."""

    model_config = ConfigDict(frozen=True)

    accounts: tuple[Account, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    def account(self, name: str) -> int | None:
        """The bytes of an account by its name; raises KeyError."""
        return {account.name: account.bytes for account in self.accounts}[name]

    def rows(self) -> list[tuple[str, int | None, str]]:
        """The ledger as (what, bytes, how): each account, then what leads to the next, the unexplained last."""
        return [(name, sizes[0], how) for name, sizes, how in side_by_side([self])]


def side_by_side(ledgers: Sequence[Ledger]) -> list[tuple[str, list[int | None], str]]:
    """The rows of several ledgers of one kind: (what, bytes in each, how). What one does not have is 0 there."""
    rows: list[tuple[str, list[int | None], str]] = []
    for place, account in enumerate(ledgers[0].accounts):
        rows.append((account.name, [ledger.accounts[place].bytes for ledger in ledgers], account.how))
        steps = [ledger.steps[place] for ledger in ledgers] if place < len(ledgers[0].steps) else []
        for name, how in dict.fromkeys((part.name, part.how) for step in steps for part in step.differences):
            rows.append((f"+ {name}", [step.bytes_of(name) for step in steps], how))
        if steps:
            rows.append(("+ unexplained", [step.unexplained_bytes for step in steps], "no name covers it"))
    return rows


def _close(accounts: Iterable[Account], parts: Iterable[Iterable[Difference]], notes: Iterable[str] = ()) -> Ledger:
    """The ledger of these accounts, with the parts between each two and the rest worked out."""
    accounts = tuple(accounts)
    steps = []
    for before, after, between in zip(accounts, accounts[1:], parts, strict=False):
        named = tuple(part for part in between if part.bytes)
        known = before.bytes is not None and after.bytes is not None
        rest = after.bytes - before.bytes - sum(part.bytes for part in named) if known else None
        steps.append(Step(begin=before.name, end=after.name, differences=named, unexplained_bytes=rest))
    return Ledger(accounts=accounts, steps=tuple(steps), notes=tuple(notes))


def ledger_on_cuda(
    kv_bytes: int | None,
    *,
    device: "torch.device | int | None" = None,
    named_bytes: Mapping[str, int] | None = None,
    context_bytes: int | None = None,
) -> Ledger:
    """The four accounts of a CUDA device now.

    ``kv_bytes`` is the cache by arithmetic, ``named_bytes`` other tensors that the caller can name (weights).
    ``context_bytes`` is what this process held on the card before its first tensor, if that was measured. The last
    account is NVML's; where NVML does not answer it is ``cudaMemGetInfo``'s, total minus free.
    """
    import torch

    index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device or "cuda").index
    index = torch.cuda.current_device() if index is None else index
    snapshot = parse_snapshot(torch.cuda.memory._snapshot())
    used_bytes, how, others, notes = _used_on_card(index, torch.cuda.memory_reserved(index), context_bytes)
    return _ledger_of_allocator(
        kv_bytes,
        named_bytes or {},
        allocated_bytes=torch.cuda.memory_allocated(index),
        reserved_bytes=torch.cuda.memory_reserved(index),
        segments=[segment for segment in snapshot.segments if segment.device == index],
        used=Account(name="used", bytes=used_bytes, how=how),
        outside=others,
        notes=notes,
    )


def ledger_of_model(
    allocator: "CachingAllocator",
    kv_bytes: int | None,
    *,
    named_bytes: Mapping[str, int] | None = None,
    context_bytes: int = 0,
) -> Ledger:
    """The four accounts of the allocator's model on its card, where nothing is left to a driver.

    ``context_bytes`` is the part of the card's ``other_bytes`` that stands for this process's CUDA context; the
    card's ``processes`` name the neighbours.
    """
    neighbours = sum(process.used_bytes for process in allocator.device.processes if process.pid is not None)
    return _ledger_of_allocator(
        kv_bytes,
        named_bytes or {},
        allocated_bytes=allocator.stats.all.allocated_bytes.current,
        reserved_bytes=allocator.reserved_bytes,
        segments=parse_snapshot(allocator.snapshot()).segments,
        used=Account(
            name="used",
            bytes=allocator.device.total_bytes - allocator.device.free_bytes,
            how="what nvidia-smi would print, without the driver's own share",
        ),
        outside=[
            Difference(name="CUDA context", bytes=context_bytes, how="kernels and the driver's bookkeeping"),
            Difference(name="other processes", bytes=neighbours, how="as the driver lists them"),
        ],
        notes=["a model of the allocator and its card, not a GPU"],
    )


def _ledger_of_allocator(
    kv_bytes: int | None,
    named_bytes: Mapping[str, int],
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    segments: Iterable[SegmentRecord],
    used: Account,
    outside: list[Difference],
    notes: list[str],
) -> Ledger:
    inside = _inside_segments(segments)
    tensors = [Difference(name=name, bytes=size, how="named by the caller") for name, size in named_bytes.items()]
    lost = [
        Difference(name="rounding", bytes=inside["rounding"], how="blocks come in multiples of 512 bytes"),
        Difference(
            name="absorbed slack",
            bytes=inside["slack"],
            how="rests of up to 1 MiB that a large block keeps, or rounding that the settings ask for",
        ),
    ]
    cached = [
        Difference(name="freed, still in use by a stream", bytes=inside["pending"], how="record_stream"),
        Difference(name="cached in idle segments", bytes=inside["idle"], how="empty_cache or a retry gives it back"),
        Difference(name="free in private pools", bytes=inside["private"], how="kept for CUDA graphs"),
        Difference(name="free between live blocks", bytes=inside["holes"], how="fits only what is no larger"),
    ]
    return _close(
        [
            Account(name="kv cache", bytes=kv_bytes, how="by arithmetic, from the caller"),
            Account(name="allocated", bytes=allocated_bytes, how="torch.cuda.memory_allocated: blocks in use"),
            Account(name="reserved", bytes=reserved_bytes, how="torch.cuda.memory_reserved: segments"),
            used,
        ],
        [tensors + lost, cached, outside],
        notes,
    )


def _inside_segments(segments: Iterable[SegmentRecord]) -> dict[str, int]:
    """Bytes of the segments that no tensor asked for, by reason."""
    parts = dict.fromkeys(("rounding", "slack", "pending", "idle", "private", "holes"), 0)
    for segment in segments:
        is_idle = all(block.state == INACTIVE for block in segment.blocks)
        free = "private" if segment.pool_id != (0, 0) else "idle" if is_idle else "holes"
        for block in segment.blocks:
            if block.state == ACTIVE_ALLOCATED:
                rounded = min(block.size, round_size(block.requested_size, 0))
                parts["rounding"] += rounded - block.requested_size
                parts["slack"] += block.size - rounded
            else:
                parts["pending" if block.state == ACTIVE_PENDING_FREE else free] += block.size
    return parts


def _used_on_card(
    index: int, reserved_bytes: int, context_bytes: int | None
) -> tuple[int, str, list[Difference], list[str]]:
    """Used bytes of the card behind a CUDA index, who told, and what of it is outside PyTorch's segments."""
    import torch

    from kvlab.memory.nvml import GpuSource, NvmlError

    card, why = None, ""
    try:
        source = GpuSource()
        try:
            # NVML counts cards as they sit in the machine, CUDA those it may see: the UUID is common to both.
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            source.cards = [each for each in source.cards if each.uuid and each.uuid.endswith(uuid)][:1]
            card = next(iter(source.read(0.0)), None)
            why = "; ".join([f"NVML does not show cuda:{index}", *source.notices])
        finally:
            source.close()
    except NvmlError as error:
        why = str(error)
    if card is None or card.used_bytes is None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        parts = [] if context_bytes is None else [_context(context_bytes)]
        return total_bytes - free_bytes, "cudaMemGetInfo: total minus free", parts, [why]
    parts, notes = parts_outside_pytorch(card, os.getpid(), reserved_bytes, context_bytes)
    return card.used_bytes, f"NVML {card.api}", parts, notes


def parts_outside_pytorch(
    card: "CardReading", pid: int, reserved_bytes: int, context_bytes: int | None
) -> tuple[list[Difference], list[str]]:
    """What of a card's used bytes lies outside the segments of process ``pid``, by the driver's list, and notes.

    In a container the driver's numbers are the host's or there are none, so this process may not be found; then
    nothing is guessed, and the bytes stay unexplained.
    """
    notes = [] if card.api == "v2" else ["NVML v1: used includes what the driver keeps for itself"]
    told = {process.pid: process.used_bytes for process in card.processes or ()}
    if told.get(pid) is None:
        notes.append(f"the driver does not tell what process {pid} holds, so context and others stay unexplained")
        return ([] if context_bytes is None else [_context(context_bytes)]), notes
    beyond_bytes = told.pop(pid) - reserved_bytes
    others = sum(size or 0 for size in told.values())
    if context_bytes is None:
        parts = [Difference(name="CUDA context and libraries", bytes=beyond_bytes, how="this process, less reserved")]
    else:
        rest_bytes = beyond_bytes - context_bytes
        parts = [
            _context(context_bytes),
            Difference(name="workspaces of libraries", bytes=rest_bytes, how="this process, less reserved and context"),
        ]
    if silent := [number for number, size in told.items() if size is None]:
        notes.append(f"the driver does not tell what {len(silent)} of {len(told)} other processes hold")
    return [*parts, Difference(name="other processes", bytes=others, how=f"{len(told)} by the driver's list")], notes


def _context(context_bytes: int) -> Difference:
    return Difference(name="CUDA context", bytes=context_bytes, how="measured before the first tensor")


def ledger_of_process(kv_bytes: int | None, *, named_bytes: Mapping[str, int] | None = None) -> Ledger:
    """What a CPU process can tell: the cache, live tensors, its private memory and what of it is resident.

    PyTorch's CPU allocator keeps no count and no segments. Live tensors are those that Python can find, each
    storage once; what only C++ holds (saved for backward, for one) is unexplained. Raises OSError without /proc.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        kib = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", status.read(), re.M)}
    shared = kib.get("RssFile", 0) + kib.get("RssShmem", 0)
    untouched = kib["VmData"] - kib.get("RssAnon", kib["VmRSS"])
    return _close(
        [
            Account(name="kv cache", bytes=kv_bytes, how="by arithmetic, from the caller"),
            Account(name="live tensors", bytes=live_tensor_bytes(), how="storages that Python can find"),
            Account(name="private memory", bytes=kib["VmData"], how="VmData: what RLIMIT_DATA limits"),
            Account(name="resident", bytes=kib["VmRSS"], how="VmRSS"),
        ],
        [
            [
                Difference(name=name, bytes=size, how="named by the caller")
                for name, size in (named_bytes or {}).items()
            ],
            [],
            [
                Difference(name="libraries and shared memory", bytes=shared, how="RssFile, RssShmem"),
                Difference(name="promised and never touched", bytes=-untouched, how="VmData less RssAnon"),
            ],
        ],
        ["a CPU process: private memory beyond tensors is Python, libraries and freed heap, and has no owner here"],
    )


def live_tensor_bytes() -> int | None:
    """Bytes of the CPU storages of all tensors that Python's collector can find; None where memory is too short."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    sizes: dict[int, int] = {}
    try:
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor):  # isinstance would ask lazy objects for their class
                _count(found, sizes)
    except MemoryError:
        return None
    return sum(sizes.values())


def _count(tensor: Any, sizes: dict[int, int]) -> None:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu":
            sizes[storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, fake and other tensors without a storage
        pass
