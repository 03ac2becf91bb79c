"""A server in this process and its answers; and `edgespec serve` as a child process, for tests that need a real socket
or real standard streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import edgespec
from demo import TEST_THREADS, heed_interrupts
from edgespec import GenerateOptions, Model, Sampling
from edgespec.server.app import create_app
from edgespec.server.service import Known, RequestLimits, Service, Services

BASE_URL = "http://127.0.0.1"
ENDS_WITHIN_S = 60.0


class Opened:
    """The files of a service's model that a test has opened."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def known(self) -> Known:
        loaded = self.service.require()
        model = loaded.model
        return Known.read(model.options, model.pair, loaded.sampling, loaded.options.max_tokens)

    def load(self) -> None:
        raise AssertionError("it stays as it is")

    def fits(self) -> bool:
        return True


@contextmanager
def serving(
    model: Model | Path,
    name: str = "m",
    sampling: Sampling | None = None,
    options: GenerateOptions | None = None,
    reasoning_format: Any = "auto",
) -> Iterator[Service]:
    """A model, or one that is loaded from a file for as long as the block lasts, behind a scheduler of its own."""
    if isinstance(model, Path):
        with (
            edgespec.load(model, threads=TEST_THREADS, reproducible=False) as opened,
            serving(opened, name, sampling, options, reasoning_format) as service,
        ):
            yield service
        return
    service = Service(name, RequestLimits(max_queued=4, timeout_s=60.0))
    service.files = Opened(service)
    service.use(model, sampling, options, reasoning_format)
    try:
        yield service
    finally:
        service.require().scheduler.close()


def client_of(service: Service, api_key: str | None = None, **settings: Any) -> TestClient:
    return TestClient(create_app(Services(service, api_key=api_key), **settings), base_url=BASE_URL)


def post(client: TestClient, path: str, body: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The answer to a request that is accepted."""
    answered = client.post(path, json=(body or {}) | fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


def streamed(client: TestClient, path: str, body: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The parts of a streamed answer in any protocol; where events have a name, each says its kind twice."""
    answered = client.post(path, json=(body or {}) | fields | {"stream": True})
    assert answered.status_code == 200, answered.text
    if not answered.headers["content-type"].startswith("text/event-stream"):
        return [json.loads(line) for line in answered.text.splitlines()]
    found = []
    for event in answered.text.removesuffix("\n\n").removesuffix("\n\ndata: [DONE]").split("\n\n"):
        *name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
    return found


@contextmanager
def served(home: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with pipes; ended with the block, if it has not ended itself."""
    command = [sys.executable, "-m", "edgespec", "serve", "demo", "-t", str(TEST_THREADS), *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"EDGESPEC_HOME": str(home)} | variables
    process = subprocess.Popen(command, **pipes, env=environment, preexec_fn=heed_interrupts)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next line of its standard output, which is JSON."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, f"it has ended: {process.stderr.read().decode()}"
    found: dict[str, Any] = json.loads(line)
    return found


def send(process: subprocess.Popen[bytes], *requests: dict[str, Any] | bytes) -> None:
    """Write lines to the standard input of `serve --stdio`."""
    assert process.stdin is not None
    for request in requests:
        process.stdin.write((request if isinstance(request, bytes) else json.dumps(request).encode()) + b"\n")
    process.stdin.flush()


def events_until(process: subprocess.Popen[bytes], *ended: str) -> list[dict[str, Any]]:
    """Its events until each of the requests `ended` is done or has failed."""
    left, events = set(ended), []
    while left:
        events.append(read_line(process))
        if events[-1]["event"] in ("done", "error"):
            left -= {events[-1]["id"]}
    return events


def ends_with_input(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, at which it ends by itself."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(ENDS_WITHIN_S) == 0
    process.stdin = None


def errors_of(process: subprocess.Popen[bytes]) -> str:
    """Its standard error, to the end."""
    assert process.stderr is not None
    return process.stderr.read().decode()
