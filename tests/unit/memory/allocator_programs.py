"""Random programs for an allocator, one command a line, and what the model answers to them.

The same text goes to PyTorch's own allocator (see ``tests/data/allocator/oracle``), whose answers have the
same form, so that comparing is comparing lists of lines:

    m ID BYTES STREAM   malloc           f ID          free            r ID STREAM   record_stream
    a STREAM            work has ended   e             empty_cache     F FRACTION    set_memory_fraction
    B POOL / E POOL     use / leave a private pool     P / A           reset peak / accumulated counters
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.memory.allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError, Device
from kvlab.memory.allocator.export import segment_runs
from kvlab.memory.allocator.pool import ALLOCATED, FREE
from kvlab.memory.allocator.stats import PoolStats

MIB, GIB = 1 << 20, 1 << 30

TIE_BREAKS = {"2.11.0": "address", "2.12.0": "block_age", "2.13.0": "segment_age"}

SETTINGS = (
    "",
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:64",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,4:8,>:4]",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8,max_split_size_mb:128",
    "expandable_segments:True",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:64",
    "large_segment_size_mb:32",
    "large_segment_size_mb:16",
    "expandable_segments:True,large_segment_size_mb:32,roundup_power2_divisions:8",
    "expandable_segments:True,garbage_collection_threshold:0.5",
)

_EDGES = (
    512,
    MIB,
    MIB + 1,
    2 * MIB,
    9 * MIB,
    10 * MIB,
    18 * MIB + 512,
    19 * MIB,
    20 * MIB,
    21 * MIB,
    64 * MIB,
)


@dataclass(frozen=True)
class Program:
    """A card, a configuration and the commands; ``torch`` is the release whose rules apply."""

    torch: str
    settings: str
    total_bytes: int
    other_bytes: int
    commands: tuple[str, ...]


def random_program(seed: int, length: int, torch: str) -> Program:
    """A program that fills its card now and then. Side streams are recorded one at a time, because PyTorch
    visits several in the order of a hash table."""
    rng = random.Random(seed)
    settings = rng.choice(SETTINGS)
    total, other = rng.choice((256 * MIB, GIB, 3 * GIB, 24 * GIB)), rng.choice((0, 100 * MIB))
    fractions = (0.5, 0.7, 0.9) if "garbage" in settings else (None, None, 0.5, 0.9, 0.123)
    fraction = rng.choice(fractions)
    commands = [] if fraction is None else [f"F {fraction}"]
    # Until 2.12 a private pool also meant a CUDA graph capture, which suspends events and flushes.
    commands += _commands(rng, length, with_pools=torch == "2.13.0" and rng.random() < 0.25)
    return Program(torch, settings, total, other, tuple(commands))


def _commands(rng: random.Random, length: int, *, with_pools: bool) -> Iterator[str]:
    size = rng.choice((_any_size, _small_size, _large_size, _stepped_size, _edge_size))
    streams = rng.choice(((0,), (0,), (0, 1), (0, 1, 2, 5)))
    recorded = rng.choice(streams)
    free_share = rng.choice((0.35, 0.45, 0.5, 0.6))
    live: list[int] = []
    next_id, scope = 0, 0
    for _ in range(length):
        if with_pools and rng.random() < 0.02:
            yield f"E {scope}" if scope else f"B {(scope_next := rng.choice((1, 2)))}"
            scope = 0 if scope else scope_next
        roll = rng.random()
        if roll < free_share and live:
            yield f"f {live.pop(rng.randrange(len(live)) if rng.random() < 0.7 else -1)}"
        elif roll < 0.96 or not live:
            yield f"m {next_id} {size(rng)} {rng.choice(streams)}"
            live.append(next_id)
            next_id += 1
        elif roll < 0.975 and len(streams) > 1:
            yield f"r {rng.choice(live)} {recorded}"
        elif roll < 0.985 and len(streams) > 1:
            yield f"a {rng.choice(streams)}"
        elif roll < 0.991:
            yield rng.choice(("e", "e", "e", "P", "P", "A"))


def _any_size(rng: random.Random) -> int:
    return int(2 ** rng.uniform(0, 28.5))


def _small_size(rng: random.Random) -> int:
    return rng.randrange(1, MIB)


def _large_size(rng: random.Random) -> int:
    return rng.randrange(MIB, 200 * MIB)


def _stepped_size(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 5, 8, 13, 21, 34)) * rng.choice((MIB // 2, MIB, 2 * MIB))


def _edge_size(rng: random.Random) -> int:
    return rng.choice(_EDGES) + rng.choice((0, 0, 0, -1, 1, 512, -511))


class OracleDevice(Device):
    """The card of the oracle: addresses in no order, so that age and address break ties differently."""

    nth: int = 0

    def malloc(self, size_bytes: int) -> int | None:
        if size_bytes > self.free_bytes:
            return None
        self.held_bytes += size_bytes
        self.nth += 1
        return (1 << 46) + ((self.nth - 1) * 7919 % 16384) * 8 * GIB

    def reserve_addresses(self, size_bytes: int) -> int:
        self.nth += 1
        return (1 << 45) + ((self.nth - 1) << 38)


def stream_handle(number: int) -> int:
    return 0x100000 + (number << 4) if number else 0


def play(program: Program, *, max_history: int | None = None) -> tuple[CachingAllocator, list[str]]:
    """Run a program on the model; returns it and the out-of-memory errors as lines."""
    settings = AllocatorSettings.parse(program.settings, tie_break=TIE_BREAKS[program.torch])
    device = OracleDevice(program.total_bytes, program.other_bytes)
    allocator = CachingAllocator(device, settings, max_history=max_history)
    addresses: dict[str, int] = {}
    errors, pool_id = [], (0, 0)
    for line in program.commands:
        command, *args = line.split()
        match command:
            case "m":
                try:
                    stream = stream_handle(int(args[2]))
                    addresses[args[0]] = allocator.malloc(int(args[1]), stream, pool_id=pool_id)
                except CudaOutOfMemoryError as error:
                    errors.append(f"oom {args[0]} {error}")
            case "f" if args[0] in addresses:
                allocator.free(addresses.pop(args[0]))
            case "r" if args[0] in addresses:
                allocator.record_stream(addresses[args[0]], stream_handle(int(args[1])))
            case "a":
                allocator.finish(stream_handle(int(args[0])))
            case "e":
                allocator.empty_cache()
            case "F":
                allocator.set_memory_fraction(float(args[0]))
            case "B":
                pool_id = (0, int(args[0]))
            case "E":
                pool_id = (0, 0)
            case "P":
                allocator.reset_peak_stats()
            case "A":
                allocator.reset_accumulated_stats()
    return allocator, errors


def answers(program: Program) -> list[str]:
    """Everything observable: errors word for word, every action, every counter, the final layout."""
    allocator, lines = play(program)
    lines += [f"trace {a} {address} {size} {stream}" for a, address, size, stream, *_ in allocator.history]
    stats = allocator.memory_stats()
    for metric in PoolStats.METRICS:
        for pool in ("all", "small_pool", "large_pool"):
            lines.append(_stat_line(stats, f"{metric}.{pool}"))
    lines += [_stat_line(stats, name) for name in ("oversize_allocations", "oversize_segments")]
    lines += [f"count {name} {stats[name]}" for name in COUNTS]
    for blocks in segment_runs(allocator):
        head, used = blocks[0], [b for b in blocks if b.state != FREE]
        sizes = (
            sum(b.size for b in blocks),
            sum(b.size for b in used if b.state == ALLOCATED),
            sum(b.size for b in used),
            sum(b.requested for b in used),
        )
        kind = f"{int(not head.pool.is_small)} {int(head.expandable is not None)}"
        lines.append(f"segment {head.address} {' '.join(map(str, sizes))} {head.stream} {kind}")
        lines += [f"block {b.size} {b.requested} {int(b.state == ALLOCATED)} {int(b.state != FREE)}" for b in blocks]
    return lines


COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)


def _stat_line(stats: dict[str, int], name: str) -> str:
    return f"stat {name} " + " ".join(str(stats[f"{name}.{p}"]) for p in ("current", "peak", "allocated", "freed"))
