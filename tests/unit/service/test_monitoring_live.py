"""A real Prometheus scrapes a real service under load, with the project's own rules, and an alert is seen to fire."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import httpx
import pytest
from prometheus_at_hand import needs_prometheus, needs_promtool, promtool
from service_metrics import EXPORTED, ON_CUDA
from waiting import until

from kvlab.service.launch import parse_metrics, running
from kvlab.service.metrics import Metrics
from kvlab.service.monitoring import monitoring_files
from kvlab.service.monitoring.clients import Stream
from kvlab.service.monitoring.plain import PlainAlerts
from kvlab.service.monitoring.prometheus import run_prometheus
from kvlab.service.monitoring.scrapes import scraping
from kvlab.service.tiny import save_tiny_model

SPEED_UP = 12  # a scrape comes every 0.4 s and may take as long; five seconds without one ring an alert


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A service with static buffers and no admission, short requests that are served, then one too long to hold."""
    tiny_model = str(save_tiny_model(tmp_path_factory.mktemp("tiny")))
    folder = tmp_path_factory.mktemp("prometheus")
    options = ("--policy", "static", "--max-total-tokens", "128", "--budget", "16MiB", "--no-admission")
    with (
        running("--model", tiny_model, "--device", "cpu", *options) as service,
        run_prometheus(folder, service.url.removeprefix("http://"), speed_up=SPEED_UP) as prometheus,
        scraping(service.url, 0.1) as scrapes,
    ):
        prometheus.wait_for("up == 1 and engine_up == 1")
        began_s = time.time()
        short = [Stream(service.url, tiny_model, [1] * 16, 8) for _ in range(4)]
        for client in short:
            client.join(120)
        prometheus.wait_for('sum(inference_requests_total{outcome="completed"}) == 4')
        quiet_until_s = time.time()
        long = Stream(service.url, tiny_model, [1] * 3000, 8)
        long.join(120)
        prometheus.wait_for('ALERTS{alertname="InferenceOutOfMemory", alertstate="firing"}')
        active = prometheus.active_alerts()
        until(lambda: scrapes.points("inference_requests_oom_total")[-1][1])
        yield SimpleNamespace(
            prometheus=prometheus,
            service=service,
            scrapes=scrapes,
            short=short,
            long=long,
            active=active,
            began_s=began_s,
            quiet_until_s=quiet_until_s,
        )


pytestmark = needs_prometheus


def test_the_alert_fires_through_prometheus_own_api_after_the_failure_and_not_before(watched):
    assert [client.outcome for client in watched.short] == ["completed"] * 4
    assert watched.long.outcome == "out_of_memory"
    fired = watched.prometheus.alerts(watched.began_s, time.time())
    assert fired["InferenceOutOfMemory"][0] >= watched.quiet_until_s
    assert "EngineRestarted" not in fired
    assert "ServiceUnreachable" not in fired


def test_prometheus_lists_the_alert_with_its_severity_and_its_link_to_the_runbook(watched):
    (alert,) = [a for a in watched.active if a["labels"]["alertname"] == "InferenceOutOfMemory"]
    assert alert["state"] == "firing"
    assert alert["labels"]["severity"] == "critical"
    assert alert["annotations"]["runbook_url"] == "runbook.html#inference-out-of-memory"


def test_our_own_scrapes_found_what_prometheus_found(watched):
    (series,) = watched.prometheus.wait_for("inference_requests_oom_total")  # one that was late left a gap
    assert watched.scrapes.points("inference_requests_oom_total")[-1][1] == series.points[0][1] == 1


def test_plain_python_over_our_own_scrapes_fires_the_same_alerts(watched):
    end_s = time.time()
    plain = PlainAlerts(watched.scrapes, SPEED_UP).alerts(watched.quiet_until_s, end_s)
    assert plain.keys() == watched.prometheus.alerts(watched.quiet_until_s, end_s).keys() == {"InferenceOutOfMemory"}


@needs_promtool
def test_promtool_finds_nothing_to_object_to_in_the_live_metrics(watched):
    done = promtool("check", "metrics", stdin=httpx.get(f"{watched.service.url}/metrics", timeout=120).text)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_service_exports_what_the_rules_and_the_dashboard_rely_on(watched):
    names = {name.partition("{")[0] for name in watched.service.metrics()}
    assert names >= EXPORTED - ON_CUDA


def test_on_cuda_it_would_export_the_rest():
    names = {name.partition("{")[0] for name in parse_metrics(Metrics(["a"], on_cuda=True).text().decode())}
    assert names >= EXPORTED - {"kv_cache_reserved_tokens"}


def test_prometheus_answers_every_query_of_the_dashboard(watched):
    dashboard = json.loads(monitoring_files(speed_up=SPEED_UP)["dashboard.json"])
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions = [target["expr"].replace("$job", "kvlab").replace("$instance", ".*") for target in targets]
    expected = (
        "ALERTS",
        "cuda_memory",
        "instance:gpu_memory_exhaustion:seconds",
        "kv_cache_evictions:per_output_token",
    )
    for expression in expressions:
        if not any(name in expression for name in expected):
            assert watched.prometheus.wait_for(expression)  # a scrape that was late leaves a gap
