"""What every verb shares: the application, the ``--json`` option and a console that does not squeeze tables."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Reproduce, read and fix the out-of-memory of a KV cache that meets a long sequence.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(" ".join(f"{name} {metadata.version(name)}" for name in ("kvlab", "torch", "transformers")))
        raise typer.Exit


@app.callback()
def kvlab(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print versions and exit.")
    ] = False,
) -> None:
    pass  # its options have said everything


def wide_console() -> Console:
    """The terminal as wide as it is; a pipe or file as wide as the tables need."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=132)
