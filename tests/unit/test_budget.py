import contextlib
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvlab.budget import (
    BudgetError,
    BudgetTimeout,
    BudgetUnavailable,
    Failure,
    Meter,
    _receive,
    page_rounded_bytes,
    run_under_budget,
)

MIB = 2**20
BUDGET_BYTES = 16 * MIB
FITTING = BUDGET_BYTES // page_rounded_bytes(MIB)  # blocks of 1 MiB that fit


def grow(meter, blocks):
    """Hold one more block of 1 MiB each step."""
    meter.arm()
    held = []
    for n in range(1, blocks + 1):
        held.append(torch.empty(MIB, dtype=torch.uint8))
        meter.step(blocks=n)
    return len(held)


@pytest.fixture(scope="module")
def refused():
    return run_under_budget(grow, 100, budget_bytes=BUDGET_BYTES)


def test_pytorchs_own_allocator_is_refused_and_its_message_says_how_much(refused):
    assert not refused.ok
    assert refused.error.type_name == "RuntimeError"
    assert "DefaultCPUAllocator: can't allocate memory" in refused.error.message
    assert refused.error.tried_bytes == MIB
    assert refused.error.is_refusal
    assert "torch.empty(MIB, dtype=torch.uint8)" in refused.error.traceback


def test_every_step_up_to_the_refusal_is_known_to_the_byte(refused):
    assert FITTING == 15
    assert [step.fields for step in refused.steps] == [{"blocks": n} for n in range(1, FITTING + 1)]
    assert [step.held_bytes for step in refused.steps] == [n * page_rounded_bytes(MIB) for n in range(1, FITTING + 1)]


def test_the_refused_process_ends_with_a_traceback_and_status_1(refused):
    assert refused.exit_code == 1
    assert refused.log.rstrip().endswith("Error code 12 (Cannot allocate memory)")


def test_the_limit_lies_the_budget_above_what_was_held_at_arming(refused):
    assert refused.limit_bytes - refused.base_bytes == BUDGET_BYTES
    last = refused.steps[-1]
    assert last.memory["data_bytes"] == refused.base_bytes + last.held_bytes <= refused.limit_bytes


def test_the_same_work_under_a_larger_budget_finishes():
    outcome = run_under_budget(grow, FITTING + 5, budget_bytes=2 * BUDGET_BYTES)
    assert outcome.ok
    assert (outcome.value, outcome.exit_code, outcome.error) == (FITTING + 5, 0, None)
    assert len(outcome.steps) == FITTING + 5


def test_a_caught_refusal_is_the_works_own_business_and_its_memory_returns():
    def recover(meter):
        meter.arm()
        meter.step(at="start")
        try:
            held = []
            while True:
                held.append(torch.empty(MIB, dtype=torch.uint8))
        except RuntimeError as error:
            meter.note(message=str(error), blocks=len(held))
            del held
        meter.step(at="after")
        torch.empty(FITTING * MIB, dtype=torch.uint8)
        return "went on"

    outcome = run_under_budget(recover, budget_bytes=BUDGET_BYTES)
    assert outcome.ok
    assert outcome.value == "went on"
    assert outcome.notes[0].fields["blocks"] == FITTING
    assert "you tried to allocate 1048576 bytes" in outcome.notes[0].fields["message"]
    start, after = outcome.steps
    assert start.held_bytes == 0
    assert after.held_bytes - start.held_bytes < MIB  # the log line and note, not the blocks


def test_records_get_through_when_not_a_byte_is_left():
    def exhaust(meter):
        meter.arm()
        hoard, size_bytes = [], MIB
        while size_bytes >= 1:
            try:
                hoard.append(bytearray(size_bytes))
            except MemoryError:
                size_bytes //= 4
        for n in range(50):
            meter.step(n=n)
        try:
            torch.empty(MIB, dtype=torch.uint8)
        except RuntimeError:
            return meter.held_bytes

    outcome = run_under_budget(exhaust, budget_bytes=4 * MIB)
    assert outcome.ok, outcome.error
    assert [step.fields["n"] for step in outcome.steps] == list(range(50))
    assert outcome.value > 4 * MIB - 64 * 1024


def test_free_chunks_of_the_heap_and_pythons_small_objects_cost_the_budget_nothing():
    def measure(meter):
        child = sys.modules["__main__"]
        rounds = {}
        for plugged in (False, True):
            blocks = [torch.empty(60_000, dtype=torch.uint8) for _ in range(200)]  # below the mmap threshold
            pins = blocks[::50]
            del blocks
            if not plugged:
                plug_heap, child._plug_heap = child._plug_heap, lambda held: None
            meter.arm()
            tensor = torch.empty(1_000_000, dtype=torch.uint8)
            rounds[plugged] = meter.held_bytes
            del tensor
            meter.disarm()
            child._plug_heap = plug_heap
            del pins
        meter.arm()
        small = [bytes(200) for _ in range(6_000)]
        return rounds, meter.held_bytes, len(small)

    (rounds, after_small_bytes, _) = run_under_budget(measure, budget_bytes=BUDGET_BYTES).value
    assert rounds[True] == page_rounded_bytes(1_000_000)
    assert rounds[False] < page_rounded_bytes(1_000_000)  # the control: without the plugs a hole serves
    assert after_small_bytes == 0


def test_page_rounding_is_glibcs_for_every_size():
    def measure(meter):
        meter.arm()
        pages = []
        for size_bytes in range(80 * 1024, 80 * 1024 + 4096):
            before_bytes = meter.held_bytes
            tensor = torch.empty(size_bytes, dtype=torch.uint8)
            pages.append((size_bytes, meter.held_bytes - before_bytes))
            del tensor
        return pages

    pages = run_under_budget(measure, budget_bytes=BUDGET_BYTES).value
    assert [page_rounded_bytes(n) for n, _ in pages] == [measured for _, measured in pages]
    assert any(-(-n // 4096) * 4096 != measured for n, measured in pages)  # whole pages alone are not enough
    assert any(-(-(n + 112) // 4096) * 4096 != measured for n, measured in pages)


@pytest.mark.parametrize(
    ("end", "exit_code", "name"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "SIGKILL"),
        (lambda: os._exit(0), 0, "exit status 0"),
    ],
    ids=["killed", "left"],
)
def test_a_process_that_dies_leaves_its_steps_and_is_no_success(end, exit_code, name):
    def die(meter):
        meter.arm()
        for n in range(3):
            meter.step(n=n)
        print("last words", flush=True)
        end()

    outcome = run_under_budget(die, budget_bytes=BUDGET_BYTES)
    assert not outcome.ok
    assert outcome.exit_code == exit_code
    assert outcome.error == Failure(name, f"the process ended with {name} before the work returned: last words")
    assert [step.fields["n"] for step in outcome.steps] == [0, 1, 2]


def test_a_process_that_dies_within_a_record_leaves_those_before():
    def die(meter):
        meter.arm()
        meter.step(n=1)
        os.write(meter._connection.fileno(), struct.pack("!i", 1000) + b"the first of a thousand bytes")
        os._exit(3)

    outcome = run_under_budget(die, budget_bytes=BUDGET_BYTES)
    assert (outcome.exit_code, outcome.error.type_name) == (3, "exit status 3")
    assert [step.fields for step in outcome.steps] == [{"n": 1}]


def test_a_timeout_ends_the_process_and_says_how_far_it_came(tmp_path):
    def stall(meter, path):
        meter.arm()
        meter.step()
        path.write_text(str(os.getpid()))
        time.sleep(600)

    for timeout_s in (4, 20, 100):
        started_s = time.monotonic()
        with pytest.raises(BudgetTimeout, match=rf"within {timeout_s} s and was ended after \d steps; pass a") as late:
            run_under_budget(stall, tmp_path / "pid", budget_bytes=BUDGET_BYTES, timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - started_s < timeout_s + 60
        if (tmp_path / "pid").exists():  # else this machine needs more time to come that far
            break
    assert "after 1 steps" in str(late.value)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_timeout_ends_also_a_process_that_sends_faster_than_it_is_read():
    receiver, sender = Pipe(duplex=False)
    taken = []

    def take(*record):
        taken.append(record)
        time.sleep(0.005)

    def send():
        with contextlib.suppress(OSError):
            for _ in range(600):
                sender.send(("step", None))

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(TimeoutError):
        _receive(receiver, SimpleNamespace(take=take), time.monotonic() + 0.1)
    receiver.close()
    sending.join()
    assert len(taken) < 600


@pytest.mark.parametrize("budget_bytes", [-1, 0, True, 1.5, "16MiB", None])
def test_an_impossible_budget_is_refused_before_anything_starts(budget_bytes):
    with pytest.raises(BudgetError, match="is impossible; pass a positive whole number"):
        run_under_budget(grow, 1, budget_bytes=budget_bytes)


def test_what_cannot_be_sent_to_the_child_is_named():
    with pytest.raises(BudgetError, match=r"cannot be sent to the child process .*lock.*; pass plain data"):
        run_under_budget(grow, threading.Lock(), budget_bytes=BUDGET_BYTES)


def test_a_result_that_cannot_be_sent_back_is_named():
    def endless(meter):
        meter.arm()
        return (n for n in range(3))

    with pytest.raises(BudgetError, match=r"result of the work cannot be sent back .*generator"):
        run_under_budget(endless, budget_bytes=BUDGET_BYTES)


def test_work_that_never_arms_its_budget_is_an_error_not_a_pass():
    with pytest.raises(BudgetError, match=r"never called meter\.arm\(\), so no budget was in force"):
        run_under_budget(lambda meter: 1, budget_bytes=BUDGET_BYTES)


NOTEBOOK = """
    import torch
    from kvlab.budget import run_under_budget

    BLOCK_BYTES = 2**20

    def cell(meter, times):
        meter.arm()
        meter.step(block_bytes=torch.empty(times * BLOCK_BYTES, dtype=torch.uint8).nbytes)
        return Result(times)

    class Result:
        def __init__(self, times):
            self.times = times

    outcome = run_under_budget(cell, 3, budget_bytes={budget})
    print(outcome.value.times, outcome.steps[0].fields)
"""


def notebook(budget: str, *under: str) -> subprocess.CompletedProcess:
    """Run the cell as ``__main__``, whose functions no other process can import."""
    code = textwrap.dedent(NOTEBOOK.format(budget=budget))
    return subprocess.run([*under, sys.executable, "-c", code], capture_output=True, text=True)


@pytest.fixture(autouse=True)
def _package_for_subprocesses(monkeypatch):
    src = str(Path(__file__).resolve().parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [src, os.environ.get("PYTHONPATH")])))


def test_functions_globals_and_classes_of_a_notebook_travel():
    run = notebook("16 * BLOCK_BYTES")
    assert run.stdout == "3 {'block_bytes': 3145728}\n", run.stderr


def test_a_hard_limit_below_the_budget_is_unavailable_not_a_refusal():
    run = notebook("2**33", "sh", "-c", f'ulimit -d {2**22} && exec "$@"', "sh")  # KiB
    assert run.returncode == 1
    assert "BudgetUnavailable: the budget needs a data limit of" in run.stderr.splitlines()[-1]
    assert f"but the hard limit is {2**32}" in run.stderr.splitlines()[-1]


def test_another_malloc_is_unavailable_not_a_wrong_budget(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    with pytest.raises(BudgetUnavailable, match="unset LD_PRELOAD and GLIBC_TUNABLES"):
        run_under_budget(grow, 1, budget_bytes=BUDGET_BYTES)


def test_a_platform_without_glibc_is_told_where_to_go(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BudgetUnavailable, match="needs Linux with glibc; run this in a Linux container"):
        run_under_budget(grow, 1, budget_bytes=BUDGET_BYTES)


def unarmed() -> Meter:
    return Meter(torch.device("cpu"), BUDGET_BYTES, lambda kind, content: None)


def test_the_same_message_before_arming_is_no_refusal_by_the_budget():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    before = Failure.of(caught.value, unarmed())
    armed = unarmed()
    armed.base_bytes = 1
    after = Failure.of(caught.value, armed)
    assert before.tried_bytes == after.tried_bytes == 2**60
    assert (before.is_refusal, after.is_refusal) == (False, True)


@pytest.mark.parametrize(
    ("message", "tried_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB", 2**31),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has", 512),
        ("would exceed per_process_memory_fraction limit. Requested size: 20.00 MiB", 20 * MIB),
        ("Unable to allocate 1.00 MiB for an array with shape (1048576,)", MIB),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
        ("", None),
    ],
)
def test_tried_bytes_are_read_from_each_allocators_message(message, tried_bytes):
    assert Failure.of(torch.OutOfMemoryError(message), unarmed()).tried_bytes == tried_bytes


def test_a_tensor_is_no_field_of_a_record():
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        unarmed().step(cache=torch.ones(1))
