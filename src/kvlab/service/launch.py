"""``kvlab serve`` as a child of a test, a benchmark or a lab."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvlab.errors import KvlabError

ANSWER_TIMEOUT_S = 60.0  # a service on a busy machine takes its time


class StartError(KvlabError):
    """The service did not come up; the message holds the end of its log."""


class ServiceProcess:
    """A running service: its address, its numbers, its log, and ways to end it."""

    def __init__(self, *options: str):
        package_parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.cli", "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.url = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        return httpx.get(f"{self.url}/healthz", timeout=ANSWER_TIMEOUT_S).json()["engine_pid"]

    def read_address(self) -> None:
        """Until it listens, which is before it is ready; raises StartError if it ends instead."""
        line = self.process.stdout.readline().decode()
        if (found := re.search(r"http://\S+", line)) is None:
            self.process.wait(60)
            raise StartError(f"the service ended with exit status {self.process.returncode}: {self.log()[-500:]}")
        self.url = found[0]

    def wait_until_ready(self, timeout_s: float = 180.0) -> None:
        """Until it serves; raises StartError if it ends instead, or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        if not self.url:
            self.read_address()
        while not self.is_ready():
            if self.process.poll() is not None:
                raise StartError(f"the service ended with exit status {self.process.returncode}: {self.log()[-500:]}")
            if time.monotonic() > deadline_s:
                raise StartError(f"the service was not ready after {timeout_s:g} s: {self.log()[-500:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, with its labels as ``name{label=value,...}``."""
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=ANSWER_TIMEOUT_S).text)

    def log(self) -> str:
        descriptor = self._log.fileno()  # not through the file: its position is where the service writes
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def end(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait; returns the exit status."""
        self.process.send_signal(how)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.end()
        self.process.stdout.close()
        self._log.close()


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a mapping of ``name{label=value,...}`` to values; labels in alphabetical order."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


@contextlib.contextmanager
def running(*options: str) -> Iterator[ServiceProcess]:
    """A service with these options of ``kvlab serve``, ready; ended afterwards."""
    service = ServiceProcess(*options)
    try:
        service.wait_until_ready()
        yield service
    finally:
        service.close()
