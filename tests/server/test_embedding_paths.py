"""Embeddings in the protocols of OpenAI and Ollama."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import edgespec
from asgi_client import Client
from demo import TEST_THREADS
from edgespec import Model
from edgespec.server.app import create_app
from edgespec.server.service import Service, Services
from serving import client_of, serving
from tiny_bert import write_bert
from tiny_gguf import write_model
from waiting import reached

TEXTS = ["Find me a bus to Fresno.", "hello world"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "embedding.gguf"
    write_model(path, metadata={"llama.pooling_type": np.uint32(3), "tokenizer.ggml.add_eos_token": True})
    with edgespec.load(path, threads=TEST_THREADS, reproducible=False) as opened:
        yield opened


def test_openai(client: TestClient, model: Model):
    expected = model.embed(TEXTS)
    answer = client.post("/v1/embeddings", json={"input": TEXTS, "model": "demo", "user": "x"}).json()
    assert answer["object"] == "list" and answer["model"] == "demo"
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert np.array_equal([each["embedding"] for each in answer["data"]], expected)
    count = sum(len(model.encode(text)) + 1 for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    fields: dict[str, Any] = {"input": TEXTS[0], "encoding_format": "base64"}
    coded = client.post("/v1/embeddings", json=fields).json()["data"][0]["embedding"]
    alone = model.embed(TEXTS[0])[0]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), alone)
    short = client.post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 8}).json()
    found = np.array(short["data"][0]["embedding"])
    np.testing.assert_allclose(found, alone[:8] / np.linalg.norm(alone[:8]), atol=1e-6)
    ids = [*model.encode(TEXTS[0]), 296]
    for given in (ids, [ids]):
        data = client.post("/v1/embeddings", json={"input": given}).json()["data"]
        assert np.array_equal([each["embedding"] for each in data], [alone])


def test_ollama(client: TestClient, model: Model):
    expected = model.embed(TEXTS)
    fields = {"model": "demo:latest", "input": TEXTS, "keep_alive": "5m", "options": {"num_ctx": 512}}
    answer = client.post("/api/embed", json=fields).json()
    assert np.array_equal(answer["embeddings"], expected)
    assert answer["total_duration"] > 0 and answer["load_duration"] == 0 and answer["prompt_eval_count"] > 20
    assert client.post("/api/embed", json={"model": "demo"}).json()["embeddings"] == []
    long = "word " * 700
    assert client.post("/api/embed", json={"input": long, "dimensions": 4}).json()["prompt_eval_count"] == 512
    refused = client.post("/api/embed", json={"input": long, "truncate": False})
    assert refused.status_code == 400 and "the context holds 512" in refused.json()["error"]
    assert client.post("/api/show", json={"model": "demo"}).json()["capabilities"] == ["embedding"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "input is missing"),
        ({"input": []}, "input must be a text"),
        ({"input": [["a"]]}, "whole numbers"),
        ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": [9999]}, "outside the vocabulary"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format must be one of"),
        ({"input": "x", "dimensions": 65}, "dimensions must be at most 64"),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], words: str):
    answered = client.post("/v1/embeddings", json=fields)
    assert answered.status_code == 400 and words in answered.json()["error"]["message"]


def test_an_encoder(tmp_path: Path):
    with serving(write_bert(tmp_path / "bert.gguf")) as service:
        client = client_of(service)
        answer = client.post("/api/embed", json={"input": ["find me a bus", "hello"]}).json()
        assert answer["prompt_eval_count"] == 6 + 3 and len(answer["embeddings"][0]) == 64
        assert client.post("/api/show", json={}).json()["capabilities"] == ["embedding"]
        asked = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/v1/completions": {"prompt": "x"},
        }
        for path, fields in asked.items():
            refused = client.post(path, json=fields)
            assert refused.status_code == 400 and "they give embeddings, and write no text" in refused.text
        assert client.get("/props").status_code == client.get("/api/ps").status_code == 200


async def test_a_client_that_leaves_ends_its_embeddings(
    service: Service, model: Model, monkeypatch: pytest.MonkeyPatch
):
    """What comes after the pass that runs is not begun; a sixth that waits to be read is refused."""
    scheduler, app = service.require().scheduler, create_app(Services(service))
    embed = model.target
    goes_on, passes, one_pass = threading.Event(), list[Any](), embed.embed

    def slow(*args: Any) -> Any:
        passes.append(args)
        goes_on.wait(30)
        return one_pass(*args)

    monkeypatch.setattr(embed, "embed", slow)
    texts = ["word " * 80] * 30  # several passes
    clients = [Client(app, "/v1/embeddings", messages=None, max_tokens=None, input=texts) for _ in range(5)]
    await reached(lambda: scheduler.num_preparing == 5 and bool(passes))
    refused = Client(app, "/v1/embeddings", messages=None, max_tokens=None, input="x")
    await refused.task
    assert refused.sent[0]["status"] == 429
    for client in clients:
        client.leave()
        await client.task
    goes_on.set()
    await reached(lambda: scheduler.num_preparing == 0)
    assert len(passes) <= len(clients), "each at most the pass that it waited for"
