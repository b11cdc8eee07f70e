"""What the model of the allocator itself costs."""

import gc
import tracemalloc

import pytest

from kvlab.memory.allocator import CachingAllocator, Device


def python_bytes(live_blocks: int, calls: int) -> int:
    """Memory that a model holds with so many blocks in use, after so many more requests and frees."""
    sizes = [512 * (1 + place % 37) for place in range(live_blocks)]
    tracemalloc.start()
    try:
        allocator = CachingAllocator(Device(1 << 40), max_history=0)
        held = [allocator.malloc(size) for size in sizes]
        for call in range(calls):
            place = call % live_blocks
            allocator.free(held[place])
            held[place] = allocator.malloc(sizes[place])
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_is_linear_in_live_blocks_and_does_not_grow_with_calls():
    small, large = python_bytes(2_000, 0), python_bytes(16_000, 0)
    assert large / small == pytest.approx(8, rel=0.2)
    assert python_bytes(2_000, 20_000) / small == pytest.approx(1, rel=0.2)
