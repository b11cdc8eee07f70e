import gc

import pytest
import torch

from kvlab.budget import BudgetError, BudgetTimeout, run_under_budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: PyTorch sees none"),
]

MIB = 2**20
SEGMENT_BYTES = 20 * MIB  # a request from 10 MiB up is a segment of its own, in multiples of 2 MiB


def grow(meter, segments):
    meter.arm()
    held = []
    for n in range(1, segments + 1):
        held.append(torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device=meter.device))
        meter.step(segments=n)
    return len(held)


def fraction():
    return torch.cuda.get_per_process_memory_fraction()


def test_the_caching_allocator_is_refused_at_the_budget_and_says_how_much():
    outcome = run_under_budget(grow, 100, budget_bytes=10 * SEGMENT_BYTES, device="cuda")
    assert outcome.error.type_name == "OutOfMemoryError"
    assert outcome.error.tried_bytes == SEGMENT_BYTES
    assert outcome.error.is_refusal
    assert outcome.exit_code == 1
    assert [step.held_bytes for step in outcome.steps] == [n * SEGMENT_BYTES for n in range(1, 11)]


def test_the_same_work_under_a_larger_budget_finishes():
    outcome = run_under_budget(grow, 12, budget_bytes=12 * SEGMENT_BYTES, device="cuda")
    assert outcome.ok
    assert outcome.value == 12


def test_after_a_refusal_the_fraction_is_back_and_no_tensor_is_kept():
    gc.collect()
    torch.cuda.empty_cache()
    before = fraction(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    run_under_budget(grow, 100, budget_bytes=10 * SEGMENT_BYTES, device="cuda")
    assert (fraction(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    torch.empty(12 * SEGMENT_BYTES, dtype=torch.uint8, device="cuda")


def test_a_fraction_that_was_set_before_is_set_again():
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        run_under_budget(grow, 1, budget_bytes=10 * SEGMENT_BYTES, device="cuda")
        assert fraction() == pytest.approx(0.5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_budget_beyond_the_card_is_refused_in_one_line():
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(BudgetError, match="pass a smaller budget"):
        run_under_budget(grow, 1, budget_bytes=total_bytes + 1, device="cuda")
    assert fraction() == 1.0


def test_time_is_up_at_the_next_step():
    with pytest.raises(BudgetTimeout, match="pass a larger timeout_s"):
        run_under_budget(grow, 2, budget_bytes=10 * SEGMENT_BYTES, device="cuda", timeout_s=0)
    assert fraction() == 1.0
