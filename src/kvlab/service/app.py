"""The HTTP interface: routes, and how each refusal looks to a client."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from kvlab.cache import CachePolicy

from .completion import Completion, Front, error_response
from .dispatch import Dispatcher
from .protocol import ApiError


def create_app(front: Front) -> FastAPI:
    app = FastAPI(title="kvlab", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan(front))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await Completion(front, request).answer()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": front.model_name, "object": "model", "created": front.started_s, "owned_by": "kvlab"}
        return {"object": "list", "data": [model]}

    @app.get("/v1/cache/policy")
    async def policy() -> dict[str, Any]:
        return policy_in_force(front.dispatcher)

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "engine_pid": front.dispatcher.supervisor.engine.pid}

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = front.dispatcher.ready is not None and not front.dispatcher.draining
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        front.dispatcher.update_gauges()
        return Response(front.dispatcher.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def policy_in_force(dispatcher: Dispatcher) -> dict[str, Any]:
    """The cache policy; ``cache`` is what ``CachePolicy.to_config`` writes into a model's config."""
    settings = dispatcher.settings
    cache = None
    if settings.policy == "sliding":
        window = CachePolicy(max_total_tokens=settings.max_total_tokens, sinks=settings.sinks)
        cache = window.model_dump(mode="json")
    admission = dispatcher.admission
    return {
        "policy": settings.policy,
        "cache": cache,
        "max_total_tokens": None if settings.policy == "growing" else settings.max_total_tokens,
        "budget_bytes": settings.budget_bytes,
        "bytes_per_token": dispatcher.ready.bytes_per_token if dispatcher.ready else None,
        "capacity_tokens": admission.capacity_tokens if admission else None,
        "admission": dispatcher.admitting,
    }


def _lifespan(front: Front):
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        front.dispatcher.supervisor.start(front.dispatcher)
        yield
        await front.dispatcher.supervisor.stop()

    return lifespan


async def _http_error(_: Request, error: HTTPException) -> JSONResponse:
    known = {404: "there is nothing at this address", 405: "this address has no such method"}
    message = known.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _unexpected(_: Request, error: Exception) -> JSONResponse:
    return error_response(ApiError(500, "the service made a mistake; see its log", type="server_error"))
