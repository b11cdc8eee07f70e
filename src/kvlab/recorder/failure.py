"""One failure and its folder: each thing is kept by itself, so that what cannot be had does not cost the rest."""

import contextlib
import json
import os
import pickle
import platform
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.memory.ledger import Ledger, ledger_of_process, ledger_on_cuda
from kvlab.memory.nvml import Mark, Notice, Sample, Sampler
from kvlab.memory.nvml.file import line_of, start_line
from kvlab.memory.oom import Diagnosis, diagnose_exception
from kvlab.recorder.page import Page, render

UNFINISHED = ".unfinished-"


class Told(NamedTuple):
    """What PyTorch tells its observers: the CUDA device and three sizes."""

    device: int
    tried_bytes: int
    total_bytes: int
    free_bytes: int


class Failure:
    """What is kept of one failure. ``lost`` names what could not be, with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lost: dict[str, str] = {}
        self.at = datetime.now(UTC)
        self.told: Told | None = None
        self.headline = ""
        self.message: str | None = None
        self.diagnosis: Diagnosis | None = None
        self.ledger: Ledger | None = None
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self.facts: dict[str, Any] = {}

    @classmethod
    def in_new_folder(cls, parent: Path) -> "Failure":
        """A failure with a folder of its own below ``parent``, named by time and process; never an older one."""
        stem = f"oom-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
        for number in range(1, 10_000):
            folder = parent / (stem if number == 1 else f"{stem}-{number}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not parent.is_dir():
                    raise
                continue
            return cls(folder)
        raise FileExistsError(f"{parent} holds {stem} ten thousand times")

    def keep_state(self, sampler: Sampler | None, kv_bytes: Callable[[], int] | None, told: Told | None) -> None:
        """Everything but the message, the short-lived first."""
        self.told = told
        torch = sys.modules.get("torch")
        on_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        device = None
        if on_cuda:
            device = told.device if told else torch.cuda.current_device()
            self._part("snapshot.pickle", lambda: pickle.dumps(torch.cuda.memory._snapshot(), protocol=4))
            self._part("memory_stats.json", lambda: _json(torch.cuda.memory_stats(device)))
        self._part("ledger.json", lambda: self._ledger(device, kv_bytes))
        self._part("samples.jsonl", lambda: self._samples(sampler))
        self._part("facts.json", lambda: self._facts(torch, device))

    def keep_message(self, error: BaseException, shortage: BaseException) -> None:
        """The exception with its causes, as Python prints it, and how it reads; ``shortage`` is its headline."""
        self.headline = "".join(traceback.format_exception_only(shortage)).strip()
        self._part("message.txt", lambda: self._text(error))
        self._part("diagnosis.json", lambda: self._diagnosis(error))

    def write_index(self) -> None:
        self._part("index.html", lambda: render(self._page()))

    def _part(self, name: str, make: Callable[[], str | bytes]) -> None:
        """Write a file, whole or not at all: a rest of one would pass for it, and take its room on a full disk."""
        unfinished = self.folder / f"{UNFINISHED}{name}"
        try:
            content = make()
            unfinished.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
            unfinished.replace(self.folder / name)
            self.lost.pop(name, None)
        except Exception as error:
            self.lost[name] = _reason(error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _ledger(self, device: int | None, kv_bytes: Callable[[], int] | None) -> str:
        bytes_now = None
        if kv_bytes is not None:
            try:
                bytes_now = int(kv_bytes())
            except Exception as error:
                self.lost["the cache's bytes"] = _reason(error)
        self.ledger = ledger_of_process(bytes_now) if device is None else ledger_on_cuda(bytes_now, device=device)
        return self.ledger.model_dump_json(indent=1)

    def _samples(self, sampler: Sampler | None) -> str:
        if sampler is None:
            raise RuntimeError("the sampler did not start")
        self.samples, self.marks = list(sampler.samples), list(sampler.marks)
        entries: list[Sample | Mark | Notice] = [*self.samples, *self.marks, *sampler.notices]
        lines = [line_of(entry) for entry in sorted(entries, key=lambda entry: entry.t_s)]
        return "\n".join([start_line(sampler.interval_s, sampler.sources.describe()), *lines]) + "\n"

    def _facts(self, torch: Any, device: int | None) -> str:
        self.facts = {
            "at": self.at.isoformat(timespec="seconds"),
            "process": os.getpid(),
            "python": platform.python_version(),
            "torch": torch.__version__ if torch else None,
            "device": "cpu" if device is None else f"cuda:{device} {torch.cuda.get_device_name(device)}",
            "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
            "told_by_allocator": self.told._asdict() if self.told else None,
            "limits": _limits(),
        }
        return _json(self.facts)

    def _text(self, error: BaseException) -> str:
        self.message = "".join(traceback.format_exception(error))
        return self.message

    def _diagnosis(self, error: BaseException) -> str:
        self.diagnosis = diagnose_exception(error)
        return self.diagnosis.model_dump_json(indent=1)

    def _page(self) -> Page:
        files = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name != "index.html" and not path.name.startswith(UNFINISHED)
        )
        return Page(
            at=self.at,
            headline=self.headline,
            message=self.message,
            diagnosis=self.diagnosis,
            ledger=self.ledger,
            samples=self.samples,
            marks=self.marks,
            facts=self.facts,
            files=files,
            lost=self.lost,
        )


def _reason(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except Exception:  # it cannot say
        return type(error).__name__


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, default=str)


def _limits() -> dict[str, int | None]:
    """What bounds a process on the host: its own limits (None: unlimited) and those of its control group."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_DATA", "RLIMIT_AS")}
    found = {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in limits.items()}
    for name in ("memory.max", "memory.current"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        found[f"cgroup {name}"] = int(text) if text.isdigit() else None
    return found
