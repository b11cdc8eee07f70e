"""Expandable segments: one range of addresses for each pool and stream, filled with pages as they are
needed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.memory.allocator.pool import FREE, Block, BlockPool
from kvlab.memory.allocator.sizes import SMALL_SEGMENT_BYTES

if TYPE_CHECKING:
    from kvlab.memory.allocator.core import CachingAllocator


@dataclass(frozen=True)
class ExpandableSegment:
    """A reserved range of addresses, mapped page by page (2 MiB in the small pool, 20 MiB in the large
    one)."""

    address: int
    size: int
    page_bytes: int

    def page_below(self, address: int) -> int:
        return self.address + (address - self.address) // self.page_bytes * self.page_bytes

    def page_above(self, address: int) -> int:
        return self.address - (self.address - address) // self.page_bytes * self.page_bytes


def best_place(free: list, place: int, *, expandable_on: bool) -> int | None:
    """Which free block best fit takes once it has met a block of an expandable segment
    (``get_free_block``).

    A block at the mapped end of its segment counts as large as it can still grow, so a larger block that
    cannot grow is taken before it. With expandable segments switched off meanwhile, their blocks are passed
    over.
    """
    if not expandable_on:
        while place < len(free) and free[place][3].expandable is not None:
            place += 1
        return place if place < len(free) else None
    while (
        free[place][3].expandable is not None
        and place + 1 < len(free)
        and _reach(free[place + 1][3]) < _reach(free[place][3])
    ):
        place += 1
    return place


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def allocate(allocator: "CachingAllocator", pool: BlockPool, size: int, stream: int) -> Block | None:
    """Map pages until a free block holds ``size``, at the lowest address that has room; None when out of
    memory.

    Pages mapped before the card ran out stay in the pool, as in ``try_allocate_expandable_block``.
    """
    block = _room(allocator, pool, size, stream)
    if not block.mapped and not _map(allocator, block, min(block.size, size)):
        return None
    while block.size < size:
        missing, block = size - block.size, block.next
        if not _map(allocator, block, min(missing, block.size)):
            return None
    pool.remove(block)
    return block


def _room(allocator: "CachingAllocator", pool: BlockPool, size: int, stream: int) -> Block:
    """The first free or unmapped block from which ``size`` bytes of address space are free."""
    for _, unmapped in pool.unmapped.get(stream, ()):
        before = unmapped.prev
        start = before if before is not None and before.state == FREE else unmapped
        if _has_room(start, size):
            return start
    return reserve(allocator, pool, stream)


def _has_room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None and block.state == FREE:
        size -= block.size
        block = block.next
    return size <= 0


def reserve(allocator: "CachingAllocator", pool: BlockPool, stream: int) -> Block:
    """A new range of addresses, 1 1/8 times as long as the card has memory."""
    page = SMALL_SEGMENT_BYTES if pool.is_small else allocator.settings.large_segment_bytes
    total = allocator.device.total_bytes
    size = -(-(total + total // 8) // page) * page
    segment = ExpandableSegment(allocator.device.reserve_addresses(size), size, page)
    block = Block(segment.address, size, stream, pool, allocator.next_age())
    block.mapped = False
    block.expandable = segment
    pool.put_unmapped(block)
    return block


def _map(allocator: "CachingAllocator", block: Block, size: int) -> bool:
    """Back the first ``size`` bytes of an unmapped block with whole pages (``map_block``)."""
    segment, pool = block.expandable, block.pool
    mapped = segment.page_above(block.address + size) - block.address
    address = block.address
    if not allocator.device.map(address, mapped):
        return False
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = _part(allocator, block, block.address + mapped, block.size - mapped)
        rest.mapped = False
        rest.splice(block, block.next)
        pool.put_unmapped(rest)
        block.size = mapped
    _merge_like(allocator, block)
    pool.put(block)
    allocator.change_reserved(pool, mapped)
    allocator.stats.num_device_alloc += 1
    allocator.record("segment_map", address, mapped, block.stream, pool.id)
    return True


def release(allocator: "CachingAllocator", block: Block) -> tuple[int, int]:
    """Unmap the whole pages inside a free block (``unmap_block``); returns their address and size, or (0,
    0)."""
    segment, pool = block.expandable, block.pool
    begin, end = segment.page_above(block.address), segment.page_below(block.address + block.size)
    if begin >= end:
        return 0, 0
    pool.remove(block)
    if begin > block.address:
        before = _part(allocator, block, block.address, begin - block.address)
        before.splice(block.prev, block)
        pool.put(before)
    if block.address + block.size > end:
        after = _part(allocator, block, end, block.address + block.size - end)
        after.splice(block, block.next)
        pool.put(after)
    block.address, block.size, block.mapped = begin, end - begin, False
    _merge_like(allocator, block)
    pool.put_unmapped(block)
    allocator.device.unmap(begin, end - begin)
    allocator.change_reserved(pool, begin - end)
    allocator.stats.num_device_free += 1
    allocator.record("segment_unmap", begin, end - begin, block.stream, pool.id)
    if block.prev is None and block.next is None:
        pool.remove_unmapped(block)
    return begin, end - begin


def _part(allocator: "CachingAllocator", whole: Block, address: int, size: int) -> Block:
    part = Block(address, size, whole.stream, whole.pool, allocator.age_of_part(whole))
    part.expandable = whole.expandable
    return part


def _merge_like(allocator: "CachingAllocator", block: Block) -> None:
    for neighbour in (block.prev, block.next):
        if neighbour is not None and neighbour.state == FREE and neighbour.mapped == block.mapped:
            allocator.merge(block, neighbour)
