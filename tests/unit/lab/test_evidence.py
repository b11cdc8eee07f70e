"""What a lab records is kept once, shown as a row and written whole."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import pytest
import torch

from kvlab.lab import close_lab, open_lab, record, show_figure
from kvlab.lab.claims import UnexpectedVerdict
from kvlab.lab.run import LabError, Run

CPU = torch.device("cpu")


@pytest.fixture
def opened(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path / "run"))
    open_lab("01-tiny", device=CPU, profile="quick", answer=42)
    return tmp_path / "run"


def test_a_closed_lab_writes_parameters_device_versions_source_metrics_and_verdicts(opened):
    record("answer", 42, "", "exact")
    close_lab()
    run = Run.read(opened / "run.json")
    assert run.parameters == {"device": "cpu", "profile": "quick", "answer": 42}
    assert run.device.kind == "cpu"
    assert run.software["torch"] == torch.__version__
    assert len(run.source.lab_sha256) == len(run.source.src_sha256) == len(run.source.environment_sha256) == 64
    assert run.metrics["answer"].value == 42
    assert run.verdicts[0].verdict == "holds"
    assert run.finished_at is not None


def test_an_unexpected_verdict_raises_and_leaves_the_run_unfinished(opened):
    record("answer", 41, "", "exact")
    with pytest.raises(UnexpectedVerdict, match="tiny-1: expected 'holds', got 'does not hold'"):
        close_lab()
    assert Run.read(opened / "run.json").finished_at is None


def test_a_name_is_recorded_once(opened):
    record("answer", 42, "", "exact")
    with pytest.raises(LabError, match="already recorded as 42"):
        record("answer", 43, "", "exact")


def test_a_value_is_held_only_against_an_earlier_prediction(opened):
    with pytest.raises(LabError, match="held against guess"):
        record("answer", 42, "", "exact", against="guess")


def test_a_row_shows_bytes_in_binary_units_and_the_difference_to_the_prediction(opened, capsys):
    record("guess", 2**20, "bytes", "predicted")
    record("found", 2**20 - 1024, "bytes", "measured", against="guess")
    shown = capsys.readouterr().out
    assert "1,023.00 KiB (1,047,552 bytes)" in shown
    assert "predicted 1.00 MiB (1,048,576 bytes), difference −1.00 KiB (1,024 bytes)" in shown


def test_torch_and_numpy_scalars_become_plain_numbers(opened):
    record("answer", torch.tensor(42), "", "exact")
    close_lab()
    assert json.loads((opened / "run.json").read_text())["metrics"]["answer"]["value"] == 42


def test_a_figure_needs_a_sentence_for_those_who_cannot_see_it(opened):
    figure, _ = plt.subplots()
    for alt in ("", "memory", "one two three four five six"):
        with pytest.raises(LabError, match="needs a sentence"):
            show_figure(figure, "memory", alt)
    show_figure(figure, "memory", "An empty pair of axes, drawn for a test.")
    assert (opened / "memory.svg").read_text().startswith("<?xml")


def test_the_same_figure_is_the_same_bytes(opened):
    for _ in range(2):
        figure, axes = plt.subplots()
        axes.plot([1, 2, 3])
        show_figure(figure, "line", "A line that rises from one to three.")
        written = (opened / "line.svg").read_bytes()
        assert getattr(test_the_same_figure_is_the_same_bytes, "first", written) == written
        test_the_same_figure_is_the_same_bytes.first = written


def test_nothing_is_recorded_without_an_open_lab(checkout):
    with pytest.raises(LabError, match="no lab is open"):
        record("answer", 42, "", "exact")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema_version": 2}', "\x00"])
def test_a_file_that_is_no_run_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(LabError) as refused:
        Run.read(tmp_path / "run.json")
    assert "\n" not in str(refused.value)
