"""Which models a window cache can serve, and how many tokens each kind of their layers keeps."""

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from .errors import UnsupportedModelError
from .masks import IMPLEMENTATIONS
from .policy import CachePolicy

# Their prepare_inputs_for_generation drops the user's cache where the RoPE factors switch, and a DynamicCache
# grows.
REPLACES_THE_CACHE = {"phi3", "phimoe", "phi4_multimodal"}


def check_model(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise ``UnsupportedModelError`` for what is known to give wrong text, with what to do instead."""
    config = getattr(model, "config", model)
    reason = _reason_against(model, config, config.get_text_config(decoder=True))
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__}: {reason}")


def _reason_against(model, config: PreTrainedConfig, text_config: PreTrainedConfig) -> str | None:
    rope = getattr(text_config, "rope_parameters", None) or {}
    if getattr(model, "training", False):
        return "is in training mode, and a cache that overwrites passes no gradients; call model.eval()"
    if config.is_encoder_decoder:
        return "has cross attention, which is no window of the last tokens; use its own cache"
    if config.model_type in REPLACES_THE_CACHE:
        return "generate() replaces the given cache once its RoPE switches factors; use a DynamicCache"
    if text_config._attn_implementation not in (None, *IMPLEMENTATIONS):
        return (
            f"{text_config._attn_implementation} attention takes no sink-and-window mask; use "
            "model.set_attn_implementation('sdpa')"
        )
    if getattr(text_config, "alibi", False):
        return "ALiBi adds a bias by column, which an evicting cache moves; use a DynamicCache"
    if "mrope_section" in rope:
        return "its positions have several axes (M-RoPE), so a distance is no number; use a DynamicCache"
    return None


def kept_tokens(config: PreTrainedConfig, policy: CachePolicy) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """The kind of each layer, and for each kind how many sinks and how long a window it keeps.

    In a hybrid model, layers with a window of their own keep exactly that where the policy holds as many
    tokens.
    """
    kinds, options = get_layer_types_and_kwargs(config)
    windows = {kind: option.get("sliding_window") for kind, option in zip(kinds, options, strict=True)}
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layers of kind {', '.join(sorted(unknown))} do not hold one key and value per token; use the model's "
            "own cache"
        )
    own = windows.get("sliding_attention")
    kept = dict.fromkeys(windows, (policy.sinks, policy.window))
    if own is not None and len(windows) > 1 and own <= policy.max_total_tokens:
        kept["sliding_attention"] = (0, own)
    elif own is not None and len(windows) == 1 and policy.max_total_tokens > own:
        raise UnsupportedModelError(
            f"every layer of this model sees {own} tokens and the policy keeps {policy.max_total_tokens}; use "
            f"max_total_tokens={own} or less"
        )
    return kinds, kept
