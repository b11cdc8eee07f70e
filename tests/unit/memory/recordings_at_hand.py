"""Where snapshots recorded on real GPUs lie, if they are at hand; they are others' and not part of the
project."""

import json
import os
from pathlib import Path

import pytest

MODEL_SNAPSHOT = Path(__file__).parents[2] / "data" / "allocator" / "model-run.pickle"


def folder() -> Path | None:
    named = os.environ.get("KVLAB_SHARED_DATA")
    places = [Path(named)] if named else [parent / "shared" / "data" for parent in Path(__file__).parents]
    return next((place / "snapshots" for place in places if (place / "snapshots" / "index.json").exists()), None)


def entries() -> list[dict]:
    found = folder()
    return json.loads((found / "index.json").read_text()) if found else []


def paths() -> list[Path]:
    return [folder() / entry["file"] for entry in entries()]


needed = pytest.mark.skipif(
    folder() is None, reason="no recordings of real GPUs at hand (KVLAB_SHARED_DATA names their folder)"
)
