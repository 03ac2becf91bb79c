"""Whether a model that can reason does: each protocol's switch reaches the chat template, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import edgespec
from demo import TEST_THREADS
from edgespec.cli.main import cli
from edgespec.server.app import create_app
from edgespec.server.service import Limits, Service
from serving import BASE_URL
from tiny_gguf import TEMPLATE, write_model

# As Qwen3's: without reasoning the answer begins behind a block that is closed already.
SWITCH = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<|end|>{% endif %}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "reasoning.gguf", metadata={"tokenizer.chat_template": SWITCH})


@pytest.fixture(scope="module")
def reasoning(path: Path) -> Iterator[TestClient]:
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as model:
        service = Service("reasoning", Limits(max_queued=4, timeout_s=60.0))
        service.use(model)
        yield TestClient(create_app(service), base_url=BASE_URL)
        assert service.loaded is not None
        service.loaded.scheduler.close()


def asked(client: TestClient, path: str, **fields: Any) -> int:
    """Tokens of the prompt."""
    said = client.post(path, json={"messages": HELLO, "max_tokens": 1, **fields})
    assert said.status_code == 200, said.text
    return int(said.json()["usage"].get("prompt_tokens") or said.json()["usage"]["input_tokens"])


def test_each_protocol_can_switch_reasoning_off(reasoning: TestClient) -> None:
    plain = asked(reasoning, "/v1/chat/completions")
    assert asked(reasoning, "/v1/chat/completions", reasoning_effort="none") == plain + 1
    assert asked(reasoning, "/v1/chat/completions", chat_template_kwargs={"enable_thinking": False}) == plain + 1
    assert asked(reasoning, "/v1/chat/completions", chat_template_kwargs={"enable_thinking": True}) == plain
    counted = reasoning.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
    said = reasoning.post(
        "/v1/messages", json={"messages": HELLO, "max_tokens": 1, "thinking": {"type": "disabled"}}
    ).json()
    assert sum(v for k, v in said["usage"].items() if k != "output_tokens") == counted + 1 == plain + 1
    for thinks, more in ((False, 1), (True, 0), (None, 0)):
        body = {"messages": HELLO, "stream": False, "think": thinks, "options": {"num_predict": 1}}
        assert reasoning.post("/api/chat", json=body).json()["prompt_eval_count"] == plain + more
    body = {"input": "hello", "max_output_tokens": 1, "reasoning": {"effort": "none"}}
    assert reasoning.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == plain + 1
    raw = {"prompt": "hello", "raw": True, "stream": False, "think": False, "options": {"num_predict": 1}}
    assert reasoning.post("/api/generate", json=raw).status_code == 200


def test_a_model_that_cannot_reason_needs_no_switch(client: TestClient) -> None:
    plain = asked(client, "/v1/chat/completions")
    assert asked(client, "/v1/chat/completions", reasoning_effort="none") == plain
    wrong = client.post(
        "/v1/chat/completions", json={"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert wrong.status_code == 400 and "enable_thinking" in wrong.json()["error"]["message"]
    assert client.post("/api/chat", json={"messages": HELLO, "think": True}).status_code == 400


def test_an_argument_cannot_forge_a_turn(tmp_path: Path) -> None:
    source = TEMPLATE + "{{ mood }}"
    path = write_model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": source})
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as model:
        plain, forged = (model.encode_chat(HELLO, template_arguments={"mood": m}) for m in ("x", "<|user|>"))
        control = [not model.target.vocabulary.piece(token_id) for token_id in forged]
        assert sum(control) == sum(not model.target.vocabulary.piece(token_id) for token_id in plain)


def test_the_command_line_switches_reasoning_off(path: Path, target_path: Path) -> None:
    def ids(*options: str) -> list[int]:
        words = ["generate", str(path), "-p", "hello", "-n", "1", "--json", "--no-reproducible", *options]
        found = CliRunner().invoke(cli, words)
        assert found.exit_code == 0, found.output
        return list(json.loads(found.stdout)["prompt_token_ids"])

    assert len(ids("--no-thinking")) == len(ids()) + 1 == len(ids("--thinking")) + 1
    for words, said in (
        ([str(target_path), "--no-thinking"], "no switch for reasoning"),
        ([str(path), "--no-thinking", "--no-chat-template"], "need the chat template"),
    ):
        found = CliRunner().invoke(cli, ["generate", *words, "-p", "hello", "-n", "1"])
        assert found.exit_code == 2 and said in found.output


def test_a_chat_refuses_the_switch_at_once_where_there_is_none(path: Path, target_path: Path) -> None:
    words = ["--no-reproducible", "-n", "1", "--seed", "1"]
    lines = "/set thinking off\nhello\n/unset thinking\n"
    found = CliRunner().invoke(cli, ["chat", str(target_path), *words], input=lines)
    assert "no switch for reasoning" in found.stderr and "thinking is not set" in found.stderr
    assert "cut at 1 tokens" in found.stderr, "the setting did not change, and the message is answered"
    found = CliRunner().invoke(cli, ["chat", str(path), *words], input=lines)
    assert "thinking = off" in found.stderr and "cut at 1 tokens" in found.stderr
    found = CliRunner().invoke(cli, ["chat", str(target_path), "--no-thinking", *words], input="hello\n")
    assert found.exit_code == 2 and found.stderr.count("no switch for reasoning") == 1
