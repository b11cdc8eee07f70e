"""Run a program under Nsight Systems, where that is installed, and export what it recorded."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.profiling.nsys.export import REPORTS
from kvlab.profiling.nsys.relay import Relay, noting

HOW_TO_GET_IT = (
    "it comes with NVIDIA's CUDA Toolkit and as NVIDIA's own package nsight-systems (on Debian: component non-free); "
    "put it on PATH or give its path with --nsys"
)
RENAMED_REPORTS = (2021, 4)  # from here on NAME.nsys-rep, before NAME.qdrep
WANTED = ("--trace=cuda,nvtx,osrt", "--cuda-memory-usage=true", "--sample=none", "--cpuctxsw=none")
ENDED_BY_SIGNAL = 128  # plus the signal's number: the shell's own convention


class NsysError(KvlabError):
    """nsys is not there, or did not do its part; the message says what is missing."""


@dataclass(frozen=True)
class Profile:
    """What one run left behind. ``exit_status`` is the program's own: 0 to 255, or 128 and a signal's number."""

    report: Path
    export: Path
    exit_status: int


@dataclass(frozen=True)
class Nsys:
    """One installed nsys and its version, as (2024, 6, 2)."""

    path: Path
    version: tuple[int, ...]

    @classmethod
    def find(cls, given: Path | str | None = None) -> Nsys:
        """The program at ``given``, or on PATH; NsysError says where to get it."""
        # Absolute, or the ./nsys of this folder, which Path makes nsys of, would be looked for on PATH.
        found = shutil.which("nsys" if given is None else str(Path(given).absolute()))
        if found is None and given is not None:
            raise NsysError(f"no program at {given}: --nsys takes the path of nsys itself")
        if found is None:
            raise NsysError(f"nsys (NVIDIA Nsight Systems) is not installed here: {HOW_TO_GET_IT}")
        version = re.search(r"version (\d{4}(?:\.\d+)+)", _said([found, "--version"]))
        if version is None:
            raise NsysError(f"{found} does not say that it is NVIDIA Nsight Systems")
        return cls(Path(found), tuple(int(part) for part in version[1].split(".")))

    def report_of(self, output: Path) -> Path:
        return Path(f"{output}{'.nsys-rep' if self.version >= RENAMED_REPORTS else '.qdrep'}")

    def profile_command(self, output: Path, program: list[str]) -> list[str]:
        """CUDA calls, kernels, memory and NVTX; no CPU samples, which need rights that a container seldom has.

        Of the flags, those that this version's own help names: they came and went with versions.
        """
        said = self._ask("profile", "--help")
        flags = [flag for flag in WANTED if flag.split("=")[0] in said]
        return [str(self.path), "profile", *flags, f"--output={output}", *program]

    def export_command(self, report: Path, export: Path) -> list[str]:
        return [str(self.path), "export", "--type=sqlite", f"--output={export}", str(report)]

    def _ask(self, *arguments: str) -> str:
        return _said([str(self.path), *arguments])


def run_profiled(nsys: Nsys, program: list[str], output: Path, *, stdout: int | None = None) -> Profile:
    """Run ``program`` under ``nsys``; leaves ``output`` + ``.nsys-rep`` (older versions: ``.qdrep``) and ``.sqlite``.

    The program's own exit status is kept, whatever nsys makes of it. SIGHUP, SIGINT and SIGTERM go to the program, the
    third of them as SIGKILL; what was recorded until then is exported. ``stdout`` is where the output of the program
    and of nsys goes, as for ``subprocess``. Raises NsysError if a file is in the way, the program cannot be started, or
    no report comes of it.
    """
    if "%" in str(output):
        raise NsysError(f"{output}: nsys reads % in an output name as a macro; choose another")
    output = output.with_suffix("") if output.suffix in REPORTS else output
    report, export = nsys.report_of(output), Path(f"{output}.sqlite")
    _check_way_is_free(report, export)
    if shutil.which(program[0]) is None:
        raise NsysError(f"no program {program[0]!r:.200} to run")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = nsys.profile_command(output, noting(folder, program))
        with Relay(folder) as relay:
            ended = relay.run(command, stdout)
            status = relay.program_status
            if not report.exists():
                raise NsysError(_why_no_report(nsys, output, ended))
            _export(nsys, report, export)
    return Profile(report, export, _as_a_shell_says(ended) if status is None else status)


def _export(nsys: Nsys, report: Path, export: Path) -> None:
    command = nsys.export_command(report, export)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except KeyboardInterrupt:
        export.unlink(missing_ok=True)
        raise NsysError(f"stopped before the export of {report} was done: {shlex.join(command)} makes it") from None
    if done.returncode or not export.exists():
        raise NsysError(f"{report} is there, but nsys export failed: {done.stdout.strip()[-200:]}")


def _as_a_shell_says(returncode: int) -> int:
    return returncode if returncode >= 0 else ENDED_BY_SIGNAL - returncode


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NsysError(f"{' '.join(command)} does not run: {error}") from None
    return done.stdout + done.stderr


def _check_way_is_free(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise NsysError(f"{path} is there already: give another --output, or remove it")
        if not os.access(path.parent, os.W_OK):
            raise NsysError(f"cannot write {path}: {path.parent} is no folder that can be written")


def _why_no_report(nsys: Nsys, output: Path, ended: int) -> str:
    raw = Path(f"{output}.qdstrm")
    if raw.exists():
        return (
            f"nsys left {raw} and no report: its importer is not beside it. On Debian, link "
            "/usr/lib/x86_64-linux-gnu/nsight-systems/host-linux-x64 to /usr/lib/nsight-systems/host-linux-x64"
        )
    status = _as_a_shell_says(ended)
    return f"{nsys.path} ended with status {status} and left no report; what it said stands above"
