"""What the book renders comes from a green run, without the noise of one execution."""

from __future__ import annotations

import pytest

from kvlab.lab.run import LabError, Run
from kvlab.lab.runner import run_labs
from kvlab.lab.stage import stage


def test_a_green_run_is_staged_without_times_or_paths(checkout):
    results = run_labs(["01-tiny"], device="cpu")
    stage(results, checkout.root / "book" / "labs")
    text = (checkout.root / "book" / "labs" / "01-tiny.ipynb").read_text()
    assert "papermill" not in text
    assert "iopub" not in text
    assert str(checkout.root) not in text
    assert Run.read(checkout.root / "book" / "labs" / "01-tiny" / "run.json").metrics["answer"].value == 42


def test_a_red_run_is_not_staged(checkout):
    results = run_labs(["01-tiny"], device="cpu", parameters={"answer": 41})
    with pytest.raises(LabError, match="01-tiny is red"):
        stage(results, checkout.root / "book" / "labs")
