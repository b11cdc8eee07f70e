"""The command line: JSON for machines, exit 2 and one line for bad input, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvlab.cli import app, main


def kvlab(*arguments: str, stdin: str = "", cwd=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvlab.cli", *arguments]
    return subprocess.run(command, input=stdin, cwd=cwd, capture_output=True, text=True, timeout=120)


def run_in_process(capsys, *arguments: str) -> dict:
    app(list(arguments), standalone_mode=False)
    return json.loads(capsys.readouterr().out)


PLAN_KEYS = {
    "weights_bytes",
    "kv_bytes_per_token",
    "kv_bytes",
    "total_bytes",
    "usable_bytes",
    "fits",
    "max_tokens",
    "terms",
}
CASE = ("--model", "llama-2-7b", "--batch", "4", "--tokens", "6000", "--json")


def test_plan_answers_the_articles_case_in_json(capsys):
    answer = run_in_process(capsys, "plan", *CASE, "--gpu", "rtx3090-24g")
    assert answer.keys() >= PLAN_KEYS
    assert answer["kv_bytes_per_token"] == 2 * 32 * 32 * 128 * 2
    assert answer["kv_bytes"] == 4 * 6000 * answer["kv_bytes_per_token"]
    assert answer["total_bytes"] == sum(answer["terms"].values())
    assert answer["fits"] is False


def test_gpu_memory_subtracts_nothing_and_a_named_gpu_does(capsys):
    given = run_in_process(capsys, "plan", *CASE, "--gpu-memory", "24GiB")
    named = run_in_process(capsys, "plan", *CASE, "--gpu", "rtx3090-24g")
    assert given["usable_bytes"] == 24 * 2**30
    assert named["usable_bytes"] < given["usable_bytes"]


def test_the_version_names_what_can_change_a_result():
    packages = ("kvlab", "torch", "transformers")
    done = kvlab("--version")
    assert done.stdout.split() == [word for name in packages for word in (name, metadata.version(name))]
    assert done.returncode == 0


def test_diagnose_reads_standard_input():
    text = "RuntimeError: CUDA error: out of memory\n"
    answer = json.loads(kvlab("diagnose", "-", "--json", stdin=text).stdout)
    assert answer["is_oom"] is True
    assert len(answer["events"]) == 1


def test_claims_lists_the_whole_ledger(capsys):
    assert len(run_in_process(capsys, "claims", "--json")["claims"]) == 41


BAD = {
    ("labs", "--lab", "99"): "unknown lab '99'",
    ("labs", "--profile", "slow"): "unknown profile 'slow'",
    ("labs", "--device", "tpu"): "unknown device 'tpu'",
    ("labs", "-p", "nonsense"): "-p takes NAME=VALUE",
    ("labs", "-p", "nonsense=1"): "has no parameter nonsense",
    ("labs", "-p", "model=nope"): "there is no model 'nope'",
    ("labs", "-p", "gpu=nope"): "unknown GPU 'nope'",
    ("labs", "--lab", "02", "-p", "budget_mib=-4"): "budget_mib must be a positive whole number",
    ("labs", "--lab", "02", "-p", "prompt_tokens=1.5"): "prompt_tokens must be a positive whole number",
    ("labs", "--lab", "02", "-p", "chunk_tokens=[]"): "chunk_tokens must be a positive whole number",
    ("labs", "--lab", "03", "-p", "requests=abc"): "requests must be of the kind of 4",
    ("labs", "--lab", "03", "-p", "requests=-1"): "requests must be of the kind of 4",
    ("labs", "--lab", "03", "-p", "shape=nope"): "there is no model 'nope'",
    ("labs", "--lab", "08", "-p", "sinks=.inf"): "sinks must be of the kind of 4",
    ("labs", "-p", "model=null"): "model must be of the kind of",
    ("labs", "-p", "model={"): "-p takes values as in YAML",
    ("labs", "-p", "gpu=[1]"): "gpu must be of the kind of",
    ("labs", "-p", "profile=../../elsewhere"): "profile is not given as a parameter: use --device and --profile",
    ("labs", "--nope"): "No such option",
    ("plan", *CASE): "give either --gpu NAME or --gpu-memory SIZE",
    ("plan", *CASE, "--gpu-memory", "-3GiB"): "is not a size",
    ("plan", *CASE, "--gpu", "nope"): "unknown GPU 'nope'",
    ("diagnose", "no/such/file"): "cannot read no/such/file",
    ("model", "fetch", "nope"): "'nope' is not a bundled model",
    ("labs", "-p", "a=2001-99-99"): "-p takes values as in YAML",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line_and_exit_2(arguments, monkeypatch, capsys):
    assert_refused(arguments, BAD[arguments], monkeypatch, capsys)


def test_a_folder_without_a_config_is_named(tmp_path, monkeypatch, capsys):
    arguments = ("plan", "--model", str(tmp_path), "--gpu-memory", "3GiB", "--batch", "1", "--tokens", "3")
    assert_refused(arguments, "has no config.json", monkeypatch, capsys)


CONFIGS = ["null", "5", "[" * 5000, '{"model_type": ["llama"]}', '{"model_type": "llama", "num_hidden_layers": 0}']
CONFIGS += ['{"model_type": "llama", "num_attention_heads": 0}', '{"model_type": "llama", "hidden_size": NaN}']


@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: text[:40])
def test_a_config_that_makes_no_model_is_one_line(text, tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.json"
    config.write_text(text)
    arguments = ("plan", "--model", str(config), "--gpu-memory", "3GiB", "--batch", "1", "--tokens", "3")
    assert_refused(arguments, "", monkeypatch, capsys)


def test_an_output_that_cannot_be_written_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvlab.cli", "claims", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "kvlab: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closing", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_no_traceback(closing):
    ran = shell(f"echo 'CUDA out of memory' | {sys.executable} -m kvlab.cli diagnose - {closing}")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_with_standard_error_closed_nothing_of_it_lands_on_standard_output():
    ran = shell(f"{sys.executable} -m kvlab.cli diagnose nosuch 2>&-")
    assert (ran.returncode, ran.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [("claims", "--json"), ("claims", "--help")])
def test_a_reader_that_had_enough_is_a_broken_pipe_and_nothing_red(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "kvlab.cli", *arguments], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def shell(line: str) -> subprocess.CompletedProcess:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)


def test_a_refusal_does_not_steer_the_terminal_with_the_name_of_a_file():
    said = kvlab("diagnose", "no\x1b]0;title\x07such").stderr
    assert said == "kvlab: cannot read no\ufffd]0;title\ufffdsuch: No such file or directory\n"


def assert_refused(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_installed_command_refuses_in_one_line_too():
    done = kvlab("labs", "--nope")
    assert (done.returncode, done.stderr) == (2, "kvlab: No such option: --nope\n")
