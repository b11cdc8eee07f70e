"""kvlab nsys and kvlab nsys-run: what other programs rely on, and one line where something is wrong."""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from nsys_exports import MIB, write_export

from kvlab import cli

KEYS = {"gpus", "kernels", "api", "failed_calls", "nvtx", "memory_peak_bytes"}


@pytest.fixture
def kvlab(monkeypatch, capfd):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capfd.readouterr()

    return run


def refused_in_one_line(result) -> str:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("kvlab: ")
    assert err.count("\n") == 1
    return err


def test_json_has_the_keys_that_programs_rely_on(kvlab, tmp_path):
    code, out, err = kvlab("nsys", write_export(tmp_path / "a.sqlite"), "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.keys() >= KEYS
    assert said["gpus"] == ["NVIDIA A", "NVIDIA B"]
    assert said["kernels"] == [{"name": "gemm<float, 128>", "count": 3, "total_ns": 1_200}]
    assert said["api"][0] == {"name": "cudaMalloc_v3020", "count": 3, "total_ns": 4_900, "errors": 1}
    assert said["failed_calls"][1] == {"name": "cudaMalloc_v3020", "return_value": 2, "start_ns": 9_000}
    assert {"name", "count", "total_ns"} <= said["nvtx"][0].keys()
    assert said["memory_peak_bytes"] == 30 * MIB


def test_text_says_the_same_for_people(kvlab, tmp_path):
    code, out, _ = kvlab("nsys", write_export(tmp_path / "a.sqlite"))
    assert code == 0
    for said in ("gemm<float, 128>", "cudaMalloc_v3020", "out of memory", "server: decode", "31,457,280 bytes"):
        assert said in out


def test_the_timeline_is_drawn_with_its_sentence_as_title(kvlab, tmp_path):
    drawn = tmp_path / "line.svg"
    code, out, _ = kvlab("nsys", write_export(tmp_path / "a.sqlite"), "--figure", drawn)
    assert code == 0
    assert "memory peaks at 30.0 MiB" in out.replace("\n", " ")
    assert "memory peaks at 30.0 MiB" in drawn.read_text()
    assert "line.svg, not line.png" in refused_in_one_line(
        kvlab("nsys", tmp_path / "a.sqlite", "--figure", tmp_path / "line.png")
    )


def test_what_would_steer_a_terminal_is_not_printed(kvlab, tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    evil = "\x1b]0;owned\x07\x1b[2J[red]x\r\n"
    connection = sqlite3.connect(path)
    connection.execute("UPDATE StringIds SET value = ?", (evil,))
    connection.execute("UPDATE TARGET_INFO_GPU SET name = ?", (evil,))
    connection.execute("UPDATE META_DATA_EXPORT SET value = ?", (evil,))
    connection.execute("UPDATE NVTX_EVENTS SET text = ?", (evil,))
    connection.commit()
    connection.close()
    code, out, _ = kvlab("nsys", path)
    assert code == 0
    assert "[red]x" in out
    code, as_json, _ = kvlab("nsys", path, "--json")
    assert code == 0
    assert json.loads(as_json)["gpus"] == [evil, evil]
    for text in (out, as_json):
        assert not {c for c in text if not c.isprintable()} - {"\n"}


def test_a_damaged_schema_does_not_steer_the_terminal_either(kvlab, tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    path.write_bytes(path.read_bytes().replace(b"demangledName INTEGER", b"demangled\x1b[2J \x07 '"))
    assert "\x1b" not in refused_in_one_line(kvlab("nsys", path))


def test_bad_files_are_refused(kvlab, tmp_path):
    (tmp_path / "empty.sqlite").touch()
    for path in (tmp_path, tmp_path / "absent.sqlite", tmp_path / "empty.sqlite", Path(__file__)):
        refused_in_one_line(kvlab("nsys", path))


def test_without_nsys_one_line_says_how_to_get_it(kvlab, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "CUDA Toolkit" in refused_in_one_line(kvlab("nsys-run", "--", "python", "-c", "pass"))


def test_a_program_is_needed(kvlab):
    assert "program" in refused_in_one_line(kvlab("nsys-run"))


@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed here")
def test_the_programs_status_and_output_come_through(kvlab, tmp_path):
    def run(*arguments):
        for _ in range(3):  # nsys 2022.4 now and then dies itself before the program starts (sem_open)
            command = [sys.executable, "-m", "kvlab.cli", "nsys-run", *arguments]
            done = subprocess.run(command, capture_output=True, text=True)
            if "left no report" not in done.stderr:
                return done.returncode, done.stdout, done.stderr
        pytest.skip("the installed nsys does not record here")

    code, out, err = run("-o", str(tmp_path / "run"), "--", "sh", "-c", "echo hello --json; exit 9")
    assert code == 9, err
    assert "hello --json" in out
    assert f"kvlab nsys {tmp_path / 'run.sqlite'}" in out
    again = tmp_path / "again"
    code, out, err = run("--json", "-o", str(again), "--", "sh", "-c", "echo hello")
    assert (code, json.loads(out)["exit_status"], json.loads(out)["export"]) == (0, 0, f"{again}.sqlite")
    assert "hello" in err
    assert kvlab("nsys", f"{again}.sqlite", "--json")[0] == 0
