"""What a diagnosis says to people: the reasoning, what to do, and the next command to run."""

from kvlab.memory.oom.causes import TORCH_DEVICE, contradiction, gib, held_by_others
from kvlab.memory.oom.model import Cause, Family, Figures, Size

TGI_MODULES = ("text_generation_server", "text_generation_launcher", "text_generation_router", "text_generation_client")
# The setting with which a server sizes its pool at start, by a name that its logs and tracebacks carry.
POOL_SETTINGS = {
    "vllm": "vLLM's --gpu-memory-utilization",
    "sglang": "SGLang's --mem-fraction-static",
    **dict.fromkeys(TGI_MODULES, "TGI's --cuda-memory-fraction or --max-batch-total-tokens"),
    "tensorrt_llm": "TensorRT-LLM's free_gpu_memory_fraction",
}

WHO_HOLDS = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
PLAN = "kvlab plan --model MODEL --gpu GPU --batch B --tokens T"
SNAPSHOT = "kvlab snapshot FILE (a dump of torch.cuda.memory._snapshot())"

INDEX_ERROR = [
    "An index was out of bounds; memory did not run out.",
    "On a GPU the context is lost: every later CUDA error of this process is a consequence.",
    "Look for a static cache or an embedding that is shorter than the sequence.",
    "Next: run again with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see the line that did it.",
]
BAD_ADDRESS = ["An invalid address was used; memory did not run out.", "Next: compute-sanitizer COMMAND"]
SEGMENT = (
    "What PyTorch tried to allocate is the segment it asks the driver for (2 MiB, 20 MiB or a multiple "
    "of 2 MiB), not the size of the tensor."
)


def advice_for(family: Family, is_oom: bool | None, cause: Cause, f: Figures, pool_of: str | None) -> list[str]:
    """The reasoning first. pool_of: the engine, if any, whose pool takes most of the device."""
    if is_oom is False:
        return INDEX_ERROR if family == "cuda_assert" else BAD_ADDRESS
    reason = _unsure(cause) if is_oom is None else _reason(cause, f, family)
    segment = [SEGMENT] if family in TORCH_DEVICE and f.tried else []
    return [reason, *segment, *_steps(cause, pool_of)]


def _unsure(cause: Cause) -> str:
    if cause == "kv_capacity":
        return "A request did not fit the space set aside for keys and values; the device need not be full."
    return "This message has other reasons beside a full device; by itself it does not tell which."


def _reason(cause: Cause, f: Figures, family: Family) -> str:
    tried = gib(f.tried) if f.tried else "the request"
    match cause:
        case "inconsistent_numbers":
            return f"The printed figures contradict each other: {contradiction(f, family)}."
        case "request_larger_than_device" if f.tried and f.total:
            return f"{tried} was asked for at once on a device of {gib(f.total)}: freeing cannot help."
        case "request_larger_than_device":
            return "More was asked for at once than the device can give: freeing cannot help."
        case "memory_fraction" if f.limit:
            return f"A limit of {gib(f.limit)}, set by the user, was hit; the device itself had room."
        case "memory_fraction":
            return "A limit set by the user, a fraction of the device, was hit."
        case "fragmentation":
            return f"{gib(f.unallocated)} is reserved but unallocated: in one piece it had held {tried}."
        case "other_process" if f.total and f.allocated:
            return f"Some {gib(Size(held_by_others(f)))} of {gib(f.total)} is held by another process."
        case "other_process":
            return "Something else holds memory that this start expects to be free."
        case "device_full" if f.total and f.allocated:
            beside = f" and {gib(f.other)} beside it" if f.other else ""
            held = f"{gib(f.allocated)}{beside} of {gib(f.total)}"
            return f"This process has {held} allocated; {tried} more does not fit."
        case "device_full":
            return "The library's own cudaMalloc found the device full; mostly PyTorch's cache holds the rest."
        case "static_pool":
            return f"A pool sized at start holds the rest of the device; no room was left for {tried}."
        case "kv_capacity" if f.tried and f.free:
            return f"The engine needs {tried} for keys and values and has {gib(f.free)}."
        case "kv_capacity":
            return "The space set aside for keys and values is smaller than what was asked of it."
        case "host_memory":
            return f"CPU memory ran out, not the GPU's: {tried} could not be had."
        case _:
            return "The message prints too few figures to tell whose memory filled the device."


def _steps(cause: Cause, pool_of: str | None) -> list[str]:
    match cause:
        case "fragmentation":
            return [
                f"Next: {SNAPSHOT}",
                "Look at what is releasable in it: holes between live blocks stay holes under expandable_segments "
                "too; it helps where segments of changing size were cut up.",
            ]
        case "memory_fraction":
            return ["Raise or remove torch.cuda.set_per_process_memory_fraction.", f"Next: {PLAN}"]
        case "other_process":
            return ["Stop the other process, or ask for less.", f"Next: {WHO_HOLDS}"]
        case "kv_capacity":
            return ["Shorten the context, run fewer sequences, or halve the cache's dtype.", f"Next: {PLAN}"]
        case "static_pool":
            setting = POOL_SETTINGS.get(pool_of or "", "the share of the device that the engine takes at start")
            return [f"Lower {setting}, or the number of sequences.", f"Next: {PLAN}"]
        case "host_memory":
            return ["Next: free -h; then the container's limit (memory.max) and ulimit -v."]
        case "inconsistent_numbers":
            return [
                "Do not compute with them: a driver that lends system memory (Windows, WSL, unified memory), "
                "a limit that old versions do not print, or figures of two moments can explain it.",
                f"Next: {WHO_HOLDS}",
            ]
        case "request_larger_than_device":
            return ["Split it: a shorter prompt, chunked prefill, no S x S score matrix.", f"Next: {PLAN}"]
        case "device_full":
            return [f"Next: {PLAN}", f"To see who owns it: {SNAPSHOT}"]
        case _:
            return [f"Next: {WHO_HOLDS}"]
