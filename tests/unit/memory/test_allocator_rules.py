"""Each rule of the caching allocator, pinned at its boundary. ``test_allocator_mutations.py`` changes the
rules one by one and runs this file again: every change must turn something here red."""

import pytest

from kvlab.memory.allocator import (
    AbsurdRequestError,
    AllocatorSettings,
    CachingAllocator,
    CudaOutOfMemoryError,
    Device,
    GpuProcess,
    InvalidPointerError,
    SettingError,
)
from kvlab.memory.allocator.sizes import format_size, round_size, segment_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def make(conf="", total=24 * GIB, tie_break="segment_age", **device):
    settings = AllocatorSettings.parse(conf, tie_break=tie_break)
    return CachingAllocator(Device(total, **device), settings, max_history=None)


def reserved(allocator):
    return allocator.memory_stats()["reserved_bytes.all.current"]


def allocated(allocator):
    return allocator.memory_stats()["allocated_bytes.all.current"]


def actions(allocator):
    return [entry[0] for entry in allocator.history]


def fails(call, *args):
    """The out-of-memory error that a call raises; a call that succeeds is an assertion error."""
    try:
        call(*args)
    except CudaOutOfMemoryError as error:
        return error
    raise AssertionError("no out-of-memory error")


# Sizes


def test_requests_are_rounded_up_to_512_bytes():
    assert [round_size(n) for n in (1, 511, 512, 513, 1024, 1025)] == [512, 512, 512, 1024, 1024, 1536]


def test_divisions_round_up_to_a_part_of_the_power_of_two():
    assert round_size(1200 * KIB, 4) == 1280 * KIB
    assert round_size(1280 * KIB, 4) == 1280 * KIB
    assert round_size(1280 * KIB + 1, 4) == 1536 * KIB
    assert round_size(2 * MIB, 4) == 2 * MIB
    assert round_size(1793 * KIB, 4) == 2 * MIB


def test_divisions_leave_small_requests_alone():
    assert round_size(512 * 8, 8) == 4096
    assert round_size(512 * 8 + 1, 8) == 4608
    assert round_size(513 * 5, 4) == 2565 // 512 * 512 + 512
    assert round_size(2049, 8) == 2560
    assert round_size(5 * KIB + 1, 1) == 5 * KIB + 512


def test_a_segment_is_2_mib_then_20_mib_then_rounded_to_2_mib():
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(10 * MIB + 512) == 12 * MIB
    assert segment_size(2 * MIB, 32 * MIB) == 32 * MIB


def test_sizes_are_printed_in_the_unit_below_the_next_limit():
    assert [format_size(n) for n in (0, 1024, 1025, MIB, MIB + 1, GIB, GIB + 1)] == [
        "0 bytes",
        "1024 bytes",
        "1.00 KiB",
        "1024.00 KiB",
        "1.00 MiB",
        "1024.00 MiB",
        "1.00 GiB",
    ]


# Pools and best fit


def test_one_mib_is_small_and_a_byte_more_is_large():
    allocator = make()
    allocator.malloc(MIB)
    assert allocator.memory_stats()["reserved_bytes.small_pool.current"] == 2 * MIB
    allocator.malloc(MIB + 1)
    assert allocator.memory_stats()["reserved_bytes.large_pool.current"] == 20 * MIB


def test_a_small_request_never_takes_a_large_free_block():
    allocator = make()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(512)
    assert reserved(allocator) == 22 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = make()
    big, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    allocator.free(big)
    allocator.free(small)
    assert allocator.malloc(25 * MIB) == small
    assert allocator.malloc(31 * MIB) == big


def test_the_front_of_a_block_is_used():
    allocator = make()
    first = allocator.malloc(5 * MIB)
    assert allocator.malloc(5 * MIB) == first + 5 * MIB


class Scattered(Device):
    """cudaMalloc answers from high addresses down, so that the older segment lies higher."""

    def malloc(self, size_bytes):
        self.next_address -= 1 << 40
        return super().malloc(size_bytes)


def two_equal_segments(tie_break):
    allocator = CachingAllocator(Scattered(24 * GIB), AllocatorSettings(tie_break=tie_break))
    old_high, young_low = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    assert old_high > young_low
    allocator.free(young_low)
    allocator.free(old_high)
    return allocator, old_high, young_low


def test_until_torch_2_11_the_lower_address_breaks_a_tie():
    allocator, _, young_low = two_equal_segments("address")
    assert allocator.malloc(30 * MIB) == young_low


def test_from_torch_2_13_the_older_segment_breaks_a_tie():
    allocator, old_high, _ = two_equal_segments("segment_age")
    assert allocator.malloc(30 * MIB) == old_high


def test_in_torch_2_12_the_block_made_first_breaks_a_tie():
    """Each cut makes a new block of the front, so the last part of a segment is the oldest block in it."""
    for tie_break, expected in (("block_age", 3), ("segment_age", 0), ("address", 0)):
        allocator = make(tie_break=tie_break)
        parts = [allocator.malloc(5 * MIB) for _ in range(4)]
        allocator.free(parts[0])
        allocator.free(parts[3])
        assert allocator.malloc(5 * MIB) == parts[expected]


def test_a_block_serves_only_the_stream_it_was_made_for():
    allocator = make()
    freed = allocator.malloc(30 * MIB, 0)
    allocator.free(freed)
    assert allocator.malloc(30 * MIB, 7) != freed
    assert reserved(allocator) == 60 * MIB
    assert allocator.malloc(30 * MIB, 0) == freed


# Splitting and merging


def test_a_large_rest_of_exactly_one_mib_is_absorbed():
    allocator = make()
    allocator.malloc(19 * MIB)
    assert reserved(allocator) == 20 * MIB
    assert allocated(allocator) == 20 * MIB
    assert allocator.memory_stats()["requested_bytes.all.current"] == 19 * MIB


def test_a_large_rest_of_more_than_one_mib_is_a_block():
    allocator = make()
    allocator.malloc(9 * MIB)
    allocator.malloc(10 * MIB - 512)
    assert (reserved(allocator), allocated(allocator)) == (20 * MIB, 19 * MIB - 512)
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == MIB + 512


def test_a_small_rest_of_512_bytes_is_a_block():
    allocator = make()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert allocated(allocator) == 2 * MIB - 512
    assert allocator.malloc(1) == allocator.history[1][1] + 2 * MIB - 512


def freed_in_order(*order):
    allocator = make()
    parts = [allocator.malloc(5 * MIB) for _ in range(4)]
    for part in order:
        allocator.free(parts[part])
    return allocator, parts


def test_a_freed_block_joins_the_free_one_before_it():
    allocator, parts = freed_in_order(0, 1)
    assert allocator.malloc(10 * MIB - 512) == parts[0]
    assert reserved(allocator) == 20 * MIB


def test_a_freed_block_joins_the_free_one_behind_it():
    allocator, parts = freed_in_order(1, 0)
    assert allocator.malloc(10 * MIB - 512) == parts[0]
    assert reserved(allocator) == 20 * MIB


def test_a_freed_block_joins_both_neighbours():
    allocator, parts = freed_in_order(0, 2, 1)
    assert allocator.malloc(15 * MIB) == parts[0]
    assert reserved(allocator) == 20 * MIB


def test_blocks_do_not_join_over_one_in_use():
    allocator, _ = freed_in_order(0, 2)
    allocator.malloc(10 * MIB)
    assert reserved(allocator) == 30 * MIB


def test_sixteen_mib_first_reserves_twice_what_thirty_two_mib_first_does():
    for first, second, expected in (((8, 16), (4, 32), 256), ((4, 32), (8, 16), 128)):
        allocator = make()
        for address in [allocator.malloc(first[1] * MIB) for _ in range(first[0])]:
            allocator.free(address)
        for _ in range(second[0]):
            allocator.malloc(second[1] * MIB)
        assert reserved(allocator) == expected * MIB


# Giving back and retrying


def test_empty_cache_gives_back_whole_idle_segments_only():
    allocator = make()
    kept = [allocator.malloc(5 * MIB) for _ in range(2)]
    allocator.free(allocator.malloc(30 * MIB))
    allocator.free(kept[0])
    allocator.empty_cache()
    assert reserved(allocator) == 20 * MIB


def test_a_flush_goes_through_the_large_pool_by_size_and_then_the_small_one():
    allocator = make()
    addresses = [allocator.malloc(n) for n in (40 * MIB, 512, 30 * MIB)]
    for address in addresses:
        allocator.free(address)
    allocator.empty_cache()
    freed = [entry[2] for entry in allocator.history if entry[0] == "segment_free"]
    assert freed == [30 * MIB, 40 * MIB, 2 * MIB]


def test_a_full_card_is_flushed_and_tried_again():
    allocator = make(total=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"], reserved(allocator)) == (1, 0, 70 * MIB)


def test_a_segment_that_fits_to_the_byte_is_granted():
    allocator = make(total=60 * MIB)
    allocator.malloc(60 * MIB)
    assert fails(allocator.malloc, 1).free_bytes == 0


def test_memory_of_others_counts():
    allocator = make(total=60 * MIB, other_bytes=1)
    assert fails(allocator.malloc, 60 * MIB).free_bytes == 60 * MIB - 1


def test_fragments_inside_used_segments_do_not_help():
    allocator = make(total=100 * MIB)
    parts = [allocator.malloc(5 * MIB) for _ in range(20)]
    for part in parts[::2]:
        allocator.free(part)
    error = fails(allocator.malloc, 10 * MIB)
    assert error.reserved_bytes - error.allocated_bytes == 50 * MIB
    assert allocator.memory_stats()["num_ooms"] == 1


def test_a_block_that_a_flush_sets_free_is_not_looked_at_again():
    allocator = make(total=20 * MIB)
    parts = [allocator.malloc(5 * MIB) for _ in range(4)]
    allocator.record_stream(parts[0], 3)
    allocator.free(parts[0])
    fails(allocator.malloc, 5 * MIB)
    assert allocator.malloc(5 * MIB) == parts[0]


def test_an_out_of_memory_changes_nothing_but_the_counters():
    allocator = make(total=100 * MIB)
    address = allocator.malloc(60 * MIB)
    fails(allocator.malloc, 60 * MIB)
    allocator.free(address)
    allocator.malloc(100 * MIB)
    assert allocator.memory_stats()["num_ooms"] == 1


# Limits


def test_a_fraction_limits_what_is_reserved():
    allocator = make(total=100 * MIB)
    allocator.set_memory_fraction(0.5)
    allocator.malloc(50 * MIB)
    error = fails(allocator.malloc, 1)
    assert (error.limit_bytes, error.free_bytes) == (50 * MIB, 50 * MIB)
    allocator = make(total=100 * MIB)
    allocator.set_memory_fraction(0.5)
    allocator.malloc(40 * MIB)
    fails(allocator.malloc, 5 * MIB)
    allocator.malloc(10 * MIB)
    allocator.set_memory_fraction(1.0)
    allocator.malloc(1)


def test_the_limit_is_rounded_to_the_nearest_byte():
    allocator = make(total=5)
    allocator.set_memory_fraction(0.5)
    assert allocator.limit_bytes == 3
    allocator.set_memory_fraction(0.25)
    assert allocator.limit_bytes == 1


def test_the_limit_weighs_the_whole_segment_even_if_expandable_pages_would_be_fewer():
    allocator = make("expandable_segments:True", total=200 * MIB)
    allocator.set_memory_fraction(0.3)
    allocator.malloc(41 * MIB)
    assert reserved(allocator) == 60 * MIB
    fails(allocator.malloc, 19 * MIB + 1)


def test_a_fraction_outside_zero_to_one_is_refused_with_pytorchs_words():
    with pytest.raises(Exception, match=r"^invalid fraction:1\.5\. Please set within \[0, 1\]\.$"):
        make().set_memory_fraction(1.5)


def test_a_fraction_can_come_from_the_settings():
    assert make("per_process_memory_fraction:0.5", total=100).limit_bytes == 50


# max_split_size


def test_an_oversize_block_is_not_split():
    allocator = make("max_split_size_mb:20")
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(20 * MIB)
    assert allocated(allocator) == 30 * MIB


def test_a_request_below_the_limit_does_not_take_an_oversize_block():
    allocator = make("max_split_size_mb:20")
    oversize = allocator.malloc(20 * MIB)
    allocator.free(oversize)
    assert allocator.malloc(20 * MIB - 512) != oversize


def test_an_oversize_block_serves_only_requests_within_the_rounding():
    allocator = make("max_split_size_mb:20,max_non_split_rounding_mb:30")
    oversize = allocator.malloc(60 * MIB)
    allocator.free(oversize)
    assert allocator.malloc(30 * MIB) != oversize
    assert allocator.malloc(30 * MIB + 512) == oversize


def test_no_second_candidate_is_tried():
    allocator = make("max_split_size_mb:20")
    near, far = allocator.malloc(50 * MIB), allocator.malloc(60 * MIB)
    allocator.free(near)
    allocator.free(far)
    assert allocator.malloc(25 * MIB) not in (near, far)


def test_oversize_blocks_are_given_back_before_everything_is():
    allocator = make("max_split_size_mb:20", total=100 * MIB)
    sizes = (30, 24, 14, 22)
    for address in [allocator.malloc(n * MIB) for n in sizes]:
        allocator.free(address)
    allocator.malloc(40 * MIB)
    freed = [entry[2] // MIB for entry in allocator.history if entry[0] == "segment_free"]
    assert freed == [30, 24]
    assert allocator.memory_stats()["num_alloc_retries"] == 0


def test_blocks_below_the_limit_wait_for_the_flush():
    allocator = make("max_split_size_mb:20", total=50 * MIB)
    for address in [allocator.malloc(n * MIB) for n in (30, 14)]:
        allocator.free(address)
    allocator.malloc(40 * MIB)
    assert allocator.memory_stats()["num_alloc_retries"] == 1


def test_one_oversize_block_that_is_large_enough_is_given_back_alone():
    allocator = make("max_split_size_mb:20", total=100 * MIB)
    for address in [allocator.malloc(n * MIB) for n in (70, 30)]:
        allocator.free(address)
    allocator.malloc(22 * MIB)
    assert [e[2] // MIB for e in allocator.history if e[0] == "segment_free"] == []
    allocator.malloc(45 * MIB)
    assert [e[2] // MIB for e in allocator.history if e[0] == "segment_free"] == [70]


# Garbage collection


def test_segments_unused_for_longer_than_average_are_collected():
    allocator = make("garbage_collection_threshold:0.5", total=1000 * MIB)
    allocator.set_memory_fraction(0.9)
    old = [allocator.malloc(100 * MIB) for _ in range(3)]
    for address in old:
        allocator.free(address)
    for _ in range(5):
        allocator.free(allocator.malloc(200 * MIB))
    assert reserved(allocator) == 500 * MIB
    allocator.malloc(300 * MIB)
    freed = [entry[2] // MIB for entry in allocator.history if entry[0] == "segment_free"]
    assert freed == [100, 100, 100]


def test_nothing_is_collected_without_a_limit_or_below_the_threshold():
    for fraction, first in ((1.0, 600 * MIB), (0.9, 100 * MIB)):
        allocator = make("garbage_collection_threshold:0.5", total=1000 * MIB)
        allocator.set_memory_fraction(fraction)
        allocator.free(allocator.malloc(first))
        allocator.malloc(first + 2 * MIB) if first < 500 * MIB else allocator.malloc(1)
        assert "segment_free" not in actions(allocator)


# Expandable segments


def test_eight_times_sixteen_mib_map_seven_pages_of_twenty():
    allocator = make("expandable_segments:True")
    addresses = [allocator.malloc(16 * MIB) for _ in range(8)]
    assert reserved(allocator) == 140 * MIB
    assert addresses == [addresses[0] + i * 16 * MIB for i in range(8)]
    assert allocator.memory_stats()["segment.all.current"] == 0


def test_the_small_pool_maps_pages_of_two_mib():
    allocator = make("expandable_segments:True")
    allocator.malloc(512)
    assert reserved(allocator) == 2 * MIB


def test_expandable_blocks_are_split_down_to_512_bytes():
    allocator = make("expandable_segments:True")
    allocator.malloc(19 * MIB)
    assert allocated(allocator) == 19 * MIB


def test_a_free_end_is_extended_by_what_is_missing():
    allocator = make("expandable_segments:True")
    first = allocator.malloc(16 * MIB)
    assert allocator.malloc(21 * MIB) == first + 16 * MIB
    assert reserved(allocator) == 40 * MIB


def test_a_freed_block_does_not_join_addresses_without_memory():
    allocator = make("expandable_segments:True")
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(40 * MIB)
    assert reserved(allocator) == 40 * MIB


def test_only_whole_idle_pages_are_unmapped():
    allocator = make("expandable_segments:True")
    first, second, _third = (allocator.malloc(16 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()
    unmapped = [entry for entry in allocator.history if entry[0] == "segment_unmap"]
    assert [entry[1:3] for entry in unmapped] == [(first, 20 * MIB)]
    assert reserved(allocator) == 40 * MIB


def test_unmapped_pages_are_mapped_again_before_the_segment_grows():
    allocator = make("expandable_segments:True")
    first = allocator.malloc(40 * MIB)
    allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.malloc(40 * MIB) == first


def test_a_block_that_can_grow_counts_as_large_as_it_can_get():
    allocator = make("expandable_segments:True")
    hole = allocator.malloc(30 * MIB)
    allocator.malloc(10 * MIB)
    tail = allocator.malloc(20 * MIB)
    allocator.free(hole)
    allocator.free(tail)
    assert allocator.malloc(15 * MIB) == hole


def test_an_expandable_segment_out_of_pages_is_out_of_memory():
    allocator = make("expandable_segments:True", total=50 * MIB)
    allocator.malloc(30 * MIB)
    error = fails(allocator.malloc, 20 * MIB)
    assert (error.tried_bytes, error.free_bytes) == (20 * MIB, 10 * MIB)


def test_each_stream_has_an_expandable_segment_of_its_own():
    allocator = make("expandable_segments:True", total=GIB)
    near, far = allocator.malloc(512, 0), allocator.malloc(512, 1)
    assert abs(near - far) >= GIB + GIB // 8


# Streams


def test_a_block_used_on_another_stream_is_free_only_when_that_has_finished():
    allocator = make()
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == 30 * MIB
    assert allocator.malloc(30 * MIB) != address
    allocator.finish(5)
    assert allocator.malloc(30 * MIB) == address


def test_a_block_waits_for_all_streams_that_used_it():
    allocator = make()
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, 5)
    allocator.record_stream(address, 6)
    allocator.free(address)
    allocator.finish(6)
    assert allocator.malloc(30 * MIB) != address
    allocator.finish(5)
    assert allocator.malloc(30 * MIB) == address


def test_using_a_block_on_its_own_stream_delays_nothing():
    allocator = make()
    address = allocator.malloc(30 * MIB, 4)
    allocator.record_stream(address, 4)
    allocator.free(address)
    assert allocator.malloc(30 * MIB, 4) == address


def test_a_block_that_waits_does_not_join_its_neighbours():
    allocator = make()
    first, second, *_ = (allocator.malloc(5 * MIB) for _ in range(4))
    allocator.record_stream(first, 5)
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(9 * MIB)
    assert reserved(allocator) == 40 * MIB


def test_a_flush_waits_for_all_streams():
    allocator = make(total=40 * MIB)
    address = allocator.malloc(40 * MIB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    allocator.malloc(40 * MIB)
    assert allocator.memory_stats()["num_alloc_retries"] == 1


# Private pools


def test_a_private_pool_shares_no_memory():
    allocator = make()
    address = allocator.malloc(30 * MIB, pool_id=(0, 1))
    allocator.free(address)
    allocator.empty_cache()
    assert allocator.malloc(30 * MIB) != address
    assert allocator.malloc(30 * MIB, pool_id=(0, 1)) == address
    assert allocator.memory_stats()["reserved_bytes_by_private_pools.0_1.all.current"] == 30 * MIB


# Messages


_ADVICE = (
    " If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation"
    " for Memory Management "
    " (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda"
    "-alloc-conf)"
)


def test_the_message_names_the_segment_not_the_tensor():
    allocator = make(total=24 * GIB, other_bytes=600 * MIB)
    allocator.malloc(20 * GIB)
    parts = [allocator.malloc(5 * MIB) for _ in range(4)]
    allocator.free(parts[0])
    assert str(fails(allocator.malloc, 4 * GIB - MIB + 1)) == (
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 24.00 GiB of"
        " which 3.39 GiB is free. Of the allocated memory 20.01 GiB is allocated by PyTorch, and"
        " 5.00 MiB is reserved by PyTorch but unallocated." + _ADVICE
    )


def test_five_mib_are_refused_as_twenty():
    allocator = make(total=10 * MIB)
    assert str(fails(allocator.malloc, 5 * MIB)).startswith("CUDA out of memory. Tried to allocate 20.00 MiB. GPU")


def test_the_message_names_the_limit_and_the_processes():
    processes = (GpuProcess(4242, 3 * GIB), GpuProcess(None, 1234567890))
    allocator = make(total=24 * GIB, index=3, processes=processes)
    allocator.set_memory_fraction(0.5)
    allocator.malloc(5 * MIB)
    assert str(fails(allocator.malloc, 12 * GIB)) == (
        "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 3 has a total capacity of 24.00 GiB of"
        " which 23.98 GiB is free. Process 4242 has 3.00 GiB memory in use. Including non-PyTorch"
        " memory, this process has 1.15 GiB memory in use. 12.00 GiB allowed; Of the allocated"
        " memory 5.00 MiB is allocated by PyTorch, and 15.00 MiB is reserved by PyTorch but"
        " unallocated." + _ADVICE
    )


def test_the_message_counts_free_memory_of_private_pools_as_allocated():
    allocator = make(total=100 * MIB)
    allocator.malloc(10 * MIB)
    allocator.free(allocator.malloc(40 * MIB, pool_id=(0, 1)))
    assert str(fails(allocator.malloc, 60 * MIB)) == (
        "CUDA out of memory. Tried to allocate 60.00 MiB. GPU 0 has a total capacity of 100.00 MiB"
        " of which 50.00 MiB is free. Of the allocated memory 50.00 MiB is allocated by PyTorch,"
        " with 40.00 MiB allocated in private pools (e.g., CUDA Graphs), and 0 bytes is reserved by"
        " PyTorch but unallocated." + _ADVICE
    )


def test_an_absurd_request_has_its_own_message():
    with pytest.raises(AbsurdRequestError, match=r"^CUDA out of memory\. Tried to allocate more than 1EB memory\.$"):
        make().malloc(1 << 60)


# Counters and history


def test_what_happens_is_recorded_in_order():
    allocator = make(total=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    fails(allocator.malloc, 1)
    assert actions(allocator) == [
        *("segment_alloc", "alloc", "free_requested", "free_completed"),
        *("segment_free", "segment_alloc", "alloc", "oom"),
    ]
    assert allocator.history[-1][1:3] == (0, 512)


def test_peaks_and_totals_can_be_reset():
    allocator = make()
    allocator.free(allocator.malloc(30 * MIB))
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.freed"] == 30 * MIB
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.freed"] == 0
    assert stats["reserved_bytes.all.peak"] == 30 * MIB


def test_free_parts_of_used_segments_are_inactive_split():
    allocator = make()
    address = allocator.malloc(5 * MIB)
    stats = allocator.memory_stats()
    assert stats["inactive_split.large_pool.current"] == 1
    assert stats["inactive_split_bytes.large_pool.current"] == 15 * MIB
    allocator.malloc(15 * MIB)
    assert allocator.memory_stats()["inactive_split.large_pool.current"] == 0
    allocator.free(address)
    assert allocator.memory_stats()["inactive_split_bytes.large_pool.current"] == 5 * MIB


def test_oversize_allocations_and_segments_are_counted():
    allocator = make("max_split_size_mb:20")
    address = allocator.malloc(20 * MIB)
    allocator.malloc(9 * MIB)
    stats = allocator.memory_stats()
    assert (stats["oversize_allocations.current"], stats["oversize_segments.current"]) == (1, 2)
    assert stats["max_split_size"] == 20 * MIB
    allocator.free(address)
    allocator.empty_cache()
    stats = allocator.memory_stats()
    assert (stats["oversize_allocations.freed"], stats["oversize_segments.freed"]) == (1, 1)


# Odd requests


def test_zero_bytes_get_no_memory():
    allocator = make()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert reserved(allocator) == 0


def test_a_pointer_is_freed_once():
    allocator = make()
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(InvalidPointerError, match="invalid device pointer: 0x"):
        allocator.free(address)


# Settings


def test_divisions_apply_by_the_size_of_the_request():
    settings = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    sizes = (1, 200 * MIB, 256 * MIB, 512 * MIB, GIB, 2 * GIB, 100 * GIB)
    assert [settings.divisions(n) for n in sizes] == [1, 1, 1, 2, 4, 8, 8]
    sparse = AllocatorSettings.parse("roundup_power2_divisions:[4:2,32:8]")
    assert [sparse.divisions(n * MIB) for n in (1, 4, 8, 16, 32, 64)] == [2, 2, 0, 0, 8, 0]
    capped = AllocatorSettings.parse("roundup_power2_divisions:[65536:4]")
    assert capped.roundup_power2_divisions == (4,) * 16
    assert AllocatorSettings.parse("roundup_power2_divisions:[>:8]").divisions(MIB) == 0


def test_divisions_change_what_is_allocated():
    allocator = make("roundup_power2_divisions:4")
    allocator.malloc(11 * MIB)
    assert allocated(allocator) == 12 * MIB
    assert reserved(allocator) == 12 * MIB


def test_settings_that_pytorch_refuses_are_refused():
    refused = (
        "max_split_size_mb:19",
        "max_non_split_rounding_mb:19",
        "large_segment_size_mb:10",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:2]",
        "expandable_segments:true",
        "no_such_setting:1",
        "max_split_size_mb",
        "per_process_memory_fraction:1.5",
        "max_split_size_mb:" + "9" * 5000,
    )
    for text in refused:
        with pytest.raises(SettingError):
            AllocatorSettings.parse(text)


def test_settings_that_move_no_device_memory_are_passed_over():
    text = "backend:native, pinned_use_background_threads:True,max_split_size_mb:20 ,"
    text += " release_lock_on_cudamalloc:True"
    assert AllocatorSettings.parse(text) == AllocatorSettings(max_split_size_bytes=20 * MIB)


def test_another_allocator_is_not_modelled_silently():
    with pytest.raises(SettingError, match="another allocator"):
        AllocatorSettings.parse("backend:cudaMallocAsync")


def test_settings_survive_a_snapshot():
    text = "max_split_size_mb:64,large_segment_size_mb:32,max_non_split_rounding_mb:40,"
    text += "roundup_power2_divisions:[4:8]"
    settings = AllocatorSettings.parse(text)
    assert AllocatorSettings.from_snapshot(settings.as_snapshot()) == settings
    assert AllocatorSettings.from_snapshot(None) == AllocatorSettings()


def test_recorded_settings_of_the_wrong_kind_count_as_not_recorded():
    for key in AllocatorSettings().as_snapshot():
        for value in (None, "", "x", -7, 1.5, [], {"1": "x"}, float("nan")):
            AllocatorSettings.from_snapshot({key: value})
    wrong = {"max_split_size": "x", "roundup_power2_divisions": {"1": ""}, "expandable_segments": "True"}
    assert AllocatorSettings.from_snapshot(wrong) == AllocatorSettings()
