"""Clients of the service, made of OpenAI's own library: what each one asked, saw, and when."""

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Self

import httpx
import openai

from .launch import parse_metrics


@dataclass
class View:
    """One request as its client saw it; times are of the monotonic clock.

    ``outcome``: ``completed``, ``hung up``, the code of the error that came instead, or ``connection`` for a
    connection that broke.
    ``status``: of the answer, None if there was none. A stream that broke off began with 200.
    """

    name: str
    sent_s: float
    ended_s: float | None = None
    status: int | None = None
    outcome: str = ""
    message: str = ""
    pieces_s: list[float] = field(default_factory=list)  # when each piece of text came


def client_of(url: str, tenant: str | None = None, api_key: str = "unused") -> openai.AsyncOpenAI:
    """OpenAI's client for a service; it tries nothing twice, so that every refusal is seen."""
    headers = {"X-Tenant": tenant} if tenant else None
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=600, default_headers=headers
    )


async def ask(
    client: openai.AsyncOpenAI,
    name: str,
    begun: asyncio.Event | threading.Event | None = None,
    *,
    gone: asyncio.Event | threading.Event | None = None,
    ignore_eos: bool = True,
    **fields,
) -> View:
    """One streamed completion; ``begun`` is set at its first piece of text, or when there will be none.

    Once ``gone`` is set the client hangs up, with the next piece of text.
    """
    view = View(name, time.monotonic())
    try:
        stream = await client.completions.create(stream=True, extra_body={"ignore_eos": ignore_eos}, **fields)
        view.status = 200
        async with stream:
            async for _ in stream:
                view.pieces_s.append(time.monotonic())
                if begun:
                    begun.set()
                if gone and gone.is_set():
                    view.outcome = "hung up"
                    return view
        view.outcome = "completed"
    except openai.APIStatusError as error:
        view.status, view.outcome, view.message = error.status_code, error.code or "", error.message
    except openai.APIConnectionError as error:
        view.outcome, view.message = "connection", type(error.__cause__).__name__
    except openai.APIError as error:  # an error event within a stream
        view.outcome, view.message = error.code or "", error.message
    finally:
        view.ended_s = time.monotonic()
        if begun:
            begun.set()
    return view


@dataclass
class Watch:
    """Looks at the service's metrics from time to time, while the block it opens runs.

    ``samples``: (monotonic seconds, metrics), as far as the service answered.
    """

    url: str
    interval_s: float = 0.05
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.get("/metrics")
                    self.samples.append((time.monotonic(), parse_metrics(answer.text)))
                await asyncio.sleep(self.interval_s)


async def short_then_long(
    url: str,
    model: str,
    *,
    short: list[str],
    long: str,
    short_tokens: int,
    long_tokens: int = 5,
    tenants: list[str] | None = None,
) -> list[View]:
    """Short prompts, each from its own client, are all in flight when a long one comes; its view is the last."""
    clients = [client_of(url, tenant) for tenant in tenants or [None] * (len(short) + 1)]
    begun = [asyncio.Event() for _ in short]
    common = {"model": model, "temperature": 0}
    tasks = [
        asyncio.create_task(ask(client, f"short {number}", event, prompt=prompt, max_tokens=short_tokens, **common))
        for number, (client, event, prompt) in enumerate(zip(clients, begun, short, strict=False), start=1)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    tasks.append(asyncio.create_task(ask(clients[-1], "long", prompt=long, max_tokens=long_tokens, **common)))
    views = await asyncio.gather(*tasks)
    await asyncio.gather(*(client.close() for client in clients))
    return views
