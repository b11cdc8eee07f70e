"""The flight recorder, the ledger and the sampler on a CUDA device."""

import json

import pytest
import torch

import kvlab
from kvlab.budget import run_under_budget
from kvlab.memory.ledger import ledger_on_cuda
from kvlab.memory.nvml import GpuSource, NvmlError, read_samples
from kvlab.memory.snapshot import summarise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: PyTorch sees none"),
]

MIB = 2**20


def test_the_ledger_of_a_device_adds_up_and_finds_the_cache():
    torch.cuda.empty_cache()
    before = ledger_on_cuda(0)
    cache = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    after = ledger_on_cuda(cache.nbytes)
    assert after.account("allocated") - before.account("allocated") == 64 * MIB
    assert after.steps[0].unexplained_bytes == before.steps[0].unexplained_bytes
    assert after.steps[1].unexplained_bytes == 0
    accounts = [account.bytes for account in after.accounts]
    assert accounts == sorted(accounts)


def test_nvml_sees_what_this_process_reserves():
    try:
        source = GpuSource()
    except NvmlError as error:
        pytest.skip(f"NVML does not answer: {error}")
    torch.cuda.empty_cache()
    before = source.read(0.0)
    held = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    grown = [b.used_bytes - a.used_bytes for a, b in zip(before, source.read(1.0), strict=True)]
    source.close()
    assert held.nbytes <= max(grown)


def fail(meter, place, catch):
    meter.arm()
    recorder = kvlab.flight_recorder(place, kv_bytes=lambda: 0)
    with recorder:
        held = [torch.empty(20 * MIB, dtype=torch.uint8, device=meter.device) for _ in range(4)]
        try:
            torch.empty(500 * MIB, dtype=torch.uint8, device=meter.device)
        except torch.OutOfMemoryError:
            if not catch:
                raise
    return len(held)


def test_the_state_is_taken_before_the_exception_is_raised(tmp_path):
    outcome = run_under_budget(fail, tmp_path, False, budget_bytes=100 * MIB, device="cuda")
    assert outcome.error.is_refusal
    (folder,) = tmp_path.iterdir()
    assert summarise(folder / "snapshot.pickle").allocated_bytes >= 80 * MIB
    assert json.loads((folder / "memory_stats.json").read_text())["num_ooms"] >= 1
    assert json.loads((folder / "diagnosis.json").read_text())["family"] == "torch_cuda"
    assert json.loads((folder / "facts.json").read_text())["told_by_allocator"]["tried_bytes"] == 500 * MIB
    assert read_samples(folder / "samples.jsonl").samples


def test_a_failure_that_the_program_catches_leaves_its_state_too(tmp_path):
    outcome = run_under_budget(fail, tmp_path, True, budget_bytes=100 * MIB, device="cuda")
    assert outcome.ok
    (folder,) = tmp_path.iterdir()
    assert (folder / "snapshot.pickle").exists()
    assert not (folder / "message.txt").exists()
    assert "the program caught it" in (folder / "index.html").read_text()
