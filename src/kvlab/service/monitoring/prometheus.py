"""A Prometheus of one's own, for as long as a run takes: its own folder, a free port, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

from kvlab.service.monitoring import MonitoringError, write_monitoring

READY_TIMEOUT_S = 90.0
MOST_PORTS = 3  # tried: between the look for a free one and its use, somebody else may take it


class PortTaken(MonitoringError):
    """Somebody else listens where Prometheus was to."""


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels, and (time in s, value) points."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class Prometheus:
    """A running Prometheus, asked through its HTTP API."""

    def __init__(self, address: str, interval_s: float):
        self.address, self.interval_s = address, interval_s

    def query(self, expression: str) -> list[Series]:
        """What the expression is now: one point a series."""
        found = self._ask("query", query=expression)
        return [_series(entry, [entry["value"]]) for entry in found["result"]]

    def history(self, expression: str, start_s: float, end_s: float) -> list[Series]:
        """The expression at ``end_s`` (Unix time) and at every evaluation interval before it, back to ``start_s``."""
        end_s = round(end_s, 3)
        start_s = round(end_s - int((end_s - start_s) / self.interval_s) * self.interval_s, 3)
        found = self._ask("query_range", query=expression, start=start_s, end=end_s, step=self.interval_s)
        return [_series(entry, entry["values"]) for entry in found["result"]]

    def alerts(self, start_s: float, end_s: float, state: str = "firing") -> dict[str, list[float]]:
        """The times at which each alert was in ``state``, by name."""
        found = self.history(f'ALERTS{{alertstate="{state}"}}', start_s, end_s)
        return {series.labels["alertname"]: [at_s for at_s, _ in series.points] for series in found}

    def active_alerts(self) -> list[dict]:
        """Pending and firing alerts with their labels and annotations, as an Alertmanager would get them."""
        return self._ask("alerts")["alerts"]

    def wait_for(self, expression: str, timeout_s: float = 120.0) -> list[Series]:
        """Ask until the answer is not empty; the first scrape comes up to five seconds after the start."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := self.query(expression)):
            if time.monotonic() > deadline_s:
                raise MonitoringError(f"{expression} had no answer for {timeout_s:g} s")
            time.sleep(self.interval_s)
        return found

    def _ask(self, what: str, **parameters: object) -> dict:
        with urlopen(f"{self.address}/api/v1/{what}?{urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]


def _series(entry: dict, points: list) -> Series:
    return Series(entry["metric"], [(float(at_s), float(value)) for at_s, value in points])


def prometheus_is_installed() -> bool:
    return shutil.which("prometheus") is not None


@contextlib.contextmanager
def run_prometheus(folder: Path, target: str, *, speed_up: int = 1) -> Iterator[Prometheus]:
    """Watch ``target`` (HOST:PORT) with the project's rules until the block ends; data and log stay in ``folder``.

    ``speed_up`` as in :func:`monitoring_files`. MonitoringError if Prometheus is not installed or does not start.
    """
    if not prometheus_is_installed():
        raise MonitoringError("prometheus is not installed; on Debian: apt-get install prometheus")
    write_monitoring(folder, overwrite=True, target=target, speed_up=speed_up)
    for tried in range(1, MOST_PORTS + 1):
        address = f"127.0.0.1:{free_port()}"
        with _started(folder, address) as process:
            try:
                _wait_until_ready(process, f"http://{address}", folder / "prometheus.log")
            except PortTaken:
                if tried == MOST_PORTS:
                    raise
                continue
            yield Prometheus(f"http://{address}", interval_s(speed_up))
            return


@contextlib.contextmanager
def _started(folder: Path, address: str) -> Iterator[subprocess.Popen]:
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def interval_s(speed_up: int) -> float:
    """Seconds from one scrape and evaluation to the next, in whole milliseconds as in ``prometheus.yml``."""
    return max(1, 5_000 // speed_up) / 1_000


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urlopen(f"{address}/-/ready", timeout=1):
            return
        time.sleep(0.05)
    lines = log.read_text(errors="replace").strip().splitlines() or ["its log is empty"]
    reasons = [line for line in lines if "level=error" in line or "panic" in line.lower()]
    reason = (reasons or lines[-1:])[0]
    kind = PortTaken if "address already in use" in reason else MonitoringError
    raise kind(f"prometheus did not become ready: {reason}")
