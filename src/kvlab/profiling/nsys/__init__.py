"""Nsight Systems around a program: run it, export what it recorded, and read the export of anyone's run."""

from kvlab.profiling.nsys.export import Export, ExportError
from kvlab.profiling.nsys.program import Nsys, NsysError, Profile, run_profiled
from kvlab.profiling.nsys.summary import ApiCall, FailedCall, NsysSummary, NvtxRange, Operation, summarise_export

__all__ = [
    "ApiCall",
    "Export",
    "ExportError",
    "FailedCall",
    "Nsys",
    "NsysError",
    "NsysSummary",
    "NvtxRange",
    "Operation",
    "Profile",
    "run_profiled",
    "summarise_export",
]
