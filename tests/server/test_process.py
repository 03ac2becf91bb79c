"""`edgespec serve` as a process: four clients at once, clients that leave, signals, sidecars."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from demo import ROOT
from edgespec import GenerateOptions, Model
from serving import ENDS_WITHIN_S, errors_of, read_line, served
from waiting import until

CHAT = "/v1/chat/completions"
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
QUESTIONS = ("Find me a bus to Fresno.", "Book a hotel in Paris.", "What is the weather?", "Play some jazz.")


@contextmanager
def started(private_home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server and its address."""
    with served(private_home, "-v", "--port", "0", "--reproducible", "--exit-with-stdin", "-np", "4") as process:
        announced = read_line(process)
        assert announced["event"] == "listening" and announced["pid"] == process.pid
        assert announced["url"].startswith("http://127.0.0.1:")
        yield process, announced["url"]


@pytest.fixture(scope="module")
def url(private_home: Path) -> Iterator[str]:
    with started(private_home) as (_, address):
        yield address


def ask(url: str, question: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    return httpx.post(url + CHAT, json={"messages": messages, "max_tokens": 32} | fields, timeout=ENDS_WITHIN_S)


def endless(url: str) -> dict[str, Any]:
    """The fields of a request that goes on until the context is full."""
    ids = httpx.post(url + "/tokenize", json={"content": "<|im_end|><|endoftext|>", "parse_special": True}).json()
    bias = {str(token_id): -100 for token_id in ids["tokens"]}
    return {"messages": [{"role": "user", "content": "Go on"}], "logit_bias": bias, "stream": True}


def test_four_clients_at_once_get_their_own_texts(url: str, model: Model):
    sampling = replace(model.recommended_sampling, temperature=1.0, seed=5)
    plain = GenerateOptions(max_tokens=32, drafter="none")
    expected = [model.chat([{"role": "user", "content": text}], sampling, plain).result().text for text in QUESTIONS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: ask(url, text, temperature=1.0, seed=5).json(), QUESTIONS))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected


@pytest.mark.quiet
def test_a_client_that_leaves_frees_the_model_at_once(url: str):
    with httpx.stream("POST", url + CHAT, json=endless(url)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert httpx.get(url + "/health").json()["running"] == 1
    began_s = time.monotonic()
    until(lambda: httpx.get(url + "/health").json()["running"] == 0)
    assert time.monotonic() - began_s < 2.0  # 1900 tokens take longer
    assert ask(url, "hi", max_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_names_and_seeds_of_the_command_line(private_home: Path):
    options = ("--alias", "mine", "--alias", "gpt-5", "--seed", "-1", "--port", "0")
    with served(private_home, *options) as process:
        url = read_line(process)["url"]
        assert [each["id"] for each in httpx.get(url + "/v1/models").json()["data"]] == ["mine", "gpt-5"]
        about = httpx.get(url + "/props").json()
        assert about["total_slots"] == 1  # memory for one answer at a time
        assert not any("answers" in part["name"] for part in about["memory"]["parts"])
        answers = [ask(url, "hi", max_tokens=1, model=name).json() for name in ("mine", "gpt-5", "other")]
        assert {answer["model"] for answer in answers} == {"mine"}
        assert len({answer["seed"] for answer in answers}) == 3


def test_half_a_request_disturbs_nobody(url: str):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{")
        assert ask(url, "hi", max_tokens=2).status_code == 200


def test_the_openai_client(url: str):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    fields = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content and whole.choices[0].logprobs.content[0].top_logprobs
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [each.id for each in client.models.list()] == ["demo"]
    assert client.completions.create(model="demo", prompt="Once", max_tokens=3).choices[0].text
    assert client.chat.completions.create(**(fields | {"model": "other"})).model == "demo"
    with pytest.raises(openai.BadRequestError, match="unknown name"):
        client.chat.completions.create(**fields, extra_body={"grammar": "start: nothing"})


def test_the_page_on_the_server_is_true(url: str):
    """Requests and the Python example of docs/server.md, sent to this server."""
    requests = re.findall(r"^curl http://127.0.0.1:8080(\S+) -d '(.+)'$", PAGE, re.MULTILINE)
    assert len(requests) == 3
    for path, body in requests:
        answered = httpx.post(url + path, content=body.encode(), timeout=ENDS_WITHIN_S)
        assert answered.status_code == (501 if path == "/v1/embeddings" else 200), "the demo writes text"
    paths = re.findall(r"`GET (/\S+)`", PAGE)
    assert len(paths) == 10
    for path in paths:
        assert httpx.get(url + path).status_code == 200
    pytest.importorskip("openai", reason="the openai package is not installed")
    (example,) = re.findall(r"^```py\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
    code = example.replace("http://127.0.0.1:8080", url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_end_of_standard_input_ends_it(private_home: Path):
    with started(private_home) as (server, address):
        for question in QUESTIONS[:2]:
            assert ask(address, question).status_code == 200
        assert server.poll() is None and server.stdin is not None
        server.stdin.close()
        assert server.wait(ENDS_WITHIN_S) == 0
        server.stdin = None
        log = errors_of(server)
    assert "Traceback" not in log and not any(question in log for question in QUESTIONS)
    assert re.search(r"^note: answer: \d+ tokens at [\d.]+ tokens/s", log, re.MULTILINE), log


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_answer_finish(private_home: Path, number: signal.Signals):
    with served(private_home, "--port", "0", "--verbose", EDGESPEC_API_KEY="k") as process:
        url = read_line(process)["url"]
        key = {"Authorization": "Bearer k"}
        assert httpx.get(url + "/v1/models").status_code == 401
        fields = {"prompt": "Once upon a time", "max_tokens": 300, "stream": True, "temperature": 1, "seed": 1}
        with httpx.stream("POST", url + "/v1/completions", json=fields, headers=key, timeout=ENDS_WITHIN_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait(ENDS_WITHIN_S) == 0
        log = errors_of(process)
        assert "POST /v1/completions 200" in log and "Once upon" not in log and "Traceback" not in log


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_signal_while_the_model_is_loaded_ends_it(private_home: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(private_home, "--port", str(port)) as process:

        def status() -> int:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code
            except httpx.ConnectError:
                return 0

        until(status, process=process)  # 503, or on a fast machine 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_WITHIN_S) == 0
        assert "Traceback" not in errors_of(process)


def test_an_address_in_use_is_one_line(private_home: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served(private_home, "--port", str(port)) as process:
            assert process.wait(ENDS_WITHIN_S) == 2
            (line,) = errors_of(process).splitlines()
            assert line.startswith(f"error: cannot listen on 127.0.0.1 port {port}: Address already in use")


def test_without_its_libraries_one_line_names_the_command():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('starlette', 'uvicorn'))\n"
        "sys.argv[1:] = ['serve']\nfrom edgespec.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: edgespec serve needs starlette and uvicorn") and "install" in line
