"""A recording is replayed from its first event; what agrees, what does not, and what another card would
say."""

import copy

import pytest
import recordings_at_hand
from allocator_programs import TIE_BREAKS, OracleDevice, play, random_program

from kvlab.memory.allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError, Device
from kvlab.memory.replay import replay
from kvlab.memory.snapshot import SnapshotError, parse_snapshot, read_snapshot

MIB, GIB = 1 << 20, 1 << 30


def recording(build, *, total=24 * GIB, conf="", max_history=None, tie_break="segment_age"):
    """The snapshot of a model on which ``build`` was run."""
    settings = AllocatorSettings.parse(conf, tie_break=tie_break)
    allocator = CachingAllocator(Device(total), settings, max_history=max_history)
    build(allocator)
    return allocator.snapshot()


def small_run(allocator):
    first, second = allocator.malloc(30 * MIB), allocator.malloc(5 * MIB)
    allocator.free(first)
    allocator.malloc(25 * MIB)
    allocator.free(second)
    allocator.malloc(4 * MIB)


# Recordings of real GPUs


@recordings_at_hand.needed
@pytest.mark.parametrize("entry", recordings_at_hand.entries(), ids=lambda e: e["file"])
def test_a_recording_of_a_real_gpu_replays_to_the_last_address(entry):
    result = replay(recordings_at_hand.folder() / entry["file"])
    events = entry["events"]
    assert result.events == sum(events.values())
    assert result.alloc_events == events.get("alloc", 0) == result.alloc_addresses_matched
    assert result.segment_allocs == events.get("segment_alloc", 0) == result.segment_allocs_matched
    assert result.final_allocated_bytes == result.recorded_allocated_bytes == entry["allocated_bytes"]
    assert result.final_reserved_bytes == result.recorded_reserved_bytes == entry["reserved_bytes"]
    if events.get("alloc"):
        assert (result.exact, result.reason) == (True, None)
    else:
        assert result.exact is None
        assert "holds no allocation" in result.reason


@recordings_at_hand.needed
@pytest.mark.parametrize(
    "splits",
    [lambda *sizes: sizes[-2] - sizes[-1] >= 512, lambda *sizes: False],
    ids=["split at 512 B", "never split"],
)
def test_with_a_changed_rule_recordings_do_not_replay(monkeypatch, splits):
    monkeypatch.setattr(CachingAllocator, "_splits", splits)
    assert any(replay(path).exact is False for path in recordings_at_hand.paths())


@recordings_at_hand.needed
def test_a_recorded_run_fits_on_a_card_of_what_it_reserved_and_dies_on_half_of_that():
    path = recordings_at_hand.folder() / "snap-07.pickle"
    peak = 3_781_165_056
    assert replay(path, gpu_memory_bytes=peak).oom is None
    oom = replay(path, gpu_memory_bytes=peak // 2).oom
    event = read_snapshot(path).traces[0][oom.event]
    assert event.action == "alloc"
    assert oom.message.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 1.76 GiB" in oom.message
    assert oom.tried_bytes >= event.size


# The model's own recordings, of which everything is known


@pytest.mark.parametrize("torch", TIE_BREAKS)
def test_a_whole_recording_replays_exactly(torch):
    for seed in range(40):
        program = random_program(seed, 250, torch)
        allocator, _ = play(program)
        result = replay(parse_snapshot(allocator.snapshot()))
        assert result.exact is True, (seed, program.settings, result.reason)


def test_a_recording_that_begins_in_the_middle_replays_exactly_where_addresses_break_ties():
    judged = 0
    for seed in range(60):
        program = random_program(seed, 250, "2.11.0")
        if program.settings:
            continue
        allocator, _ = play(program, max_history=90)
        result = replay(parse_snapshot(allocator.snapshot()))
        judged += result.exact is not None
        assert result.exact is not False, (seed, result.reason)
    assert judged >= 5


@pytest.mark.parametrize("torch", TIE_BREAKS)
@pytest.mark.parametrize("kept", [60, 120])
def test_a_recording_that_begins_in_the_middle_is_exact_or_says_what_it_does_not_show(torch, kept):
    verdicts = []
    for seed in range(7000, 7060):
        program = random_program(seed, 300, torch)
        allocator, _ = play(program, max_history=kept)
        result = replay(parse_snapshot(allocator.snapshot()))
        assert result.exact or "need not be the model's error" in result.reason, (seed, program.settings)
        verdicts.append(result.exact)
    assert verdicts.count(True) >= 58


def equal_segments(allocator):
    """Four segments, all idle when the kept history begins."""
    held = [allocator.malloc(size * MIB) for size in (30, 30, 30, 30)]
    for address in held:
        allocator.free(address)
    for _ in range(4):
        allocator.malloc(30 * MIB)


def recording_of_equal_segments():
    settings = AllocatorSettings.parse("", tie_break="segment_age")
    allocator = CachingAllocator(OracleDevice(24 * GIB), settings, max_history=4)
    equal_segments(allocator)
    return allocator.snapshot()


def test_the_order_of_segments_from_before_a_recording_is_learned_from_what_it_took():
    snapshot = recording_of_equal_segments()
    taken = [event["addr"] for event in snapshot["device_traces"][0]]
    assert taken != sorted(taken)  # the order of the addresses would not explain it
    assert replay(parse_snapshot(snapshot)).exact is True


def test_no_order_explains_a_request_served_from_a_larger_block_than_was_there():
    snapshot = recording_of_equal_segments()
    snapshot["device_traces"][0][0]["size"] = 12 * MIB  # as much of the segment would have been left over
    assert replay(parse_snapshot(snapshot)).exact is False


def flushed_with_a_pending_block(allocator):
    allocator.free(allocator.malloc(100 * MIB))
    held = allocator.malloc(60 * MIB)
    allocator.malloc(40 * MIB)  # in the same segment, so the flush cannot give it back
    allocator.free(allocator.malloc(44 * MIB))
    allocator.record_stream(held, 7)
    allocator.free(held)  # waits for stream 7, and the flush waits for that
    allocator.malloc(50 * MIB)


def test_a_block_that_a_flush_freed_does_not_serve_the_request_that_caused_the_flush():
    snapshot = recording(flushed_with_a_pending_block, total=150 * MIB)
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions[-4:] == ["free_completed", "segment_free", "segment_alloc", "alloc"]
    assert replay(parse_snapshot(snapshot)).exact is True


def test_where_a_snapshot_that_disagrees_lacks_its_settings_the_reason_says_so():
    def build(allocator):
        for size in (3, 33, 5):
            allocator.malloc(size * MIB)

    snapshot = recording(build, conf="large_segment_size_mb:32")
    assert replay(parse_snapshot(snapshot)).exact is True
    del snapshot["allocator_settings"]
    result = replay(parse_snapshot(snapshot))
    assert result.exact is False
    assert "does not record the allocator's settings, so this need not be the model's error" in result.reason


def test_expandable_segments_are_seen_without_the_settings():
    snapshot = recording(small_run, conf="expandable_segments:True")
    del snapshot["allocator_settings"]
    assert replay(parse_snapshot(snapshot)).exact is True


def test_the_release_whose_rule_explains_the_addresses_is_found():
    for torch, tie_break in TIE_BREAKS.items():
        found = set()
        for seed in range(40):
            allocator, _ = play(random_program(seed, 250, torch))
            found.add(replay(parse_snapshot(allocator.snapshot())).tie_break)
        assert tie_break in found


def test_rest_that_an_older_block_had_absorbed_is_found_again():
    def build(allocator):
        held = allocator.malloc(19 * MIB)  # gets all 20 MiB
        allocator.malloc(512)
        allocator.free(held)
        allocator.malloc(20 * MIB)

    snapshot = recording(build, max_history=4)
    assert snapshot["device_traces"][0][0]["action"] == "alloc"
    result = replay(parse_snapshot(snapshot))
    assert (result.exact, result.reason) == (True, None)


def test_a_moved_address_is_noticed():
    snapshot = recording(lambda allocator: [allocator.malloc(512), allocator.malloc(4 * MIB)])
    moved = copy.deepcopy(snapshot)
    moved["device_traces"][0][-1]["addr"] += 8 * MIB
    base = moved["segments"][1]["address"]
    moved["segments"][1]["blocks"] = [
        block(base, 8 * MIB, "inactive"),
        block(base + 8 * MIB, 4 * MIB, "active_allocated"),
        block(base + 12 * MIB, 8 * MIB, "inactive"),
    ]
    assert replay(parse_snapshot(snapshot)).exact is True
    result = replay(parse_snapshot(moved))
    assert (result.exact, result.alloc_addresses_matched) == (False, result.alloc_events - 1)
    assert f"event {len(moved['device_traces'][0]) - 1} allocates" in result.reason


def block(address, size, state):
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}


def test_a_segment_the_model_would_not_ask_for_is_noticed():
    snapshot = recording(small_run)
    trace = snapshot["device_traces"][0]
    size = next(e for e in trace if e["action"] == "segment_alloc")["size"]
    extra = {"action": "segment_alloc", "addr": 1 << 50, "size": size, "stream": 0}
    place = next(i for i, e in enumerate(trace) if e["action"] == "free_completed") + 1
    trace.insert(place, extra)
    idle = {"address": 1 << 50, "total_size": size, "segment_type": "large", "blocks": []}
    idle["blocks"] = [block(1 << 50, size, "inactive")]
    snapshot["segments"].append(idle)
    result = replay(parse_snapshot(snapshot))
    assert result.exact is False
    assert result.segment_allocs_matched == result.segment_allocs - 1


def test_a_final_state_that_does_not_follow_is_noticed():
    snapshot = recording(small_run)
    last = snapshot["device_traces"][0].pop()
    result = replay(parse_snapshot(snapshot))
    assert (last["action"], result.exact) == ("alloc", False)
    assert "lies in no segment" in result.reason
    snapshot["device_traces"][0].append({"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 1})
    result = replay(parse_snapshot(snapshot))
    assert result.exact is False
    assert "does not lead to the final state" in result.reason


def test_nothing_to_judge_is_not_called_exact():
    result = replay(parse_snapshot({"segments": [], "device_traces": [[]]}))
    assert result.exact is None
    assert "no allocation" in result.reason
    assert replay(parse_snapshot([])).exact is None


def test_the_result_has_the_keys_other_programs_rely_on():
    result = replay(parse_snapshot(recording(small_run)), gpu_memory_bytes=GIB)
    assert {
        *("alloc_events", "alloc_addresses_matched", "segment_allocs", "segment_allocs_matched"),
        *("final_allocated_bytes", "final_reserved_bytes", "recorded_allocated_bytes"),
        *("recorded_reserved_bytes", "exact", "reason", "oom"),
    } <= result.model_dump().keys()


def test_a_file_that_is_no_snapshot_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a snapshot")
    with pytest.raises(SnapshotError):
        replay(path)


# Another card


def growing(allocator):
    for _ in range(10):
        allocator.malloc(100 * MIB)


def test_a_run_fits_to_the_byte_and_dies_one_below():
    snapshot = parse_snapshot(recording(growing))
    assert replay(snapshot, gpu_memory_bytes=1000 * MIB).oom is None
    oom = replay(snapshot, gpu_memory_bytes=1000 * MIB - 1).oom
    assert (oom.event, oom.tried_bytes) == (19, 100 * MIB)


def test_the_message_is_the_one_that_card_would_print():
    oom = replay(parse_snapshot(recording(growing)), gpu_memory_bytes=500 * MIB + 7).oom
    card = CachingAllocator(Device(500 * MIB + 7))
    with pytest.raises(CudaOutOfMemoryError) as error:
        growing(card)
    assert oom.message == str(error.value)


def test_a_smaller_card_may_flush_and_live():
    def build(allocator):
        allocator.free(allocator.malloc(300 * MIB))
        allocator.malloc(400 * MIB)

    snapshot = parse_snapshot(recording(build))
    assert replay(snapshot).recorded_reserved_bytes == 700 * MIB
    assert replay(snapshot, gpu_memory_bytes=400 * MIB).oom is None
    assert replay(snapshot, gpu_memory_bytes=399 * MIB).oom.tried_bytes == 400 * MIB


def test_a_free_that_waits_for_a_stream_ends_when_the_card_is_flushed():
    def build(allocator):
        address = allocator.malloc(300 * MIB)
        allocator.record_stream(address, 9)
        allocator.free(address)
        allocator.malloc(400 * MIB)
        allocator.finish(9)
        allocator.malloc(512)

    assert replay(parse_snapshot(recording(build)), gpu_memory_bytes=402 * MIB).oom is None


def test_a_run_that_begins_above_the_card_died_before():
    def build(allocator):
        allocator.malloc(500 * MIB)
        allocator.malloc(512)
        allocator.malloc(512)

    oom = replay(parse_snapshot(recording(build, max_history=1)), gpu_memory_bytes=100 * MIB).oom
    assert (oom.event, oom.tried_bytes) == (0, 502 * MIB)
    assert "would have died before" in oom.message


def test_idle_segments_from_before_the_recording_do_not_count_against_a_card():
    def build(allocator):
        allocator.free(allocator.malloc(500 * MIB))
        allocator.malloc(512)
        allocator.malloc(512)

    assert replay(parse_snapshot(recording(build, max_history=1)), gpu_memory_bytes=100 * MIB).oom is None


def refused(allocator):
    allocator.malloc(60 * MIB)
    with pytest.raises(CudaOutOfMemoryError):
        allocator.malloc(50 * MIB)
    allocator.malloc(20 * MIB)


def test_a_request_that_the_recorded_card_refused_is_made_on_the_other_card_too():
    snapshot = parse_snapshot(recording(refused, total=100 * MIB))
    place = next(i for i, e in enumerate(snapshot.traces[0]) if e.action == "oom")
    oom = replay(snapshot, gpu_memory_bytes=100 * MIB).oom
    assert (oom.event, oom.tried_bytes) == (place, 50 * MIB)
    assert replay(snapshot, gpu_memory_bytes=110 * MIB).oom is None


def test_what_a_larger_card_serves_is_given_back_for_the_recording_does_not_hold_its_use():
    def build(allocator):
        refused(allocator)
        allocator.malloc(20 * MIB)  # 100 in use; together with the 50 it would be 150

    snapshot = parse_snapshot(recording(build, total=100 * MIB))
    assert replay(snapshot, gpu_memory_bytes=112 * MIB).oom is None
