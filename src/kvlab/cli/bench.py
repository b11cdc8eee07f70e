"""``kvlab bench``: side-by-side measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlab.cli.base import Json, app, wide_console
from kvlab.errors import KvlabError

bench_app = typer.Typer(help="Side-by-side measurements, in one process.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command("cache")
def bench_the_cache(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    as_json: Json = False,
) -> None:
    """What each cache costs per token, beside its peers: medians, ratios, bytes, and how far each is from the floor."""
    from kvlab.bench import bench_cache, render
    from kvlab.lab.runner import PROFILES

    if profile not in PROFILES:
        raise KvlabError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    result = bench_cache(profile, device)
    if as_json:
        print(result.model_dump_json())
    else:
        wide_console().print(render(result))
