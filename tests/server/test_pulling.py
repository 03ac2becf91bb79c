"""Ollama's /api/pull and /api/delete, and what clients of other servers ask for that is not here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from demo import DEMO
from edgespec.loading.own_models import add
from edgespec.loading.registry import registered_folders, resolve
from edgespec.server.app import NOT_HERE, create_app
from edgespec.server.service import Service, Services
from hub_server import serve

ID = "edge/tiny-GGUF"
DRAFT = DEMO / "demo-draft-q8_0.gguf"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repo").mkdir()
    shutil.copy(DRAFT, tmp_path / "repo" / "tiny-Q8_0.gguf")
    with serve({ID: tmp_path / "repo"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield


def pulled(client: TestClient, name: str, **fields: object) -> list[dict[str, object]]:
    answer = client.post("/api/pull", json={"model": name, **fields})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_model_is_pulled_with_its_progress_and_deleted(client: TestClient):
    first, *between, last = pulled(client, ID)
    assert first == {"status": "pulling manifest"} and last == {"status": "success"}
    size = DRAFT.stat().st_size
    assert [line for line in between if line.get("completed") == line.get("total") == size]
    assert resolve("tiny").target.read_bytes() == DRAFT.read_bytes()
    assert pulled(client, ID, stream=False) == [{"status": "success"}], "it is there"
    deleted = client.request("DELETE", "/api/delete", json={"name": "tiny"})
    assert deleted.status_code == 200 and not deleted.content and "tiny" not in registered_folders()
    assert client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 404


def test_what_is_served_is_there_and_is_not_deleted(client: TestClient):
    assert pulled(client, "demo")[-1] == {"status": "success"}
    refused = client.request("DELETE", "/api/delete", json={"model": "demo"})
    assert refused.status_code == 409 and "is being served" in refused.json()["error"]


def test_what_cannot_be_pulled_or_deleted_is_said_without_a_path(client: TestClient, tmp_path: Path):
    unknown = client.post("/api/pull", json={"model": "no-such-model"})
    assert unknown.status_code == 404 and "is not a known model" in unknown.json()["error"]
    assert client.post("/api/pull", json={}).status_code == 400
    failed = pulled(client, "edge/nothing-GGUF")[-1]
    assert failed.keys() == {"error"}
    for name, status in (("nothing", 404), ("..", 404), ("/etc", 404)):
        refused = client.request("DELETE", "/api/delete", json={"model": name})
        assert refused.status_code == status and str(tmp_path) not in refused.text


def test_other_pages_and_machines_may_not(service: Service, client: TestClient, tmp_path: Path):
    add(Path(shutil.copy(DRAFT, tmp_path / "mine.gguf")))
    page = {"Origin": "http://localhost:3000"}  # may chat
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        refused = client.request(method, path, json={"model": "mine"}, headers=page)
        assert refused.status_code == 403, refused.text
    far = TestClient(create_app(Services(service), hosts=()), base_url="http://192.0.2.7", client=("192.0.2.9", 1))
    assert far.request("DELETE", "/api/delete", json={"model": "mine"}).status_code == 403
    keyed = Services(service, api_key="secret")
    far = TestClient(create_app(keyed, hosts=()), base_url="http://192.0.2.7", client=("192.0.2.9", 1))
    known = {"Authorization": "Bearer secret"}
    assert far.request("DELETE", "/api/delete", json={"model": "mine"}, headers=known).status_code == 200
    assert "mine" not in registered_folders() and (tmp_path / "mine.gguf").exists()


@pytest.mark.parametrize("path", NOT_HERE)
def test_what_is_not_here_says_what_to_do_instead(client: TestClient, path: str):
    refused = client.post(path, json={"query": "x", "documents": ["y"]})
    said = refused.json()["error"]
    instead = {"rerank": "/v1/embeddings", "/api/embeddings": "/api/embed,"}
    wanted = next((text for part, text in instead.items() if part in path), "edgespec add")
    assert refused.status_code == 501
    assert wanted in (said if isinstance(said, str) else said["message"])
