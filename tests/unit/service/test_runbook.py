"""The runbook has the section that each alert links to, and none for an alert that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvlab.service.monitoring import monitoring_files

ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(monitoring_files()["alerts.yml"])["groups"]
    for rule in group["rules"]
}


@pytest.fixture(scope="module")
def sections(repository: Path) -> dict[str, tuple[str, str]]:
    """Label of each section: its heading and its text."""
    page = (repository / "book" / "runbook.md").read_text(encoding="utf-8")
    found = re.findall(r"^\(([\w-]+)\)=\n## (\w+)\n(.*?)(?=^\([\w-]+\)=|\Z)", page, re.MULTILINE | re.DOTALL)
    return {label: (heading, text) for label, heading, text in found}


@pytest.mark.parametrize("alert", ALERTS)
def test_the_link_of_an_alert_leads_to_its_own_section(sections, alert):
    page, _, label = ALERTS[alert]["annotations"]["runbook_url"].partition("#")
    assert page == "runbook.html"
    assert sections[label][0] == alert


def test_every_section_is_about_an_alert_and_says_what_it_means_what_to_look_at_and_what_to_do(sections):
    assert {heading for heading, _ in sections.values()} == ALERTS.keys()
    for _, text in sections.values():
        assert [text.count(part) for part in ("**Means.**", "**Look at.**", "**Do.**")] == [1, 1, 1]


def test_the_severity_in_the_runbooks_table_is_the_alerts_own(repository):
    page = (repository / "book" / "runbook.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (critical|warning|info) \| (.*?) \|", page, re.MULTILINE))
    told = {alert: severity for severity, cell in rows.items() for alert in re.findall(r"\[(\w+)\]", cell)}
    assert told == {alert: rule["labels"]["severity"] for alert, rule in ALERTS.items()}
