"""``kvlab bench``: side-by-side measurements."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvlab.cli.base import Json, app, wide_console
from kvlab.errors import KvlabError

bench_app = typer.Typer(help="Side-by-side measurements.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command("cache")
def bench_the_cache(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    as_json: Json = False,
) -> None:
    """What each cache costs per token, beside its peers.

    Medians, ratios, bytes, and how far each is from the floor.
    """
    from kvlab.bench.cache import bench_cache, render

    _show(bench_cache(_known(profile), device), render, as_json)


@bench_app.command("service")
def bench_the_service(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[str, typer.Option(help="quick or full (a soak of 20 minutes).")] = "quick",
    as_json: Json = False,
) -> None:
    """What the service loses, and what it costs.

    The incident and a window, the overhead over generate, a soak, and two kills.
    """
    from kvlab.bench.service import bench_service, render

    _show(bench_service(_known(profile), device), render, as_json)


@bench_app.command("allocator")
def bench_the_allocator(
    profile: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    as_json: Json = False,
) -> None:
    """How fast the model of the caching allocator is.

    Calls a second, and what it holds for a block in use.
    """
    from kvlab.bench.allocator import bench_allocator, render

    _show(bench_allocator(_known(profile)), render, as_json)


def _known(profile: str) -> str:
    from kvlab.lab.runner import PROFILES

    if profile not in PROFILES:
        raise KvlabError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    return profile


def _show(result: Any, render: Any, as_json: bool) -> None:
    if as_json:
        print(result.model_dump_json())
    else:
        wide_console().print(render(result))
