"""CachingAllocator: PyTorch's CUDA caching allocator as a model that decides every address as the original does."""

import pickle
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.memory.allocator import expandable
from kvlab.memory.allocator.device import Device
from kvlab.memory.allocator.export import export_snapshot
from kvlab.memory.allocator.messages import CudaOutOfMemoryError
from kvlab.memory.allocator.pool import ALLOCATED, DEFAULT_POOL, FREE, PENDING, Block, BlockPool, PoolId
from kvlab.memory.allocator.settings import AllocatorSettings
from kvlab.memory.allocator.sizes import (
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    round_size,
    segment_size,
)
from kvlab.memory.allocator.stats import DeviceStats, change

UNLIMITED = (1 << 64) - 1
"""``max_split_size`` when it is not set: the largest size_t."""


class InvalidPointerError(KvlabError, ValueError):
    """An address that holds no allocated block was freed or recorded."""


class CachingAllocator:
    """The caching allocator of one device (``c10/cuda/CUDACachingAllocator.cpp``).

    ``device`` answers for the memory below; ``settings`` are those of ``PYTORCH_CUDA_ALLOC_CONF``. Sizes and
    addresses are integers in bytes, a stream is any integer, 0 the default one. With ``max_history`` not 0 every
    action is kept for ``snapshot()`` (None: all of them). CUDA graphs are not modelled: a private pool
    (``pool_id`` other than (0, 0)) is never given back.
    """

    def __init__(
        self,
        device: Device,
        settings: AllocatorSettings | None = None,
        *,
        max_history: int | None = 0,
    ) -> None:
        self.device = device
        self.settings = settings = settings or AllocatorSettings()
        self.stats = DeviceStats()
        self.reserved_bytes = 0
        self.max_split = UNLIMITED if settings.max_split_size_bytes is None else settings.max_split_size_bytes
        self._by_division = any(steps > 1 for steps in settings.roundup_power2_divisions)
        self._limit: int | None = None
        self._pools: dict[PoolId, tuple[BlockPool, BlockPool]] = {}
        self._default_pools = self._pools_of(DEFAULT_POOL)
        self._allocated: dict[int, Block] = {}
        self._events: dict[int, deque[tuple[int, Block]]] = {}
        self._recorded: dict[int, int] = {}
        self._completed: dict[int, int] = {}
        self._age = 0
        self._history: deque[tuple] | None = None if max_history == 0 else deque(maxlen=max_history)
        self.set_memory_fraction(settings.memory_fraction)

    # What a program does

    def malloc(
        self, requested_bytes: int, stream: int = 0, *, pool_id: PoolId = DEFAULT_POOL, frames: Any = ()
    ) -> int:
        """Allocate and return the address. Raises CudaOutOfMemoryError with PyTorch's own message.

        ``frames`` is kept with the block, as a recording keeps the stack of an allocation.
        """
        if self._events:
            self._process_events()
        if self._by_division:
            size = round_size(requested_bytes, self.settings.divisions(requested_bytes))
        else:
            size = round_size(requested_bytes)
        small, large = self._default_pools if pool_id == DEFAULT_POOL else self._pools_of(pool_id)
        pool = small if size <= SMALL_REQUEST_BYTES else large
        block = self._find(pool, size, stream) or self._obtain(pool, size, stream)
        block = self._take(block, size, self._splits(pool, block.size, size))
        block.requested = requested_bytes
        block.frames = frames
        self._allocated[block.address] = block
        if self._history is not None:
            self.record("alloc", block.address, requested_bytes, stream, pool.id, frames)
        self._count_allocation(block)
        return block.address

    def free(self, address: int) -> None:
        """Free the block at ``address``; it stays active while a recorded stream still works on it."""
        block = self.free_request(address)
        if block.stream_uses:
            self._insert_events(block)
        else:
            self.free_complete(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that ``stream`` works on the block, so that a free waits for what that stream has queued."""
        block = self._block_at(address)
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)

    def finish(self, stream: int) -> None:
        """Let all work queued on ``stream`` end; blocks that waited for it are free at the next malloc."""
        self._completed[stream] = self._recorded.get(stream, 0)

    def empty_cache(self) -> None:
        """Give every idle segment back to the driver (``torch.cuda.empty_cache``)."""
        self._release_cached()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to ``round(fraction * total)`` bytes; 1.0 removes the limit."""
        if not 0 <= fraction <= 1:
            raise KvlabError(f"invalid fraction:{fraction:g}. Please set within [0, 1].")
        self._limit = int(fraction * self.device.total_bytes + 0.5) if fraction < 1 else None

    # What a program reads

    @property
    def limit_bytes(self) -> int | None:
        return self._limit

    def memory_stats(self) -> dict[str, int]:
        """The dictionary of ``torch.cuda.memory_stats``, key for key."""
        split = -1 if self.max_split == UNLIMITED else self.max_split
        return self.stats.as_memory_stats(split)

    def snapshot(self) -> dict[str, Any]:
        """The dictionary of ``torch.cuda.memory._snapshot``, which ``torch.cuda._memory_viz`` reads.

        ``time_us`` of an action is its number, because the model has no clock.
        """
        return export_snapshot(self)

    def save_snapshot(self, path: str | Path) -> None:
        """Write ``snapshot()`` in pickle protocol 4, the highest that the viewers read."""
        Path(path).write_bytes(pickle.dumps(self.snapshot(), protocol=4))

    def reset_peak_stats(self) -> None:
        self.stats.reset_peak()

    def reset_accumulated_stats(self) -> None:
        self.stats.reset_accumulated()

    def blocks(self) -> Iterator[Block]:
        """Every block of every segment, in no order; unmapped addresses are left out."""
        for pools in self._pools.values():
            for pool in pools:
                yield from pool.free_blocks()
        yield from self._allocated.values()
        yield from {id(b): b for events in self._events.values() for _, b in events}.values()

    def free_blocks_at_least(self, size: int, stream: int) -> Iterator[Block]:
        """The free blocks of a stream, in all pools, that hold ``size`` bytes."""
        for pools in self._pools.values():
            for pool in pools:
                free, place = pool.at_least(size, stream)
                yield from (entry[3] for entry in free[place:])

    @property
    def history(self) -> list[tuple]:
        """The recorded actions as (action, address, size, stream, pool id, frames), oldest first."""
        return list(self._history or ())

    # The two halves of a free, apart because a recording shows when each happened

    def free_request(self, address: int) -> Block:
        """The owner lets go: the block is no longer allocated, though still active."""
        block = self._block_at(address)
        del self._allocated[address]
        block.state = PENDING
        size = block.size
        for stats in (self.stats.all, block.pool.stats):
            stats.allocation.decrease(1)
            stats.allocated_bytes.decrease(size)
        if self._history is not None:
            self.record("free_requested", address, block.requested, block.stream, block.pool.id, block.frames)
        if size >= self.max_split:
            self.stats.oversize_allocations.decrease(1)
        return block

    def free_complete(self, block: Block) -> None:
        """Merge the block with its free neighbours and put it into its pool (``free_block``)."""
        if self._history is not None:
            self.record(
                "free_completed", block.address, block.requested, block.stream, block.pool.id, block.frames
            )
        size, pool = block.size, block.pool
        block.state = FREE
        block.frames = ()
        merged, merged_bytes = 0, 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE and neighbour.mapped:
                merged += 1
                merged_bytes += neighbour.size
                self.merge(block, neighbour)
        pool.put(block)
        count, size_change = -merged, -merged_bytes
        if block.is_split:
            count += 1
            size_change += block.size
        for stats in (self.stats.all, pool.stats):
            if block.expandable is None and size_change:
                change(stats.inactive_split, count)
                change(stats.inactive_split_bytes, size_change)
            stats.active.decrease(1)
            stats.active_bytes.decrease(size)
            stats.requested_bytes.decrease(block.requested)

    # Finding a block

    def _find(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Best fit: the smallest free block of the stream that holds ``size`` (``get_free_block``).

        When ``max_split_size`` forbids that one, no other is tried.
        """
        if self._limit is not None and self.settings.garbage_collection_threshold > 0:
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

        In the large pool only a rest above 1 MiB does; a smaller one stays with its block and counts as allocated.
        """
        rest = block_size - size
        if pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return size < self.max_split and rest > SMALL_REQUEST_BYTES

    def _take(self, block: Block, size: int, split: bool) -> Block:
        """Make ``block``, or its front part of ``size`` bytes, allocated; the rest goes back into the pool."""
        if not split:
            if block.is_split and block.expandable is None:
                for stats in (self.stats.all, block.pool.stats):
                    stats.inactive_split.decrease(1)
                    stats.inactive_split_bytes.decrease(block.size)
            block.state = ALLOCATED
            return block
        rest, pool = block, block.pool
        was_split = rest.is_split
        block = Block(rest.address, size, rest.stream, pool, self.age_of_part(rest))
        block.state = ALLOCATED
        block.expandable = rest.expandable
        block.splice(rest.prev, rest)
        rest.address += size
        rest.size -= size
        pool.put(rest)
        if block.expandable is None:
            for stats in (self.stats.all, pool.stats):
                if was_split:
                    stats.inactive_split_bytes.decrease(size)
                else:
                    stats.inactive_split_bytes.increase(rest.size)
                    stats.inactive_split.increase(1)
        return block

    def _count_allocation(self, block: Block) -> None:
        size, requested = block.size, block.requested
        for stats in (self.stats.all, block.pool.stats):
            stats.allocation.increase(1)
            stats.allocated_bytes.increase(size)
            stats.active.increase(1)
            stats.active_bytes.increase(size)
            stats.requested_bytes.increase(requested)
        if size >= self.max_split:
            self.stats.oversize_allocations.increase(1)

    # Growing, and what is tried when the card refuses

    def _obtain(self, pool: BlockPool, size: int, stream: int) -> Block:
        """A block from new memory; on refusal from memory that idle segments give back, else out of memory."""
        tried = segment_size(size, self.settings.large_segment_bytes)
        if self._limit is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage(self._limit)
        block = self._grow(pool, size, tried, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._grow(pool, size, tried, stream)
        if block is None:
            self._release_cached()
            self.stats.num_alloc_retries += 1
            block = self._grow(pool, size, tried, stream)
        if block is None:
            raise self._out_of_memory(pool, size, tried, stream)
        return block

    def _grow(self, pool: BlockPool, size: int, tried: int, stream: int) -> Block | None:
        """A new segment, or more pages of an expandable one (``alloc_block``); None when there is no room.

        The limit is checked against the whole segment, even where an expandable segment would map less.
        """
        if self._limit is not None and self.reserved_bytes + tried > self._limit:
            return None
        if self.settings.expandable_segments:
            return expandable.allocate(self, pool, size, stream)
        address = self.device.malloc(tried)
        if address is None:
            return None
        return self.add_segment(address, tried, stream, pool)

    def add_segment(self, address: int, size: int, stream: int, pool: BlockPool) -> Block:
        """Take a fresh cudaMalloc into the books; returns its one free block, which is in no pool yet."""
        block = Block(address, size, stream, pool, self.next_age())
        self._change_reserved(pool, size)
        for stats in (self.stats.all, pool.stats):
            stats.segment.increase(1)
        if size >= self.max_split:
            self.stats.oversize_segments.increase(1)
        self.stats.num_device_alloc += 1
        if self._history is not None:
            self.record("segment_alloc", address, size, stream, pool.id)
        return block

    def adopt_segment(self, blocks: list[Block], segment_bytes: int, pending: dict[int, Block]) -> None:
        """Take over linked blocks that exist already: a whole segment, or with 0 bytes a run of pages.

        Free ones go into their pools, those that wait for another stream into ``pending``.
        """
        pool = blocks[0].pool
        mapped = sum(b.size for b in blocks if b.mapped)
        self._change_reserved(pool, mapped)
        self.device.held_bytes += mapped
        if segment_bytes:
            for stats in (self.stats.all, pool.stats):
                stats.segment.increase(1)
        for block in blocks:
            if not block.mapped:
                pool.put_unmapped(block)
            elif block.state == FREE:
                pool.put(block)
                if block.is_split and block.expandable is None:
                    for stats in (self.stats.all, pool.stats):
                        stats.inactive_split.increase(1)
                        stats.inactive_split_bytes.increase(block.size)
            else:
                self._count_allocation(block)
                self._allocated[block.address] = block
                if block.state == PENDING:
                    pending[block.address] = self.free_request(block.address)

    def release_segment(self, block: Block) -> None:
        """cudaFree a segment that is one free block in its pool (``release_block``)."""
        pool = block.pool
        self.stats.num_device_free += 1
        if self._history is not None:
            self.record("segment_free", block.address, block.size, block.stream, pool.id)
        self.device.free(block.address, block.size)
        self._change_reserved(pool, -block.size)
        for stats in (self.stats.all, pool.stats):
            stats.segment.decrease(1)
        if block.size >= self.max_split:
            self.stats.oversize_segments.decrease(1)
        pool.remove(block)

    def _release_oversize(self, pool: BlockPool, size: int, stream: int) -> bool:
        """With ``max_split_size``: give back just enough oversize blocks (``release_available_cached_blocks``)."""
        if self.max_split == UNLIMITED:
            return False
        wanted = max(size, self.max_split)
        free, place = pool.at_least(wanted, stream)
        if place < len(free) and free[place][3].expandable is None:
            self.release_segment(free[place][3])
            return True
        released = 0
        for *_, block in reversed(free[:place]):
            if released >= wanted or block.size < self.max_split:
                break
            if block.expandable is None:
                released += block.size
                self.release_segment(block)
        return released >= wanted

    def _release_cached(self) -> None:
        """Wait for every stream, then give back each idle segment: the large pool first, then the small one."""
        self.stats.num_sync_all_streams += 1
        for stream in self._events:
            self.finish(stream)
        self._process_events()
        small, large = self._default_pools
        for pool in (large, small):
            idle = list(pool.free_blocks())
            for block in idle:
                if block.expandable is None and not block.is_split:
                    self.release_segment(block)
            for block in idle:
                if block.expandable is not None:
                    expandable.release(self, block)

    def _collect_garbage(self, limit: int) -> None:
        """Give back idle large segments that were passed over longer than average, until below the threshold."""
        threshold = int(self.settings.garbage_collection_threshold * limit)
        if self.reserved_bytes <= threshold:
            return
        target, pool = self.reserved_bytes - threshold, self._default_pools[1]
        idle = [b for b in pool.free_blocks() if not b.is_split]
        reclaimed, freed = 0, True
        while reclaimed < target and freed and idle:
            average = sum(pool.take_calls - b.gc_base for b in idle) / len(idle)
            old = [b for b in idle if b.expandable is None and pool.take_calls - b.gc_base >= average]
            freed = bool(old)
            for block in old:
                reclaimed += block.size
                self.release_segment(block)
            idle = [b for b in idle if b.expandable is not None or pool.take_calls - b.gc_base < average]

    def _out_of_memory(self, pool: BlockPool, size: int, tried: int, stream: int) -> CudaOutOfMemoryError:
        free_bytes = self.device.free_bytes
        if self._history is not None:
            self.record("oom", free_bytes, size, stream, pool.id)
        self.stats.num_ooms += 1
        private = sum(
            block.size
            for pool_id, pools in self._pools.items()
            if pool_id != DEFAULT_POOL
            for one in pools
            for block in one.free_blocks()
        )
        return CudaOutOfMemoryError(
            tried_bytes=tried,
            block_bytes=size,
            total_bytes=self.device.total_bytes,
            free_bytes=free_bytes,
            allocated_bytes=self.stats.all.allocated_bytes.current,
            reserved_bytes=self.stats.all.reserved_bytes.current,
            limit_bytes=self._limit,
            private_pool_bytes=private,
            device=self.device.index,
            processes=self.device.processes,
        )

    # Streams

    def _insert_events(self, block: Block) -> None:
        """One event on each stream that used the block; the block is free when all have passed."""
        streams, block.stream_uses = block.stream_uses or set(), None
        for stream in streams:
            at = self._recorded[stream] = self._recorded.get(stream, 0) + 1
            block.pending_events += 1
            self._events.setdefault(stream, deque()).append((at, block))

    def _process_events(self) -> None:
        for stream, events in list(self._events.items()):
            done = self._completed.get(stream, 0)
            while events and events[0][0] <= done:
                _, block = events.popleft()
                block.pending_events -= 1
                if block.pending_events == 0:
                    self.free_complete(block)
            if not events:
                del self._events[stream]

    def wait_for(self, block: Block, stream: int) -> int:
        """Let a block whose free was requested wait until ``finish(stream)``; returns the stream."""
        block.stream_uses = {stream}
        self._insert_events(block)
        return stream

    # Bookkeeping shared with expandable segments

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

    def count_mapping(self, pool: BlockPool, size: int) -> None:
        """Pages of an expandable segment were mapped, or with a negative size unmapped."""
        self._change_reserved(pool, size)
        if size > 0:
            self.stats.num_device_alloc += 1
        else:
            self.stats.num_device_free += 1

    def _change_reserved(self, pool: BlockPool, size: int) -> None:
        self.reserved_bytes += size
        for stats in (self.stats.all, pool.stats):
            change(stats.reserved_bytes, size)
        if pool.id != DEFAULT_POOL:
            self.stats.change_private_pool(pool.id, "small_pool" if pool.is_small else "large_pool", size)

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

    def pool_for(self, *, is_small: bool, pool_id: PoolId = DEFAULT_POOL) -> BlockPool:
        return self._pools_of(pool_id)[0 if is_small else 1]

    def _pools_of(self, pool_id: PoolId) -> tuple[BlockPool, BlockPool]:
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
