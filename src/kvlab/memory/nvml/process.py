"""What a process holds, for machines without a GPU: one small read of /proc/PID/status a sample."""

import os
import re

from kvlab.memory.nvml.readings import ProcessReading, ProcessUnreadable

_FIELD = re.compile(rb"^(VmHWM|VmRSS|VmData):\s+(\d+) kB", re.M)


class ProcessSource:
    """Reads one process, this one by default.

    The file stays open, so that a later process of the same number is not mistaken for it. Raises
    ProcessUnreadable here for a process that cannot be read, and from ``read`` when it has ended.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        try:
            self._status = os.open(f"/proc/{self.pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            reason = "no such process" if os.path.exists("/proc/self/status") else "this system has no /proc (Linux)"
            raise ProcessUnreadable(f"process {self.pid} cannot be sampled: {reason}") from None
        except OSError as error:
            raise ProcessUnreadable(f"process {self.pid} cannot be sampled: {error.strerror}") from None
        try:
            self.read()
        except ProcessUnreadable:
            self.close()
            raise

    def read(self) -> ProcessReading:
        try:
            status = b""
            while part := os.pread(self._status, 4096, len(status)):  # a user may be in hundreds of groups
                status += part
        except ProcessLookupError:
            raise ProcessUnreadable(f"process {self.pid} has ended") from None
        kib = {name: 1024 * int(value) for name, value in _FIELD.findall(status)}
        if b"VmRSS" not in kib:  # a zombie, or a thread of the kernel
            raise ProcessUnreadable(f"process {self.pid} has ended or has no memory of its own")
        return ProcessReading(self.pid, kib[b"VmRSS"], kib.get(b"VmHWM"), kib.get(b"VmData", 0))

    def close(self) -> None:
        os.close(self._status)


def reset_peak() -> bool:
    """Let VmHWM of this process begin anew at what is resident now (proc(5), clear_refs); False where it may not."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return True
