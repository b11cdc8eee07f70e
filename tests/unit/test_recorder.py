"""The flight recorder: real failures leave their evidence, and nothing that goes wrong in it reaches the program."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import textwrap
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import kvlab
from kvlab.budget import run_under_budget
from kvlab.memory.nvml import read_samples
from kvlab.recorder import flight
from kvlab.recorder.flight import ROOM_BYTES
from kvlab.recorder.shortage import chain, is_out_of_memory

MIB = 2**20
PARTS = {"message.txt", "diagnosis.json", "ledger.json", "samples.jsonl", "facts.json", "index.html"}
TOO_MUCH = 1 << 60


def ask_too_much():
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


def fail_in(recorder, work=ask_too_much, error=RuntimeError) -> BaseException:
    with pytest.raises(error) as caught, recorder:
        work()
    return caught.value


def see(recorder, samples: int) -> None:
    """Wait until its sampler has taken so many."""
    stop_s = time.monotonic() + 60
    while recorder._sampler.taken < samples:
        assert time.monotonic() < stop_s
        time.sleep(0.01)


def folders(place: Path) -> list[Path]:
    return sorted(place.iterdir())


@pytest.fixture
def evidence(tmp_path):
    """The folder of one refused tensor, with a cache of 8 MiB that the caller names."""
    cache = torch.zeros(8 * MIB, dtype=torch.uint8)
    recorder = kvlab.flight_recorder(tmp_path / "kept", kv_bytes=lambda: cache.nbytes)

    def work():
        recorder.mark("<prefill>")
        see(recorder, 2)
        ask_too_much()

    fail_in(recorder, work)
    (folder,) = folders(tmp_path / "kept")
    assert recorder.kept == [folder]
    return folder


def test_a_refused_tensor_leaves_every_part_in_one_folder(evidence):
    assert {path.name for path in evidence.iterdir()} == PARTS
    diagnosis = json.loads((evidence / "diagnosis.json").read_text())
    assert (diagnosis["family"], diagnosis["cause"]) == ("torch_cpu", "host_memory")
    assert diagnosis["tried_bytes"] == TOO_MUCH
    ledger = json.loads((evidence / "ledger.json").read_text())
    assert ledger["accounts"][0] == {"name": "kv cache", "bytes": 8 * MIB, "how": "by arithmetic, from the caller"}
    assert ledger["accounts"][1]["bytes"] >= 8 * MIB
    assert "in ask_too_much" in (evidence / "message.txt").read_text()
    assert json.loads((evidence / "facts.json").read_text())["torch"] == torch.__version__


def test_the_samples_and_marks_before_the_failure_are_kept(evidence):
    recording = read_samples(evidence / "samples.jsonl")
    assert len(recording.samples) >= 2
    assert [mark.name for mark in recording.marks] == ["<prefill>"]
    assert recording.samples[0].process.resident_bytes > MIB


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.links, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data):
        self.text += data


def test_the_page_shows_all_of_it_and_needs_nothing_from_elsewhere(evidence):
    page = (evidence / "index.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert set(tags.links) == PARTS - {"index.html"}
    assert all((evidence / link).exists() for link in tags.links)
    assert not {"script", "link", "img", "iframe", "prefill"} & set(tags.seen)
    for words in ("you tried to allocate", "host memory", "kv cache", "8,388,608", "+ unexplained", "<prefill>"):
        assert words in tags.text
    assert re.search(r'aria-label="Memory in \d+ samples', page)


def test_the_exception_goes_on_as_the_same_object_with_its_traceback(tmp_path):
    error = ValueError("CUDA out of memory")
    recorder = kvlab.flight_recorder(tmp_path)
    try:
        with recorder:
            raise error
    except ValueError as caught:
        assert caught is error
        assert caught.__context__ is None
        assert caught.__cause__ is None
        assert not getattr(caught, "__notes__", None)
        assert caught.__traceback__.tb_next is None
    assert len(folders(tmp_path)) == 1


def raise_from_memory_error():
    try:
        bytearray(TOO_MUCH)
    except MemoryError as error:
        raise KeyError("request failed") from error


def exit_after_memory_error():
    try:
        ask_too_much()
    except RuntimeError:
        sys.exit(3)


def raise_group():
    raise ExceptionGroup("two tasks", [ValueError("fine"), MemoryError()])


def raise_cuda_message():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class WordlessShortage(MemoryError):
    def __str__(self):
        raise RuntimeError("no words")


def raise_wordless_shortage():
    raise WordlessShortage


class Retried(Exception):
    exceptions = 3  # its own figure: no group


def raise_with_an_attribute_like_a_groups():
    try:
        bytearray(TOO_MUCH)
    except MemoryError as error:
        raise Retried("gave up") from error


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda: bytearray(TOO_MUCH), MemoryError),
        (raise_wordless_shortage, WordlessShortage),
        (raise_with_an_attribute_like_a_groups, Retried),
        (raise_from_memory_error, KeyError),
        (exit_after_memory_error, SystemExit),
        (raise_group, ExceptionGroup),
        (raise_cuda_message, torch.OutOfMemoryError),
    ],
)
def test_whatever_form_an_out_of_memory_takes_it_is_kept(tmp_path, work, error):
    fail_in(kvlab.flight_recorder(tmp_path), work, error)
    assert {path.name for path in folders(tmp_path)[0].iterdir()} == PARTS


def handled_around(failing):
    """Fail in a recorder while somebody else's MemoryError is being handled."""

    def work(recorder):
        try:
            raise MemoryError("somebody else's")
        except MemoryError:
            with recorder:
                failing()

    return work


def raise_in_handler_of_its_own():
    try:
        raise KeyError("the block's own")
    except KeyError:
        raise ValueError("and a mistake in its handler")  # noqa: B904  (the context is what is tested)


def steps(recorder):
    with recorder:
        yield 1
        raise ValueError("mine")


def close_while_handling(recorder):
    stream = steps(recorder)
    next(stream)
    try:
        raise MemoryError("somebody else's")
    except MemoryError:
        stream.close()
    raise ValueError


def call_while_handling(recorder):
    stream = steps(recorder)
    next(stream)
    try:
        raise MemoryError("somebody else's")
    except MemoryError:
        next(stream)


def throw_while_handling(recorder):
    stream = steps(recorder)
    next(stream)
    try:
        raise MemoryError("somebody else's")
    except MemoryError:
        stream.throw(ValueError("yours"))


@pytest.mark.parametrize(
    "work",
    [
        handled_around(lambda: int("x")),
        handled_around(raise_in_handler_of_its_own),
        handled_around(lambda: handled_deeper(lambda: int("x"))),
        close_while_handling,
        call_while_handling,
        throw_while_handling,
    ],
)
def test_a_shortage_that_is_handled_around_the_block_is_not_the_blocks(tmp_path, work):
    with pytest.raises(ValueError):  # noqa: PT011
        work(kvlab.flight_recorder(tmp_path))
    assert folders(tmp_path) == []


def handled_deeper(failing):
    try:
        raise KeyError
    except KeyError:
        failing()


def raise_after_shortage():
    try:
        raise MemoryError("the block's own")
    except MemoryError:
        int("x")


@contextlib.contextmanager
def recorded(recorder):
    with recorder:
        yield


@contextlib.contextmanager
def recorded_and_translated(recorder):
    with recorder:
        try:
            yield
        except ValueError:
            raise KeyError("translated")  # noqa: B904  (the context is what is tested)


class Recorded:
    def __init__(self, recorder):
        self.recorder = recorder

    def __enter__(self):
        self.recorder.__enter__()

    def __exit__(self, *error):
        return self.recorder.__exit__(*error)


@contextlib.contextmanager
def recorded_on_a_stack(recorder):
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder)
        yield


def reraise_in_block(block):
    try:
        raise MemoryError
    except MemoryError as error:
        with block:
            raise error


def name_it_as_the_cause(block):
    try:
        raise MemoryError
    except MemoryError as error:
        with block:
            raise ValueError from error


def fail_in_a_stream(block):
    def stream():
        with block:
            yield 1
            raise_after_shortage()

    list(stream())


def fail_directly(block):
    with block:
        try:
            raise MemoryError("the block's own")
        except MemoryError:
            int("x")


def fail_below(block):
    with block:
        raise_after_shortage()


def fail_while_another_is_handled(block):
    try:
        raise MemoryError("somebody else's")
    except MemoryError:
        with block:
            raise_after_shortage()


@pytest.mark.parametrize("wrapped", [lambda r: r, recorded, recorded_and_translated, Recorded, recorded_on_a_stack])
@pytest.mark.parametrize(
    "work",
    [
        fail_directly,
        fail_below,
        fail_in_a_stream,
        fail_while_another_is_handled,
        reraise_in_block,
        name_it_as_the_cause,
    ],
)
def test_a_shortage_that_arose_in_the_block_is_kept_however_the_block_is_made(tmp_path, work, wrapped):
    with pytest.raises((ValueError, KeyError, MemoryError)):
        work(wrapped(kvlab.flight_recorder(tmp_path)))
    assert len(folders(tmp_path)) == 1


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raise_unprintable():
    raise Unprintable


def raise_value_error():
    raise ValueError("max_tokens is too large")  # a comment that says CUDA out of memory


def raise_without_context():
    try:
        ask_too_much()
    except RuntimeError:
        raise ValueError("try again") from None


@pytest.mark.parametrize(
    ("work", "error"),
    [(raise_value_error, ValueError), (raise_unprintable, Unprintable), (raise_without_context, ValueError)],
)
def test_other_failures_leave_nothing_and_say_nothing(tmp_path, capsys, work, error):
    fail_in(kvlab.flight_recorder(tmp_path), work, error)
    assert folders(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_a_program_that_does_not_fail_leaves_nothing(tmp_path, capsys):
    with kvlab.flight_recorder(tmp_path):
        torch.zeros(4)
    assert folders(tmp_path) == []
    assert capsys.readouterr() == ("", "")


def test_a_second_failure_does_not_touch_the_first(tmp_path):
    recorder = kvlab.flight_recorder(tmp_path)
    fail_in(recorder)
    (first,) = folders(tmp_path)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    fail_in(recorder)
    fail_in(kvlab.flight_recorder(tmp_path))
    assert len(folders(tmp_path)) == 3
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_a_recorder_within_a_recorder_leaves_both_their_evidence(tmp_path):
    with pytest.raises(RuntimeError), kvlab.flight_recorder(tmp_path / "a"), kvlab.flight_recorder(tmp_path / "b"):
        ask_too_much()
    assert [len(folders(tmp_path / name)) for name in "ab"] == [1, 1]


def test_a_cache_whose_bytes_cannot_be_had_costs_only_its_account(tmp_path, capsys):
    fail_in(kvlab.flight_recorder(tmp_path, kv_bytes=lambda: 1 // 0))
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == PARTS
    assert json.loads((folder / "ledger.json").read_text())["accounts"][0]["bytes"] is None
    assert "ZeroDivisionError" in (folder / "index.html").read_text()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_cache_that_cannot_even_say_why_costs_no_more(tmp_path):
    fail_in(kvlab.flight_recorder(tmp_path, kv_bytes=raise_unprintable))
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == PARTS
    assert "Unprintable" in (folder / "index.html").read_text()


def test_the_line_on_standard_error_does_not_steer_the_terminal(tmp_path, capsys):
    def kv_bytes():
        raise ValueError("\x1b]0;title\x07")

    fail_in(kvlab.flight_recorder(tmp_path, kv_bytes=kv_bytes))
    assert "ValueError: \ufffd]0;title\ufffd" in capsys.readouterr().err


def test_a_program_that_goes_to_another_folder_leaves_its_evidence_where_it_was_told(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def work():
        monkeypatch.chdir("elsewhere")
        ask_too_much()

    fail_in(kvlab.flight_recorder("kept"), work)
    assert len(folders(tmp_path / "kept")) == 1


def test_an_unwritable_folder_is_one_line_and_the_exception_goes_on(tmp_path, capsys):
    (tmp_path / "file").touch()
    error = fail_in(kvlab.flight_recorder(tmp_path / "file" / "kept"))
    assert "DefaultCPUAllocator" in str(error)
    err = capsys.readouterr().err
    assert err.startswith("kvlab flight recorder: ")
    assert err.count("\n") == 1


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


FULL_DISK = """
    import os, resource, sys, torch, kvlab
    folder, limit, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    error = MemoryError("no room " + length * "x") if length else None
    recorder = kvlab.flight_recorder(folder)
    try:
        with recorder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if error:
                raise error
            torch.empty(1 << 60, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as caught:
        assert error in (None, caught) and caught.__context__ is None
        print(str(caught).splitlines()[0][:200])
"""
UNLIMITED = "-1"


def check_all_is_whole(folder: Path) -> set[str]:
    """The names of the files that are there, each of which is whole."""
    names = {path.name for path in folder.iterdir()}
    assert names <= PARTS
    for name in names & {"ledger.json", "facts.json", "diagnosis.json"}:
        json.loads((folder / name).read_text())
    if "samples.jsonl" in names:
        assert (folder / "samples.jsonl").read_text().endswith("}\n")
    if "index.html" in names:
        assert (folder / "index.html").read_text().endswith("</html>\n")
    return names


def test_a_full_disk_is_one_line_and_the_exception_goes_on(tmp_path):
    done = python(FULL_DISK, str(tmp_path), "0", "0")
    assert done.returncode == 0, done.stderr
    assert "you tried to allocate" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "lacks" in done.stderr
    assert "File too large" in done.stderr
    assert check_all_is_whole(folders(tmp_path)[0]) == set()


@pytest.mark.parametrize("limit", ["100", "1600"])
def test_what_still_fits_on_a_full_disk_is_kept_and_nothing_of_the_rest(tmp_path, limit):
    done = python(FULL_DISK, str(tmp_path), limit, "0")
    (folder,) = folders(tmp_path)
    kept = check_all_is_whole(folder)
    assert all(name in done.stderr for name in PARTS - kept)
    assert not [name for name in kept if name in done.stderr.split("lacks")[-1]]
    assert ("message.txt" in kept) == (limit == "1600")
    assert done.stderr.count("\n") == 1


def test_what_could_not_be_written_is_named_on_the_page_and_leaves_its_room_to_the_rest(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no file system of a size of its own can be mounted here")
    try:
        done = python(FULL_DISK, str(disk / "kept"), UNLIMITED, "1000000")
        (folder,) = folders(disk / "kept")
        kept, page = check_all_is_whole(folder), (folder / "index.html").read_text()
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.stdout.startswith("no room")
    assert kept == PARTS - {"message.txt"}
    assert "<li>message.txt: OSError: [Errno 28]" in page
    assert "left out here" in page
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_blocks_of_one_recorder_may_overlap_as_those_of_threads_do(tmp_path):
    recorder = kvlab.flight_recorder(tmp_path)
    first_is_in, second_is_out = threading.Event(), threading.Event()

    def first():
        with recorder:
            first_is_in.set()
            second_is_out.wait(60)
            told_by_pytorch()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    sampler = recorder._sampler
    fail_in(recorder)
    assert recorder._sampler is sampler
    assert len(folders(tmp_path)) == 1
    second_is_out.set()
    thread.join()
    assert len(folders(tmp_path)) == 2  # still observed after the second block had ended
    told_by_pytorch()
    assert len(folders(tmp_path)) == 2


def test_tasks_of_one_loop_share_a_recorder_and_only_the_one_without_memory_is_kept(tmp_path):
    recorder = kvlab.flight_recorder(tmp_path)

    async def task(number: int) -> None:
        with recorder:
            await asyncio.sleep(0.01 * number)
            if number == 1:
                raise MemoryError
            if number == 2:
                raise ValueError

    async def chunks():
        with recorder:
            yield 1

    async def all_of_it() -> list:
        ended = await asyncio.gather(*map(task, range(4)), return_exceptions=True)
        stream = chunks()
        await anext(stream)
        try:
            raise MemoryError("of somebody else")
        except MemoryError:
            await stream.aclose()
        return ended

    ended = asyncio.run(all_of_it())
    assert [type(each) for each in ended] == [type(None), MemoryError, ValueError, type(None)]
    assert len(folders(tmp_path)) == 1
    assert flight._recorders == []


def test_what_a_thread_was_handling_is_not_taken_for_the_failure_of_its_block_though_another_began_later(tmp_path):
    recorder = kvlab.flight_recorder(tmp_path)
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first():
        try:
            raise MemoryError("before the block")
        except MemoryError:
            with contextlib.suppress(ValueError), recorder:
                first_is_in.set()
                second_is_in.wait(60)
                raise ValueError("of the block")  # noqa: B904 (its context is the point)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    with recorder:
        second_is_in.set()
        thread.join()
    assert not folders(tmp_path)


def test_a_failing_thread_does_not_wait_for_ever_for_one_that_waits_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flight, "HANGS_S", 0.2)
    cache, asked = threading.Lock(), threading.Event()

    def kv_bytes():
        asked.set()
        with cache:
            return 8 * MIB

    with kvlab.flight_recorder(tmp_path, kv_bytes=kv_bytes):
        with cache:
            other = threading.Thread(target=told_by_pytorch)
            other.start()
            asked.wait(60)
            told_by_pytorch()  # the other writes, and waits for the lock that this one holds
        other.join()
    assert len(folders(tmp_path)) == 1
    assert "still being written" in capsys.readouterr().err


def test_an_exception_that_ends_the_program_when_it_is_asked_what_it_is_goes_on_as_it_was(tmp_path):
    class Exits(Exception):
        def __str__(self):
            sys.exit("asked")

    def work():
        raise Exits

    fail_in(kvlab.flight_recorder(tmp_path), work, Exits)
    assert folders(tmp_path) == []


def test_ctrl_c_while_evidence_is_written_leaves_no_thread_and_no_observer(tmp_path):
    def kv_bytes():
        raise KeyboardInterrupt

    recorder = kvlab.flight_recorder(tmp_path, kv_bytes=kv_bytes)
    error = fail_in(recorder, error=KeyboardInterrupt)
    assert "DefaultCPUAllocator" in str(error.__context__)
    assert not recorder._sampler._thread.is_alive()
    assert flight._recorders == []
    recorder._kv_bytes = None
    fail_in(recorder)
    assert (recorder.kept[-1] / "index.html").exists()


FORKED = """
    import os, sys, threading, kvlab
    from kvlab.recorder import flight
    recorder = kvlab.flight_recorder(sys.argv[1])
    held, writes = threading.Event(), threading.Event()
    recorder._kv_bytes = lambda: writes.set() or held.wait(60) or 0
    try:
        with recorder:
            thread = threading.Thread(target=lambda: flight._tell(0, 1, 2, 3))
            thread.start()
            writes.wait()  # now the thread holds the lock of the writer
            child = os.fork()
            recorder._kv_bytes = None
            if child == 0:
                raise MemoryError("in the child")
            _, status = os.waitpid(child, 0)
            held.set()
            thread.join()
    except MemoryError:
        os._exit(7)
    print(os.waitstatus_to_exitcode(status), child)
"""


def test_a_forked_child_keeps_its_own_failure_though_its_parent_was_writing(tmp_path):
    done = python(FORKED, str(tmp_path))
    status, child = done.stdout.split()
    assert status == "7", done.stderr
    (own,) = [folder for folder in folders(tmp_path) if folder.name.endswith(f"-{child}")]
    assert {path.name for path in own.iterdir()} == PARTS
    assert len(folders(tmp_path)) == 2


def test_a_closed_standard_error_does_not_matter(tmp_path):
    code = """
        import os, sys, kvlab
        (open(sys.argv[1], "w")).close()
        os.close(2)
        sys.stderr = None
        try:
            with kvlab.flight_recorder(sys.argv[1] + "/kept"):
                raise MemoryError
        except MemoryError:
            print("went on")
    """
    assert python(code, str(tmp_path / "file")).stdout == "went on\n"


def test_importing_kvlab_loads_nothing_and_recording_does_not_load_torch(tmp_path):
    code = """
        import sys, kvlab
        assert not [name for name in sys.modules if name.startswith("kvlab.")], "import kvlab is cheap"
        try:
            with kvlab.flight_recorder(sys.argv[1]):
                raise MemoryError
        except MemoryError:
            pass
        print("torch" in sys.modules, "matplotlib" in sys.modules)
    """
    done = python(code, str(tmp_path))
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert {path.name for path in folders(tmp_path)[0].iterdir()} == PARTS


def test_recording_does_not_start_cuda(tmp_path):
    with kvlab.flight_recorder(tmp_path):
        assert not torch.cuda.is_initialized()


def fill(meter, place, room_bytes):
    """Hold memory until even a small request is refused, then ask for more within the recorder."""
    import kvlab
    from kvlab.recorder import flight

    flight.ROOM_BYTES = room_bytes
    held = []
    with kvlab.flight_recorder(place) as recorder:
        meter.arm()
        for size in (8 * MIB, MIB, 128 * 1024, 4096):
            try:
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8))
                    if size == 8 * MIB:
                        see(recorder, len(held))
            except RuntimeError:
                pass
        held.append(torch.empty(MIB, dtype=torch.uint8))


def test_a_process_without_a_byte_left_still_writes_its_evidence(tmp_path):
    outcome = run_under_budget(fill, tmp_path, ROOM_BYTES, budget_bytes=64 * MIB)
    assert outcome.error.is_refusal
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == PARTS
    assert "flight recorder" not in outcome.log
    resident = [sample.process.resident_bytes for sample in read_samples(folder / "samples.jsonl").samples]
    assert len(resident) >= 4
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["accounts"][1]["bytes"] > 40 * MIB
    assert json.loads((folder / "facts.json").read_text())["limits"]["RLIMIT_DATA"] == outcome.limit_bytes


def test_without_room_set_aside_some_of_it_is_lost_and_the_page_says_so(tmp_path):
    outcome = run_under_budget(fill, tmp_path, 4096, budget_bytes=64 * MIB)
    assert outcome.error.is_refusal
    assert outcome.log.count("kvlab flight recorder: ") == 1
    (folder,) = folders(tmp_path)
    missing = PARTS - {path.name for path in folder.iterdir()}
    assert missing
    assert all(name in outcome.log for name in missing)


def test_recording_costs_a_small_share_of_a_core(tmp_path):
    recorder = kvlab.flight_recorder(tmp_path)
    with recorder:
        see(recorder, 8)
    assert 0 < recorder.cpu_s < 0.02 * flight.INTERVAL_S * recorder._sampler.taken


def told_by_pytorch(tried_bytes: int = 500 * MIB) -> None:
    """What PyTorch's allocator does on a CUDA device before it raises; here without the device."""
    flight._tell(0, tried_bytes, 24576 * MIB, 100 * MIB)


def test_a_failure_that_the_program_catches_on_cuda_is_kept_and_the_page_says_so(tmp_path):
    with kvlab.flight_recorder(tmp_path):
        told_by_pytorch()
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == PARTS - {"message.txt", "diagnosis.json"}
    page = (folder / "index.html").read_text()
    assert "the program caught it" in page
    assert "tried_bytes" in page


def test_the_message_joins_the_state_that_was_taken_before_it_was_raised(tmp_path):
    def work():
        told_by_pytorch()
        raise_cuda_message()

    fail_in(kvlab.flight_recorder(tmp_path), work, torch.OutOfMemoryError)
    (folder,) = folders(tmp_path)
    assert {path.name for path in folder.iterdir()} == PARTS
    assert json.loads((folder / "facts.json").read_text())["told_by_allocator"]["tried_bytes"] == 500 * MIB
    assert "the program caught it" not in (folder / "index.html").read_text()


def test_another_failure_after_a_caught_one_does_not_take_its_folder(tmp_path):
    def work():
        told_by_pytorch()
        ask_too_much()

    fail_in(kvlab.flight_recorder(tmp_path), work)
    caught, left = folders(tmp_path)
    assert not (caught / "message.txt").exists()
    assert (left / "message.txt").exists()


def test_a_program_that_fails_in_a_loop_fills_no_disk_and_its_last_failure_is_kept(tmp_path):
    def work():
        for _ in range(20):
            told_by_pytorch()
        raise_cuda_message()

    fail_in(kvlab.flight_recorder(tmp_path), work, torch.OutOfMemoryError)
    assert len(folders(tmp_path)) == flight.MOST_CAUGHT + 1
    assert sum((folder / "message.txt").exists() for folder in folders(tmp_path)) == 1


def test_a_shortage_within_the_recorder_is_not_recorded(tmp_path):
    def kv_bytes():
        told_by_pytorch()
        return 0

    with kvlab.flight_recorder(tmp_path, kv_bytes=kv_bytes):
        told_by_pytorch()
    assert len(folders(tmp_path)) == 1


def test_after_the_block_nothing_is_recorded(tmp_path):
    with kvlab.flight_recorder(tmp_path):
        pass
    told_by_pytorch()
    assert folders(tmp_path) == []


def test_an_observer_that_cannot_be_attached_does_not_break_the_first_use_of_cuda():
    def refuse(observer):
        raise RuntimeError("no observers here")

    flight._attach(refuse)


def test_the_chain_of_an_exception_ends_even_in_a_circle():
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert list(chain(first)) == [first, second]
    assert not is_out_of_memory(first)


PAGE = Path(__file__).parents[2] / "book" / "flight-recorder.md"


def test_the_page_shows_what_the_lines_leave_and_what_the_commands_print(tmp_path, monkeypatch):
    page = PAGE.read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    listing, diagnosis, watch = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        exec(lines, {})
    (folder,) = folders(tmp_path / "evidence")
    assert listing[0] == "ls evidence/oom-*"
    assert listing[1].split() == sorted(path.name for path in folder.iterdir())
    printed = python_module("diagnose", str(folder / "message.txt"))
    assert diagnosis[0] == "kvlab diagnose evidence/oom-*/message.txt"
    assert diagnosis[1].split("...")[1].strip() in printed.splitlines()
    assert python_module(*watch[0].split()[1:]).count(" s  ") >= 1


def python_module(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvlab.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
