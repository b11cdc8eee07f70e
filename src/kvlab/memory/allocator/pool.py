"""Blocks of device memory, and the pool that keeps free ones in the order in which best fit takes them."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from kvlab.memory.allocator.stats import PoolStats

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)

FREE, ALLOCATED, PENDING = range(3)
"""A block's state; PENDING is freed by its owner but still used by work on another stream."""


class Block:
    """A piece of a segment, linked to the pieces before and after it.

    ``age`` takes part in breaking ties of best fit (see ``TieBreak``). ``expandable`` is the expandable
    segment the block lies in, else None; only there can a block be unmapped (addresses without memory).
    """

    __slots__ = (
        "address",
        "age",
        "expandable",
        "frames",
        "gc_base",
        "mapped",
        "next",
        "pending_events",
        "pool",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "stream_uses",
    )

    def __init__(self, address: int, size: int, stream: int, pool: "BlockPool", age: int) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.age = age
        self.requested = 0
        self.state = FREE
        self.prev: Block | None = None
        self.next: Block | None = None
        self.mapped = True
        self.expandable: Any = None
        self.stream_uses: set[int] | None = None
        self.pending_events = 0
        self.gc_base = 0
        self.frames: Any = ()

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def splice(self, before: "Block | None", after: "Block | None") -> None:
        """Link this block in between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class BlockPool:
    """The free blocks of one size class of one memory pool, ordered by (stream, size, age, address)."""

    __slots__ = ("_free", "id", "is_small", "stats", "take_calls", "unmapped")

    def __init__(self, *, is_small: bool, pool_id: PoolId, stats: PoolStats) -> None:
        self.is_small = is_small
        self.id = pool_id
        self.stats = stats
        self.take_calls = 0
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self._free: dict[int, list[tuple[int, int, int, Block]]] = {}

    def put(self, block: Block) -> None:
        block.gc_base = self.take_calls
        entry = (block.size, block.age, block.address, block)
        try:
            insort(self._free[block.stream], entry)
        except KeyError:
            self._free[block.stream] = [entry]

    def remove(self, block: Block) -> None:
        free = self._free[block.stream]
        del free[bisect_left(free, (block.size, block.age, block.address))]

    def at_least(self, size: int, stream: int) -> tuple[list[tuple[int, int, int, Block]], int]:
        """The stream's free blocks in order, and the place of the first that holds ``size`` bytes."""
        free = self._free.get(stream, [])
        return free, bisect_left(free, (size,))

    def sort(self) -> None:
        """Put the free blocks in order again, after their ages were changed."""
        for stream, free in self._free.items():
            self._free[stream] = sorted((b.size, b.age, b.address, b) for *_, b in free)

    def free_blocks(self) -> Iterator[Block]:
        """Every free block, streams in ascending order; the pool must not change meanwhile."""
        for stream in sorted(self._free):
            for entry in self._free[stream]:
                yield entry[3]

    def put_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        unmapped = self.unmapped[block.stream]
        del unmapped[bisect_left(unmapped, (block.address,))]
