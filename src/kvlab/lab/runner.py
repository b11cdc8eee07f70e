"""Runs labs through papermill, one kernel at a time, and judges each by the evidence it leaves.

papermill's word is not enough: a cell whose kernel was killed is marked "completed" in the notebook, an unknown
parameter is only a warning. A lab is green when its ``run.json`` closed and its claims came out as the book says.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from filelock import FileLock, Timeout
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from kvlab.device import named_gpu, resolve_device
from kvlab.errors import KvlabError
from kvlab.lab import provenance
from kvlab.lab.claims import Judgement, judge, load_claims
from kvlab.lab.evidence import RUN_DIR_VARIABLE
from kvlab.lab.run import LabError, Run
from kvlab.model import load_config, load_tokenizer

KERNEL = "python3"
PROFILES = ("quick", "full")
CELL_TIMEOUT_S = {"quick": 600, "full": 7200}
OUTPUT_TIMEOUT_S = 120
"""How long a kernel may take to say that a cell's output is complete, after its reply; nbclient's 4 s are less than a
busy machine takes, and running out of them counts as the timeout of the cell."""
_KERNEL_ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JUPYTER_PREFER_ENV_PATH": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",
    # Two busy threads on two busy cores: spinning at every barrier made a token ten times slower than sleeping.
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class LabResult:
    """What became of one lab. ``status`` is green or red; ``reused`` if its last run still stands."""

    lab: str
    status: str
    seconds: float
    reused: bool
    reason: str
    folder: Path
    judgements: tuple[Judgement, ...] = ()

    def as_json(self) -> dict[str, Any]:
        claims = [{"id": j.claim.id, "verdict": j.verdict, "as_expected": j.as_expected} for j in self.judgements]
        return {
            "lab": self.lab,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "reused": self.reused,
            "reason": self.reason,
            "claims": claims,
        }


def lab_names() -> list[str]:
    folder = provenance.repository() / "labs"
    names = sorted(path.stem for path in folder.glob("[0-9][0-9]-*.ipynb"))
    if not names:
        raise KvlabError(f"no labs in {folder}: run this in a checkout of the book")
    return names


def find_lab(wanted: str) -> str:
    """A lab by its number (``02``, ``2``) or name; KvlabError that lists the labs if there is none."""
    names = lab_names()
    number = wanted.zfill(2) if wanted.isdigit() else wanted
    matches = [name for name in names if name == wanted or name.split("-")[0] == number]
    if len(matches) != 1:
        raise KvlabError(f"unknown lab {wanted!r}: choose one of {', '.join(names)}")
    return matches[0]


def run_labs(
    labs: list[str],
    *,
    device: str = "auto",
    profile: str = "quick",
    parameters: dict[str, Any] | None = None,
    fresh: bool = False,
    on_start: Callable[[str], None] = lambda lab: None,
    on_end: Callable[[LabResult], None] = lambda result: None,
) -> list[LabResult]:
    """Run ``labs`` in order and judge each.

    All input is checked before the first kernel starts. A lab whose last run is green and was made from the same
    notebook, package, parameters and environment is not run again unless ``fresh``.
    """
    if profile not in PROFILES:
        raise KvlabError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if twice := {"device", "profile"} & set(parameters or {}):
        raise KvlabError(f"{' and '.join(sorted(twice))} is not given as a parameter: use --device and --profile")
    resolved = resolve_device(device)
    check_kernel()
    plans = [_plan(lab, {"device": str(resolved), "profile": profile} | (parameters or {})) for lab in labs]
    results = []
    for plan in plans:
        on_start(plan.lab)
        result = (None if fresh else _last_run(plan)) or _execute(plan)
        on_end(result)
        results.append(result)
    return results


@dataclass(frozen=True)
class _Plan:
    lab: str
    parameters: dict[str, Any]
    folder: Path
    fingerprint: dict[str, Any]


def _plan(lab: str, given: dict[str, Any]) -> _Plan:
    known = _default_parameters(lab)
    if unknown := sorted(set(given) - set(known)):
        raise KvlabError(f"{lab} has no parameter {', '.join(unknown)}: it has {', '.join(sorted(known))}")
    parameters = known | given
    _check_values(lab, parameters, known)
    device = resolve_device(str(parameters["device"]))
    folder = provenance.repository() / "_runs" / device.type / str(parameters["profile"]) / lab
    fingerprint = {
        "lab_sha256": provenance.lab_sha256(lab),
        "src_sha256": provenance.src_sha256(),
        "claims_sha256": _claims_sha256(lab),
        "environment_sha256": provenance.environment_sha256(device),
        "parameters": parameters,
    }
    return _Plan(lab, parameters, folder, fingerprint)


def _check_values(lab: str, parameters: dict[str, Any], defaults: dict[str, Any]) -> None:
    """KvlabError for a value that a kernel would only trip over: another kind of value, a size that is none, a name."""
    for name, value in parameters.items():
        sizes = value if isinstance(value, list) and value else [value]
        if name.endswith(("tokens", "_mib")):
            if not all(size is None or _is_size(size) for size in sizes):
                raise KvlabError(f"{lab}: {name} must be a positive whole number, not {value!r}")
        elif not _same_kind(value, defaults[name]):
            raise KvlabError(f"{lab}: {name} must be of the kind of {defaults[name]!r}, not {value!r}")
    for name, check in (("gpu", named_gpu), ("shape", load_config), ("model", load_tokenizer)):
        if name in parameters:
            check(parameters[name])  # says what is wrong with a name, a folder, or a model not fetched


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _same_kind(value: Any, default: Any) -> bool:
    """Whether ``value`` can stand where ``default`` does; a number must be finite and not negative."""
    if default is None:
        return value is None or isinstance(value, list) or _same_kind(value, 0)
    if isinstance(default, list):
        return isinstance(value, list) and bool(value) and all(_same_kind(item, default[0]) for item in value)
    if isinstance(default, int | float) and not isinstance(default, bool):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value) and value >= 0
    return type(value) is type(default) and value != ""


def _default_parameters(lab: str) -> dict[str, Any]:
    """Names and values of the cell tagged ``parameters``; a lab without one cannot be run."""
    path = provenance.lab_path(lab)
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, ValueError, AttributeError, TypeError) as error:
        raise LabError(f"{path.name} is not a notebook: {' '.join(str(error).split())[:120]}") from None
    cells = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    if len(cells) != 1:
        raise LabError(f"{path.name} has {len(cells)} cells tagged 'parameters', it needs exactly one")
    values: dict[str, Any] = {}
    exec("".join(cells[0]["source"]), {}, values)
    return values


def _claims_sha256(lab: str) -> str:
    import hashlib

    rules = [claim.model_dump_json() for claim in load_claims() if claim.lab == lab]
    return hashlib.sha256("\n".join(rules).encode()).hexdigest()


def check_kernel() -> None:
    """KvlabError unless the ``python3`` kernel is this very interpreter (another one would test another package)."""
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    try:
        command = KernelSpecManager().get_kernel_spec(KERNEL).argv[0]
    except NoSuchKernel:
        raise KvlabError(f"no {KERNEL} kernel: install ipykernel into {sys.prefix}") from None
    if Path(command).is_absolute() and not os.path.samefile(command, sys.executable):
        raise KvlabError(
            f"the {KERNEL} kernel is {command}, not {sys.executable}: run python -m ipykernel install --sys-prefix"
        )


def _last_run(plan: _Plan) -> LabResult | None:
    """The result of the last run, if it was green and nothing it was made from has changed."""
    try:
        if json.loads((plan.folder / "fingerprint.json").read_text()) != plan.fingerprint:
            return None
    except (OSError, ValueError):
        return None
    result = judge_folder(plan.lab, plan.folder, reused=True)
    return result if result.status == "green" else None


def judge_folder(lab: str, folder: Path, *, reused: bool = False, seconds: float = 0.0, reason: str = "") -> LabResult:
    """Judge a finished run by its ``run.json``: closed, and every claim of the lab with the verdict on record."""
    try:
        run = Run.read(folder / "run.json")
    except LabError as error:
        return LabResult(lab, "red", seconds, reused, reason or str(error), folder)
    judgements = tuple(judge(claim, run) for claim in load_claims() if claim.lab == lab)
    wrong = [f"{j.claim.id} came out {j.verdict!r}: {j.because}" for j in judgements if not j.as_expected]
    if wrong:
        reason = "; ".join(wrong)
    elif run.finished_at is None:
        reason = reason or "the lab did not reach close_lab()"
    seconds = seconds or run.duration_s or 0.0
    return LabResult(lab, "red" if reason else "green", seconds, reused, reason, folder, judgements)


def _execute(plan: _Plan) -> LabResult:
    """Run the notebook beside the last result and put it in its place only if it is green."""
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(plan.folder.with_name(plan.lab + ".lock"), blocking=False):
            return _execute_alone(plan)
    except Timeout:
        raise KvlabError(f"{plan.lab} is being run by another process in this checkout: wait for it") from None


def _execute_alone(plan: _Plan) -> LabResult:
    partial = plan.folder.with_name(plan.lab + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    began_s = time.perf_counter()
    reason = _papermill(plan, partial)
    result = judge_folder(plan.lab, partial, seconds=time.perf_counter() - began_s, reason=reason)
    final = plan.folder if result.status == "green" else plan.folder.with_name(plan.lab + ".failed")
    (partial / "fingerprint.json").write_text(json.dumps(plan.fingerprint, indent=1, default=str) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return LabResult(**(result.__dict__ | {"folder": final}))


def _papermill(plan: _Plan, folder: Path) -> str:
    """Execute the notebook; the empty string, or why it did not go through, in one line."""
    with _environment(_KERNEL_ENVIRONMENT | {RUN_DIR_VARIABLE: str(folder)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("papermill", "traitlets", "asyncio"):  # what went wrong is returned; a log would say it again
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            papermill.execute_notebook(
                str(provenance.lab_path(plan.lab)),
                str(folder / "executed.ipynb"),
                parameters=plan.parameters,
                kernel_name=KERNEL,
                language="python",
                extra_arguments=["--log-level=CRITICAL"],  # what a cell does comes as a message, not in the log
                cwd=str(provenance.repository()),
                progress_bar=False,
                log_output=False,
                start_timeout=120,
                execution_timeout=CELL_TIMEOUT_S[plan.parameters["profile"]],
                iopub_timeout=OUTPUT_TIMEOUT_S,
            )
        except PapermillExecutionError as error:
            return f"cell {error.exec_count} raised {error.ename}: {error.evalue}".splitlines()[0]
        except CellTimeoutError:
            return f"a cell ran longer than {CELL_TIMEOUT_S[plan.parameters['profile']]} s"
        except DeadKernelError:
            return "the kernel died (on Linux often the kernel's OOM killer)"
        except RuntimeError as error:  # jupyter_client's, for one that dies or stays silent before the first cell
            return f"the kernel did not start: {error}".splitlines()[0]
    return _unexecuted(folder / "executed.ipynb")


def _unexecuted(path: Path) -> str:
    """Why the executed notebook is not whole: a code cell without a count, or an error output."""
    for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell["execution_count"] is None:
            return f"cell {index} was not executed"
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            return f"cell {index} holds an error output"
        for output in cell["outputs"]:
            if output.get("name") == "stderr":
                return f"cell {index} wrote to stderr: {''.join(output['text']).strip()[:200]!r}"
    return ""


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the kernel and put them back afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
