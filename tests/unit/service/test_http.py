"""The HTTP front against a real server: OpenAI's client, good and bad input, and clients that go or dawdle."""

import asyncio
import contextlib
import functools
import json
import select
import socket
import time

import httpx
import openai
import pytest
from server_sockets import ESTABLISHED, server_end
from waiting import frozen, until

from kvlab.cache import CachePolicy
from kvlab.service.launch import running
from kvlab.service.load import ask as streamed
from kvlab.service.load import client_of, short_then_long
from kvlab.service.monitoring.clients import Stream

TENANTS = """
anonymous: {kv_share: 0.7, queue: 40}
small: {kv_tokens: 120, queue: 1}
keyed: {kv_tokens: 120, key: sk-keyed-secret}
"""
PROMPT_SECRET = "the-prompt-is-a-secret"
LONGEST_TOKENS = 200_000
ENDLESS = LONGEST_TOKENS - 1_000  # tokens: no such stream ends by itself before something is done to it

get, post = (functools.partial(call, timeout=120) for call in (httpx.get, httpx.post))


@pytest.fixture(scope="module")
def service(tiny_model, tmp_path_factory):
    tenants = tmp_path_factory.mktemp("service") / "tenants.yml"
    tenants.write_text(TENANTS)
    options = ["--model", str(tiny_model), "--budget", "24MiB", "--max-total-tokens", "128", "--tenants", str(tenants)]
    limits = ["--send-timeout-s", "5", "--max-connections", "60", "--max-request-tokens", str(LONGEST_TOKENS)]
    with running(*options, *limits) as service:
        yield service


DAWDLERS = {
    "no header": b"",
    "half a header": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
}


@pytest.fixture(scope="module", autouse=True)
def dawdlers(service):
    """Clients that begin and do not go on. They are there from the start: their ten seconds pass during other tests."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(begun(service, data)) for name, data in DAWDLERS.items()}


@pytest.fixture
def client(service):
    tenant = {"X-Tenant": "anonymous"}  # the client insists on a key
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0, default_headers=tenant)


@pytest.fixture
def ask(service, tiny_model):
    def ask(headers=None, **fields):
        body = {"model": str(tiny_model), "prompt": "abc", "max_tokens": 3, **fields}
        return post(f"{service.url}/v1/completions", json=body, headers=headers)

    return ask


def counted(before: dict[str, float], after: dict[str, float], outcome: str, tenant: str) -> float:
    name = f"inference_requests_total{{outcome={outcome},tenant={tenant}}}"
    return after[name] - before[name]


def settled(service) -> dict[str, float]:
    """The metrics once nothing is in flight or waits."""

    def metrics_if_idle() -> dict[str, float] | None:
        metrics = service.metrics()
        return None if metrics["inference_requests_in_flight"] or metrics["inference_queue_length"] else metrics

    return until(metrics_if_idle)


def test_openais_client_lists_the_model_and_completes(client, tiny_model):
    assert [model.id for model in client.models.list()] == [str(tiny_model)]
    done = client.completions.create(model=str(tiny_model), prompt="abc", max_tokens=7, temperature=0, user="u-1")
    assert done.object == "text_completion"
    assert done.choices[0].finish_reason in ("length", "stop")
    assert done.usage.prompt_tokens == 3
    assert done.usage.total_tokens == 3 + done.usage.completion_tokens


def test_openais_client_streams_the_same_text(client, tiny_model):
    asked = {"model": str(tiny_model), "prompt": "abc", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in streamed if part.choices) == whole.choices[0].text
    assert streamed[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed[-1].usage == whole.usage


def test_the_text_is_what_generate_gives(client, tiny_model):
    import torch
    from transformers import AutoTokenizer

    from kvlab.model import load_model

    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), load_model(tiny_model)
    ids = tokenizer("The same text", return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=[], pad_token_id=0)[
            0, ids.shape[1] :
        ]
    done = client.completions.create(
        model=str(tiny_model), prompt="The same text", max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_seed_makes_sampling_reproducible(ask):
    texts = [ask(temperature=1.5, max_tokens=20, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [1e-7, 1e-45, 5e-324])
def test_a_temperature_next_to_zero_is_zero_and_costs_nobody_the_engine(ask, temperature):
    greedy, sampled = (ask(temperature=t, max_tokens=20, ignore_eos=True) for t in (0, temperature))
    assert sampled.status_code == 200, sampled.text
    assert sampled.json()["choices"] == greedy.json()["choices"]


def test_token_ids_are_a_prompt_too(ask):
    assert ask(prompt=[65, 66, 67]).json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", [["ABC"], [[65, 66, 67]]])
def test_a_list_of_one_prompt_is_that_prompt(ask, prompt):
    assert ask(prompt=prompt).json()["usage"]["prompt_tokens"] == 3


def test_fields_that_ask_for_nothing_are_taken(ask):
    neutral = {"top_p": 1.0, "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "echo": False}
    answer = ask(**neutral, logprobs=None, stop=None, user="ada")
    assert answer.status_code == 200, answer.text


def test_a_stop_string_ends_the_text_and_frees_the_request(service, ask):
    whole = ask(temperature=0, max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    stop = whole[10:13]
    done = ask(temperature=0, max_tokens=4_000 - 3, ignore_eos=True, stop=[stop]).json()["choices"][0]
    assert done["text"] == whole[: whole.index(stop)]
    assert done["finish_reason"] == "stop"
    assert settled(service)["kv_cache_current_tokens"] == 0


def test_the_policy_in_force_is_published(service):
    policy = get(f"{service.url}/v1/cache/policy").json()
    assert policy["policy"] == "sliding"
    assert CachePolicy.model_validate(policy["cache"]) == CachePolicy(max_total_tokens=128, sinks=4)
    assert policy["bytes_per_token"] == 8192
    assert policy["capacity_tokens"] == service.metrics()["kv_cache_capacity_tokens"] > 0


BAD_FIELDS = [
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "a\0b"}, "prompt"),
    ({"prompt": [70_000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "x" * (LONGEST_TOKENS + 1)}, "prompt"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"stream": "yes"}, "stream"),
    ({"top_p": 0.9}, "top_p"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt": ["a", "b"]}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_a_400_that_names_it(service, ask, fields, param):
    before = service.metrics()
    answer = ask(**fields)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param
    assert counted(before, service.metrics(), "invalid", "anonymous") == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "m", "prompt": "\\ud800"}', b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_json_object_is_a_400(service, body):
    answer = post(f"{service.url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_is_a_413_whether_declared_or_not(service):
    def endless():
        for _ in range(64):
            yield b"x" * 65_536

    for content in (b"x" * 2**22, endless()):
        with socket_safe():
            answer = post(f"{service.url}/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


def socket_safe():
    """A server that answers and closes while the client still sends may reset the connection first."""
    return contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError)


def test_an_unknown_model_and_an_unknown_address_are_404(service, ask):
    assert ask(model="gpt-9").json()["error"]["code"] == "model_not_found"
    assert ask(model="gpt-9").status_code == 404
    answer = get(f"{service.url}/v1/nothing")
    assert (answer.status_code, set(answer.json())) == (404, {"error"})
    assert get(f"{service.url}/v1/completions").status_code == 405


def test_an_unknown_tenant_is_a_401_counted_as_unknown(service, ask):
    before = service.metrics()
    answers = [ask({"X-Tenant": "nobody"}), ask({"X-Tenant": "keyed"}), ask({"Authorization": "Bearer sk-keyed-guess"})]
    assert [answer.status_code for answer in answers] == [401] * 3
    assert counted(before, service.metrics(), "invalid", "unknown") == 3
    assert ask({"Authorization": "Bearer sk-keyed-secret"}).status_code == 200


def test_what_can_never_fit_is_a_400_with_the_numbers(service, ask):
    before = service.metrics()
    answer = ask({"X-Tenant": "small"}, prompt="x" * 100, max_tokens=100)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "never_fits"
    assert "100 prompt tokens and up to 100 generated ones" in error["message"]
    assert "can have 120 (983040 bytes)" in error["message"]
    assert counted(before, service.metrics(), "never_fits", "small") == 1


def test_a_full_queue_is_a_429_that_says_when_to_return(service, tiny_model):
    async def three():
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 80, "ignore_eos": True}
            ask = functools.partial(client.post, "/v1/completions", json=body, headers={"X-Tenant": "small"})
            with frozen(service.engine_pid):  # the first is not over before the last has come
                tasks = [asyncio.create_task(ask()) for _ in range(3)]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return await asyncio.gather(*tasks)

    answers = sorted(asyncio.run(three()), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1
    assert answers[2].json()["error"]["code"] == "queue_full"


def test_one_tenants_flood_does_not_keep_another_waiting(service, tiny_model):
    async def flood():
        async with (
            client_of(service.url, "anonymous") as many,
            httpx.AsyncClient(base_url=service.url, timeout=120) as client,
        ):
            fields = {"model": str(tiny_model), "prompt": "x", "max_tokens": ENDLESS}
            tasks = [asyncio.create_task(streamed(many, "flood", **fields)) for _ in range(40)]
            while service.metrics()["inference_queue_length"] < 5:
                await asyncio.sleep(0.01)
            body = {"model": str(tiny_model), "prompt": "x", "max_tokens": 3}
            other = await client.post("/v1/completions", json=body, headers={"X-Tenant": "small"})
            waiting = service.metrics()["inference_queue_length"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return other, waiting

    other, waiting = asyncio.run(flood())
    assert other.status_code == 200
    assert waiting >= 5
    assert settled(service)["kv_cache_reserved_tokens{tenant=anonymous}"] == 0


def test_a_client_that_goes_is_cancelled_and_its_memory_freed(service, tiny_model):
    async def leave():
        async with (
            client_of(service.url, "anonymous") as other,
            httpx.AsyncClient(base_url=service.url, timeout=120) as client,
        ):
            fields = {"model": str(tiny_model), "prompt": "x", "max_tokens": ENDLESS}
            stream = asyncio.create_task(streamed(other, "stream", **fields))
            whole = asyncio.create_task(client.post("/v1/completions", json=fields | {"ignore_eos": True}))
            busy = await asyncio.to_thread(until, busy_metrics)
            stream.cancel()
            whole.cancel()
            await asyncio.gather(stream, whole, return_exceptions=True)
            return busy

    def busy_metrics() -> dict[str, float] | None:
        metrics = service.metrics()
        return metrics if metrics["inference_requests_in_flight"] == 2 and metrics["kv_cache_current_tokens"] else None

    before = service.metrics()
    busy = asyncio.run(leave())
    assert busy["kv_cache_reserved_tokens{tenant=anonymous}"] > 0
    after = settled(service)
    assert counted(before, after, "cancelled", "anonymous") == 2
    assert after["kv_cache_current_tokens"] == after["kv_cache_reserved_tokens{tenant=anonymous}"] == 0
    assert after["gpu_memory_used_bytes"] < 2**20


def test_a_long_prompt_among_short_ones_loses_nobody(service, tiny_model):
    load = {"short": ["short"] * 4, "long": "x" * 1_500, "short_tokens": 300}
    views = asyncio.run(short_then_long(service.url, str(tiny_model), tenants=["anonymous"] * 5, **load))
    assert [view.outcome for view in views] == ["completed"] * 5


def begun(service, data: bytes) -> socket.socket:
    """A connection on which so much was sent."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.sendall(data)
    return connection


def whole_answer(connection: socket.socket) -> bytes:
    """All that comes, until the server closes."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return received


@pytest.mark.parametrize("name", ["no header", "half a header"])
def test_headers_that_do_not_come_are_a_408(dawdlers, name):
    answer = whole_answer(dawdlers[name])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_slow"


def test_a_body_that_does_not_come_is_a_408(dawdlers):
    answer = whole_answer(dawdlers["half a body"])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"


def rest(connection: socket.socket) -> bytes:
    """What still comes, until the connection ends or nothing more comes."""
    received = b""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while part := connection.recv(65_536):
            received += part
    return received


def test_a_client_that_does_not_read_loses_its_connection_and_one_that_reads_slowly_does_not(service):
    """Answers of some twenty megabytes, far more than the kernel takes: the server has to wait for the reader."""
    host, port = service.url.removeprefix("http://").split(":")
    answers = 3_000
    with socket.socket() as deaf, socket.socket() as slow:
        for connection in (deaf, slow):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect((host, int(port)))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * answers)
            assert connection.recv(1)
        give_up_s = time.monotonic() + 120
        while server_end(deaf)[0] == ESTABLISHED and time.monotonic() < give_up_s:
            assert slow.recv(65_536)
            time.sleep(0.01)
        assert slow.recv(65_536)
        assert server_end(slow)[0] == ESTABLISHED
        assert rest(deaf).count(b"HTTP/1.1 200 ") < answers


def test_what_is_no_http_is_a_400_in_json(service):
    with begun(service, b"\x16\x03\x01 hello\r\n\r\n") as connection:
        answer = whole_answer(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_connections_beyond_the_limit_are_refused_and_the_others_are_served(service, ask):
    host, port = service.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(httpx.Client(base_url=service.url, timeout=120))
        first.get("/healthz")
        idle = [stack.enter_context(socket.create_connection((host, int(port)), timeout=120)) for _ in range(300)]
        refused: set[socket.socket] = set()

        def enough_refused() -> bool:
            told, _, _ = select.select([connection for connection in idle if connection not in refused], [], [], 1)
            refused.update(connection for connection in told if b"429" in connection.recv(100))
            return len(refused) >= 240

        until(enough_refused)
        assert first.get("/healthz").status_code == 200
    until(lambda: ask().status_code == 200)


def test_neither_keys_nor_prompts_are_logged(service, ask):
    ask({"Authorization": "Bearer sk-keyed-secret"}, prompt=PROMPT_SECRET)
    ask({"Authorization": "Bearer sk-wrong-secret"}, prompt=PROMPT_SECRET)
    ask(prompt=PROMPT_SECRET, max_tokens="wrong")
    log = service.log()
    assert "tenant keyed" in log
    assert "secret" not in log


def test_every_series_is_there_with_a_text_that_explains_it(service):
    text = get(f"{service.url}/metrics").text
    for name in (
        *("gpu_memory_used_bytes", "gpu_memory_total_bytes", "kv_cache_current_tokens", "kv_cache_capacity_tokens"),
        *("inference_requests_in_flight", "inference_queue_length", "engine_up", "kv_cache_evictions_total"),
        *("inference_requests_total", "inference_requests_oom_total", "engine_restarts_total"),
        *("time_to_first_token_seconds", "time_per_output_token_seconds"),
    ):
        assert any(line.startswith(f"# HELP {name} ") and len(line) > 60 for line in text.splitlines()), name
    assert 'inference_requests_total{outcome="engine_lost",tenant="keyed"} 0.0' in text
    assert "_created" not in text


def test_a_client_that_hangs_up_in_a_thread_is_cancelled_with_what_it_had_seen(service, tiny_model):
    before = service.metrics()
    client = Stream(service.url, str(tiny_model), [65] * 16, ENDLESS, "anonymous")
    assert client.begun.wait(120)
    assert client.outcome is None
    client.hang_up()
    client.join(120)
    assert client.outcome == "hung up"
    assert 0 < len(client.view.pieces_s) < ENDLESS
    assert counted(before, settled(service), "cancelled", "anonymous") == 1
    assert service.metrics()["kv_cache_reserved_tokens{tenant=anonymous}"] == 0
