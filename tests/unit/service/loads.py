"""What clients do to a service, with httpx and without waiting for one another."""

import asyncio
import json
from dataclasses import dataclass

import httpx


@dataclass
class Seen:
    """What one client saw: a status (None if the connection broke), tokens, and the error's code."""

    status: int | None = None
    chunks: int = 0
    code: str | None = None
    done: bool = False


async def stream(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, begun=None, **fields) -> Seen:
    """One streamed completion; ``begun`` is set at the first token, or when there will be none."""
    seen = Seen()
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **fields}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            seen.status = response.status_code
            if response.status_code != 200:
                seen.code = json.loads(await response.aread())["error"]["code"]
                return seen
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen.code = event["error"]["code"]
                        return seen
                    seen.chunks += 1
                    if begun:
                        begun.set()
    except httpx.TransportError as error:
        seen.code = type(error).__name__
    finally:
        if begun:
            begun.set()
    return seen


async def short_then_long(url: str, model: str, *, short: int = 4, max_tokens: int = 300, long_prompt: int = 1_500):
    """Short prompts that are all in flight when a long one comes; the long one's view is the last."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        begun = [asyncio.Event() for _ in range(short)]
        tasks = [asyncio.create_task(stream(client, model, "short", max_tokens, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        tasks.append(asyncio.create_task(stream(client, model, "x" * long_prompt, 5)))
        return await asyncio.gather(*tasks)
