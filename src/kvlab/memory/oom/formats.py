"""The message formats of the engines, as each prints them. What they mean is in `causes`.

The order matters where two formats start at the same place: the first that matches is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.memory.oom.model import Cause, Family


@dataclass(frozen=True)
class Format:
    """One kind of message.

    start: template the message begins with. figures: templates looked for behind it, up to the next message.
    family: or a function of the squeezed text just before and just after the start.
    follows: this line reports the consequence of a failure that the lines before it told already.
    announces: within so many lines comes one that tells more, and that one speaks for both.
    mention: the words alone also occur in advice and prose, so the line must look like an error.
    own_line: the start must be the first thing on its line, behind a dotted module name at most.
    term: nobody uses the word but for this, yet it too occurs in advice.
    denials: what, right behind the start, turns it into its contrary.
    """

    family: Family | Callable[[str, str], Family]
    start: str
    figures: tuple[str, ...] = ()
    is_oom: bool | None = True
    cause: Cause | None = None
    follows: bool = False
    announces: int = 0
    mention: bool = False
    own_line: bool = False
    term: bool = False
    denials: tuple[str, ...] = ()


TORCH_FIGURES = (
    "Tried to allocate {tried}",
    "{total} total capacity",
    "{allocated} already allocated",
    "{free} free;",
    "{reserved} reserved in total by PyTorch",
    "{unallocated} cached)",
    "has a total {capacity|capacty} of {total}",
    "of which {free} is free",
    "this process has {process} memory in use",
    "{limit} allowed;",
    "Of the allocated memory {allocated} is allocated by PyTorch",
    "{unallocated} is reserved by PyTorch but unallocated",
)
ASYNC_FIGURES = (
    "Currently allocated: {allocated}",
    "Requested: {tried}",
    "Device limit: {total}",
    "Free (according to CUDA): {free}",
    "PyTorch limit (set by user-supplied memory fraction): {limit}",
)


def _runtime_owner(before: str, after: str) -> Family:
    """ggml and TensorRT-LLM print the runtime's words in lines of their own."""
    if "ggml" in after[:400] or "ggml" in before[-160:] or "llamarunner" in before[-160:]:
        return "llama_cpp"
    if "[tensorrt-llm]" in before[-120:]:
        return "tensorrt_llm"
    return "cuda_runtime"


def _hip_owner(before: str, after: str) -> Family:
    return "llama_cpp" if "ggml" in before[-160:] + after[:400] else "torch_hip"


def _driver_owner(before: str, after: str) -> Family:
    owner = _compiler_of(before[-200:])
    return owner or ("llama_cpp" if "ggml" in before[-200:] else "cuda_driver")


def _bfc_owner(before: str, after: str) -> Family:
    return _compiler_of(before[-200:]) or "tensorflow"


def _compiler_of(line: str) -> Family | None:
    """TensorFlow and XLA share source files; the path under which each was built tells them apart.

    JAX builds `external/xla` (before that `external/org_tensorflow`), TensorFlow `external/local_xla`.
    """
    if "external/local_" in line:
        return "tensorflow"
    if any(path in line for path in ("external/xla", "external/tsl", "external/org_tensorflow", "jaxlib")):
        return "xla"
    if "tensorflow" in line:
        return "tensorflow"
    return "xla" if "xla/" in line or "tsl/" in line else None


def _vulkan_owner(before: str, after: str) -> Family:
    return "llama_cpp" if "ggml" in before[-300:] + after[:300] else "unknown"


def _metal_owner(before: str, after: str) -> Family:
    return "llama_cpp" if "ggml" in before[-200:] + after[:200] else "unknown"


TORCH = (
    Format(
        "torch_cuda",
        "CUDA out of memory. Allocation was preemptively rejected",
        ("Requested size: {tried}",),
        cause="memory_fraction",
    ),
    Format(
        "torch_cuda",
        "CUDA out of memory. Tried to allocate more than 1EB memory",
        cause="request_larger_than_device",
    ),
    Format("vllm", "CUDA out of memory occurred when warming up", cause="static_pool"),
    Format("torch_cuda", "CUDA out of memory. Tried to allocate", TORCH_FIGURES),
    Format("torch_hip", "HIP out of memory. Tried to allocate", TORCH_FIGURES),
    Format(
        "unknown",
        "XPU out of memory. Tried to allocate more than 1EB memory",
        cause="request_larger_than_device",
    ),
    Format(
        "unknown",
        "NPU out of memory. Tried to allocate more than 1EB memory",
        cause="request_larger_than_device",
    ),
    Format("unknown", "XPU out of memory. Tried to allocate", TORCH_FIGURES),
    Format("unknown", "NPU out of memory. Tried to allocate", TORCH_FIGURES),
    Format(
        "unknown",
        "Current platform can NOT allocate memory block with size larger than",
        TORCH_FIGURES,
        cause="request_larger_than_device",
    ),
    # The head may be lost: a title, a quotation, a line that a logger cut.
    Format("torch_cuda", "Tried to allocate {tried} (GPU {n}; {total} total capacity", TORCH_FIGURES),
    Format("torch_cuda", "Tried to allocate {tried}. GPU {n} has a total {capacity|capacty} of", TORCH_FIGURES),
    Format("torch_cuda", "CUDA out of memory", TORCH_FIGURES, mention=True),
    Format("torch_hip", "HIP out of memory", TORCH_FIGURES, mention=True),
    Format("torch_cuda", "Allocation on device {n} would exceed allowed memory", ASYNC_FIGURES),
    Format("torch_cuda", "OutOfMemoryError: Allocation on device", ASYNC_FIGURES),
    Format(
        "torch_cuda",
        "memory allocation failed with OOM on device {n} while trying to allocate {tried}",
        ("(free: {free}, total: {total})",),
    ),
    Format("torch_cuda", "memory mapping failed with OOM on device"),
    Format("torch_cuda", "cuda runtime err{or|}({2|02}): out of memory"),
    Format("torch_cuda", "torch.OutOfMemoryError", mention=True, own_line=True),
    Format("torch_cuda", "torch.cuda.OutOfMemoryError", mention=True, own_line=True),
    Format("torch_cuda", "THCudaCheck FAIL {*}error=2: out of memory"),
    Format(
        "torch_mps",
        "MPS backend out of memory",
        (
            "MPS allocated: {allocated}, other allocations: {other}, max",
            "max allowed: {total})",
            "Tried to allocate {tried}",
        ),
    ),
    Format("torch_mps", "Invalid buffer size: {tried}", cause="request_larger_than_device"),
    Format(
        "torch_cpu",
        "DefaultCPUAllocator: {can't allocate memory|not enough memory}",
        ("you tried to allocate {tried}", "Error code {n} (Cannot allocate memory)"),
        cause="host_memory",
    ),
    Format("torch_cpu", "Torch: not enough memory: you tried to allocate {tried}", cause="host_memory"),
    Format("torch_cpu", "unable to mmap {tried} from file", ("Cannot allocate memory",), cause="host_memory"),
    Format("torch_cpu", "MemoryError", cause="host_memory", mention=True, own_line=True),
    Format("torch_cpu", "Unable to allocate {tried} for an array with shape", cause="host_memory"),
    Format("torch_cpu", "instance of std::bad_alloc", ("what(): std::bad_alloc",), cause="host_memory"),
    Format("cuda_runtime", "what(): std::bad_alloc: out_of_memory: CUDA error", ("cudaErrorMemoryAllocation",)),
    Format("cuda_runtime", "MemoryError: std::bad_alloc: out_of_memory: CUDA error", ("cudaErrorMemoryAllocation",)),
    Format("torch_cpu", "what(): std::bad_alloc", cause="host_memory"),
    Format("torch_cpu", "MemoryError: std::bad_alloc", cause="host_memory"),
    Format("torch_cpu", "dataloader's workers are out of shared memory", cause="host_memory"),
    Format("torch_cpu", "unable to allocate shared memory(shm)", cause="host_memory"),
    Format("torch_cpu", "[WinError 1455]", cause="host_memory"),
    Format("torch_cpu", "The paging file is too small for this operation", cause="host_memory", follows=True),
    Format("torch_cpu", "[Errno 12] Cannot allocate memory", cause="host_memory"),
    Format("torch_cpu", "Unable to allocate array with shape", cause="host_memory"),
)

CUDA = (
    Format("cublas", "CUBLAS_STATUS_ALLOC_FAILED", cause="device_full"),
    Format("cublas", "CUBLAS_STATUS_NOT_INITIALIZED", is_oom=None),
    Format("cublas", "CUBLAS_STATUS_INTERNAL_ERROR", is_oom=None),
    Format("cublas", "CUBLAS_STATUS_EXECUTION_FAILED", is_oom=None),
    Format("cublas", "failed to create cublas handle: the resource allocation failed", cause="device_full"),
    Format("cublas", "failed to create cublas handle: the library was not initialized", is_oom=None),
    Format("torch_hip", "HIPBLAS_STATUS_ALLOC_FAILED", cause="device_full"),
    Format("unknown", "CUDNN_STATUS_ALLOC_FAILED", cause="device_full"),
    Format("unknown", "CUDNN_STATUS_NOT_INITIALIZED", is_oom=None),
    Format("unknown", "CUDNN_STATUS_INTERNAL_ERROR", is_oom=None),
    Format("unknown", "CUSOLVER_STATUS_ALLOC_FAILED", cause="device_full"),
    Format("unknown", "CUFFT_ALLOC_FAILED", cause="device_full"),
    Format("unknown", "CUSPARSE_STATUS_ALLOC_FAILED", cause="device_full"),
    Format("nvml", "NVML_SUCCESS == {*}INTERNAL ASSERT FAILED", is_oom=None),
    Format("nvml", "NVMLError_Memory", is_oom=None),
    Format("cuda_assert", "device-side assert triggered", is_oom=False, follows=True),
    Format("cuda_assert", "cudaErrorAssert", is_oom=False, follows=True),
    Format("cuda_assert", "CUDA_ERROR_ASSERT", is_oom=False, follows=True),
    Format(
        "cuda_assert",
        "block: [{n},{n},{n}], thread: [{n},{n},{n}] Assertion{*}failed",
        is_oom=False,
        follows=True,
    ),
    Format("cuda_assert", "is out of bounds for {dimension|axis} {n} with size {n}", is_oom=False),
    Format("cuda_assert", "start ({n}) + length ({n}) exceeds dimension size ({n})", is_oom=False),
    Format("cuda_assert", "IndexError: index out of range in self", is_oom=False),
    Format("cuda_runtime", "an illegal memory access was encountered", is_oom=False),
    Format("cuda_runtime", "cudaErrorIllegalAddress", is_oom=False, follows=True),
    Format("cuda_driver", "CUDA_ERROR_ILLEGAL_ADDRESS", is_oom=False),
    Format("cuda_driver", "CUDA driver error: out of memory"),
    Format("cuda_driver", "Triton Error [CUDA]: out of memory"),
    Format("cuda_driver", "cuMemAlloc failed: out of memory"),
    Format("cuda_driver", "cuMemCreate failed: out of memory"),
    Format("cuda_driver", "CUDA Error: out of memory at {*}cumem_allocator"),
    Format(_runtime_owner, "CUDA error: out of memory", ("allocating {tried} on device",)),
    Format(_hip_owner, "HIP error: out of memory"),
    Format(_hip_owner, "hipErrorOutOfMemory", follows=True),
    Format(_runtime_owner, "Error out of memory at line {n} in file"),
    Format(_runtime_owner, "CUDA runtime error: out of memory"),
    Format(_runtime_owner, "CUDA failed with error out of memory"),
    Format(_runtime_owner, "CUDA failure 2: out of memory"),
    Format(_runtime_owner, "Cuda failure out of memory"),
    Format(_runtime_owner, "Cuda failure 2 out of memory"),
    Format(_runtime_owner, "Failed to cudaMalloc {tried} bytes on device", ("(error 2 out of memory)",)),
    Format(_runtime_owner, "cudaMalloc failed: out of memory"),
    Format(
        "cuda_runtime",
        "StandardGpuResources: alloc fail type {w} dev {n} {*}size {tried} (cudaMalloc error out of memory",
    ),
    Format(_runtime_owner, "cudaMalloc error out of memory"),
    Format(_runtime_owner, "CUDA: out of memory"),
    Format(
        _runtime_owner,
        "cudaErrorMemoryAllocation",
        ("out of memory", "Free memory: {free}", "Requested memory: {tried}"),
        follows=True,
    ),
    Format(
        "cuda_runtime",
        "Failed to CUDA {calloc async|calloc|host alloc|malloc} {tried}",
        is_oom=None,
        follows=True,
    ),
    Format("unknown", "UR_RESULT_ERROR_OUT_OF_{DEVICE|HOST}_MEMORY"),
    Format("unknown", "out of resource: shared memory", is_oom=False),
    Format(_driver_owner, "failed to alloc {tried} bytes on host: CUDA_ERROR_OUT_OF_MEMORY", cause="host_memory"),
    Format(
        _driver_owner,
        "failed to {allocate|alloc} {n}{*}({tried} bytes) from device: {*}CUDA_ERROR_OUT_OF_MEMORY",
    ),
    Format(_driver_owner, "failed to {allocate|alloc} {tried} from device: {*}CUDA_ERROR_OUT_OF_MEMORY"),
    Format(_driver_owner, "CUDA_ERROR_OUT_OF_MEMORY", (": out of memory",)),
)

VLLM = (
    Format(
        "vllm",
        "To serve at least one request with the {models's|model's|model} max seq len ({n}),",
        ("{tried} KV cache is needed", "available KV cache memory ({free})"),
        cause="kv_capacity",
    ),
    Format(
        "vllm",
        "max seq len ({n}) is larger than the maximum number of tokens that can be stored in KV cache",
        cause="kv_capacity",
    ),
    Format("vllm", "No available memory for the cache blocks", cause="kv_capacity"),
    Format(
        "vllm",
        "Free memory on device {*}({free:GiB}/{total:GiB} GiB) on startup is less than desired "
        "GPU memory utilization ({n}, {tried})",
        cause="other_process",
    ),
    Format("vllm", "is preempted by {*}because there is not enough KV cache space", cause="kv_capacity"),
    Format("vllm", "too long and exceeds the capacity of block_manager", cause="kv_capacity"),
    Format("vllm", "Out of memory! No free blocks are available", cause="kv_capacity"),
    Format("vllm", "Cannot get {n} free blocks from the pool", cause="kv_capacity"),
    Format("vllm", "exceeds available Mamba cache blocks ({n})", cause="kv_capacity"),
    Format("vllm", "Too large swap space. {tried} out of the {total} total CPU memory", cause="host_memory"),
    Format("vllm", "Error in memory profiling. Initial free memory", is_oom=None, cause="other_process"),
)

SERVERS = (
    Format("tgi", "Not enough memory to handle {n}{*}prefill tokens", cause="kv_capacity"),
    Format("tgi", "Not enough memory to handle max_total_tokens=", cause="kv_capacity"),
    Format("tgi", "Out of available cache blocks: asked {n}, only {n} free blocks", cause="kv_capacity"),
    Format(
        "tgi",
        "Not enough VRAM to run the model: Available: {free:decimal} - Model {tried:decimal}",
        cause="request_larger_than_device",
    ),
    Format(
        "sglang",
        "Not enough memory. Please try to {increase|decrease|reduce} --mem-fraction-static",
        cause="kv_capacity",
    ),
    Format("sglang", "Loaded weights leave no GPU memory for the KV cache", cause="kv_capacity"),
    Format(
        "sglang",
        "Prefill out of memory",
        ("Try to allocate {n} tokens", "Available tokens: {n}"),
        cause="kv_capacity",
    ),
    Format(
        "sglang",
        "Decode out of memory",
        ("Try to allocate {n} tokens", "Available tokens: {n}"),
        cause="kv_capacity",
    ),
    Format(
        "sglang",
        "Out of memory. Try to lower your batch size",
        ("Try to allocate {n} tokens",),
        cause="kv_capacity",
    ),
    Format("sglang", "alloc_req_slots runs out of memory", cause="kv_capacity"),
    Format("sglang", "KV cache pool is full. Retract requests", cause="kv_capacity"),
    Format("sglang", "Not enough GPU memory for hybrid state cache", cause="kv_capacity"),
    Format(
        "sglang",
        "Not enough host memory available. Requesting {tried:decimal} but only have {free:decimal} free",
        cause="host_memory",
    ),
    Format("sglang", "The memory capacity is unbalanced", is_oom=None, cause="other_process"),
    Format(
        "lmcache",
        "Failed to allocate memory block of size {tried} because no memory is available",
        cause="kv_capacity",
    ),
    Format(
        "lmcache",
        "Failed to allocate memory for {tensor(|the KV cache}",
        ("because no memory is available",),
        cause="kv_capacity",
    ),
    Format("lmcache", "No eviction candidates found in local cpu backend", cause="kv_capacity", follows=True),
    Format("lmcache", "Failed to allocate memory {during|obj}", cause="kv_capacity", follows=True),
    Format("lmcache", "Memory allocation failed during sync disk load", cause="kv_capacity", follows=True),
)

NVIDIA_ENGINES = (
    Format(
        "tensorrt_llm",
        "maxTokensInPagedKvCache{*}must be large enough to process at least 1 sequence",
        cause="kv_capacity",
    ),
    Format("tensorrt_llm", "Can't allocate new blocks. No free blocks left", cause="kv_capacity"),
    Format("tensorrt_llm", "No free blocks left", cause="kv_capacity"),
    Format("tensorrt_llm", "Impossible to fit {in any|any} sequence in kvCache", cause="kv_capacity"),
    Format(
        "tensorrt_llm",
        "Executor creation failed due to insufficient GPU memory",
        ("Total GPU memory (GiB): {total:GiB}", "component creation attempt (GiB): {free:GiB}"),
    ),
    Format("tensorrt_llm", "exceeds the KV cache manager's maximum supported length", cause="kv_capacity"),
    Format("tensorrt_llm", "[TensorRT-LLM][ERROR]{*}out of memory", mention=True),
    Format("tensorrt", "Error Code {n}: Cuda Runtime (out of memory)"),
    Format("tensorrt", "Error Code {n}: OutOfMemory", ("(Requested size was {tried}.)",), follows=True),
    Format("tensorrt", "Requested amount of {GPU memory|memory} ({tried}) could not be allocated", follows=True),
    Format(
        "tensorrt",
        "due to insufficient memory on requested size of {tried} detected for tactic",
        follows=True,
    ),
    Format("tensorrt", "Cuda Error in {*}2 (out of memory)"),
    Format("tensorrt", "OutOfMemory Error in", follows=True),
    Format("tensorrt", "Out of memory error during getBestTactic", follows=True),
)

LLAMA_CPP = (
    Format("llama_cpp", "alloc_buffer: allocating {tried} on device {n}: cudaMalloc failed: out of memory"),
    Format(
        "llama_cpp",
        "allocating {tried} on device {n}: {cudaMalloc|hipMalloc|musaMalloc} failed: out of memory",
    ),
    Format("llama_cpp", "CUDA error 2 at {*}: out of memory"),
    Format("llama_cpp", "failed to allocate {w} buffer of size {tried}", follows=True),
    Format("llama_cpp", "ggml_vulkan: Device memory allocation of size {tried} failed"),
    Format("llama_cpp", "vk::Device::allocateMemory: ErrorOutOf{Device|Host}Memory", follows=True),
    Format(
        "llama_cpp",
        "Requested buffer size exceeds device {memory allocation|buffer size} limit",
        cause="request_larger_than_device",
    ),
    Format(_vulkan_owner, "ErrorOutOf{Device|Host}Memory", follows=True),
    Format(_vulkan_owner, "VK_ERROR_OUT_OF_{DEVICE|HOST}_MEMORY", follows=True),
    Format(
        "llama_cpp",
        "ggml_metal_add_buffer: buffer {w} size {tried} is larger than buffer maximum of {total}",
        cause="request_larger_than_device",
    ),
    Format("llama_cpp", "can't allocate {tried} of memory on {device|host}"),
    Format("llama_cpp", "error loading model: mmap failed: Cannot allocate memory", cause="host_memory"),
    Format("llama_cpp", "failed to allocate {*}MiB of pinned memory: out of memory", cause="host_memory"),
    Format(
        "llama_cpp",
        "ggml_aligned_malloc: insufficient memory (attempted to allocate {tried})",
        cause="host_memory",
    ),
    Format(
        "llama_cpp",
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size {tried}",
        cause="host_memory",
    ),
    Format("llama_cpp", "error: failed to allocate buffer, size = {tried}"),
    Format(
        "llama_cpp",
        "not enough space in the context's memory pool (needed {tried}, available {free})",
        cause="static_pool",
    ),
    Format("llama_cpp", "failed to allocate buffer for kv cache", follows=True),
    Format("llama_cpp", "failed to allocate compute {buffers|buffer|pp buffers}", follows=True),
    Format("llama_cpp", "failed to allocate the compute buffer", follows=True),
    Format("llama_cpp", "llama_kv_cache_init() failed", follows=True),
    Format("llama_cpp", "error loading model: unable to allocate", follows=True),
    Format("llama_cpp", "failed to find a memory slot for batch of size {n}", cause="kv_capacity", follows=True),
    Format("llama_cpp", "failed to find free space in the KV cache", cause="kv_capacity", follows=True),
    Format(
        "llama_cpp",
        "KV cache is full - try increasing it via the context size",
        cause="kv_capacity",
        follows=True,
    ),
    Format("llama_cpp", "Input prompt is too big compared to KV size", cause="kv_capacity", follows=True),
    Format("llama_cpp", "NoKvSlot", cause="kv_capacity", follows=True),
    Format("llama_cpp", "exceeds the available context size", is_oom=None, cause="kv_capacity"),
    Format(
        "llama_cpp",
        "model requires more system memory ({tried}) than is available ({free})",
        cause="host_memory",
    ),
)

COMPILERS = (
    Format("xla", "Out of memory {while trying to allocate|trying to allocate} {tried}"),
    Format(
        "unknown",
        "Out of memory allocating {tried} (allocated so far: {allocated}",
        ("limit set to: {limit}",),
    ),
    Format("xla", "Out of memory allocating {tried}"),
    Format("xla", "Ran out of memory in memory space {w}. Used {tried:x} of {total:x} {hbm|vmem|smem}"),
    Format("xla", "Failed to allocate {tried} bytes for new constant"),
    Format("xla", "Attempting to {allocate|reserve} {tried:x}{*}That was not possible. There are {free:x} free"),
    Format("xla", "Failed to allocate request for {n}{*}({tried}B) on device"),
    Format("xla", "RESOURCE_EXHAUSTED: Failed to allocate {tried}"),
    Format("xla", "RESOURCE_EXHAUSTED: {*}out of memory", mention=True),
    Format("tensorflow", "OOM when allocating tensor with shape", ("by allocator",)),
    Format(_bfc_owner, "ran out of memory trying to allocate {tried}"),
    Format("tensorflow", "Dst tensor is not initialized", is_oom=None),
    Format("tensorflow", "failed to allocate memory [Op:"),
)

OTHERS = (
    Format("unknown", "Failed to allocate memory for requested buffer of size {tried}"),
    Format("unknown", "Available memory of {free} is smaller than requested bytes of {tried}"),
    Format(
        "unknown",
        "Out of memory error on GPU {n}. Cannot allocate {tried} memory on GPU",
        ("{allocated} memory has been allocated", "available memory is only {free}"),
    ),
    Format(
        "unknown",
        "Failed to allocate memory for {w} with size {tried} and alignment",
        cause="static_pool",
    ),
    Format(
        "unknown",
        "Buffer overflow when allocating memory for {w} with size {tried} and alignment",
        ("but only {free} available in AlignedAllocator",),
        cause="static_pool",
    ),
    Format("unknown", "Out of workspace memory in AlignedAll", cause="static_pool"),
    Format("unknown", "Insufficient space in device allocation"),
    Format("unknown", "memory allocation of {tried} failed", cause="host_memory"),
    Format(
        "unknown",
        "[metal::malloc] Attempting to allocate {tried} which is greater than "
        "the maximum allowed buffer size of {total}",
    ),
    Format(_metal_owner, "kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    Format("unknown", "Could not allocate tensor with {tried}. There is not enough GPU video memory"),
    Format("unknown", "There is not enough GPU video memory available"),
    Format("unknown", "Not enough memory resources are available to"),
    Format("unknown", "NvMapMemAllocInternalTagged: {n} error 12"),
    Format("unknown", "Insufficient GPU memory error: The available single GPU memory is {free}"),
    Format(
        "unknown",
        "Cannot estimate KV cache capacity. The model weight size {tried} may be larger than GPU memory size {total}",
    ),
    Format("unknown", "kv cache overflow", is_oom=None, cause="kv_capacity"),
    Format("unknown", "out of memory", mention=True),
    Format("unknown", "OutOfMemoryError", mention=True),
    Format("unknown", "insufficient {GPU memory|memory|VRAM}", ("Failed to allocate {tried}",), mention=True),
    Format("unknown", "not enough {GPU memory|memory|VRAM}", mention=True),
    Format("unknown", "cannot allocate {GPU memory|memory}", mention=True),
    Format("unknown", "failed to allocate {GPU memory|memory}", mention=True),
    Format("unknown", "unable to allocate {GPU memory|memory}", mention=True),
    Format("unknown", "memory allocation fail{ed|ure}", mention=True),
    Format("unknown", "failed to allocate {tried} bytes", mention=True),
)

# Between the cause and the name of what it killed, the kernel prints the table of all processes.
PROCESS_TABLE_LINES = 2000

# The kernel, and those who run containers and jobs, on a process that they ended.
KILLERS = (
    Format("unknown", "invoked oom-killer", cause="host_memory", announces=PROCESS_TABLE_LINES),
    Format("unknown", "oom-kill:constraint=", cause="host_memory", announces=PROCESS_TABLE_LINES),
    Format("unknown", "Out of memory: Kill{ed|} process", cause="host_memory"),
    Format("unknown", "cgroup out of memory: Kill", cause="host_memory"),
    Format("unknown", "oom-kill event", cause="host_memory"),
    Format("unknown", "oom_kill event", cause="host_memory"),
    Format("unknown", "killed by the OOM killer", cause="host_memory"),
    Format("unknown", "Failed with result oom-kill", cause="host_memory", follows=True),
    Format("unknown", "TaskOOM event", cause="host_memory"),
    Format("unknown", "OOMKilled", cause="host_memory", term=True, denials=(":false", "=false")),
    Format("unknown", "OOMKilling", cause="host_memory", announces=PROCESS_TABLE_LINES),
    Format("unknown", "The node was low on resource: memory", cause="host_memory"),
    Format("unknown", "node running low on memory", cause="host_memory"),
    Format("unknown", "killed due to memory pressure (OOM)", cause="host_memory"),
    Format("unknown", "RayOutOfMemoryError: More than", cause="host_memory"),
    Format("unknown", "in object store because it is full", ("Object size is {tried}",), cause="host_memory"),
    Format("unknown", "exceeded {job|step|} memory limit", cause="host_memory"),
    Format("unknown", "CANCELLED AT {*} DUE TO MEMORY LIMIT", cause="host_memory"),
    # Somebody killed it: mostly the kernel for want of memory, but this line does not say so.
    Format("unknown", "Signal 9 (SIGKILL)", is_oom=None, follows=True, announces=20),
    Format("unknown", "signal: killed", is_oom=None, follows=True, announces=20),
    Format("unknown", "exit code{:|=|} {137|-9}", is_oom=None, follows=True, announces=20),
    Format("unknown", "exit status{:|=|} 137", is_oom=None, follows=True, announces=20),
    Format("unknown", "exited with code 137", is_oom=None, follows=True, announces=20),
    Format("unknown", "exits with return code = -9", is_oom=None, follows=True, announces=20),
    Format("unknown", "is killed by signal: Killed", is_oom=None, follows=True, announces=20),
    Format("unknown", "bash: line {n}: {n} Killed", is_oom=None, follows=True, announces=20),
    Format("unknown", "Killed", is_oom=None, follows=True, announces=20, mention=True, own_line=True),
)

FORMATS = TORCH + CUDA + VLLM + SERVERS + NVIDIA_ENGINES + KILLERS + OTHERS + LLAMA_CPP + COMPILERS
