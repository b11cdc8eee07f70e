"""Our own scrapes of ``/metrics``, and the few functions of PromQL that the rules use, in plain Python."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from http.client import HTTPException
from itertools import pairwise
from operator import itemgetter
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Points = list[tuple[float, float]]
"""(time in s, value), oldest first."""


class Scrapes:
    """What each scrape found: for each series its points.

    One thread may add while another reads: a scrape is there whole or not at all.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, frozenset[tuple[str, str]]], Points] = {}
        self._lock = threading.Lock()
        self.failed_s: list[float] = []

    def add(self, at_s: float, text: str) -> None:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        with self._lock:
            for sample in samples:
                key = sample.name, frozenset(sample.labels.items())
                self._series.setdefault(key, []).append((at_s, sample.value))

    def so_far(self) -> Scrapes:
        """A copy to which nothing is added: all series of it end with the same scrape."""
        copy = Scrapes()
        with self._lock:
            copy._series = {key: points.copy() for key, points in self._series.items()}
            copy.failed_s = self.failed_s.copy()
        return copy

    def points(self, name: str, **labels: str) -> Points:
        """The series of that name with those labels; several are summed, scrape by scrape."""
        total: dict[float, float] = {}
        with self._lock:
            for (series, with_labels), points in self._series.items():
                if series == name and labels.items() <= dict(with_labels).items():
                    for at_s, value in points:
                        total[at_s] = total.get(at_s, 0.0) + value
        return sorted(total.items())


def increase(points: Points, at_s: float, window_s: float) -> float:
    """How much a counter rose in the window before ``at_s``; a fall is a restart from nought.

    Without Prometheus' extrapolation to the window's ends, so integers stay integers.
    """
    values = [value for _, value in _inside(points, at_s, window_s)]
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def _inside(points: Points, at_s: float, window_s: float) -> Points:
    first = bisect_left(points, at_s - window_s, key=itemgetter(0))
    return points[first : bisect_right(points, at_s, key=itemgetter(0))]


def predict_linear(points: Points, at_s: float, window_s: float, ahead_s: float) -> float | None:
    """Where a straight line through the window's points is at ``at_s + ahead_s``; None with fewer than two points."""
    inside = [(time_s - at_s, value) for time_s, value in _inside(points, at_s, window_s)]
    if len(inside) < 2:
        return None
    mean_s = sum(time_s for time_s, _ in inside) / len(inside)
    mean = sum(value for _, value in inside) / len(inside)
    spread = sum((time_s - mean_s) ** 2 for time_s, _ in inside)
    slope = sum((time_s - mean_s) * (value - mean) for time_s, value in inside) / spread
    return mean + slope * (ahead_s - mean_s)


def held_for(points: list[tuple[float, bool]], for_s: float) -> list[float]:
    """The times at which a condition had been true without a break for ``for_s``: an alert that fires."""
    firing, since_s = [], None
    for at_s, true in points:
        since_s = (since_s if since_s is not None else at_s) if true else None
        if since_s is not None and at_s - since_s >= for_s:
            firing.append(at_s)
    return firing


@contextlib.contextmanager
def scraping(address: str, interval_s: float) -> Iterator[Scrapes]:
    """Scrape ``http://HOST:PORT/metrics`` at every interval, in a thread, until the block ends."""
    scrapes, stop = Scrapes(), threading.Event()

    def scrape() -> None:
        due_s = time.monotonic()
        while not stop.is_set():
            at_s = time.time()
            try:
                with urlopen(f"{address}/metrics", timeout=5) as answer:
                    scrapes.add(at_s, answer.read().decode())
            except (OSError, HTTPException):  # the latter: a service that ended within its answer
                scrapes.failed_s.append(at_s)
            due_s = max(due_s + interval_s, time.monotonic())
            stop.wait(due_s - time.monotonic())

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield scrapes
    finally:
        stop.set()
        thread.join()
