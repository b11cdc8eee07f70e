"""Clients that load a service while it is watched."""

from __future__ import annotations

import asyncio
import threading

from kvlab.service.load import View, ask, client_of


class Stream(threading.Thread):
    """One client in a thread of its own: asks for ``max_tokens`` after ``prompt``, and reads to the end or hangs up.

    ``begun`` is set at its first piece of text, or when there will be none. ``view`` is what it saw, None while it
    runs.
    """

    def __init__(self, address: str, model: str, prompt: list[int], max_tokens: int, tenant: str | None = None):
        super().__init__(daemon=True)
        self.address, self.tenant = address, tenant
        self.fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self.view: View | None = None
        self.begun, self._gone = threading.Event(), threading.Event()
        self.start()

    @property
    def outcome(self) -> str | None:
        """As in ``View``, None while it runs."""
        return self.view and self.view.outcome

    def hang_up(self) -> None:
        """Go away with the next piece of text."""
        self._gone.set()

    def run(self) -> None:
        self.view = asyncio.run(self._ask())

    async def _ask(self) -> View:
        async with client_of(self.address, self.tenant) as client:
            return await ask(client, "stream", self.begun, gone=self._gone, **self.fields)
