"""The schema of ``run.json``: everything one execution of one lab leaves behind."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvlab.errors import KvlabError

SCHEMA_VERSION = 1

Kind = Literal["predicted", "exact", "measured", "timing"]
"""How far to trust a number to come back: ``predicted`` was computed before the run, ``exact`` must be the same
in every run on such a device, ``measured`` may move within what the lab states, ``timing`` is a report only."""

Value = bool | int | float | str | list[int | float | str] | None
VerdictName = Literal["holds", "holds in part", "does not hold", "not run on this device", "not run yet"]


class LabError(KvlabError):
    """A lab was used in a way that would make its evidence worthless."""


class Metric(BaseModel):
    """One recorded number (or name, or truth value) with its unit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    value: Value
    unit: str
    kind: Kind
    against: str | None = None
    """Name of the prediction this value is to be held against."""


class Figure(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    alt: str


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    claim: str
    verdict: VerdictName
    because: str


class Device(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    kind: Literal["cpu", "cuda"]
    name: str


class Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    commit: str | None
    dirty: bool | None
    lab_sha256: str | None
    src_sha256: str
    environment_sha256: str


class Run(BaseModel):
    """One execution of one lab. ``finished_at`` is null until the lab closed itself."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = SCHEMA_VERSION
    lab: str
    profile: Literal["quick", "full"]
    parameters: dict[str, Any]
    started_at: datetime
    finished_at: datetime | None = None
    duration_s: float | None = None
    device: Device
    software: dict[str, str]
    source: Source
    metrics: dict[str, Metric] = Field(default_factory=dict)
    figures: dict[str, Figure] = Field(default_factory=dict)
    verdicts: list[Verdict] = Field(default_factory=list)

    @classmethod
    def read(cls, path: Path | str) -> Run:
        """The run in ``path``; LabError in one line if it is absent or not a run of this schema."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except FileNotFoundError:
            raise LabError(f"no run at {path}: run the lab first (kvlab labs)") from None
        except ValueError as error:
            first = str(error).splitlines()[0]
            raise LabError(f"{path} is not a run.json of schema {SCHEMA_VERSION}: {first}") from None

    def write(self, path: Path) -> None:
        """Write atomically: a reader never sees half a run."""
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def values(self) -> dict[str, Value]:
        return {name: metric.value for name, metric in self.metrics.items()}
