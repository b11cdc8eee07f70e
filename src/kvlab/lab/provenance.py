"""Where a number comes from: the device, the versions, the commit and the hashes of what was run."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "papermill",
    "numpy",
    "safetensors",
    "tokenizers",
    "matplotlib",
    "nvidia-ml-py",
)
"""Packages whose version can change a result; a run is out of date when one of them changes."""


def repository() -> Path:
    """The checkout that holds ``labs`` and ``book``; the current folder where there is none."""
    for folder in (Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents):
        if (folder / "labs").is_dir() and (folder / "book").is_dir():
            return folder
    return Path.cwd()


def sha256_of(*paths: Path, root: Path) -> str:
    """One hash over the names (relative to ``root``) and bytes of ``paths``."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def src_sha256() -> str:
    """Hash of the package that is imported, wherever it lies."""
    root = Path(__file__).resolve().parents[1]
    return sha256_of(*root.rglob("*.py"), root=root)


def lab_path(lab: str) -> Path:
    return repository() / "labs" / f"{lab}.ipynb"


def lab_sha256(lab: str) -> str | None:
    path = lab_path(lab)
    return sha256_of(path, root=path.parent) if path.is_file() else None


def software() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    versions = {"python": platform.python_version(), "kvlab": metadata.version("kvlab")}
    for name in PACKAGES:
        versions[name] = metadata.version(name)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def environment_sha256(device: torch.device) -> str:
    """Hash of the versions and of the device a run depends on."""
    facts = sorted((software() | {"device": str(device), "name": device_facts(device)["name"]}).items())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def device_facts(device: torch.device) -> dict[str, Any]:
    """Kind, name and size of the device; no serial number, host name or path."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return {
            "kind": "cuda",
            "name": card.name,
            "total_bytes": card.total_memory,
            "capability": f"{card.major}.{card.minor}",
        }
    return {
        "kind": "cpu",
        "name": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(", "),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


KEPT_RUNS = ":(exclude)book/recordings"  # or every lab of one recording but the first would be dirty


def source(lab: str) -> dict[str, Any]:
    """Commit, dirty flag and hashes: what :class:`kvlab.lab.run.Source` holds, less the environment."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if (status := _git("status", "--porcelain", "--", ".", KEPT_RUNS)) is None else bool(status),
        "lab_sha256": lab_sha256(lab),
        "src_sha256": src_sha256(),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the repository; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=repository(), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
