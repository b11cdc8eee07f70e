"""Running a program under nsys: its status is kept, its report found in every version, and what fails says why."""

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

HELP_2022 = "--trace= --cuda-memory-usage= --sample= --cpuctxsw= --output="


WAITING = """
import sys, time
from pathlib import Path
try:
    Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(4)
"""


def stand_in(folder, version, help_text=HELP_2022, ending="nsys-rep", exports=True) -> Path:
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
    "$@"
    echo report > "$output.{ending}" ;;
  export*)
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


def test_ctrl_c_ends_the_program_and_not_the_recording(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvlab.profiling.nsys import Nsys, run_profiled\n"
        f"profile = run_profiled(Nsys.find({str(stand_in(tmp_path, '2024.6.2.225'))!r}), [sys.executable, '-c', "
        f"{WAITING!r}, {str(tmp_path / 'up')!r}], Path({str(tmp_path / 'run')!r}))\n"
        "sys.exit(profile.exit_status)\n"
    )
    running = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    for _ in range(600):
        if (tmp_path / "up").exists():
            break
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(timeout=60) == 4
    assert (tmp_path / "run.sqlite").exists()


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


@needs_nsys
def test_the_installed_nsys_records_a_program_and_keeps_its_status(tmp_path):
    profile = run_installed(["sh", "-c", "exit 5"], tmp_path)
    assert profile.exit_status == 5
    assert summarise_export(profile.export).product_version.startswith("20")


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
