"""Why a failure happened, as far as the figures in its message tell."""

from kvlab.memory.oom.model import Cause, Family, Figures, Size

# cudaMalloc hands out pages of 2 MiB and needs some itself: free by less than this is full.
DRIVER_SLACK_BYTES = 32 * 2**20
# A CUDA context and the like, where the message does not print what this process holds in all.
OWN_OVERHEAD_BYTES = 512 * 2**20
FULL_SHARE = 0.85
NEARLY_FULL_SHARE = 0.9
FOREIGN_SHARE = 0.05
TORCH_DEVICE: tuple[Family, ...] = ("torch_cuda", "torch_hip", "torch_mps")


def cause_of(family: Family, is_oom: bool | None, stated: Cause | None, figures: Figures) -> Cause:
    """The most likely cause. `stated` is what the format itself says; figures that cannot be true win."""
    if is_oom is False:
        return "not_memory"
    if contradiction(figures, family):
        return "inconsistent_numbers"
    return stated or _cause_from(figures)


def contradiction(f: Figures, family: Family) -> str | None:
    """What in the printed figures cannot be true together, rounding allowed for; None if nothing."""
    for part, whole, sentence in (
        (f.allocated, f.reserved, "more is allocated than PyTorch has reserved"),
        (f.allocated, f.total, "more is allocated than the device has"),
        (f.reserved, f.total, "more is reserved than the device has"),
        (f.free, f.total, "more is free than the device has"),
    ):
        if part and whole and exceeds(part, whole):
            return f"{sentence}, {gib(part)} against {gib(whole)}"
    if family not in TORCH_DEVICE and not f.reserved:  # which only PyTorch prints, for any accelerator
        return None
    if f.reserved and f.free and f.total and exceeds(_sum(f.reserved, f.free), f.total):
        return f"{gib(f.reserved)} reserved and {gib(f.free)} free are more than the device's {gib(f.total)}"
    if f.tried and f.free and exceeds(f.free, f.tried, DRIVER_SLACK_BYTES) and not limit_binds(f):
        return f"{gib(f.tried)} was refused although {gib(f.free)} is free"
    return None


def _cause_from(f: Figures) -> Cause:
    if f.tried and f.total and exceeds(f.tried, f.total):
        return "request_larger_than_device"
    if limit_binds(f):
        return "memory_fraction"
    if f.total and f.allocated and held_by_others(f) >= f.total.bytes / 2:
        return "other_process"
    if f.tried and f.unallocated and f.unallocated.bytes >= f.tried.bytes:
        return "fragmentation"
    if not (f.total and f.allocated):
        return "unknown"
    mine = f.allocated.bytes + (f.other.bytes if f.other else 0)
    if mine >= FULL_SHARE * f.total.bytes:
        return "device_full"
    if f.tried and f.free:
        missing = f.tried.bytes - f.free.bytes
        if held_by_others(f) >= max(missing, FOREIGN_SHARE * f.total.bytes):
            return "other_process"
    if f.tried and mine + f.tried.bytes >= NEARLY_FULL_SHARE * f.total.bytes:
        return "device_full"
    return "unknown"


def limit_binds(f: Figures) -> bool:
    """Whether there is a cap below the device's size that the request would have crossed."""
    if not (f.limit and f.tried and f.total) or f.limit.bytes >= 0.99 * f.total.bytes:
        return False
    held = f.reserved or f.allocated
    return held is None or held.bytes + f.tried.bytes > f.limit.bytes - f.limit.rounding_bytes


def held_by_others(f: Figures) -> int:
    """Bytes of the device that neither are free nor belong to this process, as near as the message tells."""
    if not (f.total and f.free):
        return 0
    own = _own_of(f)
    # The driver does not always tell (a container, MIG, WSL); then the printed figure is absurd.
    believable = f.process and f.process.bytes >= own and not exceeds(f.process, f.total)
    mine = f.process.bytes if believable else own + OWN_OVERHEAD_BYTES
    return max(f.total.bytes - f.free.bytes - mine, 0)


def _own_of(f: Figures) -> int:
    """This process among those listed: the smallest that holds at least what PyTorch has reserved."""
    reserved = (f.reserved or f.allocated or Size(0)).bytes
    candidates = [p.bytes for p in f.processes if p.bytes + p.rounding_bytes >= reserved]
    return min(candidates, default=reserved)


def exceeds(first: Size, second: Size, slack_bytes: int = 0) -> bool:
    """Whether the first is larger even if rounding made the most of it."""
    return first.bytes - second.bytes > first.rounding_bytes + second.rounding_bytes + slack_bytes + 1


def _sum(first: Size, second: Size) -> Size:
    return Size(first.bytes + second.bytes, first.rounding_bytes + second.rounding_bytes)


def gib(size: Size) -> str:
    """A size as people read it: GiB, or MiB below one."""
    return f"{size.bytes / 2**30:.2f} GiB" if size.bytes >= 2**30 else f"{size.bytes / 2**20:.2f} MiB"
