"""The peak of a step as the kernel saw it."""

import mmap
import subprocess
import sys

import torch

from kvlab.budget import MALLOC_ENVIRONMENT
from kvlab.service.rehearsal import peak_bytes

MIB = 2**20


def test_a_mapping_that_is_gone_again_shows_in_the_peak():
    def run():
        mmap.mmap(-1, 300 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()

    assert 300 * MIB <= peak_bytes(torch.device("cpu"), run) < 301 * MIB


def test_nothing_is_no_peak():
    assert peak_bytes(torch.device("cpu"), lambda: None) < MIB


def test_tensors_one_after_the_other_peak_as_the_largest():
    """In a process with the budget's malloc, where each tensor is mapped and unmapped."""
    code = """
import torch
from kvlab.service.rehearsal import peak_bytes
torch.set_num_threads(1)  # each further one would take a stack
def run():
    for mib in (10, 40, 20):
        torch.ones(mib * 2**18)
print(peak_bytes(torch.device("cpu"), run) / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=MALLOC_ENVIRONMENT | _path(), capture_output=True, text=True
    )
    assert 40 <= float(done.stdout) < 40.1, done.stderr


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}
