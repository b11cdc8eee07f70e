"""A snapshot in numbers and pictures: definitions, comparison, and a sentence for each figure."""

import pytest
import recordings_at_hand

from kvlab.memory.allocator import CachingAllocator, CudaOutOfMemoryError, Device
from kvlab.memory.snapshot import (
    address_map,
    compare_snapshots,
    memory_over_time,
    parse_snapshot,
    read_snapshot,
    summarise,
    timeline,
)

MIB, GIB = 1 << 20, 1 << 30
FRAMES = (
    {"filename": "cache.py", "line": 40, "name": "grow"},
    {"filename": "serve.py", "line": 9, "name": "step"},
)


def build(free=(), parts=4, extra=()):
    allocator = CachingAllocator(Device(GIB), max_history=None)
    addresses = [allocator.malloc(5 * MIB, frames=FRAMES if i == 1 else ()) for i in range(parts)]
    for place in free:
        allocator.free(addresses[place])
    for size in extra:
        allocator.malloc(size)
    return allocator


def snapshot_of(allocator):
    return parse_snapshot(allocator.snapshot())


def test_the_numbers_add_up():
    allocator = build(free=(0, 2))
    waits = allocator.malloc(700, frames=())
    allocator.record_stream(waits, 3)
    allocator.free(waits)
    s = summarise(snapshot_of(allocator))
    assert (s.segment_count, s.reserved_bytes) == (2, 22 * MIB)
    assert (s.allocated_bytes, s.active_bytes) == (10 * MIB, 10 * MIB + 1024)
    assert s.free_bytes == s.reserved_bytes - s.active_bytes
    assert (s.requested_bytes, s.rounding_bytes) == (10 * MIB + 700, 324)
    assert s.event_counts == {"segment_alloc": 2, "alloc": 5, "free_requested": 3, "free_completed": 2}


def test_fragmentation_is_what_the_largest_free_block_leaves_of_the_free_memory():
    assert summarise(snapshot_of(build())).fragmentation == 0
    assert summarise(snapshot_of(build(free=(0,)))).fragmentation == 0
    two = summarise(snapshot_of(build(free=(0, 2))))
    assert (two.free_bytes, two.largest_free_block_bytes, two.fragmentation) == (10 * MIB, 5 * MIB, 0.5)
    joined = summarise(snapshot_of(build(free=(0, 1))))
    assert (joined.largest_free_block_bytes, joined.fragmentation) == (10 * MIB, 0)


def test_only_wholly_idle_segments_are_releasable():
    assert summarise(snapshot_of(build(free=(0, 1)))).releasable_bytes == 0
    allocator = build(free=(0, 1, 2, 3))
    assert summarise(snapshot_of(allocator)).releasable_bytes == 20 * MIB
    allocator.empty_cache()
    assert summarise(snapshot_of(allocator)).reserved_bytes == 0


def test_the_largest_blocks_in_use_come_first_with_their_frames():
    top = summarise(snapshot_of(build(extra=(30 * MIB,))), top=3).top_blocks
    assert [block.size_bytes for block in top] == [30 * MIB, 5 * MIB, 5 * MIB]
    assert top[2].frames == ("cache.py:40 grow", "serve.py:9 step")
    assert (top[0].frames, top[0].state, top[0].stream) == ((), "active_allocated", 0)


def test_the_summary_has_the_keys_other_programs_rely_on():
    keys = summarise(snapshot_of(build())).model_dump().keys()
    assert {
        *("segment_count", "reserved_bytes", "allocated_bytes", "active_bytes", "free_bytes"),
        *("largest_free_block_bytes", "fragmentation", "top_blocks"),
    } <= keys


def test_an_empty_snapshot_has_no_fragmentation():
    s = summarise(parse_snapshot([]))
    assert (s.fragmentation, s.reserved_bytes, s.top_blocks) == (0.0, 0, ())


def test_a_summary_is_read_from_a_file(tmp_path):
    path = tmp_path / "a.pickle"
    build(free=(0, 2)).save_snapshot(path)
    assert summarise(path) == summarise(snapshot_of(build(free=(0, 2))))


def test_what_grew_between_two_snapshots_is_named():
    allocator = build()
    before = snapshot_of(allocator)
    new = allocator.malloc(30 * MIB, frames=FRAMES)
    allocator.free(before.segments[0].blocks[0].address)
    result = compare_snapshots(before, snapshot_of(allocator))
    assert result.numbers["allocated_bytes"].difference == 25 * MIB
    assert (result.segments_added, result.segments_removed) == (1, 0)
    assert (result.appeared_bytes, result.vanished_bytes) == (30 * MIB, 5 * MIB)
    assert (result.top_appeared[0].address, result.top_appeared[0].frames[0]) == (new, "cache.py:40 grow")
    assert result.top_vanished[0].size_bytes == 5 * MIB


def test_a_snapshot_compared_with_itself_shows_no_change():
    snapshot = snapshot_of(build(free=(1,)))
    result = compare_snapshots(snapshot, snapshot)
    assert all(change.difference == 0 for change in result.numbers.values())
    assert (result.appeared_bytes, result.segments_added, result.top_vanished) == (0, 0, ())


def test_the_timeline_runs_from_the_first_event_to_the_final_state():
    line = timeline(snapshot_of(build(free=(0, 2), extra=(30 * MIB,))))
    assert (line.requested_bytes[0], line.reserved_bytes[0]) == (0, 0)
    assert max(line.requested_bytes) == line.requested_bytes[-1] == 40 * MIB
    assert line.reserved_bytes[-1] == 50 * MIB
    assert len(line.times_s) == len(line.requested_bytes) == len(line.reserved_bytes)


def test_the_timeline_uses_the_clock_where_every_event_has_a_time():
    raw = build().snapshot()
    for number, event in enumerate(raw["device_traces"][0]):
        event["time_us"] = 1_000_000 + 500_000 * number
    line = timeline(parse_snapshot(raw))
    assert (line.has_clock, line.times_s[:3]) == (True, (0.0, 0.0, 0.5))
    del raw["device_traces"][0][1]["time_us"]
    assert timeline(parse_snapshot(raw)).has_clock is False


@recordings_at_hand.needed
def test_recorded_timelines_never_go_below_zero_and_stay_within_what_is_reserved():
    for path in recordings_at_hand.paths():
        line = timeline(read_snapshot(path))
        assert min(line.requested_bytes) >= 0
        assert all(a <= r for a, r in zip(line.requested_bytes, line.reserved_bytes, strict=True))


def test_the_address_map_draws_every_block_and_says_what_it_shows(tmp_path):
    snapshot = snapshot_of(build(free=(0, 2)))
    figure, text = address_map(snapshot)
    (axes,) = figure.axes
    assert len(axes.patches) == sum(len(s.blocks) for s in snapshot.segments) == 4
    assert text == (
        "Address map of 1 segment: 10.0 MiB of 20.0 MiB reserved are allocated; the 10.0 MiB free lie in 2"
        " blocks, the largest 5.0 MiB, so fragmentation is 0.50."
    )
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_a_large_address_map_shows_the_largest_segments_and_says_so():
    allocator = build(extra=[n * MIB for n in range(10, 40, 2)])
    figure, text = address_map(snapshot_of(allocator), max_segments=5)
    assert "the 5 largest of 16 segments" in text
    assert figure.axes[0].get_yticklabels()[0].get_text() == "38 MiB"


def test_blocks_that_wait_for_a_stream_are_told_apart_without_colour():
    allocator = build()
    address = allocator.malloc(5 * MIB)
    allocator.record_stream(address, 2)
    allocator.free(address)
    figure, _ = address_map(snapshot_of(allocator))
    assert sum(patch.get_hatch() is not None for patch in figure.axes[0].patches) == 1


def test_memory_over_time_shows_where_it_ran_out(tmp_path):
    allocator = build()
    with pytest.raises(CudaOutOfMemoryError):
        allocator.malloc(2 * GIB)
    figure, text = memory_over_time(snapshot_of(allocator))
    assert text.startswith("Memory over 6 events: tensors ask for 0.00 GiB at first, 0.02 GiB at most")
    assert text.endswith("it runs out of memory once.")
    assert [line.get_label() for line in figure.axes[0].lines][-1] == "out of memory"
    figure.savefig(tmp_path / "time.png")


def test_figures_of_an_empty_snapshot_are_drawn():
    for draw in (address_map, memory_over_time):
        figure, text = draw(parse_snapshot([]))
        assert text.endswith(".")
        assert figure.axes
