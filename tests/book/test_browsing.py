"""A browser that does not answer costs its time and no more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from browsing import in_a_browser
from playwright.sync_api import Browser
from visit import MODES, serve, visit

pytestmark = pytest.mark.book

SILENT = "<!doctype html><script>MathJax = {startup: {promise: new Promise(() => {})}}</script>"
"""Formulas that are never set: a script that waits for them waits for good."""
UNDRAWN = "<!doctype html><html lang=en><title>Undrawn</title><script>requestAnimationFrame = () => {}</script>"
"""No frame is ever announced."""
PATIENCE_S = 15.0


def holding(folder: Path, page: str) -> Path:
    (folder / "page.html").write_text(page)
    return folder


def once(browser: Browser, mark: str, how: str) -> str:
    """Does not come to an end before ``mark`` is there, which it makes."""
    if Path(mark).exists():
        return browser.version
    Path(mark).touch()
    if how == "dies":
        os._exit(3)
    browser.new_page().evaluate("() => new Promise(() => {})")
    return "it answered"


@pytest.fixture
def left_open(monkeypatch) -> Iterator[Callable[[], list[str]]]:
    """Asks for the processes, whoever's children they are by now, that keep their things where browsers do here."""
    with tempfile.TemporaryDirectory() as folder:  # a short path: Chromium makes a socket in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: [each for each in commands() if folder in each]


def commands() -> list[str]:
    return [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]


def test_a_page_that_never_answers_is_red_in_time_says_where_it_stood_and_leaves_no_browser(tmp_path, left_open):
    with serve(holding(tmp_path, SILENT)) as server, pytest.raises(pytest.fail.Exception) as failed:
        in_a_browser(visit, server, "page.html", patience_s=PATIENCE_S)
    assert str(failed.value).startswith("2 browsers, one after the other, did not get through")
    assert str(failed.value).count("in visit\n") == 2
    assert left_open() == []


def test_a_browser_that_stops_drawing_is_no_reason_to_wait(tmp_path):
    with serve(holding(tmp_path, UNDRAWN)) as server:
        seen = in_a_browser(visit, server, "page.html")
    assert seen.width == MODES


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_browser_that_fails_once_is_followed_by_another(tmp_path, how, left_open):
    assert in_a_browser(once, str(tmp_path / "mark"), how, patience_s=PATIENCE_S)[0].isdigit()
    assert left_open() == []


def test_what_goes_wrong_in_a_look_is_told():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)Page.goto: net::ERR_.*Page.goto: net::ERR_"):
        in_a_browser(visit, "http://127.0.0.1:1/", "page.html")
