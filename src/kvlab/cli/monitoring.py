"""``kvlab monitoring``: the service's Prometheus rules and Grafana dashboard, written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.base import Json, app


@app.command()
def monitoring(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; made if absent.")],
    target: Annotated[str, typer.Option(help="HOST:PORT of the service.")] = "127.0.0.1:8000",
    runbook: Annotated[str, typer.Option(help="Address of the book's runbook page.")] = "runbook.html",
    speed_up: Annotated[int, typer.Option(help="Divide every window and interval by this, to rehearse.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there with other content.")] = False,
    as_json: Json = False,
) -> None:
    """Write what watches `kvlab serve` into a folder.

    Prometheus' configuration, recording rules and alerts, and a Grafana dashboard.
    """
    from kvlab.service.monitoring import write_monitoring

    paths = write_monitoring(folder, overwrite=force, target=target, runbook=runbook, speed_up=speed_up)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": [path.name for path in paths]}))
        return
    for path in paths:
        print(path)
    print(f"\nprometheus --config.file={folder}/prometheus.yml --storage.tsdb.path={folder}/data")
    print("Its page, on port 9090, shows the alerts. Import dashboard.json into Grafana.")
