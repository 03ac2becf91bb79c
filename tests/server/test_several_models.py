"""Several models behind one server: which one answers, which are in memory, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from asgi_client import Client
from demo import TEST_THREADS
from edgespec import LoadOptions, Sampling
from edgespec.loading.requirements import resolve_pair
from edgespec.server import web
from edgespec.server.facts import show
from edgespec.server.service import Known
from serving import serving
from several import DRAFT, FIELDS, GGUF, ONNX, PATHS, Host, MakeHost, alone
from tiny_bert import write_bert
from tiny_gguf import SPECIALS, Shape, write_model
from waiting import reached, until


@pytest.fixture
def host(hosts: MakeHost) -> Host:
    return hosts()


def endless(host: Host, name: str, **fields: Any) -> Client:
    """A client of `name`, which is loaded, whose answer goes on until it leaves or the context is full."""
    vocabulary = host[name].service.require().model.target.vocabulary
    bias = {str(token_id): -100 for token_id in vocabulary.end_ids}
    return Client(host.app, model=name, stream=True, logit_bias=bias, speculative=False, **fields)


def test_each_request_is_answered_by_its_model_and_one_is_in_memory(host: Host):
    expected = {name: alone(name) for name in (GGUF, ONNX)}
    assert host.loaded == [GGUF] and host[ONNX].num_loads == 0
    assert host.ask(ONNX) == expected[ONNX]
    assert host.loaded == [ONNX] and host[GGUF].is_closed
    assert host.ask(None) == host.ask(GGUF) == expected[GGUF]
    assert host.loaded == [GGUF] and host[ONNX].is_closed
    assert [host[name].num_loads for name in (GGUF, ONNX)] == [2, 1]


def test_every_protocol_finds_the_model(host: Host):
    small = {"max_tokens": 2, "model": ONNX}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": small | {"prompt": "Once"},
        "/completion": {"prompt": "Once", "n_predict": 2, "model": ONNX},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2, "model": ONNX},
        "/v1/messages": small | {"messages": FIELDS["messages"]},
        "/api/chat": {"model": f"{ONNX}:latest", "messages": FIELDS["messages"], "stream": False},
        "/api/generate": {"model": ONNX, "prompt": "hi", "stream": False},
    }
    for path, body in bodies.items():
        answer = host.client.post(path, json=body)
        assert answer.status_code == 200 and answer.json()["model"] == ONNX, path
    tokens = host.client.post("/tokenize", json={"content": "hi", "model": ONNX})
    assert tokens.status_code == 200 and host.loaded == [ONNX]
    assert host.client.post("/v1/embeddings", json={"input": "hi", "model": ONNX}).status_code == 501
    assert host[GGUF].num_loads == 1


def test_a_name_that_is_not_served_loads_nothing(hosts: MakeHost):
    host = hosts(aliases={ONNX: ("small", "tiny")})
    host.ask(ONNX)
    for path, body in {"/v1/chat/completions": FIELDS, "/api/chat": FIELDS, "/api/show": {}, "/tokenize": {}}.items():
        answer = host.client.post(path, json=body | {"model": "other"})
        assert answer.status_code == 404 and "serves 'demo', 'onnx'" in answer.text, path
    assert host.client.get("/v1/models/other").status_code == 404
    assert host.client.get("/props?model=other").status_code == 404
    assert host.client.post("/v1/chat/completions", json=FIELDS | {"model": 3}).status_code == 400
    assert host[GGUF].num_loads == 1
    answer = host.client.post("/v1/chat/completions", json=FIELDS | {"model": "tiny"})
    assert answer.json()["model"] == ONNX
    claude = {"model": "claude-haiku-4-5", "max_tokens": 2, "messages": FIELDS["messages"]}
    answer = host.client.post("/v1/messages", json=claude)
    assert answer.json()["model"] == GGUF and "no model here has that name" in answer.headers[web.NOTES]


def test_lists_say_what_can_be_asked_for_and_what_is_loaded(host: Host):
    def status() -> list[str]:
        return [each["status"]["value"] for each in host.client.get("/v1/models").json()["data"]]

    def names(path: str) -> list[str]:
        return [each["name"] for each in host.client.get(path).json()["models"]]

    assert status() == ["loaded", "unloaded"] and names("/api/tags") == [GGUF, ONNX] and names("/api/ps") == [GGUF]
    assert host.client.get(f"/v1/models/{ONNX}").json()["id"] == ONNX
    assert host.client.get("/props").json()["model_alias"] == GGUF
    assert host.client.get(f"/props?model={ONNX}").json()["is_sleeping"] is True
    metrics = host.client.get("/metrics").text
    assert f'\nedgespec_model_loaded{{model="{GGUF}"}} 1\nedgespec_model_loaded{{model="{ONNX}"}} 0\n' in metrics
    assert host[ONNX].num_loads == 0
    host.ask(ONNX)
    assert status() == ["unloaded", "loaded"] and names("/api/tags") == [GGUF, ONNX] and names("/api/ps") == [ONNX]
    assert host.client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0, "preparing": 0}
    metrics = host.client.get("/metrics").text
    assert f'\nedgespec_model_loaded{{model="{GGUF}"}} 0\nedgespec_model_loaded{{model="{ONNX}"}} 1\n' in metrics
    host.ask(GGUF)
    metrics = host.client.get("/metrics").text
    (count,) = [line for line in metrics.splitlines() if line.startswith("edgespec_request_duration_seconds_count")]
    assert count.endswith(" 2") and 'requests_total{path="/v1/chat/completions",status="200"} 2' in metrics
    assert metrics.count("# TYPE edgespec_tokens_total") == 1


async def test_a_request_for_another_model_waits_for_the_answers_that_run(host: Host, hasty: None):
    running = endless(host, GGUF)
    await reached(lambda: host.services.num_running)
    waiting = Client(host.app, model=ONNX, max_tokens=4, stream=True)
    whole = Client(host.app, model=ONNX, max_tokens=4)
    await reached(lambda: b": ping" in waiting.body)
    late = Client(host.app, model=GGUF, max_tokens=4)  # behind the others, which came before
    await reached(lambda: host[GGUF].service.num_waiting == 1)
    assert not running.task.done() and host[ONNX].num_loads == 0 and not late.sent and not whole.sent
    assert host.client.get("/health").json() == {"status": "ok", "running": 1, "waiting": 3, "preparing": 0}
    for client in (running, waiting, whole, late):
        await client.task
        assert client.sent[0]["status"] == 200 and b'"error":{' not in client.body
    assert waiting.body.endswith(b"data: [DONE]\n\n")
    assert [host[name].num_loads for name in (GGUF, ONNX)] == [2, 1] and host.loaded == [GGUF]


async def test_requests_without_end_for_one_model_do_not_keep_another_out(host: Host):
    is_over = False

    async def stream_of_requests() -> int:
        count = 0
        while not is_over:
            client = Client(host.app, model=GGUF, max_tokens=24)
            await client.task
            assert client.sent[0]["status"] == 200
            count += 1
        return count

    streams = [asyncio.ensure_future(stream_of_requests()) for _ in range(3)]  # one of them always runs
    await reached(lambda: host.services.metrics.finished.total() > 6)
    for _ in range(3):
        other = Client(host.app, model=ONNX, max_tokens=4)
        async with asyncio.timeout(60):
            await other.task
        assert other.sent[0]["status"] == 200
    before = host.services.metrics.finished.total()
    await reached(lambda: host.services.metrics.finished.total() > before + 6)  # nor is that one kept out
    is_over = True
    assert min(await asyncio.gather(*streams)) > 1


async def test_many_requests_for_all_models_at_once_are_all_answered(hosts: MakeHost):
    host = hosts((GGUF, ONNX, DRAFT), most=2)
    names = (GGUF, ONNX, DRAFT)
    most = 0
    clients = [Client(host.app, model=names[n % 3], max_tokens=3, stream=n % 2 == 0) for n in range(18)]
    for client in clients[::4]:
        client.leave()
    while not all(client.task.done() for client in clients):
        most = max(most, sum(not each.is_closed for each in host.models.values()))
        await asyncio.sleep(0.005)
    for client in clients:
        await client.task
    statuses = [client.sent[0]["status"] if client.sent else None for client in clients]
    assert {status for index, status in enumerate(statuses) if index % 4} == {200}
    assert most <= 2
    assert all(each.service.num_waiting == 0 for each in host.models.values())


async def test_the_least_recently_used_idle_model_goes(hosts: MakeHost):
    host = hosts((GGUF, ONNX, DRAFT), most=2)
    host.ask(ONNX)
    host.ask(GGUF)
    assert host.loaded == [GGUF, ONNX]
    host.ask(DRAFT)
    assert host.loaded == [GGUF, DRAFT]
    host.ask(ONNX)
    assert host.loaded == [ONNX, DRAFT]
    running = endless(host, ONNX)
    await reached(lambda: running.sent)
    client = Client(host.app, model=GGUF, max_tokens=4)
    await client.task
    assert client.sent[0]["status"] == 200 and not running.task.done()
    running.leave()
    await running.task
    assert host.loaded == [GGUF, ONNX]  # used before DRAFT, but not idle


async def test_a_client_that_leaves_while_it_waits_keeps_no_model_out(host: Host):
    running = endless(host, GGUF)
    await reached(lambda: running.sent)
    leaving = [Client(host.app, model=ONNX, stream=is_stream) for is_stream in (True, False)]
    leaving.append(Client(host.app, "/tokenize", messages=None, max_tokens=None, content="hi", model=ONNX))
    await reached(lambda: host[ONNX].service.num_waiting == 3)
    await reached(lambda: not host[GGUF].service.is_open)
    held = Client(host.app, model=GGUF, max_tokens=4)
    await reached(lambda: host[GGUF].service.num_waiting == 1)
    for client in leaving:
        client.leave()
        await client.task
    await held.task  # beside the answer that still runs
    assert held.sent[0]["status"] == 200 and not running.task.done()
    running.leave()
    await running.task
    host.ask(GGUF)
    assert [host[name].num_loads for name in (GGUF, ONNX)] == [1, 0]


async def test_too_many_that_wait_for_a_model_are_refused(hosts: MakeHost):
    host = hosts(limits={"max_queued": 1})
    running = endless(host, GGUF)
    await reached(lambda: running.sent)
    waiting = [Client(host.app, model=ONNX, max_tokens=4) for _ in range(2)]
    await reached(lambda: host[ONNX].service.num_waiting == 2)
    refused = Client(host.app, model=ONNX, max_tokens=4)
    await refused.task
    assert refused.sent[0]["status"] == 429 and b"queue_full" in refused.body
    running.leave()
    for client in waiting:
        await client.task
        assert client.sent[0]["status"] == 200
    assert host.services.metrics.refused == 1


async def test_waiting_for_a_turn_counts_in_the_time_of_a_request(hosts: MakeHost):
    host = hosts(limits={"timeout_s": 0.5})
    running = endless(host, GGUF)
    await reached(lambda: running.sent)
    waiting = Client(host.app, model=ONNX, max_tokens=4)
    host[ONNX].gate.clear()
    await waiting.task
    assert waiting.sent[0]["status"] == 504
    running.leave()
    await running.task


async def test_a_stop_refuses_who_waits_and_lets_the_answer_end(host: Host):
    running = endless(host, GGUF, max_tokens=100)
    await reached(lambda: running.sent)
    waiting = Client(host.app, model=ONNX)
    await reached(lambda: host[ONNX].service.num_waiting == 1)
    host.services.stop()
    await waiting.task
    assert waiting.sent[0]["status"] == 503 and b"stopping" in waiting.body
    await running.task
    assert running.body.endswith(b"data: [DONE]\n\n")
    host.services.close()
    assert host[ONNX].num_loads == 0


def test_ollamas_keep_alive_is_of_one_model(hosts: MakeHost):
    host = hosts((GGUF, ONNX), most=2, idle_unload_s=600.0)
    assert host.ollama(model=ONNX, keep_alive=0)["done_reason"] == "unload"
    until(lambda: host.loaded == [GGUF])
    assert host.ollama(model=ONNX, keep_alive=-1)["done_reason"] == "load" and host.loaded == [GGUF, ONNX]
    expires = {each["name"]: each["expires_at"] for each in host.client.get("/api/ps").json()["models"]}
    assert expires[ONNX].startswith("9999") and not expires[GGUF].startswith("9999")
    assert host.ollama(model=GGUF, keep_alive=0)["done_reason"] == "unload"
    until(lambda: host[GGUF].is_closed)
    assert host.loaded == [ONNX] and host[ONNX].num_loads == 2


# -- What the files of a model say of it before it is loaded, and what a load says then


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DECODER = {"llama.pooling_type": np.uint32(3), "tokenizer.ggml.add_eos_token": True}
MAKE: dict[str, Callable[[Path], object]] = {
    "graph": lambda _: PATHS[ONNX],
    "coder": lambda path: write_model(path, Shape(specials=(*SPECIALS, *FIM))),
    "decoder of embeddings": lambda path: write_model(path, metadata=DECODER),
    "encoder": write_bert,
}


@pytest.mark.parametrize(
    ("kind", "options", "capabilities"),
    [
        ("graph", {"context_length": 512}, ["completion", "tools"]),
        ("coder", {"context_length": 0}, ["completion", "insert"]),
        ("coder", {"pooling": "mean"}, ["embedding", "completion", "insert"]),
        ("decoder of embeddings", {}, ["embedding"]),
        ("encoder", {}, ["embedding"]),
    ],
)
def test_it_is_told_as_after_its_load(tmp_path: Path, kind: str, options: dict[str, Any], capabilities: list[str]):
    chosen = LoadOptions(model=str(MAKE[kind](tmp_path / "model.gguf")), threads=TEST_THREADS, **options)
    pair = resolve_pair(chosen)
    known = Known.read(chosen, pair, Sampling(**dict(pair.recommended)), None)
    with edgespec.load(chosen) as model, serving(model) as service:
        assert show(service)["capabilities"] == capabilities
        facts, target = known.facts, model.target
        assert facts.chat_template == (target.vocabulary.chat_template or "")
        assert (facts.engine, facts.architecture) == (target.facts.name, target.facts.architecture)
        assert (facts.weight_bytes, facts.pooling) == (target.facts.weight_bytes, target.facts.pooling)
        assert known.context_length == model.context_length and known.settings["verify"] == model.options.verify
