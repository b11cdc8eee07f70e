"""What a service is told at its start, checked once."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MIB = 2**20

PolicyName = Literal["static", "growing", "sliding"]
OnOom = Literal["free", "keep", "exit"]


class EngineSettings(BaseModel):
    """What the engine process needs to know.

    ``policy``: ``static`` gives each request a buffer of ``max_total_tokens`` rows, or of its own length where it is
    longer; ``growing`` lets each cache grow; ``sliding`` keeps ``sinks`` first tokens and a window, together
    ``max_total_tokens``.
    ``budget_bytes``: what the process may hold above the loaded model.
    ``on_oom``: ``free`` ends the request that was refused memory and frees what it held; ``keep`` does so too, but
    holds on to the exception until the next one, as a ``last_error`` for a status page does; ``exit`` lets the
    exception end the process, as in the incident.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    policy: PolicyName = "sliding"
    max_total_tokens: int = Field(default=1024, gt=0)
    sinks: int = Field(default=4, ge=0)
    budget_bytes: int = Field(default=256 * MIB, gt=0)
    prefill_chunk: int = Field(default=64, gt=0)
    on_oom: OnOom = "free"

    @model_validator(mode="after")
    def _has_a_window(self) -> Self:
        if self.policy == "sliding" and self.sinks >= self.max_total_tokens:
            raise ValueError(f"sinks={self.sinks} leave no window in max_total_tokens={self.max_total_tokens}")
        return self


class FrontSettings(BaseModel):
    """What the HTTP front needs to know; the limits are per connection or request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    tenants: Path | None = None
    admission: bool = True
    queue_places: int = Field(default=64, ge=0)
    max_request_tokens: int = Field(default=32_768, gt=0)
    max_body_bytes: int = Field(default=MIB, gt=0)
    max_connections: int = Field(default=1_000, gt=0)
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=10.0, gt=0)
    send_timeout_s: float = Field(default=60.0, gt=0)
    grace_s: float = Field(default=30.0, ge=0)
    engine_timeout_s: float = Field(default=120.0, gt=0)
