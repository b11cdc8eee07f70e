"""Keeps a green run with the book: normalised notebook, evidence, figures, logs and the hash of each file."""

from __future__ import annotations

import hashlib
import re
import shutil
import sysconfig
from pathlib import Path

from kvlab.lab import provenance
from kvlab.lab.run import LabError, Run
from kvlab.lab.runner import LabResult
from kvlab.lab.stage import NOT_SHOWN, write_normalised

PATH_OF_A_MACHINE = re.compile(rb"/(?:home|root|tmp|work|Users|mnt)/\w")
SUMS = "SHA256SUMS"


def recorded_device(run: Run) -> str:
    """The folder of a device's recordings: ``cpu``, or the card's name as ``nvidia-h200``."""
    return "cpu" if run.device.kind == "cpu" else re.sub(r"\W+", "-", run.device.name.lower()).strip("-")


def keep(result: LabResult, recordings: Path) -> Path:
    """Write ``recordings/<device>/<lab>`` anew and return it.

    LabError, and nothing written, if the run is red or a file of it names a path of this machine.
    """
    if result.status != "green":
        raise LabError(f"{result.lab} is red, its run is not kept: {result.reason}")
    folder = recordings / recorded_device(Run.read(result.folder / "run.json")) / result.lab
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(result.folder, fresh, ignore=shutil.ignore_patterns(*NOT_SHOWN))
        for log in fresh.glob("*.log"):
            log.write_text(_without_paths(log.read_text(encoding="utf-8")), encoding="utf-8")
        write_normalised(result.folder / "executed.ipynb", fresh / f"{result.lab}.ipynb")
        files = sorted(path for path in fresh.iterdir() if path.is_file())
        if telling := [path.name for path in files if PATH_OF_A_MACHINE.search(path.read_bytes())]:
            raise LabError(f"{', '.join(telling)} of {result.lab} names a path of this machine: the run is not kept")
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
        (fresh / SUMS).write_text("".join(sums))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _without_paths(log: str) -> str:
    """A traceback names files from the checkout, from site-packages or from the standard library on."""
    installed = sysconfig.get_paths()
    for folder, name in (
        (installed["purelib"], "site-packages"),
        (installed["platlib"], "site-packages"),
        (installed["stdlib"], "python"),
        (str(provenance.repository()), "."),
    ):
        log = log.replace(folder, name)
    return log
