"""A look at a page takes place in a process and a Chromium of its own, which end with it whatever they do.

No limit of Playwright's reaches a script in a page that never answers, and a whole run of the suite was once lost to
one. A browser that crashes or falls silent says nothing about the book, so another one is asked, once.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import greenlet
import psutil
import pytest
from playwright.sync_api import sync_playwright

Seen = TypeVar("Seen")
PATIENCE_S = 300.0
"""For one look. The largest page takes 30 s where the machine is slow."""
_TRIES = 2
_LAUNCH_MS = 120_000
_CLOSING_S = 10.0
_STACK_AT = 0.8
"""The part of its time after which a look that is not done writes down where it stands."""


def in_a_browser(look: Callable[..., Seen], *arguments: object, patience_s: float = PATIENCE_S) -> Seen:
    """``look(browser, *arguments)``; fails with what each browser did when none comes to an end of it.

    ``look`` is a function of a module and, like what it takes and gives, can be pickled. The test is skipped where
    there is no Chromium.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    troubles = []
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            seen, trouble = _one_try(chromium, look, arguments, patience_s, Path(folder))
        if trouble is None:
            return seen
        troubles.append(trouble)
    pytest.fail(f"{_TRIES} browsers, one after the other, did not get through {arguments}:\n" + "\n".join(troubles))


def _one_try(
    chromium: str, look: Callable[..., Seen], arguments: tuple, patience_s: float, folder: Path
) -> tuple[Seen | None, str | None]:
    """What was seen, or else what went wrong."""
    fresh = multiprocessing.get_context("spawn")
    receiver, sender = fresh.Pipe(duplex=False)
    looking = fresh.Process(target=_look, args=(sender, chromium, look, arguments, patience_s * _STACK_AT, folder))
    looking.start()
    sender.close()
    try:
        if not receiver.poll(patience_s):
            return None, f"Nothing after {patience_s:.0f} s; it stood here:\n{_read_stack(folder)}"
        answer = receiver.recv()
        looking.join(_CLOSING_S)
        return answer
    except EOFError:
        looking.join(_CLOSING_S)
        return None, f"The process that looked ended without a word, exit code {looking.exitcode}."
    finally:
        receiver.close()
        _end(looking.pid)
        looking.join()


def _look(
    sender: Connection, chromium: str, look: Callable, arguments: tuple, stack_after_s: float, folder: Path
) -> None:
    """The process: one browser, one look, one answer. What Chromium keeps lies in ``folder``."""
    os.environ["TMPDIR"] = str(folder)
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    quiet += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # at once, whatever the network does
    late = threading.Timer(stack_after_s, _write_stack, (folder, greenlet.getcurrent()))
    late.daemon = True
    late.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=quiet, timeout=_LAUNCH_MS)
            sender.send((look(browser, *arguments), None))
            browser.close()
    except Exception:
        sender.send((None, traceback.format_exc()))


def _write_stack(folder: Path, looking: greenlet.greenlet) -> None:
    """While Playwright waits, the look is a greenlet that rests, which no stack of a thread shows."""
    frame = looking.gr_frame or sys._current_frames()[threading.main_thread().ident]
    _stack(folder).write_text("".join(traceback.format_stack(frame)))


def _end(process: int | None) -> None:
    """Kill ``process`` and all that came of it: Chromium has a group of its own and may not hear that it is left."""
    try:
        root = psutil.Process(process)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue


def _stack(folder: Path) -> Path:
    return folder / "stack"


def _read_stack(folder: Path) -> str:
    return _stack(folder).read_text() if _stack(folder).exists() else "(it had not begun)"
