"""Data of others that tests may read where it lies at hand; it is not part of the project."""

import os
from pathlib import Path


def at_hand(name: str) -> Path | None:
    """A file or folder of the shared data: in ``KVLAB_SHARED_DATA`` if that is set, else beside the checkout."""
    named = os.environ.get("KVLAB_SHARED_DATA")
    places = [Path(named)] if named else [parent / "shared" / "data" for parent in Path(__file__).parents]
    return next((place / name for place in places if (place / name).exists()), None)
