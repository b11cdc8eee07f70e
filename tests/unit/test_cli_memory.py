"""kvlab snapshot and kvlab replay: what other programs rely on, on files the allocator model has written."""

import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from shared_data import at_hand

from kvlab import cli
from kvlab.memory.allocator import CachingAllocator, Device

MIB = 1 << 20
SNAPSHOT_KEYS = {
    "segment_count",
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "free_bytes",
    "largest_free_block_bytes",
    "fragmentation",
    "top_blocks",
}
REPLAY_KEYS = {
    "alloc_events",
    "alloc_addresses_matched",
    "segment_allocs",
    "segment_allocs_matched",
    "final_allocated_bytes",
    "final_reserved_bytes",
    "recorded_allocated_bytes",
    "recorded_reserved_bytes",
    "exact",
    "reason",
}


@pytest.fixture
def kvlab(monkeypatch, capsys):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def crumbs(tmp_path) -> Path:
    """Ten segments, every other tensor freed: 120 MiB free in holes of 6 MiB."""
    allocator = CachingAllocator(Device(200 * MIB), max_history=None)
    frame = {"filename": "server.py", "line": 7, "name": "append"}
    tensors = [allocator.malloc(size * MIB, frames=(frame,)) for _ in range(20) for size in (6, 4)]
    for address in tensors[::2]:
        allocator.free(address)
    path = tmp_path / "crumbs.pickle"
    allocator.save_snapshot(path)
    return path


def refused_in_one_line(result) -> str:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("kvlab: ")
    assert err.count("\n") == 1
    return err


def test_snapshot_says_what_is_free_and_in_how_large_pieces(kvlab, crumbs):
    code, out, err = kvlab("snapshot", crumbs, "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= SNAPSHOT_KEYS
    assert (said["segment_count"], said["reserved_bytes"], said["allocated_bytes"]) == (10, 200 * MIB, 80 * MIB)
    assert (said["free_bytes"], said["largest_free_block_bytes"]) == (120 * MIB, 6 * MIB)
    assert said["fragmentation"] == pytest.approx(1 - 6 / 120)
    assert said["top_blocks"][0]["frames"] == ["server.py:7 append"]


def test_snapshot_prints_the_owner_for_people(kvlab, crumbs):
    code, out, _ = kvlab("snapshot", crumbs)
    assert code == 0
    assert "server.py:7 append" in out
    assert "125,829,120" in out


def test_a_figure_is_drawn_with_its_sentence_as_title(kvlab, crumbs, tmp_path):
    drawn = tmp_path / "map.svg"
    code, out, _ = kvlab("snapshot", crumbs, "--figure", drawn, "--json")
    assert code == 0
    assert json.loads(out)["segment_count"] == 10
    svg = drawn.read_text()
    assert svg.lstrip().startswith("<?xml")
    assert "Address map of 10 segments: 80.0 MiB of 200.0 MiB reserved are allocated" in svg


def test_a_figure_that_cannot_be_written_is_refused(kvlab, crumbs, tmp_path):
    assert "map.svg, not map.png" in refused_in_one_line(kvlab("snapshot", crumbs, "--figure", tmp_path / "map.png"))
    absent = tmp_path / "absent" / "map.svg"
    assert "cannot write" in refused_in_one_line(kvlab("snapshot", crumbs, "--figure", absent))


def test_what_would_steer_a_terminal_is_not_printed(kvlab, tmp_path):
    allocator = CachingAllocator(Device(200 * MIB))
    allocator.malloc(MIB, frames=({"filename": "\x1b[2Jevil\ud800[red].py", "line": 1, "name": "f"},))
    path = tmp_path / "hostile.pickle"
    allocator.save_snapshot(path)
    code, out, _ = kvlab("snapshot", path)
    assert code == 0
    assert "\x1b" not in out
    assert "[2Jevil" in out
    assert "[red].py:1 f" in out
    code, out, err = kvlab("snapshot", path, "--json")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "evil" in json.loads(out)["top_blocks"][0]["frames"][0]


def test_replay_of_the_model_on_itself_is_exact(kvlab, crumbs):
    code, out, err = kvlab("replay", crumbs, "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= REPLAY_KEYS
    assert (said["exact"], said["reason"]) == (True, None)
    assert said["alloc_events"] == said["alloc_addresses_matched"] == 40
    assert said["segment_allocs"] == said["segment_allocs_matched"] == 10
    assert said["final_allocated_bytes"] == said["recorded_allocated_bytes"] == 80 * MIB
    assert said["final_reserved_bytes"] == said["recorded_reserved_bytes"] == 200 * MIB
    assert "oom" not in said


def test_replay_on_another_card_says_where_the_run_dies(kvlab, crumbs):
    fits = json.loads(kvlab("replay", crumbs, "--gpu-memory", "200MiB", "--json")[1])
    dies = json.loads(kvlab("replay", crumbs, "--gpu-memory", "100MiB", "--json")[1])
    assert fits["oom"] is None
    assert dies["oom"]["tried_bytes"] == 20 * MIB
    assert dies["oom"]["message"].startswith("CUDA out of memory. Tried to allocate 20.00 MiB.")
    event = pickle.loads(crumbs.read_bytes())["device_traces"][0][dies["oom"]["event"]]
    assert event["action"] == "alloc"
    assert "out of memory at event" in kvlab("replay", crumbs, "--gpu-memory", "100MiB")[1]


def test_a_recording_that_was_changed_is_not_exact(kvlab, crumbs):
    snapshot = pickle.loads(crumbs.read_bytes())
    allocations = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    one, other = allocations[1], allocations[3]  # 4 MiB each, in one segment
    one["addr"], other["addr"] = other["addr"], one["addr"]
    crumbs.write_bytes(pickle.dumps(snapshot, protocol=4))
    code, out, _ = kvlab("replay", crumbs, "--json")
    assert (code, json.loads(out)["exact"]) == (0, False)


def test_a_history_without_allocations_is_nothing_to_judge(kvlab, tmp_path):
    allocator = CachingAllocator(Device(200 * MIB))
    allocator.malloc(MIB)
    path = tmp_path / "state.pickle"
    allocator.save_snapshot(path)
    said = json.loads(kvlab("replay", path, "--json")[1])
    assert said["exact"] is None
    assert "no allocation" in said["reason"]
    assert "nothing to judge" in kvlab("replay", path)[1]


@pytest.mark.parametrize("verb", ["snapshot", "replay"])
def test_bad_input_is_refused_in_one_line(kvlab, verb, tmp_path, crumbs):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    (tmp_path / "evil.pickle").write_bytes(pickle.dumps({"segments": Evil()}))
    (tmp_path / "cut.pickle").write_bytes(crumbs.read_bytes()[:-100])
    (tmp_path / "text.txt").write_text("CUDA out of memory.")
    (tmp_path / "empty").touch()
    for name in ("absent.pickle", "evil.pickle", "cut.pickle", "text.txt", "empty", "."):
        refused_in_one_line(kvlab(verb, tmp_path / name, "--json"))
    assert "24 elephants" in refused_in_one_line(kvlab("replay", crumbs, "--gpu-memory", "24 elephants"))
    refused_in_one_line(kvlab(verb))


PAGE = Path(__file__).parents[2] / "book" / "your-incident.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def shows(shown: list[str], printed: list[str]) -> bool:
    """Whether the page's lines are those printed, in order, where ``...`` stands for any lines left out."""
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(shows(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and shows(shown[1:], printed[1:])


def test_lines_left_out_are_the_only_ones_that_may_be_missing():
    assert shows(["a", "...", "c"], ["a", "b", "b", "c"])
    assert not shows(["a", "c"], ["a", "b", "c"])
    assert not shows(["a", "..."], ["b"])
    assert not shows(["...", "d"], ["a", "b"])


def test_the_page_shows_what_the_commands_print(kvlab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "70")
    exec(blocks("python")[0], {})
    pages = blocks("console")
    assert len(pages) == 4
    for block in pages:
        command, *shown = (line.rstrip() for line in block.splitlines())
        code, out, err = kvlab(*command.removeprefix("$ kvlab ").split())
        assert (code, err) == (0, "")
        assert shows(shown, [line.rstrip() for line in out.splitlines()]), command


def recordings() -> list[Path]:
    folder = at_hand("snapshots")
    return sorted(folder.glob("*.pickle")) if folder else []


@pytest.mark.skipif(
    not recordings(), reason="no recordings of real GPUs at hand (KVLAB_SHARED_DATA names their folder)"
)
def test_recordings_of_real_gpus_are_exact_or_nothing_to_judge(kvlab):
    verdicts = [json.loads(kvlab("replay", path, "--json")[1])["exact"] for path in recordings()]
    assert False not in verdicts
    assert True in verdicts
