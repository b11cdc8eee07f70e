"""Giving memory back to the driver: one segment, oversize ones, all idle ones, or those unused for long."""

from typing import TYPE_CHECKING

from kvlab.memory.allocator import expandable
from kvlab.memory.allocator.pool import Block, BlockPool

if TYPE_CHECKING:
    from kvlab.memory.allocator.core import CachingAllocator


def release_segment(allocator: "CachingAllocator", block: Block) -> None:
    """cudaFree a segment that is one free block in its pool (``release_block``)."""
    pool, stats = block.pool, allocator.stats
    stats.num_device_free += 1
    allocator.record("segment_free", block.address, block.size, block.stream, pool.id)
    allocator.device.free(block.address, block.size)
    allocator.change_reserved(pool, -block.size)
    for counters in (stats.all, pool.stats):
        counters.segment.decrease(1)
    if block.size >= allocator.max_split:
        stats.oversize_segments.decrease(1)
    pool.remove(block)


def release_oversize(allocator: "CachingAllocator", pool: BlockPool, size: int, stream: int) -> bool:
    """Give back just enough blocks above ``max_split_size`` (``release_available_cached_blocks``).

    One that holds ``size``, else the largest ones down to ``max_split_size``; True if they add up to enough.
    """
    if allocator.settings.max_split_size_bytes is None:
        return False
    wanted = max(size, allocator.max_split)
    free, place = pool.at_least(wanted, stream)
    if place < len(free) and free[place][3].expandable is None:
        release_segment(allocator, free[place][3])
        return True
    released = 0
    for *_, block in reversed(free[:place]):
        if released >= wanted or block.size < allocator.max_split:
            break
        if block.expandable is None:
            released += block.size
            release_segment(allocator, block)
    return released >= wanted


def release_cached(allocator: "CachingAllocator") -> None:
    """Wait for every stream, then give back each idle segment (``release_cached_blocks``).

    The large pool comes first, then the small one; in each by size, pages of expandable segments last.
    """
    allocator.stats.num_sync_all_streams += 1
    allocator.pending.finish_all()
    allocator.complete_pending()
    small, large = allocator.pools_of()
    for pool in (large, small):
        idle = list(pool.free_blocks())
        for block in idle:
            if block.expandable is None and not block.is_split:
                release_segment(allocator, block)
        for block in idle:
            if block.expandable is not None:
                expandable.release(allocator, block)


def collect_garbage(allocator: "CachingAllocator", limit: int) -> None:
    """Give back idle large segments that were passed over longer than average, until below the threshold.

    Age counts the searches of the pool since the block was freed (``garbage_collect_cached_blocks``).
    """
    threshold = int(allocator.settings.garbage_collection_threshold * limit)
    target, pool = allocator.reserved_bytes - threshold, allocator.pools_of()[1]
    idle = [b for b in pool.free_blocks() if not b.is_split]
    reclaimed, freed = 0, True
    while reclaimed < target and freed and idle:
        average = sum(pool.take_calls - b.gc_base for b in idle) / len(idle)
        old = [b for b in idle if b.expandable is None and pool.take_calls - b.gc_base >= average]
        freed = bool(old)
        for block in old:
            reclaimed += block.size
            release_segment(allocator, block)
        idle = [b for b in idle if b.expandable is not None or pool.take_calls - b.gc_base < average]
