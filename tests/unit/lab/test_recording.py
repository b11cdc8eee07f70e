"""A run is kept whole or not at all, and says nothing of the machine but what it should."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from kvlab.lab.recording import keep
from kvlab.lab.run import LabError, Run
from kvlab.lab.runner import run_labs


def test_a_green_run_is_kept_with_the_hash_of_every_file(checkout):
    (result,) = run_labs(["01-tiny"], device="cpu")
    folder = keep(result, checkout.root / "recordings")
    assert folder == checkout.root / "recordings" / "cpu" / "01-tiny"
    assert Run.read(folder / "run.json").metrics["answer"].value == 42
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    assert {"run.json", "01-tiny.ipynb"} <= sums.keys()
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_new_run_replaces_the_old_one_wholly(checkout):
    (result,) = run_labs(["01-tiny"], device="cpu")
    folder = keep(result, checkout.root / "recordings")
    (folder / "left-over.log").write_text("of an older run")
    keep(result, checkout.root / "recordings")
    assert not (folder / "left-over.log").exists()


def test_a_run_that_names_a_path_of_the_machine_is_not_kept_and_the_old_one_stays(checkout):
    (result,) = run_labs(["01-tiny"], device="cpu")
    folder = keep(result, checkout.root / "recordings")
    before = (folder / "SHA256SUMS").read_bytes()
    (result.folder / "request.log").write_text("Traceback: /home/ada/server.py")
    with pytest.raises(LabError, match=r"request\.log"):
        keep(result, checkout.root / "recordings")
    assert (folder / "SHA256SUMS").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["01-tiny"]


def test_a_traceback_in_a_log_keeps_its_files_and_loses_where_they_lie(checkout):
    (result,) = run_labs(["01-tiny"], device="cpu")
    places = (pytest.__file__, json.__file__, checkout.root / "labs" / "cell.py")
    (result.folder / "request.log").write_text("".join(f'  File "{place}", line 1\n' for place in places))
    kept = (keep(result, checkout.root / "recordings") / "request.log").read_text()
    assert re.findall('"(.*)"', kept) == [
        "site-packages/pytest/__init__.py",
        "python/json/__init__.py",
        "./labs/cell.py",
    ]


def test_a_red_run_is_not_kept(checkout):
    (result,) = run_labs(["01-tiny"], device="cpu", parameters={"answer": 41})
    with pytest.raises(LabError, match="01-tiny is red"):
        keep(result, checkout.root / "recordings")
