"""Ways to push a text through a model and a cache."""

import torch
from transformers import Cache, PreTrainedModel


@torch.no_grad()
def in_chunks(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, sizes: list[int], mask=None) -> torch.Tensor:
    """Logits (B, T, vocabulary) of ids (B, T), fed in chunks of the given sizes."""
    logits, start = [], 0
    for size in sizes:
        options = {} if mask is None else {"attention_mask": mask[:, : start + size]}
        logits.append(model(ids[:, start : start + size], cache=cache, use_cache=True, **options).logits)
        start += size
    assert start == ids.shape[1], f"the chunks cover {start} of {ids.shape[1]} tokens"
    return torch.cat(logits, dim=1)


def even_chunks(length: int, size: int) -> list[int]:
    """Chunks of one size, the last one shorter if it must be."""
    return [min(size, length - start) for start in range(0, length, size)]


def left_padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of several lengths as one batch and its attention mask, (B, T) each."""
    width = max(map(len, texts))
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(texts):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask
