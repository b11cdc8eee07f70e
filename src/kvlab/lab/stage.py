"""Puts green runs where the book renders them, without the noise of one execution (times, paths, process ids)."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from kvlab.lab import provenance
from kvlab.lab.run import LabError
from kvlab.lab.runner import LabResult

NOT_SHOWN = ("*.ipynb", "fingerprint.json")
"""Files of a run's folder that the book does not take as they are."""


def stage(results: list[LabResult], target: Path) -> None:
    """Copy each notebook to ``target/<lab>.ipynb`` and its evidence to ``target/<lab>/``; a red run is refused."""
    target.mkdir(parents=True, exist_ok=True)
    for result in results:
        if result.status != "green":
            raise LabError(f"{result.lab} is red, its run is not shown: {result.reason}")
        evidence = target / result.lab
        shutil.rmtree(evidence, ignore_errors=True)
        shutil.copytree(result.folder, evidence, ignore=shutil.ignore_patterns(*NOT_SHOWN))
        write_normalised(result.folder / "executed.ipynb", target / f"{result.lab}.ipynb")


def write_normalised(executed: Path, target: Path) -> None:
    """Write ``executed`` without papermill's metadata, per-cell times and paths of this machine."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        for noise in ("papermill", "execution"):
            cell.metadata.pop(noise, None)
    text = nbformat.writes(notebook).replace(str(provenance.repository()), ".")
    target.write_text(text + "\n", encoding="utf-8")
