"""What a request will hold, known before it starts."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig

from .settings import EngineSettings

# What an allocator may add to each tensor: one page of 4 KiB on cpu, less than 512 bytes on CUDA.
ROUNDING_BYTES = 4096
# On CUDA the budget counts segments, and a segment is rarely full.
CUDA_HEADROOM = 0.10


@dataclass(frozen=True)
class Price:
    """Prices requests under one policy, in tokens of key/value cache.

    A reservation is the bytes of all tensors the request's cache will hold at most, rounding included, in units of
    one token's bytes, rounded up.
    """

    policy: str
    max_total_tokens: int
    sinks: int
    bytes_per_token: int
    rounding_bytes: int

    @classmethod
    def of(cls, config: PreTrainedConfig, bytes_per_token: int, settings: EngineSettings) -> Self:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        return cls(
            policy=settings.policy,
            max_total_tokens=settings.max_total_tokens,
            sinks=settings.sinks,
            bytes_per_token=bytes_per_token,
            rounding_bytes=2 * layers * ROUNDING_BYTES,
        )

    def rows(self, request_tokens: int) -> int:
        """Rows of each layer's buffer for a request of so many tokens, prompt and generated."""
        if self.policy == "static":
            return max(self.max_total_tokens, request_tokens)
        if self.policy == "sliding":
            return window_rows(self.max_total_tokens, self.sinks, request_tokens)
        return request_tokens

    def bytes(self, request_tokens: int) -> int:
        """The most that the request's cache will hold. The sliding cache keeps its sink keys twice."""
        sink_rows = (self.sinks + 2) // 2 if self.policy == "sliding" else 0
        return (self.rows(request_tokens) + sink_rows) * self.bytes_per_token + self.rounding_bytes

    def tokens(self, request_tokens: int) -> int:
        """The reservation, in tokens."""
        return -(-self.bytes(request_tokens) // self.bytes_per_token)

    def capacity_tokens(self, budget_bytes: int, step_room_bytes: int, device: str) -> int:
        """Tokens that all caches together may hold; the rest of the budget is for the step that runs."""
        room = budget_bytes - step_room_bytes
        if device.startswith("cuda"):
            room -= round(CUDA_HEADROOM * budget_bytes)
        return max(0, room // self.bytes_per_token)


def window_rows(max_total_tokens: int, sinks: int, request_tokens: int) -> int:
    """Rows of a sliding cache: the window, or the whole request where it is shorter."""
    return min(max_total_tokens, max(request_tokens, sinks + 1))
