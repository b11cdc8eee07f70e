"""Ask PyTorch's own CUDA caching allocator, without a GPU, and compare the model with its answers.

``libc10_cuda.so`` of a CUDA build of PyTorch is the real allocator; only the CUDA runtime below it is
replaced by ``fake_cudart.c``. Needed, none of it kept here: g++; a CUDA wheel of PyTorch, unpacked
(``torch/lib/libc10*.so``, ``torch/include``, ``torch/version.py``); the headers of the packages
nvidia-cuda-runtime and nvidia-cuda-crt of CUDA 13.

    python oracle.py fuzz   --torch DIR/torch --cuda-include DIR --programs 1000 --length 1500
    python oracle.py record --torch DIR/torch --cuda-include DIR --programs 24 --length 300 --out OUT.json.gz

``--torch`` may be given several times; the release is read from its ``version.py``.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "unit" / "memory"))

from allocator_programs import Program, answers, random_program  # noqa: E402


class Oracle:
    """One release of PyTorch, compiled against the fake runtime into ``folder``."""

    def __init__(self, torch: Path, cuda_include: Path, folder: Path) -> None:
        version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
        assert version is not None
        self.version = version.group(1)
        self.release = self.version.partition("+")[0]
        self._binary = folder / f"driver-{self.release}"
        self._build(torch, cuda_include, folder)

    def _build(self, torch: Path, cuda_include: Path, folder: Path) -> None:
        runtime, symbols = folder / "libcudart.so.13", folder / "symbols.map"
        symbols.write_text("libcudart.so.13 { global: *; };\n")
        include = [f"-I{cuda_include}", f"-I{torch / 'include'}"]
        sources = [str(HERE / "fake_cudart.c"), str(HERE / "fake_cudart_rest.c")]
        link = [f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={symbols}"]
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *include, *sources, "-o", runtime, *link], check=True)
        libraries = [f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10", str(runtime)]
        rpath = f"-Wl,-rpath,{folder}:{torch / 'lib'}"
        command = ["g++", "-std=c++20", "-O1", "-w", *include, HERE / "driver.cpp", "-o", self._binary]
        subprocess.run([*command, *libraries, rpath], check=True)

    def answers(self, program: Program) -> list[str]:
        environment = os.environ | {
            "FAKE_TOTAL_BYTES": str(program.total_bytes),
            "FAKE_OTHER_BYTES": str(program.other_bytes),
            "PYTORCH_CUDA_ALLOC_CONF": program.settings,
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        }
        text = "\n".join(program.commands) + "\n"
        run = subprocess.run([self._binary], input=text, capture_output=True, text=True, env=environment, check=True)
        return run.stdout.splitlines()


def programs(oracles: list[Oracle], count: int, length: int, seed: int) -> Iterator[tuple[Oracle, Program]]:
    for number in range(count):
        oracle = oracles[number % len(oracles)]
        yield oracle, random_program(seed + number, length, oracle.release)


def fuzz(oracles: list[Oracle], count: int, length: int, seed: int) -> int:
    """Compare line by line; prints a summary and the first difference of each program that differs."""
    seen: Counter[str] = Counter()
    for oracle, program in programs(oracles, count, length, seed):
        expected, got = oracle.answers(program), answers(program)
        seen.update(line.split(maxsplit=1)[0] for line in expected)
        seen["commands"] += len(program.commands)
        if expected != got:
            seen["programs that differ"] += 1
            pairs = enumerate(zip(expected, got, strict=False))
            at, (theirs, ours) = next(((i, p) for i, p in pairs if p[0] != p[1]), (0, ("length", "length")))
            print(f"{oracle.release} {program.settings!r}, line {at}:\n  PyTorch {theirs}\n  model   {ours}")
    print(f"{count} programs, {seen['commands']:,} commands, {seen['trace']:,} actions, {seen['oom']:,} errors")
    print(f"{seen['programs that differ']} programs differ")
    return int(seen["programs that differ"] > 0)


def record(oracles: list[Oracle], count: int, length: int, seed: int, out: Path) -> None:
    """Keep programs with PyTorch's answers, for tests that have no CUDA build at hand."""
    kept = [
        {"torch_version": o.version, "program": asdict(p), "answers": o.answers(p)}
        for o, p in programs(oracles, count, length, seed)
    ]
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write(json.dumps(kept, separators=(",", ":")).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("fuzz", "record"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--torch", type=Path, action="append", required=True)
    parser.add_argument("--cuda-include", type=Path, required=True)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        oracles = [Oracle(t.resolve(), options.cuda_include, Path(folder)) for t in options.torch]
        size = (options.programs, options.length, options.seed)
        if options.action == "fuzz":
            return fuzz(oracles, *size)
        record(oracles, *size, options.out)
        return 0


if __name__ == "__main__":
    sys.exit(main())
