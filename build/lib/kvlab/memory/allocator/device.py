"""The card under the allocator: how many bytes it has, who else holds some, and where cudaMalloc puts a
segment."""

from dataclasses import dataclass, field

_ADDRESS_GRAIN_BYTES = 2 << 20


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds device memory, as NVML lists it; ``pid`` None is this process."""

    pid: int | None
    used_bytes: int


@dataclass
class Device:
    """A card with ``total_bytes``, of which ``other_bytes`` belong to contexts, libraries and other
    processes.

    Addresses are handed out upwards and never twice, so that a trace names a segment without doubt; a
    driver does reuse them. ``processes`` is what an out-of-memory message lists where NVML can be read.
    """

    total_bytes: int
    other_bytes: int = 0
    index: int = 0
    processes: tuple[GpuProcess, ...] = ()
    next_address: int = field(default=0x7F00_0000_0000, repr=False)
    held_bytes: int = field(default=0, init=False)

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo would call free."""
        return self.total_bytes - self.other_bytes - self.held_bytes

    def malloc(self, size_bytes: int) -> int | None:
        """cudaMalloc: the address of ``size_bytes`` of memory, or None when the card has not enough."""
        if size_bytes > self.free_bytes:
            return None
        self.held_bytes += size_bytes
        return self.reserve_addresses(size_bytes)

    def free(self, address: int, size_bytes: int) -> None:
        """cudaFree."""
        self.held_bytes -= size_bytes

    def reserve_addresses(self, size_bytes: int) -> int:
        """A range of addresses without memory that no one else gets (cuMemAddressReserve)."""
        address = self.next_address
        self.next_address += -(-size_bytes // _ADDRESS_GRAIN_BYTES) * _ADDRESS_GRAIN_BYTES
        return address

    def map(self, address: int, size_bytes: int) -> bool:
        """Put pages of memory behind a reserved range (cuMemCreate, cuMemMap); False when there are too
        few."""
        if size_bytes > self.free_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take the pages away again (cuMemUnmap, cuMemRelease)."""
        self.held_bytes -= size_bytes
