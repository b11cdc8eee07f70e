"""The model answers as PyTorch's own allocator did: errors word for word, every address, counter and block.

The answers were recorded from ``libc10_cuda.so`` of three releases on a CUDA runtime without a device; see
``tests/data/allocator/oracle``.
"""

import gzip
import json
from pathlib import Path

import pytest
from allocator_programs import TIE_BREAKS, Program, answers

RECORDED = Path(__file__).parents[2] / "data" / "allocator" / "pytorch-answers.json.gz"
CASES = json.loads(gzip.decompress(RECORDED.read_bytes()))


def program_of(case, **changes):
    return Program(**{**case["program"], **changes})


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_model_answers_as_pytorch_did(number):
    case = CASES[number]
    assert case["torch_version"].startswith(case["program"]["torch"])
    assert answers(program_of(case)) == case["answers"]


def test_the_recorded_programs_reach_every_part_of_the_allocator():
    lines = [line for case in CASES for line in case["answers"]]
    seen = {tuple(line.split()[:2])[: 1 + line.startswith("trace")] for line in lines}
    assert {("oom",), ("trace", "segment_free"), ("trace", "segment_map"), ("trace", "segment_unmap")} <= seen
    assert any(line.startswith("count num_alloc_retries") and line.split()[2] != "0" for line in lines)
    assert {case["program"]["torch"] for case in CASES} == set(TIE_BREAKS)


@pytest.mark.parametrize(("recorded", "other"), [("2.11.0", "2.13.0"), ("2.12.0", "2.11.0"), ("2.13.0", "2.12.0")])
def test_the_rule_of_another_release_does_not_answer_so(recorded, other):
    cases = [case for case in CASES if case["program"]["torch"] == recorded]
    assert any(answers(program_of(case, torch=other)) != case["answers"] for case in cases)
