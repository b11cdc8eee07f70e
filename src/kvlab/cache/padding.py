"""Left padding, read from the attention mask: where the real tokens of each row begin."""

import torch

from .errors import PaddingError


def read_left_padding(attention_mask: torch.Tensor, columns: int) -> list[int]:
    """Pads of each row of a 2-D mask (B, columns): zeros, then ones. A row may still be all pads.

    Raises ``PaddingError`` for another width, right padding or holes. Reads the mask on the host.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] != columns:
        raise PaddingError(
            f"the attention mask has shape {tuple(attention_mask.shape)}; held text and chunk together are {columns} "
            "columns. Pass the mask of the whole text, or reset() before another text"
        )
    mask = attention_mask.bool()
    pads = columns - mask.sum(dim=1)
    expected = torch.arange(columns, device=mask.device) >= pads[:, None]
    if not bool((mask == expected).all()):
        raise PaddingError("the attention mask is not left padding then real tokens; pad on the left, without holes")
    return pads.tolist()
