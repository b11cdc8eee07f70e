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
from kvlab.lab.runner import lab_names, run_labs

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
        super().__init__(config=getattr(model, "config", model))

    tokens_evicted = 0
    tokens_held = property(lambda self: self.get_seq_length())

    @property
    def nbytes(self):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
"""

# The same for the policy: the window it was given is not the one it uses.
WINDOW_IGNORED = """
CachePolicy.window = property(lambda self: 2 * self.max_total_tokens)
"""

MUTATIONS = {
    "eviction switched off": ("cache/__init__.py", EVICTION_OFF),
    "the window ignored": ("cache/policy.py", WINDOW_IGNORED),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_fix_lab_green_as_it_is_finds_that_the_fix_does_not_hold_with(mutation, tmp_path):
    file, addition = MUTATIONS[mutation]
    root = provenance.repository()
    for folder in ("labs", "src"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / "book").mkdir()
    shutil.copy(root / "book" / "claims.yml", tmp_path / "book")
    with (tmp_path / "src" / "kvlab" / file).open("a") as source:
        source.write(addition)

    done = run_kvlab(tmp_path, "labs", "--lab", "08", "--device", "cpu", "--json")
    assert done.returncode == 1, done.stderr
    (result,) = json.loads(done.stdout)["labs"]
    assert result["status"] == "red"
    assert {claim["id"]: claim["verdict"] for claim in result["claims"]}["fix-1"] == "does not hold", result


def run_kvlab(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command line on the mutated copy: its package shadows the installed one, in the kernel too."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-m", "kvlab.cli", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
