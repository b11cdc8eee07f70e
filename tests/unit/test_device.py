import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.budget import page_rounded_bytes
from kvlab.device import (
    GIB,
    GPUS,
    MIB,
    InvalidSize,
    UnknownDevice,
    UnknownGpu,
    named_gpu,
    parse_bytes,
    process_memory,
    resolve_device,
)
from kvlab.errors import KvlabError


def test_auto_is_cuda_exactly_where_pytorch_sees_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_resolved_device_resolves_to_itself():
    device = resolve_device("cpu")
    assert device == torch.device("cpu") == resolve_device(device)


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:١", "mps", "meta"])
def test_a_device_that_is_none_is_named_in_one_line(name):
    with pytest.raises(UnknownDevice, match=re.escape(repr(name))) as caught:
        resolve_device(name)
    assert isinstance(caught.value, KvlabError)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the CUDA that this machine has")
def test_cuda_that_is_absent_is_refused_with_what_to_do():
    with pytest.raises(UnknownDevice, match="PyTorch sees no CUDA here; use cpu or auto"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("512MiB", 512 * 2**20),
        (" 1.5 kib ", 1536),
        ("23.69 GiB", round(23.69 * 2**30)),
        ("1TiB", 2**40),
        (".5MB", 500_000),
        ("7", 7),
        (7, 7),
        (2**63 + 1, 2**63 + 1),
    ],
)
def test_sizes_are_number_times_unit(size, size_bytes):
    assert parse_bytes(size) == size_bytes


@given(st.integers(min_value=1, max_value=10**7), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_a_printed_figure_becomes_the_nearest_whole_byte(hundredths, unit):
    factor = {"K": 1, "M": 2, "G": 3}[unit[0]]
    unit_bytes = (1024 if "i" in unit else 1000) ** factor
    assert abs(100 * parse_bytes(f"{hundredths / 100:.2f}{unit}") - hundredths * unit_bytes) <= 50


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "-1GiB", "0", 0, -5, "0.1", "24G", "24 XiB", "1e3", "nan", "inf GiB", "1,5GiB", None, True],
)
def test_what_is_no_positive_size_is_refused_with_an_example(size):
    with pytest.raises(InvalidSize, match="is not a size; write a positive number and a unit"):
        parse_bytes(size)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_gpu_says_what_it_subtracts_from_its_total(gpu):
    assert gpu.usable_bytes == gpu.total_bytes - gpu.driver_reserved_bytes - gpu.context_bytes
    sentence = gpu.describe()
    for size_bytes in (gpu.driver_reserved_bytes, gpu.context_bytes):
        assert f"{size_bytes / MIB:.0f} MiB" in sentence
    assert gpu.driver_reserved_source in sentence
    assert gpu.context_source in sentence


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_size_in_a_gpus_key_is_the_size_on_its_box(gpu):
    advertised = int(re.search(r"-(\d+)g$", gpu.key)[1])
    assert advertised * 10**9 * 0.93 < gpu.total_bytes <= advertised * GIB
    assert 0.005 < 1 - gpu.usable_bytes / gpu.total_bytes < 0.06


def test_an_unknown_gpu_is_answered_with_the_known_ones():
    with pytest.raises(UnknownGpu) as caught:
        named_gpu("rtx9090")
    assert str(caught.value).startswith("unknown GPU 'rtx9090'; known are rtx3090-24g, ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may join groups")
def test_process_memory_is_found_behind_hundreds_of_groups():
    code = "from kvlab.device import process_memory; print(process_memory('cpu')['data_bytes'] > 0)"
    said = subprocess.check_output([sys.executable, "-c", code], extra_groups=range(10**9, 10**9 + 600))
    assert said == b"True\n"


def test_process_memory_sees_a_large_tensor_come_and_go():
    size_bytes = 64 * MIB  # beyond any mmap threshold that glibc adapts to

    def come_and_go():
        before = process_memory("cpu")
        tensor = torch.ones(size_bytes, dtype=torch.uint8)
        during = process_memory("cpu")
        del tensor
        after = process_memory("cpu")
        assert during["rss_anon_bytes"] - before["rss_anon_bytes"] > 0.9 * size_bytes  # the kernel counts in batches
        return during["data_bytes"] - before["data_bytes"], after["data_bytes"] - before["data_bytes"]

    # The first may start PyTorch's threads, any may need a new arena for Python's objects.
    assert (page_rounded_bytes(size_bytes), 0) in [come_and_go() for _ in range(5)]
