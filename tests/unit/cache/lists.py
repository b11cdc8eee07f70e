"""What a cache of any kind must do, as plain lists: the model for the property tests."""

from dataclasses import dataclass, field

import torch
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask

HEADS, DIM, LAYERS = 2, 8, 2


@dataclass
class Texts:
    """Rows of tokens as they were appended; None is padding. Every token is a number of its own."""

    rows: list[list[int | None]]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # token -> (LAYERS, HEADS, DIM)

    def append(self, q: int, pads: list[int]) -> None:
        """Add q columns; a row's first ``pads`` columns are padding."""
        for row, pad in zip(self.rows, pads, strict=True):
            for _ in range(q):
                row.append(None if len(row) < pad else self._new_token())

    def _new_token(self) -> int:
        token = len(self.keys) + 1
        self.keys[token] = torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(token))
        return token

    def reorder(self, order: list[int]) -> None:
        self.rows = [list(self.rows[row]) for row in order]

    def reset(self) -> None:
        self.rows = [[] for _ in self.rows]

    def real(self, row: int, column: int) -> list[int]:
        """The real tokens of a row up to and with a column."""
        return [token for token in self.rows[row][: column + 1] if token is not None]

    def states(self, layer: int, q: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, HEADS, q, DIM) of the last q columns; a value is its token's number."""
        keys = torch.zeros(len(self.rows), HEADS, q, DIM)
        values = torch.zeros(len(self.rows), HEADS, q, DIM)
        for row, tokens in enumerate(self.rows):
            for i, token in enumerate(tokens[-q:]):
                if token is not None:
                    keys[row, :, i] = self.keys[token][layer]
                    values[row, :, i] = token
        return keys, values

    def mask(self) -> torch.Tensor:
        return torch.tensor([[token is not None for token in row] for row in self.rows])


def push(config: PreTrainedConfig, cache: Cache, texts: Texts, q: int):
    """Run the last q columns through the cache as a model would.

    Returns the mask (B, 1, q, columns) and, for each layer, the keys and values (B, HEADS, columns, DIM).
    """
    batch, padded = len(texts.rows), not bool(texts.mask().all())
    mask = create_causal_mask(config, torch.empty(batch, q, 0), texts.mask().long() if padded else None, cache)
    held = [cache.update(*texts.states(layer, q), layer) for layer in range(LAYERS)]
    columns = held[0][0].shape[2]
    if mask is None:  # SDPA's own: everything for one query, causal over itself for a chunk
        mask = torch.ones(q, columns, dtype=torch.bool).tril(columns - q)[None, None]
        assert q == 1 or columns == q
    return mask.expand(batch, 1, q, columns), held
