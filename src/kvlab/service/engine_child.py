"""The process that owns the model: ``python -m kvlab.service.engine_child DESCRIPTOR``."""

import contextlib
import logging
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection

import torch

from kvlab.budget_child import ProcessMeter
from kvlab.device import resolve_device
from kvlab.errors import KvlabError
from kvlab.memory.footprint import kv_bytes_per_token
from kvlab.meter import CudaMeter, Meter
from kvlab.model import load_model

from .engine import DeviceUnusable, Engine
from .messages import Ready, Refused
from .rehearsal import step_room_bytes
from .settings import EngineSettings

log = logging.getLogger("kvlab.engine")

EXIT_REFUSED = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_DEVICE_UNUSABLE = 4


def main(descriptor: int) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    os.set_inheritable(descriptor, False)
    try:
        return _serve(Connection(descriptor))
    except (EOFError, ConnectionError):  # the front is gone: there is nobody to tell, and nothing is wrong here
        return 0


def _serve(connection: Connection) -> int:
    """Raises EOFError or ConnectionError if the front goes."""
    settings: EngineSettings = connection.recv()
    device_meter = ProcessMeter(settings.budget_bytes, connection)
    send = device_meter.send
    try:
        device = resolve_device(settings.device)
        meter: Meter = device_meter if device.type == "cpu" else CudaMeter(device, settings.budget_bytes, send)
        commands: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(connection, commands), daemon=True).start()
        engine = _prepare(settings, device, meter, send)
    except KvlabError as error:
        with contextlib.suppress(OSError):  # the front may have found the same, and gone
            send("refused", Refused(str(error)))
        return EXIT_REFUSED
    try:
        engine.run(commands)
    except DeviceUnusable as error:
        log.error("the engine ends itself, as no later step could be trusted: %s", error)
        return EXIT_DEVICE_UNUSABLE
    except ConnectionError:
        raise
    except Exception:
        log.exception("the engine dies with %d requests in flight", len(engine.in_flight))
        return EXIT_OUT_OF_MEMORY
    return 0


def _prepare(settings: EngineSettings, device: torch.device, meter: Meter, send) -> Engine:
    """Load, rehearse, and only then set the limit."""
    if device.type == "cpu":
        torch.backends.mkldnn.enabled = False  # it keeps objects for each shape that it has seen
    model = load_model(settings.model, device, engine_dtype(settings, device))
    bytes_per_token = kv_bytes_per_token(model.config, model.dtype)
    longest = settings.max_total_tokens if settings.policy == "sliding" else settings.budget_bytes // bytes_per_token
    room = step_room_bytes(model, settings, longest)
    meter.arm()
    send("ready", Ready(os.getpid(), str(device), room, bytes_per_token))
    return Engine(model, settings, meter, send)


def engine_dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, settings.dtype)


def _listen(connection: Connection, commands: queue.SimpleQueue) -> None:
    """Hand commands on until the front is gone: no engine outlives it."""
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
    except MemoryError:  # half a command is read and lost: an engine that is deaf would serve nobody and not end
        os._exit(EXIT_OUT_OF_MEMORY)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(code)  # not through the interpreter's end: a CUDA context that is gone can hang there
