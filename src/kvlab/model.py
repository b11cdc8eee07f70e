"""What a lab runs: the bundled model, any Hugging Face id or folder, or a shape without weights."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

import torch
from huggingface_hub import constants as hub
from huggingface_hub.utils import get_session
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import PreTrainedConfig as PretrainedConfig

from kvlab.bundled import (
    BUNDLED_MODEL,
    CONFIG,
    ModelNotFetched,
    fetch_model,
    is_whole,
    model_dir,
    quiet_transformers,
)
from kvlab.errors import KvlabError

__all__ = [
    "SHAPES",
    "ModelNotFetched",
    "UnknownModel",
    "fetch_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "long_text",
    "long_text_sha256",
    "model_dir",
    "random_model",
]

T = TypeVar("T")

# Shapes without weights: the fields of each model's config.json that decide how many bytes it needs.
SHAPES: dict[str, dict[str, Any]] = {
    BUNDLED_MODEL: CONFIG,
    "llama-2-7b": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4_096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": False,
        "dtype": "float16",
    },
    "llama-2-13b": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 5_120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": False,
        "dtype": "float16",
    },
    "llama-2-70b": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 8_192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": False,
        "dtype": "float16",
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8_192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        "vocab_size": 32_000,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "sliding_window": 4_096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3_584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 3_584,
        "intermediate_size": 14_336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 8_192,
        "sliding_window": 4_096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}


class UnknownModel(KvlabError):
    """The name is no bundled model, shape, folder, config.json or reachable Hugging Face id."""


def load_config(name: str | Path) -> PretrainedConfig:
    """The transformers config of a shape, a folder, a ``config.json`` file or a Hugging Face id.

    Shapes come first and need neither files nor network. Raises UnknownModel.
    """
    if name in SHAPES:
        return AutoConfig.for_model(**SHAPES[name])
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return _read(name, lambda: AutoConfig.from_pretrained(path, local_files_only=True))
    return _from_pretrained(AutoConfig, name)


def load_model(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A causal language model in eval mode, its parameters in ``dtype`` on ``device``.

    The bundled model's weights are dequantised from 4 bits: what it computes is real, what it scores is not
    what the published model scores. It, folders, and ids in the Hugging Face cache need no network. Raises
    ModelNotFetched when it is not in the cache directory, UnknownModel when any other name cannot be loaded.
    """
    model = _from_pretrained(AutoModelForCausalLM, name_or_path, dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval()


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a bundled model, a folder or a Hugging Face id; raises as ``load_model`` does."""
    return _from_pretrained(AutoTokenizer, name_or_path)


def random_model(
    config: PretrainedConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A model of this shape with random weights, in eval mode: same bytes and same kernels, no meaning.

    The weights come from torch's global generator; seed it first for a reproducible model.
    """
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.eval()


def long_text() -> str:
    """About 113,000 SmolLM2 tokens of English prose that every Python carries: the topics of ``help()``.

    It differs between Python versions, so a run records ``long_text_sha256()`` beside what it measures.
    """
    return "\n\n".join(topics[key] for key in sorted(topics))


def long_text_sha256() -> str:
    """SHA-256 of ``long_text()`` in UTF-8."""
    return hashlib.sha256(long_text().encode()).hexdigest()


def _from_pretrained(auto_class: type, name: str | Path, **options: Any) -> Any:
    """Load from files where there are any; only a Hugging Face id that is not cached goes to the network."""
    if name == BUNDLED_MODEL:
        folder = model_dir(BUNDLED_MODEL)
        if not is_whole(folder, check_hashes=False):
            raise ModelNotFetched(f"{name} is not, or not wholly, in {folder}; run `kvlab model fetch`")
        return _read(name, lambda: auto_class.from_pretrained(folder, local_files_only=True, **options))
    if name in SHAPES:
        raise UnknownModel(f"{name} is a shape without weights; use random_model(load_config({name!r}))")
    if Path(name).exists():
        if not (Path(name) / "config.json").is_file():
            raise UnknownModel(f"{name} has no config.json; pass a folder that holds a Hugging Face model")
        return _read(name, lambda: auto_class.from_pretrained(name, local_files_only=True, **options))
    return _from_hub(auto_class, str(name), **options)


def _from_hub(auto_class: type, name: str, **options: Any) -> Any:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UnknownModel(
            f"there is no model {name!r}: not a folder, not a Hugging Face id (owner/name), not one of "
            + ", ".join(SHAPES)
        )
    try:
        return _read(name, lambda: auto_class.from_pretrained(name, local_files_only=True, **options))
    except UnknownModel as error:
        if hub.HF_HUB_OFFLINE or not _hub_answers():
            raise UnknownModel(
                f"{name} is not in the Hugging Face cache and the hub cannot be reached; connect to the "
                f"network, or pass a folder or {BUNDLED_MODEL}"
            ) from error
    return _read(name, lambda: auto_class.from_pretrained(name, **options))


def _hub_answers() -> bool:
    """One quick request, because transformers retries an unreachable hub for half a minute."""
    try:
        get_session().head(hub.ENDPOINT, timeout=5)
    except Exception:
        return False
    return True


def _read(name: str | Path, load: Callable[[], T]) -> T:
    """Run a transformers loader quietly, and turn what it raises about its input into one line."""
    try:
        with quiet_transformers():
            return load()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UnknownModel(f"cannot load {name}: {reason}") from error
