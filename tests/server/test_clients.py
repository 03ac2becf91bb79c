"""Programs that people use, against this server: the official Python clients, if they are installed; and processes that
are killed: no generation goes on for nobody, and no server outlives its parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import httpx2 as httpx
import pytest

from demo import ROOT, TEST_THREADS
from serving import read_line, served
from waiting import until

QUESTION = [{"role": "user", "content": "Find me a bus to Fresno."}]


@pytest.fixture(scope="module")
def url(private_home: Path) -> Iterator[str]:
    with served(private_home, "--port", "0", "--reproducible", "--exit-with-stdin") as process:
        yield read_line(process)["url"]


def running(url: str) -> int:
    return httpx.get(url + "/health").json()["running"]


def test_openai_responses(url: str):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    fields = {"model": "demo", "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 16}
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        whole = client.responses.create(**fields, instructions="You book buses.")
        assert whole.output_text and whole.status in ("completed", "incomplete") and whole.usage.output_tokens <= 16
        with client.responses.stream(**fields, instructions="You book buses.") as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == whole.output_text
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole.status}"
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client.responses.create(**fields, previous_response_id="resp_1")
        with pytest.raises(openai.InternalServerError, match="not supported"):
            client.embeddings.create(model="demo", input="x", encoding_format="float")


def test_openai_with_timings_per_token(url: str):
    """The extension does not disturb a client that checks the shape of every part."""
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    fields = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 16, "stream": True}
    strict = {"max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=url + "/v1", api_key="any", **strict) as client:
        parts = list(client.chat.completions.create(**fields, extra_body={"timings_per_token": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    told = [token for part in parts for token in part.model_extra.get("tokens", ())]
    assert text and "".join(token["text"] for token in told) == text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(url: str, method: str):
    """As an object of the caller's own class, both ways that LangChain asks for it."""
    langchain = pytest.importorskip("langchain_openai", reason="the langchain-openai package is not installed")
    from pydantic import BaseModel

    class Booking(BaseModel):
        """A booking of a room."""

        city: Literal["Paris", "Fresno"]
        nights: Literal[1, 2, 3]
        breakfast: bool

    chat = langchain.ChatOpenAI(model="demo", base_url=url + "/v1", api_key="any", max_retries=0, temperature=0)
    found = chat.with_structured_output(Booking, method=method).invoke("Two nights in Paris with breakfast, please.")
    assert isinstance(found, Booking) and found.nights in (1, 2, 3)
    assert chat.invoke("Find me a bus to Fresno.").usage_metadata["output_tokens"] > 0
    assert len("".join(part.content for part in chat.stream("Find me a bus to Fresno."))) > 0


def test_anthropic(url: str):
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    fields = {"model": "demo", "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        whole = client.messages.create(**fields, system="You book buses.")
        assert whole.content[0].text and whole.usage.output_tokens <= 16
        with client.messages.stream(**fields, system="You book buses.") as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
        assert client.messages.count_tokens(model="demo", messages=QUESTION).input_tokens > 5
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**(fields | {"extra_body": {"temperature": 200}}))


def test_ollama(url: str):
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    options = {"temperature": 0, "num_predict": 12}
    client = ollama.Client(host=url)
    with closing(client._client):
        whole = client.chat(model="demo", messages=QUESTION, options=options)
        parts = client.chat(model="demo", messages=QUESTION, options=options, stream=True)
        assert "".join(part.message.content for part in parts) == whole.message.content
        assert client.generate(model="demo", prompt="Hi", options=options).response
        assert [each.model for each in client.list().models] == ["demo"]
        with pytest.raises(ollama.ResponseError):
            client.chat(model="other", messages=QUESTION)


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_client_that_is_killed_leaves_nothing_running(url: str):
    fields = {"messages": QUESTION, "stream": True, "temperature": 5, "top_k": 0, "seed": 1}
    code = (
        "import sys, httpx2\n"
        f"with httpx2.stream('POST', {url!r} + '/v1/chat/completions', json={fields!r}, timeout=60) as answer:\n"
        "    for line in answer.iter_lines():\n"
        "        print('got', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline() == b"got\n"
        client.send_signal(signal.SIGKILL)
    until(lambda: running(url) == 0)
    answered = httpx.post(url + "/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 2}, timeout=60)
    assert answered.status_code == 200


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("options", [["--stdio"], ["--port", "0", "--exit-with-stdin"]], ids=["stdio", "http"])
def test_a_parent_that_is_killed_leaves_no_orphan(private_home: Path, options: list[str]):
    """A parent starts the sidecar, tells its process id once it speaks, and is killed."""
    command = [sys.executable, "-m", "edgespec", "serve", "demo", "-t", str(TEST_THREADS), *options]
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({command!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    environment = os.environ | {"EDGESPEC_HOME": str(private_home), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        state = Path(f"/proc/{pid}/stat")
        assert state.exists()
        parent.send_signal(signal.SIGKILL)
    until(lambda: not state.exists() or state.read_text(encoding="utf-8").rpartition(") ")[2][0] == "Z")


def test_the_openapi_document_names_every_path(url: str):
    described = httpx.get(url + "/openapi.json").json()
    assert described["openapi"].startswith("3.1") and json.dumps(described)
    for path, about in described["paths"].items():
        for method in about:
            answered = httpx.request(method.upper(), url + path.replace("{name}", "demo"), content=b"{}", timeout=60)
            assert answered.status_code not in (404, 405), path
            assert answered.status_code in (200, 400) or "embed" in path or path == "/infill", path
