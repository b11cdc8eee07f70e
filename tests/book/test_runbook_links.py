"""In the built book, the fragment of each alert's link is an anchor of the runbook's page."""

from __future__ import annotations

import json
from urllib.parse import urldefrag

import pytest
import yaml
from pages import soup

from kvlab.service.monitoring import monitoring_files

pytestmark = pytest.mark.book


def test_every_alert_links_to_an_anchor_of_the_built_page(book):
    texts = monitoring_files()
    rules = [rule for group in yaml.safe_load(texts["alerts.yml"])["groups"] for rule in group["rules"]]
    links = [rule["annotations"]["runbook_url"] for rule in rules]
    links += [link["url"] for link in json.loads(texts["dashboard.json"])["links"]]
    anchors = {tag["id"] for tag in soup(book.html, "book/runbook").find_all(id=True)}
    assert {urldefrag(link).fragment for link in links} <= anchors
