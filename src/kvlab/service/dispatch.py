"""Between the clients and the engine: admits, starts, passes tokens on, and ends every request exactly once."""

import asyncio
import itertools
import logging
import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from transformers import PreTrainedConfig

from .admission import Admission, NeverFits, QueueFull, QuotaError
from .messages import Cancel, Ended, Ready, Round, Start
from .metrics import Metrics
from .price import Price
from .protocol import ApiError
from .settings import EngineSettings
from .supervisor import Supervisor
from .tenants import Tenants

log = logging.getLogger("kvlab.service")

LONGEST_RETRY_S = 60


@dataclass(eq=False)
class Job:
    """One request on its way. ``events`` brings tokens, then why it ended: a finish reason, or an ApiError."""

    id: int
    tenant: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    stop_ids: tuple[int, ...]
    arrived_s: float
    events: "asyncio.Queue[int | str | ApiError]" = field(default_factory=asyncio.Queue)
    last_token_s: float | None = None
    started: bool = False
    over: bool = False

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens


def unavailable(code: str, message: str, retry_after_s: int) -> ApiError:
    """503 for a request that was in order; ``code`` is also how it is counted."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type="server_error", code=code, outcome=code, headers=headers)


def engine_lost() -> ApiError:
    message = "the engine ended while this request was with it, or is not up yet; it is restarted, try again"
    return unavailable("engine_lost", message, 5)


def shutting_down() -> ApiError:
    return unavailable("shutting_down", "the service is shutting down", 30)


class Dispatcher:
    """Lives in the event loop's thread and hears of the engine as a ``supervisor.Listener``.

    A reservation is given back when the engine says that it holds nothing for the request any more.
    ``on_fatal(message)`` is called when serving is impossible as configured.
    """

    def __init__(
        self,
        settings: EngineSettings,
        config: PreTrainedConfig,
        tenants: Tenants,
        supervisor: Supervisor,
        metrics: Metrics,
        *,
        admission: bool,
        on_fatal: Callable[[str], None],
    ):
        self.settings, self.config, self.tenants = settings, config, tenants
        self.supervisor, self.metrics = supervisor, metrics
        self.admitting, self.on_fatal = admission, on_fatal
        self.admission: Admission | None = None
        self.price: Price | None = None
        self.ready: Ready | None = None
        self.draining = False
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._durations_s: deque[float] = deque(maxlen=32)
        metrics.gpu_memory_total_bytes.set(settings.budget_bytes)

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, job: Job) -> None:
        """Start the job, or let it wait; raises ApiError when it can do neither."""
        if self.draining:
            raise shutting_down()
        if self.ready is None:
            raise engine_lost()
        self._jobs[job.id] = job
        try:
            self._start(self._admit(job))
        except ApiError:
            del self._jobs[job.id]
            raise

    def cancel(self, job: Job) -> None:
        """The client is gone, or has all it wanted."""
        if job.over or job.id not in self._jobs:
            return
        job.over = True
        if job.started:
            self.supervisor.send(Cancel(job.id))
        else:
            self._forget(job)

    def drain(self) -> None:
        """Take no new requests, refuse those that wait, and let those in flight finish."""
        self.draining = True
        if self.admission:
            self.admission.halt()  # or one that leaves the queue would let the next one start
        for job in [job for job in self._jobs.values() if not job.started]:
            self._end(job, shutting_down())
            self._forget(job)

    def abandon(self) -> None:
        """The time to finish is over: end what is left, and say so."""
        for job in list(self._jobs.values()):
            self._end(job, shutting_down())
            self.supervisor.send(Cancel(job.id))

    @property
    def in_flight(self) -> int:
        return sum(job.started for job in self._jobs.values())

    def update_gauges(self) -> None:
        self.metrics.inference_requests_in_flight.set(self.in_flight)
        self.metrics.inference_queue_length.set(len(self._jobs) - self.in_flight)
        for name in self.tenants.by_name:
            reserved = self.admission.reserved_tokens(name) if self.admission else 0
            self.metrics.kv_cache_reserved_tokens.labels(name).set(reserved)

    # What the engine's supervisor tells.

    def engine_ready(self, ready: Ready) -> None:
        self.price = Price.of(self.config, ready.bytes_per_token, self.settings)
        capacity = self.price.capacity_tokens(self.settings.budget_bytes, ready.step_room_bytes, ready.device)
        self.metrics.kv_cache_capacity_tokens.set(capacity)
        if self.admitting and self.admission is None:
            try:
                self.admission = Admission(capacity, self.tenants.quotas(capacity))
            except QuotaError as error:
                self.on_fatal(str(error))
                return
        self.metrics.engine_up.set(1)
        self.ready = ready
        if self.admission and not self.draining:
            self._start(self.admission.resume())
        log.info(
            "engine ready on %s: room for %d tokens of %d bytes, %d bytes kept for one step",
            ready.device,
            capacity,
            ready.bytes_per_token,
            ready.step_room_bytes,
        )

    def engine_refused(self, message: str) -> None:
        self.on_fatal(message)

    def engine_said(self, round: Round) -> None:
        now_s = time.monotonic()
        if round.status:
            self.metrics.take(round.status)
        for request_id, token in round.tokens:
            if (job := self._jobs.get(request_id)) and not job.over:
                self._observe(job, now_s)
                job.events.put_nowait(token)
        for ended in round.ended:
            if job := self._jobs.get(ended.request_id):
                self._durations_s.append(now_s - job.arrived_s)
                self._end(job, self._as_event(ended))
                self._forget(job)

    def engine_lost(self, *, was_ready: bool) -> None:
        """Requests that were with the engine are lost; those that wait stay, unless it died at its start."""
        self.ready = None
        self.metrics.engine_lost()
        self.metrics.engine_restarts_total.inc()
        if self.admission:
            self.admission.halt()
        for job in [job for job in self._jobs.values() if job.started or not was_ready]:
            self._end(job, engine_lost())
            self._forget(job)

    # The rest is private.

    def _admit(self, job: Job) -> Iterable[int]:
        """The ids of jobs that may start now that this one has come."""
        if self.admission is None:
            return [job.id]
        tokens = self.price.tokens(job.total_tokens)
        try:
            return self.admission.offer(job.id, job.tenant, tokens)
        except NeverFits as error:
            raise ApiError(
                400,
                f"{len(job.prompt)} prompt tokens and up to {job.max_tokens} generated ones need "
                f"{tokens} tokens of key/value cache ({tokens * self.price.bytes_per_token} bytes); tenant "
                f"{job.tenant} can have {error.quota_tokens} ({error.quota_tokens * self.price.bytes_per_token} bytes)",
                param="max_tokens",
                code="never_fits",
                outcome="never_fits",
            ) from None
        except QueueFull as error:
            raise ApiError(
                429,
                f"tenant {job.tenant}: {error}; try again later",
                type="rate_limit_error",
                code="queue_full",
                outcome="queue_full",
                headers={"Retry-After": str(self._retry_after_s(job.tenant))},
            ) from None

    def _retry_after_s(self, tenant: str) -> int:
        """A request's usual time: by then about one place is free."""
        usual_s = statistics.median(self._durations_s) if self._durations_s else 1.0
        return min(LONGEST_RETRY_S, max(1, math.ceil(usual_s)))

    def _start(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            job = self._jobs[request_id]
            job.started = True
            prompt = array("i", job.prompt).tobytes()
            self.supervisor.send(Start(job.id, prompt, job.max_tokens, job.temperature, job.seed, job.stop_ids))

    def _observe(self, job: Job, now_s: float) -> None:
        if job.last_token_s is None:
            self.metrics.time_to_first_token_seconds.observe(now_s - job.arrived_s)
        else:
            self.metrics.time_per_output_token_seconds.observe(now_s - job.last_token_s)
        job.last_token_s = now_s

    def _as_event(self, ended: Ended) -> str | ApiError:
        if ended.reason == "out_of_memory":
            self.metrics.inference_requests_oom_total.inc()
            message = "there was no memory left for this request; what it held is freed, others go on"
            return unavailable("out_of_memory", message, 1)
        if ended.reason == "invalid":
            return ApiError(400, ended.message)
        return ended.reason

    def _end(self, job: Job, event: "str | ApiError") -> None:
        if not job.over:
            job.over = True
            job.events.put_nowait(event)

    def _forget(self, job: Job) -> None:
        """Nobody holds anything for the job any more."""
        del self._jobs[job.id]
        if self.admission:
            self._start(self.admission.release(job.id))
