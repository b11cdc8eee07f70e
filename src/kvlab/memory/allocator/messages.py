"""The out-of-memory error, worded as PyTorch words it."""

from collections.abc import Iterable

from kvlab.errors import KvlabError
from kvlab.memory.allocator.device import GpuProcess
from kvlab.memory.allocator.sizes import format_size

_ADVICE = (
    " If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    "  See documentation for Memory Management "
    " (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


class CudaOutOfMemoryError(KvlabError):
    """What ``torch.OutOfMemoryError`` would say on the modelled card, with its numbers in bytes.

    ``tried_bytes`` is the segment that cudaMalloc was asked for, ``block_bytes`` the rounded request behind
    it.
    """

    def __init__(
        self,
        *,
        tried_bytes: int,
        block_bytes: int,
        total_bytes: int,
        free_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        limit_bytes: int | None = None,
        private_pool_bytes: int = 0,
        device: int = 0,
        processes: Iterable[GpuProcess] = (),
    ) -> None:
        self.tried_bytes = tried_bytes
        self.block_bytes = block_bytes
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes
        in_use_bytes = allocated_bytes + private_pool_bytes
        super().__init__(
            f"CUDA out of memory. Tried to allocate {format_size(tried_bytes)}."
            f" GPU {device} has a total capacity of {format_size(total_bytes)}"
            f" of which {format_size(free_bytes)} is free. {_in_use(processes)}{_allowed(limit_bytes)}"
            f"Of the allocated memory {format_size(in_use_bytes)} is allocated by PyTorch,"
            f" {_in_private_pools(private_pool_bytes)}and {format_size(reserved_bytes - in_use_bytes)}"
            f" is reserved by PyTorch but unallocated.{_ADVICE}"
        )


class AbsurdRequestError(KvlabError):
    """A request of 2^60 bytes or more, which PyTorch refuses before it looks at the card."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate more than 1EB memory.")


def _in_use(processes: Iterable[GpuProcess]) -> str:
    return "".join(
        f"{'Including non-PyTorch memory, this process' if p.pid is None else f'Process {p.pid}'} has"
        f" {format_size(p.used_bytes)} memory in use. "
        for p in processes
    )


def _allowed(limit_bytes: int | None) -> str:
    return "" if limit_bytes is None else f"{format_size(limit_bytes)} allowed; "


def _in_private_pools(size_bytes: int) -> str:
    if not size_bytes:
        return ""
    return f"with {format_size(size_bytes)} allocated in private pools (e.g., CUDA Graphs), "
