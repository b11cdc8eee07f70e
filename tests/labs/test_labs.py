"""Every lab runs through papermill and is judged by its evidence; with the fix broken, the lab of the fix is red."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.lab import provenance
from kvlab.lab.claims import judge, load_claims
from kvlab.lab.run import Run
from kvlab.lab.runner import find_lab, lab_names, run_labs

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("lab", lab_names())
def test_the_lab_is_green_and_its_claims_come_out_as_the_book_says(lab):
    (result,) = run_labs([lab], profile="quick")
    assert result.status == "green", result.reason

    run = Run.read(result.folder / "run.json")
    assert run.finished_at is not None
    assert run.source.lab_sha256 == provenance.lab_sha256(lab), "the lab changed while it ran"
    assert run.metrics
    owned = [claim for claim in load_claims() if claim.lab == lab]
    assert owned, "a lab without a claim proves nothing"
    for claim in owned:
        judgement = judge(claim, run)
        assert judgement.as_expected, (claim.id, judgement.verdict, judgement.because)
    for figure in run.figures.values():
        assert (result.folder / figure.file).is_file()


# Appended to the package's cache room: the same name, but nothing is ever evicted.
EVICTION_OFF = """
from transformers import DynamicCache as _DynamicCache


class SlidingWindowCache(_DynamicCache):
    def __init__(self, model, policy, **_):
        super().__init__(config=model.config)

    tokens_evicted = 0

    @property
    def nbytes(self):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
"""

# The same for the policy: the window it was given is not the one it uses.
WINDOW_IGNORED = """
CachePolicy.window = property(lambda self: 8 * self.max_total_tokens)
"""

MUTATIONS = {
    "nothing": ("cache/__init__.py", "", 0),
    "eviction switched off": ("cache/__init__.py", EVICTION_OFF, 1),
    "the window ignored": ("cache/policy.py", WINDOW_IGNORED, 1),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_fix_lab_is_green_as_it_is_and_red_with(mutation, tmp_path):
    file, addition, exit_code = MUTATIONS[mutation]
    root = provenance.repository()
    for folder in ("labs", "src"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / "book").mkdir()
    shutil.copy(root / "book" / "claims.yml", tmp_path / "book")
    with (tmp_path / "src" / "kvlab" / file).open("a") as source:
        source.write(addition)

    lab = find_lab("08")
    done = run_kvlab(tmp_path, "labs", "--lab", lab, "--device", "cpu", "--json", *SMALL)
    assert done.returncode == exit_code, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)["labs"]
    assert result["status"] == ("red" if exit_code else "green"), result
    assert "fix-1" in [claim["id"] for claim in result["claims"]] or exit_code


# The lab in small: the budget a growing cache leaves after some 350 tokens, and a window well inside it.
SMALL = [
    argument
    for setting in (
        "budget_mib=16",
        "prompt_tokens=192",
        "chunk_tokens=96",
        "max_total_tokens=128",
        "bench_tokens=[32, 64]",
    )
    for argument in ("-p", setting)
]


def run_kvlab(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command line on the mutated copy: its package shadows the installed one, in the kernel too."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-m", "kvlab.cli", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
