"""``kvlab plan``, ``diagnose``, ``snapshot`` and ``replay``: where the bytes go, on anyone's incident."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kvlab.cli.base import Json, app, wide_console
from kvlab.errors import KvlabError
from kvlab.printable import printable


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
    """Will it fit: arithmetic against what a card has to give.

    The terms are weights, KV cache, logits and scores; each is named.
    """
    from kvlab.device import named_gpu, parse_bytes
    from kvlab.memory.footprint import plan as make_plan
    from kvlab.model import load_config

    if (gpu is None) == (gpu_memory is None):
        raise KvlabError("give either --gpu NAME or --gpu-memory SIZE")
    card = named_gpu(gpu) if gpu is not None else None
    usable_bytes = card.usable_bytes if card else parse_bytes(gpu_memory)
    said = card.describe() if card else f"{gpu_memory} as given, nothing subtracted"
    try:
        result = make_plan(load_config(model), batch, tokens, dtype, usable_bytes=usable_bytes, usable_note=said)
    except KvlabError:
        raise
    except Exception as error:  # a config may hold anything, and transformers trips over it anywhere
        raise KvlabError(f"no plan for {model!r:.80}: {type(error).__name__}: {str(error)[:200]}") from None
    if as_json:
        print(result.model_dump_json())
    else:
        wide_console().print(result.render())


@app.command()
def diagnose(
    file: Annotated[str, typer.Argument(help="A log or message; - reads standard input.")],
    as_json: Json = False,
) -> None:
    """Read the memory failures in a log of any engine.

    Which they are, how many bytes, why, and what to do next.
    """
    from kvlab.memory import oom

    try:
        if file == "-":
            if sys.stdin is None:
                raise KvlabError("standard input is closed: give a file, or pipe the log in")
            sys.stdin.reconfigure(errors="replace")
        found = oom.diagnose_stream(sys.stdin) if file == "-" else oom.diagnose_file(file)
    except OSError as error:
        raise KvlabError(f"cannot read {file}: {error.strerror}") from None
    if as_json:
        print(found.model_dump_json())
    else:
        wide_console().print(oom.render(found))


@app.command()
def snapshot(
    file: Annotated[Path, typer.Argument(help="A snapshot of PyTorch's allocator: pickle or JSON, gzip too.")],
    figure: Annotated[Path | None, typer.Option(help="Draw the address map into this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a memory snapshot, of anyone's making.

    What is in use and by whom, what is free and in how large pieces.
    """
    from kvlab.memory.snapshot import read_snapshot, summarise

    read = read_snapshot(file)
    summary = summarise(read)
    sentence = _draw_address_map(read, figure) if figure else ""
    if as_json:
        print(summary.model_dump_json())
        return
    console = Console(markup=False, highlight=False)
    console.print(_summary_table(summary))
    console.print(_owners_table(read))
    if sentence:
        console.print(f"{figure}: {sentence}")


def _draw_address_map(read: Any, path: Path) -> str:
    """Write the address map as SVG, its sentence as its title; returns the sentence."""
    from kvlab.memory.snapshot import address_map

    if path.suffix.lower() != ".svg":
        raise KvlabError(f"--figure writes SVG: name the file {path.stem}.svg, not {path.name}")
    drawing, sentence = address_map(read)
    try:
        drawing.savefig(path, format="svg", metadata={"Title": sentence, "Date": None})
    except OSError as error:
        raise KvlabError(f"cannot write {path}: {error.strerror}") from None
    return sentence


def _summary_table(summary: Any) -> Table:
    table = Table("memory", Column("bytes", justify="right"), Column("MiB", justify="right"), "what it is")
    for name, meaning in (
        ("reserved", f"{summary.segment_count:,} segments"),
        ("allocated", "held by tensors"),
        ("active", "plus freed, still used"),
        ("free", f"{summary.free_block_count:,} blocks"),
        ("releasable", "in wholly idle segments"),
        ("largest_free_block", ""),
    ):
        size = getattr(summary, f"{name}_bytes")
        table.add_row(name.replace("_", " "), f"{size:,}", f"{size / 2**20:,.1f}", meaning)
    table.add_row("fragmentation", "", f"{summary.fragmentation:.2f}", "1 - largest free / free")
    return table


def _owners_table(read: Any, most: int = 10) -> Table:
    """Who holds the memory: blocks in use by the innermost call outside PyTorch's own code, largest sum first."""
    sizes, counts = Counter(), Counter()
    for block in (block for segment in read.segments for block in segment.blocks if block.state != "inactive"):
        calls = block.frames or ("(no stack recorded)",)
        owner = next((call for call in calls if "/torch/" not in call), calls[0])
        sizes[owner] += block.size
        counts[owner] += 1
    table = Table("in use, asked for by", Column("blocks", justify="right"), Column("bytes", justify="right"))
    for owner, size in sizes.most_common(most):
        table.add_row(printable(owner), f"{counts[owner]:,}", f"{size:,}")
    return table


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A snapshot with a recorded history.")],
    gpu_memory: Annotated[
        str | None, typer.Option(help="Also run it on a card where PyTorch may reserve this much, e.g. 24GiB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a recorded run on the model of the allocator.

    Does it agree, and would another card have held the run?
    """
    from kvlab.device import parse_bytes
    from kvlab.memory.replay import replay as replay_snapshot

    size_bytes = None if gpu_memory is None else parse_bytes(gpu_memory)
    result = replay_snapshot(file, size_bytes)
    if as_json:
        print(json.dumps(result.model_dump(exclude={"oom"} if size_bytes is None else None)))
        return
    console = Console(markup=False, highlight=False)
    console.print(_replay_table(result))
    console.print(
        {True: "exact", False: "not exact: ", None: "nothing to judge: "}[result.exact] + (result.reason or "")
    )
    if size_bytes is not None:
        console.print(f"on a card of {gpu_memory}: {_fate(result)}")


def _replay_table(result: Any) -> Table:
    table = Table("compared", Column("the model", justify="right"), Column("the recording", justify="right"))
    for what, modelled, recorded in (
        ("addresses", result.alloc_addresses_matched, result.alloc_events),
        ("cudaMalloc calls", result.segment_allocs_matched, result.segment_allocs),
        ("allocated at the end, bytes", result.final_allocated_bytes, result.recorded_allocated_bytes),
        ("reserved at the end, bytes", result.final_reserved_bytes, result.recorded_reserved_bytes),
    ):
        table.add_row(what, f"{modelled:,}", f"{recorded:,}")
    return table


def _fate(result: Any) -> str:
    if result.oom is None:
        return "all that was recorded fits"
    return f"out of memory at event {result.oom.event:,}: {result.oom.message}"
