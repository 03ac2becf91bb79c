"""The demo pair behind the application, in one process and for all tests of a run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import edgespec
from browser import Browser, find_browser
from chat_page import watched
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.server import web
from edgespec.server.scheduler import Scheduler
from edgespec.server.service import Service
from scripted_page import Scripted, scripted_server
from serving import client_of, serving
from several import Host, MakeHost


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in a loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
    return True


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    """The demo in reproducible mode, so that texts can be compared."""
    with edgespec.load("demo", reproducible=True, threads=TEST_THREADS) as opened:
        yield opened


@pytest.fixture
def service(model: Model) -> Iterator[Service]:
    """A service of its own for each test; the model stays open."""
    with serving(model, "demo") as found:
        yield found


@pytest.fixture
def scheduler(service: Service) -> Scheduler:
    return service.require().scheduler


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service)


@pytest.fixture
def greedy(model: Model) -> Sampling:
    """What a request with temperature 0 uses: the model's recommended settings otherwise."""
    return replace(model.recommended_sampling, temperature=0.0)


@pytest.fixture
def plain() -> GenerateOptions:
    return GenerateOptions(max_tokens=24, drafter="none")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams begin and are kept alive within hundredths of a second."""
    monkeypatch.setattr(web, "BEGINS_AFTER_S", 0.05)
    monkeypatch.setattr(web, "PING_EVERY_S", 0.05)


@pytest.fixture
def hosts() -> Iterator[MakeHost]:
    """Makes servers that are closed with the test."""
    made: list[Host] = []

    def make(*given: Any, **settings: Any) -> Host:
        made.append(Host(*given, **settings))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    with Browser(program) as browser:
        yield browser


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server(chat_template="{% if enable_thinking %}<think>{% endif %}") as found:
        yield found


@pytest.fixture
def tab(running: Browser, scripted: Scripted) -> Iterator[Browser]:
    """The page of the scripted server."""
    with watched(running, scripted.url):
        scripted.asked.clear()
        scripted.later.clear()
        yield running
