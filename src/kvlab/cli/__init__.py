"""The command line: ``kvlab VERB``. Thin: it reads arguments, calls the package and prints; the work is elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from kvlab.cli import bench, labs, memory, model, monitoring, nsys, serve, watch  # noqa: F401  (each adds its verbs)
from kvlab.cli.base import app
from kvlab.errors import KvlabError
from kvlab.printable import printable

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line: exit 0 on success, 1 when a lab or a claim is red, 2 on bad input, in one line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; print(file=None) would take the other for it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (it lives as long as the process)
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0
        sys.stdout.flush()
        if status == INTERRUPTED:  # typer's answer to KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(status)
    except (KvlabError, TyperException) as error:
        _refuse(error.format_message() if hasattr(error, "format_message") else str(error))
    except (BrokenPipeError, SystemExit) as end:  # the reader had enough, as `head` does: typer makes that exit 1
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except UnicodeEncodeError as error:
        _refuse(f"the output cannot be written as {error.encoding}: set PYTHONUTF8=1")
    except OSError as error:
        _refuse(f"{error.filename or 'the output cannot be written'}: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        print("kvlab: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _refuse(message: str) -> NoReturn:
    print(f"kvlab: {printable(' '.join(message.split()))}", file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush at exit
    sys.exit(2)
