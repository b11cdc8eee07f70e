"""The allocator's settings, as ``PYTORCH_CUDA_ALLOC_CONF`` writes them and as a snapshot records them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvlab.errors import KvlabError
from kvlab.memory.allocator.sizes import LARGE_SEGMENT_BYTES, MIB, OWN_SEGMENT_BYTES

TieBreak = Literal["address", "block_age", "segment_age"]
"""Which of two equally large free blocks is taken: the lower address (torch 2.0 to 2.11), the block split
off first (2.12), or the one in the older segment, then the lower address (2.13 and newer). Read from the
comparators in ``libc10_cuda.so`` of the three releases; pull requests 178362 and 183591 of PyTorch made the
changes."""

_MAX_DIGITS = 18
_DIVISION_INTERVALS = 16
_FIRST_INTERVAL_LOG2 = 20
_HIGHEST_KEY_MB = 1 << (_DIVISION_INTERVALS - 1)
_SETTING = re.compile(r"\s*([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*(?:,|$)")


class SettingError(KvlabError, ValueError):
    """A setting that PyTorch would refuse, or that this model does not know."""


@dataclass(frozen=True)
class AllocatorSettings:
    """One configuration of the caching allocator; the defaults are PyTorch's.

    Sizes are bytes. ``max_split_size_bytes`` and ``max_non_split_rounding_bytes`` follow
    ``AllocatorConfig.h``; ``roundup_power2_divisions`` holds one number for each power of two from 1 MiB to
    32 GiB and beyond.
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * _DIVISION_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float = 1.0
    tie_break: TieBreak = "segment_age"

    def divisions(self, requested_bytes: int) -> int:
        """The number of divisions that applies to a request of ``requested_bytes``."""
        interval = requested_bytes.bit_length() - 1 - _FIRST_INTERVAL_LOG2
        return self.roundup_power2_divisions[min(max(interval, 0), _DIVISION_INTERVALS - 1)]

    @classmethod
    def parse(cls, text: str, *, tie_break: TieBreak = "segment_age") -> "AllocatorSettings":
        """Read a ``PYTORCH_CUDA_ALLOC_CONF`` string; settings that do not move device memory are passed over.

        Raises SettingError where PyTorch raises.
        """
        values: dict[str, Any] = {}
        rest = text.strip()
        while rest:
            match = _SETTING.match(rest)
            if match is None:
                raise SettingError(f"cannot read the allocator setting at {rest[:60]!r}; write name:value,name:value")
            name, value = match.group(1), match.group(2).strip()
            if name in _READERS:
                field, read = _READERS[name]
                values[field] = read(name, value)
            else:
                _pass_over(name, value)
            rest = rest[match.end() :].strip()
        return cls(**values, tie_break=tie_break)

    @classmethod
    def from_snapshot(
        cls, recorded: Mapping[str, Any] | None, *, tie_break: TieBreak = "segment_age"
    ) -> "AllocatorSettings":
        """The settings that a snapshot's ``allocator_settings`` records; the default for what it does not.

        A snapshot may come from anyone: a value of the wrong kind counts as not recorded.
        """
        recorded = recorded or {}
        text = recorded.get("PYTORCH_CUDA_ALLOC_CONF")
        try:
            base = cls.parse(text if isinstance(text, str) else "", tie_break=tie_break)
        except SettingError:
            base = cls(tie_break=tie_break)
        by_power = recorded.get("roundup_power2_divisions")
        steps = by_power if isinstance(by_power, Mapping) else {}
        threshold = recorded.get("garbage_collection_threshold")
        return replace(
            base,
            max_split_size_bytes=_whole(recorded.get("max_split_size"), None),
            roundup_power2_divisions=tuple(_whole(steps.get(str(1 << i)), 0) for i in range(_DIVISION_INTERVALS)),
            garbage_collection_threshold=threshold if type(threshold) is float and 0 < threshold < 1 else 0.0,
            expandable_segments=recorded.get("expandable_segments") is True,
        )

    def as_snapshot(self) -> dict[str, Any]:
        """The ``allocator_settings`` entry of a snapshot."""
        split = self.max_split_size_bytes
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self._conf(),
            "max_split_size": -1 if split is None else split,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
            "roundup_power2_divisions": {str(1 << i): steps for i, steps in enumerate(self.roundup_power2_divisions)},
        }

    def _conf(self) -> str:
        """The settings the other entries of a snapshot leave out, so that reading it back loses nothing."""
        parts = []
        if self.large_segment_bytes != LARGE_SEGMENT_BYTES:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        if self.max_non_split_rounding_bytes != LARGE_SEGMENT_BYTES:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_bytes // MIB}")
        return ",".join(parts)


def _whole(value: Any, default: int | None) -> Any:
    if type(value) is str and len(value) <= _MAX_DIGITS and value.isascii() and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value >= 0 else default


def _read_bool(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise SettingError(f"{name} is True or False, not {value!r}")
    return value == "True"


def _read_number(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > _MAX_DIGITS:
        raise SettingError(f"{name} is a whole number, not {value[:40]!r}")
    return int(value)


def _read_large_mb(name: str, value: str) -> int:
    """Megabytes, at least the 20 MiB of a large segment."""
    number = _read_number(name, value)
    if number * MIB < LARGE_SEGMENT_BYTES:
        raise SettingError(f"{name} is {number}, too small: it must be at least {LARGE_SEGMENT_BYTES // MIB}")
    return number * MIB


def _read_segment_mb(name: str, value: str) -> int:
    """Megabytes, more than the 10 MiB from which a request has a segment of its own."""
    number = _read_number(name, value)
    if number * MIB <= OWN_SEGMENT_BYTES:
        raise SettingError(f"{name} is {number}, too small: it must be above {OWN_SEGMENT_BYTES // MIB}")
    return number * MIB


def _read_fraction(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise SettingError(f"{name} lies between 0 and 1; it is {value!r}")
    return number


def _read_threshold(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < 1.0:
        raise SettingError(f"{name} lies between 0 and 1, both excluded; it is {value!r}")
    return number


def _read_divisions(name: str, value: str) -> tuple[int, ...]:
    """``8`` for all sizes, or ``[256:1,512:2,>:8]`` with sizes in MB (``parseRoundUpPower2Divisions``)."""
    if not value.startswith("["):
        return (_power_of_two(name, value),) * _DIVISION_INTERVALS
    table, last, first = [0] * _DIVISION_INTERVALS, 0, True
    for pair in value[1:-1].split(","):
        key, _, steps_text = (part.strip() for part in pair.partition(":"))
        steps = 0 if steps_text == "0" else _power_of_two(name, steps_text)
        if key == ">":
            table[last + 1 :] = [steps] * (_DIVISION_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(name, key), _HIGHEST_KEY_MB).bit_length() - 1
        if first:
            table[:last] = [steps] * last
            first = False
        table[last] = steps
    return tuple(table)


def _power_of_two(name: str, value: str) -> int:
    number = _read_number(name, value)
    if number < 1 or number & (number - 1):
        raise SettingError(f"{name} takes powers of two, not {number}")
    return number


def _pass_over(name: str, value: str) -> None:
    """Accept a setting that moves no device memory; refuse what PyTorch or this model does not know."""
    if (name, value) in _NOT_MODELLED or (name in _NOT_MODELLED_NAMES and value != "False"):
        raise SettingError(f"{name}:{value} is another allocator than the one modelled here")
    if name not in _WITHOUT_EFFECT and not name.startswith(("pinned_", "graph_capture_")):
        raise SettingError(f"unknown allocator setting {name!r}")


_READERS = {
    "max_split_size_mb": ("max_split_size_bytes", _read_large_mb),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_large_mb),
    "large_segment_size_mb": ("large_segment_bytes", _read_segment_mb),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "expandable_segments": ("expandable_segments", _read_bool),
    "per_process_memory_fraction": ("memory_fraction", _read_fraction),
}
_NOT_MODELLED = {("backend", "cudaMallocAsync")}
_NOT_MODELLED_NAMES = {"throw_on_cudamalloc_oom"}
_WITHOUT_EFFECT = _NOT_MODELLED_NAMES | {
    "backend",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "expandable_segments_handle_type",
}
