"""One request inside the engine: its cache, and its next step."""

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvlab.cache import CachePolicy, SlidingWindowCache, StaticKVCache
from kvlab.profiling import nvtx

from .messages import Start
from .price import window_rows
from .settings import EngineSettings


class Sequence:
    """Tokens that wait to be fed, and the cache of those that were.

    Each ``step`` feeds one chunk of the prompt, or the token generated last. A chunk short of the prompt's end
    gives None, anything else the next token.
    """

    def __init__(self, model: PreTrainedModel, settings: EngineSettings, start: Start):
        self.model, self.settings, self.start = model, settings, start
        self.waiting = torch.frombuffer(bytearray(start.prompt), dtype=torch.int32)
        self.request_tokens = len(self.waiting) + start.max_tokens
        self.generated = 0
        self.cache: Cache | None = None
        self.generator = None
        if start.seed is not None:
            self.generator = torch.Generator(model.device).manual_seed(start.seed)

    @torch.inference_mode()
    def step(self) -> int | None:
        if self.cache is None:
            self.cache = make_cache(self.model, self.settings, self.request_tokens)
        chunk = self.waiting[: self.settings.prefill_chunk]
        ids = chunk.long()[None].to(self.model.device)  # (1, q)
        with nvtx.range("decode" if self.generated else "prefill"):
            logits = self.model(ids, cache=self.cache, logits_to_keep=1).logits[0, -1]
        self.waiting = self.waiting[len(chunk) :]
        if len(self.waiting):
            return None
        token = self._sample(logits)
        self.generated += 1
        self.waiting = torch.tensor([token], dtype=torch.int32)
        return token

    def _sample(self, logits: torch.Tensor) -> int:
        """The next token from the logits (V,) of the last position."""
        if self.start.temperature == 0:
            return int(logits.argmax())
        # From the largest down and in double: next to zero a temperature makes -inf of the others, and never a NaN.
        scaled = (logits - logits.max()).double() / self.start.temperature
        return int(torch.multinomial(scaled.softmax(-1).float(), 1, generator=self.generator))

    def end_after(self, token: int) -> str | None:
        """Why the text ends with this token, None if it goes on."""
        if token in self.start.stop_ids:
            return "stop"
        return "length" if self.generated >= self.start.max_tokens else None

    @property
    def held_tokens(self) -> int:
        return 0 if self.cache is None else getattr(self.cache, "tokens_held", self.cache.get_seq_length())

    @property
    def evicted_tokens(self) -> int:
        return getattr(self.cache, "tokens_evicted", 0)


def make_cache(model: PreTrainedModel, settings: EngineSettings, request_tokens: int) -> Cache:
    """The cache of one request of so many tokens, as the policy wants it."""
    if settings.policy == "static":
        return StaticKVCache(model, max(settings.max_total_tokens, request_tokens), batch_size=1)
    if settings.policy == "growing":
        return DynamicCache(config=model.config)
    rows = window_rows(settings.max_total_tokens, settings.sinks, request_tokens)
    return SlidingWindowCache(model, CachePolicy(max_total_tokens=rows, sinks=settings.sinks))
