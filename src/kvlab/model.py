"""What a lab runs: the bundled model, any Hugging Face id or folder, or a shape without weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers  # its names are loaded when they are first used, which takes seconds
from huggingface_hub import constants as hub
from huggingface_hub.utils import get_session

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


def _shape(
    model_type: str,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **rest,
    }


# Shapes without weights: the fields of each published config.json that decide how many bytes a model needs.
# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    BUNDLED_MODEL: CONFIG,
    "llama-2-7b": _shape("llama", layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32,
                         vocab=32000, positions=4096, dtype="float16"),
    "llama-2-13b": _shape("llama", layers=40, hidden=5120, intermediate=13824, heads=40, kv_heads=40,
                          vocab=32000, positions=4096, dtype="float16"),
    "llama-2-70b": _shape("llama", layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8,
                          vocab=32000, positions=4096, dtype="float16"),
    "llama-3-8b": _shape("llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
                         vocab=128256, positions=8192),
    "mistral-7b-v0.1": _shape("mistral", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
                              vocab=32000, positions=32768, sliding_window=4096),
    "qwen2.5-7b": _shape("qwen2", layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4,
                         vocab=152064, positions=131072),
    "gemma-2-9b": _shape("gemma2", layers=42, hidden=3584, intermediate=14336, heads=16, kv_heads=8,
                         vocab=256000, positions=8192, head_dim=256, sliding_window=4096,
                         tie_word_embeddings=True),
}
# fmt: on


class UnknownModel(KvlabError):
    """The name is no bundled model, shape, folder, config.json or reachable Hugging Face id."""


def load_config(name: str | Path) -> transformers.PreTrainedConfig:
    """The transformers config of a shape, a folder, a ``config.json`` file or a Hugging Face id.

    Shapes come first and need neither files nor network. Raises UnknownModel.
    """
    if name in SHAPES:
        return transformers.AutoConfig.for_model(**SHAPES[name])
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return _read(transformers.AutoConfig, name, path, local_files_only=True)
    return _from_pretrained(transformers.AutoConfig, name)


def load_model(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> transformers.PreTrainedModel:
    """A causal language model in eval mode, its parameters in ``dtype`` on ``device``.

    The bundled model's weights are dequantised from 4 bits: what it computes is real, what it scores is not
    what the published model scores. It, folders, and ids in the Hugging Face cache need no network. Raises
    ModelNotFetched when it is not in the cache directory, UnknownModel when any other name cannot be loaded.
    """
    model, report = _from_pretrained(
        transformers.AutoModelForCausalLM,
        name_or_path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise UnknownModel(f"{name_or_path} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return model.to(device).eval()


def load_tokenizer(name_or_path: str | Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a bundled model, a folder or a Hugging Face id; raises as ``load_model`` does."""
    return _from_pretrained(transformers.AutoTokenizer, name_or_path)


def random_model(
    config: transformers.PreTrainedConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
) -> transformers.PreTrainedModel:
    """A model of this shape with random weights, in eval mode: same bytes and same kernels, no meaning.

    The weights come from torch's global generator; seed it first for a reproducible model. Raises
    UnknownModel when the family does not know this ``attn_implementation``.
    """
    config = copy.deepcopy(config)  # from_config writes dtype and attention into it
    with _one_line_errors(f"a random {config.model_type}"), torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
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
        return _read(auto_class, name, folder, local_files_only=True, **options)
    if name in SHAPES:
        raise UnknownModel(f"{name} is a shape without weights; use random_model(load_config({name!r}))")
    if str(name) and Path(name).exists():
        if not (Path(name) / "config.json").is_file():
            raise UnknownModel(f"{name} has no config.json; pass a folder that holds a Hugging Face model")
        return _read(auto_class, name, name, local_files_only=True, **options)
    return _from_hub(auto_class, str(name), **options)


def _from_hub(auto_class: type, name: str, **options: Any) -> Any:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UnknownModel(
            f"there is no model {name!r}: not a folder, not a Hugging Face id (owner/name), not one of "
            + ", ".join(SHAPES)
        )
    try:
        return _read(auto_class, name, name, local_files_only=True, **options)
    except UnknownModel as error:
        if hub.HF_HUB_OFFLINE or not _hub_answers():
            raise UnknownModel(
                f"{name} is not in the Hugging Face cache and the hub cannot be reached; connect to the "
                f"network, or pass a folder or {BUNDLED_MODEL}"
            ) from error
    return _read(auto_class, name, name, **options)


def _hub_answers() -> bool:
    """One quick request, because transformers retries an unreachable hub for half a minute."""
    try:
        get_session().head(hub.ENDPOINT, timeout=5)
    except Exception:
        return False
    return True


def _read(auto_class: type, name: str | Path, source: str | Path, **options: Any) -> Any:
    with _one_line_errors(name):
        return auto_class.from_pretrained(source, trust_remote_code=False, **options)


@contextmanager
def _one_line_errors(name: str | Path) -> Iterator[None]:
    """Keep transformers quiet, and turn what it raises about its input into one line."""
    try:
        with quiet_transformers():
            yield
    except KvlabError:
        raise
    except Exception as error:  # a folder of files may hold anything, and transformers trips over it anywhere
        reason = " ".join(str(error).split())
        raise UnknownModel(f"cannot load {name}: {reason}") from error
