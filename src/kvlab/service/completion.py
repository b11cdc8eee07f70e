"""One request to ``/v1/completions``: read, admitted, answered whole or as a stream, and counted."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from .dispatch import Dispatcher, Job
from .protocol import DONE, Answer, ApiError, CompletionRequest, event, parse_completion, usage
from .settings import FrontSettings
from .tenants import UNKNOWN, UnknownTenant
from .text import TextStream

log = logging.getLogger("kvlab.service")

LOST_CLIENT = Response(status_code=499)  # nobody reads it


@dataclass(frozen=True)
class Front:
    """What the routes share."""

    settings: FrontSettings
    dispatcher: Dispatcher
    tokenizer: PreTrainedTokenizerBase
    model_name: str
    vocabulary: int
    started_s: int
    tokenizing: Executor  # a long prompt takes its time, and the event loop has none

    def count(self, outcome: str, tenant: str) -> None:
        self.dispatcher.metrics.inference_requests_total.labels(outcome, tenant).inc()


class Completion:
    """One request to ``/v1/completions``, from its headers to its outcome, which is counted exactly once."""

    def __init__(self, front: Front, request: Request):
        self.front, self.request = front, request
        self.arrived_s = time.monotonic()
        self.tenant = UNKNOWN
        self.outcome = "cancelled"  # unless something else becomes of it
        self.job: Job | None = None

    async def answer(self) -> Response:
        streamed = False
        try:
            self.asked = await self._read()
            self.job = await self._job()
            self.front.dispatcher.submit(self.job)
            self.text = TextStream(self.front.tokenizer, self.asked.stops)
            self.reply = Answer(self.job.id, self.asked.model)
            first = await self._while_connected(self.job.events.get())
            if isinstance(first, ApiError):
                raise first
            streamed = self.asked.stream
            return _Stream(self, first) if streamed else await self._whole(first)
        except ApiError as error:
            self.outcome = error.outcome
            return error_response(error)
        except ClientDisconnect:
            return LOST_CLIENT
        except Exception:
            self.outcome = "internal_error"
            raise
        finally:
            if not streamed:
                self.close()

    def close(self) -> None:
        """Count the outcome, and let the engine drop what nobody waits for."""
        self.front.count(self.outcome, self.tenant)
        if self.job is not None:
            self.front.dispatcher.cancel(self.job)
            log.info(
                "request %d: tenant %s, %d prompt tokens, %s, %.3f s",
                self.job.id,
                self.tenant,
                len(self.job.prompt),
                self.outcome,
                time.monotonic() - self.arrived_s,
            )

    async def pieces(self, first: "int | str") -> AsyncIterator[tuple[str, str | None]]:
        """Pieces of text, each with the finish reason: None but for the last. Raises ApiError."""
        self.completion_tokens = 0
        item: int | str | ApiError = first
        while isinstance(item, int):
            self.completion_tokens += 1
            piece = self.text.push(item) if item not in self.job.stop_ids else ""
            if self.text.stopped:
                self.outcome = "completed"
                yield piece, "stop"
                return
            if piece:
                yield piece, None
            item = await self.job.events.get()
        if isinstance(item, ApiError):
            raise item
        self.outcome = "completed"
        rest = self.text.finish()
        yield rest, "stop" if self.text.stopped else item

    async def _read(self) -> CompletionRequest:
        headers, front = self.request.headers, self.front
        try:
            self.tenant = front.dispatcher.tenants.identify(headers.get("authorization"), headers.get("x-tenant"))
        except UnknownTenant as error:
            raise ApiError(401, str(error), code="invalid_api_key") from None
        asked = parse_completion(await read_body(self.request, front.settings))
        if asked.model != front.model_name:
            message = f"the model {asked.model[:100]!r} is not served here; see /v1/models"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked

    async def _job(self) -> Job:
        asked, front = self.asked, self.front
        prompt = await prompt_tokens(asked, front)
        longest = front.settings.max_request_tokens
        if len(prompt) + asked.max_tokens > longest:
            raise ApiError(
                400,
                f"{len(prompt)} prompt tokens and max_tokens={asked.max_tokens} are more than the {longest} tokens "
                "that one request may have",
                param="prompt" if len(prompt) > longest else "max_tokens",
                code="context_length_exceeded",
            )
        eos = front.tokenizer.eos_token_id
        return Job(
            id=front.dispatcher.new_id(),
            tenant=self.tenant,
            prompt=prompt,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            stop_ids=() if asked.ignore_eos or eos is None else (eos,),
            arrived_s=self.arrived_s,
        )

    async def _whole(self, first: "int | str") -> Response:
        async def collect() -> tuple[str, str]:
            pieces = [piece async for piece in self.pieces(first)]
            return "".join(text for text, _ in pieces), pieces[-1][1]

        text, reason = await self._while_connected(collect())
        counts = usage(len(self.job.prompt), self.completion_tokens)
        return JSONResponse(self.reply.body(text, reason, counts))

    async def _while_connected(self, work) -> Any:
        """The result of the work; raises ClientDisconnect as soon as the client is gone."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(self.request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for pending in (task, gone):
                pending.cancel()


class _Stream(StreamingResponse):
    """Server-sent events; the completion is closed when they end, however that is."""

    def __init__(self, completion: Completion, first: "int | str"):
        self.completion = completion
        super().__init__(self._events(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.completion.close()

    async def _events(self, first: "int | str") -> AsyncIterator[str]:
        completion = self.completion
        try:
            async for piece, reason in completion.pieces(first):
                yield event(completion.reply.body(piece, reason))
        except ApiError as error:
            completion.outcome = error.outcome
            yield event(error.body())
            return
        if completion.asked.wants_usage:
            yield event(completion.reply.usage_only(usage(len(completion.job.prompt), completion.completion_tokens)))
        yield DONE


async def read_body(request: Request, settings: FrontSettings) -> bytes:
    """The whole body; raises ApiError for one that is too large (413) or too slow (408)."""
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body_bytes:
                    raise ApiError(
                        413,
                        f"the body is larger than {settings.max_body_bytes} bytes",
                        code="body_too_large",
                        headers={"Connection": "close"},
                    )
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {settings.body_timeout_s:g} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from None
    return bytes(body)


async def prompt_tokens(asked: CompletionRequest, front: Front) -> list[int]:
    """The ids of the prompt; raises ApiError 400 for one that is empty or holds what no text holds."""
    if isinstance(asked.prompt, str):
        if "\0" in asked.prompt:
            raise ApiError(400, "the prompt holds a NUL character", param="prompt", code="nul_character")
        loop = asyncio.get_running_loop()
        prompt = (
            await loop.run_in_executor(front.tokenizing, front.tokenizer.encode, asked.prompt) if asked.prompt else []
        )
    else:
        prompt = asked.prompt
        if prompt and max(prompt) >= front.vocabulary:
            raise ApiError(
                400,
                f"token ids go up to {front.vocabulary - 1}, and the prompt holds {max(prompt)}",
                param="prompt",
                code="unknown_token",
            )
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt", code="empty_prompt")
    return prompt


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
