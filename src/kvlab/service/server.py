"""Puts the parts together and runs them until a signal ends the service."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from kvlab.errors import KvlabError
from kvlab.model import load_config, load_tokenizer

from .app import create_app
from .completion import Front
from .dispatch import Dispatcher
from .http import Connection
from .metrics import Metrics
from .process import EngineProcess
from .settings import EngineSettings, FrontSettings
from .supervisor import Supervisor
from .tenants import ANONYMOUS, UNKNOWN, Tenants

log = logging.getLogger("kvlab.service")

LAST_WORD_S = 5.0  # for clients to read why they were ended


class ServiceError(KvlabError):
    """The service cannot run as configured."""


def serve(settings: EngineSettings, front: FrontSettings, engine: EngineProcess) -> None:
    """Serve until SIGTERM or SIGINT. ``engine``: the first engine process, which loads while this starts."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    tenants = Tenants.read(front.tenants) if front.tenants else Tenants.only_anonymous(front.queue_places)
    config, tokenizer = load_config(settings.model), load_tokenizer(settings.model)
    on_cuda = settings.device.startswith("cuda")
    metrics = Metrics({*tenants.by_name, ANONYMOUS, UNKNOWN}, on_cuda)
    dispatcher = Dispatcher(
        settings,
        config,
        tenants,
        Supervisor(settings, front.engine_timeout_s, engine),
        metrics,
        admission=front.admission,
        on_fatal=lambda message: server.fail(message),
    )
    tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizing")
    shared = Front(front, dispatcher, tokenizer, settings.model, config.vocab_size, int(time.time()), tokenizing)
    listener = listen(front)
    server = Server(
        uvicorn.Config(
            create_app(shared),
            http=partial(Connection, front=front),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(front.grace_s + LAST_WORD_S) + 60,
        ),
        dispatcher,
        front.grace_s,
    )
    server.run(sockets=[listener])
    if server.failure:
        raise ServiceError(server.failure)


def listen(front: FrontSettings) -> socket.socket:
    """A listening socket; raises ServiceError."""
    try:
        return socket.create_server((front.host, front.port), backlog=2048)
    except OSError as error:
        raise ServiceError(f"cannot listen: {error.strerror}") from None


class Server(uvicorn.Server):
    """A signal first drains: what waits is refused, what is in flight has ``grace_s`` to finish.

    Its address is on stdout, as with port 0 nobody else knows it; by then signals are answered.
    """

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher, grace_s: float):
        super().__init__(config)
        self.dispatcher, self.grace_s = dispatcher, grace_s
        self.failure: str | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's gives them back; here one that comes when all is done has nothing to add, and is ignored."""
        for number in HANDLED_SIGNALS:
            signal.signal(number, self.handle_exit)
        yield
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame) -> None:
        """Not a word here: a log that was just being written takes no second line within the first.

        uvicorn's answer to a second SIGINT is to drop everything, its own tasks too; here it ends the requests.
        """
        if self.should_exit and sig == signal.SIGINT and self.loop:
            self.loop.call_soon_threadsafe(self.dispatcher.abandon)
        self.should_exit = True

    def fail(self, message: str) -> None:
        self.failure = message
        self.should_exit = True

    async def startup(self, sockets=None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        host, port = sockets[0].getsockname()
        print(f"listening on http://{host}:{port}", flush=True)

    async def shutdown(self, sockets=None) -> None:
        log.info("finishing %d requests", self.dispatcher.in_flight)
        self.dispatcher.drain()
        loop = asyncio.get_running_loop()
        loop.call_later(self.grace_s, self.dispatcher.abandon)
        loop.call_later(self.grace_s + LAST_WORD_S, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        """End connections of clients that do not read: uvicorn would cancel their tasks, and log each as a crash."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
