"""Where a lab runs, cuda or cpu, and how many bytes a named GPU leaves to a model."""

import re
from pathlib import Path

import torch

from kvlab.errors import KvlabError

_UNITS = {"": 1, "B": 1}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)


class UnknownDevice(KvlabError, ValueError):
    """The device does not exist here, or names none."""


class InvalidSize(KvlabError, ValueError):
    """The text or number is not a positive number of bytes."""


def resolve_device(device: str | torch.device) -> torch.device:
    """The device a lab runs on: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for CUDA where there is one.

    ``cuda`` comes back with its index. Raises UnknownDevice.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise UnknownDevice(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UnknownDevice(f"device {name} asked for, but PyTorch sees no CUDA here; use --device cpu or auto")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise UnknownDevice(f"device {name} asked for, but there are only {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", index)


def parse_bytes(size: str | int) -> int:
    """Bytes from ``"24GiB"``, ``"24 GB"``, ``"512MiB"`` or a number: round(number x unit), GiB = 2**30.

    Raises InvalidSize for anything that is not a positive number of bytes.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number, unit = str(size), ""
    else:
        match = _SIZE.fullmatch(str(size))
        number, unit = match.groups() if match else ("", "?")
    factor = {name.lower(): value for name, value in _UNITS.items()}.get(unit.lower())
    size_bytes = round(float(number) * factor) if factor and number.lstrip("-") else 0
    if size_bytes <= 0:
        raise InvalidSize(f"{size!r} is not a size; write a positive number with a unit, such as 24GiB or 512MiB")
    return size_bytes


def process_memory(device: str | torch.device) -> dict[str, int]:
    """Bytes this process holds now.

    cpu: ``data_bytes`` (VmData: private writable mappings, what RLIMIT_DATA counts), ``rss_anon_bytes`` (RssAnon) and
    ``rss_bytes`` (VmRSS), from /proc/self/status; see proc(5). cuda: ``allocated_bytes`` and ``reserved_bytes`` of
    PyTorch's caching allocator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    status = Path("/proc/self/status").read_text()
    fields = {"data_bytes": "VmData", "rss_anon_bytes": "RssAnon", "rss_bytes": "VmRSS"}
    return {name: 1024 * int(re.search(rf"^{key}:\s+(\d+) kB$", status, re.M)[1]) for name, key in fields.items()}
