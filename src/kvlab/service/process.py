"""One engine process: started with the budget's malloc settings, spoken to over a socket pair."""

import os
import pickle
import subprocess
import sys
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
        self.connection.send(settings)

    def send(self, command: Command) -> None:
        """Raises OSError if the process is gone."""
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

    def end(self, timeout_s: float = 10.0) -> int:
        """Wait for the process, which is over or about to be; kill it if it is not. Returns its exit code."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()
        finally:
            self.connection.close()
