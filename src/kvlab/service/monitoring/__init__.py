"""What watches the service: Prometheus' configuration, rules and alerts, and a Grafana dashboard, as files."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from kvlab.errors import KvlabError

FILES = ("prometheus.yml", "recording.yml", "alerts.yml", "dashboard.json")
TARGET = "127.0.0.1:8000"
RUNBOOK = "runbook.html"

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"\b(\d+)(ms|s|m|h)\b")
_HORIZON = re.compile(r"(predict_linear\([^,]+, )(\d+)\)")


class MonitoringError(KvlabError):
    """The files cannot be written as asked."""


def monitoring_files(*, target: str = TARGET, runbook: str = RUNBOOK, speed_up: int = 1) -> dict[str, str]:
    """The text of each of :data:`FILES`.

    ``target``: HOST:PORT of the service. ``runbook``: address of the runbook's page, without the fragment that names
    the alert's section. ``speed_up`` divides every duration (intervals, windows, ``for``, horizon), so that an
    incident of seconds can be watched with rules made for hours; thresholds stay. MonitoringError for a value that
    would not survive in YAML.
    """
    _require(r"[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", target, "a target is HOST:PORT")
    _require(r"[^\s\"'#\\<>{}]+", runbook, "the runbook is one address without blanks, quotes, braces or a fragment")
    if speed_up < 1:
        raise MonitoringError(f"durations can be divided by 1 or more, not by {speed_up}")
    folder = files(__name__)
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
    texts["prometheus.yml"] = texts["prometheus.yml"].replace(TARGET, target)
    for name in ("alerts.yml", "dashboard.json"):
        texts[name] = texts[name].replace(f"{RUNBOOK}#", f"{runbook}#")
    return texts if speed_up == 1 else {name: _sped_up(text, speed_up) for name, text in texts.items()}


def write_monitoring(folder: Path, *, overwrite: bool = False, **options: str | int) -> list[Path]:
    """Write :func:`monitoring_files` into ``folder``, made if absent; returns the paths.

    A file that is there with other content is kept and the call refused, unless ``overwrite``; other files in the
    folder are not touched.
    """
    written = {folder / name: text for name, text in monitoring_files(**options).items()}
    folder.mkdir(parents=True, exist_ok=True)
    differing = [path.name for path, text in written.items() if path.exists() and not _holds(path, text)]
    if odd := [name for name in differing if not (folder / name).is_file()]:  # a FIFO would wait for ever
        raise MonitoringError(f"{folder} holds {', '.join(odd)}, which is no file: name another folder")
    if differing and not overwrite:
        raise MonitoringError(f"{folder} has its own {', '.join(differing)}: name another folder, or pass --force")
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


def _require(pattern: str, value: str, rule: str) -> None:
    if not re.fullmatch(pattern, value, re.ASCII) or not value.isprintable():
        raise MonitoringError(f"{rule}, not {value!r}")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _sped_up(text: str, factor: int) -> str:
    def shorter(match: re.Match) -> str:
        duration_ms = max(1, int(match[1]) * _UNIT_MS[match[2]] // factor)
        return f"{duration_ms}ms" if duration_ms % 1_000 else f"{duration_ms // 1_000}s"

    return _HORIZON.sub(lambda match: f"{match[1]}{int(match[2]) / factor:g})", _DURATION.sub(shorter, text))
