"""One engine process: started with the budget's malloc settings, spoken to over a socket pair."""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

from kvlab.budget import MALLOC_ENVIRONMENT
from kvlab.meter import BudgetUnavailable

from .messages import Command
from .settings import EngineSettings


class EngineProcess:
    """Starts at once. Its log is this process's stderr; it ends when this process does, however that ends."""

    def __init__(self, settings: EngineSettings):
        if sys.platform != "linux":
            raise BudgetUnavailable("the engine needs Linux; run the service in a Linux container")
        self.connection, theirs = Pipe(duplex=True)
        package_parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "kvlab.service.engine_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_WAIT_POLICY": "passive", **os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,  # a Ctrl-C in the terminal is the front's to answer
            )
        self.pid = self._child.pid
        self._commands: queue.SimpleQueue[EngineSettings | Command | None] = queue.SimpleQueue()
        self._commands.put(settings)
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()

    def send(self, command: Command) -> None:
        """Never waits; whether the process still hears it shows in its reports."""
        self._commands.put(command)

    def _write(self) -> None:
        """Hand commands on, in a thread: an engine that hangs reads nothing, and the event loop must not wait."""
        with self.connection:
            for command in iter(self._commands.get, None):
                with contextlib.suppress(OSError):
                    self.connection.send(command)

    def reports(self) -> Iterator[tuple[str, object]]:
        """What the engine says, until it is gone."""
        try:
            while True:
                yield pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout_s: float = 10.0) -> int:
        """Wait for the process, which is over or about to be; kill it if it is not. Returns its exit code."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def end(self) -> int:
        """Wait, and close the connection: for whoever read the reports to their end."""
        try:
            return self.wait()
        finally:
            self._commands.put(None)
