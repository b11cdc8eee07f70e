"""The engine: one thread that owns the model and gives every request in flight one step a round."""

import gc
import logging
import queue
import time
from collections.abc import Callable

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
        self._status_due_s = 0.0
        gc.collect()
        gc.freeze()  # what is there by now stays; a collection looks at requests alone

    def run(self, commands: "queue.SimpleQueue[Command]") -> None:
        while self.in_flight or not self.stopping:
            ended = self._obey(commands)
            tokens: list[tuple[int, int]] = []
            for request_id in list(self.in_flight):
                self._advance(request_id, tokens, ended)
            if tokens or ended or time.monotonic() >= self._status_due_s:
                self.send("round", Round(tokens, ended, self._status(force=bool(ended))))

    def _obey(self, commands: "queue.SimpleQueue[Command]") -> list[Ended]:
        """Take the commands that wait; with nothing to do, wait for one."""
        ended: list[Ended] = []
        while not self.stopping:
            try:
                command = commands.get(block=not (self.in_flight or ended))
            except queue.Empty:
                break
            match command:
                case Start():
                    self.in_flight[command.request_id] = Sequence(self.model, self.settings, command)
                case Cancel() if command.request_id in self.in_flight:
                    self._drop(command.request_id)
                    ended.append(Ended(command.request_id, "cancelled"))
                case Stop():
                    self.stopping = True
        return ended

    def _advance(self, request_id: int, tokens: list[tuple[int, int]], ended: list[Ended]) -> None:
        """One step of one request; what goes wrong in it ends this request, or the process."""
        sequence = self.in_flight[request_id]
        failure = self._failure_of_step(sequence, tokens)
        if failure is not None:
            # Nothing refers to the exception any more, so its frames let go of the step's tensors.
            del sequence
            self._drop(request_id)
            ended.append(failure)
            log.warning("request %d: %s: %s", request_id, failure.reason, failure.message)
        elif tokens and tokens[-1][0] == request_id and (reason := sequence.end_after(tokens[-1][1])):
            del sequence
            self._drop(request_id)
            ended.append(Ended(request_id, reason))

    def _failure_of_step(self, sequence: Sequence, tokens: list[tuple[int, int]]) -> Ended | None:
        request_id = sequence.start.request_id
        try:
            token = sequence.step()
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
        if token is not None:
            tokens.append((request_id, token))
        return None

    def _drop(self, request_id: int) -> None:
        """Forget a request, and free what it held: a sliding cache's parts refer to one another."""
        self.evicted_before += self.in_flight.pop(request_id).evicted_tokens
        gc.collect()

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
