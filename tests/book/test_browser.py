"""Opened in a browser, every page keeps to this host, raises no error and can be read in light, dark and on a phone."""

from __future__ import annotations

import pytest
from browsing import in_a_browser
from pages import pages_in_toc
from sample import ROOT
from visit import MODES, OTHER_WIDTHS, Visit, appears, visit

pytestmark = pytest.mark.book


@pytest.fixture(scope="module", params=sorted(pages_in_toc(ROOT)))
def seen(request, book, server) -> Visit:
    return in_a_browser(visit, server, f"{request.param}.html")


def test_nothing_is_asked_of_another_host(seen):
    assert seen.remote == []


def test_the_console_shows_no_error(seen):
    assert seen.errors == []


def test_axe_finds_nothing_in_any_mode(seen):
    assert seen.violations == {mode: [] for mode in MODES}


def test_the_page_never_scrolls_sideways(seen):
    assert seen.width == MODES
    assert seen.other_widths == list(OTHER_WIDTHS)


def test_the_theme_follows_the_reader(seen):
    assert seen.theme == {"light": "light", "dark": "dark", "phone": "light"}


def test_formulas_can_be_heard(server):
    assert in_a_browser(appears, server, "book/plan.html", "mjx-container mjx-assistive-mml")


def test_search_finds_fragmentation(server):
    found = "#search-results a[href*='03-contributing-factors.html']"
    assert in_a_browser(appears, server, "search.html?q=fragmentation", found)
