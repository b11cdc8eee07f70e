"""Caches side by side: what an append, a decode step and a prefill cost, and how far from the floor."""

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel
from rich.console import Group
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_causal_mask

from kvlab.bench.checks import Check, checks_table
from kvlab.cache import CachePolicy, ShiftingKVCache, SlidingWindowCache
from kvlab.device import resolve_device
from kvlab.model import load_config, random_model

Profile = Literal["quick", "full"]

RING = "ring"
SINKS = 4
BURST = 64  # tokens that the bursting cache drops at once
ENDLESS = 2**30  # the static sliding layer wants a longest text
CELL_BYTES = 3 * 2**29  # most that one cache may hold here; beyond it a cell takes fewer layers

PEERS: dict[str, Callable[[PreTrainedConfig, int], Cache]] = {
    RING: lambda config, window: SlidingWindowCache(config, CachePolicy(max_total_tokens=window, sinks=SINKS)),
    "shift, every token": lambda config, window: ShiftingKVCache(
        config, CachePolicy(max_total_tokens=window, eviction="shift")
    ),
    "shift, in bursts": lambda config, window: ShiftingKVCache(
        config, CachePolicy(max_total_tokens=window, eviction="shift", low_water=window - BURST)
    ),
    "static sliding": lambda config, window: Cache(
        layers=[StaticSlidingWindowLayer(ENDLESS, window) for _ in range(config.num_hidden_layers)]
    ),
    "dynamic sliding": lambda config, window: Cache(
        layers=[DynamicSlidingWindowLayer(window) for _ in range(config.num_hidden_layers)]
    ),
    "dynamic, growing": lambda config, window: DynamicCache(config=config),
}


@dataclass(frozen=True)
class Plan:
    """How much a profile measures. Prefills are (tokens, window, chunk, layers)."""

    shapes: tuple[str, ...]
    windows: tuple[int, ...]
    batches: tuple[int, ...]
    seconds_per_cache: float
    fewest_samples: int
    step_window: int
    step_samples: int
    prefill: tuple[int, int, int, int]
    watched_steps: int


PLANS: dict[Profile, Plan] = {
    "quick": Plan(
        shapes=("smollm2-135m",),
        windows=(512, 4096, 16384),
        batches=(1,),
        seconds_per_cache=0.05,
        fewest_samples=2,
        step_window=4096,
        step_samples=5,
        prefill=(768, 128, 64, 4),
        watched_steps=1000,
    ),
    "full": Plan(
        shapes=("smollm2-135m", "llama-3-8b"),
        windows=(512, 1024, 2048, 4096, 8192, 16384),
        batches=(1, 4),
        seconds_per_cache=1.0,
        fewest_samples=9,
        step_window=4096,
        step_samples=25,
        prefill=(15_000, 2048, 1024, 30),
        watched_steps=1000,
    ),
}


class AppendRow(BaseModel):
    """One token through all layers of one cache: its mask and its updates."""

    shape: str
    layers: int
    batch: int
    window: int
    cache: str
    median_s: float
    mean_s: float  # a cache that evicts in bursts pays in few tokens for many
    times_ring: float  # of the medians
    floor_bytes: int  # the new keys and values, read and written, which no cache can avoid
    times_floor: float


class StepRow(BaseModel):
    """One whole decode step of the model."""

    cache: str
    median_s: float
    times_ring: float
    floor_bytes: int  # weights and held keys and values, which no step can avoid to read
    times_floor: float


class PrefillRow(BaseModel):
    """A long prompt in chunks: the time, and the most bytes alive beside the weights."""

    cache: str
    seconds: float
    peak_bytes: int
    held_bytes: int


class CacheBench(BaseModel):
    """Everything ``kvlab bench cache`` measures."""

    profile: Profile
    device: str
    dtype: str
    threads: int
    copy_bytes_per_s: float  # read plus written
    read_bytes_per_s: float
    appends: list[AppendRow]
    step_window: int
    steps: list[StepRow]
    prefill_tokens: int
    prefill_window: int
    prefill_chunk: int
    prefills: list[PrefillRow]
    checks: list[Check]


@dataclass(frozen=True)
class Bench:
    """Where and how much to measure, and the bandwidths that price the floors."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    copy_bytes_per_s: float
    read_bytes_per_s: float

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


@torch.no_grad()
def bench_cache(profile: Profile = "quick", device: str = "auto") -> CacheBench:
    """Measure every cache in one process. Weights and texts are random: only their shapes count.

    ``quick`` takes under 20 s on two calm cores; ``full`` measures every promise at its own size, in about
    20 minutes there.
    """
    where = resolve_device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    bench = Bench(PLANS[profile], where, dtype, copy_bandwidth(where), read_bandwidth(where))
    appends = bench_appends(bench)
    steps = bench_steps(bench)
    prefills, prefill_checks = bench_prefills(bench)
    tokens, window, chunk, _ = bench.plan.prefill
    return CacheBench(
        profile=profile,
        device=str(where),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        copy_bytes_per_s=bench.copy_bytes_per_s,
        read_bytes_per_s=bench.read_bytes_per_s,
        appends=appends,
        step_window=bench.plan.step_window,
        steps=steps,
        prefill_tokens=tokens,
        prefill_window=window,
        prefill_chunk=chunk,
        prefills=prefills,
        checks=[*append_checks(appends), step_check(steps), *bytes_checks(bench), *prefill_checks],
    )


def bench_appends(bench: Bench) -> list[AppendRow]:
    """The cost of one token in every cache, over shapes, batches and windows."""
    plan = bench.plan
    return [
        row
        for shape in plan.shapes
        for batch in plan.batches
        for window in plan.windows
        for row in bench_cell(bench, shape, batch, window)
    ]


def bench_cell(bench: Bench, shape: str, batch: int, window: int) -> Iterator[AppendRow]:
    """The cost of one token in every cache that holds ``window`` tokens of ``batch`` sequences."""
    config = cell_config(shape, batch, window, bench.dtype)
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    states = bench.random(batch, 1, heads, dim).transpose(1, 2)  # as a model's projection lays them out
    samples = {}
    for name, build in PEERS.items():
        cache = filled(bench, build(config, window), config, batch, window)
        samples[name] = timings(bench, lambda cache=cache: push(config, cache, states))
        del cache
        gc.collect()
    floor_bytes = 2 * 2 * layers * states.nbytes
    for name, times in samples.items():
        median = statistics.median(times)
        yield AppendRow(
            shape=shape,
            layers=layers,
            batch=batch,
            window=window,
            cache=name,
            median_s=median,
            mean_s=statistics.mean(times),
            times_ring=median / statistics.median(samples[RING]),
            floor_bytes=floor_bytes,
            times_floor=median * bench.copy_bytes_per_s / floor_bytes,
        )


def cell_config(shape: str, batch: int, window: int, dtype: torch.dtype) -> PreTrainedConfig:
    """The config of a shape, with as many of its layers as fit into ``CELL_BYTES``."""
    config = load_config(shape)
    config._attn_implementation = "sdpa"
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_bytes = 2 * batch * window * config.num_key_value_heads * config.head_dim * dtype.itemsize
    config.num_hidden_layers = max(1, min(config.num_hidden_layers, CELL_BYTES // layer_bytes))
    return config


def filled(bench: Bench, cache: Cache, config: PreTrainedConfig, batch: int, tokens: int) -> Cache:
    """The cache after a first chunk of random tokens and a few single ones, so that it evicts."""
    heads, dim = config.num_key_value_heads, config.head_dim
    push(config, cache, bench.random(batch, heads, tokens, dim))
    for _ in range(3):
        push(config, cache, bench.random(batch, heads, 1, dim))
    return cache


def push(config: PreTrainedConfig, cache: Cache, states: torch.Tensor) -> None:
    """What a model asks of a cache for states (B, H, q, D): one mask, and an update in every layer."""
    batch, _, q, _ = states.shape
    create_causal_mask(config, states.new_empty(batch, q, 0), None, cache)
    for layer in range(config.num_hidden_layers):
        cache.update(states, states, layer)


def append_checks(rows: list[AppendRow]) -> list[Check]:
    """Against the static sliding layer at 4,096, and against itself from 512 to 16,384; SmolLM2, batch 1."""
    median = {(r.window, r.cache): r.median_s for r in rows if r.shape == "smollm2-135m" and r.batch == 1}
    cheaper = median[4096, "static sliding"] / median[4096, RING]
    growth = median[16384, RING] / median[512, RING]
    return [
        Check(
            promise="append at W=4096: times cheaper than the static sliding layer (at least)",
            measured=cheaper,
            limit=20,
            holds=cheaper >= 20,
        ),
        Check(
            promise="append at W=16384: times its own cost at W=512 (at most)",
            measured=growth,
            limit=1.5,
            holds=growth <= 1.5,
        ),
    ]


def bench_steps(bench: Bench) -> list[StepRow]:
    """One token through SmolLM2's shape with each cache, in turns so that all see the same machine."""
    torch.manual_seed(0)
    window = bench.plan.step_window
    model = random_model(load_config("smollm2-135m"), device=bench.device, dtype=bench.dtype)
    caches = {
        name: filled(bench, build(model.config, window), model.config, 1, window) for name, build in PEERS.items()
    }
    token = torch.zeros(1, 1, dtype=torch.long, device=bench.device)
    samples: dict[str, list[float]] = {name: [] for name in PEERS}
    for _ in range(bench.plan.step_samples + 1):
        for name, cache in caches.items():
            samples[name].append(timed(lambda cache=cache: model(token, cache=cache), bench.device))
    medians = {name: statistics.median(times[1:]) for name, times in samples.items()}  # the first warms up
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[RING].layers)
    floor_bytes = sum(weight.nbytes for weight in model.parameters()) + held
    return [
        StepRow(
            cache=name,
            median_s=median,
            times_ring=median / medians[RING],
            floor_bytes=floor_bytes,
            times_floor=median * bench.read_bytes_per_s / floor_bytes,
        )
        for name, median in medians.items()
    ]


def step_check(rows: list[StepRow]) -> Check:
    """A whole step against the fastest other cache."""
    medians = {row.cache: row.median_s for row in rows}
    fastest = min((name for name in medians if name != RING), key=medians.get)
    ratio = medians[RING] / medians[fastest]
    reason = f"fastest peer: {fastest}"
    if ratio > 1:
        reason += "; both read the same weights and rows, the ring also plans its step and turns its sinks"
    return Check(
        promise="decode step: times the fastest peer's (at most)",
        measured=ratio,
        limit=1.05,
        holds=ratio <= 1.05,
        reason=reason,
    )


def bytes_checks(bench: Bench) -> list[Check]:
    """The formula to the byte, and what a thousand steps allocate in the cache."""
    window, batch = 512, 2
    config = cell_config("smollm2-135m", batch, window, bench.dtype)
    config.num_hidden_layers = 2
    heads, dim = config.num_key_value_heads, config.head_dim
    cache = filled(bench, PEERS[RING](config, window), config, batch, window)
    formula = 2 * batch * (2 * window + SINKS + 1) * heads * dim * bench.dtype.itemsize
    states = bench.random(batch, heads, 1, dim)
    owned = [value for ring in cache.rings.values() for value in vars(ring).values()]
    known = [value for value in owned if isinstance(value, torch.Tensor)]
    allocated = 0
    for _ in range(bench.plan.watched_steps):
        create_causal_mask(config, states.new_empty(batch, 1, 0), None, cache)
        with NewStorages([*known, states]) as new:
            cache.update(states, states, 0)
            cache.update(states, states, 1)
        allocated += new.count
    return [
        Check(
            promise="bytes beyond 2(S+W) rows and S+1 sink keys per layer and sequence",
            measured=cache.nbytes - formula,
            limit=0,
            holds=cache.nbytes == formula,
        ),
        Check(
            promise=f"tensors allocated in the cache by {bench.plan.watched_steps:,} decode steps",
            measured=allocated,
            limit=0,
            holds=allocated == 0,
        ),
    ]


def bench_prefills(bench: Bench) -> tuple[list[PrefillRow], list[Check]]:
    """A long prompt in chunks through SmolLM2's shape: exact sinks, sinks not turned, and a full cache."""
    tokens, window, chunk, layers = bench.plan.prefill
    config = load_config("smollm2-135m")
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    model = random_model(config, device=bench.device, dtype=bench.dtype)
    unturned = CachePolicy(max_total_tokens=window, sinks=SINKS, rotate_sinks=False)
    ring = PEERS[RING](model.config, window)
    caches = {
        RING: ring,
        "ring, sinks not turned": SlidingWindowCache(model.config, unturned),
        "dynamic, growing": DynamicCache(config=model.config),
    }
    rows = [_prefill_row(bench, model, name, cache, tokens, chunk) for name, cache in caches.items()]
    with Peak(bench.device) as alone:
        model(torch.zeros(1, chunk, dtype=torch.long, device=bench.device), use_cache=False, logits_to_keep=1)
    room = ring.room.most(1, chunk, SINKS, window - SINKS)
    bound = ring.nbytes + room + alone.bytes
    return rows, [
        Check(
            promise="prefill: peak bytes against window, one chunk's room and the model's own (at most)",
            measured=rows[0].peak_bytes,
            limit=bound,
            holds=rows[0].peak_bytes <= bound,
            reason=f"{ring.nbytes} + {room} + {alone.bytes}; the full cache peaks at {rows[2].peak_bytes}",
        ),
        Check(
            promise="prefill: price of exact sinks, times the time without turning them",
            measured=rows[0].seconds / rows[1].seconds,
            reason="each query attends to its own copy of the sinks; smaller chunks make fewer pairs",
        ),
    ]


def _prefill_row(bench: Bench, model: PreTrainedModel, name: str, cache: Cache, tokens: int, chunk: int) -> PrefillRow:
    ids = torch.zeros(1, tokens, dtype=torch.long, device=bench.device)

    def prefill():
        for start in range(0, tokens, chunk):
            model(ids[:, start : start + chunk], cache=cache, logits_to_keep=1)

    with Peak(bench.device) as peak:
        seconds = timed(prefill, bench.device)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return PrefillRow(cache=name, seconds=seconds, peak_bytes=peak.bytes, held_bytes=held)


def render(result: CacheBench) -> Group:
    """The result as tables for a terminal."""
    where = f"{result.device}, {result.dtype}, {result.threads} threads"
    appends = Table("shape", "batch", "W", "cache", "median", "a layer", "mean", "x ring", "x floor")
    for row in result.appends:
        appends.add_row(
            f"{row.shape}, {row.layers} layers",
            f"{row.batch}",
            f"{row.window}",
            row.cache,
            f"{row.median_s * 1e3:,.2f} ms",
            f"{row.median_s / row.layers * 1e6:,.1f} us",
            f"{row.mean_s * 1e3:,.2f} ms",
            f"{row.times_ring:,.2f}",
            f"{row.times_floor:,.0f}",
            end_section=row.cache == next(reversed(PEERS)),
        )
    steps = Table("cache", "median", "x ring", "x floor")
    for row in result.steps:
        steps.add_row(row.cache, f"{row.median_s * 1e3:,.1f} ms", f"{row.times_ring:.2f}", f"{row.times_floor:.2f}")
    prefills = Table("cache", "seconds", "peak MiB", "held MiB")
    for row in result.prefills:
        prefills.add_row(
            row.cache,
            f"{row.seconds:,.1f}",
            f"{row.peak_bytes / 2**20:,.1f}",
            f"{row.held_bytes / 2**20:,.1f}",
        )
    checks = checks_table(result.checks)
    appends.title = f"Append of one token, {where}"
    appends.caption = (
        "floor: the new keys and values, read and written at the bandwidth of a large copy, "
        f"{result.copy_bytes_per_s / 1e9:.1f} GB/s"
    )
    steps.caption = (
        "floor: weights and held keys and values, read at the bandwidth of a large matrix times a vector, "
        f"{result.read_bytes_per_s / 1e9:.1f} GB/s"
    )
    steps.title = f"Decode step at W={result.step_window}, {where}"
    prefills.title = (
        f"Prefill of {result.prefill_tokens:,} tokens, W={result.prefill_window}, chunks of {result.prefill_chunk}, "
        f"{where}"
    )
    return Group(appends, steps, prefills, checks)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def timings(bench: Bench, run: Callable[[], object]) -> list[float]:
    """Seconds of some runs: the fewest the plan wants, and up to three bursts of them as its time allows."""
    plan, samples = bench.plan, []
    timed(run, bench.device)
    while len(samples) < plan.fewest_samples or (sum(samples) < plan.seconds_per_cache and len(samples) < 3 * BURST):
        samples.append(timed(run, bench.device))
    return samples


def copy_bandwidth(device: torch.device, nbytes: int = 2**28) -> float:
    """Bytes read plus written per second by a large copy: prices what an append cannot avoid."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def read_bandwidth(device: torch.device, nbytes: int = 2**28) -> float:
    """Bytes read per second by a large matrix times a vector: prices what a decode step cannot avoid."""
    matrix = torch.ones(nbytes // 4 // 4096, 4096, device=device)
    vector = torch.ones(4096, device=device)
    return nbytes / min(timed(lambda: torch.mv(matrix, vector), device) for _ in range(5))


class NewStorages(TorchDispatchMode):
    """Counts results that live in a storage none of the given tensors has."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.count += sum(storage.data_ptr() not in self.known for storage in _storages(results))
        return results


class Peak(TorchDispatchMode):
    """The most bytes alive at once of tensors made inside.

    On CUDA the allocator's own count; elsewhere every new storage is followed to its end, so what a kernel
    takes for itself and gives back before it returns is not seen.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.on_cuda = device.type == "cuda"
        self.alive: dict[int, int] = {}
        self.live = self.bytes = 0

    def __enter__(self):
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self.live = torch.cuda.memory_allocated()
            return self
        return super().__enter__()

    def __exit__(self, *error):
        if self.on_cuda:
            self.bytes = torch.cuda.max_memory_allocated() - self.live
            return None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        results = function(*args, **(kwargs or {}))
        for storage in _storages(results):
            if storage.data_ptr() not in given | self.alive.keys():
                self._born(storage)
        return results

    def _born(self, storage: torch.UntypedStorage) -> None:
        self.alive[storage.data_ptr()] = storage.nbytes()
        self.live += storage.nbytes()
        self.bytes = max(self.bytes, self.live)
        weakref.finalize(storage, self._died, storage.data_ptr())

    def _died(self, pointer: int) -> None:
        self.live -= self.alive.pop(pointer)


def _storages(tree) -> Iterator[torch.UntypedStorage]:
    """The storage of every tensor with bytes in a nest of arguments or results."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
            yield leaf.untyped_storage()
