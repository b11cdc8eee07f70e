"""An engine that hangs is noticed as one that dies is, and a signal is answered in order at every moment."""

import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest
from server_sockets import is_stuck
from waiting import frozen, is_gone, until

from kvlab.service.launch import ServiceProcess, running
from kvlab.service.load import ask, client_of
from kvlab.service.process import EngineProcess
from kvlab.service.settings import EngineSettings
from kvlab.service.supervisor import Supervisor

TIMEOUT_S = 5
ENDLESS = 10_000_000  # tokens: no stream ends by itself before something is done to it
HUGE = [7] * 30_000  # 120 KB on their way to the engine: a few of them fill its socket


@pytest.fixture(scope="module")
def options(tiny_model):
    window = ["--max-total-tokens", "128", "--max-request-tokens", str(2 * ENDLESS)]
    return ["--model", str(tiny_model), *window, "--budget", "24MiB", "--no-admission"]


@pytest.fixture(scope="module")
def service(options):
    with running(*options, "--engine-timeout-s", str(TIMEOUT_S)) as service:
        yield service


@pytest.fixture
def ready(service):
    service.wait_until_ready()
    return service


async def streams_while_it_hangs(service, model: str, engine: int, prompts, clients: int = 3):
    """What clients saw that were reading when the engine was stopped, and of more that asked afterwards."""
    async with client_of(service.url) as client:
        begun = [asyncio.Event() for _ in range(clients)]
        fields = {"model": model, "max_tokens": ENDLESS}
        tasks = [asyncio.create_task(ask(client, "before", event, prompt="x", **fields)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(engine, signal.SIGSTOP)
        tasks += [
            asyncio.create_task(ask(client, "after", prompt=prompt, **fields | {"max_tokens": 5})) for prompt in prompts
        ]
        return await asyncio.gather(*tasks)


def test_an_engine_that_hangs_is_killed_and_its_clients_are_told(ready, tiny_model):
    engine, restarts = ready.engine_pid, ready.metrics()["engine_restarts_total"]
    views = asyncio.run(streams_while_it_hangs(ready, str(tiny_model), engine, [HUGE] * 6))
    assert [view.outcome for view in views] == ["engine_lost"] * 9
    assert [view.status for view in views if view.name == "after"] == [503] * 6
    assert "has said nothing for" in ready.log()
    ready.wait_until_ready()
    assert ready.metrics()["engine_restarts_total"] == restarts + 1
    assert is_gone(engine)
    body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 3}
    assert httpx.post(f"{ready.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_an_engine_that_hangs_with_nothing_to_do_is_noticed_too(ready):
    engine = ready.engine_pid
    os.kill(engine, signal.SIGSTOP)
    until(lambda: is_gone(engine))
    until(lambda: ready.engine_pid != engine)
    ready.wait_until_ready()


def test_an_idle_engine_is_left_alone_and_a_front_that_was_stopped_blames_nobody(ready):
    engine = ready.engine_pid
    with frozen(ready.pid):
        time.sleep(TIMEOUT_S + 1)
    time.sleep(TIMEOUT_S + 1)
    assert ready.is_ready()
    assert ready.engine_pid == engine


def test_restarts_wait_longer_the_shorter_the_engines_live(ready):
    for _ in range(2):
        ready.wait_until_ready()
        engine, killed_s = ready.engine_pid, time.monotonic()
        os.kill(engine, signal.SIGKILL)
        until(lambda killed=engine: ready.engine_pid != killed)
    assert time.monotonic() - killed_s >= 1


def test_an_engine_killed_while_it_loads_is_followed_by_another(options):
    service = ServiceProcess(*options)
    try:
        service.read_address()
        os.kill(engine := service.engine_pid, signal.SIGKILL)
        until(lambda: service.engine_pid != engine)
        service.wait_until_ready()
        assert service.metrics()["engine_restarts_total"] == 1
        assert service.end() == 0
    finally:
        service.close()


def test_a_front_out_of_descriptors_starts_an_engine_when_it_has_some_again(options, tiny_model):
    with running(*options) as service:
        engine, client = service.engine_pid, http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
        client.request("GET", "/healthz")
        client.getresponse().read()  # a connection that stays
        _, hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (3, hard))  # no new one is below three
        os.kill(engine, signal.SIGKILL)
        until(lambda: "no new engine can be started" in service.log())
        client.request("POST", "/v1/completions", json.dumps({"model": str(tiny_model), "prompt": "x"}))
        refused = client.getresponse()
        assert (refused.status, json.load(refused)["error"]["code"]) == (503, "engine_lost")
        assert int(refused.getheader("retry-after")) > 0
        client.close()
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (hard, hard))
        service.wait_until_ready()
        assert service.engine_pid != engine


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM] * 3], ids=str)
def test_a_signal_that_comes_with_the_address_ends_the_service_in_order(options, numbers):
    service = ServiceProcess(*options)
    try:
        service.read_address()
        engine = int(subprocess.check_output(["pgrep", "-P", str(service.pid)]))
        for number in numbers:
            service.process.send_signal(number)
        assert service.process.wait(120) == 0, service.log()
        assert "Traceback" not in service.log()
        until(lambda: is_gone(engine))
    finally:
        service.close()


def seen_by_a_reader(service, model: str, signals: list[tuple[int, signal.Signals]]) -> str:
    """How the stream of a client ended that was reading when processes were sent signals."""

    async def read() -> str:
        async with client_of(service.url) as client:
            begun, fields = asyncio.Event(), {"model": model, "prompt": "x", "max_tokens": ENDLESS}
            task = asyncio.create_task(ask(client, "reads", begun, **fields))
            await begun.wait()
            for pid, number in signals:
                os.kill(pid, number)
                if pid == service.pid:  # or a second signal could be one with the first
                    await asyncio.to_thread(until, lambda: "finishing" in service.log())
            return (await task).outcome

    return asyncio.run(read())


@contextlib.contextmanager
def deaf_client(service):
    """A client that asks for far more than the kernel takes, and reads nothing: an answer waits for it in the front."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = service.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 3_000)
        until(lambda: is_stuck(client))
        yield


@pytest.mark.parametrize("case", ["the engine hangs", "the engine dies", "a second ctrl-c"])
def test_a_signal_under_load_ends_the_service_in_order(options, tiny_model, case):
    grace_s = "0.5" if case == "the engine hangs" else "60"
    with running(*options, "--grace-s", grace_s) as service:
        front, engine = service.pid, service.engine_pid
        signals, outcome = {
            "the engine hangs": ([(engine, signal.SIGSTOP), (front, signal.SIGTERM)], "shutting_down"),
            "a second ctrl-c": ([(front, signal.SIGINT), (front, signal.SIGINT)], "shutting_down"),
            "the engine dies": ([(front, signal.SIGTERM), (engine, signal.SIGKILL)], "engine_lost"),
        }[case]
        deaf = deaf_client(service) if case == "the engine hangs" else contextlib.nullcontext()
        with deaf:
            assert seen_by_a_reader(service, str(tiny_model), signals) == outcome
            assert service.process.wait(120) == 0
        assert is_gone(engine)
        assert "Traceback" not in service.log()


class Listening:
    """Hears when the engine is ready; nothing else is said to it."""

    def __init__(self):
        self.ready = asyncio.Event()

    def engine_ready(self, _) -> None:
        self.ready.set()

    def engine_said(self, _) -> None:
        """A word every second."""


class LateReader(EngineProcess):
    """Whoever reads its words learns of its end half a second after the process has ended, as on a busy machine."""

    def end(self) -> int:
        code = super().end()
        time.sleep(0.5)
        return code


@pytest.mark.parametrize("loaded", [False, True], ids=["while it loads", "when it serves"])
def test_nothing_of_an_engine_is_left_when_the_loop_closes(tiny_model, loaded):
    """An engine's reader that speaks to a closed loop dies of it; pytest makes that an error."""
    settings = EngineSettings(model=str(tiny_model), budget_bytes=2**24, max_total_tokens=64)

    async def live() -> None:
        supervisor = Supervisor(settings, TIMEOUT_S, LateReader(settings))
        listener = Listening()
        supervisor.start(listener)
        if loaded:
            await listener.ready.wait()
        await supervisor.stop()

    asyncio.run(live())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-reader")]
