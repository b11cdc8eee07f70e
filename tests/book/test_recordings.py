"""What is kept as recorded is whole, of the schema, and says nothing about the machine but what it should."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvlab.lab.recording import PATH_OF_A_MACHINE, recorded_device
from kvlab.lab.run import Run

RECORDINGS = Path(__file__).resolve().parents[2] / "book" / "recordings"
KEPT = sorted(path.parent for path in RECORDINGS.glob("*/*/run.json"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: "/".join(folder.parts[-2:]))
class TestRecording:
    def test_every_file_is_listed_and_has_the_bytes_it_had(self, folder):
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        sums = {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}
        assert set(sums) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
        for name, digest in sums.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name

    def test_the_run_closed_and_is_of_the_lab_and_device_of_its_folder(self, folder):
        run = Run.read(folder / "run.json")
        assert run.lab == folder.name
        assert run.finished_at is not None
        assert run.source.commit
        assert recorded_device(run) == folder.parent.name

    def test_no_path_of_the_machine_is_inside(self, folder):
        for path in folder.iterdir():
            assert not PATH_OF_A_MACHINE.search(path.read_bytes()), path.name


def test_a_path_of_a_machine_would_be_found():
    assert PATH_OF_A_MACHINE.search(b'File "/home/ada/lab.py"')
