"""The command line: ``kvlab VERB``. Thin: it reads arguments, calls the package and prints; the work is elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import yaml
from rich.console import Console
from rich.table import Table

from kvlab.errors import KvlabError

app = typer.Typer(
    help="Reproduce, read and fix the out-of-memory of a KV cache that meets a long sequence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
model_app = typer.Typer(help="The model the labs run on.", no_args_is_help=True)
app.add_typer(model_app, name="model")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def main() -> None:
    """Run the command line: exit 0 on success, 1 when a lab or a claim is red, 2 on bad input, in one line."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.ClickException, KvlabError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"kvlab: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("kvlab: stopped", file=sys.stderr)
        sys.exit(130)


@model_app.command("fetch")
def fetch(
    model: Annotated[str, typer.Argument(help="Name of a bundled model.")] = "smollm2-135m",
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert again.")] = False,
) -> None:
    """Download a model once, check its SHA-256 and convert it; print its folder."""
    from kvlab.model import fetch_model

    print(fetch_model(model, force=force))


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A shape (llama-2-7b), hub id, folder or config.json.")],
    batch: Annotated[int, typer.Option(help="Sequences at once.")],
    tokens: Annotated[int, typer.Option(help="Tokens per sequence, prompt and generated.")],
    gpu: Annotated[str | None, typer.Option(help="A named card, e.g. rtx3090-24g.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Usable bytes, e.g. 24GiB; nothing is subtracted.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache.")] = "float16",
    as_json: Json = False,
) -> None:
    """Will it fit: weights, KV cache and logits by arithmetic, against what a card has to give."""
    from kvlab.device import find_gpu, parse_bytes
    from kvlab.memory.footprint import plan as make_plan
    from kvlab.model import load_config

    if (gpu is None) == (gpu_memory is None):
        raise KvlabError("give either --gpu NAME or --gpu-memory SIZE")
    card = find_gpu(gpu) if gpu else None
    usable_bytes = card.usable_bytes if card else parse_bytes(gpu_memory)
    said = card.describe() if card else f"{gpu_memory} as given, nothing subtracted"
    result = make_plan(load_config(model), batch, tokens, dtype, usable_bytes=usable_bytes, usable_note=said)
    if as_json:
        print(result.model_dump_json())
    else:
        Console().print(result.render())


@app.command()
def diagnose(
    file: Annotated[str, typer.Argument(help="A log or message; - reads standard input.")],
    as_json: Json = False,
) -> None:
    """Read the memory failures in a log of any engine: which, how many bytes, why, and what to do next."""
    from kvlab.memory import oom

    found = oom.diagnose(_read_text(file))
    if as_json:
        print(found.model_dump_json())
    else:
        Console().print(oom.render(found))


def _read_text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise KvlabError(f"cannot read {file}: {error.strerror}") from None
    return data.decode("utf-8", errors="replace")


@app.command()
def labs(
    lab: Annotated[list[str] | None, typer.Option(help="A lab by number or name; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    fresh: Annotated[bool, typer.Option("--fresh", help="Run even if nothing has changed.")] = False,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="A parameter of the lab: NAME=VALUE.")] = None,
    stage: Annotated[Path | None, typer.Option(help="Folder the book renders the runs from.")] = None,
    as_json: Json = False,
) -> None:
    """Run the labs through papermill, one kernel at a time, and judge them by their evidence."""
    from kvlab.lab.runner import find_lab, lab_names, run_labs

    chosen = sorted({find_lab(name) for name in lab}) if lab else lab_names()
    console = Console(stderr=as_json)
    with console.status("starting") as status:
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
    if red:
        raise typer.Exit(1)


def _parameters(given: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are read as YAML scalars, so ``tokens=4096`` is a number."""
    pairs = [entry.partition("=") for entry in given]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise KvlabError(f"-p takes NAME=VALUE, not {wrong[0]!r}")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def _lab_line(result: Any) -> str:
    mark = {"green": "[green]green[/green]", "red": "[red]red[/red]"}[result.status]
    how = "unchanged since its last run" if result.reused else f"{result.seconds:.1f} s"
    line = f"{mark} {result.lab} ({how}, {len(result.judgements)} claims)"
    return line if result.status == "green" else f"{line}\n    {result.reason}\n    see {result.folder}"


@app.command()
def claims(as_json: Json = False) -> None:
    """The ledger: every claim of the article, its lab and the verdict on record."""
    from kvlab.lab.claims import load_claims

    ledger = load_claims()
    if as_json:
        print(json.dumps({"claims": [claim.model_dump() for claim in ledger]}))
        return
    table = Table("claim", "lab", "statement", "verdict on record")
    for claim in ledger:
        table.add_row(claim.id, claim.lab, claim.statement, claim.expected)
    Console().print(table)


if __name__ == "__main__":
    main()
