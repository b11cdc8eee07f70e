"""What is lost when memory runs out or a process dies, and that nothing needs repair afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from kvlab.service.engine_child import EXIT_DEVICE_UNUSABLE
from kvlab.service.launch import ServiceProcess, running
from kvlab.service.load import ask, client_of, short_then_long
from kvlab.service.messages import Start
from kvlab.service.process import EngineProcess
from kvlab.service.settings import EngineSettings

LOAD = {"short": ["short"] * 4, "long": "x" * 1_500, "short_tokens": 300}
STATIC = ["--policy", "static", "--max-total-tokens", "512", "--budget", "24MiB"]


def options(tiny_model, *more: str) -> list[str]:
    return ["--model", str(tiny_model), *STATIC, *more]


def outcomes(service) -> dict[str, float]:
    prefix = "inference_requests_total{outcome="
    counts = {name.removeprefix(prefix): value for name, value in service.metrics().items() if name.startswith(prefix)}
    return {name.split(",")[0]: value for name, value in counts.items() if value}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def under_load(service, model: str, action, clients: int = 3):
    """Streams in flight when the action happens; returns what their clients saw."""
    async with client_of(service.url) as client:
        begun = [asyncio.Event() for _ in range(clients)]
        fields = {"model": model, "prompt": "x", "max_tokens": 450}
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
    fragile.wait_until_ready()
    assert outcomes(fragile) == {"engine_lost": 5}
    assert fragile.metrics()["engine_restarts_total"] == 1
    assert "DefaultCPUAllocator: can't allocate memory" in fragile.log()


def test_an_engine_killed_under_load_is_replaced(fragile, tiny_model):
    fragile.wait_until_ready()
    before, restarts = fragile.engine_pid, fragile.metrics()["engine_restarts_total"]
    seen = asyncio.run(under_load(fragile, str(tiny_model), lambda: os.kill(before, signal.SIGKILL)))
    assert [view.outcome for view in seen] == ["engine_lost"] * 3
    body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 3}
    refused = httpx.post(f"{fragile.url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
    assert int(refused.headers["retry-after"]) > 0
    fragile.wait_until_ready()
    metrics = fragile.metrics()
    assert metrics["engine_restarts_total"] == restarts + 1
    assert metrics["inference_requests_in_flight"] == metrics["gpu_memory_used_bytes"] == 0
    assert fragile.engine_pid != before
    assert httpx.post(f"{fragile.url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def catching(tiny_model):
    """Nothing reserved, but a refusal ends one request."""
    with running(*options(tiny_model, "--no-admission")) as service:
        yield service


def test_caught_the_long_prompt_loses_itself_alone(catching, tiny_model):
    seen = asyncio.run(short_then_long(catching.url, str(tiny_model), **LOAD))
    assert all(view.outcome == "completed" for view in seen[:-1])
    assert (seen[-1].status, seen[-1].outcome) == (503, "out_of_memory")
    assert outcomes(catching) == {"completed": 4, "out_of_memory": 1}
    metrics = catching.metrics()
    assert metrics["inference_requests_oom_total"] == 1
    assert metrics["engine_restarts_total"] == 0
    assert metrics["gpu_memory_used_bytes"] < 2**20


def test_a_service_killed_under_load_leaves_no_engine_and_a_new_one_starts_from_zero(tiny_model, catching):
    engine = catching.engine_pid
    seen = asyncio.run(under_load(catching, str(tiny_model), lambda: catching.end(signal.SIGKILL)))
    assert {view.outcome for view in seen} <= {"connection"}
    deadline_s = time.monotonic() + 10
    while is_alive(engine) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(engine)
    with running(*options(tiny_model)) as service:
        assert outcomes(service) == {}
        assert service.metrics()["inference_requests_oom_total"] == 0
        _sigterm_finishes_what_runs_and_refuses_what_waits(service, str(tiny_model))


def _sigterm_finishes_what_runs_and_refuses_what_waits(service, model):
    async def load():
        async with client_of(service.url) as client:
            fields = {"model": model, "prompt": "x", "max_tokens": 400}
            tasks = [asyncio.create_task(ask(client, "stream", **fields)) for _ in range(8)]
            while (metrics := service.metrics())["inference_queue_length"] == 0:
                await asyncio.sleep(0.01)
            service.process.send_signal(signal.SIGTERM)
            return metrics, await asyncio.gather(*tasks)

    metrics, seen = asyncio.run(load())
    running_then, waiting_then = metrics["inference_requests_in_flight"], metrics["inference_queue_length"]
    done, refused = (sum(view.outcome == name for view in seen) for name in ("completed", "shutting_down"))
    assert done >= running_then > 0
    assert refused == 8 - done > 0
    assert waiting_then > 0
    assert service.process.wait(30) == 0


def test_an_engine_whose_device_may_be_spoiled_ends_itself_with_the_reason_in_the_log(tiny_model, capfd):
    """A token beyond the vocabulary, which the front would have refused; on CUDA it is a device-side assert."""
    engine = EngineProcess(EngineSettings(model=str(tiny_model), budget_bytes=2**24, max_total_tokens=64))
    for kind, _ in engine.reports():
        if kind == "ready":
            engine.send(Start(1, (70_000).to_bytes(4, "little"), 5, 0.0, None, ()))
    assert engine.end() == EXIT_DEVICE_UNUSABLE
    assert "no later step could be trusted: IndexError: index out of range in self" in capfd.readouterr().err


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
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=60
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
        assert service.process.wait(60) == 2
        assert "lower the quotas, or raise the budget" in service.log()
        assert "Traceback" not in service.log()
    finally:
        service.close()


def test_sigterm_ends_what_takes_longer_than_the_grace_and_says_so(fragile, tiny_model):
    fragile.wait_until_ready()
    seen = asyncio.run(under_load(fragile, str(tiny_model), lambda: fragile.process.send_signal(signal.SIGTERM)))
    assert "shutting_down" in {view.outcome for view in seen}
    assert {view.outcome for view in seen} <= {"shutting_down", "completed"}
    assert fragile.process.wait(10) == 0
