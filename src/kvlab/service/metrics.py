"""What the service tells Prometheus: every series is there before its first event, so that rules see it."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from .messages import Status

OUTCOMES = (
    "completed",
    "cancelled",
    "queue_full",
    "never_fits",
    "invalid",
    "out_of_memory",
    "engine_lost",
    "shutting_down",
    "internal_error",
)

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OUTPUT_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The series of one service process, in a registry of their own.

    ``tenants``: every value the label ``tenant`` may take, so that no client can make new series.
    """

    def __init__(self, tenants: Iterable[str], on_cuda: bool):
        disable_created_metrics()  # a second series for each counter, which no rule here reads
        self.registry = CollectorRegistry()
        self._gauges()
        self._counters(list(tenants))
        self._histograms()
        self.cuda = _CudaMetrics(self.registry) if on_cuda else None
        self._evicted_tokens = 0

    def _gauges(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self.registry)

        self.gpu_memory_used_bytes = gauge(
            "gpu_memory_used_bytes",
            "Bytes the engine holds above the loaded model: reserved by PyTorch's allocator on CUDA, VmData on CPU. "
            "A static pool or a caching allocator keeps this high by design; on its own it is no alarm.",
        )
        self.gpu_memory_total_bytes = gauge(
            "gpu_memory_total_bytes",
            "The engine's byte budget above the loaded model. An allocation beyond it is refused.",
        )
        self.kv_cache_current_tokens = gauge(
            "kv_cache_current_tokens", "Tokens whose keys and values are held now, in the caches of all requests."
        )
        self.kv_cache_capacity_tokens = gauge(
            "kv_cache_capacity_tokens",
            "Tokens that all caches together may hold: the budget less the room of one step. 0 until the engine is up.",
        )
        self.inference_requests_in_flight = gauge(
            "inference_requests_in_flight", "Requests that the engine works on now."
        )
        self.inference_queue_length = gauge(
            "inference_queue_length", "Requests that were accepted and wait for room in the cache."
        )
        self.engine_up = gauge("engine_up", "1 while an engine process is loaded and serves, else 0.")
        self.kv_cache_reserved_tokens = Gauge(
            "kv_cache_reserved_tokens",
            "Tokens of cache set aside for a tenant's requests in flight; without admission control always 0.",
            ["tenant"],
            registry=self.registry,
        )

    def _counters(self, tenants: list[str]) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.kv_cache_evictions_total = counter(
            "kv_cache_evictions_total",
            "Tokens whose keys and values a sliding window has dropped. Its rate is normal work of long requests.",
        )
        self.inference_requests_total = counter(
            "inference_requests_total",
            "Completion requests by how they ended; every request ends in exactly one outcome.",
            ("outcome", "tenant"),
        )
        self.inference_requests_oom_total = counter(
            "inference_requests_oom_total",
            "Requests that ended because an allocation for them was refused, the engine living on. Requests that were "
            "lost with an engine count as engine_lost.",
        )
        self.engine_restarts_total = counter(
            "engine_restarts_total", "Times that a new engine process was started after one had ended."
        )
        for tenant in tenants:
            for outcome in OUTCOMES:
                self.inference_requests_total.labels(outcome, tenant)

    def _histograms(self) -> None:
        self.time_to_first_token_seconds = Histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token, the wait in the queue included.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.time_per_output_token_seconds = Histogram(
            "time_per_output_token_seconds",
            "From one token of a request to its next; grows with the number of requests in flight.",
            buckets=OUTPUT_TOKEN_BUCKETS,
            registry=self.registry,
        )

    def take(self, status: Status) -> None:
        """Bring the series up to what the engine says it holds."""
        self.gpu_memory_used_bytes.set(status.held_bytes)
        self.kv_cache_current_tokens.set(status.kv_tokens)
        self.kv_cache_evictions_total.inc(status.evicted_tokens - self._evicted_tokens)
        self._evicted_tokens = status.evicted_tokens
        if self.cuda:
            self.cuda.take(status.cuda)

    def engine_lost(self) -> None:
        """A new engine counts from zero, and holds nothing."""
        self.engine_up.set(0)
        self._evicted_tokens = 0
        self.gpu_memory_used_bytes.set(0)
        self.kv_cache_current_tokens.set(0)
        if self.cuda:
            self.cuda.forget()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _CudaMetrics:
    """The allocator's own statistics (torch.cuda.memory_stats)."""

    def __init__(self, registry: CollectorRegistry):
        self.allocated = Gauge(
            "cuda_memory_allocated_bytes", "Bytes of live tensors, the model included.", registry=registry
        )
        self.reserved = Gauge(
            "cuda_memory_reserved_bytes", "Bytes of segments PyTorch's allocator holds.", registry=registry
        )
        self.retries = Counter(
            "cuda_memory_alloc_retries_total",
            "Allocations that succeeded only after cached segments were given back.",
            registry=registry,
        )
        self.ooms = Counter(
            "cuda_memory_ooms_total", "Allocations that PyTorch's allocator refused.", registry=registry
        )
        self._seen = {"alloc_retries": 0, "ooms": 0}

    def take(self, statistics: dict[str, int]) -> None:
        self.allocated.set(statistics["allocated_bytes"])
        self.reserved.set(statistics["reserved_bytes"])
        for name, counter in (("alloc_retries", self.retries), ("ooms", self.ooms)):
            counter.inc(statistics[name] - self._seen[name])
            self._seen[name] = statistics[name]

    def forget(self) -> None:
        self._seen = dict.fromkeys(self._seen, 0)
        self.allocated.set(0)
        self.reserved.set(0)
