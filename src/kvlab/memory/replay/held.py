"""What an allocator held before a recording began."""

from dataclasses import dataclass, field, replace

from kvlab.memory.allocator.pool import PoolId


@dataclass(slots=True)
class HeldBlock:
    """A block in use. ``size_known`` is False if only the request for it was recorded, not its size."""

    size: int
    requested: int
    pending: bool
    size_known: bool = True


@dataclass(slots=True)
class HeldSegment:
    """A segment, or a run of mapped pages of an expandable one."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId
    is_expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def range_key(self) -> tuple[int, bool, PoolId]:
        return self.stream, self.is_small, self.pool_id

    def part(self, begin: int, end: int) -> "HeldSegment":
        return replace(self, address=begin, size=end - begin)


@dataclass
class InitialState:
    """Segments in order of address, and the blocks in use in them by address; the rest of a segment is
    free. ``unsettled`` are segments with a block whose end the recording does not show."""

    segments: list[HeldSegment] = field(default_factory=list)
    blocks: dict[int, HeldBlock] = field(default_factory=dict)
    unsettled: list[HeldSegment] = field(default_factory=list)

    def is_unsettled(self, address: int) -> bool:
        return any(s.address <= address < s.end for s in self.unsettled)
