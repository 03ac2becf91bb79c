"""A server of several models in this process, each of which is really loaded and unloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.testclient import TestClient

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, LoadOptions, Model
from edgespec.loading.requirements import resolve_pair
from edgespec.server.app import create_app
from edgespec.server.metrics import Metrics
from edgespec.server.residence import Places
from edgespec.server.service import Known, RequestLimits, Service, Services
from serving import BASE_URL

GGUF, ONNX, DRAFT = "demo", "onnx", "draft"
PATHS = {
    GGUF: "demo",
    ONNX: str(DEMO / "onnx" / "target"),
    DRAFT: str(next(iter(sorted(DEMO.glob("*draft*.gguf"))), "")),
}
MESSAGES = [{"role": "user", "content": "Find me a bus to Fresno."}]
FIELDS = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}


class Served:
    """One of the models. `gate`: holds up its loads while it is shut; `failure`: what its next ones raise."""

    def __init__(self, name: str, service: Service) -> None:
        self.name, self.service = name, service
        self.options = LoadOptions(model=PATHS[name], threads=TEST_THREADS, parallel=2)
        self.opened: list[Model] = []
        self.num_loads = 0
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def known(self) -> Known:
        pair = resolve_pair(self.options)
        recommended: dict[str, Any] = dict(pair.recommended)
        return Known.read(self.options, pair, edgespec.Sampling(**recommended), GenerateOptions().max_tokens)

    def fits(self) -> bool:
        return True

    def load(self) -> None:
        self.num_loads += 1
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        self.opened.append(edgespec.load(self.options))
        self.service.use(self.opened[-1])

    @property
    def is_loaded(self) -> bool:
        return self.service.loaded is not None

    @property
    def is_closed(self) -> bool:
        """Whether no model of it takes memory."""
        return not self.is_loaded and all(repr(model).endswith("closed>") for model in self.opened)


class Host:
    """The server of the models `names`, of which the first is loaded."""

    def __init__(self, names: Sequence[str] = (GGUF, ONNX), most: int = 1, **settings: Any) -> None:
        places, metrics = Places(most), Metrics()
        limits = RequestLimits(**settings.pop("limits", {}))
        aliases = settings.pop("aliases", {})
        self.models: dict[str, Served] = {}
        for name in names:
            service = Service(name, limits, metrics, aliases=aliases.get(name, ()), places=places, **settings)
            self.models[name] = Served(name, service)
            service.begin(self.models[name])
        self.services = Services(*(each.service for each in self.models.values()))
        self.app = create_app(self.services)
        self.models[names[0]].load()
        self.client = TestClient(self.app, base_url=BASE_URL)

    def __getitem__(self, name: str) -> Served:
        return self.models[name]

    @property
    def loaded(self) -> list[str]:
        return [name for name, each in self.models.items() if each.is_loaded]

    def ask(self, model: str | None, **fields: Any) -> str:
        answer = self.client.post("/v1/chat/completions", json=FIELDS | {"model": model} | fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == (model or next(iter(self.models)))
        return str(answer.json()["choices"][0]["message"]["content"])

    def ollama(self, path: str = "/api/generate", **fields: Any) -> dict[str, Any]:
        stream = {} if path == "/api/show" else {"stream": False}
        answer = self.client.post(path, json={"model": GGUF} | stream | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        for each in self.models.values():
            each.gate.set()
        self.services.close()


MakeHost = Callable[..., Host]


def alone(name: str) -> str:
    """What a model answers to `FIELDS` when it is loaded alone."""
    with edgespec.load(LoadOptions(model=PATHS[name], threads=TEST_THREADS)) as model:
        greedy = replace(model.recommended_sampling, temperature=0.0)
        return model.chat(MESSAGES, greedy, GenerateOptions(max_tokens=8, drafter="none")).result().text
