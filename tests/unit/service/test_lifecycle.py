"""What is lost when memory runs out or a process dies, and that nothing needs repair afterwards."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from waiting import frozen, is_gone, until

from kvlab.service.engine_child import EXIT_DEVICE_UNUSABLE
from kvlab.service.launch import ServiceProcess, running
from kvlab.service.load import ask, client_of, short_then_long
from kvlab.service.messages import Start
from kvlab.service.process import EngineProcess
from kvlab.service.settings import EngineSettings

LOAD = {"short": ["short"] * 4, "long": "x" * 1_500, "short_tokens": 500}
ENDLESS = 10_000_000  # tokens: of a window, the only cache in which a stream can go on until something is done to it
STATIC = ["--policy", "static", "--max-total-tokens", "512", "--budget", "24MiB"]


def options(tiny_model, *more: str) -> list[str]:
    return ["--model", str(tiny_model), *STATIC, *more]


def outcomes(service) -> dict[str, float]:
    prefix = "inference_requests_total{outcome="
    counts = {name.removeprefix(prefix): value for name, value in service.metrics().items() if name.startswith(prefix)}
    return {name.split(",")[0]: value for name, value in counts.items() if value}


def counted(service, requests: int) -> None:
    """Wait until so many are counted: a request is over a little later than its client."""
    until(lambda: sum(outcomes(service).values()) >= requests)


def all_of(service, requests: int) -> tuple[int, int] | None:
    """How many are in flight and how many wait, once they are all there."""
    metrics = service.metrics()
    there = int(metrics["inference_requests_in_flight"]), int(metrics["inference_queue_length"])
    return there if sum(there) == requests else None


async def under_load(service, model: str, action, clients: int = 3):
    """Streams without end are in flight when the action happens; returns what their clients saw."""
    async with client_of(service.url) as client:
        begun = [asyncio.Event() for _ in range(clients)]
        fields = {"model": model, "prompt": "x", "max_tokens": ENDLESS}
        tasks = [asyncio.create_task(ask(client, "stream", event, **fields)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        action()
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def fragile(tiny_model):
    """The incident's service: nothing reserved, nothing caught."""
    with running(*options(tiny_model, "--no-admission", "--on-oom", "exit", "--grace-s", "0.2")) as service:
        yield service


def test_the_incident_one_long_prompt_loses_all_in_flight_and_a_new_engine_serves_again(fragile, tiny_model):
    seen = asyncio.run(short_then_long(fragile.url, str(tiny_model), **LOAD))
    assert [view.outcome for view in seen] == ["engine_lost"] * 5
    assert seen[-1].status == 503  # it had no token yet; the others were streams that had begun
    assert [view.status for view in seen[:-1]] == [200] * 4
    counted(fragile, 5)
    fragile.wait_until_ready()
    assert outcomes(fragile) == {"engine_lost": 5}
    assert fragile.metrics()["engine_restarts_total"] == 1
    assert "DefaultCPUAllocator: can't allocate memory" in fragile.log()


@pytest.fixture(scope="module")
def steady(tiny_model):
    """A window, in which streams go on for ever."""
    window = ["--max-total-tokens", "128", "--max-request-tokens", str(2 * ENDLESS), "--budget", "24MiB"]
    with running("--model", str(tiny_model), *window, "--no-admission") as service:
        yield service


def test_a_front_whose_engine_takes_nothing_answers_nonetheless(steady, tiny_model):
    """Prompts of 120 KB, a few of which fill the engine's socket; its event loop must not wait there."""

    async def flood():
        async with client_of(steady.url) as client:
            with frozen(steady.engine_pid):
                fields = {"model": str(tiny_model), "prompt": [7] * 30_000, "max_tokens": 5}
                tasks = [asyncio.create_task(ask(client, "huge", **fields)) for _ in range(6)]
                await asyncio.to_thread(until, lambda: all_of(steady, 6))
                await asyncio.to_thread(until, steady.is_ready)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(flood())
    until(lambda: all_of(steady, 0))


def test_an_engine_killed_under_load_is_replaced(steady, tiny_model):
    before, restarts = steady.engine_pid, steady.metrics()["engine_restarts_total"]
    body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 3}
    late = http.client.HTTPConnection(steady.url.removeprefix("http://"), timeout=120)

    def kill_and_ask() -> None:
        """When the front goes on, its engine is dead and a request is there: whichever it sees first."""
        with frozen(steady.pid):
            os.kill(before, signal.SIGKILL)
            late.request("POST", "/v1/completions", json.dumps(body))

    seen = asyncio.run(under_load(steady, str(tiny_model), kill_and_ask))
    assert [view.outcome for view in seen] == ["engine_lost"] * 3
    refused = late.getresponse()
    assert (refused.status, json.load(refused)["error"]["code"]) == (503, "engine_lost")
    assert int(refused.getheader("retry-after")) > 0
    late.close()
    steady.wait_until_ready()
    metrics = steady.metrics()
    assert metrics["engine_restarts_total"] == restarts + 1
    assert metrics["inference_requests_in_flight"] == 0
    assert metrics["gpu_memory_used_bytes"] < 2**20
    assert steady.engine_pid != before
    assert httpx.post(f"{steady.url}/v1/completions", json=body, timeout=120).status_code == 200


@pytest.fixture(scope="module")
def catching(tiny_model):
    """Nothing reserved, but a refusal ends one request."""
    with running(*options(tiny_model, "--no-admission")) as service:
        yield service


def test_caught_the_long_prompt_loses_itself_alone(catching, tiny_model):
    seen = asyncio.run(short_then_long(catching.url, str(tiny_model), **LOAD))
    assert all(view.outcome == "completed" for view in seen[:-1])
    assert (seen[-1].status, seen[-1].outcome) == (503, "out_of_memory")
    counted(catching, 5)
    assert outcomes(catching) == {"completed": 4, "out_of_memory": 1}
    metrics = catching.metrics()
    assert metrics["inference_requests_oom_total"] == 1
    assert metrics["engine_restarts_total"] == 0
    assert metrics["gpu_memory_used_bytes"] < 2**20


def test_a_service_killed_under_load_leaves_no_engine_and_a_new_one_starts_from_zero(tiny_model, steady):
    engine = steady.engine_pid
    seen = asyncio.run(under_load(steady, str(tiny_model), lambda: steady.end(signal.SIGKILL)))
    assert {view.outcome for view in seen} == {"connection"}
    until(lambda: is_gone(engine))
    with running(*options(tiny_model, "--grace-s", "300")) as service:
        assert outcomes(service) == {}
        assert service.metrics()["inference_requests_oom_total"] == 0
        _sigterm_finishes_what_runs_and_refuses_what_waits(service, str(tiny_model))


def _sigterm_finishes_what_runs_and_refuses_what_waits(service, model):
    """The engine stands still until the signal is answered, so that none of them is over before."""

    async def load():
        async with client_of(service.url) as client:
            with frozen(service.engine_pid):
                fields = {"model": model, "prompt": "x", "max_tokens": 400}
                tasks = [asyncio.create_task(ask(client, "stream", **fields)) for _ in range(8)]
                there = await asyncio.to_thread(until, lambda: all_of(service, 8))
                service.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(until, lambda: "finishing" in service.log())
            return there, await asyncio.gather(*tasks)

    (running_then, waiting_then), seen = asyncio.run(load())
    assert running_then > 0
    assert waiting_then > 0
    assert sum(view.outcome == "completed" for view in seen) == running_then
    assert sum(view.outcome == "shutting_down" for view in seen) == waiting_then
    assert service.process.wait(120) == 0


def test_an_engine_whose_device_may_be_spoiled_ends_itself_with_the_reason_in_the_log(tiny_model, capfd):
    """A token beyond the vocabulary, which the front would have refused; on CUDA it is a device-side assert."""
    engine = EngineProcess(EngineSettings(model=str(tiny_model), budget_bytes=2**24, max_total_tokens=64))
    for kind, _ in engine.reports():
        if kind == "ready":
            engine.send(Start(1, (70_000).to_bytes(4, "little"), 5, 0.0, None, ()))
    assert engine.end() == EXIT_DEVICE_UNUSABLE
    assert "no later step could be trusted: IndexError: index out of range in self" in capfd.readouterr().err


def stop_listening(engine: EngineProcess) -> None:
    """As when the front is gone, but that the engine learns of it by speaking, before its own reader does."""
    with socket.socket(fileno=os.dup(engine.connection.fileno())) as line:
        line.shutdown(socket.SHUT_RD)


def test_an_engine_whose_front_goes_ends_without_a_word_at_every_moment(tiny_model, capfd):
    ours, theirs = socket.socketpair()
    with theirs:  # its front is gone before it said what to serve
        command = [sys.executable, "-m", "kvlab.service.engine_child", str(theirs.fileno())]
        unborn = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    ours.close()
    settings = EngineSettings(model=str(tiny_model), budget_bytes=2**24, max_total_tokens=64)
    loading, serving = EngineProcess(settings), EngineProcess(settings)
    stop_listening(loading)
    assert any(kind == "ready" for kind, _ in serving.reports())
    stop_listening(serving)
    assert [unborn.wait(120), loading.wait(120), serving.wait(120)] == [0, 0, 0]
    assert "Traceback" not in capfd.readouterr().err
    for engine in (loading, serving):
        engine.end()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "no/such"], "no/such"),
        (["--policy", "magic"], "--policy"),
        (["--budget", "many"], "many"),
        (["--sinks", "9", "--max-total-tokens", "8"], "sinks"),
        (["--host", "192.0.2.1"], "kvlab: cannot listen: "),  # an address for documentation, nobody's own
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(arguments, reason, tiny_model):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", str(tiny_model)]
    command = [sys.executable, "-m", "kvlab.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=180
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvlab: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1
    assert reason in lines[0]
    assert "Traceback" not in done.stderr


def test_quotas_beyond_the_capacity_end_the_start(tiny_model, tmp_path):
    tenants = tmp_path / "tenants.yml"
    tenants.write_text("a: {kv_share: 0.7}\nb: {kv_share: 0.7}\n")
    service = ServiceProcess(*options(tiny_model, "--tenants", str(tenants)))
    try:
        assert service.process.wait(180) == 2
        assert "lower the quotas, or raise the budget" in service.log()
        assert "Traceback" not in service.log()
    finally:
        service.close()


def test_sigterm_ends_what_takes_longer_than_the_grace_and_says_so(fragile, tiny_model):
    """The engine stands still, so that a grace of 0.2 s is too short on any machine."""
    fragile.wait_until_ready()

    async def load():
        async with client_of(fragile.url) as client:
            with frozen(fragile.engine_pid):
                fields = {"model": str(tiny_model), "prompt": "x", "max_tokens": 400}
                tasks = [asyncio.create_task(ask(client, "stream", **fields)) for _ in range(3)]
                await asyncio.to_thread(until, lambda: all_of(fragile, 3))
                fragile.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

    assert [view.outcome for view in asyncio.run(load())] == ["shutting_down"] * 3
    assert fragile.process.wait(120) == 0
