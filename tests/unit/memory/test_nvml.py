"""Samples of cards through the real pynvml on a library without a driver behind it, and of processes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

import pytest

from kvlab.memory.nvml import (
    CardReading,
    IntervalError,
    Mark,
    Notice,
    ProcessReading,
    ProcessSource,
    ProcessUnreadable,
    ProcessUse,
    Sample,
    SampleFileError,
    Sampler,
    Sources,
    StopRequest,
    memory_figure,
    read_samples,
    reset_peak,
)
from kvlab.memory.nvml import sampler as sampling
from kvlab.memory.nvml.file import SampleWriter

MIB = 2**20
FAKE = Path(__file__).parents[2] / "data" / "nvml" / "fake_nvml.c"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The folders of two driver libraries, one of them without the newer calls."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, to build a driver library, is not here")

    def build(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("nvml")
        command = ["gcc", "-shared", "-fPIC", *flags, "-o", folder / "libnvidia-ml.so.1", FAKE]
        subprocess.run(command, check=True)
        return folder

    return {"v2": build(), "v1": build("-DV1_ONLY")}


def run_watch(arguments, environment):
    """Run ``kvlab watch --json-lines``: exit code, entries, standard error."""
    if not any(argument.startswith("--duration") for argument in arguments):
        arguments = (*arguments, "--duration=0.1")
    command = [sys.executable, "-m", "kvlab.cli", "watch", "--json-lines", "--interval=0.02", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def watch(library):
    """Watch on a driver that answers as told."""

    def run(*arguments: str, driver: str = "v2", **answers: int):
        told = {f"FAKE_NVML_{name}": f"{value}" for name, value in answers.items()}
        return run_watch(arguments, told | {"LD_LIBRARY_PATH": str(library[driver])})

    return run


@pytest.fixture
def watch_here():
    """Watch on this machine, which has no driver."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    return lambda *arguments: run_watch(arguments, {})


def cards(entries, place=0):
    return [entry for entry in entries if entry["kind"] == "sample"][place]["cards"]


def said(entries):
    return [entry["message"] for entry in entries if entry["kind"] == "notice"]


def test_the_newer_call_is_preferred_and_keeps_the_drivers_share_apart(watch):
    code, entries, err = watch()
    assert (code, err) == (0, "")
    assert entries[0]["sources"] == ["GPU 0: Fake GPU 0 (memory by NVML v2)"]
    card = cards(entries)[0]
    assert (card["api"], card["used_bytes"], card["reserved_bytes"]) == ("v2", 1000 * MIB, 450 * MIB)
    assert card["total_bytes"] == card["used_bytes"] + card["reserved_bytes"] + card["free_bytes"]
    assert (card["gpu_utilisation"], card["memory_activity"]) == (0.87, 0.41)


@pytest.mark.parametrize(("driver", "answers"), [("v1", {}), ("v2", {"V2": 999}), ("v2", {"V2": 3})])
def test_the_older_call_is_used_where_the_newer_fails_and_the_sample_says_so(watch, driver, answers):
    code, entries, err = watch(driver=driver, **answers)
    assert (code, err) == (0, "")
    card = cards(entries)[0]
    assert (card["api"], card["used_bytes"], card["reserved_bytes"]) == ("v1", 1450 * MIB, None)
    assert card["total_bytes"] == card["used_bytes"] + card["free_bytes"]


@pytest.mark.parametrize("driver", ["v2", "v1"])
def test_processes_are_listed_once_with_the_larger_figure_and_a_name_where_there_is_one(watch, driver):
    _, entries, _ = watch(driver=driver)
    assert cards(entries)[0]["processes"] == [
        {"pid": 4242, "used_bytes": 600 * MIB, "name": "serve.py\x1b[2J"},
        {"pid": 77, "used_bytes": 210 * MIB, "name": None},
    ]


def test_a_process_that_has_the_number_of_one_that_ended_has_a_name_of_its_own(library):
    told = {"FAKE_NVML_ENDS": "1", "LD_LIBRARY_PATH": str(library["v2"])}
    watching = start("--interval=0.02", "--duration=60", env=os.environ | told)
    seen: list[list[str]] = []
    for line in watching.stdout:
        if (entry := json.loads(line))["kind"] == "sample":
            names = [use["name"] for use in entry["cards"][0]["processes"] if use["pid"] == 4242]
            seen += [names] if not seen or names != seen[-1] else []
        if len(seen) == 3:
            break
    watching.terminate()
    watching.communicate(timeout=60)
    assert seen == [["program 0"], [], ["program 1"]]


def test_a_driver_that_lists_no_processes_to_us_leaves_none_and_not_an_empty_list(watch):
    assert cards(watch(PROCESSES=4)[1])[0]["processes"] is None


def test_figures_that_are_not_available_are_none_and_not_eighteen_quintillion(watch):
    code, entries, _ = watch(NO_FIGURES=1)
    card = cards(entries)[0]
    assert code == 0
    assert (card["used_bytes"], card["free_bytes"], card["total_bytes"]) == (None, None, 24576 * MIB)
    assert {"pid": 4242, "used_bytes": None, "name": "serve.py\x1b[2J"} in card["processes"]


def test_without_permission_the_process_is_sampled_and_one_line_says_why(watch):
    for answers in ({"INIT": 4}, {"MEMORY": 4}):
        code, entries, err = watch(**answers)
        assert code == 0
        assert err.count("\n") == 1
        assert "no permission" in err
        assert "sampling process" in err
        assert cards(entries) == []
        assert entries[1]["process"]["resident_bytes"] > MIB


def test_a_card_divided_by_mig_is_sampled_by_its_instances(watch):
    code, entries, err = watch(MIG=1)
    assert code == 0
    assert [card["card"] for card in cards(entries)] == ["0:0", "0:1"]
    assert cards(entries)[0]["used_bytes"] == 1000 * MIB
    assert cards(entries)[0]["gpu_utilisation"] is None
    assert err.count("\n") == 1
    assert "GPU 0 cannot be sampled as a whole (2 MIG instances): no permission" in err
    code, entries, _ = watch("--gpu=0:1", MIG=1)
    assert (code, [card["card"] for card in cards(entries)]) == (0, ["0:1"])
    assert watch("--gpu=0", MIG=1)[0] == 2


def test_a_gpu_lost_in_mid_run_is_dropped_with_one_line_and_the_others_go_on(library):
    told = {"FAKE_NVML_GPUS": "2", "FAKE_NVML_LOSES": "0", "LD_LIBRARY_PATH": str(library["v2"])}
    watching = start("--interval=0.02", env=os.environ | told)
    entries = []
    while not entries or entries[-1]["kind"] != "notice":
        entries.append(json.loads(watching.stdout.readline()))
    entries.append(json.loads(watching.stdout.readline()))
    watching.terminate()
    err = watching.communicate(timeout=60)[1]
    assert [card["card"] for card in entries[1]["cards"]] == ["0", "1"]
    assert [card["card"] for card in entries[-1]["cards"]] == ["1"]
    assert (watching.returncode, err.count("\n")) == (0, 1)
    assert said(entries) == [err.removeprefix("kvlab watch: ").strip()]
    assert "GPU 0 is no longer sampled: the GPU is lost" in err


def test_when_the_last_card_is_lost_watching_ends_with_status_1(watch):
    code, entries, err = watch("--duration=30", LOSES=0)
    assert code == 1
    assert err.count("\n") == 1
    assert [entry["kind"] for entry in entries][-1] == "notice"


def test_cards_are_chosen_by_index_or_uuid_and_a_wrong_one_is_refused_with_those_there_are(watch):
    assert [card["used_bytes"] for card in cards(watch("--gpu=2", "--gpu=0", GPUS=3)[1])] == [3000 * MIB, 1000 * MIB]
    assert [card["card"] for card in cards(watch("--gpu=GPU-1--1", GPUS=3)[1])] == ["1"]
    code, entries, err = watch("--gpu=7", GPUS=3)
    assert (code, entries, err) == (2, [], "kvlab: no GPU 7 here; there are: 0, 1, 2\n")


def test_a_card_that_is_dead_at_the_start_is_named_and_the_others_are_sampled(watch):
    code, entries, err = watch(GPUS=3, DEAD=1)
    assert (code, [card["card"] for card in cards(entries)]) == (0, ["0", "2"])
    assert "GPU 1 cannot be sampled: the GPU is lost" in err


def test_drivers_that_are_not_loaded_or_do_not_match_are_told_apart(watch):
    assert "installed but not loaded" in watch(INIT=9)[2]
    assert "differ in version" in watch(INIT=18)[2]
    assert "no GPU" in watch(GPUS=0)[2]


EVERY_CODE = """
import collections, itertools, json, os, sys
import pynvml
from kvlab.errors import KvlabError
from kvlab.memory.nvml import GpuSource, Sources

def read(call, code, seconds):
    os.environ |= {"FAKE_NVML_WITH": str(code), "FAKE_NVML_REFUSES": call if seconds == 0 else ""}
    try:
        sources = Sources(gpus=GpuSource())
        said = [sources.read(0.0).cards]
        os.environ["FAKE_NVML_REFUSES"] = call
        said += [sources.read(t_s).cards for t_s in (1.0, 2.0)] if seconds else []
        sources.close()
        notices = sources.take_notices()
    except KvlabError as error:
        said, notices = [], [str(error)]
    assert not any(chr(10) in notice for notice in notices)
    return "nothing" if not said else "less" if notices or not said[-1] or None in said[-1][0][:6] else "all"

codes = {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")} | {-1, 777, 2**31 - 1}
found = collections.defaultdict(set)
for mig, call, code, seconds in itertools.product("01", sys.argv[1:], codes, (0, 1)):
    os.environ["FAKE_NVML_MIG"] = mig
    found[call].add(read(call, code, seconds))
print(json.dumps({call: sorted(outcomes) for call, outcomes in found.items()}))
"""


def test_whatever_a_call_of_the_driver_answers_is_less_to_see_or_one_line(library):
    calls = re.findall(r"^int (nvml\w+)\(", FAKE.read_text(), re.M)
    calls += [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics")]
    done = subprocess.run(
        [sys.executable, "-c", EVERY_CODE, *calls],
        env=os.environ | {"LD_LIBRARY_PATH": str(library["v2"])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 15
    assert {call for call, outcomes in found.items() if "nothing" in outcomes} == {
        "nvmlInitWithFlags",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigMode",
    }
    assert found["nvmlDeviceGetMemoryInfo_v2"] == ["less"]
    assert found["nvmlSystemGetProcessName"] == ["all", "less"]  # less: it is divided by MIG


def test_a_process_is_sampled_beside_the_cards(watch):
    _, entries, _ = watch(f"--pid={os.getpid()}")
    assert entries[1]["process"]["pid"] == os.getpid()
    assert len(entries[1]["cards"]) == 1


def test_without_a_driver_the_process_is_sampled_and_one_line_says_so(watch_here):
    code, entries, err = watch_here("--duration=0.1")
    assert code == 0
    assert err.count("\n") == 1
    assert "no NVIDIA driver here" in err
    assert entries[0]["kind"] == "start"
    assert entries[1]["process"]["peak_resident_bytes"] >= entries[1]["process"]["resident_bytes"] > MIB


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval=0"], "out of range: 0.02 to 1 s"),
        (["--interval=nan"], "out of range"),
        (["--interval=1.01"], "out of range"),
        (["--interval=soon"], "valid number"),
        (["--duration=0"], "no length of time"),
        (["--duration=inf"], "no length of time"),
        (["--pid=99999999"], "no such process"),
        (["--pid=-1"], "-1"),
        (["--gpu=0"], "no NVIDIA driver"),
        (["--out=/absent/samples.jsonl"], "/absent/samples.jsonl"),
    ],
)
def test_bad_input_is_refused_in_one_line(watch_here, arguments, words):
    code, entries, err = watch_here(*arguments)
    assert (code, entries) == (2, [])
    lines = [line for line in err.splitlines() if not line.startswith("kvlab watch: no NVIDIA")]
    assert len(lines) == 1
    assert words in lines[0]


def start(*arguments: str, under: tuple[str, ...] = (), **options) -> subprocess.Popen:
    command = [*under, sys.executable, "-m", "kvlab.cli", "watch", "--json-lines", *arguments]
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order_with_every_line_whole(number, tmp_path):
    kept = tmp_path / "samples.jsonl"
    watching = start("--interval=1", f"--out={kept}")
    lines = [watching.stdout.readline(), watching.stdout.readline()]
    watching.send_signal(number)
    rest, err = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "Traceback" not in err
    assert all(json.loads(line) for line in lines + rest.splitlines())
    assert len(read_samples(kept).samples) >= 1


INTERRUPTED_WAITS = """
import signal, threading
from kvlab.memory.nvml import StopRequest

for number in range(400):
    stop = {stop}
    signal.signal(signal.SIGALRM, lambda *_: stop.{make}())
    signal.setitimer(signal.ITIMER_REAL, 5e-4 + number * 1e-5)
    while not stop.{is_made}:
        stop.wait(1e-5)
"""


def interrupt_waits(first: str = "", **names: str) -> None:
    subprocess.run([sys.executable, "-c", first + INTERRUPTED_WAITS.format(**names)], timeout=60, check=True)


def test_a_signal_may_stop_it_at_any_moment_of_its_wait():
    interrupt_waits(stop="StopRequest()", make="make", is_made="is_made")


def test_a_stop_is_not_slept_through():
    stop = StopRequest()
    threading.Timer(0.1, stop.make).start()
    before_s = time.monotonic()
    stop.wait(60)
    assert time.monotonic() - before_s < 30
    stop.wait(60)  # made is made
    assert time.monotonic() - before_s < 30


LOOKS_AT_ITS_MAIN_THREAD = """
import os, sys, threading, time

def look():
    looks = 0
    while looks < 20:  # one after another at which it is in a set that interrupted a wait
        time.sleep(0.01)
        frame, names = sys._current_frames()[threading.main_thread().ident], []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        looks = looks + 1 if "set" in names and "wait" in names[names.index("set"):] else 0
    os._exit(5)

threading.Thread(target=look, daemon=True).start()
"""


def test_control_an_event_set_by_a_signal_waits_for_the_lock_of_the_wait_it_interrupted():
    with pytest.raises(subprocess.CalledProcessError) as hung:
        interrupt_waits(LOOKS_AT_ITS_MAIN_THREAD, stop="threading.Event()", make="set", is_made="is_set()")
    assert hung.value.returncode == 5


class OnTerminal:
    """``kvlab watch`` on a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str):
        self.terminal, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "kvlab.cli", "watch", "--duration=60", *arguments]
        env = os.environ | {"TERM": "xterm", "PYTHONUTF8": "1"} | environment
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True, env=env)
        os.close(side)
        self.shown = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.terminal)

    def show(self, until: bytes = b"at its peak", times: int = 1) -> None:
        while self.shown.count(until) < times:
            self.shown += os.read(self.terminal, 65536)

    def end(self) -> tuple[int, str]:
        """The exit status and everything that was shown."""
        with contextlib.suppress(OSError):  # EIO: nobody is on the other side any more
            while part := os.read(self.terminal, 65536):
                self.shown += part
        return self.process.wait(timeout=60), self.shown.decode(errors="replace")


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def check_it_ended_in_order(shown: str) -> None:
    assert shown.rfind(SHOW) > shown.rfind(HIDE) > -1
    assert "Traceback" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(number):
    with OnTerminal() as watching:
        watching.show()
        watching.process.send_signal(number)
        status, shown = watching.end()
    assert status == 0
    check_it_ended_in_order(shown)


def test_a_terminal_of_any_size_will_do():
    with OnTerminal("--interval=0.02") as watching:
        for size in ((5, 20), (1, 1), (0, 0), (200, 400)):
            watching.shown = b""
            fcntl.ioctl(watching.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            watching.process.send_signal(signal.SIGWINCH)
            watching.show(b"\x1b[1A", times=3)  # three times up again, to draw anew
        watching.process.terminate()
        assert watching.end()[0] == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}, {"TTY_COMPATIBLE": "0"}])
def test_a_terminal_that_cannot_redraw_gets_lines(environment):
    with OnTerminal("--interval=0.02", **environment) as watching:
        watching.show(b" s  ", times=3)
        watching.process.terminate()
        status, shown = watching.end()
    assert status == 0
    assert "\x1b" not in shown


def test_a_terminal_that_is_closed_ends_it_in_order(tmp_path):
    kept = tmp_path / "samples.jsonl"
    with OnTerminal(f"--out={kept}") as watching:
        watching.show()
        os.close(watching.terminal)
        assert watching.process.wait(timeout=60) == 0
    assert len(read_samples(kept).samples) >= 1


def test_a_full_disk_is_one_line_with_the_name_of_the_file_on_a_terminal_that_can_be_used():
    with OnTerminal("--out=/dev/full") as watching:
        status, shown = watching.end()
    assert status == 2
    check_it_ended_in_order(shown)
    assert "kvlab: /dev/full can no longer be written: No space left on device" in shown


def test_a_full_standard_error_does_not_end_it():
    command = [sys.executable, "-m", "kvlab.cli", "watch", "--interval=0.02"]
    with open("/dev/full", "w") as full:
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, text=True)
    samples = 0
    while samples < 2:
        line = watching.stdout.readline()
        assert line
        samples += " s  " in line
    watching.terminate()
    watching.communicate(timeout=60)
    assert watching.returncode == 0


PATIENT = "from kvlab import cli; cli.watch._SAME_SIGNAL_S = 600; cli.main()"


def test_one_signal_sent_twice_is_one_signal(tmp_path):
    kept = tmp_path / "samples.jsonl"
    command = [sys.executable, "-c", PATIENT, "watch", "--json-lines", "--interval=1", f"--out={kept}"]
    watching = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    lines = [watching.stdout.readline(), watching.stdout.readline()]
    for send in (os.kill, os.killpg):  # as timeout(1) does
        send(watching.pid, signal.SIGTERM)
    rest, err = watching.communicate(timeout=60)
    assert watching.returncode in (0, -signal.SIGTERM), err  # the latter: it met one that was already at its end
    assert "Traceback" not in err
    assert "stopped" not in err
    assert all(json.loads(line) for line in lines + rest.splitlines() + kept.read_text().splitlines())


def test_a_signal_that_is_ignored_stays_so():
    watching = start("--interval=0.02", under=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))  # as nohup does
    watching.stdout.readline()
    watching.send_signal(signal.SIGHUP)
    for _ in range(5):
        assert watching.stdout.readline()
    watching.terminate()
    watching.communicate(timeout=60)
    assert watching.returncode == 0


def test_moments_at_which_it_was_stopped_are_left_out():
    watching = start("--interval=0.02")
    times = [json.loads(watching.stdout.readline()).get("t_s") for _ in range(4)]
    watching.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, watching.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(0.5)
    watching.send_signal(signal.SIGCONT)
    times += [json.loads(watching.stdout.readline()).get("t_s") for _ in range(30)]
    watching.terminate()
    watching.communicate(timeout=60)
    times = [t_s for t_s in times if t_s is not None]
    assert max(b - a for a, b in pairwise(times)) > 0.4
    assert times[-1] > 0.02 * (len(times) - 2) + 0.4


def test_a_reader_that_goes_away_ends_it_in_order():
    watching = start("--interval=0.02")
    watching.stdout.readline()
    watching.stdout.close()
    err = watching.stderr.read()
    assert watching.wait(timeout=60) == 0
    watching.stderr.close()
    assert "Traceback" not in err
    assert "Broken" not in err


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="the cards of this machine stay")
def test_the_end_of_the_watched_process_ends_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as watched:
        watching = start("--interval=0.02", f"--pid={watched.pid}")
        lines = [watching.stdout.readline() for _ in range(3)]
        watched.communicate(b"\n")
        rest, err = watching.communicate(timeout=60)
    assert json.loads(lines[1])["process"]["pid"] == watched.pid
    assert "has ended" in err
    assert watching.returncode == 0
    assert "has ended" in json.loads(rest.splitlines()[-1])["message"]


def see(sampler: Sampler, samples: int = 3) -> None:
    """Wait until it has taken more samples, the first of which may have begun before."""
    stop_s, taken = time.monotonic() + 60, sampler.taken + samples
    while sampler.taken < taken:
        assert time.monotonic() < stop_s
        time.sleep(0.01)


def hold(size: int) -> bytearray:
    return bytearray(b"x") * size


def test_memory_that_comes_and_goes_is_seen_and_the_kernels_peak_stays():
    source = Sources(process=ProcessSource())
    with Sampler(source, interval_s=0.02) as sampler:
        see(sampler)
        held = hold(64 * MIB)
        see(sampler)
        del held
        see(sampler)
    resident = [sample.process.resident_bytes for sample in sampler.samples]
    assert max(resident) - resident[0] > 60 * MIB
    assert max(resident) - resident[-1] > 60 * MIB
    assert sampler.samples[-1].process.peak_resident_bytes > max(resident) - 4 * MIB  # the kernel counts in batches
    assert 0 < sampler.cpu_s_per_sample < 0.02


def test_the_kernels_peak_can_begin_anew():
    source = ProcessSource()
    held = hold(64 * MIB)
    del held
    high = source.read()
    if not reset_peak():
        pytest.skip("this kernel does not let a process reset its peak")
    low = source.read()
    source.close()
    assert high.peak_resident_bytes - high.resident_bytes > 60 * MIB
    assert low.peak_resident_bytes - low.resident_bytes < 4 * MIB


def test_samples_lie_on_the_grid_and_missed_moments_are_left_out():
    with Sampler(Sources(process=ProcessSource()), interval_s=0.02) as sampler:
        see(sampler, 20)
    times = [sample.t_s for sample in sampler.samples]
    assert all(t_s > 0.02 * place - 1e-3 for place, t_s in enumerate(times))  # at most one a moment
    assert all(b > a for a, b in pairwise(times))


def test_only_the_last_seconds_are_kept_when_asked():
    with Sampler(Sources(process=ProcessSource()), interval_s=0.02, keep_s=0.1) as sampler:
        see(sampler, 12)
    assert len(sampler.samples) == 5
    assert sampler.taken >= 12
    assert sampler.samples[-1].t_s > 0.2


def test_a_file_that_can_no_longer_be_written_becomes_a_notice_and_sampling_goes_on(tmp_path):
    with piped(tmp_path) as (pipe, reader):
        sampler = Sampler(Sources(process=ProcessSource()), interval_s=0.02, path=pipe)
        with sampler:
            see(sampler)
            os.close(reader)
            see(sampler)
            sampler.mark("not written")
    assert [notice.message for notice in sampler.notices] == ["the samples are no longer written: Broken pipe"]
    assert [mark.name for mark in sampler.marks] == ["not written"]


@contextlib.contextmanager
def piped(folder: Path):
    """A pipe to write into, and its other side, which is closed in the block."""
    os.mkfifo(folder / "pipe")
    yield folder / "pipe", os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)


def test_nothing_is_written_behind_a_line_that_was_cut(tmp_path):
    with piped(tmp_path) as (pipe, reader):
        writer = SampleWriter(pipe)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            writer.write(Mark(1.0, "cut"))
    again = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer.write(Mark(2.0, "behind it"))
    writer.close()
    assert os.read(again, 4096) == b""
    os.close(again)


FORKS = """
import os, sys, time
from kvlab.memory.nvml import ProcessSource, Sampler, Sources

sampler = Sampler(Sources(process=ProcessSource()), interval_s=0.02, path=sys.argv[1])
sampler.start()
while sampler.taken < 3:
    time.sleep(0.01)
with sampler._writer._lock:  # as the thread holds it while it writes
    child = os.fork()
    if child == 0:
        sampler.mark("child")
        sampler.stop()
        sys.exit(3)
    status = os.waitpid(child, 0)[1]
taken = sampler.taken
while sampler.taken < taken + 3:
    time.sleep(0.01)
sampler.mark("parent")
if sys.argv[2] == "stop":
    sampler.stop()
sys.exit(os.waitstatus_to_exitcode(status) + 1)
"""


@pytest.mark.parametrize("end", ["stop", "exit without it"])
def test_a_forked_child_ends_at_once_and_leaves_the_file_to_its_parent(tmp_path, end):
    kept = tmp_path / "samples.jsonl"
    done = subprocess.run([sys.executable, "-c", FORKS, kept, end], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (4, "")
    recording = read_samples(kept)
    assert len(recording.samples) >= 6
    assert [mark.name for mark in recording.marks] == ["parent"]
    assert all(b.t_s > a.t_s for a, b in pairwise(recording.samples))


def test_a_file_that_hangs_does_not_hang_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "HANGS_S", 0.2)
    with piped(tmp_path) as (pipe, reader):  # of which nobody ever reads
        sampler = Sampler(Sources(process=ProcessSource()), interval_s=0.02, path=pipe)
        fcntl.fcntl(sampler._writer._file.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        with sampler:
            stop_s, held = time.monotonic() + 60, 0
            while held < 20:  # looks one after another at which a write is under way, and the same
                taken = sampler.taken
                time.sleep(0.02)
                held = held + 1 if sampler._writer._lock.locked() and sampler.taken == taken > 10 else 0
                assert time.monotonic() < stop_s
        assert sampler._thread.is_alive()
        os.close(reader)  # the write ends with EPIPE, and the thread with it
    sampler._thread.join(60)
    sampler.stop()
    assert sampler.notices[0].message == "the samples are no longer written: Broken pipe"


def test_intervals_outside_20_ms_to_1_s_are_refused():
    for interval_s in (0, 0.019, 1.1, float("nan")):
        with pytest.raises(IntervalError, match=r"0\.02 to 1 s"):
            Sampler(interval_s=interval_s)


def test_a_process_that_has_ended_is_not_mistaken_for_another():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        source = ProcessSource(child.pid)
        assert source.read().resident_bytes > 0
        child.communicate(b"\n")
    with pytest.raises(ProcessUnreadable, match="has ended"):
        source.read()
    source.close()
    with pytest.raises(ProcessUnreadable, match="no such process"):
        ProcessSource(child.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may join groups")
def test_a_process_of_a_user_in_hundreds_of_groups_is_sampled():
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, extra_groups=range(10**9, 10**9 + 600)) as child:
        source = ProcessSource(child.pid)
        assert source.read().resident_bytes > 0
        source.close()
        child.communicate(b"\n")


CARD = CardReading("0", "v1", 24576 * MIB, 1000 * MIB, None, None, 0.5, None, (ProcessUse(7, None),))
ENTRIES = [
    Sample(0.0, (CARD,), None),
    Mark(0.5, "prefill"),
    Sample(1.0, (), ProcessReading(7, 10 * MIB, None, MIB)),
    Notice(1.5, "gone"),
]


def written(path: Path) -> Path:
    writer = SampleWriter(path)
    writer.start(0.5, ["GPU 0"])
    for entry in ENTRIES:
        writer.write(entry)
    writer.close()
    return path


def test_what_is_written_is_read_back_the_same(tmp_path):
    recording = read_samples(written(tmp_path / "samples.jsonl"))
    assert [*recording.samples, *recording.marks, *recording.notices] == [ENTRIES[i] for i in (0, 2, 1, 3)]
    assert (recording.interval_s, recording.sources) == (0.5, ["GPU 0"])


def test_a_last_line_that_was_cut_is_left_out_and_any_other_broken_line_is_refused(tmp_path):
    path = written(tmp_path / "samples.jsonl")
    whole = path.read_text()
    path.write_text(whole + '{"kind": "sample", "t_s"')
    assert len(read_samples(path).samples) == 2
    path.write_text('{"kind": "other"}\n' + whole)
    with pytest.raises(SampleFileError, match="line 1"):
        read_samples(path)
    with pytest.raises(SampleFileError, match="not a file of samples"):
        read_samples(tmp_path / "absent")


def test_the_figure_has_a_sentence_and_marks_the_events():
    samples = [Sample(t / 10, (CARD,), ProcessReading(7, t * MIB, None, MIB)) for t in range(5)]
    figure, sentence = memory_figure(samples, [Mark(0.2, "prefill")])
    assert sentence.startswith("Memory in 5 samples over 0.4 s, with 1 event marked: GPU 0, used: 1,000 MiB at first")
    assert sentence.endswith("process 7, resident: 0 MiB at first, 4 MiB at most, 4 MiB at the end.")
    assert [text.get_text() for text in figure.axes[0].texts] == ["prefill"]
    with pytest.raises(ValueError, match="nothing to draw"):
        memory_figure([])
