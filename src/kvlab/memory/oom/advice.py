"""What a diagnosis says to people: the reasoning, what to do, and the next command to run."""

from kvlab.memory.oom.causes import contradiction, gib, held_by_others
from kvlab.memory.oom.model import Cause, Family, Figures, Size
from kvlab.memory.oom.scan import Found

TGI_MODULES = ("text_generation_server", "text_generation_launcher", "text_generation_router", "text_generation_client")
# The setting with which a server sizes its pool at start, by a name that its logs and tracebacks carry.
POOL_SETTINGS = {
    "vllm": "vLLM's --gpu-memory-utilization",
    "sglang": "SGLang's --mem-fraction-static",
    **dict.fromkeys(TGI_MODULES, "TGI's --cuda-memory-fraction or --max-batch-total-tokens"),
    "tensorrt_llm": "TensorRT-LLM's free_gpu_memory_fraction",
}

WHO_HOLDS = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
# By the first word of the message's format.
WHO_HOLDS_ON = {"HIP": "rocm-smi --showpids", "MPS": "top -o mem", "NPU": "npu-smi info", "XPU": "xpu-smi ps"}
PLAN = "kvlab plan --model MODEL --gpu GPU --batch B --tokens T"
SNAPSHOT = "kvlab snapshot FILE (from torch.cuda.memory._dump_snapshot)"
WHO_KILLED = "dmesg -T | grep -i -e oom -e 'killed process'"

INDEX_ERROR = [
    "An index was out of bounds; memory did not run out.",
    "On a GPU the context is lost: every later CUDA error of this process is a consequence.",
    "Look for a static cache or an embedding that is shorter than the sequence.",
    "Next: run again with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see the line that did it.",
]
BAD_ADDRESS = ["An invalid address was used; memory did not run out.", "Next: compute-sanitizer COMMAND"]
HAS_SEGMENTS: tuple[Family, ...] = ("torch_cuda", "torch_hip")
SHARED_MEMORY = [
    "A kernel wants more of a multiprocessor's shared memory than there is; the device's memory did not run out.",
    "Next: smaller blocks, fewer stages or a smaller head dimension for that kernel.",
]
KILLED = "Something killed the process: mostly the kernel, when CPU memory runs out; this line does not say so."
WORKSPACE = [
    "Next: raise the size of that buffer where the engine lets you, or let fewer tokens through at once "
    "(a smaller prefill chunk, fewer sequences)."
]
SEGMENT = (
    "What PyTorch tried to allocate is the segment it asks the driver for (2 MiB, 20 MiB or a multiple "
    "of 2 MiB), not the size of the tensor."
)


def advice_for(found: Found, cause: Cause, pool_of: str | None) -> list[str]:
    """The reasoning first. pool_of: the engine, if any, whose pool takes most of the device."""
    family, f, is_oom = found.family, found.figures, found.format.is_oom
    if is_oom is False:
        return {"cuda_assert": INDEX_ERROR, "unknown": SHARED_MEMORY}.get(family, BAD_ADDRESS)
    if is_oom is None and found.format.announces:
        return [KILLED, f"Next: {WHO_KILLED}"]
    reason = _unsure(cause) if is_oom is None else _reason(cause, f, family)
    segment = [SEGMENT] if family in HAS_SEGMENTS and f.tried else []
    if _is_workspace(cause, family):
        return [reason, *WORKSPACE]
    who_holds = WHO_HOLDS_ON.get(found.format.start[:3], WHO_HOLDS)
    who_allocated = SNAPSHOT if family in HAS_SEGMENTS else who_holds
    engine = pool_of or (family if family in POOL_SETTINGS else None)
    return [reason, *segment, *_steps(cause, engine, who_holds, who_allocated)]


def _is_workspace(cause: Cause, family: Family) -> bool:
    """A buffer of fixed size within a program, unlike the pool of a server that takes the device."""
    return cause == "static_pool" and family in ("unknown", "llama_cpp")


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
            had_room = f.free and f.tried and f.free.bytes >= f.tried.bytes
            return (
                f"A limit of {gib(f.limit)}, set by the user, was hit{'; the device itself had room' * bool(had_room)}."
            )
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
        case "static_pool" if _is_workspace(cause, family):
            return f"A buffer whose size was fixed at start has no room left for {tried}; the device may have."
        case "static_pool":
            return f"A pool sized at start holds the rest of the device; no room was left for {tried}."
        case "kv_capacity" if f.tried and f.free:
            return f"The engine needs {tried} for keys and values and has {gib(f.free)}."
        case "kv_capacity":
            return "The space set aside for keys and values is smaller than what was asked of it."
        case "host_memory":
            return f"CPU memory ran out, not the GPU's{f': {tried} could not be had' if f.tried else ''}."
        case _:
            return "The message prints too few figures to tell whose memory filled the device."


def _steps(cause: Cause, pool_of: str | None, who_holds: str, who_allocated: str) -> list[str]:
    setting = POOL_SETTINGS.get(pool_of or "")
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
            return ["Stop the other process, or ask for less.", f"Next: {who_holds}"]
        case "kv_capacity":
            more = [f"Or give the pool more: {setting}."] if setting else []
            return ["Shorten the context, run fewer sequences, or halve the cache's dtype.", *more, f"Next: {PLAN}"]
        case "static_pool":
            share = setting or "the share of the device that the engine takes at start"
            return [f"Lower {share}, or the number of sequences.", f"Next: {PLAN}"]
        case "host_memory":
            return [
                f"Next: free -h; ulimit -v; {WHO_KILLED}",
                "In a container its own limit counts: cat /sys/fs/cgroup/memory.max",
            ]
        case "inconsistent_numbers":
            return [
                "Do not compute with them: a driver that lends system memory (Windows, WSL, unified memory), "
                "a limit that old versions do not print, or figures of two moments can explain it.",
                f"Next: {who_holds}",
            ]
        case "request_larger_than_device":
            return ["Split it: a shorter prompt, chunked prefill, no S x S score matrix.", f"Next: {PLAN}"]
        case "device_full":
            return [f"Next: {PLAN}", f"Who holds it: {who_allocated}"]
        case _:
            return [f"Next: {who_holds}"]
