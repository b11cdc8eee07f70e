"""``kvlab serve``: the lab's inference service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.cli.base import app
from kvlab.errors import KvlabError


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="smollm2-135m, a hub id or a folder.")] = "smollm2-135m",
    policy: Annotated[str, typer.Option(help="Cache of a request: static, growing or sliding.")] = "sliding",
    max_total_tokens: Annotated[
        int, typer.Option(help="Rows of a static buffer; sinks plus window of sliding.")
    ] = 1024,
    sinks: Annotated[int, typer.Option(help="First tokens that sliding never evicts.")] = 4,
    budget: Annotated[str, typer.Option(help="Bytes above the loaded model, e.g. 256MiB.")] = "256MiB",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens in one step.")] = 64,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one, printed on stdout.")] = 8000,
    tenants: Annotated[Path | None, typer.Option(help="YAML file of tenants with keys and quotas.")] = None,
    queue_places: Annotated[int, typer.Option(help="Requests that may wait, without a tenants file.")] = 64,
    max_request_tokens: Annotated[int, typer.Option(help="Prompt plus max_tokens of one request.")] = 32_768,
    max_connections: Annotated[int, typer.Option(help="Open connections.")] = 1_000,
    header_timeout_s: Annotated[float, typer.Option(help="Seconds for a request's headers.")] = 10.0,
    body_timeout_s: Annotated[float, typer.Option(help="Seconds for a request's body.")] = 10.0,
    send_timeout_s: Annotated[
        float, typer.Option(help="Seconds in which a client must read what waits for it.")
    ] = 60.0,
    grace_s: Annotated[float, typer.Option(help="Seconds to finish after SIGTERM.")] = 30.0,
    engine_timeout_s: Annotated[
        float, typer.Option(help="Seconds without a word after which the engine hangs, and is replaced.")
    ] = 120.0,
    admission: Annotated[
        bool, typer.Option("--admission/--no-admission", help="Reserve before a start; without, start everything.")
    ] = True,
    on_oom: Annotated[
        str, typer.Option(help="A refused allocation: free (end one request), keep (and leak), exit (lose all).")
    ] = "free",
) -> None:
    """Serve completions over HTTP, under a byte budget.

    The model is in a child process, which the budget holds. SIGTERM ends the service in order.
    """
    from kvlab.device import parse_bytes
    from kvlab.service.process import EngineProcess
    from kvlab.service.settings import EngineSettings, FrontSettings

    engine_settings = _checked(
        EngineSettings,
        model=model,
        device=str(_resolved(device)),
        dtype=dtype,
        policy=policy,
        max_total_tokens=max_total_tokens,
        sinks=sinks,
        budget_bytes=parse_bytes(budget),
        prefill_chunk=prefill_chunk,
        on_oom=on_oom,
    )
    front_settings = _checked(
        FrontSettings,
        host=host,
        port=port,
        tenants=tenants,
        admission=admission,
        queue_places=queue_places,
        max_request_tokens=max_request_tokens,
        max_connections=max_connections,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        send_timeout_s=send_timeout_s,
        grace_s=grace_s,
        engine_timeout_s=engine_timeout_s,
    )
    engine = EngineProcess(engine_settings)  # it loads while the front imports what it needs
    from kvlab.service.server import serve as run

    run(engine_settings, front_settings, engine)


def _resolved(device: str) -> Any:
    from kvlab.device import resolve_device

    return resolve_device(device)


def _checked(kind: Any, **fields: Any) -> Any:
    """The settings; what is wrong with them in one line."""
    from pydantic import ValidationError

    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-") if first["loc"] else "options"
        raise KvlabError(f"--{option}: {first['msg']}") from None
