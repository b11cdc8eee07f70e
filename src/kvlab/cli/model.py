"""``kvlab model``: the model the labs run on."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.cli.base import app

model_app = typer.Typer(help="The model the labs run on.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@model_app.command("fetch")
def fetch(
    model: Annotated[str, typer.Argument(help="Name of a bundled model.")] = "smollm2-135m",
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert again.")] = False,
) -> None:
    """Download a model, once, and print its folder.

    Its SHA-256 is checked, and its weights are converted.
    """
    from kvlab.model import fetch_model

    print(fetch_model(model, force=force))
