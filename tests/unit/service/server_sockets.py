"""The server's end of a client's connection, as the kernel lists it (proc(5), /proc/net/tcp)."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

ESTABLISHED = 0x01


def server_end(client: socket.socket) -> tuple[int, int]:
    """State, and bytes that wait to be taken by the client; (0, 0) for an end that is gone."""
    ends = [_as_listed(end) for end in (client.getpeername(), client.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return int(fields[3], 16), int(fields[4].partition(":")[0], 16)
    return 0, 0


def is_stuck(client: socket.socket) -> bool:
    """Whether the server waits for this client to read."""
    before = server_end(client)
    time.sleep(0.2)
    return before[1] > 0 and server_end(client) == before


def _as_listed(address: tuple[str, int]) -> str:
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
