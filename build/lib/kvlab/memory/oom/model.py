"""What a diagnosis is: the JSON of `kvlab diagnose`, and the figures one message prints."""

from dataclasses import dataclass, fields
from typing import Literal

from pydantic import BaseModel

Family = Literal[
    "torch_cuda",
    "torch_hip",
    "torch_mps",
    "torch_cpu",
    "cublas",
    "cuda_runtime",
    "cuda_driver",
    "cuda_assert",
    "nvml",
    "vllm",
    "tgi",
    "sglang",
    "tensorrt",
    "tensorrt_llm",
    "llama_cpp",
    "lmcache",
    "xla",
    "tensorflow",
    "unknown",
]

Cause = Literal[
    "device_full",
    "request_larger_than_device",
    "fragmentation",
    "other_process",
    "memory_fraction",
    "kv_capacity",
    "static_pool",
    "host_memory",
    "inconsistent_numbers",
    "not_memory",
    "unknown",
]


@dataclass(frozen=True)
class Size:
    """A printed size in bytes, and how far rounding may have moved it (0 where bytes were printed)."""

    bytes: int
    rounding_bytes: float = 0.0


@dataclass
class Figures:
    """The sizes one message prints; None where it does not say.

    unallocated: reserved by PyTorch but not allocated. limit: a cap set by the user. other: held by this
    process outside PyTorch. process: all that it holds. processes: what each listed one holds, it among them.
    """

    tried: Size | None = None
    total: Size | None = None
    free: Size | None = None
    allocated: Size | None = None
    reserved: Size | None = None
    unallocated: Size | None = None
    limit: Size | None = None
    other: Size | None = None
    process: Size | None = None
    processes: tuple[Size, ...] = ()

    def fill_from(self, other: "Figures") -> None:
        """Take what `other` knows and this does not."""
        for field in fields(self):
            if not getattr(self, field.name):
                setattr(self, field.name, getattr(other, field.name))

    def complete(self) -> None:
        """Of reserved and reserved-but-unallocated PyTorch prints one; the other follows from `allocated`."""
        if self.allocated is None:
            return
        if self.reserved is None and self.unallocated is not None:
            self.reserved = _sum(self.allocated, self.unallocated, 1)
        elif self.unallocated is None and self.reserved is not None:
            self.unallocated = _sum(self.reserved, self.allocated, -1)


def _sum(first: Size, second: Size, sign: int) -> Size:
    return Size(first.bytes + sign * second.bytes, first.rounding_bytes + second.rounding_bytes)


class Reading(BaseModel):
    """How one failure reads. Bytes are `round(number x unit)` of what is printed, null where it is not."""

    family: Family = "unknown"
    is_oom: bool | None = False
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    cause: Cause = "not_memory"
    advice: list[str] = []


class Event(Reading):
    """One failure found in a text: its line, shortened, and the line's number from 1."""

    line: str
    line_number: int


class Diagnosis(Reading):
    """The first memory failure of a text, and all failures found.

    `truncated` says that the text held more failures than are listed.
    """

    events: list[Event] = []
    truncated: bool = False
