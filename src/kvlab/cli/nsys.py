"""``kvlab nsys`` and ``kvlab nsys-run``: what Nsight Systems recorded, of anyone's run or of one started here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvlab.cli.base import Json, app, wide_console
from kvlab.errors import KvlabError
from kvlab.printable import printable

MOST_ROWS = 15
LONGEST_NAME = 72

RESULTS = {
    1: "invalid value",
    2: "out of memory",
    3: "not initialised",
    100: "no device",
    600: "not ready: an answer, no failure",
    700: "illegal address",
    704: "peer access was on already",
    710: "device-side assert",
    719: "launch failure",
}
"""What the numbers mean that a program with a KV cache is likely to meet; the same for cudaError_t and CUresult."""


@app.command()
def nsys(
    file: Annotated[Path, typer.Argument(help="What nsys export --type sqlite wrote, of any version.")],
    figure: Annotated[Path | None, typer.Option(help="Draw the timeline into this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Read an export of Nsight Systems.

    Kernels, CUDA calls and which failed, NVTX ranges, peak of memory.
    """
    from kvlab.profiling.nsys import summarise_export

    summary = summarise_export(file)
    sentence = _draw(file, figure) if figure else ""
    if as_json:
        print(json.dumps(summary.model_dump()))
        return
    console = wide_console()
    for table in _tables(summary):
        console.print(table)
    for line in _lines(summary):
        console.print(Text(line))
    if sentence:
        console.print(Text(f"{figure}: {sentence}"))


@app.command("nsys-run", context_settings={"allow_interspersed_args": False})
def nsys_run(
    program: Annotated[list[str], typer.Argument(help="-- and the program with its arguments.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Name of the report, without its ending.")] = Path(
        "profile"
    ),
    nsys: Annotated[Path | None, typer.Option(help="Path of nsys, if it is not on PATH.")] = None,
    as_json: Json = False,
) -> None:
    """Run a program under Nsight Systems; export the report.

    Ends with the program's own exit status.
    """
    from kvlab.profiling.nsys import Nsys, run_profiled

    found = Nsys.find(nsys)
    profile = run_profiled(found, program, output, stdout=sys.stderr.fileno() if as_json else None)
    said = {"report": str(profile.report), "export": str(profile.export), "exit_status": profile.exit_status}
    if as_json:
        print(json.dumps({**said, "nsys_version": ".".join(map(str, found.version))}))
    else:
        Console(markup=False, highlight=False).print(
            f"the program ended with {profile.exit_status}\nread it: kvlab nsys {profile.export}", soft_wrap=True
        )
    raise typer.Exit(profile.exit_status)


def _draw(file: Path, path: Path) -> str:
    """Write the timeline as SVG, its sentence as its title; returns the sentence."""
    from kvlab.profiling.figures import draw_timeline
    from kvlab.profiling.timeline import timeline_of_export

    if path.suffix.lower() != ".svg":
        raise KvlabError(f"--figure writes SVG: name the file {path.stem}.svg, not {path.name}")
    drawing, sentence = draw_timeline(timeline_of_export(file), source="recorded by Nsight Systems")
    try:
        drawing.savefig(path, format="svg", metadata={"Title": sentence, "Date": None})
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {error.strerror}") from None
    return sentence


def _tables(summary: Any) -> list[Table]:
    tables = []
    for title, operations, extra in (
        ("kernel", summary.kernels, None),
        ("CUDA call", summary.api, "errors"),
        ("NVTX range", summary.nvtx, "open"),
    ):
        if operations:
            tables.append(_operations(title, operations, extra))
    if summary.failed_calls:
        tables.append(_failed(summary.failed_calls))
    return tables


def _operations(title: str, operations: list[Any], extra: str | None) -> Table:
    numbers = [Column(name, justify="right") for name in ("count", "total ms", *([extra] if extra else []))]
    table = Table(title, *numbers)
    for one in operations[:MOST_ROWS]:
        domain = getattr(one, "domain", None)
        cells = [f"{one.count:,}", f"{one.total_ns / 1e6:,.3f}"]
        if extra:
            value = getattr(one, extra)
            cells.append("" if value is None else f"{value:,}")
        table.add_row(_name(f"{domain}: {one.name}" if domain else one.name), *cells)
    return _with_rest(table, operations)


def _failed(calls: list[Any]) -> Table:
    table = Table("call that failed", Column("returned", justify="right"), "meaning", Column("at ms", justify="right"))
    for call in calls[:MOST_ROWS]:
        meaning = RESULTS.get(call.return_value, "")
        table.add_row(_name(call.name), str(call.return_value), meaning, f"{call.start_ns / 1e6:,.3f}")
    return _with_rest(table, calls)


def _with_rest(table: Table, rows: list[Any]) -> Table:
    if len(rows) > MOST_ROWS:
        table.add_row(f"and {len(rows) - MOST_ROWS:,} more (--json lists all)")
    return table


def _lines(summary: Any) -> list[str]:
    peak = summary.memory_peak_bytes
    recorder = f"nsys {summary.product_version or '(version unknown)'}, schema {summary.schema_version or 'unknown'}"
    return [
        printable(f"GPUs: {', '.join(summary.gpus) or 'none recorded'}; written by {recorder}"),
        "memory peak: " + ("not recorded" if peak is None else f"{peak:,} bytes ({peak / 2**30:.2f} GiB)"),
        *(printable(f"note: {note}") for note in summary.notes),
    ]


def _name(text: str) -> Text:
    """A name from a file, in one line: its beginning and its end where it is long, as templates are."""
    text = printable(text)
    if len(text) > LONGEST_NAME:
        text = f"{text[: LONGEST_NAME - 21]}…{text[-20:]}"
    return Text(text)
