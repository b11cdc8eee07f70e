"""A program below nsys: signals reach it and not nsys, and it does not outlive nsys."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

PATIENCE = 2  # signals that the program may answer as it likes
ENDS_S = 5.0

NOTING = """
folder=$1; shift
trap : HUP INT TERM
/bin/sh -c 'echo $$ > "$0/process"; [ ! -e "$0/signal" ] || kill -"$(cat "$0/signal")" $$; exec "$@"' "$folder" "$@"
echo $? > "$folder/status"
"""
"""A shell's lines around the program: they note its process and its status, whatever nsys makes of that, and a signal
that came before it began ends it there."""


def noting(folder: Path, program: list[str]) -> list[str]:
    """The command that nsys is to run for ``program``; ``folder`` is the relay's."""
    return ["/bin/sh", "-c", NOTING, "sh", str(folder), *program]


class Relay:
    """Runs nsys and, below it, a program that gets the signals while the ``with`` block lasts.

    nsys 2022.4 dies of a hangup or a second SIGTERM at once, without a report, and leaves its program running; of one
    SIGTERM it writes the report, but leaves a program that pays no heed. So nsys has a session of its own, in which no
    terminal and no ``timeout`` finds it, and a signal goes to the program alone, with its group if it has one. nsys
    sees its program end and writes the report. The third signal is SIGKILL.

    A signal that is ignored, as under nohup, stays so. Outside the main thread no signal can be handled.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nsys: subprocess.Popen | None = None
        self._received = 0
        self._is_over = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._former[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def run(self, command: list[str], stdout: int | None) -> int:
        """The exit status of ``command``: nsys around :func:`noting`. After it a signal is KeyboardInterrupt."""
        with subprocess.Popen(command, stdout=stdout, start_new_session=bool(self._former)) as self._nsys:
            ended = self._nsys.wait()
        self._end_what_is_left()
        self._is_over = True
        return ended

    @property
    def program_status(self) -> int | None:
        """The exit status of the program, as a shell tells it; None if that could not be noted."""
        noted = self._noted("status")
        return 128 + signal.SIGKILL if noted is None and self._received > PATIENCE else noted

    def _pass_on(self, number: int, _: object) -> None:
        if self._is_over:
            raise KeyboardInterrupt
        self._received += 1
        if self._received > PATIENCE:
            number = signal.SIGKILL
        # Written, then looked: the shell looks after it has written. So one of the two sees the other. By renaming, or
        # the shell may find it empty.
        with contextlib.suppress(OSError):
            (self._folder / "signal.new").write_text(f"{number:d}")
            (self._folder / "signal.new").replace(self._folder / "signal")
        if not self._send(number) and number == signal.SIGKILL and self._nsys:
            self._nsys.kill()

    def _send(self, number: int) -> bool:
        """Whether there was a program to send to."""
        process = self._noted("process")
        if process is None or self._noted("status") is not None:
            return False
        try:
            group = os.getpgid(process)
            is_with_nsys = self._nsys and self._nsys.returncode is None and group == self._nsys.pid
            if is_with_nsys or group == os.getpgrp():
                os.kill(process, number)
            else:
                os.killpg(group, number)
        except OSError:  # it has ended, or is another user's
            return False
        return True

    def _end_what_is_left(self) -> None:
        """A program whose nsys died, or left it running."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            stop_s = time.monotonic() + ENDS_S
            is_left = self._send(number)
            while is_left and time.monotonic() < stop_s:
                time.sleep(0.05)
                is_left = self._send(0)
            if not is_left:
                return

    def _noted(self, name: str) -> int | None:
        try:
            return int((self._folder / name).read_text())
        except (OSError, ValueError):  # not there yet, or not yet written
            return None
