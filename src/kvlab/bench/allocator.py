"""How fast the model of the caching allocator decides, and what it holds for each block in use."""

import gc
import random
import statistics
import time
import tracemalloc
from typing import Literal

from pydantic import BaseModel
from rich.table import Table

from kvlab.memory.allocator import CachingAllocator, Device

CARD_BYTES = 80 << 30
SIZES = [1 << power for power in range(9, 26)]  # 512 B to 32 MiB
LIVE = 2_000


class AllocatorBench(BaseModel):
    """Calls of ``malloc`` and ``free`` for each second of processor time, and Python memory against blocks in use."""

    calls: int
    runs: int
    calls_per_s: float  # median of the runs
    slowest_calls_per_s: float
    bytes_per_live_block: dict[int, float]  # by number of blocks in use


def bench_allocator(profile: Literal["quick", "full"]) -> AllocatorBench:
    calls, runs = (1_000_000, 7) if profile == "full" else (100_000, 5)
    rates = [calls / _seconds(calls, seed) for seed in range(runs)]
    return AllocatorBench(
        calls=calls,
        runs=runs,
        calls_per_s=statistics.median(rates),
        slowest_calls_per_s=min(rates),
        bytes_per_live_block={live: _python_bytes(live) / live for live in (1_000, 4_000, 16_000)},
    )


def _seconds(calls: int, seed: int) -> float:
    """Processor time of a program that keeps about ``LIVE`` blocks of mixed sizes and replaces one at a time."""
    rng = random.Random(seed)
    program = [(rng.randrange(LIVE), rng.choice(SIZES) - rng.randrange(512)) for _ in range(calls // 2)]
    allocator = CachingAllocator(Device(CARD_BYTES))
    held = [allocator.malloc(rng.choice(SIZES[:12])) for _ in range(LIVE)]
    began = time.process_time()
    for place, size in program:
        allocator.free(held[place])
        held[place] = allocator.malloc(size)
    return time.process_time() - began


def _python_bytes(live: int) -> int:
    sizes = [512 * (1 + place % 37) for place in range(live)]
    tracemalloc.start()
    try:
        allocator = CachingAllocator(Device(CARD_BYTES))
        held = [allocator.malloc(size) for size in sizes]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if held else 0
    finally:
        tracemalloc.stop()


def render(result: AllocatorBench) -> Table:
    table = Table("allocator's model", "figure")
    table.add_row(
        f"calls a second, median of {result.runs} runs of {result.calls:,} (slowest)",
        f"{result.calls_per_s:,.0f} ({result.slowest_calls_per_s:,.0f})",
    )
    for live, size in result.bytes_per_live_block.items():
        table.add_row(f"Python bytes for a block in use, {live:,} in use", f"{size:,.0f}")
    return table
