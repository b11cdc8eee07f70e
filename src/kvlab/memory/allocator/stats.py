"""The counters behind ``torch.cuda.memory_stats``, under the same names."""

from dataclasses import dataclass, field

POOLS = ("all", "large_pool", "small_pool")
_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_oom_rejections",
)


class Stat:
    """One counter: its value now, its highest value, and all it ever gained
    (``c10::CachingAllocator::Stat``)."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        self.allocated += amount
        current = self.current = self.current + amount
        if current > self.peak:
            self.peak = current

    def decrease(self, amount: int) -> None:
        self.freed += amount
        self.current -= amount

    def reset_peak(self) -> None:
        self.peak = self.current

    def reset_accumulated(self) -> None:
        self.allocated = self.freed = 0


def change(stat: Stat, amount: int) -> None:
    """Count ``amount`` as gained, or as lost if it is negative; 0 changes nothing."""
    if amount > 0:
        stat.increase(amount)
    elif amount < 0:
        stat.decrease(-amount)


class PoolStats:
    """The nine counters kept for the small pool, for the large pool and for both together."""

    __slots__ = METRICS = (
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    )

    def __init__(self) -> None:
        for metric in self.METRICS:
            setattr(self, metric, Stat())


@dataclass
class DeviceStats:
    """All counters of one device (``DeviceStats`` in ``c10/core/CachingDeviceAllocator.h``)."""

    all: PoolStats = field(default_factory=PoolStats)
    large_pool: PoolStats = field(default_factory=PoolStats)
    small_pool: PoolStats = field(default_factory=PoolStats)
    oversize_allocations: Stat = field(default_factory=Stat)
    oversize_segments: Stat = field(default_factory=Stat)
    private_pools: dict[tuple[int, int], dict[str, Stat]] = field(default_factory=dict)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    num_oom_rejections: int = 0

    def change_private_pool(self, pool_id: tuple[int, int], size_class: str, amount: int) -> None:
        """Reserved bytes of one private memory pool, counted apart since torch 2.13."""
        stats = self.private_pools.setdefault(pool_id, {pool: Stat() for pool in POOLS})
        for pool in ("all", size_class):
            change(stats[pool], amount)

    def _stats(self):
        for pool in POOLS:
            for metric in PoolStats.METRICS:
                yield f"{metric}.{pool}", getattr(getattr(self, pool), metric)
        for (first, second), stats in self.private_pools.items():
            for pool, stat in stats.items():
                yield f"reserved_bytes_by_private_pools.{first}_{second}.{pool}", stat
        yield "oversize_allocations", self.oversize_allocations
        yield "oversize_segments", self.oversize_segments

    def reset_peak(self) -> None:
        for _, stat in self._stats():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        for _, stat in self._stats():
            stat.reset_accumulated()
        for counter in _COUNTERS:
            setattr(self, counter, 0)

    def as_memory_stats(self, max_split_size_bytes: int) -> dict[str, int]:
        """The flat, sorted dictionary that ``torch.cuda.memory_stats`` returns; bytes and counts."""
        flat = {f"{name}.{part}": getattr(stat, part) for name, stat in self._stats() for part in Stat.__slots__}
        flat |= {counter: getattr(self, counter) for counter in _COUNTERS}
        flat["max_split_size"] = max_split_size_bytes
        return dict(sorted(flat.items()))
