"""Finds and reads the runs a page may speak of: this build's own and those recorded on other machines."""

from __future__ import annotations

from pathlib import Path

from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging

from kvlab.errors import KvlabError
from kvlab.lab.claims import Claim, load_claims
from kvlab.lab.provenance import lab_sha256, src_sha256
from kvlab.lab.run import LabError, Run

logger = logging.getLogger(__name__)

CLAIMS = "book/claims.yml"
LABS = "book/labs"
RECORDINGS = "book/recordings"


class EvidenceError(LookupError):
    """What a page asks for is in no run; the message says what is missing."""


def run_folder(env: BuildEnvironment, lab: str, device: str | None = None) -> Path:
    """Folder of ``run.json`` and the figures: of this build, or as recorded on ``device``."""
    parent = f"{RECORDINGS}/{device}" if device else LABS
    return Path(env.srcdir, parent, lab)


def find_run(env: BuildEnvironment, lab: str, device: str | None = None) -> Run | None:
    """The finished run of ``lab``, None if there is none; EvidenceError if the file is there but is no such run.

    The page then depends on the file, so that a new run rebuilds it.
    """
    path = run_folder(env, lab, device) / "run.json"
    env.note_dependency(str(path))
    if not path.is_file():
        return None
    name = path.relative_to(env.srcdir)
    try:
        run = Run.read(path)
    except LabError as error:
        raise EvidenceError(str(error).replace(str(path), str(name))) from None
    if run.lab != lab:
        raise EvidenceError(f"{name} is a run of {run.lab}")
    if run.finished_at is None:
        raise EvidenceError(f"{name} never finished")
    return run


def read_run(env: BuildEnvironment, lab: str, device: str | None = None) -> Run:
    """As :func:`find_run`, but a run that is not there is an EvidenceError too."""
    run = find_run(env, lab, device)
    if run is None:
        where = f"recording of {lab} on {device}" if device else f"run of {lab}: kvlab labs, then build again"
        raise EvidenceError(f"no {where}")
    return run


def labs_of(env: BuildEnvironment) -> list[str]:
    """The labs that are pages of this book, in order."""
    return sorted(name.removeprefix(f"{LABS}/") for name in env.found_docs if name.startswith(f"{LABS}/"))


def recorded_devices(env: BuildEnvironment) -> list[str]:
    """Names of the machines whose runs ship with the book."""
    return sorted(path.name for path in Path(env.srcdir, RECORDINGS).glob("*") if path.is_dir())


def all_runs(env: BuildEnvironment, location: str) -> dict[tuple[str, str | None], Run | None]:
    """The run of every lab in this build (device None) and on every recorded device, None where there is none.

    A file that is no such run is a warning at ``location``, which fails a strict build, and counts as no run.
    """
    runs: dict[tuple[str, str | None], Run | None] = {}
    for lab in labs_of(env):
        for device in (None, *recorded_devices(env)):
            try:
                runs[lab, device] = find_run(env, lab, device)
            except EvidenceError as error:
                logger.warning("%s", error, location=location)
                runs[lab, device] = None
    return runs


def any_on_gpu(runs: dict[tuple[str, str | None], Run | None]) -> bool:
    """Whether any of ``runs`` was made on a CUDA device."""
    return any(run is not None and run.device.kind == "cuda" for run in runs.values())


def all_claims(env: BuildEnvironment) -> list[Claim]:
    """The claims of ``book/claims.yml``; the build ends with one line if it is no ledger."""
    path = Path(env.srcdir, CLAIMS)
    env.note_dependency(str(path))
    try:
        return load_claims(path)
    except KvlabError as error:
        raise ExtensionError(str(error)) from None


def is_older(run: Run) -> bool:
    """Whether the lab or the package has changed since ``run``."""
    return (run.source.src_sha256, run.source.lab_sha256) != (src_sha256(), lab_sha256(run.lab))


def written_commit(run: Run) -> str:
    if run.source.commit is None:
        return "no commit"
    return run.source.commit[:10] + (" with uncommitted changes" if run.source.dirty else "")


def written_origin(run: Run) -> str:
    """Where a number or figure is from, in one line."""
    return f"lab {run.lab}, {run.device.name} ({run.device.kind}), {run.started_at:%Y-%m-%d}, {written_commit(run)}"
