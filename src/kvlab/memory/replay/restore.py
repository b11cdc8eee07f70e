"""Put a model allocator into the state a recording begins with."""

from collections.abc import Iterable
from itertools import pairwise

from kvlab.memory.allocator.core import CachingAllocator
from kvlab.memory.allocator.expandable import ExpandableSegment
from kvlab.memory.allocator.pool import ALLOCATED, PENDING, Block, BlockPool
from kvlab.memory.allocator.sizes import SMALL_SEGMENT_BYTES
from kvlab.memory.replay.held import HeldBlock, HeldSegment, InitialState
from kvlab.memory.replay.pages import RangeKey
from kvlab.memory.replay.rollback import InconsistentTraceError

_RANGE_BYTES = 1 << 44


def restore(allocator: CachingAllocator, state: InitialState, range_begins: dict[RangeKey, int]) -> dict[int, Block]:
    """Fill an empty allocator with ``state``; returns the blocks that wait for their free to complete.

    ``range_begins`` gives, for each (stream, small or not, pool) with expandable segments, the lowest address
    that was ever mapped: there its range begins.
    """
    pending: dict[int, Block] = {}
    addresses = sorted(state.blocks)
    place = 0
    chains: dict[RangeKey, list[Block]] = {}
    for segment in state.segments:
        pool = allocator.pool_for(is_small=segment.is_small, pool_id=segment.pool_id)
        end = segment.address + segment.size
        held = []
        while place < len(addresses) and addresses[place] < end:
            held.append((addresses[place], state.blocks[addresses[place]]))
            place += 1
        blocks = _cut(allocator, segment, pool, held)
        if segment.is_expandable:
            chains.setdefault(segment.range_key, []).extend(blocks)
        else:
            _link(blocks)
            allocator.adopt_segment(blocks, segment.size, pending)
    for key, blocks in chains.items():
        _restore_range(allocator, blocks, range_begins[key], pending)
    return pending


def _cut(
    allocator: CachingAllocator, segment: HeldSegment, pool: BlockPool, held: Iterable[tuple[int, HeldBlock]]
) -> list[Block]:
    """The blocks of a segment: those in use, and a free one in each gap."""
    blocks, at, age = [], segment.address, allocator.next_age()

    def add(address: int, size: int) -> Block:
        block = Block(address, size, segment.stream, pool, age)
        blocks.append(block)
        return block

    for address, record in held:
        if address < at or address + record.size > segment.address + segment.size:
            raise InconsistentTraceError(f"the block at {address:#x} does not fit where the trace puts it")
        if address > at:
            add(at, address - at)
        block = add(address, record.size)
        block.requested = record.requested
        block.state = PENDING if record.pending else ALLOCATED
        at = address + record.size
    if at < segment.address + segment.size:
        add(at, segment.address + segment.size - at)
    return blocks


def _link(blocks: list[Block]) -> None:
    for before, after in pairwise(blocks):
        before.next, after.prev = after, before


def _restore_range(allocator: CachingAllocator, blocks: list[Block], begin: int, pending: dict[int, Block]) -> None:
    """One expandable segment: the mapped blocks, and an unmapped one in every gap and behind the last."""
    first = blocks[0]
    page = SMALL_SEGMENT_BYTES if first.pool.is_small else allocator.settings.large_segment_bytes
    segment = ExpandableSegment(begin, _RANGE_BYTES, page)
    chain: list[Block] = []

    def add_unmapped(address: int, end: int) -> None:
        if end > address:
            gap = Block(address, end - address, first.stream, first.pool, first.age)
            gap.mapped = False
            chain.append(gap)

    at = begin
    for block in blocks:
        add_unmapped(at, block.address)
        chain.append(block)
        at = block.address + block.size
    add_unmapped(at, begin + _RANGE_BYTES)
    for block in chain:
        block.expandable = segment
    _link(chain)
    allocator.adopt_segment(chain, 0, pending)
