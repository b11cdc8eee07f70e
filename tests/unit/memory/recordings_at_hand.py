"""Where snapshots recorded on real GPUs lie, if they are at hand; they are others' and not part of the
project."""

import json
from pathlib import Path

import pytest
from shared_data import at_hand

MODEL_SNAPSHOT = Path(__file__).parents[2] / "data" / "allocator" / "model-run.pickle"


def folder() -> Path | None:
    index = at_hand("snapshots/index.json")
    return index and index.parent


def entries() -> list[dict]:
    found = folder()
    return json.loads((found / "index.json").read_text()) if found else []


def paths() -> list[Path]:
    return [folder() / entry["file"] for entry in entries()]


needed = pytest.mark.skipif(
    folder() is None, reason="no recordings of real GPUs at hand (KVLAB_SHARED_DATA names their folder)"
)
