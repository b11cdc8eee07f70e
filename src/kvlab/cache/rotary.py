"""Moving sink keys to their new distance: finding how a model rotates its keys, and rotating them further."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from .errors import UnsupportedModelError
from .shapes import head_dim

PROBE_FROM, PROBE_TO = 3, 40
PROBE_TOKENS = 4

_found: WeakKeyDictionary = WeakKeyDictionary()  # model: {dtype: rotations}


@dataclass(frozen=True)
class Rotation:
    """RoPE of one layer: angle = position · ``inv_freq[i]`` for the i-th pair of dimensions of a head.

    ``interleaved``: pairs are (0, 1), (2, 3), …; otherwise dimension i pairs with i + n, n =
    ``len(inv_freq)``. Dimensions beyond 2n are not rotated (partial rotary).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @classmethod
    def of(cls, inv_freq: torch.Tensor, interleaved: bool) -> Self:
        return cls(tuple(inv_freq.float().tolist()), interleaved)

    def split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and second member of each pair, (..., n) each, of keys (..., head_dim)."""
        n = len(self.inv_freq)
        if self.interleaved:
            return keys[..., 0 : 2 * n : 2], keys[..., 1 : 2 * n : 2]
        return keys[..., :n], keys[..., n : 2 * n]

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """``inv_freq`` (n,) in fp32; times a number of positions it is the angle to turn by."""
        return torch.tensor(self.inv_freq, dtype=torch.float32, device=device)

    def turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``keys`` (..., head_dim) turned further by the angle of ``cos`` and ``sin`` (..., n) into
        ``out``.

        Dimensions that are not rotated are left as they are in ``out``. The model's own scaling of cos and
        sin is already in the keys and must not be applied again, so cos and sin are the bare ones.
        """
        (a, b), (out_a, out_b) = self.split(keys), self.split(out)
        if out.dtype.itemsize >= 4:
            out_a.copy_(a).mul_(cos).addcmul_(b, sin, value=-1)
            out_b.copy_(b).mul_(cos).addcmul_(a, sin)
        else:  # turned in fp32 and rounded once
            a, b = a.float(), b.float()
            out_a.copy_(a * cos - b * sin)
            out_b.copy_(b * cos + a * sin)

    def turned(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``keys`` (..., head_dim) turned further (see ``turn``), as a new tensor."""
        out = keys.clone()
        self.turn(keys, cos, sin, out)
        return out


def find_rotations(model: PreTrainedModel | PreTrainedConfig) -> list[Rotation | None]:
    """How each layer rotates its keys; None for a layer that does not (NoPE).

    The model is probed: the key of one token at two positions shows the rotation, whatever the model is called. It is
    probed once in each type it is cast to, as a cast may round its frequencies. A config, or a model on the meta
    device, is built one head wide first.
    Raises ``UnsupportedModelError`` if none of the model's own frequencies explains its keys.
    """
    if isinstance(model, PreTrainedConfig) or model.device.type == "meta":
        return _probe(_one_head_wide(getattr(model, "config", model)))
    found = _found.setdefault(model, {})
    if model.dtype not in found:
        found[model.dtype] = _probe(model)
    return found[model.dtype]


def _probe(model: PreTrainedModel) -> list[Rotation | None]:
    candidates = {
        Rotation.of(buffer, interleaved)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        for interleaved in (False, True)
    }
    name = type(model).__name__
    if not candidates:
        raise UnsupportedModelError(f"{name} has no rotary embedding, so sinks cannot be moved; use a DynamicCache")
    limit = position_limit(model.config.get_text_config(decoder=True))
    far = PROBE_TO if limit is None else min(PROBE_TO, limit - 1)  # beyond it the frequencies would change
    here, there = (_keys_and_values_at(model, position) for position in (PROBE_FROM, far))
    rotations = []
    for layer, ((k_here, v_here), (k_there, v_there)) in enumerate(zip(here, there, strict=True)):
        if not torch.equal(v_here, v_there):
            raise UnsupportedModelError(
                f"the values of layer {layer} of {name} change with the position (latent attention?); use a "
                "DynamicCache"
            )
        rotations.append(_explain(k_here, k_there, far - PROBE_FROM, candidates, f"layer {layer} of {name}"))
    return rotations


def _one_head_wide(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config with the same layers and the same rotary embedding, but as small as it gets."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    width = head_dim(config)
    small = {
        **dict.fromkeys(("hidden_size", "head_dim"), width),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "vocab_size"), 8),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    for name, value in small.items():
        if hasattr(config, name):
            with suppress(AttributeError):  # a property that follows from others
                setattr(config, name, value)
    try:
        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(config).__name__} does not build one head wide ({error}); pass the model instead of its config"
        ) from error


@torch.no_grad()
def _keys_and_values_at(model: PreTrainedModel, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (B, heads, 1, dim) of every layer for lone tokens, which attend to themselves alone."""
    cache = DynamicCache(config=model.config)
    # Several, as a padding token's embedding may be zero, and zero looks the same wherever it is turned.
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[:, None]
    positions = torch.full_like(tokens, position)
    model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _explain(
    here: torch.Tensor, there: torch.Tensor, distance: int, candidates: set[Rotation], where: str
) -> Rotation | None:
    if not here.any():
        raise UnsupportedModelError(f"the keys of {where} are zero, so they show no rotation; load its weights")
    if torch.equal(here, there):
        return None
    here, there = here.float(), there.float()
    best, best_error = None, float("inf")
    for rotation in candidates:
        if 2 * len(rotation.inv_freq) > here.shape[-1]:
            continue
        angles, turned = distance * rotation.frequencies(here.device), here.clone()
        rotation.turn(here, angles.cos(), angles.sin(), turned)
        error = float((turned - there).abs().max() / there.abs().max())
        if error < best_error:
            best, best_error = rotation, error
    if best_error > 0.02:  # bf16 keys agree to about 0.005
        raise UnsupportedModelError(
            f"no rotation of the model's own explains the keys of {where} (best misses by {best_error:.1%})"
        )
    return best


def position_limit(config: PreTrainedConfig) -> int | None:
    """Tokens after which the model's RoPE changes its frequencies, so held keys misfit; None if never."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    limits = []
    for rope in by_kind:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)
