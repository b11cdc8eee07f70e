"""Keeps an engine running: passes on what it says, and starts another when it has ended or says nothing any more."""

import asyncio
import logging
import signal
import threading
import time
from typing import Protocol

from .messages import Command, Ready, Refused, Round, Stop
from .process import EngineProcess
from .settings import EngineSettings

log = logging.getLogger("kvlab.service")

MOST_FAILED_STARTS = 3
LONG_LIFE_S = 60.0  # an engine that served so long is no part of a loop of restarts
MOST_DOUBLINGS = 5  # of the pause before a restart: half a minute


class Listener(Protocol):
    """Who hears about the engine, always in the event loop's thread."""

    def engine_ready(self, ready: Ready) -> None: ...

    def engine_refused(self, message: str) -> None: ...

    def engine_said(self, round: Round) -> None: ...

    def engine_lost(self, *, was_ready: bool) -> None: ...


class Supervisor:
    """``start()`` in the event loop. A thread for each engine waits for its words.

    ``timeout_s``: a serving engine that says nothing for so long hangs, and is killed. Every step is a word, and so is
    every second without work.
    """

    def __init__(self, settings: EngineSettings, timeout_s: float, engine: EngineProcess | None = None):
        self.settings, self.timeout_s = settings, timeout_s
        self.engine = engine or EngineProcess(settings)
        self._ready = self._stopping = False
        self._heard, self._silent_s = False, 0.0
        self._ready_since_s = 0.0
        self._lost = False  # what was with the engine, whose process may not have ended yet
        self._failed_starts = self._ends = 0  # in a row; of ends, those after a short life

    def start(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._read(self.engine)
        self._watch()

    def send(self, command: Command) -> None:
        """Tell the engine; if it is gone, everybody hears of that soon enough."""
        self.engine.send(command)

    async def stop(self) -> None:
        """Let the engine finish and end; one that is still loading has nothing to finish."""
        self._stopping = True
        if self._ready:
            self.send(Stop())
        else:
            self.engine.kill()
        await asyncio.to_thread(self.engine.wait)
        await asyncio.to_thread(self._reader.join)  # what it has to say, it says while there is a loop to hear it

    def _read(self, engine: EngineProcess) -> None:
        def read() -> None:
            for kind, content in engine.reports():
                self._heard = True
                self._loop.call_soon_threadsafe(self._take, kind, content)
            code = engine.end()
            self._loop.call_soon_threadsafe(self._ended, code)

        self._reader = threading.Thread(target=read, name="engine-reader", daemon=True)
        self._reader.start()

    def _take(self, kind: str, content: object) -> None:
        match kind, content:
            case "ready", Ready():
                self._ready, self._ready_since_s = True, time.monotonic()
                self._failed_starts, self._silent_s = 0, 0.0
                self._listener.engine_ready(content)
            case "round", Round() if self._ready:  # what it said before it was given up comes too late
                self._listener.engine_said(content)
            case "refused", Refused():
                self._stopping = True
                self._listener.engine_refused(content.message)

    def _watch(self) -> None:
        """Count silence in ticks, not by the clock: a front that was stopped itself must not blame the engine."""
        tick_s = min(1.0, self.timeout_s / 4)
        self._silent_s = 0.0 if self._heard else self._silent_s + tick_s
        self._heard = False
        if self._ready and self._silent_s >= self.timeout_s:
            log.error("the engine (pid %d) has said nothing for %.3g s: killed", self.engine.pid, self._silent_s)
            self.engine.kill()
            self._lose()  # now: a process that waits for its device may take its time to go
        self._loop.call_later(tick_s, self._watch)

    def _lose(self) -> None:
        """What was with the engine is lost."""
        was_ready, self._ready, self._lost = self._ready, False, True
        lived_long = was_ready and time.monotonic() - self._ready_since_s >= LONG_LIFE_S
        self._ends = 1 if lived_long else self._ends + 1
        self._failed_starts += not was_ready
        self._listener.engine_lost(was_ready=was_ready)

    def _ended(self, code: int) -> None:
        if self._stopping:
            return
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        log.error("the engine (pid %d) has ended: %s", self.engine.pid, how)
        if not self._lost:
            self._lose()
        if self._failed_starts == MOST_FAILED_STARTS:
            self._stopping = True
            self._listener.engine_refused(f"{MOST_FAILED_STARTS} engines in a row ended before they served: {how}")
        else:
            self._restart_later()

    def _restart_later(self) -> None:
        """At once after a long life; the shorter the lives, the longer the pauses."""
        self._loop.call_later(2 ** min(self._ends - 1, MOST_DOUBLINGS) - 1 + self._failed_starts, self._restart)

    def _restart(self) -> None:
        if self._stopping:
            return
        try:
            self.engine = EngineProcess(self.settings)
        except OSError as error:  # no descriptor or no memory is left, for now
            log.error("no new engine can be started: %s", error)
            self._ends += 1
            self._restart_later()
            return
        self._lost = False
        log.info("engine restarted, pid %d", self.engine.pid)
        self._read(self.engine)
