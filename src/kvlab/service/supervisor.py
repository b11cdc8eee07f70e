"""Keeps an engine running: passes on what it says, and starts another when it has ended."""

import asyncio
import logging
import signal
import threading
from typing import Protocol

from .messages import Command, Ready, Refused, Round, Stop
from .process import EngineProcess
from .settings import EngineSettings

log = logging.getLogger("kvlab.service")

MOST_FAILED_STARTS = 3


class Listener(Protocol):
    """Who hears about the engine, always in the event loop's thread."""

    def engine_ready(self, ready: Ready) -> None: ...

    def engine_refused(self, message: str) -> None: ...

    def engine_said(self, round: Round) -> None: ...

    def engine_lost(self, *, was_ready: bool) -> None: ...


class Supervisor:
    """``start()`` in the event loop. A thread for each engine waits for its words."""

    def __init__(self, settings: EngineSettings, engine: EngineProcess | None = None):
        self.settings = settings
        self.engine = engine or EngineProcess(settings)
        self._ready = self._stopping = False
        self._failed_starts = 0

    def start(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._read(self.engine)

    def send(self, command: Command) -> None:
        """Tell the engine; if it is gone, everybody hears of that soon enough."""
        try:
            self.engine.send(command)
        except OSError:
            log.info("the engine is gone before it heard of %s", type(command).__name__)

    async def stop(self) -> None:
        """Let the engine finish and end; one that is still loading has nothing to finish."""
        self._stopping = True
        if self._ready:
            self.send(Stop())
        else:
            self.engine.kill()
        await asyncio.to_thread(self.engine.end)

    def _read(self, engine: EngineProcess) -> None:
        def read() -> None:
            for kind, content in engine.reports():
                self._loop.call_soon_threadsafe(self._take, kind, content)
            code = engine.end()
            self._loop.call_soon_threadsafe(self._ended, code)

        threading.Thread(target=read, name="engine-reader", daemon=True).start()

    def _take(self, kind: str, content: object) -> None:
        match kind, content:
            case "ready", Ready():
                self._ready, self._failed_starts = True, 0
                self._listener.engine_ready(content)
            case "round", Round():
                self._listener.engine_said(content)
            case "refused", Refused():
                self._stopping = True
                self._listener.engine_refused(content.message)

    def _ended(self, code: int) -> None:
        if self._stopping:
            return
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        log.error("the engine (pid %d) has ended: %s", self.engine.pid, how)
        was_ready, self._ready = self._ready, False
        self._failed_starts += not was_ready
        self._listener.engine_lost(was_ready=was_ready)
        if self._failed_starts == MOST_FAILED_STARTS:
            self._stopping = True
            self._listener.engine_refused(f"{MOST_FAILED_STARTS} engines in a row ended before they served: {how}")
        else:
            self._loop.call_later(self._failed_starts, self._restart)

    def _restart(self) -> None:
        if not self._stopping:
            self.engine = EngineProcess(self.settings)
            log.info("engine restarted, pid %d", self.engine.pid)
            self._read(self.engine)
