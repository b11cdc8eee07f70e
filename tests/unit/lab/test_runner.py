"""The runner's word: green only for a lab that closed itself with the verdicts on record; each trap of papermill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import OPEN, PARAMETERS, RECORD
from filelock import FileLock

from kvlab.errors import KvlabError
from kvlab.lab import runner
from kvlab.lab.run import LabError
from kvlab.lab.runner import find_lab, lab_names, run_labs


def run_tiny(**arguments):
    (result,) = run_labs(["01-tiny"], device="cpu", **arguments)
    return result


def test_a_lab_that_closes_with_the_expected_verdict_is_green_and_reused_until_something_changes(checkout, monkeypatch):
    monkeypatch.delenv("KVLAB_RUN_DIR", raising=False)
    result = run_tiny()
    assert (result.status, result.reason, result.reused) == ("green", "", False)
    assert [(j.claim.id, j.verdict) for j in result.judgements] == [("tiny-1", "holds")]
    assert (result.folder / "run.json").is_file()
    assert (result.folder / "executed.ipynb").is_file()
    assert "KVLAB_RUN_DIR" not in os.environ

    assert run_tiny().reused
    assert not run_tiny(fresh=True).reused
    checkout.write_lab([OPEN, "# changed", RECORD, "close_lab();"])
    assert not run_tiny().reused


def test_an_unexpected_verdict_is_red_and_leaves_the_last_green_run_in_its_place(checkout):
    green = run_tiny()
    result = run_tiny(parameters={"answer": 41})
    assert result.status == "red"
    assert "tiny-1 came out 'does not hold'" in result.reason
    assert result.folder.name == "01-tiny.failed"
    assert (green.folder / "run.json").is_file()


def test_a_lab_that_another_process_is_running_is_left_to_it(checkout):
    done = run_tiny()
    with FileLock(done.folder.with_name("01-tiny.lock")), pytest.raises(KvlabError, match="by another process"):
        run_tiny(fresh=True)
    assert run_tiny().reused
    assert run_tiny(fresh=True).status == "green"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_its_kernel_and_all_in_one_line(checkout, number):
    wait = "import os, pathlib, time; pathlib.Path('kernel').write_text(f'{os.getpid()} '); time.sleep(600)"
    checkout.write_lab([OPEN, wait, RECORD, "close_lab();"])
    command = [sys.executable, "-m", "kvlab.cli", "labs", "--device=cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        while not (checkout.root / "kernel").exists() or not (pid := (checkout.root / "kernel").read_text()):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(number)
        assert running.communicate(timeout=60)[1] == "kvlab: stopped\n"
    assert running.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_notebook_without_a_kernelspec_runs_on_this_interpreter(checkout):
    check = f"import sys; assert sys.executable == {sys.executable!r}"
    checkout.write_lab([OPEN, check, RECORD, "close_lab();"], kernel=False)
    assert run_tiny().status == "green"


def test_a_cell_that_writes_to_stderr_is_red(checkout):
    checkout.write_lab([OPEN, "import sys; print('careful', file=sys.stderr)", RECORD, "close_lab();"])
    assert "wrote to stderr: 'careful'" in run_tiny().reason


def test_no_true_rule_is_red(checkout):
    assert "no rule of the claim is true" in run_tiny(parameters={"answer": 7}).reason


def test_a_lab_that_never_closes_is_red_though_no_cell_raised(checkout):
    checkout.write_lab([OPEN, RECORD])
    result = run_tiny()
    assert result.status == "red"
    assert "no run at" in result.reason


def test_a_cell_that_raises_is_red_and_named(checkout):
    checkout.write_lab([OPEN, "1 / 0", RECORD, "close_lab();"])
    assert "raised ZeroDivisionError: division by zero" in run_tiny().reason


def test_a_killed_kernel_is_red_though_papermill_marks_its_cell_completed(checkout):
    checkout.write_lab([OPEN, RECORD, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "close_lab();"])
    result = run_tiny()
    assert result.status == "red"
    assert "kernel died" in result.reason


LATE = """
import time
kernel = get_ipython().kernel
send = kernel.session.send

def reply_then_pause(stream, kind, *arguments, **options):
    sent = send(stream, kind, *arguments, **options)
    if kind == "execute_reply":
        kernel.session.send = send
        kernel.iopub_thread.schedule(lambda: time.sleep(5))
    return sent

kernel.session.send = reply_then_pause
"""


def test_a_kernel_that_is_slow_to_say_that_it_has_finished_is_waited_for(checkout):
    checkout.write_lab([OPEN, LATE, RECORD, "close_lab();"])
    assert run_tiny().reason == ""


def test_a_kernel_that_does_not_start_is_red(checkout, tmp_path, monkeypatch):
    name_kernel([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, monkeypatch)
    result = run_tiny()
    assert result.status == "red"
    assert "the kernel did not start: Kernel died before replying" in result.reason


def test_a_cell_that_runs_too_long_is_red(checkout, monkeypatch):
    monkeypatch.setitem(runner.CELL_TIMEOUT_S, "quick", 2)
    checkout.write_lab([OPEN, RECORD, "import time; time.sleep(60)", "close_lab();"])
    assert "longer than 2 s" in run_tiny().reason


def test_an_unknown_parameter_is_refused_before_anything_runs(checkout):
    with pytest.raises(KvlabError, match=r"01-tiny has no parameter tokens: it has answer, device, profile"):
        run_tiny(parameters={"tokens": 3})
    assert not (checkout.root / "_runs").exists()


def test_a_lab_without_a_parameters_cell_is_refused(checkout):
    checkout.write_lab([PARAMETERS, OPEN, RECORD, "close_lab();"], parameters=None)
    with pytest.raises(LabError, match="0 cells tagged 'parameters'"):
        run_tiny()


@pytest.mark.parametrize("text", ["garbage", "[]", "{}", '{"cells": 3, "metadata": {}, "nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_refused_in_one_line(checkout, text):
    (checkout.root / "labs" / "01-tiny.ipynb").write_text(text)
    with pytest.raises(LabError, match="01-tiny.ipynb is not a notebook"):
        run_tiny()


def name_kernel(command: list[str], folder: Path, monkeypatch) -> None:
    """Let ``python3`` be another kernel."""
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "other"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))


def test_a_kernel_of_another_interpreter_is_refused(checkout, tmp_path, monkeypatch):
    name_kernel(["/bin/sh", "-m", "ipykernel_launcher"], tmp_path, monkeypatch)
    with pytest.raises(KvlabError, match="the python3 kernel is /bin/sh"):
        run_tiny()


def test_unknown_lab_and_profile_are_refused_with_the_choices(checkout):
    with pytest.raises(KvlabError, match="unknown lab '99': choose one of 01-tiny"):
        find_lab("99")
    with pytest.raises(KvlabError, match="unknown profile 'slow': choose one of quick, full"):
        run_tiny(profile="slow")
    assert find_lab("1") == find_lab("01") == "01-tiny"
    assert lab_names() == ["01-tiny"]
