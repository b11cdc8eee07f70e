"""What all kvlab caches share: counters, and the refusals that keep a bounded cache honest."""

import torch
from transformers import Cache

from .errors import ReuseError, UnsupportedOperationError


class BoundedCache(Cache):
    """A transformers ``Cache`` that never grows, counts what it holds and refuses what it cannot undo.

    Subclasses implement ``tokens_seen``, ``tokens_held`` and ``nbytes`` from host integers, so that reading
    them never waits for the device.
    """

    _resuming = False

    @property
    def tokens_seen(self) -> int:
        """Tokens of the longest sequence that went through; padding that is known to be padding does not count."""
        raise NotImplementedError

    @property
    def tokens_held(self) -> int:
        """Tokens of the longest sequence whose keys are still held."""
        raise NotImplementedError

    @property
    def tokens_evicted(self) -> int:
        """Tokens seen and no longer held."""
        return self.tokens_seen - self.tokens_held

    @property
    def nbytes(self) -> int:
        """Bytes of all key, value and sink tensors; 0 before they are allocated."""
        raise NotImplementedError

    def resume(self) -> None:
        """Let the next ``generate`` continue this text; give it the whole text again."""
        self._resuming = True

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # transformers sets this once at the start of each generate() that was given a cache, before any work:
        # the one moment at which a second text can be told from a continuation of the first.
        resuming, self._resuming = self._resuming, False
        if self.tokens_seen and not resuming:
            raise ReuseError(
                f"{type(self).__name__} already holds a text of {self.tokens_seen} tokens: call reset() before "
                "another text, or resume() to continue this one with the whole text given again"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every row, which is exact until something was evicted."""
        count = -tokens_to_remove
        if count == 0:
            return
        if not 0 < count <= self._croppable_tokens():
            raise UnsupportedOperationError(
                f"cannot crop by {tokens_to_remove}: {self.tokens_held} tokens are held and {self.tokens_evicted} were "
                f"evicted, so at most {self._croppable_tokens()} can be taken back (as a negative number). Use reset() "
                "and give the shorter text again, or a DynamicCache"
            )
        self._take_back(count)

    def _croppable_tokens(self) -> int:
        """How many of the last tokens can be taken back as if they had never been."""
        raise NotImplementedError

    def _take_back(self, count: int) -> None:
        raise NotImplementedError

    def activate_past_recording(self) -> None:
        raise UnsupportedOperationError(
            f"{type(self).__name__} cannot record what it evicts, which assisted decoding needs; use a DynamicCache "
            "for assisted decoding"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedOperationError(
            f"the batch is fixed at the first token and cannot be repeated {repeats} times; repeat the inputs before "
            "the first token instead"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UnsupportedOperationError(
            "the batch is fixed at the first token; reset() and run the selected rows again"
        )
