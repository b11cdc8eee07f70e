"""Text from token ids as they come, and the strings that end it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "�"
LONGEST_CHARACTER = 8  # tokens to wait for the rest of a character, which has at most four bytes


class TextStream:
    """Turns tokens into text piece by piece: whole characters only, nothing of a stop string.

    ``stopped`` is true once a stop string came; the text ends before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        self._ids: list[int] = []  # the last piece shown, which decides how the next one is spaced, and what waits
        self._shown = 0  # of those, tokens whose text was given out
        self._held = ""  # could be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        self._ids.append(token)
        shown, whole = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if whole.endswith(REPLACEMENT) and len(self._ids) - self._shown < LONGEST_CHARACTER:
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return self._until_stop(whole[len(shown) :])

    def finish(self) -> str:
        """What was held back, once nothing more comes."""
        if self.stopped:
            return ""
        shown, whole = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        text = self._until_stop(whole[len(shown) :])
        return text if self.stopped else text + self._held

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could be the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
