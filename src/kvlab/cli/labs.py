"""``kvlab labs`` and ``kvlab claims``: run the labs, and the ledger they write."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from kvlab.cli.base import Json, app, wide_console
from kvlab.errors import KvlabError


@app.command()
def labs(
    lab: Annotated[list[str] | None, typer.Option(help="A lab by number or name; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    fresh: Annotated[bool, typer.Option("--fresh", help="Run even if nothing has changed.")] = False,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="A lab's NAME=VALUE; may be repeated.")] = None,
    stage: Annotated[Path | None, typer.Option(help="Folder the book renders the runs from.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Keep green runs under book/recordings.")] = False,
    as_json: Json = False,
) -> None:
    """Run the labs and judge them by their evidence.

    They go through papermill, one kernel at a time; the runs lie in _runs, DEVICE/PROFILE/LAB.
    """
    from kvlab.lab.runner import find_lab, lab_names, run_labs

    chosen = sorted({find_lab(name) for name in lab}) if lab else lab_names()
    console = Console(stderr=as_json)
    with console.status("starting") as status, _ended_in_order_by_sigterm():
        results = run_labs(
            chosen,
            device=device,
            profile=profile,
            parameters=_parameters(parameter or []),
            fresh=fresh,
            on_start=lambda name: status.update(f"running {name} ({profile})"),
            on_end=lambda result: console.print(_lab_line(result), highlight=False),
        )
    if as_json:
        print(json.dumps({"labs": [result.as_json() for result in results]}))
    red = [result for result in results if result.status == "red"]
    if stage is not None and not red:
        from kvlab.lab.stage import stage as stage_runs

        stage_runs(results, stage)
    if record:
        from kvlab.lab.provenance import repository
        from kvlab.lab.recording import keep

        for result in results:
            if result.status == "green":
                console.print(f"kept {keep(result, repository() / 'book' / 'recordings')}", highlight=False)
    if red:
        raise typer.Exit(1)


@contextmanager
def _ended_in_order_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: the kernel and what it started end with the run."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _parameters(given: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are read as YAML scalars, so ``tokens=4096`` is a number."""
    pairs = [entry.partition("=") for entry in given]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise KvlabError(f"-p takes NAME=VALUE, not {wrong[0]!r}")
    try:
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a date such as 2001-99-99
        raise KvlabError(f"-p takes values as in YAML: {' '.join(str(error).split())[:200]}") from None


def _lab_line(result: Any) -> str:
    mark = {"green": "[green]green[/green]", "red": "[red]red[/red]"}[result.status]
    how = "unchanged since its last run" if result.reused else f"{result.seconds:.1f} s"
    line = f"{mark} {result.lab} ({how}, {len(result.judgements)} claims)"
    return line if result.status == "green" else f"{line}\n    {result.reason}\n    see {result.folder}"


@app.command()
def claims(as_json: Json = False) -> None:
    """The ledger of the article's claims.

    Each with its lab and the verdict on record.
    """
    from kvlab.lab.claims import load_claims

    ledger = load_claims()
    if as_json:
        print(json.dumps({"claims": [claim.model_dump() for claim in ledger]}))
        return
    table = Table("claim", "lab", "statement", "verdict on record")
    for claim in ledger:
        table.add_row(claim.id, claim.lab, claim.statement, claim.expected)
    wide_console().print(table)
