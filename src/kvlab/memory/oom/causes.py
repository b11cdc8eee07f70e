"""Why a failure happened, as far as its figures and the text around it say, and what to do next."""

from kvlab.memory.oom.model import Cause, Family, Figures, Size

GIB = 2**30
# cudaMalloc hands out 2 MiB pages and needs some for its own tables: less than this above the request is full.
DRIVER_SLACK_BYTES = 32 * 2**20
# A CUDA context and the display; only what exceeds this share is held by somebody else.
OWN_OVERHEAD_BYTES = 512 * 2**20
FULL_SHARE = 0.85

TORCH_DEVICE: tuple[Family, ...] = ("torch_cuda", "torch_hip", "torch_mps")

# The setting with which each server sizes its pool at start, by a name that its logs and tracebacks carry.
POOL_SETTINGS = {
    "vllm": "vLLM's --gpu-memory-utilization",
    "sglang": "SGLang's --mem-fraction-static",
    "text_generation_server": "TGI's --cuda-memory-fraction or --max-batch-total-tokens",
    "tensorrt_llm": "TensorRT-LLM's free_gpu_memory_fraction",
}

WHO_HOLDS = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
PLAN = "kvlab plan --model MODEL --gpu GPU --batch B --tokens T"
SNAPSHOT = "kvlab snapshot SNAPSHOT.pickle (recorded with torch.cuda.memory._record_memory_history())"


def cause_of(family: Family, is_oom: bool | None, stated: Cause | None, figures: Figures) -> Cause:
    """The most likely cause. `stated` is what the format itself says; figures that contradict it win."""
    if is_oom is False:
        return "not_memory"
    if contradiction(figures, family):
        return "inconsistent_numbers"
    if stated:
        return stated
    return _cause_from_figures(figures)


def contradiction(figures: Figures, family: Family) -> str | None:
    """What in the printed figures cannot be true together, rounding allowed for; None if nothing."""
    f = figures
    for part, whole, sentence in (
        (f.allocated, f.reserved, "more is allocated than PyTorch has reserved"),
        (f.allocated, f.total, "more is allocated than the device has"),
        (f.reserved, f.total, "more is reserved than the device has"),
        (f.free, f.total, "more is free than the device has"),
    ):
        if part and whole and _exceeds(part, whole):
            return f"{sentence}: {gib(part)} against {gib(whole)}"
    if family not in TORCH_DEVICE:
        return None
    if f.reserved and f.free and f.total and _exceeds(_add(f.reserved, f.free), f.total):
        return f"reserved {gib(f.reserved)} and free {gib(f.free)} are more than the device's {gib(f.total)}"
    if f.tried and f.free and _exceeds(f.free, f.tried, DRIVER_SLACK_BYTES) and not _limit_binds(f):
        return f"{gib(f.tried)} was refused although {gib(f.free)} is free"
    return None


def _cause_from_figures(f: Figures) -> Cause:
    if f.tried and f.total and _exceeds(f.tried, f.total):
        return "request_larger_than_device"
    if _limit_binds(f):
        return "memory_fraction"
    if f.tried and f.unallocated and f.unallocated.bytes >= f.tried.bytes:
        return "fragmentation"
    if not (f.total and f.allocated):
        return "unknown"
    if f.allocated.bytes >= FULL_SHARE * f.total.bytes:
        return "device_full"
    if f.tried and f.free and held_by_others(f) >= max(f.tried.bytes - f.free.bytes, f.total.bytes * 0.05):
        return "other_process"
    if f.tried and f.allocated.bytes + f.tried.bytes >= 0.9 * f.total.bytes:
        return "device_full"
    return "unknown"


def _limit_binds(f: Figures) -> bool:
    """A cap below the device's size, which the request would have crossed."""
    if not (f.limit and f.tried and f.total) or f.limit.bytes >= 0.99 * f.total.bytes:
        return False
    held = f.reserved or f.allocated
    return held is None or held.bytes + f.tried.bytes > f.limit.bytes - f.limit.rounding_bytes


def held_by_others(f: Figures) -> int:
    """Bytes of the device that neither are free nor belong to this process, as near as the message tells."""
    if not (f.total and f.free):
        return 0
    if f.process and not _exceeds(f.process, f.total):
        mine = f.process.bytes
    else:
        mine = _own_of(f) + OWN_OVERHEAD_BYTES
    return max(f.total.bytes - f.free.bytes - mine, 0)


def _own_of(f: Figures) -> int:
    """This process among those listed: the smallest that holds at least what PyTorch has reserved."""
    reserved = (f.reserved or f.allocated or Size(0)).bytes
    candidates = [p.bytes for p in f.processes if p.bytes + p.rounding_bytes >= reserved]
    return min(candidates, default=reserved)


def _exceeds(first: Size, second: Size, slack_bytes: int = 0) -> bool:
    return first.bytes - second.bytes > first.rounding_bytes + second.rounding_bytes + slack_bytes + 1


def _add(first: Size, second: Size) -> Size:
    return Size(first.bytes + second.bytes, first.rounding_bytes + second.rounding_bytes)


def gib(size: Size) -> str:
    """A size as people read it: GiB, or MiB below one."""
    return f"{size.bytes / GIB:.2f} GiB" if size.bytes >= GIB else f"{size.bytes / 2**20:.2f} MiB"


def advice_for(
    family: Family, is_oom: bool | None, cause: Cause, f: Figures, pool_of: str | None
) -> list[str]:
    """Reasoning first, then what to do, then the next command to run."""
    if family == "cuda_assert":
        return [
            "An index was out of bounds; memory did not run out. On a GPU the context is unusable from here on: "
            "every later CUDA error in this process is a consequence.",
            "Look for a static cache or an embedding that is shorter than the sequence.",
            "Run again with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see the line that did it.",
        ]
    if is_oom is False:
        return ["An invalid address was used; memory did not run out.", "Run under compute-sanitizer."]
    advice = [_reason(family, is_oom, cause, f)]
    if family in TORCH_DEVICE and f.tried and cause not in ("kv_capacity", "host_memory"):
        advice.append(
            "The size PyTorch tried to allocate is the segment it asks the driver for (2 MiB, 20 MiB or a multiple "
            "of 2 MiB), not the size of the tensor."
        )
    return advice + _steps(family, cause, f, pool_of)


def _reason(family: Family, is_oom: bool | None, cause: Cause, f: Figures) -> str:
    tried = gib(f.tried) if f.tried else "the request"
    match cause:
        case "inconsistent_numbers":
            return f"The printed figures contradict each other: {contradiction(f, family)}."
        case "request_larger_than_device" if f.tried and f.total:
            return f"{tried} was asked for at once on a device of {gib(f.total)}: no cleaning up can help."
        case "request_larger_than_device":
            return f"More was asked for at once ({tried}) than the device can give."
        case "memory_fraction" if f.limit:
            return f"A limit of {gib(f.limit)} set by the user was hit; the device itself had room."
        case "memory_fraction":
            return "A limit set by the user (a per-process memory fraction) was hit."
        case "fragmentation" if f.unallocated:
            return (
                f"{gib(f.unallocated)} is reserved but unallocated, and would have held {tried} in one piece."
            )
        case "other_process" if f.total and f.free and f.allocated:
            held = Size(held_by_others(f))
            return f"About {gib(held)} of {gib(f.total)} is held by something else than this process."
        case "other_process":
            return "Something else holds the memory that this start expects to be free."
        case "device_full" if f.total and f.allocated:
            return (
                f"This process has {gib(f.allocated)} of {gib(f.total)} allocated; {tried} more does not fit."
            )
        case "device_full":
            return (
                "The library's own cudaMalloc found the device full. PyTorch's cache usually holds what it needed: "
                "this status comes without PyTorch flushing its cache and trying again."
            )
        case "static_pool":
            return f"A pool sized at start holds the rest of the device; {tried} was left no room."
        case "kv_capacity" if f.tried and f.free:
            return f"The engine needs {tried} for keys and values and has {gib(f.free)}."
        case "kv_capacity":
            return "The space set aside for keys and values is smaller than what was asked; the device need not be full."
        case "host_memory":
            return f"CPU memory ran out, not the GPU's: {tried} could not be had."
        case _ if is_oom is None:
            return "This message has other reasons beside a full device; it alone does not tell which."
        case _:
            return "The message prints no figures that would tell whose memory filled the device."


def _steps(family: Family, cause: Cause, f: Figures, pool_of: str | None) -> list[str]:
    match cause:
        case "fragmentation":
            return ["Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.", f"Next: {SNAPSHOT}"]
        case "memory_fraction":
            return ["Raise or remove torch.cuda.set_per_process_memory_fraction.", f"Next: {PLAN}"]
        case "other_process":
            return ["Stop the other process, or ask for less.", f"Next: {WHO_HOLDS}"]
        case "kv_capacity":
            return [
                "Shorten the context, run fewer sequences, use an 8-bit cache or a window.",
                f"Next: {PLAN}",
            ]
        case "static_pool":
            setting = POOL_SETTINGS.get(
                pool_of or "", "the fraction of the device that the engine takes at start"
            )
            return [f"Lower {setting}, or the number of sequences it warms up with.", f"Next: {PLAN}"]
        case "host_memory":
            return ["Next: free -h; and the limit of the container (memory.max) or `ulimit -v`."]
        case "inconsistent_numbers":
            return [
                "A driver that lends system memory (Windows, WSL, unified memory), a limit that old versions do not "
                "print, or figures of two moments can explain it; do not compute with them.",
                f"Next: {WHO_HOLDS}",
            ]
        case "request_larger_than_device":
            return [
                "Split the request: a shorter prompt, chunked prefill, no S x S score matrix.",
                f"Next: {PLAN}",
            ]
        case "device_full":
            return [f"Next: {PLAN}", f"Or see who owns it: {SNAPSHOT}"]
        case _:
            return [f"Next: {WHO_HOLDS}"]
