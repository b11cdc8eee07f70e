"""Where the text of some layers stands: columns seen, padding, whether the last forward went through."""

from .errors import TornForwardError
from .padding import read_left_padding


class Progress:
    """Counts columns on the host. A forward is planned once, begun by its first layer and finished by its
    last.

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

    def plan(self, q: int, attention_mask) -> None:
        """Begin a forward of q columns. Raises ``TornForwardError`` if the last one never finished."""
        if self.begun and not self.finished:
            raise TornForwardError(
                f"the forward after {self.seen} tokens died before every layer had stored its keys: "
                "reset() and run the text again"
            )
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
