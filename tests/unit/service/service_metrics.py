"""The names under which the service exports, as a scrape shows them."""

from __future__ import annotations

GAUGES = {
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "kv_cache_current_tokens",
    "kv_cache_capacity_tokens",
    "inference_requests_in_flight",
    "inference_queue_length",
    "kv_cache_reserved_tokens",
    "engine_up",
}
COUNTERS = {
    "kv_cache_evictions_total",
    "inference_requests_total",
    "inference_requests_oom_total",
    "engine_restarts_total",
}
HISTOGRAMS = {"time_to_first_token_seconds", "time_per_output_token_seconds"}
ON_CUDA = {
    "cuda_memory_allocated_bytes",
    "cuda_memory_reserved_bytes",
    "cuda_memory_alloc_retries_total",
    "cuda_memory_ooms_total",
}
SERIES_OF_HISTOGRAMS = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
EXPORTED = GAUGES | COUNTERS | SERIES_OF_HISTOGRAMS | ON_CUDA
