"""What a window with sinks means: a dense forward without a cache. Shares no code with the cache.

The model runs with all positions 0, where rotary embedding is the identity, and with an attention function
that rotates by hand: query p at p, the last W keys at their own positions, the first S keys moved on by the
number of tokens evicted before p, e(p) = max(0, p + 1 - S - W). That is the definition, key by key and query
by query.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "dense_reference"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first ``dims`` dimensions of a head."""

    dims: int
    theta: float
    interleaved: bool = False

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """x (..., head_dim) turned to position (...), pairs as complex numbers.

        The angles are rounded to fp32 as in every model of transformers; exact ones would differ by 1e-4 in
        logits.
        """
        frequency = self.theta ** (-torch.arange(0, self.dims, 2) / self.dims)
        angle = position[..., None].float() * frequency
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        turned, rest = x[..., : self.dims].to(at_least_fp32), x[..., self.dims :]
        if self.interleaved:
            pairs = turned.unflatten(-1, (-1, 2))
        else:
            pairs = turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        after = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * torch.polar(torch.ones_like(angle), angle))
        flat = after if self.interleaved else after.transpose(-1, -2)
        return torch.cat([flat.flatten(-2).to(x.dtype), rest], dim=-1)


@dataclass(frozen=True)
class LayerRule:
    """What the queries of one layer see."""

    sinks: int
    window: int
    rope: Rope | None
    turn_sinks: bool = True


@dataclass(frozen=True)
class ShiftRule:
    """What the queries of a shifting cache see: all since the last burst, found by living through it."""

    high: int
    low: int
    rope: Rope | None

    def seen(self, length: int) -> Tensor:
        """(length, length), query by key."""
        seen, held = torch.zeros(length, length, dtype=torch.bool), []
        for p in range(length):
            if len(held) == self.high:
                held = held[len(held) - self.low :]
            held = [*held, p]
            seen[p, held] = True
        return seen


_rules: list = []


@contextmanager
def following(model: PreTrainedModel, rules: list) -> Iterator[PreTrainedModel]:
    """The model attends by ``rules``, one a layer, instead of by its own mask and positions."""
    before = model.config._attn_implementation
    _rules[:] = rules
    model.config._attn_implementation = NAME
    try:
        yield model
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def reference_logits(model: PreTrainedModel, rules: list, ids: Tensor) -> Tensor:
    """Logits (T, vocabulary) of one text (T,) without padding."""
    with following(model, rules):
        return model(ids[None], position_ids=torch.zeros_like(ids[None]), use_cache=False).logits[0]


def reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model that can ``generate`` by the rules it is ``following``, the whole text in every step."""

    class Reference(type(model)):
        def forward(self, input_ids, **options):
            return super().forward(input_ids, position_ids=torch.zeros_like(input_ids), use_cache=False)

    reference = object.__new__(Reference)
    reference.__dict__ = model.__dict__
    return reference


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    rule = _rules[module.layer_idx]
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    shifting = isinstance(rule, ShiftRule)
    scores = _shift_scores(rule, query, key) if shifting else _window_scores(rule, query, key)
    scores, seen = scores
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~seen, float("-inf")).float().softmax(-1).to(value.dtype)
    if not shifting:
        value = torch.cat([value[:, :, : rule.sinks], value], dim=2)
    return (weights @ value).transpose(1, 2), None


def _turn(rope: Rope | None, x: Tensor, position: Tensor) -> Tensor:
    return x if rope is None else rope.turn(x, position)


def _window_scores(rule: LayerRule, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and what is seen (B, H, T, S + T): the sinks as each query finds them, then every token."""
    length = query.shape[2]
    p = torch.arange(length)
    sinks = min(rule.sinks, length)
    evicted = (p + 1 - rule.sinks - rule.window).clamp(min=0)
    turned_query = _turn(rule.rope, query, p)
    token_scores = turned_query @ _turn(rule.rope, key, p).transpose(-1, -2)
    at = p[:sinks] + (evicted[:, None] if rule.turn_sinks else 0 * evicted[:, None])  # (T, S)
    sink_keys = _turn(rule.rope, key[:, :, None, :sinks].expand(-1, -1, length, -1, -1), at)
    sink_scores = torch.einsum("bhqd,bhqsd->bhqs", turned_query, sink_keys)
    seen_sinks = p[:sinks] <= p[:, None]
    in_window = (p <= p[:, None]) & (p > p[:, None] - rule.window) & (p >= rule.sinks)
    return torch.cat([sink_scores, token_scores], dim=-1), torch.cat([seen_sinks, in_window], dim=-1)


def _shift_scores(rule: ShiftRule, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.arange(query.shape[2])
    scores = _turn(rule.rope, query, p) @ _turn(rule.rope, key, p).transpose(-1, -2)
    return scores, rule.seen(len(p))


AttentionInterface.register(NAME, _attention)
