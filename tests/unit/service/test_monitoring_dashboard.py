"""The dashboard asks only for what is there, in units, and says what each panel means."""

from __future__ import annotations

import json

import pytest
import yaml
from prometheus_at_hand import needs_promtool, promtool
from promql import metrics_in
from service_metrics import EXPORTED

from kvlab.service.monitoring import monitoring_files

FILES = monitoring_files()
DASHBOARD = json.loads(FILES["dashboard.json"])
RECORDED = {rule["record"] for group in yaml.safe_load(FILES["recording.yml"])["groups"] for rule in group["rules"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
KNOWN = EXPORTED | RECORDED | {"ALERTS"}

# The unit ids of Grafana's value formats that the panels use.
UNITS = {"none", "s", "bytes", "percentunit", "reqps", "cps"}


def titles(panel: dict) -> str:
    return panel["title"]


def expressions(panel: dict) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_every_panel_has_a_unit_a_sentence_and_a_query_of_metrics_that_exist(panel):
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["description"].endswith(".")
    assert expressions(panel)
    for expression in expressions(panel):
        assert metrics_in(expression)
        assert metrics_in(expression) <= KNOWN


def test_a_panel_about_a_metric_that_nobody_makes_would_be_found():
    assert not metrics_in(expressions(PANELS[0])[0].replace("engine_up", "engine_awake")) <= KNOWN


def test_every_metric_of_the_service_is_on_the_dashboard_or_in_a_rule_that_is():
    shown = {metric for panel in PANELS for expression in expressions(panel) for metric in metrics_in(expression)}
    rules = {
        rule["record"]: rule["expr"]
        for group in yaml.safe_load(FILES["recording.yml"])["groups"]
        for rule in group["rules"]
    }
    for _ in rules:
        shown |= {metric for name in shown & rules.keys() for metric in metrics_in(rules[name])}
    absent = {metric for metric in EXPORTED - shown if not metric.endswith(("_sum", "_count"))}
    assert not absent


@needs_promtool
def test_promtool_reads_every_expression(tmp_path):
    rules = [
        {"record": f"panel_{panel['id']}_{number}", "expr": expression}
        for panel in PANELS
        for number, expression in enumerate(expressions(panel))
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", "panels.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_lie_in_the_grid_of_24_columns_and_do_not_overlap():
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own


def test_panels_have_their_own_numbers_and_one_source_that_the_reader_chooses():
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert {json.dumps(panel["datasource"]) for panel in PANELS} == {'{"type": "prometheus", "uid": "${datasource}"}'}
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    for panel in PANELS:
        for target in panel["targets"]:
            assert 'job="$job"' in target["expr"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
