"""The four accounts of one instant: every difference has a name, and what has none is shown."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.memory.allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError, Device, GpuProcess
from kvlab.memory.ledger import (
    Ledger,
    _ledger_of_allocator,
    ledger_of_model,
    ledger_of_process,
    live_tensor_bytes,
    parts_outside_pytorch,
    side_by_side,
)
from kvlab.memory.nvml import CardReading, ProcessUse
from kvlab.memory.snapshot import parse_snapshot

MIB = 2**20
CACHE_BYTES = 33 * MIB // 2


def adds_up(ledger: Ledger) -> bool:
    """Whether each account is the one before it plus what stands between them."""
    return all(
        ledger.account(step.begin) + sum(part.bytes for part in step.differences) + step.unexplained_bytes
        == ledger.account(step.end)
        for step in ledger.steps
    )


def parts(ledger: Ledger) -> dict[str, int]:
    return {part.name: part.bytes for step in ledger.steps for part in step.differences}


def unexplained(ledger: Ledger) -> list[int | None]:
    return [step.unexplained_bytes for step in ledger.steps]


@pytest.fixture
def server() -> CachingAllocator:
    """Weights of 1,000 bytes, a cache of 16.5 MiB, 3 MiB + 1 byte of something else, and two freed tensors."""
    neighbours = (GpuProcess(None, 0), GpuProcess(4242, 60 * MIB))
    allocator = CachingAllocator(Device(1024 * MIB, other_bytes=100 * MIB, processes=neighbours))
    allocator.malloc(1000)
    going = allocator.malloc(3 * MIB)
    allocator.malloc(CACHE_BYTES)
    idle = allocator.malloc(12 * MIB)
    allocator.malloc(3 * MIB + 1)
    allocator.free(going)
    allocator.free(idle)
    return allocator


def test_every_difference_of_a_small_server_has_its_name_and_size(server):
    ledger = ledger_of_model(server, CACHE_BYTES, named_bytes={"weights": 1000}, context_bytes=30 * MIB)
    assert adds_up(ledger)
    assert parts(ledger) == {
        "weights": 1000,
        "rounding": 24 + 511,
        "absorbed slack": MIB // 2,  # 17 MiB were free in that segment: a rest of up to 1 MiB is not cut off
        "cached in idle segments": 12 * MIB,
        "free between live blocks": 2 * MIB - 1024 + 3 * MIB + 20 * MIB - (3 * MIB + 512),
        "CUDA context": 30 * MIB,
        "other processes": 60 * MIB,
    }
    assert unexplained(ledger) == [3 * MIB + 1, 0, 10 * MIB]
    assert ledger.account("used") == 100 * MIB + server.reserved_bytes


def test_what_the_caller_names_is_no_longer_unexplained(server):
    named = {"weights": 1000, "scratch": 3 * MIB + 1}
    assert unexplained(ledger_of_model(server, CACHE_BYTES, named_bytes=named, context_bytes=40 * MIB)) == [0, 0, 0]


def test_a_cache_said_to_be_larger_than_it_is_shows_as_a_negative_rest(server):
    assert unexplained(ledger_of_model(server, 20 * MIB))[0] < 0


def test_without_the_cache_the_first_step_has_no_rest_and_the_others_have(server):
    assert unexplained(ledger_of_model(server, None))[0] is None
    assert unexplained(ledger_of_model(server, None))[1] == 0


def test_a_block_that_another_stream_uses_is_named(server):
    address = server.malloc(5 * MIB)
    server.record_stream(address, 3)
    server.free(address)
    assert parts(ledger_of_model(server, 0))["freed, still in use by a stream"] == 5 * MIB


def test_free_memory_of_a_private_pool_is_not_called_cached(server):
    server.free(server.malloc(30 * MIB, pool_id=(0, 1)))
    ledger = ledger_of_model(server, 0)
    assert parts(ledger)["free in private pools"] == 30 * MIB
    assert parts(ledger)["cached in idle segments"] == 12 * MIB


sizes = st.one_of(st.integers(1, 4096), st.integers(4097, 12 * MIB), st.integers(12 * MIB, 80 * MIB))
programs = st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 2)), max_size=40)
conf = st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4"])


@given(programs, conf)
def test_no_program_leaves_a_byte_between_the_accounts(program, conf):
    allocator, live = CachingAllocator(Device(400 * MIB, other_bytes=7), AllocatorSettings.parse(conf)), []
    for size, frees, stream in program:
        with suppress(CudaOutOfMemoryError):
            live.append((allocator.malloc(size, stream), size))
        if frees and live:
            address, _ = live.pop(len(live) // 2)
            allocator.record_stream(address, 1)
            allocator.free(address)
    ledger = ledger_of_model(allocator, sum(size for _, size in live), context_bytes=7)
    assert adds_up(ledger)
    assert unexplained(ledger) == [0, 0, 0]


def test_a_segment_that_is_missing_from_the_snapshot_shows_as_unexplained(server):
    whole = ledger_of_model(server, 0)
    cut = _ledger_of_allocator(
        0,
        {},
        allocated_bytes=whole.account("allocated"),
        reserved_bytes=whole.account("reserved"),
        segments=[s for s in parse_snapshot(server.snapshot()).segments if s.total_size != 12 * MIB],
        used=whole.accounts[-1],
        outside=[],
        notes=[],
    )
    assert adds_up(cut)
    assert unexplained(cut)[1] == 12 * MIB


def card(api: str = "v2", *processes: ProcessUse, listed: bool = True) -> CardReading:
    return CardReading("0", api, 24576 * MIB, 9000 * MIB, None, processes=processes if listed else None)


def test_this_process_beyond_its_segments_is_context_and_libraries():
    here = card("v2", ProcessUse(1, 5000 * MIB), ProcessUse(2, 3000 * MIB), ProcessUse(3, 400 * MIB))
    found, notes = parts_outside_pytorch(here, 1, 4500 * MIB, None)
    assert {part.name: part.bytes for part in found} == {
        "CUDA context and libraries": 500 * MIB,
        "other processes": 3400 * MIB,
    }
    assert notes == []
    found, _ = parts_outside_pytorch(here, 1, 4500 * MIB, 420 * MIB)
    assert [part.bytes for part in found] == [420 * MIB, 80 * MIB, 3400 * MIB]


@pytest.mark.parametrize("reading", [card("v2", ProcessUse(99, MIB)), card("v2", listed=False), card("v2")])
def test_a_process_that_the_driver_does_not_name_is_not_guessed(reading):
    found, notes = parts_outside_pytorch(reading, 1, 4500 * MIB, None)
    assert found == []
    assert "stay unexplained" in notes[0]


def test_the_ledger_says_when_used_includes_the_drivers_share_and_when_a_neighbour_is_silent():
    here = card("v1", ProcessUse(1, 5000 * MIB), ProcessUse(2, None))
    found, notes = parts_outside_pytorch(here, 1, 4500 * MIB, None)
    assert {part.name: part.bytes for part in found}["other processes"] == 0
    assert "v1" in notes[0]
    assert "1 of 1 other processes" in notes[1]


def test_a_cpu_process_accounts_for_its_tensors_and_adds_up():
    before = live_tensor_bytes()
    cache = torch.zeros(2, 4 * MIB, dtype=torch.uint8)
    view = cache[0]
    ledger = ledger_of_process(8 * MIB)
    assert view.untyped_storage().nbytes() == 8 * MIB
    assert live_tensor_bytes() - before == 8 * MIB  # a view shares its storage
    assert adds_up(ledger)
    assert ledger.steps[0].unexplained_bytes == before
    assert ledger.account("private memory") > ledger.account("live tensors")


def test_the_rows_give_each_account_and_then_the_way_to_the_next(server):
    rows = ledger_of_model(server, CACHE_BYTES, context_bytes=40 * MIB).rows()
    assert [name for name, _, _ in rows if not name.startswith("+")] == ["kv cache", "allocated", "reserved", "used"]
    assert rows[-1][0] == "used"
    assert rows[-2] == ("+ unexplained", 0, "no name covers it")
    assert all(how for _, _, how in rows)


def test_ledgers_stand_side_by_side_with_0_where_one_lacks_a_difference(server):
    before = ledger_of_model(server, 0, context_bytes=40 * MIB)
    server.empty_cache()
    after = ledger_of_model(server, 0, context_bytes=40 * MIB)
    rows = {name: sizes for name, sizes, _ in side_by_side([before, after])}
    assert rows["+ cached in idle segments"] == [12 * MIB, 0]
    assert rows["used"][0] - rows["used"][1] == 12 * MIB
