"""A tiny model on disk, and services that serve it."""

import pytest

from kvlab.service.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
