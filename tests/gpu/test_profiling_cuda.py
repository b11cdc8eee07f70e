"""Ranges and the timeline where CUDA is: NVTX in nsys, and the calls and kernels of torch.profiler."""

import shutil
import sys

import pytest
import torch

from kvlab.profiling import nvtx
from kvlab.profiling.nsys import Nsys, run_profiled, summarise_export
from kvlab.profiling.timeline import timeline_of_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: PyTorch sees none"),
]

PROGRAM = """
import torch
from kvlab.profiling import nvtx
a = torch.ones(256, 256, device="cuda")
with nvtx.range("prefill"):
    a @ a
with nvtx.range("decode"):
    try:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
torch.cuda.synchronize()
"""


def test_a_cuda_build_has_nvtx():
    assert nvtx.has_nvtx()


@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed here")
def test_nsys_sees_ranges_kernels_memory_and_the_failing_call(tmp_path):
    profile = run_profiled(Nsys.find(), [sys.executable, "-c", PROGRAM], tmp_path / "run")
    said = summarise_export(profile.export)
    assert profile.exit_status == 0
    assert {"prefill", "decode"} <= {one.name for one in said.nvtx}
    assert said.gpus
    assert said.kernels
    assert said.memory_peak_bytes >= 2 * 2**20
    assert [call for call in said.failed_calls if call.return_value == 2 and call.name.startswith("cudaMalloc")]


def test_the_profiler_shows_calls_kernels_and_the_refusal(tmp_path):
    with torch.profiler.profile(profile_memory=True) as profiler:
        exec(PROGRAM, {})
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    line = timeline_of_trace(path)
    assert line.calls_are == "CUDA calls"
    assert line.kernels
    assert len(line.failures) >= 1
    assert {"prefill", "decode"} <= {span.name for span in line.ranges}
