"""What the model shows of itself is what PyTorch's own tools read."""

import pickle
import pickletools
import re
from collections import Counter

from allocator_programs import play, random_program
from torch.cuda import _memory_viz

from kvlab.memory.allocator import CachingAllocator, CudaOutOfMemoryError, Device, memory_summary
from kvlab.memory.snapshot import parse_snapshot

MIB, GIB = 1 << 20, 1 << 30


def fragmented():
    allocator = CachingAllocator(Device(GIB), max_history=None)
    frames = ({"filename": "server.py", "line": 7, "name": "prefill"},)
    addresses = [allocator.malloc(5 * MIB, frames=frames) for _ in range(10)]
    for address in addresses[::2]:
        allocator.free(address)
    try:
        allocator.malloc(2 * GIB)
    except CudaOutOfMemoryError:
        return allocator
    raise AssertionError


def row(table, name):
    return re.search(rf"\| {name} +\|([^\n]*)\|\n", table).group(1).replace(" ", "")


def test_pytorchs_own_table_is_printed_from_the_model():
    table = memory_summary(fragmented())
    assert table.startswith("|===")
    assert "PyTorch CUDA memory summary, device ID 0" in table
    assert re.search(r"CUDA OOMs: 1 +\| +cudaMalloc retries: 1 ", table)
    assert row(table, "Allocated memory") == "25600KiB|51200KiB|51200KiB|25600KiB"
    assert row(table, "GPU reserved memory") == "61440KiB|61440KiB|61440KiB|0B"
    assert row(table, "Non-releasable allocs") == "6|6|8|2"


def test_the_short_table_leaves_out_the_pools():
    assert "from large pool" not in memory_summary(fragmented(), abbreviated=True)


def test_printing_the_table_changes_nothing_in_torch():
    import torch

    before = torch.cuda.memory.memory_stats
    memory_summary(fragmented())
    assert torch.cuda.memory.memory_stats is before


def test_the_counters_have_pytorchs_names():
    stats = fragmented().memory_stats()
    pools, parts = ("all", "large_pool", "small_pool"), ("allocated", "current", "freed", "peak")
    metrics = "active active_bytes allocated_bytes allocation inactive_split inactive_split_bytes requested_bytes"
    for metric in (*metrics.split(), "reserved_bytes", "segment"):
        assert {f"{metric}.{pool}.{part}" for pool in pools for part in parts} <= stats.keys()
    assert list(stats) == sorted(stats)


def test_pytorchs_viewers_read_the_snapshot():
    snapshot = fragmented().snapshot()
    assert "total_reserved: 60.0MiB\ntotal_allocated: 25.0MiB" in _memory_viz.segsum(snapshot)
    assert "raise OutOfMemory" in _memory_viz.trace(snapshot)
    assert "server.py:7:prefill 5242880" in _memory_viz.segments(snapshot, format_flamegraph=str)
    assert "<html" in _memory_viz.trace_plot(snapshot).lower() or "<script" in _memory_viz.trace_plot(snapshot)
    assert len(_memory_viz.segment_plot(snapshot)) > 1000
    same = _memory_viz.compare(snapshot["segments"], snapshot["segments"], format_flamegraph=str)
    assert same == ""


def test_a_saved_snapshot_is_a_plain_pickle_of_protocol_4(tmp_path):
    path = tmp_path / "model.pickle"
    fragmented().save_snapshot(path)
    data = path.read_bytes()
    names = Counter(op.name for op, _, _ in pickletools.genops(data))
    assert data[:2] == b"\x80\x04"
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"} & names.keys()
    assert pickle.loads(data) == fragmented().snapshot()


def test_a_snapshot_says_what_the_counters_say():
    for seed in range(12):
        allocator, _ = play(random_program(seed, 300, "2.13.0"))
        stats, snapshot = allocator.memory_stats(), allocator.snapshot()
        for counter, field in (
            ("allocated_bytes", "allocated_size"),
            ("active_bytes", "active_size"),
            ("reserved_bytes", "total_size"),
            ("requested_bytes", "requested_size"),
        ):
            assert stats[f"{counter}.all.current"] == sum(s[field] for s in snapshot["segments"])
        parse_snapshot(snapshot)


def test_only_as_much_history_is_kept_as_asked_for():
    allocator = CachingAllocator(Device(GIB), max_history=3)
    for _ in range(5):
        allocator.free(allocator.malloc(MIB))
    assert [entry[0] for entry in allocator.history] == ["alloc", "free_requested", "free_completed"]
    assert CachingAllocator(Device(GIB)).history == []


def steady_run(allocator, rounds):
    """Forty live blocks of mixed sizes, one replaced in each round: three actions a round."""
    sizes = [512, 70_000, 3 * MIB, 8 * MIB + 5, 16 * MIB, 40 * MIB]
    live = [allocator.malloc(sizes[i % 6] + 512 * i) for i in range(40)]
    for number in range(rounds):
        place = number * 7 % 40
        allocator.free(live[place])
        live[place] = allocator.malloc(sizes[number % 6] + 512 * (number % 11))


def test_memory_is_proportional_to_live_blocks_not_to_events():
    counts = []
    for rounds in (2_000, 20_000):
        allocator = CachingAllocator(Device(24 * GIB))
        steady_run(allocator, rounds)
        counts.append(sum(1 for _ in allocator.blocks()))
    assert max(counts) < 40 * 4
