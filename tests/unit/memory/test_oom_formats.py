"""Messages that programs other than the usual engines print, or print in part: family, verdict, cause and figures."""

import pytest

from kvlab.memory.oom import diagnose

KIB, MIB, GIB = 2**10, 2**20, 2**30

# text, family, is_oom, cause, figures in bytes
MESSAGES = {
    "head-lost": (
        "Tried to allocate 24.00 MiB (GPU 0; 3.00 GiB total capacity; 2.25 GiB already allocated; 4.00 MiB free; "
        "2.50 GiB reserved in total by PyTorch)",
        ("torch_cuda", True, "fragmentation"),
        {"tried": 24 * MIB, "total": 3 * GIB, "free": 4 * MIB, "reserved": 2.5 * GIB},
    ),
    "head-lost-2.x": (
        "Tried to allocate 24.00 MiB. GPU 0 has a total capacity of 3.00 GiB of which 4.00 MiB is free.",
        ("torch_cuda", True, "unknown"),
        {"tried": 24 * MIB, "total": 3 * GIB, "free": 4 * MIB},
    ),
    "torch-0.1": (
        "RuntimeError: cuda runtime err(2): out of memory at /opt/pytorch-0.1.12/torch/libTHC/THCstorage.cu:66",
        ("torch_cuda", True, "unknown"),
        {},
    ),
    "exception-report": (
        "- **Exception Type:** torch.OutOfMemoryError\n- **Exception Message:** Allocation on device ",
        ("torch_cuda", True, "unknown"),
        {},
    ),
    "exception-name-alone": ("torch.cuda.OutOfMemoryError", ("torch_cuda", True, "unknown"), {}),
    "runtime-with-a-hint-on-its-code": (
        "torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.",
        ("cuda_runtime", True, "unknown"),
        {},
    ),
    "xpu-contradiction": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 7.25 GiB "
        "of which 7.00 GiB is free. Of the allocated memory 256.50 KiB is allocated by PyTorch, and 1.75 MiB is "
        "reserved by PyTorch but unallocated.",
        ("unknown", True, "inconsistent_numbers"),
        {"tried": 3.5 * GIB, "allocated": 256.5 * KIB, "reserved_unallocated": 1.75 * MIB},
    ),
    "xpu-block-limit": (
        "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate "
        "5.50 GiB (GPU  0; 15.50 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)",
        ("unknown", True, "request_larger_than_device"),
        {"tried": 5.5 * GIB, "total": 15.5 * GIB, "allocated": 0, "reserved": 0},
    ),
    "level-zero": (
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        ("unknown", True, "unknown"),
        {},
    ),
    "npu-absurd": (
        "NPU out of memory. Tried to allocate more than 1EB memory",
        ("unknown", True, "request_larger_than_device"),
        {},
    ),
    "npu-beside-others": (
        "RuntimeError: NPU out of memory. Tried to allocate 24.00 MiB (NPU 0; 60.00 GiB total capacity; 10.00 GiB "
        "already allocated; 10.00 GiB current active; 16.00 MiB free; 10.50 GiB reserved in total by PyTorch)",
        ("unknown", True, "other_process"),
        {"tried": 24 * MIB, "reserved": 10.5 * GIB},
    ),
    "flashinfer": (
        "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 402653184 and alignment 16 in "
        "AlignedAllocator",
        ("unknown", True, "static_pool"),
        {"tried": 402653184},
    ),
    "flashinfer-new": (
        "Buffer overflow when allocating memory for batch_prefill_tmp_s with size 2097152 and alignment 16, but only "
        "512 bytes available in AlignedAllocator. Increase the workspace buffer size.",
        ("unknown", True, "static_pool"),
        {"tried": 2097152, "free": 512},
    ),
    "nccl": (
        "node7:77:99 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\n"
        "node7:77:99 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 4194304 bytes",
        ("cuda_runtime", True, "unknown"),
        {"tried": 4194304},
    ),
    "rmm": (
        "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /include/rmm/cuda_memory_resource.hpp:70: "
        "cudaErrorMemoryAllocation out of memory",
        ("cuda_runtime", True, "unknown"),
        {},
    ),
    "xla-preallocation": (
        "E external/xla/xla/stream_executor/cuda/cuda_driver.cc:628] failed to allocate 15.00GiB (16106127360 bytes) "
        "from device: RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        ("xla", True, "unknown"),
        {"tried": 16106127360},
    ),
    "onnxruntime-limit": (
        "onnxruntime::BFCArena::AllocateRawInternal Available memory of 1073741824 is smaller than requested bytes of "
        "2147483648",
        ("unknown", True, "unknown"),
        {"tried": 2 * GIB, "free": GIB},
    ),
    "paddle": (
        "Out of memory error on GPU 0. Cannot allocate 64.000244MB memory on GPU 0, 7.500000GB memory has been "
        "allocated and available memory is only 0.000000B.",
        ("unknown", True, "unknown"),
        {"tried": round(64.000244 * MIB), "allocated": 7.5 * GIB, "free": 0},
    ),
    "tensorrt-in-tensorrt-llm": (
        "[TensorRT-LLM][ERROR] 1: [defaultAllocator.cpp::allocate::19] Error Code 1: Cuda Runtime (out of memory)\n"
        "[TensorRT-LLM][WARNING] Requested amount of GPU memory (53687091200 bytes) could not be allocated.",
        ("tensorrt", True, "unknown"),
        {"tried": 53687091200},
    ),
    "metal-buffer": (
        "ggml_metal_add_buffer: buffer 'data' size 20401094656 is larger than buffer maximum of 17179869184",
        ("llama_cpp", True, "request_larger_than_device"),
        {"tried": 20401094656, "total": 17179869184},
    ),
    "vulkan-limit": (
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory\n"
        "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 8589934592\n"
        "graph_reserve: failed to allocate compute buffers",
        ("llama_cpp", True, "request_larger_than_device"),
        {"tried": 8589934592},
    ),
    "sycl": (
        "ggml_backend_sycl_buffer_type_alloc_buffer: can't allocate 3221225472 Bytes of memory on device",
        ("llama_cpp", True, "unknown"),
        {"tried": 3221225472},
    ),
    "llama-mmap": (
        "llama_model_load: error loading model: mmap failed: Cannot allocate memory",
        ("llama_cpp", True, "host_memory"),
        {},
    ),
    "rust": (
        "memory allocation of 17179869184 bytes failed",
        ("unknown", True, "host_memory"),
        {"tried": 17179869184},
    ),
    "shared-memory-of-a-kernel": (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 114688, Hardware limit: "
        "101376. Reducing block sizes or `num_stages` may help.",
        ("unknown", False, "not_memory"),
        {"tried": None},
    ),
    "narrow": (
        "RuntimeError: start (7) + length (3) exceeds dimension size (8).",
        ("cuda_assert", False, "not_memory"),
        {},
    ),
    "tvm": (
        "InternalError: Check failed: (e == cudaSuccess) is false: CUDA: out of memory",
        ("cuda_runtime", True, "unknown"),
        {},
    ),
    "faiss": (
        "StandardGpuResources: alloc fail type FlatData dev 0 space Device stream 0x55 size 8589934592 bytes "
        "(cudaMalloc error out of memory [2])",
        ("cuda_runtime", True, "unknown"),
        {"tried": 8589934592},
    ),
    "xgboost": (
        "Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n"
        "- Free memory: 1073741824\n- Requested memory: 4294967296",
        ("cuda_runtime", True, "unknown"),
        {"tried": 4294967296, "free": 1073741824},
    ),
    "mlc": (
        "TVMError: Check failed: (output_res.IsOk()) is false: Insufficient GPU memory error: The available single GPU "
        "memory is 20480.500 MB, which is less than the sum of model weight size (5120.000 MB) and temporary buffer "
        "size (16384.000 MB).",
        ("unknown", True, "unknown"),
        {"tried": None, "free": 20480.5 * MIB},
    ),
    "directml": (
        "RuntimeError: Could not allocate tensor with 8388608 bytes. There is not enough GPU video memory available!",
        ("unknown", True, "unknown"),
        {"tried": 8388608},
    ),
    "tpu-device": (
        "Bad StatusOr access: RESOURCE_EXHAUSTED: Failed to allocate 3.00GB on device",
        ("xla", True, "unknown"),
        {"tried": 3 * GIB},
    ),
    "neuron": (
        "ERROR  NRT:nrt_tensor_allocate  Failed to allocate 2147483648 bytes on NC 0",
        ("unknown", True, "unknown"),
        {"tried": 2147483648},
    ),
    "windows-in-german": (
        "OSError: [WinError 1455] Die Auslagerungsdatei ist zu klein, um diesen Vorgang durchzuführen.",
        ("torch_cpu", True, "host_memory"),
        {},
    ),
    "code-before-what-it-raised": (
        '    raise ValueError("No available memory for the cache blocks. "\n'
        '                     "Try increasing `gpu_memory_utilization` when "\n'
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        ("vllm", True, "kv_capacity"),
        {},
    ),
    "oom-killer": (
        "[  471.1] python invoked oom-killer: gfp_mask=0xd0, order=0, oom_score_adj=0\n"
        "[  471.2] [ pid ]   uid  tgid total_vm      rss nr_ptes swapents oom_score_adj name\n"
        "[  471.3] Memory cgroup out of memory: Kill process 77 (python) score 912 or sacrifice child\n"
        "[  471.4] Killed process 77 (python) total-vm:9000kB, anon-rss:8000kB",
        ("unknown", True, "host_memory"),
        {},
    ),
    "kubernetes": (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137",
        ("unknown", True, "host_memory"),
        {},
    ),
    "kubernetes-json": (
        '{"terminated":{"exitCode":137,"reason":"OOMKilled"}}',
        ("unknown", True, "host_memory"),
        {},
    ),
    "docker-says-no": (
        '"State": {\n  "Status": "exited",\n  "OOMKilled": false,\n  "ExitCode": 137\n}',
        ("unknown", None, "unknown"),
        {},
    ),
    "eviction": (
        "Warning  Evicted  The node was low on resource: memory. Container server was using 12Gi, request is 0",
        ("unknown", True, "host_memory"),
        {},
    ),
    "containerd": (
        'level=info msg="TaskOOM event container_id:\\"abc\\""',
        ("unknown", True, "host_memory"),
        {},
    ),
    "systemd": (
        "systemd[1]: serve.service: A process of this unit has been killed by the OOM killer.\n"
        "systemd[1]: serve.service: Failed with result 'oom-kill'.",
        ("unknown", True, "host_memory"),
        {},
    ),
    "slurm": (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO MEMORY LIMIT ***",
        ("unknown", True, "host_memory"),
        {},
    ),
    "raylet": (
        "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed due to other reasons at node (ID: 1f, IP: 10.0.0.7) over the last time period.",
        ("unknown", True, "host_memory"),
        {},
    ),
    "deepspeed-launcher": (
        "[ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = -9",
        ("unknown", None, "unknown"),
        {},
    ),
    "compose": ("server-1 exited with code 137", ("unknown", None, "unknown"), {}),
    "shell": (
        "train.sh: line 3: 4711 Killed                  python train.py\nKilled",
        ("unknown", None, "unknown"),
        {},
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_gives_one_failure_with_its_family_verdict_cause_and_figures(name):
    text, judged, expected = MESSAGES[name]
    reading = diagnose(text)
    assert (reading.family, reading.is_oom, reading.cause) == judged
    assert {key: getattr(reading, f"{key}_bytes") for key in expected} == expected
    assert len(reading.events) == 1


INNOCENT = [
    "tests/unit/test_oom.py::test_oom PASSED",
    "echo -1000 > /proc/self/oom_score_adj",
    "OOM_RETRY=3 ./serve --oom-policy=continue",
    "| Llama-3-8B | 15.0 GiB |\nNeeds 24 GiB of GPU memory, else you run out of memory.",
    "# Raises torch.OutOfMemoryError if the device is full",
    "    except torch.OutOfMemoryError as error:",
    "E   Failed: DID NOT RAISE <class 'torch.OutOfMemoryError'>",
    "ImportError: cannot import name 'OutOfMemoryError' from 'torch'",
    "* fix OOMKilled pods in staging",
    "kubectl set resources --limits=memory=4Gi   # avoid OOMKilled",
    '"State": {"Status": "running", "OOMKilled": false, "ExitCode": 0}',
    "oom_kill 0\nmemory.oom.group: 0\nnode_vmstat_oom_kill 0",
    "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |",
    "def is_oom(error): return 'out of memory' in str(error).lower()",
    "Die GPU hat 24 GiB. Bei Speichermangel (out of memory) bitte die Batchgröße verringern.",
    "ERROR Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/",
    "如果遇到 out of memory，请减小 batch size。",
    "feat: better message for CUDA out of memory (#1234)",
    '{"error":"Model is overloaded","error_type":"overloaded"}',
]


@pytest.mark.parametrize("text", INNOCENT)
def test_words_about_memory_are_no_failure(text):
    assert diagnose(text).events == []


def test_two_kills_are_two_failures():
    line = "kernel: Out of memory: Killed process {} (python) total-vm:9000kB, anon-rss:8000kB"
    assert len(diagnose("\n".join(line.format(pid) for pid in (77, 78))).events) == 2


def test_a_failure_far_behind_an_exit_code_stands_beside_it():
    near = "exit code 137\nRuntimeError: out of memory"
    far = "exit code 137\n" + "loading memory\n" * 100 + "RuntimeError: out of memory"
    assert [len(diagnose(text).events) for text in (near, far)] == [1, 2]


def test_a_message_ends_where_another_accelerator_s_begins():
    hip = "HIP out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity)"
    cuda = (
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 has a total capacity of 16.00 GiB of which 1.00 GiB is "
        "free. Of the allocated memory 14.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    first, second = diagnose(f"{hip}\n{cuda}").events
    assert (first.tried_bytes, first.allocated_bytes) == (2 * GIB, None)
    assert (second.tried_bytes, second.allocated_bytes) == (3 * GIB, 14 * GIB)


ADVICE = {
    "npu-beside-others": "npu-smi info",
    "xpu-contradiction": "xpu-smi ps",
    "shared-memory-of-a-kernel": "the device's memory did not run out",
    "flashinfer": "A buffer whose size was fixed at start has no room left for 384.00 MiB",
    "compose": "dmesg",
    "kubernetes": "cat /sys/fs/cgroup/memory.max",
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_next_step_fits_the_program_that_failed(name):
    advice = " ".join(diagnose(MESSAGES[name][0]).advice)
    assert ADVICE[name] in advice
    assert "nvidia-smi" not in advice


def test_a_limit_is_not_said_to_leave_room_where_the_device_has_none():
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which {} is free. "
        "{} allowed; Of the allocated memory 39.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
        "but unallocated."
    )
    for free, had_room in (("1.00 GiB", False), ("30.00 GiB", True)):
        reading = diagnose(text.format(free, "40.00 GiB"))
        assert reading.cause == "memory_fraction"
        assert ("had room" in reading.advice[0]) is had_room


def test_metal_has_no_segments_and_no_snapshot():
    text = "MPS backend out of memory (MPS allocated: 17.50 GB, other allocations: 384.00 KB, max allowed: 18.00 GB)."
    advice = " ".join(diagnose(f"{text} Tried to allocate 1.50 GB on private pool.").advice)
    assert "segment" not in advice
    assert "kvlab snapshot" not in advice
