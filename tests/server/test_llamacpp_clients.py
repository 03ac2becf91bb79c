"""Requests as llama.cpp's page and its clients send them: what asks for nothing else is accepted, the rest refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.server.web import NOTES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "I want a table for two in San Jose."}]
BODIES = {CHAT: {"messages": QUESTION}, COMPLETION: {"prompt": "Once"}}
# What llama-server's own page sends with its settings untouched.
PAGE: dict[str, Any] = {
    "stream": False, "reasoning_format": "auto", "backend_sampling": False, "temperature": 0.8, "max_tokens": -1,
    "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0,
    "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "timings_per_token": True, "return_progress": True, "cache_prompt": True,
}  # fmt: skip


def post(client: TestClient, path: str, **fields: Any) -> Any:
    answered = client.post(path, json=BODIES[path] | {"max_tokens": 4, "temperature": 0} | fields)
    assert answered.status_code == 200, answered.text
    return answered


def test_what_the_page_sends(client: TestClient):
    answered = post(client, CHAT, **PAGE | {"max_tokens": 4})
    assert "samplers" in answered.headers[NOTES] and answered.headers[NOTES].count(":") == 1
    assert client.post(CHAT, json={"messages": QUESTION} | PAGE | {"seed": 1}).status_code == 200  # without a limit


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"cache_prompt": True, "id_slot": -1, "stop": "", "n_keep": 0, "xtc_probability": 0.0}, ""),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"id_slot": 0}, "id_slot"),
        ({"samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"]}, ""),
        ({"samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"]}, "samplers"),
        ({"samplers": "edkypmxt"}, "samplers"),
        ({"samplers": "etkpm", "adaptive_target": -1.0, "adaptive_decay": 0.9}, ""),
    ],
)
def test_fields_that_change_nothing(client: TestClient, path: str, fields: dict[str, Any], noted: str):
    plain, answered = post(client, path), post(client, path, **fields)
    assert NOTES not in plain.headers
    assert answered.headers.get(NOTES, "").partition(":")[0] == noted
    assert text_of(answered.json()) == text_of(plain.json())


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"mirostat": 2}, "mirostat", "0 turns it off"),
        ({"typical_p": 0.9}, "typical_p", "1 turns it off"),
        ({"dry_multiplier": 0.8}, "dry_multiplier", "not built in"),
        ({"samplers": ["top_k", "temperature"]}, "samplers", "in this order: penalties, temperature"),
        ({"samplers": "kfypmt"}, "samplers", "must be a list"),
        ({"samplers": "kt"}, "samplers", "in this order: penalties, temperature"),
        ({"adaptive_target": 0.5}, "adaptive_target", "-1 turns it off"),
        ({"id_slot": 1}, "id_slot", "from -1 to 0"),
        ({"cache_prompt": "yes"}, "cache_prompt", "true or false"),
        ({"n_predict": 5}, "max", "give one"),
    ],
)
def test_fields_that_would(client: TestClient, path: str, fields: dict[str, Any], param: str, words: str):
    answered = client.post(path, json=BODIES[path] | {"max_tokens": 4} | fields)
    error = answered.json()["error"]
    assert answered.status_code == 400 and words in error["message"] and param in error["param"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_n_predict_is_the_limit(client: TestClient, path: str):
    answer = post(client, path, max_tokens=None, n_predict=2).json()
    assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["finish_reason"] == "length"
    assert post(client, path, n_predict=-1).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("limit", ["max_tokens", "n_predict"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_limit_of_0_only_reads_the_prompt(client: TestClient, path: str, limit: str):
    """llama.vscode sends a chat ahead with n_predict 0, so that the next request finds it in the cache."""
    text = f"A prompt that nothing sent before: {path}, {limit}."
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    read = post(client, path, **body | {"max_tokens": None, limit: 0}).json()
    usage, choice = read["usage"], read["choices"][0]
    assert (text_of(read), choice["finish_reason"], usage["completion_tokens"]) == ("", "length", 0)
    assert read["timings"]["predicted_n"] == 0 < usage["prompt_tokens"] == usage["total_tokens"]
    assert post(client, path, **body).json()["timings"]["cache_n"] >= usage["prompt_tokens"] - 1
    sent = {"max_tokens": None, "stream": True, limit: 0, "logprobs": True if path == CHAT else 1}
    *events, _done, _rest = post(client, path, **body | sent).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert parts[-1]["finish_reason"] == "length"
    assert not any(part.get("text") or part.get("delta", {}).get("content") or part["logprobs"] for part in parts)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_timings_come_with_every_part(client: TestClient, path: str):
    *events, _done, _rest = post(client, path, timings_per_token=True, stream=True).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    counts = [part["timings"]["predicted_n"] for part in parts if part["choices"][0].get("text")]
    assert counts == sorted(counts) and (counts or path == CHAT)


def test_a_schema_of_a_json_object(client: TestClient):
    schema = {"type": "object", "properties": {"n": {"enum": [2, 4]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_object", "schema": schema}
    assert json.loads(text_of(post(client, CHAT, response_format=form, max_tokens=30).json()))["n"] in (2, 4)
    wrong = client.post(CHAT, json={"messages": QUESTION, "response_format": {**form, "schema": {"type": "x"}}})
    assert wrong.json()["error"]["param"] == "response_format.schema"


def test_a_model_that_never_reasons_need_not_be_told(client: TestClient):
    off = post(client, CHAT, chat_template_kwargs={"enable_thinking": False}).json()
    assert off["usage"]["prompt_tokens"] == post(client, CHAT).json()["usage"]["prompt_tokens"]
    on = post(client, CHAT, chat_template_kwargs={"enable_thinking": True})
    assert on.json()["usage"] == off["usage"] and "enable_thinking" in on.headers[NOTES]


def test_fields_that_change_nothing_are_accepted(client: TestClient):
    others = {"session_id": "s", "provider": {"order": ["x"]}, "draft_model": "small", "post_sampling_probs": True}
    found = post(client, CHAT, **others, add_generation_prompt=True, continue_final_message=False)
    assert text_of(found.json()) == text_of(post(client, CHAT).json()) and "draft_model" in found.headers[NOTES]
    timings = found.json()["timings"]
    assert timings["predicted_per_token_ms"] * timings["predicted_per_second"] == pytest.approx(1000)
    assert timings["prompt_per_token_ms"] * timings["prompt_n"] == pytest.approx(timings["prompt_ms"])


def test_where_the_prompt_ends_is_as_in_vllm_and_llama_server(client: TestClient):
    def prompt(**fields: Any) -> str:
        return client.post("/apply-template", json=fields).json()["prompt"]

    begun = [*QUESTION, {"role": "assistant", "content": "Sure, I"}]
    opening = "<|im_start|>assistant\n"
    assert prompt(messages=QUESTION).removesuffix(opening) == prompt(messages=QUESTION, add_generation_prompt=False)
    assert prompt(messages=begun).endswith(f"{opening}Sure, I")
    assert prompt(messages=begun, continue_final_message=True, add_generation_prompt=False) == prompt(messages=begun)
    assert prompt(messages=begun, continue_final_message=False).endswith(f"Sure, I<|im_end|>\n{opening}")
    counted = [
        client.post(path, json={"messages": begun, "continue_final_message": False}).json()["input_tokens"]
        for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
    ]
    chat = post(client, CHAT, messages=begun, continue_final_message=False).json()
    assert counted == [chat["usage"]["prompt_tokens"]] * 2
    for wrong in ({"messages": begun, "add_generation_prompt": True}, {"messages": QUESTION}):
        answered = client.post(CHAT, json=wrong | {"continue_final_message": True})
        assert answered.status_code == 400 and "continue_final_message" in answered.json()["error"]["message"]


def test_responses_are_answered_without_v1_too(client: TestClient):
    body = {"input": "Hi", "max_output_tokens": 2, "temperature": 0}
    with_v1, without = (client.post(path, json=body).json() for path in ("/v1/responses", "/responses"))
    assert with_v1["output"][0]["content"] == without["output"][0]["content"]
    assert client.post("/responses/input_tokens", json={"input": "Hi"}).json()["input_tokens"] > 0
    *_, last = client.post("/responses", json=body | {"stream": True}).text.strip().split("\n\n")
    assert last.startswith("event: response.")


def test_a_prompt_that_does_not_fit_is_told_in_numbers(client: TestClient):
    error = client.post(CHAT, json={"messages": [{"role": "user", "content": "x " * 5000}]}).json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"] == 2048
