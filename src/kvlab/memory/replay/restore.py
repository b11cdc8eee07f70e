"""Put a model allocator into the state a recording begins with."""

from collections.abc import Iterable
from itertools import pairwise

from kvlab.memory.allocator.core import CachingAllocator
from kvlab.memory.allocator.expandable import ExpandableSegment
from kvlab.memory.allocator.pool import ALLOCATED, Block, BlockPool
from kvlab.memory.allocator.sizes import SMALL_SEGMENT_BYTES
from kvlab.memory.replay.held import HeldBlock, HeldSegment, InitialState
from kvlab.memory.replay.pages import RangeKey
from kvlab.memory.replay.rollback import InconsistentTraceError

_RANGE_BYTES = 1 << 44


def restore(allocator: CachingAllocator, state: InitialState, range_begins: dict[RangeKey, int]) -> dict[int, Block]:
    """Fill an empty allocator with ``state``; returns the blocks that wait for their free to complete.

    ``range_begins`` says where the range of each expandable segment begins. Its end no recording shows, so it
    is taken to be far away. Raises InconsistentTraceError if blocks overlap or lie outside of segments.
    """
    addresses = sorted(state.blocks)
    place = 0
    chains: dict[RangeKey, list[Block]] = {}
    for segment in state.segments:
        pool = allocator.pools_of(segment.pool_id)[0 if segment.is_small else 1]
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
            allocator.adopt(blocks, is_segment=True)
    if place < len(addresses):
        raise InconsistentTraceError(f"the block at {addresses[place]:#x} lies in no segment")
    for key, blocks in chains.items():
        _restore_range(allocator, blocks, range_begins[key])
    return {at: allocator.free_request(at) for at in addresses if state.blocks[at].pending}


def _cut(
    allocator: CachingAllocator, segment: HeldSegment, pool: BlockPool, held: Iterable[tuple[int, HeldBlock]]
) -> list[Block]:
    """The blocks of a segment: those in use, and a free one in each gap."""
    blocks, at, age = [], segment.address, allocator.next_age()
    each_its_own = allocator.settings.tie_break == "block_age"

    def add(address: int, size: int) -> Block:
        block = Block(address, size, segment.stream, pool, allocator.next_age() if each_its_own else age)
        blocks.append(block)
        return block

    for address, record in held:
        if address < at or address + record.size > segment.address + segment.size:
            raise InconsistentTraceError(f"the block at {address:#x} does not fit where the trace puts it")
        if address > at:
            add(at, address - at)
        block = add(address, record.size)
        block.requested = record.requested
        block.state = ALLOCATED
        at = address + record.size
    if at < segment.address + segment.size:
        add(at, segment.address + segment.size - at)
    return blocks


def _link(blocks: list[Block]) -> None:
    for before, after in pairwise(blocks):
        before.next, after.prev = after, before


def _restore_range(allocator: CachingAllocator, blocks: list[Block], begin: int) -> None:
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
    allocator.adopt(chain, is_segment=False)
