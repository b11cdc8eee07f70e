"""Mixed load on one service for a while: lengths, tenants, disconnects and bad input, every request accounted for."""

import asyncio
import itertools
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import BaseModel

from kvlab.bench.checks import Check
from kvlab.service.launch import ServiceProcess
from kvlab.service.load import ask, client_of

CLIENTS = 8
WARM_REQUESTS = 20
SETTLE_S = 60.0
LATE_THREADS = 1  # the front tokenizes in two threads, and makes the second when a prompt first finds the other busy
MIB = 2**20
BAD_BODIES = [
    b"",
    b"{",
    b"[1, 2]",
    b'{"model": "MODEL"}',
    b'{"model": "MODEL", "prompt": ""}',
    b'{"model": "MODEL", "prompt": "a\\u0000b"}',
    b'{"model": "MODEL", "prompt": "a", "max_tokens": "many"}',
    b'{"model": "MODEL", "prompt": "a", "max_tokens": -1}',
    b'{"model": "nobody", "prompt": "a"}',
    b'{"model": "MODEL", "prompt": [99999999]}',
    b"x" * (MIB + 1),
]


class Sample(BaseModel):
    """One look at both processes, from outside."""

    seconds: float
    held_bytes: int
    front_rss_bytes: int
    engine_rss_bytes: int
    threads: int
    descriptors: int


class Soak(BaseModel):
    """What was sent, what clients saw, what the service counted, and what it held meanwhile."""

    seconds: float
    sent: int
    seen: dict[str, int]
    counted: dict[str, int]
    samples: list[Sample]
    idle: list[Sample]  # before and after the load, with no client connected


@dataclass
class _Load:
    """The clients' shared state; ``seen`` counts outcomes as the clients saw them."""

    service: ServiceProcess
    model: str
    until_s: float
    random: random.Random
    seen: Counter = field(default_factory=Counter)

    async def client(self) -> None:
        openai_client = client_of(self.service.url)
        async with httpx.AsyncClient(base_url=self.service.url, timeout=120) as plain:
            while time.monotonic() < self.until_s:
                draw = self.random.random()
                if draw < 0.10:
                    await self._bad(plain)
                elif draw < 0.20:
                    await self._leave()
                else:
                    await self._complete(openai_client)
        await openai_client.close()

    async def _complete(self, client) -> None:
        view = await ask(
            client,
            "soak",
            ignore_eos=False,
            model=self.model,
            prompt="x" * self._length(600),
            max_tokens=self._length(60),
            temperature=self.random.choice([0, 1]),
        )
        self.seen[view.outcome] += 1

    async def _bad(self, client: httpx.AsyncClient) -> None:
        body = self.random.choice(BAD_BODIES).replace(b"MODEL", self.model.encode())
        try:
            answer = await client.post("/v1/completions", content=body)
            self.seen["invalid" if 400 <= answer.status_code < 429 else f"status {answer.status_code}"] += 1
        except httpx.TransportError:  # the refusal of a large body can overtake the body
            self.seen["invalid"] += 1

    async def _leave(self) -> None:
        """Ask, and be gone at some moment: before the first token, within the text, or after its end."""
        host, port = self.service.url.removeprefix("http://").split(":")
        fields = {"model": self.model, "prompt": "x" * self._length(600), "max_tokens": 60, "ignore_eos": True}
        body = json.dumps(fields | {"stream": self.random.random() < 0.5}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        with_deadline = asyncio.wait_for(reader.read(-1), self.random.uniform(0.02, 0.5))
        await asyncio.gather(with_deadline, return_exceptions=True)
        writer.transport.abort()
        self.seen["left"] += 1

    def _length(self, longest: int) -> int:
        """Mostly short, sometimes long."""
        return 1 + int(longest * self.random.random() ** 3)


def soak(service: ServiceProcess, model: str, seconds: float, interval_s: float) -> Soak:
    """Load a service that has served nothing yet, for so many seconds."""
    _idle(service)
    earlier = counted_outcomes(service)
    warm = _warm_up(service, model, min(5.0, seconds / 5))
    before = counted_outcomes(service, earlier.total() + warm.total())
    start = _idle(service)
    load, samples = _run_load(service, model, seconds, interval_s)
    counted = counted_outcomes(service, before.total() + load.seen.total())
    end = _idle(service, start)
    return Soak(
        seconds=seconds,
        sent=load.seen.total(),
        seen=dict(load.seen),
        counted={outcome: counted[outcome] - before[outcome] for outcome in counted},
        samples=samples,
        idle=[start, end],
    )


def _warm_up(service: ServiceProcess, model: str, seconds: float) -> Counter:
    """What is made once is made now; on a busy machine that can take longer. Returns what the clients saw."""
    seen, deadline_s = Counter(), time.monotonic() + SETTLE_S
    while seen["completed"] < WARM_REQUESTS and time.monotonic() < deadline_s:
        seen += _run_load(service, model, seconds, interval_s=1.0)[0].seen
    return seen


def _run_load(service: ServiceProcess, model: str, seconds: float, interval_s: float) -> tuple[_Load, list[Sample]]:
    load = _Load(service, model, time.monotonic() + seconds, random.Random(0))
    engine, samples = service.engine_pid, []

    async def watch() -> None:
        began_s = time.monotonic()
        for number in itertools.count(1):
            await asyncio.sleep(began_s + number * interval_s - time.monotonic())
            samples.append(await asyncio.to_thread(sample, service, engine, time.monotonic() - began_s))

    async def run() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(load.client() for _ in range(CLIENTS)))
        watching.cancel()

    asyncio.run(run())
    return load, samples


def sample(service: ServiceProcess, engine: int, seconds: float = 0.0) -> Sample:
    front = service.pid
    return Sample(
        seconds=seconds,
        front_rss_bytes=_rss_bytes(front),
        engine_rss_bytes=_rss_bytes(engine),
        threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in (front, engine)),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (front, engine)),
        held_bytes=int(service.metrics()["gpu_memory_used_bytes"]),
    )


def _idle(service: ServiceProcess, before: Sample | None = None) -> Sample:
    """Both processes with nothing to do. What is more than before may be on its way out, and is given time to go."""
    engine, deadline_s = service.engine_pid, time.monotonic() + SETTLE_S
    while True:
        metrics = service.metrics()
        time.sleep(0.5)  # for the last connections to be taken down, this one too
        now = sample(service, engine)
        busy = metrics["inference_requests_in_flight"] or metrics["inference_queue_length"]
        more = before and (now.descriptors > before.descriptors or now.threads > before.threads + LATE_THREADS)
        if not (busy or more) or time.monotonic() > deadline_s:
            return now


def _rss_bytes(pid: int) -> int:
    return 1024 * int(re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def counted_outcomes(service: ServiceProcess, expected: int = 0) -> Counter:
    """The outcomes so far, once they are as many as expected: a request is over a little later than its client."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        counts: Counter = Counter()
        for name, value in service.metrics().items():
            if found := re.match(r"inference_requests_total\{outcome=(\w+),", name):
                counts[found[1]] += int(value)
        if counts.total() >= expected or time.monotonic() > deadline_s:
            return counts
        time.sleep(0.05)


def soak_checks(result: Soak, budget_bytes: int) -> list[Check]:
    left = result.seen.get("left", 0)
    named = {outcome: count for outcome, count in result.seen.items() if outcome not in ("left", "completed")}
    same = all(result.counted.get(outcome) == count for outcome, count in named.items())
    ended = result.counted["completed"] + result.counted["cancelled"]
    unaccounted = result.sent - sum(result.counted.values())
    lost = sum(result.counted[outcome] for outcome in ("out_of_memory", "engine_lost"))
    first, last = result.idle
    return [
        Check(
            promise="soak: requests that no outcome accounts for",
            measured=unaccounted,
            limit=0,
            holds=unaccounted == 0 and same and ended == result.seen.get("completed", 0) + left,
            reason=f"{result.sent} sent; clients saw {result.seen}; counted {result.counted}",
        ),
        Check(promise="soak: requests lost to memory or with an engine", measured=lost, limit=0, holds=lost == 0),
        _most(
            "soak: bytes held at most, times the budget", max(s.held_bytes for s in result.samples) / budget_bytes, 1
        ),
        _most("soak: bytes held idle, after less before", last.held_bytes - first.held_bytes, MIB),
        _most("soak: resident bytes of the front, last fifth to second", _growth(result, "front_rss_bytes"), 1.05),
        _most("soak: resident bytes of the engine, last fifth to second", _growth(result, "engine_rss_bytes"), 1.05),
        _most("soak: threads idle, after less before", last.threads - first.threads, LATE_THREADS),
        _most("soak: file descriptors idle, after less before", last.descriptors - first.descriptors, 0),
    ]


def _most(promise: str, measured: float, limit: float) -> Check:
    return Check(promise=f"{promise} (at most)", measured=measured, limit=limit, holds=measured <= limit)


def _growth(result: Soak, name: str) -> float:
    values = [getattr(entry, name) for entry in result.samples]
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) / statistics.median(values[fifth : 2 * fifth] or values[:1])
