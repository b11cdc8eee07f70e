"""Each alert fires in one story and is silent in another, says promtool; with its threshold moved, one goes red."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prometheus_at_hand import needs_promtool, promtool
from promql import metrics_in
from service_metrics import EXPORTED

from kvlab.service.monitoring import monitoring_files, write_monitoring

FILES = monitoring_files()


def rules_of(name: str, kind: str) -> list[dict]:
    groups = yaml.safe_load(FILES[name])["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


RECORDED = {rule["record"]: rule for rule in rules_of("recording.yml", "record")}
ALERTS = {rule["alert"]: rule for rule in rules_of("alerts.yml", "alert")}


@pytest.fixture(scope="module")
def stories(repository: Path) -> dict:
    return yaml.safe_load((repository / "tests" / "data" / "monitoring" / "alerts_test.yml").read_text())


def played(folder: Path, stories: dict, about: str = "") -> bool:
    """Whether promtool finds the rules in ``folder`` to do what the stories (``about`` one alert) say."""
    chosen = [story for story in stories["tests"] if story["name"].startswith(about)]
    (folder / "stories.yml").write_text(yaml.safe_dump(stories | {"tests": chosen}))
    done = promtool("test", "rules", "stories.yml", cwd=folder)
    assert done.returncode == 0 or "FAILED" in done.stdout + done.stderr, done
    return done.returncode == 0


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules(tmp_path):
    write_monitoring(tmp_path)
    for command in (["config", "prometheus.yml"], ["rules", "recording.yml", "alerts.yml"]):
        done = promtool("check", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_them_sped_up(tmp_path):
    write_monitoring(tmp_path, speed_up=60)
    done = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_story_ends_as_it_should(tmp_path, stories):
    write_monitoring(tmp_path)
    assert played(tmp_path, stories)


def test_every_alert_has_a_story_in_which_it_fires_and_one_in_which_it_is_silent(stories):
    for alert in ALERTS:
        names = [story["name"] for story in stories["tests"] if story["name"].startswith(alert)]
        assert any(name.startswith(f"{alert} fires") for name in names), alert
        assert any(name.startswith(f"{alert} stays silent") for name in names), alert


MOVED = {
    "GpuMemoryHigh": [("> 0.85", ">= 0.85"), ("> 0.85", "> 0.9")],
    "GpuMemoryExhaustionAhead": [(", 1800)", ", 600)"), (", 1800)", ", 999999)"), ("for: 3m", "for: 1m")],
    "RequestsNeverFit": [("> 0.01", "> 0.2"), ("> 0.01", ">= 0")],
    "QueueFull": [("> 0.05", "> 0.1"), ("> 0.05", "> 0.005")],
    "PromptsOutgrowWindow": [("> 2", "> 6"), ("> 2", "> 0.5")],
    "InferenceOutOfMemory": [
        ("oom_total[5m]) > 0", "oom_total[5m]) > 2"),
        ("oom_total[5m]) > 0", "oom_total[5m]) >= 0"),
    ],
    "EngineRestarted": [
        ("restarts_total[5m]) > 0", "restarts_total[5m]) > 2"),
        ("restarts_total[5m]) > 0", "restarts_total[5m]) >= 0"),
    ],
    "EngineDown": [
        ("engine_up == 0\n        for: 1m", "engine_up == 0\n        for: 5m"),
        ("engine_up == 0\n        for: 1m", "engine_up == 0"),
    ],
    "ServiceUnreachable": [('{job="kvlab"} == 0', '{job="kvlab"} == 2'), ('up{job="kvlab"} == 0', "up == 0")],
    "CudaAllocatorRetries": [
        ("retries_total[5m]) > 0", "retries_total[5m]) > 99"),
        ("retries_total[5m]) > 0\n        for: 5m", "retries_total[5m]) > 0"),
    ],
}


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "old", "new"), [(alert, *change) for alert, moved in MOVED.items() for change in moved]
)
def test_its_stories_notice_when_an_alert_is_changed(tmp_path, stories, alert, old, new):
    write_monitoring(tmp_path)
    text = (tmp_path / "alerts.yml").read_text()
    assert old in text
    (tmp_path / "alerts.yml").write_text(text.replace(old, new))
    assert not played(tmp_path, stories, about=alert)


def test_every_alert_is_among_those_that_were_moved():
    assert MOVED.keys() == ALERTS.keys()


@pytest.mark.parametrize(
    "rule", [*RECORDED.values(), *ALERTS.values()], ids=lambda rule: rule.get("record") or rule["alert"]
)
def test_every_rule_reads_only_metrics_that_the_service_or_another_rule_makes(rule):
    assert metrics_in(rule["expr"]) <= EXPORTED | RECORDED.keys() | {"up"}


def test_the_rate_that_the_article_asks_for_is_a_rule_over_a_counter():
    assert metrics_in(RECORDED["kv_cache_eviction_rate"]["expr"]) == {"kv_cache_evictions_total"}


def test_a_metric_that_nobody_makes_would_be_found():
    expression = (
        'sum by (job) (rate(kv_cache_evictions_total{a="b"}[5m] offset 5m)) / on (job) nobody_makes_this > bool 0.5'
    )
    assert metrics_in(expression) == {"kv_cache_evictions_total", "nobody_makes_this"}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_says_how_urgent_it_is_and_what_happened(alert):
    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description", "runbook_url"} == ALERTS[alert]["annotations"].keys()
