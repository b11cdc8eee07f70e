"""A snapshot of any generation is read; everything else is refused in one line, and nothing in it is
executed."""

import gzip
import io
import json
import os
import pickle
import struct
import sys
import tracemalloc

import pytest
import recordings_at_hand

from kvlab.memory.allocator import CachingAllocator, Device
from kvlab.memory.snapshot import Limits, SnapshotError, parse_snapshot, read_snapshot

MIB, GIB = 1 << 20, 1 << 30


def model_snapshot():
    allocator = CachingAllocator(Device(GIB), max_history=None)
    frames = ({"filename": "serve.py", "line": 12, "name": "prefill"},)
    addresses = [allocator.malloc(3 * MIB, frames=frames) for _ in range(4)]
    allocator.free(addresses[1])
    return allocator.snapshot()


def refused(data, limits=None):
    """The one line that says why the bytes are no snapshot."""
    with pytest.raises(SnapshotError) as error:
        read_snapshot(data, limits)
    assert "\n" not in str(error.value)
    return str(error.value)


# What is read


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(protocol):
    raw = model_snapshot()
    assert read_snapshot(pickle.dumps(raw, protocol=protocol)) == parse_snapshot(raw)


def test_the_python_pickler_without_its_c_half_is_read():
    raw, out = model_snapshot(), io.BytesIO()
    pickle._Pickler(out, 2).dump(raw)
    assert read_snapshot(out.getvalue()) == parse_snapshot(raw)


def test_json_is_read_and_is_equal():
    raw = model_snapshot()
    for encoded in (json.dumps(raw), "\ufeff" + json.dumps(raw), json.dumps(raw, indent=1)):
        assert read_snapshot(encoded.encode()) == parse_snapshot(raw)


@pytest.mark.parametrize("encode", [pickle.dumps, lambda raw: json.dumps(raw).encode()], ids=["pickle", "json"])
def test_gzip_is_read(encode, tmp_path):
    raw = model_snapshot()
    path = tmp_path / "snapshot.gz"
    path.write_bytes(gzip.compress(encode(raw)[:500]) + gzip.compress(encode(raw)[500:]))
    assert read_snapshot(path) == parse_snapshot(raw)


def test_a_bare_list_of_segments_is_read():
    raw = model_snapshot()["segments"]
    assert read_snapshot(pickle.dumps(raw)).segments == parse_snapshot(raw).segments
    assert read_snapshot(json.dumps(raw).encode()).traces == ()


def test_torch_2_0_keeps_request_and_frames_in_a_history():
    frames = [{"filename": "a.py", "line": 3, "name": "f"}]
    history = [{"addr": 0x7000, "real_size": 1000, "frames": frames}]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": history},
        {"size": 2 * MIB - 1024, "state": "inactive"},
    ]
    segment = {
        "device": 0,
        "address": 0x7000,
        "total_size": 2 * MIB,
        "stream": 0,
        "segment_type": "small",
        "allocated_size": 1024,
        "active_size": 1024,
        "blocks": blocks,
    }
    trace = [{"action": "alloc", "addr": 0x7000, "size": 1000, "stream": 0, "frames": frames}]
    snapshot = read_snapshot(pickle.dumps({"segments": [segment], "device_traces": [trace]}, 2))
    used, free = snapshot.segments[0].blocks
    assert (used.requested_size, used.frames) == (1000, ("a.py:3 f",))
    assert (free.address, free.size) == (0x7000 + 1024, 2 * MIB - 1024)
    assert snapshot.traces[0][0].time_us is None


def test_both_names_of_a_pending_free_are_read():
    raw = model_snapshot()
    block = raw["segments"][0]["blocks"][0]
    states = set()
    for name in ("active_pending_free", "active_awaiting_free"):
        block["state"] = name
        states.add(parse_snapshot(raw).segments[0].blocks[0].state)
    assert states == {"active_pending_free"}


def test_an_out_of_memory_keeps_the_free_bytes_of_the_device():
    trace = [{"action": "oom", "device_free": 77, "size": 512, "stream": 0}]
    assert parse_snapshot({"segments": [], "device_traces": [trace]}).traces[0][0].address == 77


def test_numbers_written_as_texts_are_read():
    raw = model_snapshot()
    texts = json.loads(json.dumps(raw), parse_int=str)
    for read, plain in zip(parse_snapshot(texts).segments, parse_snapshot(raw).segments, strict=True):
        assert (read.address, read.total_size) == (plain.address, plain.total_size)
        assert [block[:4] for block in read.blocks] == [block[:4] for block in plain.blocks]
    assert [event[:4] for event in parse_snapshot(texts).traces[0]] == [e[:4] for e in parse_snapshot(raw).traces[0]]


def test_a_mark_that_a_program_set_is_no_unknown_action():
    raw = model_snapshot()
    mark = {"action": "user_defined", "addr": 0, "size": 0, "stream": 0, "user_metadata": "epoch 3"}
    raw["device_traces"][0].insert(1, mark)
    assert parse_snapshot(raw).traces[0][1].action == "user_defined"


def test_keys_of_newer_versions_are_passed_over():
    raw = model_snapshot()
    raw["segments"][0]["registration_counter"] = 3
    raw["external_annotations"] = [{"name": "step", "stage": "START", "device": 0, "time_us": 5}]
    raw["device_traces"][0][0]["something_new"] = "x"
    assert parse_snapshot(raw).segments == parse_snapshot(model_snapshot()).segments


@recordings_at_hand.needed
@pytest.mark.parametrize("entry", recordings_at_hand.entries(), ids=lambda e: e["file"])
def test_recordings_of_real_gpus_are_read(entry):
    snapshot = read_snapshot(recordings_at_hand.folder() / entry["file"])
    assert len(snapshot.segments) == entry["segments"]
    assert sum(s.total_size for s in snapshot.segments) == entry["reserved_bytes"]
    assert sum(len(trace) for trace in snapshot.traces) == sum(entry["events"].values())


@recordings_at_hand.needed
def test_recordings_read_as_the_pickle_module_reads_them():
    for path in recordings_at_hand.paths():
        assert read_snapshot(path) == parse_snapshot(pickle.loads(path.read_bytes()))


# What is refused


class MakesFolder:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_unexecuted(protocol, tmp_path):
    raw, made = model_snapshot(), tmp_path / "made"
    raw["segments"][0]["frames"] = [MakesFolder(made)]
    data = pickle.dumps(raw, protocol=protocol)
    assert "asks for a class or a call" in refused(data)
    assert not made.exists()
    pickle.loads(data)
    assert made.exists(), "the control: the pickle module does execute it"


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(ios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02}\x82\x01.",
        b"\x80\x02K\x01Q.",
        b"Pabc\n.",
        b"\x80\x05\x97.",
        b"\x80\x02))\x81.",
        b"\x80\x02}}b.",
    ],
    ids=["GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "BINPERSID", "PERSID", "NEXT_BUFFER", "NEWOBJ", "BUILD"],
)
def test_every_instruction_that_could_execute_is_refused(code):
    assert "asks for a class or a call" in refused(code)


def test_a_frame_of_absurd_length_is_refused_by_both_locks(monkeypatch):
    from kvlab.memory.snapshot import plain_pickle

    data = b"\x80\x04\x95" + b"\xff" * 8 + b"]."
    assert "no pickle of plain data" in refused(data)
    monkeypatch.setattr(plain_pickle, "_require_plain", lambda data: None)
    assert "damaged" in refused(data)


def test_the_second_lock_holds_without_the_first(monkeypatch):
    from kvlab.memory.snapshot import plain_pickle

    monkeypatch.setattr(plain_pickle, "_require_plain", lambda data: None)
    for data in (pickle.dumps(MakesFolder("/never")), b"\x80\x02K\x01Q.", b"Pabc\n."):
        assert "asks for a class or a call" in refused(data)


def test_truncated_files_are_refused_at_every_length():
    for data in (pickle.dumps(model_snapshot(), 4), json.dumps(model_snapshot()).encode()):
        for length in range(0, len(data), 7):
            refused(data[:length])
    for length in range(0, 200, 7):
        refused(gzip.compress(data)[:length])


@pytest.mark.parametrize(
    "raw",
    [
        None,
        3,
        "segments",
        {},
        {"segments": 3},
        {"segments": [3]},
        {"segments": {}},
        [[]],
        {"device_traces": []},
    ],
)
def test_other_data_is_no_snapshot(raw):
    refused(pickle.dumps(raw))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw["segments"][0].update(total_size=1), "add up to"),
        (lambda raw: raw["segments"][0].update(address=-1), "address should be a whole number"),
        (lambda raw: raw["segments"][0].update(address=1 << 64), "address should be a whole number"),
        (lambda raw: raw["segments"][0].update(address=1.5), "address should be a whole number"),
        (lambda raw: raw["segments"][0].update(device=1 << 40), "device should be"),
        (lambda raw: raw["segments"][0].update(segment_type="huge"), "neither small nor large"),
        (lambda raw: raw["segments"][0].update(segment_pool_id=(1,)), "no memory pool id"),
        (lambda raw: raw["segments"][0].update(blocks=None), "should be a list"),
        (lambda raw: raw["segments"][0]["blocks"][0].update(state="lost"), "unknown state"),
        (lambda raw: raw["segments"][0]["blocks"][1].update(address=5), "is due"),
        (lambda raw: raw["segments"].append(raw["segments"][0]), "overlap"),
        (lambda raw: raw["device_traces"][0][0].update(action="boom"), "unknown action"),
        (lambda raw: raw["device_traces"][0][0].update(action=["alloc"]), "unknown action"),
        (lambda raw: raw["device_traces"][0][0].update(size="three"), "should hold numbers"),
        (lambda raw: raw["device_traces"][0][0].update(size=True), "should hold numbers"),
        (lambda raw: raw["device_traces"][0][0].update(frames="f"), "frames should be a list"),
        (lambda raw: raw["device_traces"][0][0].update(frames=[{"name": []}]), "more than texts"),
        (lambda raw: raw["device_traces"][0].append(7), "not a dictionary"),
        (lambda raw: raw["device_traces"].extend([[]] * 5000), "devices"),
    ],
)
def test_a_snapshot_with_a_wrong_part_is_refused(change, reason):
    raw = model_snapshot()
    change(raw)
    assert reason in refused(pickle.dumps(raw))


# What is too much


def nested_pickle(depth):
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


def test_nesting_to_death_is_refused():
    refused(nested_pickle(200_000))
    refused(b"\x80\x04" + b"(" * 200_000 + b"t" * 200_000 + b".")
    refused(b"\x80\x04)" + b"\x85" * 200_000 + b".")
    refused(b"[" * 200_000 + b"]" * 200_000)
    refused(b'{"segments":' * 5000)


@pytest.mark.parametrize("key", ["external_annotations", "allocator_settings", "something_new"])
def test_nesting_in_a_part_that_is_not_read_is_refused(key):
    deep = []
    for _ in range(1000):
        deep = [deep]
    raw = model_snapshot() | {key: deep}
    assert "nested" in refused(_pickle_deep(raw))


def _pickle_deep(raw):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return pickle.dumps(raw, protocol=4)
    finally:
        sys.setrecursionlimit(limit)


def test_a_tuple_that_would_overflow_the_stack_when_hashed_is_refused():
    refused(b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s.")


def test_shared_parts_cannot_multiply_without_end():
    events = [{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}] * 1000
    raw = {"segments": [], "device_traces": [events] * 1000}
    data = pickle.dumps(raw)
    assert len(data) < 100_000
    assert "more than 50,000" in refused(data, Limits(max_items=50_000))


def test_files_over_the_limit_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "big.pickle"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "more than the limit" in refused_file(path)


def refused_file(path):
    with pytest.raises(SnapshotError) as error:
        read_snapshot(path)
    return str(error.value)


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    assert "cannot read" in refused_file(tmp_path / "nothing.pickle")
    assert "cannot read" in refused_file(tmp_path)


BOMBS = {
    "gzip of zeros": gzip.compress(b"\0" * (64 << 20)),
    "gzip in many members": gzip.compress(b"[" + b" " * (1 << 20)) * 64,
    "memo index": b"\x80\x02]r\xff\xff\xff\x7f.",
    "PUT index": b"(lp999999999999\n.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "long number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"\x01.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"].",
    "decimal": b"I" + b"9" * 1_000_000 + b"\n.",
    "empty lists": b"\x80\x04(" + b"]" * 20_000_000 + b"t.",
    "JSON lists": b"[" + b"[]," * 9_000_000 + b"[]]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded(name):
    """At most a limit's worth: 64 MiB of file, a million items."""
    tracemalloc.start()
    try:
        refused(BOMBS[name], Limits(max_bytes=64 << 20, max_items=1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20


def test_a_damaged_gzip_file_is_refused():
    whole = gzip.compress(pickle.dumps(model_snapshot()))
    assert "gzip" in refused(whole[:-9])
    assert "gzip" in refused(whole[:30] + bytes(8) + whole[38:])
