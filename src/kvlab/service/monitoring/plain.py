"""The alerts in plain Python, over our own scrapes: for a run on a machine without Prometheus."""

from __future__ import annotations

from kvlab.service.monitoring.scrapes import Scrapes, held_for, increase, predict_linear

MINUTE_S = 60.0
HORIZON_S = 1800.0

# Minutes for which an expression must be true before its alert fires; the others fire at once.
HELD_MINUTES = {
    "GpuMemoryHigh": 2,
    "GpuMemoryExhaustionAhead": 3,
    "QueueFull": 1,
    "PromptsOutgrowWindow": 2,
    "EngineDown": 1,
    "ServiceUnreachable": 1,
}


class PlainAlerts:
    """The expressions of ``alerts.yml`` at the time of each scrape; those about CUDA are left out."""

    def __init__(self, scrapes: Scrapes, speed_up: int = 1):
        self.scrapes, self.speed_up = scrapes, speed_up

    def alerts(self, start_s: float, end_s: float, state: str = "firing") -> dict[str, list[float]]:
        """The times of scrapes from ``start_s`` to ``end_s`` at which each alert was in ``state``, by name."""
        found = {}
        for alert, true_at in self._conditions().items():
            firing = held_for(true_at, HELD_MINUTES.get(alert, 0) * MINUTE_S / self.speed_up)
            times = firing if state == "firing" else sorted({at_s for at_s, true in true_at if true} - set(firing))
            if inside := [at_s for at_s in times if start_s <= at_s <= end_s]:
                found[alert] = inside
        return found

    def _conditions(self) -> dict[str, list[tuple[float, bool]]]:
        scrapes = self.scrapes.so_far()
        points = scrapes.points
        used, total, up = points("gpu_memory_used_bytes"), points("gpu_memory_total_bytes"), points("engine_up")
        room = dict(total)

        def grew(name: str, minutes: int, **labels: str) -> list[tuple[float, float]]:
            counter = points(name, **labels)
            return [(at_s, increase(counter, at_s, minutes * MINUTE_S / self.speed_up)) for at_s, _ in counter]

        def line_crosses(at_s: float, minutes: int) -> bool:
            ahead = predict_linear(used, at_s, minutes * MINUTE_S / self.speed_up, HORIZON_S / self.speed_up)
            return ahead is not None and ahead > room[at_s]

        asked = dict(grew("inference_requests_total", 5))
        tokens = dict(grew("time_per_output_token_seconds_count", 5))
        refused = {
            outcome: grew("inference_requests_total", 5, outcome=outcome) for outcome in ("never_fits", "queue_full")
        }
        reached = [(at_s, False) for at_s, _ in up] + [(at_s, True) for at_s in scrapes.failed_s]
        return {
            "GpuMemoryHigh": [(at_s, value / room[at_s] > 0.85) for at_s, value in used],
            "GpuMemoryExhaustionAhead": [(at_s, line_crosses(at_s, 5) and line_crosses(at_s, 2)) for at_s, _ in used],
            "RequestsNeverFit": [(at_s, value > 0.01 * asked[at_s]) for at_s, value in refused["never_fits"]],
            "QueueFull": [(at_s, value > 0.05 * asked[at_s]) for at_s, value in refused["queue_full"]],
            "PromptsOutgrowWindow": [
                (at_s, value > 2 * tokens[at_s]) for at_s, value in grew("kv_cache_evictions_total", 5)
            ],
            "InferenceOutOfMemory": [(at_s, value > 0) for at_s, value in grew("inference_requests_oom_total", 5)],
            "EngineRestarted": [(at_s, value > 0) for at_s, value in grew("engine_restarts_total", 5)],
            "EngineDown": [(at_s, value == 0) for at_s, value in up],
            "ServiceUnreachable": sorted(reached),
        }
