"""One HTTP connection: uvicorn's, with the time and number of connections limited, and refusals in JSON."""

import json
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .protocol import ApiError
from .settings import FrontSettings


class Connection(H11Protocol):
    """Closes connections beyond ``max_connections``, and those whose headers take longer than ``header_timeout_s``.

    It also breaks off those whose client does not read within ``send_timeout_s``. uvicorn itself waits for ever, for
    the first header and for a reader.
    """

    def __init__(self, *args, front: FrontSettings, **kwargs):
        super().__init__(*args, **kwargs)
        self.front = front
        self._late = self._unread = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.front.max_connections:
            message = f"{self.front.max_connections} connections are open already"
            self._refuse(ApiError(429, message, type="rate_limit_error", code="too_many_connections"))
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.front.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def connection_lost(self, exc) -> None:
        self._unwatch()
        self._read()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _watch(self) -> None:
        """Time runs while a request's headers are awaited: the first one's, and one whose beginning has come."""
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE or not begun:
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(self.front.header_timeout_s, self._too_late)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_late(self) -> None:
        message = f"the request's headers did not come within {self.front.header_timeout_s:g} s"
        self._refuse(ApiError(408, message, code="headers_too_slow"))

    def _refuse(self, error: ApiError) -> None:
        """Answer outside any request, and close."""
        self._unwatch()
        if self.transport.is_closing():
            return
        body = json.dumps(error.body()).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
