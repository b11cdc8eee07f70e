"""Whatever the bytes: a snapshot, or one line that refuses. Never a crash, a hang, or something executed.

``python test_snapshot_fuzz.py COUNT`` mutates COUNT files outside pytest and prints what came of them.
"""

import gzip
import json
import pickle
import random
import sys
import time
from collections import Counter

import pytest
import recordings_at_hand
from allocator_programs import play, random_program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.memory.replay import replay
from kvlab.memory.snapshot import (
    Limits,
    SnapshotError,
    compare_snapshots,
    parse_snapshot,
    read_snapshot,
    summarise,
)

LIMITS = Limits(max_bytes=4 << 20, max_items=200_000)
NAMES = {
    *(
        "segments",
        "device_traces",
        "address",
        "total_size",
        "stream",
        "segment_type",
        "blocks",
        "size",
        "state",
    ),
    *(
        "requested_size",
        "frames",
        "action",
        "addr",
        "device",
        "allocator_settings",
        "segment_pool_id",
        "pool_id",
    ),
}


def seeds():
    """Whole files to start from: the model's own, in each encoding, and recordings if there are any."""
    raws = [play(random_program(seed, 60, "2.13.0"))[0].snapshot() for seed in range(4)]
    files = [pickle.dumps(raw, protocol=number + 1) for number, raw in enumerate(raws)]
    files += [json.dumps(raws[0]).encode(), gzip.compress(files[1])]
    return files + [p.read_bytes() for p in recordings_at_hand.paths() if p.stat().st_size < 50_000]


def attempt(read, source):
    """What was read, or the one line that refuses it."""
    try:
        return read(source, LIMITS), ""
    except SnapshotError as error:
        refusal = str(error)
    assert refusal
    assert "\n" not in refusal
    return None, refusal


def use(data):
    """Everything a user does with a file; returns what came of it."""
    snapshot, _ = attempt(read_snapshot, data)
    if snapshot is None:
        return "refused"
    assert 0 <= summarise(snapshot).fragmentation <= 1
    compare_snapshots(snapshot, snapshot)
    result = replay(snapshot, gpu_memory_bytes=100 << 20)
    return {True: "exact", False: "not exact", None: "not judged"}[result.exact]


def mutate(data, rng):
    """A few small accidents, or one large one."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out))
        match rng.randrange(7):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.choice((1, 2, 8, 100))]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                out[at:at] = out[at : at + rng.choice((3, 30, 300))]
            case 5:
                out[at] = rng.choice(b"ciobRPQ(){}[]lduets.0129\x80\x81\x82\x85\x86\x87\x8a\x8c\x93\x94\x95\x97")
            case 6:
                del out[at:]
        if not out:
            return b"."
    return bytes(out)


@pytest.mark.parametrize("number", range(len(seeds())))
def test_damaged_files_are_read_or_refused(number):
    data, rng = seeds()[number], random.Random(number)
    outcomes = Counter(use(mutate(data, rng)) for _ in range(150))
    assert outcomes["refused"] > 50
    assert use(data) != "refused"


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(sorted(NAMES))
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(NAMES)), inner, max_size=6),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(plain)
def test_any_plain_object_is_read_or_refused(raw):
    attempt(parse_snapshot, raw)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(plain, st.integers(0, 5))
def test_any_plain_pickle_reads_as_the_object_it_was(raw, protocol):
    data = pickle.dumps({"segments": [], "device_traces": [], "allocator_settings": {"x": raw}}, protocol)
    snapshot, refusal = attempt(read_snapshot, data)
    if snapshot is None:
        assert "absurd" in refusal or "damaged" in refusal
        assert any(abs(n) > 2**60 for n in numbers(raw)), "only huge numbers may be refused"
    else:
        assert repr(snapshot.settings["x"]) == repr(raw)


def numbers(raw):
    if isinstance(raw, dict | list):
        return [n for part in (raw.values() if isinstance(raw, dict) else raw) for n in numbers(part)]
    return [raw] if isinstance(raw, int) else []


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.sampled_from((b"", b"\x80\x04", b"\x80\x02}(", b"{", b"[", b"\x1f\x8b")))
def test_any_bytes_are_refused(data, start):
    with pytest.raises(SnapshotError):
        read_snapshot(start + data + b"\xff", LIMITS)


if __name__ == "__main__":
    count, start, slowest, total = int(sys.argv[1]), time.perf_counter(), 0.0, Counter()
    rng, files = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0), seeds()
    for number in range(count):
        before = time.perf_counter()
        total[use(mutate(files[number % len(files)], rng))] += 1
        slowest = max(slowest, time.perf_counter() - before)
    print(f"{count:,} inputs in {time.perf_counter() - start:.0f} s, the slowest {slowest:.2f} s: {dict(total)}")
