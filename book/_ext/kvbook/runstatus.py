"""What ran, where and with what: one row for each lab and device, and the machines behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvbook.runs import LABS, all_claims, all_runs, any_on_gpu, is_older, written_commit
from kvbook.tables import Cell, definitions, link, paragraph, table
from kvlab.lab.claims import Claim, judge
from kvlab.lab.run import Device, Run

_HEADER = ["Lab", "Result", "Time", "Where, when and from what"]
_FACTS = {"kind": "device", "name": "model", "total_bytes": "memory"}


class LabStatus(SphinxDirective):
    """``{lab-status}``: lab by device, with result, seconds, date, commit and whether the source is older."""

    def run(self) -> list[nodes.Node]:
        runs = all_runs(self.env, self.get_location())
        claims = all_claims(self.env)
        rows = [self._row(lab, device, run, claims) for (lab, device), run in runs.items()]
        status = [table(_HEADER, rows, classes=["lab-status"])]
        if not any_on_gpu(runs):
            status.append(paragraph("Recorded on a GPU: not run yet, for every lab.", classes=["not-run"]))
        return status

    def _row(self, lab: str, device: str | None, run: Run | None, claims: list[Claim]) -> list[Cell]:
        where = f"recorded, {device}" if device else "this build"
        page = link(self.env, "doc", f"/{LABS}/{lab}", lab)
        if run is None:
            return [page, nodes.inline("", "not run yet", classes=["not-run"]), "", where]
        made = f"{where}: {run.device.kind}, {run.profile}, {run.started_at:%Y-%m-%d %H:%M} UTC, {written_commit(run)}"
        cell: list[nodes.Node] = [nodes.Text(made)]
        if is_older(run):
            cell += [nodes.Text(" "), nodes.inline("", "older source", classes=["older"])]
        seconds = "" if run.duration_s is None else f"{run.duration_s:.1f}\u00a0s"
        return [page, _result(run, claims), seconds, cell]


def _result(run: Run, claims: list[Claim]) -> str:
    """Whether the run supports the ledger as it now stands."""
    own = [claim for claim in claims if claim.lab == run.lab]
    wrong = [claim.id for claim in own if not judge(claim, run).as_expected]
    return f"red: {', '.join(wrong)}" if wrong else "green"


class MachineDetails(SphinxDirective):
    """``{machine-details}``: device and software of every run, each different set once."""

    def run(self) -> list[nodes.Node]:
        machines: dict[tuple, list[str]] = {}
        for (lab, recorded), run in all_runs(self.env, self.get_location()).items():
            if run is not None:
                facts = (*_device_facts(run.device), *sorted(run.software.items()))
                machines.setdefault((recorded, facts), []).append(lab)
        if not machines:
            return [paragraph("No lab has run yet.", classes=["not-run"])]
        return [node for (recorded, facts), labs in machines.items() for node in _machine(recorded, facts, labs)]


def _machine(recorded: str | None, facts: tuple[tuple[str, str], ...], labs: list[str]) -> list[nodes.Node]:
    title = f"Recorded on {recorded}" if recorded else "This build"
    heading = nodes.rubric("", f"{title}: labs {', '.join(lab.split('-')[0] for lab in labs)}")
    return [heading, definitions(list(facts), classes=["facts"])]


def _device_facts(device: Device) -> Iterator[tuple[str, str]]:
    """The device's facts, in the order the run holds them."""
    for name, value in device.model_dump().items():
        yield _FACTS.get(name, name), f"{value / 2**30:.1f}\u00a0GiB" if name.endswith("_bytes") else str(value)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("lab-status", LabStatus)
    app.add_directive("machine-details", MachineDetails)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
