"""Where a lab runs, cuda or cpu, and how many bytes a named GPU leaves to a model."""

import os
import re
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvlab.errors import KvlabError

MIB = 2**20
GIB = 2**30

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


class UnknownDevice(KvlabError, ValueError):
    """The device does not exist here, or the text names none."""


class UnknownGpu(KvlabError, KeyError):
    """No GPU of this name is in the table."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would put the message in quotes


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
    if not re.fullmatch(r"cuda(:\d+)?", name, re.ASCII):
        raise UnknownDevice(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UnknownDevice(f"device {name} was asked for, but PyTorch sees no CUDA here; use cpu or auto")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UnknownDevice(f"device {name} was asked for, but this machine has {count} GPU(s), from cuda:0")
    return torch.device("cuda", index)


def parse_bytes(size: str | int) -> int:
    """Bytes from ``"24GiB"``, ``"24 GB"``, ``"512MiB"`` or a number: round(number x unit), GiB = 2**30.

    Raises InvalidSize for anything that is not a positive number of bytes.
    """
    match = _SIZE.fullmatch(str(size))
    unit_bytes = _UNITS.get(match[2].lower(), 0) if match else 0
    size_bytes = round(Fraction(match[1]) * unit_bytes) if unit_bytes else 0
    if size_bytes <= 0:
        raise InvalidSize(f"{size!r} is not a size; write a positive number and a unit, as in 24GiB or 512MiB")
    return size_bytes


def process_memory(device: str | torch.device) -> dict[str, int]:
    """Bytes this process holds now.

    cpu: ``data_bytes`` (VmData, private writable mappings: what RLIMIT_DATA counts), ``rss_anon_bytes``
    (RssAnon) and ``rss_bytes`` (VmRSS), as proc(5) has them. cuda: ``allocated_bytes`` and ``reserved_bytes``
    of PyTorch's caching allocator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    status = _read_status()
    fields = {"data_bytes": b"VmData", "rss_anon_bytes": b"RssAnon", "rss_bytes": b"VmRSS"}
    return {name: 1024 * int(re.search(rb"^%s:\s+(\d+) kB" % key, status, re.M)[1]) for name, key in fields.items()}


def _read_status() -> bytes:
    """/proc/self/status without a buffered file, whose buffers would show in what is measured."""
    descriptor = os.open("/proc/self/status", os.O_RDONLY)
    try:
        status = b""
        while part := os.read(descriptor, 4096):  # a user may be in hundreds of groups, which it lists first
            status += part
        return status
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Gpu:
    """A card by name, and what it leaves to PyTorch's allocator in one process that has it to itself.

    ``total_bytes`` is the total that nvidia-smi prints. The driver keeps ``driver_reserved_bytes`` of it: the
    difference to the total capacity that CUDA reports, which grows a little with driver versions.
    ``context_bytes`` is an estimate for kernels and the driver's bookkeeping, which no allocator sees.
    """

    key: str
    title: str
    total_bytes: int
    driver_reserved_bytes: int
    driver_reserved_source: str
    context_bytes: int
    context_source: str

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.driver_reserved_bytes - self.context_bytes

    def describe(self) -> str:
        """One sentence that says what is subtracted, and on what evidence."""
        usable, total = f"{self.usable_bytes / GIB:.2f} GiB", f"{self.total_bytes / GIB:.2f} GiB"
        driver, context = (f"{n / MIB:.0f} MiB" for n in (self.driver_reserved_bytes, self.context_bytes))
        return (
            f"{self.title}: {usable} usable, which is {total} less {driver} kept by the driver "
            f"({self.driver_reserved_source}) and {context} for the CUDA context ({self.context_source})"
        )


# Measured as 426 MiB on an RTX 6000 Ada with PyTorch 2.10.0+cu130; another figure is about 300 MB, since
# kernels load lazily (github.com/pytorch/pytorch/issues/107667). It grows with the kernels a process uses.
_CONTEXT_BYTES = 426 * MIB
_CONTEXT_SOURCE = "an estimate: 426 MiB on an RTX 6000 Ada, github.com/unslothai/unsloth-zoo/pull/1053"


def _gpu(key: str, title: str, nvidia_smi: str, cuda_capacity: str, source: str) -> Gpu:
    total_bytes = parse_bytes(nvidia_smi)
    return Gpu(
        key=key,
        title=title,
        total_bytes=total_bytes,
        driver_reserved_bytes=total_bytes - parse_bytes(cuda_capacity),
        driver_reserved_source=f"CUDA reports {cuda_capacity}: {source}",
        context_bytes=_CONTEXT_BYTES,
        context_source=_CONTEXT_SOURCE,
    )


# nvidia-smi's total, then the capacity that CUDA reports, as PyTorch printed it where the source says.
GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        _gpu(
            "rtx3090-24g",
            "NVIDIA GeForce RTX 3090",
            "24576 MiB",
            "23.56 GiB",
            "driver 580.126, github.com/noonghunna/club-3090/issues/58",
        ),
        _gpu(
            "rtx4090-24g",
            "NVIDIA GeForce RTX 4090",
            "24564 MiB",
            "23.52 GiB",
            "github.com/Soul-AILab/SoulX-FlashTalk/issues/5",
        ),
        _gpu("a10-24g", "NVIDIA A10", "23028 MiB", "21.99 GiB", "github.com/zai-org/CogVLM/issues/236"),
        _gpu("l4-24g", "NVIDIA L4", "23034 MiB", "22563 MiB", "a public training log, torch 2.11.0+cu128"),
        _gpu("t4-16g", "Tesla T4", "15360 MiB", "14.56 GiB", "github.com/Zheng-Chong/CatVTON/issues/133"),
        _gpu(
            "v100-16g",
            "Tesla V100 16 GB",
            "16384 MiB",
            "15.78 GiB",
            "github.com/kchengiva/Shift-GCN/issues/34",
        ),
        _gpu(
            "v100-32g",
            "Tesla V100 32 GB",
            "32768 MiB",
            "31.74 GiB",
            "github.com/QwenAudio/SenseVoice/issues/28",
        ),
        _gpu("a100-40g", "NVIDIA A100 40 GB", "40960 MiB", "39.50 GiB", "github.com/TianheWu/CoSeR/issues/10"),
        _gpu(
            "a100-80g",
            "NVIDIA A100 80 GB",
            "81920 MiB",
            "79.25 GiB",
            "github.com/HiDream-ai/VAREdit/issues/6",
        ),
        _gpu(
            "h100-80g",
            "NVIDIA H100 80 GB",
            "81559 MiB",
            "79.11 GiB",
            "github.com/vllm-project/vllm/issues/27508",
        ),
        _gpu(
            "h200-141g",
            "NVIDIA H200",
            "143771 MiB",
            "143156 MiB",
            "a public training log, torch 2.11.0+cu128",
        ),
    )
}


def named_gpu(key: str) -> Gpu:
    """The GPU of this name; raises UnknownGpu with the names there are."""
    if key not in GPUS:
        raise UnknownGpu(f"unknown GPU {key!r}; known are " + ", ".join(GPUS))
    return GPUS[key]
