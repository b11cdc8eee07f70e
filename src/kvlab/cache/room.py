"""Room for a prefill chunk: what it needs beside the window, and a refusal that names one that fits."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig

from .chunk import ChunkStep
from .errors import PrefillChunkError
from .ring import Ring
from .shapes import head_dim, num_key_value_heads


@dataclass(frozen=True)
class ChunkRoom:
    """Bytes of one layer's columns and of the mask, which are all that grows with a chunk."""

    limit_bytes: int
    column_bytes: int  # key and value of one token of one sequence in one layer, as attention reads them
    score_bytes: int  # for each query and column: mask, and what attention itself stores

    @classmethod
    def of(cls, config: PreTrainedConfig, itemsize: int, limit_bytes: int) -> Self:
        heads, queries = num_key_value_heads(config), config.num_attention_heads
        copies = heads + (queries if queries > heads else 0)  # masked attention repeats them per query
        score_bytes = 1 + itemsize  # the boolean mask, and its copy as numbers
        if config._attn_implementation == "eager":
            score_bytes += queries * (2 * itemsize + 4)  # scores, and their softmax in fp32
        return cls(limit_bytes, 2 * copies * head_dim(config) * itemsize, score_bytes)

    def needed(self, batch: int, q: int, columns: int) -> int:
        """Bytes for a chunk of q queries that attend to so many columns."""
        return batch * columns * (self.column_bytes + q * self.score_bytes)

    def most(self, batch: int, q: int, sinks: int, window: int) -> int:
        """Bytes any chunk of q tokens may need: copies of the sinks for each query, the window, itself."""
        return self.needed(batch, q, q * sinks + window + q)

    def check(self, ring: Ring, step: ChunkStep, batch: int) -> None:
        """Raise ``PrefillChunkError`` if the chunk needs more than the limit."""
        needed = self.needed(batch, step.q, step.columns(ring))
        if needed <= self.limit_bytes:
            return
        fits = step.q // 2
        while fits > 1 and self.most(batch, fits, ring.sinks_count, ring.window) > self.limit_bytes:
            fits //= 2
        raise PrefillChunkError(
            f"a chunk of {step.q} tokens needs {needed} bytes beside the window, and the limit is {self.limit_bytes}; "
            f"pass prefill_chunk_size={fits} to generate, or feed {fits} tokens at a time"
        )
