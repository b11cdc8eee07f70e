"""Prometheus' own tools, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)


def promtool(*arguments: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess:
    command = ["promtool", *arguments]
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=180)
