"""Loggers, containers, terminals and web pages around a message: it reads the same in all of them."""

import html
import itertools
import json
import textwrap

import pytest

from kvlab.memory.oom import diagnose, diagnose_file

TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU {} has a total capacity of 23.50 GiB of "
    "which 1.25 GiB is free. Including non-PyTorch memory, this process has 22.25 GiB memory in use. Of the allocated "
    "memory 21.00 GiB is allocated by PyTorch, and 768.00 MiB is reserved by PyTorch but unallocated."
)
MESSAGES = [
    TORCH.format("2.50", 0),
    "ValueError: To serve at least one request with the models's max seq len (40960), (4.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.25 GiB). Try increasing `gpu_memory_utilization` or "
    "decreasing `max_model_len` when initializing the engine.",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5120.00 MiB on device 0: cudaMalloc failed: out of memory\n"
    "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 5368709120",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 68719476736 bytes.",
    'Traceback (most recent call last):\n  File "serve.py", line 3, in <module>\n    main()\nMemoryError',
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1236: indexSelectSmallIndex: block: [6,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.",
    "kernel: Out of memory: Killed process 77 (python) total-vm:9000kB, anon-rss:8000kB",
]


def wrapped(text, width=80):
    return "\n".join("\n".join(textwrap.wrap(line, width, break_long_words=False)) for line in text.split("\n"))


def behind(prefix):
    return lambda text: "\n".join(prefix + line for line in wrapped(text).split("\n"))


def docker(text):
    entries = ({"log": line + "\n", "stream": "stderr", "time": "2026-03-04T05:06:07.123456789Z"} for line in text)
    return "\n".join(map(json.dumps, entries))


CLOTHES = {
    "docker": lambda text: docker(wrapped(text).split("\n")),
    "json-logger": lambda text: json.dumps({"timestamp": "2026-03-04T05:06:07Z", "level": "ERROR", "message": text}),
    "json-colours": lambda text: json.dumps({"level": "error", "msg": f"\x1b[31m{text}\x1b[0m", "ts": 1.5}),
    "ray": behind("(RayWorkerWrapper pid=4242, ip=10.0.0.7) ERROR 08-10 14:32:07 [worker_base.py:620] "),
    "worker": behind("(VllmWorker TP1 pid=4242) "),
    "syslog-iso": behind("2026-03-04T05:06:07.123456+00:00 node-07 serve[3344]: "),
    "syslog-colour": lambda text: "\n".join(f"#033[31m{line}#033[0m" for line in wrapped(text).split("\n")),
    "loguru": behind("2026-03-04 05:06:07.789 | ERROR    | app.serve:generate:42 - "),
    "python-logging": behind("2026-03-04 05:06:07,789 - app.main - ERROR - "),
    "sglang": behind("[2026-03-04 05:06:07 DP0 TP3] "),
    "torchrun": behind("[rank3]:[E304 05:06:07.123456789 ProcessGroupNCCL.cpp:616] "),
    "klog": behind("E0304 05:06:07.123456   12345 server.go:99] "),
    "kubectl": behind("[pod/serve-0/server] "),
    "pipeline": behind("##[error]"),
    "srun": behind("3: "),
    "pytest": behind("E       "),
    "quotation": behind("> > "),
    "html": html.escape,
    "html-lines": lambda text: f"<p>{html.escape(wrapped(text))}</p>".replace("\n", "<br>\n"),
    "html-spaces": lambda text: f"<pre>{html.escape(text)}</pre>".replace(" ", "&nbsp;"),
    "cut-at-80": lambda text: "\n".join(
        line[at : at + 80] for line in text.split("\n") for at in range(0, len(line), 80)
    ),
}


def judged(reading):
    """All that a reading says, without where it says it."""
    return [event.model_dump(exclude={"line", "line_number", "advice"}) for event in reading.events]


@pytest.mark.parametrize("clothes", CLOTHES)
def test_a_message_reads_the_same_whatever_wrote_it_down(clothes):
    for text in MESSAGES:
        assert judged(diagnose(CLOTHES[clothes](text))) == judged(diagnose(text)) != [], text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_a_file_without_the_mark_of_its_encoding_is_read(tmp_path, encoding):
    path = tmp_path / "serve.log"
    for text in MESSAGES:
        path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
        assert judged(diagnose_file(path)) == judged(diagnose(text))


@pytest.mark.parametrize("writer", ["[rank{}]: ", "(Worker_TP{} pid=7{}) ERROR ", "vllm-{}  | ", "[1,{}]<stderr>:"])
def test_messages_of_several_ranks_interleaved_line_by_line_are_told_apart(writer):
    texts = [TORCH.format(tried, rank) for rank, tried in enumerate(("2.50", "3.50", "4.50"))]
    by_rank = [
        [writer.replace("{}", str(rank)) + line for line in wrapped(text).split("\n")]
        for rank, text in enumerate(texts)
    ]
    reading = diagnose("\n".join(itertools.chain.from_iterable(zip(*by_rank, strict=True))))
    assert judged(reading) == [judged(diagnose(text))[0] for text in texts]
    assert [event.line_number for event in reading.events] == [1, 2, 3]


def test_json_that_is_no_log_is_read_as_it_stands():
    text = '{"terminated": {"reason": "OOMKilled"}, "message": "x"}'
    assert diagnose(text).cause == "host_memory"
    assert diagnose('{"message": "cut off: CUDA error: out of memory').family == "cuda_runtime"


def test_a_server_named_beside_a_json_message_is_not_forgotten():
    record = {
        "timestamp": "x",
        "level": "ERROR",
        "message": TORCH.format("1.50", 0),
        "target": "text_generation_client",
    }
    assert diagnose(json.dumps(record)).cause == "static_pool"


def test_failures_interleaved_across_two_blocks_are_each_found_once():
    lines = [f"[rank{index % 2}]: step {index} memory {index % 7} GiB" for index in range(12_000)]
    for place in range(11_000, 0, -500):
        lines[place:place] = [f"[rank{place // 500 % 2}]: {TORCH.format('2.50', 0)}"]
    reading = diagnose("\n".join(lines))
    assert len(reading.events) == 22
    assert len({event.line_number for event in reading.events}) == 22
