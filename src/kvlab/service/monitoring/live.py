"""A service of one's own and clients that ask it, for as long as a run takes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from kvlab.service.monitoring import MonitoringError

START_TIMEOUT_S = 180.0


class Stream(threading.Thread):
    """One client that reads the tokens of its request as they come, until the end or until it hangs up.

    ``outcome``: None while it runs, then ``completed``, ``hung up`` or the code of the refusal.
    """

    def __init__(self, address: str, body: dict, tenant: str | None):
        super().__init__(daemon=True)
        self.address, self.body, self.tenant = address, body, tenant
        self.tokens = 0
        self.outcome: str | None = None
        self.asked_s, self.ended_s = time.time(), None
        self._hung_up = threading.Event()

    def run(self) -> None:
        try:
            self.outcome = self._read()
        except httpx.HTTPError:
            self.outcome = "connection lost"
        self.ended_s = time.time()

    def hang_up(self) -> None:
        """Go away with the next token."""
        self._hung_up.set()

    def _read(self) -> str:
        headers = {"X-Tenant": self.tenant} if self.tenant else {}
        with httpx.stream(
            "POST", f"{self.address}/v1/completions", json=self.body, headers=headers, timeout=None
        ) as answer:
            if answer.status_code != 200:
                return json.loads(answer.read())["error"]["code"]
            for line in answer.iter_lines():
                if self._hung_up.is_set():
                    return "hung up"
                if "error" in (event := _event(line)):
                    return event["error"]["code"]
                self.tokens += bool(event)
        return "completed"


def _event(line: str) -> dict:
    text = line.removeprefix("data: ")
    return json.loads(text) if text.startswith("{") else {}


class Service:
    """A running ``kvlab serve``."""

    def __init__(self, address: str, model: str, process: subprocess.Popen, log: Path):
        self.address, self.model, self.log = address, model, log
        self._process = process

    def ask(self, prompt: list[int], max_tokens: int, tenant: str | None = None) -> Stream:
        """Start a client that asks for ``max_tokens`` after the token ids of ``prompt``."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        client = Stream(self.address, body, tenant)
        client.start()
        return client

    def wait_until_ready(self) -> None:
        """Until an engine is loaded; MonitoringError, with the log's last line, if the service ends instead."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.address}/readyz", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        last_line = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise MonitoringError(f"the service was not ready within {START_TIMEOUT_S:g} s: {last_line}")


@contextlib.contextmanager
def run_service(log: Path, *, model: str = "smollm2-135m", port: int = 0, **options: object) -> Iterator[Service]:
    """``kvlab serve`` with these options (``max_total_tokens=256``, ``admission=False``), ready, until the block ends."""
    port = port or free_port()
    command = [sys.executable, "-m", "kvlab.cli", "serve", "--model", model, "--port", str(port), "--grace-s", "0"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
    try:
        service = Service(f"http://127.0.0.1:{port}", model, process, log)
        service.wait_until_ready()
        yield service
    finally:
        end(process)


def end(process: subprocess.Popen, timeout_s: float = 15.0) -> None:
    """Ask the process to end; kill it if it does not."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
