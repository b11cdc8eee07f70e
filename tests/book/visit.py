"""Opens pages as readers do, in light, in dark and on a phone, and notes what goes wrong there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, TimeoutError

Server = str
MODES = {"light": 1280, "dark": 1280, "phone": 320}
"""Width of the window in pixels. A phone shows the light theme."""
OTHER_WIDTHS = (480, 768, 1024, 1440)
"""Only tried for what sticks out: the theme moves its columns at some of them."""

_COLOUR_RULES = ["color-contrast", "link-in-text-block"]
_RULES = {
    "light": {},
    "dark": {"runOnly": {"type": "rule", "values": _COLOUR_RULES}},
    "phone": {"rules": {rule: {"enabled": False} for rule in _COLOUR_RULES}},
}
"""The dark theme changes colours and nothing else, the phone everything but colours; contrast is slow to check."""
_AXE = {"resultTypes": ["violations"], "preload": False}
"""Preloading makes axe itself ask for style sheets where there are none, which looks like an error of the page."""

_OPEN_EVERYTHING = """() => {
  document.querySelectorAll("details").forEach(details => details.open = true);
  document.querySelectorAll("button.toggle-button-hidden").forEach(button => button.click());
  document.querySelectorAll(".sd-tab-set > input:last-of-type").forEach(tab => tab.click());
}"""
_ONE_TOKEN_OF_A_LOOK = """() => {
  const seen = new Set();
  for (const token of document.querySelectorAll(".highlight span:not(:has(*))")) {
    let look = "";
    for (let at = token; at; at = at.parentElement) look += at.localName + at.className + "/";
    if (seen.has(look)) token.replaceWith(token.textContent);
    seen.add(look);
  }
}"""
"""Contrast is checked element by element, and a lab has thousands of coloured words of code: four fifths of the time
went into finding the same thirty colours again. A word that looks as one before it becomes plain text."""
_SETTLED = "() => window.MathJax?.startup?.promise"
_PAINTED = """() => new Promise(done => {
  requestAnimationFrame(() => requestAnimationFrame(done));
  setTimeout(done, 2000);
})"""
"""A browser without a screen may stop drawing; what is looked at here needs a layout and no frame."""
_POLL_MS = 50
_STILL = """() => document.getAnimations().every(
  each => each.playState !== "running" || each.effect?.getComputedTiming().endTime === Infinity)"""
"""A cell that is still fading in has too little contrast for an instant."""
_REACHABLE = """() => [...document.querySelectorAll(
    "pre, .output, .pst-scrollable-table-container, mjx-container[display]")].every(
  region => region.scrollWidth <= region.clientWidth || region.tabIndex >= 0)"""
_PATIENCE_MS = 60_000
"""The theme makes scrolling regions reachable by keyboard some time after loading and resizing, not at once; and a busy
machine takes its time for everything. Three times this, once a mode, is less than a look may take."""


@dataclass
class Visit:
    """What one page did in every mode."""

    remote: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    violations: dict[str, list[dict]] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=dict)
    other_widths: list[int] = field(default_factory=list)
    theme: dict[str, str] = field(default_factory=dict)

    def rules(self) -> set[str]:
        """Rules of axe that were broken in any mode."""
        return {violation["id"] for found in self.violations.values() for violation in found}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(html: Path) -> Iterator[Server]:
    """``html`` on a free port of this machine; its address ends in a slash."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(html))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def visit(browser: Browser, server: Server, path: str) -> Visit:
    """Load ``path`` once and look at it in every mode with everything unfolded."""
    seen = Visit()
    page = _new_page(browser, color_scheme="light", reduced_motion="reduce")
    page.on("request", lambda request: _note_remote(seen, request.url, server))
    page.on("console", lambda message: message.type == "error" and seen.errors.append(message.text))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.goto(server + path)
    page.evaluate(_SETTLED)
    page.evaluate(_OPEN_EVERYTHING)
    page.evaluate(_ONE_TOKEN_OF_A_LOOK)
    for mode in MODES:
        _look(page, mode, seen)
    for width in OTHER_WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate(_PAINTED)
        seen.other_widths.append(page.evaluate("document.documentElement.scrollWidth"))
    return seen


def appears(browser: Browser, server: Server, path: str, selector: str) -> bool:
    """Whether ``path`` comes to hold an element that matches ``selector``."""
    page = _new_page(browser)
    page.goto(server + path)
    with suppress(TimeoutError):
        page.wait_for_selector(selector, state="attached")
        return True
    return False


def _new_page(browser: Browser, **options: str) -> Page:
    """A page of its own context, which is as patient as everything here."""
    page = browser.new_page(**options)
    page.set_default_timeout(_PATIENCE_MS)
    return page


def _look(page: Page, mode: str, seen: Visit) -> None:
    page.emulate_media(color_scheme="dark" if mode == "dark" else "light")
    page.set_viewport_size({"width": MODES[mode], "height": 800})
    page.evaluate(_PAINTED)
    page.wait_for_function(_STILL, polling=_POLL_MS)
    with suppress(TimeoutError):  # axe will say which region it is
        page.wait_for_function(_REACHABLE, polling=_POLL_MS)
    seen.theme[mode] = page.evaluate("document.documentElement.dataset.theme")
    seen.width[mode] = page.evaluate("document.documentElement.scrollWidth")
    seen.violations[mode] = Axe().run(page, options=_AXE | _RULES[mode]).response["violations"]


def _note_remote(seen: Visit, url: str, server: Server) -> None:
    if not url.startswith((server, "data:", "blob:")):
        seen.remote.append(url)
