"""Models that reason: each protocol's switch reaches the chat template or is refused, and the reasoning is told apart.

Tiny models write what a regular expression or grammar forces, so that their reasoning is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.chat import marks as marks_module
from edgespec.chat.marks import Marks
from edgespec.cli.main import cli
from edgespec.server.web import NOTES
from serving import client_of, post, serving, streamed
from tiny_gguf import TEMPLATE, write_model

# As Qwen3's: without reasoning the answer begins behind a block that is closed already.
SWITCH = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<|end|>{% endif %}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "reasoning.gguf", metadata={"tokenizer.chat_template": SWITCH})


@pytest.fixture(scope="module")
def reasoning(path: Path) -> Iterator[TestClient]:
    with serving(path) as service:
        yield client_of(service)


def asked(client: TestClient, path: str, **fields: Any) -> int:
    """Tokens of the prompt."""
    usage = post(client, path, **{"messages": HELLO, "max_tokens": 1, **fields})["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


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
    assert asked(client, "/v1/chat/completions", chat_template_kwargs={"enable_thinking": False}) == plain
    for asked_for in ({"chat_template_kwargs": {"enable_thinking": True, "mood": 1}}, {"enable_thinking": True}):
        noted = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1} | asked_for)
        assert noted.json()["usage"]["prompt_tokens"] == plain
        assert "'enable_thinking': the chat template of this model does not use it" in noted.headers[NOTES]
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


# -- reasoning told apart

THINKS = TEMPLATE + "{% if tools %}<tool_call>{% endif %}{# <think> #}"
OPENS = TEMPLATE + "<think>\n"
WHOLE = "<think>\na plan\n</think>\n\nyes"
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
ANTHROPIC = {"messages": HELLO, "max_tokens": 60}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def forced(text: str) -> GenerateOptions:
    """Options under which any model writes `text`."""
    return GenerateOptions(max_tokens=400, regex=re.escape(text).replace("\\\n", "\\n"))


@contextmanager
def served_with(path: Path, options: GenerateOptions | None = None, form: Any = "auto") -> Iterator[TestClient]:
    with serving(path, "m", Sampling(temperature=0.0), options, form) as service:
        yield client_of(service)


def model_with(folder: Path, template: str) -> Path:
    return write_model(folder / "m.gguf", metadata={"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A model that writes `WHOLE` whatever it is asked."""
    with served_with(model_with(tmp_path_factory.mktemp("m"), THINKS), forced(WHOLE)) as client:
        yield client


def test_openai_gets_reasoning_content(thinker: TestClient) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    found = post(thinker, CHAT, body)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "yes" and choice["message"]["reasoning_content"] == "a plan"
    logprobs = choice["logprobs"]
    assert "".join(each["token"] for each in logprobs["content"]) == "yes"
    assert "".join(each["token"] for each in logprobs["reasoning_content"]) == WHOLE.removesuffix("yes")
    counted = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(logprobs["reasoning_content"]) < found["usage"]["completion_tokens"]
    deltas = [part["choices"][0] for part in streamed(thinker, CHAT, body)]
    for name, text in (("content", "yes"), ("reasoning_content", "a plan")):
        assert "".join(each["delta"].get(name, "") for each in deltas) == text
        tokens = [token for each in deltas if each["logprobs"] for token in each["logprobs"].get(name, [])]
        assert [each["token"] for each in tokens] == [each["token"] for each in logprobs[name]]
    kinds = [key for each in deltas for key in each["delta"] if key != "role" and each["delta"][key]]
    assert kinds == sorted(kinds, reverse=True), "the reasoning comes first"


def test_the_text_can_be_left_as_it_is(thinker: TestClient, tmp_path: Path) -> None:
    def content(client: TestClient, **fields: Any) -> str:
        found = post(client, CHAT, messages=HELLO, **fields)
        message = found["choices"][0]["message"]
        assert ("completion_tokens_details" in found["usage"]) == ("reasoning_content" in message)
        return str(message["content"])

    assert content(thinker, reasoning_format="none") == WHOLE
    with served_with(model_with(tmp_path, THINKS), forced(WHOLE), "none") as client:
        assert content(client) == WHOLE and content(client, reasoning_format="deepseek") == "yes"
    wrong = thinker.post(CHAT, json={"messages": HELLO, "reasoning_format": "hidden"})
    assert wrong.status_code == 400 and "auto, deepseek, none" in wrong.json()["error"]["message"]
    assert post(thinker, "/v1/completions", {"prompt": "hello"})["choices"][0]["text"] == WHOLE


def test_anthropic_gets_a_block_of_thinking(thinker: TestClient) -> None:
    found = post(thinker, MESSAGES, ANTHROPIC | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert found["content"] == [
        {"type": "thinking", "thinking": "a plan", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    parts = streamed(thinker, MESSAGES, ANTHROPIC)
    blocks = [part["content_block"]["type"] for part in parts if part["type"] == "content_block_start"]
    assert blocks == ["thinking", "text"]
    assert [part["index"] for part in parts if part["type"] == "content_block_stop"] == [0, 1]
    deltas = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
    assert "".join(each.get("thinking", "") for each in deltas) == "a plan"
    assert "".join(each.get("text", "") for each in deltas) == "yes"
    assert sum(each["type"] == "signature_delta" for each in deltas) == 1
    sent = [*HELLO, {"role": "assistant", "content": found["content"]}, *HELLO]
    assert post(thinker, MESSAGES, ANTHROPIC | {"messages": sent})["content"][1]["text"] == "yes"


def test_responses_get_a_reasoning_item(thinker: TestClient) -> None:
    found = post(thinker, RESPONSES, {"input": "hello"})
    reasoning, message = found["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [{"type": "reasoning_text", "text": "a plan"}]
    assert message["content"][0]["text"] == "yes"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
    parts = streamed(thinker, RESPONSES, input="hello")
    assert "".join(part["delta"] for part in parts if part["type"] == "response.reasoning_text.delta") == "a plan"
    assert "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta") == "yes"
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    done = [part["item"]["type"] for part in parts if part["type"] == "response.output_item.done"]
    assert done == ["reasoning", "message"] == [item["type"] for item in parts[-1]["response"]["output"]]
    again = [{"role": "user", "content": "hello"}, *found["output"], {"role": "user", "content": "more"}]
    assert post(thinker, RESPONSES, {"input": again})["status"] == "completed"


def test_ollama_gets_thinking(thinker: TestClient) -> None:
    assert "thinking" in post(thinker, "/api/show", {"model": "m"})["capabilities"]
    found = post(thinker, OLLAMA, {"messages": HELLO, "stream": False, "think": True})
    assert found["message"] == {"role": "assistant", "content": "yes", "thinking": "a plan"}
    messages = [part["message"] for part in streamed(thinker, OLLAMA, messages=HELLO)]
    assert "".join(each.get("thinking", "") for each in messages) == "a plan"
    assert "".join(each["content"] for each in messages) == "yes"
    generated = post(thinker, "/api/generate", {"prompt": "hello", "stream": False})
    assert generated["response"] == "yes" and generated["thinking"] == "a plan"
    for think, status in (("high", 200), ("much", 400), (False, 400)):  # this template has no switch
        body = {"messages": HELLO, "stream": False, "think": think}
        assert thinker.post(OLLAMA, json=body).status_code == status, think


def test_a_call_behind_the_reasoning_is_found(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    inside = f"<think>\nor {CALL}?\n</think>\n\n{CALL}"
    with served_with(model_with(tmp_path, THINKS), forced(inside)) as client:
        found = post(client, CHAT, {"messages": HELLO, "tools": tools})["choices"][0]
        assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["f"]
        assert found["message"]["reasoning_content"] == f"or {CALL}?" and found["message"]["content"] is None
        blocks = post(client, MESSAGES, ANTHROPIC | {"max_tokens": 300, "tools": [
            {"name": "f", "input_schema": {"type": "object"}}]})["content"]  # fmt: skip
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]


def test_an_answer_that_ends_inside_is_all_reasoning(thinker: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 9}
    found = post(thinker, CHAT, body)
    message = found["choices"][0]["message"]
    assert message["content"] == "" and "a plan".startswith(message["reasoning_content"])
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9
    assert found["choices"][0]["finish_reason"] == "length"
    stopped = post(thinker, MESSAGES, ANTHROPIC | {"stop_sequences": ["plan"]})
    assert stopped["stop_sequence"] == "plan", "stop texts hold in the reasoning too"
    assert [block["type"] for block in stopped["content"]] == ["thinking", "text"]
    behind = post(thinker, MESSAGES, ANTHROPIC | {"stop_sequences": ["es"]})
    assert behind["stop_sequence"] == "es" and behind["content"][1]["text"] == "y"


def test_a_structure_begins_behind_reasoning_that_the_prompt_opens(tmp_path: Path) -> None:
    fields = {"messages": HELLO, "max_tokens": 400, "temperature": 1.0, "seed": 3}
    with served_with(model_with(tmp_path, OPENS)) as client:
        found = post(client, CHAT, fields | {"regex": "(yes|no)"})["choices"][0]
        message = found["message"]
        assert message["reasoning_content"], "the model reasons freely"
        assert found["finish_reason"] == "length" or message["content"] in ("yes", "no")
        free = post(client, CHAT, fields | {"regex": "ab</think>yes", "free_until": "a"})["choices"][0]["message"]
        assert free["content"] in ("yes", ""), "a request may say itself where its structure begins"


def test_marks_that_print_nothing_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Magistral's [THINK] is a control token; two of the tiny model's stand for it here."""
    monkeypatch.setattr(marks_module, "KNOWN_MARKS", (Marks("<|user|>", "<|assistant|>"),))
    path = model_with(tmp_path, TEMPLATE)
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as model:
        opening, closing = model.encode("<|user|><|assistant|>", parse_special=True)
    grammar = GenerateOptions(max_tokens=60, grammar=f'start: <[{opening}]> "a plan" <[{closing}]> "yes"')
    with served_with(path, grammar) as client:
        (choice,) = post(client, CHAT, {"messages": HELLO, "logprobs": True})["choices"]
        assert choice["message"]["content"] == "yes" and choice["message"]["reasoning_content"] == "a plan"
        names = [each["token"] for each in choice["logprobs"]["reasoning_content"]]
        assert (names[0], names[-1]) == ("<|user|>", "<|assistant|>")
    monkeypatch.setattr(marks_module, "KNOWN_MARKS", (Marks("<|assistant|>", "<|end|>"),))
    with served_with(path) as client:
        refused = client.post(CHAT, json={"messages": HELLO, "regex": "yes"})
        assert refused.status_code == 400 and "turn reasoning off" in refused.json()["error"]["message"]


def test_the_chat_keeps_the_answer_and_not_the_reasoning(tmp_path: Path) -> None:
    path = model_with(tmp_path, THINKS)
    saved = tmp_path / "chat.json"
    words = ["chat", str(path), "--no-reproducible", "--seed", "1", "--regex", forced(WHOLE).regex or ""]
    lines = f"hello\nmore\n/save {saved}\n"
    found = CliRunner().invoke(cli, words, input=lines)
    assert found.exit_code == 0, found.output
    assert found.stdout == f"{WHOLE}\n{WHOLE}\n", "through a pipe the text is as the model wrote it"
    answers = [each for each in json.loads(saved.read_text())["messages"] if each["role"] == "assistant"]
    assert [(each["content"], each["reasoning_content"]) for each in answers] == [("yes", "a plan")] * 2
    found = CliRunner().invoke(cli, [*words, "--reasoning-format", "none"], input=lines)
    answers = [each for each in json.loads(saved.read_text())["messages"] if each["role"] == "assistant"]
    assert [each["content"] for each in answers] == [WHOLE] * 2
