"""Where the text of some layers stands: columns seen, padding, whether the last forward went through."""

import torch
from torch._subclasses import FakeTensor

from .errors import ReuseError, TornForwardError
from .padding import read_left_padding


class Progress:
    """Counts columns on the host. A forward is planned, begun by its first layer and finished by its last.

    The layers set flags rather than count, so that a compiled step can run them without guarding on a number.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.seen = 0  # columns of finished forwards, pads counted
        self.planned = 0  # columns of the forward that is planned or has just finished
        self.begun = self.finished = False
        self.pads: list[int] = [0]  # of each row; a single 0 where no row has any
        self.settled = False  # every row has begun, so its pads are known for good

    @property
    def columns(self) -> int:
        """Columns seen, the finished forward included."""
        return self.seen + (self.planned if self.finished else 0)

    @property
    def tokens_seen(self) -> int:
        """Real tokens of the longest row."""
        return max(self.columns - min(self.pads), 0)

    @property
    def shortest(self) -> int:
        """Real tokens of the shortest row, of finished forwards."""
        return max(self.columns - max(self.pads), 0)

    def adopt(self, columns: int) -> None:
        """Take over a count that was kept elsewhere."""
        self.seen, self.planned = columns, 0

    def check_whole(self) -> None:
        """Raise ``TornForwardError`` if the last forward was begun and not finished."""
        if self.begun and not self.finished:
            raise TornForwardError(
                f"the forward after {self.seen} tokens died before every layer had stored its keys: reset() and run "
                "the text again"
            )

    def plan(self, q: int, attention_mask) -> None:
        """Announce a forward of q columns. Raises ``TornForwardError`` if the last one never finished.

        A plan that no layer has begun is replaced: a mask may be asked for more than once.
        """
        self.check_whole()
        self.seen, self.planned = self.columns, 0
        self.begun = self.finished = False
        self._read_padding(q, attention_mask)
        self.planned = q

    def _read_padding(self, q: int, attention_mask) -> None:
        if self.settled:
            return
        if attention_mask is None:
            self.settled = True
            return
        columns = self.seen + q
        pads = read_left_padding(attention_mask, columns)
        self.settled = max(pads) < columns
        self.pads = pads if any(pads) else [0]

    @property
    def longest(self) -> int:
        """Real tokens of the longest row, the planned forward included."""
        return self.seen + self.planned - min(self.pads)

    @property
    def is_padded(self) -> bool:
        return len(self.pads) > 1

    def reorder(self, rows: list[int]) -> None:
        if self.is_padded:
            self.pads = [self.pads[row] for row in rows]

    @torch.compiler.disable
    def check_positions(self, position_ids: torch.Tensor | None) -> None:
        """Raise ``ReuseError`` if a chunk's positions do not follow on those seen: the sign of another text.

        ``position_ids`` (B, q) count columns, or the real tokens of each row. Reads the last ones on the host.
        """
        if position_ids is None or position_ids.device.type == "meta" or isinstance(position_ids, FakeTensor):
            return
        end = self.seen + self.planned - 1
        last = position_ids[:, -1].tolist()
        pads = self.pads if len(self.pads) == len(last) else self.pads[:1] * len(last)
        if any(at not in (end, max(end - pad, 0)) for at, pad in zip(last, pads, strict=True)):
            raise ReuseError(
                f"the chunk's positions end at {last}, the {self.seen} columns seen and {self.planned} new ones at "
                f"{end}: call reset() before another text, or give positions that continue this one"
            )
