"""CachingAllocator: PyTorch's CUDA caching allocator as a model that decides every address as it does."""

import pickle
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.memory.allocator import expandable
from kvlab.memory.allocator.device import Device
from kvlab.memory.allocator.export import export_snapshot
from kvlab.memory.allocator.messages import AbsurdRequestError, CudaOutOfMemoryError
from kvlab.memory.allocator.pool import ALLOCATED, DEFAULT_POOL, FREE, PENDING, Block, BlockPool, PoolId
from kvlab.memory.allocator.reclaim import collect_garbage, release_cached, release_oversize
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.allocator.sizes import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, round_size, segment_size
from kvlab.memory.allocator.stats import DeviceStats, change
from kvlab.memory.allocator.streams import PendingFrees

_LARGEST_SIZE = (1 << 64) - 1
_ONE_EXABYTE = 1 << 60


class InvalidPointerError(KvlabError, ValueError):
    """An address that holds no allocated block was freed or recorded."""


class CachingAllocator:
    """The caching allocator of one device (``c10/cuda/CUDACachingAllocator.cpp``).

    ``device`` answers for the memory below; ``settings`` are those of ``PYTORCH_CUDA_ALLOC_CONF``. Sizes
    and addresses are bytes, a stream is any integer, 0 the default one. The last ``max_history`` actions
    (None: all) are kept for ``snapshot()``. CUDA graphs are not modelled: what a private pool (``pool_id``
    other than (0, 0)) got, it keeps.
    """

    def __init__(
        self, device: Device, settings: AllocatorSettings | None = None, *, max_history: int | None = 0
    ) -> None:
        self.device = device
        self.settings = settings = settings or AllocatorSettings()
        self.stats = DeviceStats()
        self.pending = PendingFrees()
        self.reserved_bytes = 0
        self.limit_bytes: int | None = None
        self.max_split = _LARGEST_SIZE if settings.max_split_size_bytes is None else settings.max_split_size_bytes
        self._by_division = any(steps > 1 for steps in settings.roundup_power2_divisions)
        self._pools: dict[PoolId, tuple[BlockPool, BlockPool]] = {}
        self._default_pools = self.pools_of()
        self._allocated: dict[int, Block] = {}
        self._age = 0
        self._history: deque[tuple] | None = None if max_history == 0 else deque(maxlen=max_history)
        self.set_memory_fraction(settings.memory_fraction)

    # What a program does

    def malloc(self, requested_bytes: int, stream: int = 0, *, pool_id: PoolId = DEFAULT_POOL, frames: Any = ()) -> int:
        """Allocate and return the address; 0 bytes get no memory and the address 0.

        Raises CudaOutOfMemoryError, or from 2^60 bytes AbsurdRequestError, with PyTorch's own message.
        ``frames`` is kept with the block, as a recording keeps the stack of an allocation.
        """
        if not 0 < requested_bytes < _ONE_EXABYTE:
            return _odd_request(requested_bytes)
        if self.pending:
            self.complete_pending()
        pool, size = self.served_from(requested_bytes, pool_id)
        block = self._find(pool, size, stream) or self._obtain(pool, size, stream)
        block = self._take(block, size) if self._splits(pool, block.size, size) else self._take_whole(block)
        block.requested = requested_bytes
        block.frames = frames
        self._allocated[block.address] = block
        if self._history is not None:
            self.record("alloc", block.address, requested_bytes, stream, pool.id, frames)
        self._count_allocation(block)
        return block.address

    def served_from(self, requested_bytes: int, pool_id: PoolId = DEFAULT_POOL) -> tuple[BlockPool, int]:
        """The pool that serves a request, and the size to which the request is rounded."""
        divisions = self.settings.divisions(requested_bytes) if self._by_division else 0
        size = round_size(requested_bytes, divisions)
        small, large = self._default_pools if pool_id == DEFAULT_POOL else self.pools_of(pool_id)
        return (small if size <= SMALL_REQUEST_BYTES else large), size

    def free(self, address: int) -> None:
        """Free the block at ``address``; it stays active while a recorded stream still works on it."""
        if address == 0:
            return
        block = self.free_request(address)
        if block.stream_uses:
            self.pending.wait(block)
        else:
            self.free_complete(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that ``stream`` works on the block, so that a free waits for what that stream has queued."""
        block = self._block_at(address)
        if stream != block.stream:
            block.stream_uses = (block.stream_uses or set()) | {stream}

    def finish(self, stream: int) -> None:
        """Let all work queued on ``stream`` end; blocks that waited for it are free at the next malloc."""
        self.pending.finish(stream)

    def empty_cache(self) -> None:
        """Give every idle segment back to the driver (``torch.cuda.empty_cache``)."""
        release_cached(self)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to ``round(fraction * total)`` bytes; 1.0 removes the limit."""
        if not 0 <= fraction <= 1:
            raise KvlabError(f"invalid fraction:{fraction:g}. Please set within [0, 1].")
        self.limit_bytes = int(fraction * self.device.total_bytes + 0.5) if fraction < 1 else None

    # What a program reads

    def memory_stats(self) -> dict[str, int]:
        """The dictionary of ``torch.cuda.memory_stats``, key for key."""
        split = self.settings.max_split_size_bytes
        return self.stats.as_memory_stats(-1 if split is None else split)

    def reset_peak_stats(self) -> None:
        self.stats.reset_peak()

    def reset_accumulated_stats(self) -> None:
        self.stats.reset_accumulated()

    def snapshot(self) -> dict[str, Any]:
        """The dictionary of ``torch.cuda.memory._snapshot``, which ``torch.cuda._memory_viz`` reads.

        ``time_us`` of an action is its number, because the model has no clock.
        """
        return export_snapshot(self)

    def save_snapshot(self, path: str | Path) -> None:
        """Write ``snapshot()`` in pickle protocol 4, the highest that the viewers read."""
        Path(path).write_bytes(pickle.dumps(self.snapshot(), protocol=4))

    @property
    def history(self) -> list[tuple]:
        """The kept actions as (action, address, size, stream, pool id, frames), oldest first."""
        return list(self._history or ())

    def all_pools(self) -> Iterator[BlockPool]:
        for pools in self._pools.values():
            yield from pools

    def blocks(self) -> Iterator[Block]:
        """Every block of every segment, in no order; of unmapped addresses there is none."""
        for pool in self.all_pools():
            yield from pool.free_blocks()
        yield from self._allocated.values()
        yield from self.pending.blocks()

    def free_blocks_at_least(self, size: int, stream: int) -> Iterator[Block]:
        """The free blocks of a stream, in all pools, that hold ``size`` bytes."""
        for pool in self.all_pools():
            free, place = pool.at_least(size, stream)
            yield from (entry[3] for entry in free[place:])

    # The two halves of a free, apart because a recording shows when each happened

    def free_request(self, address: int) -> Block:
        """The owner lets go: the block is no longer allocated, though still active."""
        block = self._block_at(address)
        del self._allocated[address]
        block.state = PENDING
        size = block.size
        for counters in (self.stats.all, block.pool.stats):
            counters.allocation.decrease(1)
            counters.allocated_bytes.decrease(size)
        if self._history is not None:
            self.record("free_requested", address, block.requested, block.stream, block.pool.id, block.frames)
        if size >= self.max_split:
            self.stats.oversize_allocations.decrease(1)
        return block

    def free_complete(self, block: Block) -> None:
        """Merge the block with its free neighbours and put it into its pool (``free_block``)."""
        size, pool = block.size, block.pool
        if self._history is not None:
            self.record("free_completed", block.address, block.requested, block.stream, pool.id, block.frames)
        block.state = FREE
        block.frames = ()
        split_count, split_bytes = 0, 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE and neighbour.mapped:
                split_count -= 1
                split_bytes -= neighbour.size
                self.merge(block, neighbour)
        pool.put(block)
        if block.is_split:
            split_count += 1
            split_bytes += block.size
        for counters in (self.stats.all, pool.stats):
            if block.expandable is None and split_bytes:
                change(counters.inactive_split, split_count)
                change(counters.inactive_split_bytes, split_bytes)
            counters.active.decrease(1)
            counters.active_bytes.decrease(size)
            counters.requested_bytes.decrease(block.requested)

    def complete_pending(self) -> None:
        """Free the blocks whose streams have finished."""
        for block in self.pending.pop_ready():
            self.free_complete(block)

    # Finding a block and taking it

    def _find(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Best fit: the smallest free block of the stream that holds ``size`` (``get_free_block``).

        When ``max_split_size`` forbids that one, no other is tried.
        """
        if self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0:
            pool.take_calls += 1
        free, place = pool.at_least(size, stream)
        if place == len(free):
            return None
        block = free[place][3]
        if block.expandable is not None:
            place = expandable.best_place(free, place, expandable_on=self.settings.expandable_segments)
            if place is None:
                return None
            block = free[place][3]
        if size < self.max_split:
            if block.size >= self.max_split:
                return None
        elif block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        del free[place]
        return block

    def _splits(self, pool: BlockPool, block_size: int, size: int) -> bool:
        """Whether the rest of a block becomes a block of its own (``should_split``).

        In the large pool only a rest above 1 MiB does; a smaller one stays and counts as allocated.
        """
        rest = block_size - size
        if pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return size < self.max_split and rest > SMALL_REQUEST_BYTES

    def _take_whole(self, block: Block) -> Block:
        if block.is_split and block.expandable is None:
            for counters in (self.stats.all, block.pool.stats):
                counters.inactive_split.decrease(1)
                counters.inactive_split_bytes.decrease(block.size)
        block.state = ALLOCATED
        return block

    def _take(self, rest: Block, size: int) -> Block:
        """Cut ``size`` bytes off the front of a block; what remains goes back into the pool."""
        pool, was_split = rest.pool, rest.is_split
        block = Block(rest.address, size, rest.stream, pool, self.age_of_part(rest))
        block.state = ALLOCATED
        block.expandable = rest.expandable
        block.splice(rest.prev, rest)
        rest.address += size
        rest.size -= size
        pool.put(rest)
        if block.expandable is None:
            for counters in (self.stats.all, pool.stats):
                if was_split:
                    counters.inactive_split_bytes.decrease(size)
                else:
                    counters.inactive_split_bytes.increase(rest.size)
                    counters.inactive_split.increase(1)
        return block

    def merge(self, block: Block, neighbour: Block) -> None:
        """``block`` swallows an adjacent neighbour of the same kind (``try_merge_blocks``)."""
        if neighbour is block.prev:
            block.address = neighbour.address
            block.prev = neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        block.size += neighbour.size

    # Growing, and what is tried when the card refuses

    def _obtain(self, pool: BlockPool, size: int, stream: int) -> Block:
        """A block of new memory; on refusal, of what idle segments give back; else out of memory.

        The pool is not searched again after idle segments were given back, so a block that another stream was
        still holding does not help although it is free by then.
        """
        tried = segment_size(size, self.settings.large_segment_bytes)
        if self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0:
            collect_garbage(self, self.limit_bytes)
        block = self._grow(pool, size, tried, stream)
        if block is None and release_oversize(self, pool, size, stream):
            block = self._grow(pool, size, tried, stream)
        if block is None:
            release_cached(self)
            self.stats.num_alloc_retries += 1
            block = self._grow(pool, size, tried, stream)
        if block is None:
            raise self._out_of_memory(pool, size, tried, stream)
        return block

    def _grow(self, pool: BlockPool, size: int, tried: int, stream: int) -> Block | None:
        """A new segment, or more pages of an expandable one (``alloc_block``); None when there is no room.

        The limit is checked against the whole segment, even where an expandable one would map less.
        """
        if self.limit_bytes is not None and self.reserved_bytes + tried > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.allocate(self, pool, size, stream)
        address = self.device.malloc(tried)
        if address is None:
            return None
        block = Block(address, tried, stream, pool, self.next_age())
        self.change_reserved(pool, tried)
        for counters in (self.stats.all, pool.stats):
            counters.segment.increase(1)
        if tried >= self.max_split:
            self.stats.oversize_segments.increase(1)
        self.stats.num_device_alloc += 1
        self.record("segment_alloc", address, tried, stream, pool.id)
        return block

    def _out_of_memory(self, pool: BlockPool, size: int, tried: int, stream: int) -> CudaOutOfMemoryError:
        free_bytes = self.device.free_bytes
        self.record("oom", free_bytes, size, stream, pool.id)
        self.stats.num_ooms += 1
        private = (p for pool_id, pools in self._pools.items() if pool_id != DEFAULT_POOL for p in pools)
        return CudaOutOfMemoryError(
            tried_bytes=tried,
            block_bytes=size,
            total_bytes=self.device.total_bytes,
            free_bytes=free_bytes,
            allocated_bytes=self.stats.all.allocated_bytes.current,
            reserved_bytes=self.reserved_bytes,
            limit_bytes=self.limit_bytes,
            private_pool_bytes=sum(b.size for p in private for b in p.free_blocks()),
            device=self.device.index,
            processes=self.device.processes,
        )

    # Bookkeeping

    def adopt(self, blocks: list[Block], *, is_segment: bool) -> None:
        """Take over linked blocks that exist already: a whole segment, or a run of pages of an expandable
        one."""
        pool = blocks[0].pool
        mapped = sum(b.size for b in blocks if b.mapped)
        self.change_reserved(pool, mapped)
        self.device.held_bytes += mapped
        for counters in (self.stats.all, pool.stats):
            counters.segment.increase(int(is_segment))
        for block in blocks:
            if not block.mapped:
                pool.put_unmapped(block)
            elif block.state == FREE:
                pool.put(block)
                if block.is_split and is_segment:
                    for counters in (self.stats.all, pool.stats):
                        counters.inactive_split.increase(1)
                        counters.inactive_split_bytes.increase(block.size)
            else:
                self._allocated[block.address] = block
                self._count_allocation(block)

    def change_reserved(self, pool: BlockPool, size: int) -> None:
        """Count ``size`` bytes as reserved, or with a negative size as given back."""
        self.reserved_bytes += size
        for counters in (self.stats.all, pool.stats):
            change(counters.reserved_bytes, size)
        if pool.id != DEFAULT_POOL:
            self.stats.change_private_pool(pool.id, "small_pool" if pool.is_small else "large_pool", size)

    def _count_allocation(self, block: Block) -> None:
        size, requested = block.size, block.requested
        for counters in (self.stats.all, block.pool.stats):
            counters.allocation.increase(1)
            counters.allocated_bytes.increase(size)
            counters.active.increase(1)
            counters.active_bytes.increase(size)
            counters.requested_bytes.increase(requested)
        if size >= self.max_split:
            self.stats.oversize_allocations.increase(1)

    def record(self, action: str, address: int, size: int, stream: int, pool_id: PoolId, frames: Any = ()) -> None:
        if self._history is not None:
            self._history.append((action, address, size, stream, pool_id, frames))

    def next_age(self) -> int:
        """The age of a new segment; 0 where only addresses break ties."""
        if self.settings.tie_break == "address":
            return 0
        self._age += 1
        return self._age

    def age_of_part(self, whole: Block) -> int:
        return self.next_age() if self.settings.tie_break == "block_age" else whole.age

    def pools_of(self, pool_id: PoolId = DEFAULT_POOL) -> tuple[BlockPool, BlockPool]:
        """The small and the large pool of a memory pool."""
        pools = self._pools.get(pool_id)
        if pools is None:
            pools = self._pools[pool_id] = (
                BlockPool(is_small=True, pool_id=pool_id, stats=self.stats.small_pool),
                BlockPool(is_small=False, pool_id=pool_id, stats=self.stats.large_pool),
            )
        return pools

    def _block_at(self, address: int) -> Block:
        try:
            return self._allocated[address]
        except KeyError:
            raise InvalidPointerError(f"invalid device pointer: {address:#x}") from None


def _odd_request(requested_bytes: int) -> int:
    if requested_bytes == 0:
        return 0
    if requested_bytes < 0:
        raise KvlabError(f"cannot allocate {requested_bytes} bytes")
    raise AbsurdRequestError
