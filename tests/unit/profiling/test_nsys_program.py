"""Running a program under nsys: its status is kept, its report found in every version, and what fails says why."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nsys_exports import write_export

from kvlab.profiling import nvtx
from kvlab.profiling.nsys import Nsys, NsysError, run_profiled, summarise_export
from kvlab.profiling.nsys.relay import Relay

HELP_2022 = "--trace= --cuda-memory-usage= --sample= --cpuctxsw= --output="


def stand_in(
    folder, version, help_text=HELP_2022, ending="nsys-rep", exports=True, before=":", during_export=":"
) -> Path:
    """A program that answers as nsys of some version does; it writes down how it was called."""
    path, made = folder / "nsys", write_export(folder / "made.sqlite")
    path.write_text(f"""#!/bin/sh
trap : INT
echo "$@" >> {folder}/called
case "$1 $2" in
  "--version "*) echo "NVIDIA Nsight Systems version {version}" ;;
  "profile --help") echo "{help_text}" ;;
  profile*)
    shift
    while [ "${{1#--}}" != "$1" ]; do
      case "$1" in --output=*) output="${{1#--output=}}" ;; esac
      shift
    done
    {before}
    "$@"
    echo report > "$output.{ending}" ;;
  export*)
    {during_export}
    {"exit 1" if not exports else ""}
    for one in "$@"; do case "$one" in --output=*) cp {made} "${{one#--output=}}" ;; esac; done ;;
esac
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("version", "ending", "numbers"),
    [
        ("2021.3.2.4-027534f", "qdrep", (2021, 3, 2, 4)),
        ("2021.4.1.73-08591f7", "nsys-rep", (2021, 4, 1, 73)),
        ("2022.4.2.1-df9881f", "nsys-rep", (2022, 4, 2, 1)),
        ("2026.1.1.204-261136937v0", "nsys-rep", (2026, 1, 1, 204)),
    ],
)
def test_the_report_is_found_under_the_name_of_each_version(tmp_path, version, ending, numbers):
    nsys = Nsys.find(stand_in(tmp_path, version, ending=ending))
    assert nsys.version == numbers
    profile = run_profiled(nsys, ["true"], tmp_path / "run")
    assert profile.report == tmp_path / f"run.{ending}"
    assert summarise_export(profile.export).api


def test_an_nsys_in_this_folder_is_found_by_its_relative_path(tmp_path, monkeypatch):
    there = stand_in(tmp_path, "2024.6.2.225")
    monkeypatch.chdir(there.parent)
    assert Nsys.find(Path(there.name)).path == there


def test_only_flags_that_the_version_knows_are_passed(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2020.1.1.8", help_text="--trace= --sample= --output=", ending="qdrep"))
    run_profiled(nsys, ["true"], tmp_path / "run")
    called = (tmp_path / "called").read_text()
    assert "profile --trace=cuda,nvtx,osrt --sample=none --output=" in called
    assert "--cuda-memory-usage" not in called


@pytest.mark.parametrize(("program", "status"), [("exit 0", 0), ("exit 7", 7), ("exit 2", 2), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_programs_own(tmp_path, program, status):
    nsys = Nsys.find(stand_in(tmp_path, "2024.6.2.225"))  # which itself ends with 0 whatever the program did
    assert run_profiled(nsys, ["sh", "-c", program], tmp_path / "run").exit_status == status


ENDING = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

up, answers = Path(sys.argv[1]), sys.argv[2]

def answer(number, frame):
    up.with_name("heard").open("a").write(".")
    if answers == "ends":
        sys.exit(4)

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, answer)
up.write_text(f"{os.getpid()} ")
while True:
    time.sleep(120)
"""


KVLAB = "from kvlab import cli; from kvlab.profiling.nsys import relay; relay.ENDS_S = 1; cli.main()"


def profiled(nsys, folder, answers="ends", under=()) -> Running:
    """``kvlab nsys-run`` on a program that waits."""
    command = [*under, sys.executable, "-c", KVLAB, "nsys-run", f"--nsys={nsys}", f"--output={folder / 'run'}", "--"]
    return Running([*command, *waiting(folder, answers)], folder, env=os.environ | {"TMPDIR": str(folder)})


def waiting(folder, answers="ends") -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder / "up"), answers]


class Running:
    """A command around :data:`PROGRAM`; both are ended in any case."""

    def __init__(self, command, folder, **options):
        self.folder = folder
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if (self.folder / "up").exists() and is_running(self.program):
            os.kill(self.program, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    @property
    def program(self) -> int:
        up = self.folder / "up"
        wait_for(lambda: up.exists() and up.read_text().endswith(" "))
        return int(up.read_text())

    def heard(self, times: int) -> None:
        """Wait until the program has answered so many signals."""
        wait_for(lambda: (self.folder / "heard").exists() and len((self.folder / "heard").read_text()) == times)

    def taken(self) -> None:
        """Wait until kvlab has taken a signal that its program cannot yet hear."""
        wait_for(lambda: list(self.folder.glob("tmp*/signal")))
        next(self.folder.glob("tmp*/signal")).unlink()

    def end(self) -> tuple[int, str]:
        """The exit status, and what was said on standard error."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def wait_for(holds) -> None:
    stop_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < stop_s
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def nsys(tmp_path):
    return stand_in(tmp_path, "2024.6.2.225")


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("to", [os.kill, os.killpg])
def test_a_signal_ends_the_program_and_not_the_recording(tmp_path, nsys, number, to):
    with profiled(nsys, tmp_path) as run:
        program = run.program
        to(run.process.pid, number)
        assert run.end()[0] == 4
        assert not is_running(program)
    assert (tmp_path / "run.sqlite").exists()


def test_control_without_a_relay_a_signal_leaves_the_program_running(tmp_path, nsys):
    bare = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with Running([sys.executable, "-c", bare, nsys, "profile", *waiting(tmp_path)], tmp_path) as run:
        program = run.program
        run.process.terminate()
        assert run.process.wait(timeout=60) == -signal.SIGTERM
        assert is_running(program)


def test_a_program_that_dies_of_the_signal_has_the_status_of_that(tmp_path, nsys):
    code = "from kvlab.profiling.nsys import Nsys, run_profiled; import sys; from pathlib import Path\n"
    code += "sys.exit(run_profiled(Nsys.find(sys.argv[1]), ['sleep', '120'], Path(sys.argv[2])).exit_status)"
    with subprocess.Popen([sys.executable, "-c", code, nsys, tmp_path / "run"]) as running:
        wait_for(lambda: "profile --trace" in called(tmp_path))
        running.terminate()  # before the program began or after
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tmp_path / "run.sqlite").exists()


def called(folder) -> str:
    return (folder / "called").read_text() if (folder / "called").exists() else ""


def test_a_program_that_pays_no_heed_ends_with_the_third_signal(tmp_path, nsys):
    with profiled(nsys, tmp_path, "pays no heed") as run:
        program = run.program
        for times in (1, 2):
            run.process.terminate()
            run.heard(times)
        assert is_running(program)
        run.process.terminate()
        assert run.end()[0] == 128 + signal.SIGKILL
        assert not is_running(program)
    assert (tmp_path / "run.sqlite").exists()


def test_a_signal_that_is_ignored_stays_so(tmp_path, nsys):
    with profiled(nsys, tmp_path, under=("sh", "-c", 'trap "" HUP; exec "$@"', "sh")) as run:  # as nohup does
        assert is_running(run.program)
        run.process.send_signal(signal.SIGHUP)
        run.process.terminate()
        assert run.end()[0] == 4
    assert (tmp_path / "heard").read_text() == "."


def test_a_signal_before_the_program_begins_ends_it_there(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with profiled(stand_in(tmp_path, "2024.6.2.225", before=f"read line < {gate}"), tmp_path) as run:
        wait_for(lambda: "profile --trace" in called(tmp_path))
        run.process.terminate()
        wait_for(lambda: list(tmp_path.glob("tmp*/signal")))
        gate.write_text("go\n")
        assert run.end()[0] == 128 + signal.SIGTERM
    assert not (tmp_path / "up").exists()
    assert (tmp_path / "run.sqlite").exists()


def test_the_note_of_a_signal_is_never_there_without_the_signal(tmp_path):
    with Relay(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        with (tmp_path / "signal").open() as first:
            signal.raise_signal(signal.SIGHUP)
            assert first.read() == f"{signal.SIGTERM:d}"  # it was replaced, not emptied and written anew
        assert (tmp_path / "signal").read_text() == f"{signal.SIGHUP:d}"


def test_an_nsys_that_does_not_come_to_its_program_ends_with_the_third_signal(tmp_path):
    with profiled(stand_in(tmp_path, "2024.6.2.225", before="exec sleep 120"), tmp_path) as run:
        wait_for(lambda: "profile --trace" in called(tmp_path))
        for _ in range(2):
            run.process.terminate()
            run.taken()
        run.process.terminate()
        status, err = run.end()
    assert status == 2
    assert "ended with status 137 and left no report" in err


@pytest.mark.parametrize("answers", ["ends", "pays no heed"])
def test_a_program_does_not_outlive_its_nsys(tmp_path, nsys, answers):
    with profiled(nsys, tmp_path, answers) as run:
        program = run.program
        os.kill(os.getpgid(program), signal.SIGKILL)  # the stand-in leads the group
        status, err = run.end()
        assert not is_running(program)
    assert status == 2
    assert err.count("\n") == 1
    assert "ended with status 137 and left no report" in err


def test_a_signal_during_the_export_says_how_to_make_it(tmp_path):
    with profiled(stand_in(tmp_path, "2024.6.2.225", during_export="exec sleep 120"), tmp_path) as run:
        os.kill(run.program, signal.SIGTERM)
        wait_for(lambda: "export --type" in called(tmp_path))
        run.process.terminate()
        status, err = run.end()
    assert status == 2
    assert "run.nsys-rep was done: " in err
    assert "export --type=sqlite" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run.sqlite").exists()


def test_arguments_reach_the_program_as_they_are(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2024.6.2.225"))
    odd = ["a b", "$HOME", "'", "--output=x", "*"]
    code = f"import sys; sys.exit(sys.argv[1:] != {odd!r})"
    assert run_profiled(nsys, [sys.executable, "-c", code, *odd], tmp_path / "run").exit_status == 0


def test_an_ending_that_was_given_is_not_doubled(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2024.6.2.225"))
    assert run_profiled(nsys, ["true"], tmp_path / "run.nsys-rep").report == tmp_path / "run.nsys-rep"


def test_what_stands_in_the_way_is_said_before_the_program_runs(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2024.6.2.225"))
    (tmp_path / "run.sqlite").write_text("mine")
    touch = ["touch", str(tmp_path / "ran")]
    for output, program, said in [
        (tmp_path / "run", touch, "is there already"),
        (tmp_path / "absent" / "run", touch, "no folder"),
        (tmp_path / "run%p", touch, "macro"),
        (tmp_path / "other", ["no-such-program"], "no program"),
    ]:
        with pytest.raises(NsysError, match=said):
            run_profiled(nsys, program, output)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "run.sqlite").read_text() == "mine"


def test_a_report_that_cannot_be_exported_is_said_to_be_there(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2024.6.2.225", exports=False))
    with pytest.raises(NsysError, match="is there, but nsys export failed"):
        run_profiled(nsys, ["true"], tmp_path / "run")


def test_a_raw_recording_without_a_report_names_the_missing_importer(tmp_path):
    nsys = Nsys.find(stand_in(tmp_path, "2022.4.2.1", ending="qdstrm"))
    with pytest.raises(NsysError, match="importer"):
        run_profiled(nsys, ["true"], tmp_path / "run")


def test_where_nsys_is_missing_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NsysError, match="not installed here.*CUDA Toolkit.*--nsys") as caught:
        Nsys.find()
    assert "\n" not in str(caught.value)
    assert "http" not in str(caught.value)
    with pytest.raises(NsysError, match="no program at"):
        Nsys.find(tmp_path / "nsys")
    with pytest.raises(NsysError, match="does not say that it is"):
        Nsys.find(shutil.which("true", path=os.defpath))


needs_nsys = pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed here")


def run_installed(program, folder):
    """nsys 2022.4 now and then dies itself before the program starts (sem_open); then once more."""
    for attempt in range(3):
        try:
            return run_profiled(Nsys.find(), program, folder / f"run{attempt}")
        except NsysError as error:
            if "left no report" not in str(error):
                raise
    pytest.skip("the installed nsys does not record here")


def started(nsys, folder) -> Running:
    """A run that has come to its program; nsys 2022.4 now and then does not."""
    for _ in range(3):
        run = profiled(nsys, folder)
        wait_for(lambda run=run: (folder / "up").exists() or run.process.poll() is not None)
        if (folder / "up").exists():
            return run
        run.end()
    pytest.skip("the installed nsys does not record here")


@needs_nsys
def test_the_installed_nsys_records_a_program_and_keeps_its_status(tmp_path):
    profile = run_installed(["sh", "-c", "exit 5"], tmp_path)
    assert profile.exit_status == 5
    assert summarise_export(profile.export).product_version.startswith("20")


@needs_nsys
@pytest.mark.parametrize("to", [os.kill, os.killpg])
@pytest.mark.parametrize("number", ENDING)
def test_the_installed_nsys_writes_its_report_when_a_signal_ends_the_program(tmp_path, number, to):
    run = started(shutil.which("nsys"), tmp_path)
    with run:
        program = run.program
        to(run.process.pid, number)
        status, err = run.end()
        assert not is_running(program)
    assert status == 4, err
    assert summarise_export(tmp_path / "run.sqlite").product_version.startswith("20")


@needs_nsys
def test_a_program_does_not_outlive_the_installed_nsys(tmp_path):
    with started(shutil.which("nsys"), tmp_path) as run:
        program = run.program
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
        (nsys,) = map(int, children.read_text().split())
        os.kill(nsys, signal.SIGKILL)
        status, err = run.end()
        assert not is_running(program)
    assert status == 2
    assert "ended with status 137 and left no report" in err


@needs_nsys
@pytest.mark.skipif(not nvtx.has_nvtx(), reason="no NVTX here: a CPU build of PyTorch without the package nvtx")
def test_ranges_reach_the_installed_nsys(tmp_path):
    code = (
        "from kvlab.profiling import nvtx\n"
        "with nvtx.range('prefill'):\n"
        "    for _ in range(3):\n"
        "        with nvtx.range('decode'): pass\n"
    )
    profile = run_installed([sys.executable, "-c", code], tmp_path)
    assert profile.exit_status == 0
    counts = {one.name: one.count for one in summarise_export(profile.export).nvtx}
    if not counts:
        pytest.skip("this nsys does not understand the installed NVTX (2022.4 needs the package nvtx up to 0.2.11)")
    assert counts == {"prefill": 1, "decode": 3}
    with sqlite3.connect(profile.export) as connection:
        assert connection.execute("SELECT COUNT(*) FROM NVTX_EVENTS WHERE eventType = 59").fetchone() == (4,)
    connection.close()
