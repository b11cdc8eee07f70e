"""What a lab leaves behind: every number it recorded, the figures it drew and the verdicts, in one ``run.json``.

A notebook calls :func:`open_lab` once, :func:`record` for each number, and :func:`close_lab` at its end. A run
without ``finished_at`` never closed, whatever the notebook's own metadata says.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvlab.lab import provenance
from kvlab.lab.claims import Judgement, UnexpectedVerdict, judge, load_claims
from kvlab.lab.run import Kind, LabError, Metric, Run, Source, Value, Verdict
from kvlab.lab.show import show_markdown, written_value

RUN_DIR_VARIABLE = "KVLAB_RUN_DIR"


class _OpenLab:
    """The lab that is running in this kernel."""

    def __init__(self, run: Run, folder: Path):
        self.run = run
        self.folder = folder
        self.began_s = time.perf_counter()


_open: _OpenLab | None = None


def open_lab(lab: str, *, profile: str, device: torch.device, **parameters: Any) -> None:
    """Begin the run of ``lab``: note the device, the versions and the source it is made from.

    ``device`` is the resolved ``torch.device``; ``parameters`` are the other values of the parameters cell. The
    folder for ``run.json`` and figures
    is taken from ``KVLAB_RUN_DIR``; by hand (JupyterLab) it is ``_runs/by-hand/<lab>``.
    """
    global _open
    folder = Path(os.environ.get(RUN_DIR_VARIABLE) or provenance.repository() / "_runs" / "by-hand" / lab)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").unlink(missing_ok=True)
    run = Run(
        lab=lab,
        profile=profile,
        parameters={"device": str(device), "profile": profile} | parameters,
        started_at=datetime.now(UTC),
        device=provenance.device_facts(device),
        software=provenance.software(),
        source=Source(**provenance.source(lab), environment_sha256=provenance.environment_sha256(device)),
    )
    _open = _OpenLab(run, folder)
    where = f"{run.device.name} ({run.device.kind})"
    show_markdown(f"**{lab}** · profile `{profile}` · {where}")


def current() -> _OpenLab:
    if _open is None:
        raise LabError("no lab is open: call open_lab(...) in the cell after the parameters")
    return _open


def record(name: str, value: Value, unit: str, kind: Kind, *, against: str | None = None) -> Value:
    """Keep ``value`` in ``run.json`` under ``name``, show it as a row, and return it.

    Bytes are given in bytes (unit ``"bytes"``) and shown in KiB, MiB or GiB beside the exact number. ``against``
    names an earlier prediction; the row then shows the difference. A name is recorded once.
    """
    run = current().run
    if name in run.metrics:
        raise LabError(f"{name} was already recorded as {run.metrics[name].value}: evidence is not overwritten")
    if against is not None and against not in run.metrics:
        raise LabError(f"{name} is held against {against}, which was not recorded before it")
    metric = Metric(value=_plain(value), unit=unit, kind=kind, against=against)
    run.metrics[name] = metric
    show_markdown(_row(name, metric, run))
    return value


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as Python's own number; everything else unchanged."""
    return value.item() if hasattr(value, "item") else value


def _row(name: str, metric: Metric, run: Run) -> str:
    row = f"`{name}` &nbsp; **{written_value(metric.value, metric.unit)}** &nbsp; *{metric.kind}*"
    if metric.against is None:
        return row
    predicted = run.metrics[metric.against].value
    row += f", predicted {written_value(predicted, metric.unit)}"
    if isinstance(metric.value, bool) or not isinstance(metric.value, int | float) or predicted is None:
        return row
    difference = metric.value - predicted
    sign = "−" if difference < 0 else "+"
    return row + f", difference {sign}{written_value(abs(difference), metric.unit)}" if difference else row + ", equal"


def close_lab() -> list[Verdict]:
    """Judge the lab's claims by what was recorded, write ``run.json`` and show the verdicts.

    A verdict that is not the one on record in ``book/claims.yml`` raises: the lab is red, and its run stays
    unfinished.
    """
    lab = current()
    judgements = [judge(claim, lab.run) for claim in load_claims() if claim.lab == lab.run.lab]
    lab.run.verdicts = [Verdict(claim=j.claim.id, verdict=j.verdict, because=j.because) for j in judgements]
    lab.run.duration_s = round(time.perf_counter() - lab.began_s, 3)
    wrong = [j for j in judgements if not j.as_expected]
    if not wrong:
        lab.run.finished_at = datetime.now(UTC)
    lab.run.write(lab.folder / "run.json")
    show_markdown("\n".join(["| claim | verdict | because |", "|---|---|---|", *map(_verdict_row, judgements)]))
    if wrong:
        raise UnexpectedVerdict(wrong)
    return lab.run.verdicts


def _verdict_row(judgement: Judgement) -> str:
    return f"| {judgement.claim.statement} (`{judgement.claim.id}`) | **{judgement.verdict}** | {judgement.because} |"
