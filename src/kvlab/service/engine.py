"""The engine: one thread that owns the model and gives every request in flight one step a round."""

import gc
import logging
import queue
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from kvlab.budget import Failure
from kvlab.errors import KvlabError
from kvlab.meter import Meter

from .messages import Cancel, Command, Ended, Round, Start, Status, Stop
from .sequence import Sequence
from .settings import EngineSettings

log = logging.getLogger("kvlab.engine")

STATUS_INTERVAL_S = 0.05
IDLE_ROUND_S = 1.0  # with nothing to do it says so as often: silence means that it hangs


class DeviceUnusable(RuntimeError):
    """A step failed for another reason than memory: what the device holds can no longer be trusted."""


class Engine:
    """Runs requests until it is told to stop; everything it has to say goes through ``send(kind, content)``."""

    def __init__(
        self, model: PreTrainedModel, settings: EngineSettings, meter: Meter, send: Callable[[str, object], None]
    ):
        self.model, self.settings, self.meter, self.send = model, settings, meter, send
        self.in_flight: dict[int, Sequence] = {}
        self.last_error: Exception | None = None
        self.evicted_before = 0  # by requests that are over
        self.stopping = False
        self._tokens: list[tuple[int, int]] = []  # of steps that were not told yet
        self._ended: list[Ended] = []
        self._status_due_s = 0.0
        gc.collect()
        gc.freeze()  # what is there by now stays, and costs no collection anything

    def run(self, commands: "queue.SimpleQueue[Command]") -> None:
        while self.in_flight or not self.stopping:
            self._obey(commands)
            for request_id in list(self.in_flight):
                self._advance(request_id)
                if time.monotonic() >= self._status_due_s:
                    self._tell()  # within a round of many slow steps too: each step is a sign of life
            if self._tokens or self._ended or time.monotonic() >= self._status_due_s:
                self._tell()

    def _tell(self) -> None:
        self.send("round", Round(self._tokens, self._ended, self._status(force=bool(self._ended))))
        self._tokens, self._ended = [], []

    def _obey(self, commands: "queue.SimpleQueue[Command]") -> None:
        """Take the commands that wait; with nothing to do, wait for one."""
        while not self.stopping:
            idle = not (self.in_flight or self._ended)
            try:
                command = commands.get(timeout=IDLE_ROUND_S) if idle else commands.get_nowait()
            except queue.Empty:
                break
            match command:
                case Start():
                    self._end(command.request_id, self._failure_of(command.request_id, partial(self._take_in, command)))
                case Cancel() if command.request_id in self.in_flight:
                    self._end(command.request_id, Ended(command.request_id, "cancelled"))
                case Stop():
                    self.stopping = True

    def _take_in(self, start: Start) -> None:
        self.in_flight[start.request_id] = Sequence(self.model, self.settings, start)

    def _advance(self, request_id: int) -> None:
        """One step of one request; what goes wrong in it ends this request, or the process."""
        self._end(request_id, self._failure_of(request_id, partial(self._step, request_id)) or self._done(request_id))

    def _step(self, request_id: int) -> None:
        token = self.in_flight[request_id].step()
        if token is not None:
            self._tokens.append((request_id, token))

    def _done(self, request_id: int) -> Ended | None:
        """The end of a request whose last token this step gave."""
        if not self._tokens or self._tokens[-1][0] != request_id:
            return None
        reason = self.in_flight[request_id].end_after(self._tokens[-1][1])
        return Ended(request_id, reason) if reason else None

    def _failure_of(self, request_id: int, work: Callable[[], None]) -> Ended | None:
        """Do some work of one request; the end of the request if that went wrong."""
        try:
            work()
        except KvlabError as error:
            return Ended(request_id, "invalid", str(error))
        except Exception as error:
            failure = Failure.of(error, self.meter)
            if not failure.is_refusal:
                raise DeviceUnusable(f"{failure.type_name}: {failure.message}") from error
            if self.settings.on_oom == "exit":
                raise
            if self.settings.on_oom == "keep":
                self.last_error = error
            return Ended(request_id, "out_of_memory", failure.message)
        return None

    def _end(self, request_id: int, ended: Ended | None) -> None:
        """Forget a request that is over, and free what it held. Nothing refers to its exception any more."""
        if ended is None:
            return
        if ended.message:
            log.warning("request %d: %s: %s", request_id, ended.reason, ended.message)
        if sequence := self.in_flight.pop(request_id, None):
            self.evicted_before += sequence.evicted_tokens
        self._ended.append(ended)

    def _status(self, *, force: bool) -> Status | None:
        now_s = time.monotonic()
        if not force and now_s < self._status_due_s:
            return None
        self._status_due_s = now_s + STATUS_INTERVAL_S
        flying = self.in_flight.values()
        return Status(
            held_bytes=self.meter.held_bytes,
            kv_tokens=sum(sequence.held_tokens for sequence in flying),
            evicted_tokens=self.evicted_before + sum(sequence.evicted_tokens for sequence in flying),
            cuda=_cuda_statistics(self.meter.device),
        )


def _cuda_statistics(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    statistics = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": statistics["allocated_bytes.all.current"],
        "reserved_bytes": statistics["reserved_bytes.all.current"],
        "alloc_retries": statistics["num_alloc_retries"],
        "ooms": statistics["num_ooms"],
    }
