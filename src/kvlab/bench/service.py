"""What the service promises, measured on real processes: losses, overhead, a soak, and two kills."""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from rich.console import Group
from rich.table import Table

from kvlab.bench.checks import Check, checks_table
from kvlab.bench.overhead import engine_overhead
from kvlab.bench.soak import Soak, soak, soak_checks
from kvlab.device import parse_bytes, resolve_device
from kvlab.service.launch import ServiceProcess, running
from kvlab.service.load import View, ask, client_of, short_then_long
from kvlab.service.rehearsal import SMALL_OBJECTS_BYTES
from kvlab.service.tiny import save_tiny_model

Profile = Literal["quick", "full"]
BUDGET = "24MiB"
SHORT_TOKENS, LONG_PROMPT_TOKENS, ROWS = 60, 1_500, 512


@dataclass(frozen=True)
class Plan:
    rounds: int  # of five requests
    overhead_tokens: int
    overhead_pairs: int
    soak_s: float
    sample_interval_s: float


PLANS: dict[Profile, Plan] = {
    "quick": Plan(rounds=40, overhead_tokens=32, overhead_pairs=5, soak_s=60, sample_interval_s=1),
    "full": Plan(rounds=100, overhead_tokens=128, overhead_pairs=11, soak_s=1200, sample_interval_s=5),
}


class ServiceBench(BaseModel):
    device: str
    profile: Profile
    soak: Soak
    checks: list[Check]


def bench_service(profile: Profile = "quick", device: str = "auto") -> ServiceBench:
    """Every promise once; the services serve a tiny random model, the overhead is SmolLM2's."""
    plan, device = PLANS[profile], str(resolve_device(device))
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_tiny_model(Path(folder)))
        common = ["--model", model, "--device", device, "--budget", BUDGET, "--max-total-tokens", str(ROWS)]
        checks = [incident(common, model)]
        with running(*common) as service:
            checks += window(service, model, plan.rounds)
            soaked = soak(service, model, plan.soak_s, plan.sample_interval_s)
            checks += soak_checks(soaked, parse_bytes(BUDGET))
            checks += kills(service, model)
    checks.append(engine_overhead("smollm2-135m", device, tokens=plan.overhead_tokens, pairs=plan.overhead_pairs))
    return ServiceBench(device=device, profile=profile, soak=soaked, checks=checks)


def one_round(service: ServiceProcess, model: str) -> list[View]:
    """Four short requests in flight, and a long prompt."""
    short, long = ["short"] * 4, "x" * LONG_PROMPT_TOKENS
    return asyncio.run(
        short_then_long(service.url, model, short=short, long=long, short_tokens=SHORT_TOKENS, long_tokens=5)
    )


def incident(common: list[str], model: str) -> Check:
    """The incident's service under one round."""
    with running(*common, "--policy", "static", "--no-admission", "--on-oom", "exit") as service:
        views = one_round(service, model)
        service.wait_until_ready()
    lost = sum(view.outcome != "completed" for view in views)
    return Check(
        promise="static, nothing reserved or caught: of 5 requests lost, as in the incident (at least)",
        measured=lost,
        limit=5,
        holds=lost >= 5,
        reason=f"clients saw {sorted({view.outcome for view in views})}",
    )


def window(service: ServiceProcess, model: str, rounds: int) -> list[Check]:
    """The same round on the same budget, many times, with a window and admission."""
    one_round(service, model)  # what is made once is made now
    views: list[View] = []
    held = []
    for _ in range(rounds):
        views += one_round(service, model)
        held.append(service.metrics()["gpu_memory_used_bytes"])
    lost = sum(view.outcome != "completed" for view in views)
    fifth = len(held) // 5
    rise = statistics.median(held[-fifth:]) - statistics.median(held[:fifth])
    return [
        Check(
            promise=f"sliding, the same load and budget: of {len(views)} requests lost",
            measured=lost,
            limit=0,
            holds=lost == 0,
        ),
        Check(
            promise="sliding: bytes held between rounds, median of the last fifth less that of the first (at most)",
            measured=rise,
            limit=SMALL_OBJECTS_BYTES,
            holds=rise <= SMALL_OBJECTS_BYTES,
            reason=f"from {min(held):,.0f} to {max(held):,.0f} in {rounds} rounds; the limit is the room kept for "
            "small objects, whose heap comes and goes by pages",
        ),
    ]


def kills(service: ServiceProcess, model: str) -> list[Check]:
    """SIGKILL to the engine under load, then to the service; seconds until all is as it should be."""
    views, engine_s = asyncio.run(_under_load(service, model, lambda: os.kill(service.engine_pid, signal.SIGKILL)))
    service.wait_until_ready()
    ready_s = time.monotonic() - engine_s
    engine = service.engine_pid
    more, service_s = asyncio.run(_under_load(service, model, lambda: service.process.kill()))
    while Path(f"/proc/{engine}").exists() and time.monotonic() < service_s + 10:
        time.sleep(0.01)
    gone_s = time.monotonic() - service_s
    return [
        Check(
            promise="engine killed: clients that got a clear error, of those in flight",
            measured=sum(view.outcome == "engine_lost" for view in views),
            limit=len(views),
            holds=all(view.outcome == "engine_lost" for view in views),
        ),
        Check(promise="engine killed: seconds until ready again", measured=ready_s),
        Check(
            promise="service killed: seconds until its engine is gone (at most)",
            measured=gone_s,
            limit=10,
            holds=not Path(f"/proc/{engine}").exists(),
            reason=f"clients saw {sorted({view.outcome for view in more})}",
        ),
    ]


async def _under_load(service: ServiceProcess, model: str, action) -> tuple[list[View], float]:
    """The views of streams that were in flight when the action happened, and when it did."""
    client = client_of(service.url)
    begun = [asyncio.Event() for _ in range(3)]
    fields = {"model": model, "prompt": "x", "max_tokens": 30_000}  # no end before the action
    tasks = [asyncio.create_task(ask(client, "stream", event, **fields)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    action()
    now_s = time.monotonic()
    views = await asyncio.gather(*tasks)
    await client.close()
    return views, now_s


def render(result: ServiceBench) -> Group:
    """The result as tables for a terminal."""
    samples = Table("minute", "held MiB", "front MiB", "engine MiB", "threads", "descriptors")
    samples.title = f"Soak of {result.soak.seconds:g} s, {result.soak.sent} requests, {result.device}"
    every = max(1, len(result.soak.samples) // 10)
    for entry in result.soak.samples[::every]:
        held, front, engine = (
            f"{size / 2**20:,.1f}" for size in (entry.held_bytes, entry.front_rss_bytes, entry.engine_rss_bytes)
        )
        samples.add_row(f"{entry.seconds / 60:.1f}", held, front, engine, str(entry.threads), str(entry.descriptors))
    return Group(samples, checks_table(result.checks))
