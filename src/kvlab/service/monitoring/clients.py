"""Clients that load a service while it is watched."""

from __future__ import annotations

import json
import threading
import time

import httpx


class Stream(threading.Thread):
    """One client: asks for ``max_tokens`` after the token ids of ``prompt``, and reads until the end or until it goes.

    ``outcome`` is None while it runs, then ``completed``, ``hung up``, ``connection lost`` or the refusal's code.
    """

    def __init__(self, address: str, model: str, prompt: list[int], max_tokens: int, tenant: str | None = None):
        super().__init__(daemon=True)
        self.address = address
        self.body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.headers = {"X-Tenant": tenant} if tenant else {}
        self.tokens = 0
        self.outcome: str | None = None
        self.ended_s: float | None = None
        self._hung_up = threading.Event()
        self.asked_s = time.time()
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._read()
        except httpx.HTTPError:
            self.outcome = "connection lost"
        self.ended_s = time.time()

    def hang_up(self) -> None:
        """Go away with the next token."""
        self._hung_up.set()

    def _read(self) -> str:
        url = f"{self.address}/v1/completions"
        with httpx.stream("POST", url, json=self.body, headers=self.headers, timeout=None) as answer:
            if answer.status_code != 200:
                return json.loads(answer.read())["error"]["code"]
            for line in answer.iter_lines():
                if self._hung_up.is_set():
                    return "hung up"
                if "error" in (event := _event(line)):
                    return event["error"]["code"]
                self.tokens += bool(event)
        return "completed"


def _event(line: str) -> dict:
    text = line.removeprefix("data: ")
    return json.loads(text) if text.startswith("{") else {}
