"""Messages of many engines read by kvlab.memory.oom: figures, families, causes, and texts that resist."""

import io
import json
import random
import textwrap
import time
import tracemalloc

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from shared_data import at_hand

from kvlab.memory.oom import Diagnosis, diagnose, diagnose_exception, diagnose_file, diagnose_stream, render
from kvlab.memory.oom.formats import FORMATS
from kvlab.memory.oom.template import anchor
from kvlab.memory.oom.text import HINTS

MIB, GIB = 2**20, 2**30
MESSAGES_AT_HAND = at_hand("oom-messages.jsonl")

TORCH_2 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of "
    "23.50 GiB of which 1.25 GiB is free. Including non-PyTorch memory, this process has 22.25 GiB "
    "memory in use. "
    "Of the allocated memory 21.00 GiB is allocated by PyTorch, with 64.00 MiB allocated in private "
    "pools (e.g., "
    "CUDA Graphs), and 768.00 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation "
    "for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)
TORCH_2_FIGURES = {
    "tried": 2.5 * GIB,
    "total": 23.5 * GIB,
    "free": 1.25 * GIB,
    "allocated": 21 * GIB,
    "reserved": 21.75 * GIB,
    "reserved_unallocated": 768 * MIB,
}
ARTICLE_LOG = """\
[2026-08-10 14:32:07] ERROR - torch.cuda.OutOfMemoryError: CUDA out of memory.
 Tried to allocate 2.00 GiB for tensor shape [1, 8192, 4096] on device 0
[2026-08-10 14:32:08] ERROR - CUBLAS_STATUS_ALLOC_FAILED during attention kernel launch
kv cache overflow: required cache size (tokens * hidden_dim) exceeds allocated buffer; aborting kernel \
execution.
"""

# text, family, is_oom, figures in bytes
MESSAGES = {
    "torch-2": (TORCH_2, "torch_cuda", True, TORCH_2_FIGURES),
    "torch-0.4": (
        "THCudaCheck FAIL file=THCStorage.cu line=58 error=2 : out of memory",
        "torch_cuda",
        True,
        {},
    ),
    "torch-1.0-cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 7.75 GiB total capacity; "
        "5.50 GiB already allocated; 1.25 GiB free; 512.00 KiB cached)",
        "torch_cuda",
        True,
        {
            "tried": 1.5 * GIB,
            "allocated": 5.5 * GIB,
            "reserved": 5.5 * GIB + 2**19,
            "reserved_unallocated": 2**19,
        },
    ),
    "torch-1.8-reserved": (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.75 GiB total "
        "capacity; 6.50 GiB "
        "already allocated; 8.00 MiB free; 6.75 GiB reserved in total by PyTorch)",
        "torch_cuda",
        True,
        {"free": 8 * MIB, "reserved": 6.75 * GIB, "reserved_unallocated": 0.25 * GIB},
    ),
    "torch-capacty": (
        "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacty of 8.00 GiB of "
        "which 0 bytes "
        "is free. Process 4242 has 7.75 GiB memory in use.",
        "torch_cuda",
        True,
        {"tried": 128 * MIB, "total": 8 * GIB, "free": 0},
    ),
    "torch-async-backend": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.50 GiB\nRequested               : 640.00 MiB\n"
        "Device limit            : 11.50 GiB\nFree (according to CUDA): 8.00 MiB\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        "torch_cuda",
        True,
        {"tried": 640 * MIB, "total": 11.5 * GIB, "free": 8 * MIB, "allocated": 9.5 * GIB},
    ),
    "torch-2.13-warning": (
        "[W922 05:15:28 CUDACachingAllocator.cpp:3934] memory allocation failed with OOM on device 0 "
        "while trying "
        "to allocate 3630170112 bytes (free: 202833920, total: 25250627584).",
        "torch_cuda",
        True,
        {"tried": 3630170112, "free": 202833920, "total": 25250627584},
    ),
    "torch-hip": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total "
        "capacity of "
        "16.00 GiB of which 1.50 GiB is free. Of the allocated memory 13.25 GiB is allocated by PyTorch, and "
        "0 bytes is reserved by PyTorch but unallocated.",
        "torch_hip",
        True,
        {"tried": 4.5 * GIB, "reserved": 13.25 * GIB, "reserved_unallocated": 0},
    ),
    "torch-mps": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 5.50 GB, other allocations: 1.25 "
        "GB, max allowed: "
        "6.80 GB). Tried to allocate 768.00 MB on private pool.",
        "torch_mps",
        True,
        {"tried": 768 * MIB, "total": round(6.8 * GIB), "allocated": 5.5 * GIB, "reserved": None},
    ),
    "torch-cpu-windows": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough "
        "memory: you tried "
        "to allocate 68719476736 bytes.",
        "torch_cpu",
        True,
        {"tried": 68719476736},
    ),
    "numpy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array with "
        "shape (1000000, "
        "1000000) and data type float64",
        "torch_cpu",
        True,
        {"tried": round(7.28 * 2**40)},
    ),
    "python": (
        'Traceback (most recent call last):\n  File "a.py", line 3\nMemoryError',
        "torch_cpu",
        True,
        {},
    ),
    "c++": ("terminate called after throwing an instance of 'std::bad_alloc'\n", "torch_cpu", True, {}),
    "cublas-null": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cublas",
        None,
        {},
    ),
    "cuda-runtime": ("torch.AcceleratorError: CUDA error: out of memory\n", "cuda_runtime", True, {}),
    "illegal-access": ("CUDA error: an illegal memory access was encountered", "cuda_runtime", False, {}),
    "cuda-driver": ("RuntimeError: CUDA driver error: out of memory", "cuda_driver", True, {}),
    "index-on-cpu": (
        "IndexError: index_copy_(): index 16 is out of bounds for dimension 2 with size 16",
        "cuda_assert",
        False,
        {},
    ),
    "nvml": (
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":995',
        "nvml",
        None,
        {},
    ),
    "vllm-serve-one": (
        "ValueError: To serve at least one request with the model's max seq len (40960), 4.50 GiB KV "
        "cache is "
        "needed, which is larger than the available KV cache memory (1.0 GiB).",
        "vllm",
        True,
        {"tried": 4.5 * GIB, "free": GIB},
    ),
    "vllm-startup": (
        "ValueError: Free memory on device cuda:0 (12.25/23.50 GiB) on startup is less than desired "
        "GPU memory "
        "utilization (0.92, 21.75 GiB).",
        "vllm",
        True,
        {"tried": 21.75 * GIB, "free": 12.25 * GIB, "total": 23.5 * GIB},
    ),
    "tgi-total": (
        "Not enough memory to handle 16000 total tokens with 2 prefill tokens. You need to decrease",
        "tgi",
        True,
        {},
    ),
    "sglang-prefill": (
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 4321 tokens.\n"
        "Available tokens: 12",
        "sglang",
        True,
        {"tried": None},
    ),
    "sglang-host-decimal": (
        "ValueError: Not enough host memory available. Requesting 64.25 GB but only have 50.00 GB free.",
        "sglang",
        True,
        {"tried": 64_250_000_000, "free": 50_000_000_000},
    ),
    "tensorrt": (
        "[TRT] [E] [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)\n"
        "[TRT] [W] Requested amount of GPU memory (4294967296 bytes) could not be allocated.\n"
        "[TRT] [E] [engine.cpp::read::1091] Error Code 2: OutOfMemory (Requested size was 4294967296 bytes.)",
        "tensorrt",
        True,
        {"tried": 4294967296},
    ),
    "tensorrt-llm": (
        "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, stream): out of memory (buf.h:112)",
        "tensorrt_llm",
        True,
        {},
    ),
    "llama-cpp": (
        "0.02.477 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 51748.50 MiB on device 1: "
        "cudaMalloc "
        "failed: out of memory\n0.02.484 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 "
        "buffer of size "
        "54262235136\n0.02.486 E graph_reserve: failed to allocate compute buffers",
        "llama_cpp",
        True,
        {"tried": 51748.5 * MIB},
    ),
    "llama-cpp-pool": (
        "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:291\n  cuMemCreate(...)",
        "llama_cpp",
        True,
        {},
    ),
    "llama-cpp-comma": (
        "ggml_cuda_host_malloc: failed to allocate 1900,00 MiB of pinned memory: out of memory",
        "llama_cpp",
        True,
        {},
    ),
    "lmcache": (
        "LMCache WARNING: Failed to allocate memory for tensor(torch.Size([2, 32, 256, 1024]), "
        "torch.bfloat16) "
        "because no memory is available (memory_management.py:672)",
        "lmcache",
        True,
        {},
    ),
    "xla-hbm": (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space "
        "hbm. Used 21.50G of 15.50G hbm. Exceeded hbm capacity by 6.00G.",
        "xla",
        True,
        {"tried": 21.5 * GIB, "total": 15.5 * GIB},
    ),
    "xla-reserve": (
        "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.50G at the bottom of "
        "memory. That was not possible. There are 147.50M free, 0B reserved",
        "xla",
        True,
        {"tried": 29.5 * GIB, "free": 147.5 * MIB},
    ),
    "xla-exact-size": (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 13.50GiB (14495514624B) on device ordinal 0",
        "xla",
        True,
        {"tried": 14495514624},
    ),
    "tensorflow": (
        "ResourceExhaustedError: OOM when allocating tensor with shape[128,64,9,9] and type float on "
        "/device:GPU:0 "
        "by allocator GPU_0_bfc",
        "tensorflow",
        True,
        {},
    ),
    "tensorflow-driver": (
        "E tensorflow\\stream_executor\\cuda\\cuda_driver.cc:828] failed to allocate 1.53G "
        "(1645608960 bytes) from "
        "device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "tensorflow",
        True,
        {"tried": 1645608960},
    ),
    "cupy-thousands": (
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allocated "
        "so far: 1,024 "
        "bytes).",
        "unknown",
        True,
        {"tried": 2147483648, "allocated": 1024},
    ),
    "kernel": ("kernel: Out of memory: Killed process 77 (python) total-vm:9000kB", "unknown", True, {}),
}


def figures(reading):
    return {name: getattr(reading, f"{name}_bytes") for name in TORCH_2_FIGURES}


def assert_reads(text, name):
    _, family, is_oom, expected = MESSAGES[name]
    reading = diagnose(text)
    assert (reading.family, reading.is_oom) == (family, is_oom)
    assert {key: figures(reading)[key] for key in expected} == expected
    assert len(reading.events) == 1


@pytest.mark.parametrize("name", MESSAGES)
def test_each_engine_s_message_gives_its_family_and_figures(name):
    assert_reads(MESSAGES[name][0], name)


@pytest.mark.skipif(MESSAGES_AT_HAND is None, reason="no real messages at hand (KVLAB_SHARED_DATA names their folder)")
def test_real_messages_read_right():
    wrong = {}
    for entry in map(json.loads, MESSAGES_AT_HAND.read_text().splitlines()):
        reading = diagnose(entry["text"])
        expected = {key: value for key, value in entry.items() if key not in ("id", "text")}
        found = {key: getattr(reading, key) for key in expected}
        if found != expected:
            wrong[entry["id"]] = {k: (expected[k], found[k]) for k in expected if expected[k] != found[k]}
    assert not wrong


def sample_of(template):
    """A message as the engine would print it: each placeholder of a template filled in."""
    values = {
        "*": " ",
        "n": "7",
        "w": "CUDA0",
        "free:decimal": "2.00GB",
        "tried:decimal": "3.00GB",
        "tried:x": "3.00G",
        "total:x": "9.00G",
        "free:x": "2.00G",
    }
    parts = template.replace("{", "\0{").replace("}", "}\0").split("\0")
    for index, part in enumerate(parts):
        if part.startswith("{"):
            inner = part[1:-1]
            plain = "3.00" if ":" in inner else "3.00 GiB"
            parts[index] = values.get(inner, inner.split("|")[0] if "|" in inner else plain)
    return "".join(parts)


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: entry.start[:50])
def test_every_format_finds_a_message_made_from_it(entry):
    prefix = "RuntimeError: " if entry.mention and not entry.own_line else ""
    reading = diagnose(prefix + sample_of(entry.start))
    assert reading.events
    if not callable(entry.family):
        assert (reading.family, reading.is_oom) == (entry.family, entry.is_oom)


def test_every_format_can_be_found_fast():
    for entry in FORMATS:
        assert len(anchor(entry.start)) >= 6, entry.start
        assert any(hint in sample_of(entry.start).lower() for hint in HINTS), entry.start


def hard_wrapped(text, width):
    return "\n".join(text[i : i + width] for i in range(0, len(text), width))


@pytest.mark.parametrize("width", [31, 60, 80, 111])
def test_a_message_cut_by_a_terminal_at_any_column_reads_the_same(width):
    assert_reads(hard_wrapped(TORCH_2, width), "torch-2")


PREFIXES = [
    "2026-08-10 14:32:07,123 ERROR ",
    "[2026-08-10T14:32:07.123456Z] ",
    "(EngineCore_DP0 pid=316) ERROR 08-10 14:32:07 [core.py:718] ",
    "[rank3]: ",
    "server-1  | ",
    "Aug 10 14:32:07 node7 kvserver[4242]: ",
    "[08/10/2026-14:32:07] [TRT-LLM] [E] ",
    "2026-08-10T14:32:07.123456789Z stderr F ",
    "\x1b[31mERROR\x1b[0m \x1b[1m14:32:07\x1b[0m ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_message_that_a_logger_broke_into_prefixed_lines_reads_the_same(prefix):
    lines = textwrap.wrap(TORCH_2, 60, break_long_words=False, break_on_hyphens=False)
    assert_reads("\n".join(prefix + line for line in lines), "torch-2")


def test_colours_line_ends_escapes_and_other_languages_do_not_matter():
    assert_reads("\x1b[1;31m" + TORCH_2.replace(" ", " \x1b[0m\x1b[33m"), "torch-2")
    assert_reads(
        f"启动失败：\r\n{hard_wrapped(TORCH_2, 70)}\r\nпамять закончилась\r\n".replace("\n", "\r\n"),
        "torch-2",
    )
    assert_reads(json.dumps({"log": "\n".join(textwrap.wrap(TORCH_2, 60)), "stream": "stderr"}), "torch-2")
    framed = "\n".join(f"│ {line:<70} │" for line in textwrap.wrap(TORCH_2, 70))
    assert_reads(framed, "torch-2")
    assert_reads(MESSAGES["torch-async-backend"][0].replace("\n", "\\n"), "torch-async-backend")


def test_a_number_at_a_line_s_end_does_not_grow_by_the_next_line_s_digits():
    text = "alloc_tensor_range: failed to allocate CUDA0 buffer of size 1037832192\n17.468 next line"
    assert diagnose(text).tried_bytes == 1037832192
    assert diagnose(hard_wrapped(TORCH_2.replace("2.50 GiB", "2621440 KiB"), 81)).tried_bytes == 2.5 * GIB


def noise(lines, seed=0):
    random.seed(seed)
    return [
        f"INFO 08-10 14:{random.randrange(60):02}:07 [loggers.py:127] GPU KV cache usage: "
        f"{random.randrange(999) / 10}%, memory {random.randrange(99)} GiB, running "
        f"{random.randrange(64)} reqs"
        for _ in range(lines)
    ]


def test_failures_are_found_with_their_lines_wherever_in_a_long_log_they_stand():
    lines = noise(12_000)
    places = [0, 1, 2391, 2400, 2411, 2499, 5000, 7777, 11_998]
    for place in reversed(places):
        lines[place:place] = textwrap.wrap(TORCH_2, 90)
    reading = diagnose("\n".join(lines))
    wrapped = len(textwrap.wrap(TORCH_2, 90))
    assert [event.line_number for event in reading.events] == [
        place + wrapped * index + 1 for index, place in enumerate(places)
    ]
    assert all(figures(event) == TORCH_2_FIGURES for event in reading.events)


def test_the_article_s_log_holds_three_failures_of_three_kinds():
    reading = diagnose(ARTICLE_LOG)
    assert [(e.family, e.is_oom, e.cause, e.line_number) for e in reading.events] == [
        ("torch_cuda", True, "unknown", 1),
        ("cublas", True, "device_full", 3),
        ("unknown", None, "kv_capacity", 4),
    ]
    assert reading.tried_bytes == 2 * GIB
    assert reading.total_bytes is None
    assert any("PyTorch prints no tensor shape" in line for line in reading.advice)
    assert not any("tensor shape" in line for line in diagnose(TORCH_2).advice)


def test_the_first_memory_failure_speaks_for_the_text():
    mixed = "\n".join(
        [
            MESSAGES["illegal-access"][0],
            "x",
            MESSAGES["cublas-null"][0],
            "x",
            TORCH_2,
            MESSAGES["vllm-startup"][0],
        ]
    )
    reading = diagnose(mixed)
    assert [event.family for event in reading.events] == ["cuda_runtime", "cublas", "torch_cuda", "vllm"]
    assert reading.family == "torch_cuda"
    assert figures(reading) == TORCH_2_FIGURES


def test_the_thousand_threads_of_one_device_assert_are_one_failure():
    thread = (
        "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:94: operator(): block: [3,0,0], thread: [{},0,0] "
        "Assertion `-sizes[i] <= index && index < sizes[i]` failed."
    )
    text = "\n".join(
        [thread.format(i) for i in range(128)] + ["RuntimeError: CUDA error: device-side assert triggered"]
    )
    assert [(e.family, e.is_oom, e.cause) for e in diagnose(text).events] == [("cuda_assert", False, "not_memory")]


def torch_message(tried, total, free, allocated, unallocated, middle=""):
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of "
        f"which {free} is "
        f"free. {middle}Of the allocated memory {allocated} is allocated by PyTorch, and "
        f"{unallocated} is reserved "
        "by PyTorch but unallocated."
    )


PROCESS = "Including non-PyTorch memory, this process has {} memory in use. "
CAUSES = {
    "device_full": torch_message("1.00 GiB", "23.50 GiB", "0.20 GiB", "22.50 GiB", "0.30 GiB"),
    "request_larger_than_device": torch_message("30.00 GiB", "23.50 GiB", "20.00 GiB", "3.00 GiB", "0 bytes"),
    "fragmentation": torch_message("2.00 GiB", "23.50 GiB", "0.20 GiB", "18.00 GiB", "5.00 GiB"),
    "other_process": torch_message(
        "2.00 GiB", "23.50 GiB", "0.20 GiB", "9.00 GiB", "0.10 GiB", PROCESS.format("9.50 GiB")
    ),
    "memory_fraction": torch_message(
        "2.00 GiB", "79.10 GiB", "55.00 GiB", "22.50 GiB", "0.10 GiB", "23.70 GiB allowed; "
    ),
    "inconsistent_numbers": torch_message("2.00 MiB", "287.98 GiB", "203.49 GiB", "68.63 GiB", "0.50 MiB"),
    "kv_capacity": MESSAGES["vllm-serve-one"][0],
    "host_memory": MESSAGES["torch-cpu-windows"][0],
    "not_memory": MESSAGES["index-on-cpu"][0],
    "unknown": "RuntimeError: CUDA error: out of memory",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_figures_tell_the_cause(cause):
    reading = diagnose(CAUSES[cause])
    assert reading.cause == cause
    assert reading.advice
    assert len(reading.events) == 1


@pytest.mark.parametrize(
    "text",
    [
        torch_message("20.00 MiB", "8.00 GiB", "0 bytes", "23.25 GiB", "0.10 GiB"),
        torch_message("16.00 GiB", "15.50 GiB", "84.98 GiB", "1.50 GiB", "8.00 GiB"),
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already "
        "allocated; 0 bytes free; 5.00 GiB reserved in total by PyTorch)",
        torch_message("20.00 MiB", "8.00 GiB", "3.00 GiB", "6.00 GiB", "1.00 GiB"),
    ],
    ids=["allocated>total", "free>total", "allocated>reserved", "reserved+free>total"],
)
def test_figures_that_cannot_be_true_together_are_said_to_contradict(text):
    assert diagnose(text).cause == "inconsistent_numbers"
    assert "contradict" in diagnose(text).advice[0]


def test_rounding_alone_is_no_contradiction():
    text = torch_message("4.19 GiB", "44.40 GiB", "4.20 GiB", "39.85 GiB", "40.98 MiB", PROCESS.format("40.20 GiB"))
    assert diagnose(text).cause == "device_full"


def test_a_server_s_pool_is_blamed_once_it_exists_and_not_while_weights_load():
    frame = '  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 7, in {}\n'
    running = frame.format("execute_model") + "    self.model(input_ids)\n" + TORCH_2
    loading = frame.format("load_model") + "    self.model_runner.load_model()\n" + TORCH_2
    assert diagnose(running).cause == "static_pool"
    assert "gpu-memory-utilization" in " ".join(diagnose(running).advice)
    assert diagnose(loading).cause == diagnose(TORCH_2).cause == "device_full"


INNOCENT = [
    "",
    "\n\n",
    "all 12 tests passed; nothing to report",
    "INFO 01-28 16:08:46 [gpu_worker.py:358] Available KV cache memory: 18.78 GiB",
    "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, "
    "consider enforcing "
    "eager mode.",
    "except torch.cuda.OutOfMemoryError as error:",
    "INFO: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid CUDA out of memory errors",
    "IndexError: list index out of range",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "grpc: RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)",
    "RuntimeError: The expanded size of the tensor (2) must match the existing size (4) at dimension 2.",
    "AssertionError: Torch not compiled with CUDA enabled",
    "tried to allocate time for a review; 2 GiB total capacity; nothing free",
    "this can also trigger an out of memory error.",
    "115643 valgrind cannot allocate memory",
    '    if (!block) die("out of memory");',
    "MEM_ERROR is returned if not enough memory is available",
]


@pytest.mark.parametrize("text", INNOCENT)
def test_a_text_without_a_memory_failure_says_so(text):
    reading = diagnose(text)
    assert (reading.family, reading.is_oom, reading.cause, reading.events) == (
        "unknown",
        False,
        "not_memory",
        [],
    )


ANY_PROGRAM = [
    "RuntimeError: out of memory",
    "java.lang.OutOfMemoryError: Java heap space",
    "bash: fork: Cannot allocate memory",
    "[ERROR] loader: not enough memory",
    "2026-08-10 14:32:07 FATAL engine failed to start (out of memory)",
    "Out of memory",
    "Insufficient memory",
]


@pytest.mark.parametrize("text", ANY_PROGRAM)
def test_other_programs_failures_are_seen_without_a_family(text):
    reading = diagnose(text)
    assert (reading.is_oom, len(reading.events)) == (True, 1)
    assert reading.family == "unknown"


def test_a_figure_that_is_no_number_is_left_out():
    text = torch_message("1.00 GiB", "23.50 GiB", "0.20 GiB", "22.50 GiB", "0.3..0 GiB", PROCESS.format("2..5 GiB"))
    text = text.replace("Tried to allocate 1.00", "Tried to allocate -1.00")
    reading = diagnose(text)
    assert (reading.tried_bytes, reading.reserved_unallocated_bytes) == (None, None)
    assert reading.allocated_bytes == 22.5 * GIB


def test_live_exceptions_are_read():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(2**60, dtype=torch.uint8)
    reading = diagnose_exception(refusal.value)
    assert (reading.family, reading.cause, reading.tried_bytes) == ("torch_cpu", "host_memory", 2**60)

    with pytest.raises(MemoryError) as refusal:
        numpy.empty(2**58, dtype=numpy.uint8)
    assert diagnose_exception(refusal.value).tried_bytes == 2**58

    buffer, rows = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 1, 4)
    with pytest.raises(IndexError) as refusal:
        buffer.index_copy_(2, torch.tensor([8]), rows)
    assert diagnose_exception(refusal.value).family == "cuda_assert"

    assert diagnose_exception(torch.OutOfMemoryError("who knows")).is_oom is True
    assert diagnose_exception(MemoryError()).cause == "host_memory"


def test_a_chain_of_exceptions_is_read_innermost_first():
    error = RuntimeError("Not enough memory to handle 4096 prefill tokens. You need to decrease")
    error.__cause__ = torch.OutOfMemoryError(TORCH_2.partition(": ")[2])
    reading = diagnose_exception(error)
    assert [event.family for event in reading.events] == ["torch_cuda", "tgi"]
    assert figures(reading) == TORCH_2_FIGURES


def test_files_are_read_in_the_encodings_that_consoles_write(tmp_path):
    for encoding in ("utf-8", "utf-16"):
        path = tmp_path / f"{encoding}.log"
        path.write_text(f"início\n{TORCH_2}\n", encoding=encoding)
        assert figures(diagnose_file(path)) == TORCH_2_FIGURES
    path.write_bytes(b"\xff\x00\x80binary\n" + TORCH_2.encode() + b"\n\xfe\xfd")
    assert figures(diagnose_file(path)) == TORCH_2_FIGURES


@pytest.mark.parametrize(
    "unit",
    [
        "CUDA out of memory ",
        "CUDA out of memory. Tried to allocate\n",
        "failed to allocate ",
        "block: [1,1,1], thread: [1,1,1] Assertion ",
        "1",
        " ",
        "- ",
        "\n",
        "\x1b[",
        "a.MemoryError ",
        "Requested amount of GPU memory (1",
        "error out of memory ",
    ],
    ids=repr,
)
def test_hostile_text_takes_time_in_proportion_to_its_length(unit):
    def seconds(chars):
        text = unit * (chars // len(unit))
        began = time.process_time()
        diagnose(text)
        return time.process_time() - began

    seconds(10_000)
    assert seconds(1_500_000) < 30.0  # it takes 3 at most; work that grows with the square takes minutes


class Endless(io.TextIOBase):
    """A stream of `chars` characters that exist only while they are read; no line ever ends."""

    def __init__(self, chars):
        self.left = chars

    def readline(self, size=-1):
        size = min(size, self.left)
        self.left -= size
        return "CUDA memory " * (size // 12) + "x" * (size % 12)


def test_memory_stays_bounded_however_long_the_text():
    tracemalloc.start()
    diagnose_stream(Endless(8_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


def test_no_more_than_a_thousand_failures_are_listed_and_lines_are_shortened():
    reading = diagnose((TORCH_2 + " " + "x" * 5000 + "\n") * 1200)
    assert (len(reading.events), reading.truncated) == (1000, True)
    assert max(len(event.line) for event in reading.events) <= 240
    assert len(diagnose(TORCH_2 * 1000).model_dump_json()) < 2_000_000


def mutated(draw, text):
    """The text with pieces doubled, dropped, overwritten or moved."""
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 60)))
        piece = draw(
            st.sampled_from(["", text[start:end] * 2, "\n", "\x1b[0m", "é\u2028", "9" * 30, "{}", "-1.5e9 GiB", ","])
        )
        text = text[:start] + piece + text[end:]
    return text


@st.composite
def mutations(draw):
    names = draw(st.lists(st.sampled_from(sorted(MESSAGES)), min_size=1, max_size=3))
    return "\n".join(mutated(draw, MESSAGES[name][0]) for name in names)


@settings(max_examples=400, deadline=None)
@given(st.one_of(mutations(), st.text(max_size=400)))
def test_no_text_breaks_the_reader_and_every_answer_is_valid(text):
    reading = diagnose(text)
    assert Diagnosis.model_validate_json(reading.model_dump_json()) == reading
    assert all(event.line_number <= text.count("\n") + text.count("\r") + 1 for event in reading.events)
    assert all(len(line) < 400 for line in reading.advice)
    if not reading.events:
        assert reading.cause == "not_memory"


def shown(reading):
    console = Console(file=io.StringIO(), width=200)
    console.print(render(reading))
    return console.file.getvalue()


def test_people_see_the_figures_the_verdict_and_the_advice():
    page = shown(diagnose(ARTICLE_LOG + TORCH_2))
    for part in ("torch_cuda", "2.50 GiB", "out of memory", "cannot tell", "Cause:", "nvidia-smi"):
        assert part in page
    assert "No memory failure" in shown(diagnose("fine"))
    assert "and 980 more" in shown(diagnose(f"{TORCH_2}\n" * 1200))
