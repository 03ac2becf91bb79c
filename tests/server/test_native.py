"""llama-server's own paths: /completion, /apply-template, and those without /v1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from asgi_client import Client
from edgespec import GenerateOptions, Model, Sampling
from edgespec.server.app import create_app
from edgespec.server.scheduler import Scheduler
from edgespec.server.service import Service
from edgespec.server.web import NOTES
from serving import BASE_URL
from waiting import reached

MESSAGES = [{"role": "user", "content": "Find a hotel in Paris."}]
GREEDY = {"temperature": 0, "n_predict": 24}


def native(client: TestClient, path: str = "/completion", **fields: Any) -> dict[str, Any]:
    answered = client.post(path, json=fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


@pytest.fixture
def expected(model: Model, greedy: Sampling, plain: GenerateOptions) -> Any:
    return model.generate("The capital of", greedy, plain)


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion(client: TestClient, expected: Any, path: str):
    answer = native(client, path, prompt="The capital of", return_tokens=True, cache_prompt=True, **GREEDY)
    assert (answer["content"], answer["tokens"]) == (expected.text, list(expected.token_ids))
    assert (answer["stop"], answer["truncated"], answer["prompt"]) == (True, False, "The capital of")
    assert answer["stop_type"] == {"length": "limit", "stop": "eos"}[expected.finish_reason]
    assert answer["tokens_predicted"] == len(expected.token_ids) == answer["timings"]["predicted_n"]
    assert answer["tokens_evaluated"] == len(expected.prompt_token_ids)
    assert answer["generation_settings"]["n_predict"] == 24 and answer["model"] == "demo"


def test_the_stop_word_is_named(client: TestClient, expected: Any):
    word = expected.text.split()[2]
    answer = native(client, prompt="The capital of", stop=["never", word], **GREEDY)
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert answer["content"] == expected.text.partition(word)[0] and answer["tokens"] == []


def events(client: TestClient, **fields: Any) -> Iterator[dict[str, Any]]:
    text = client.post("/completion", json=fields | {"stream": True}).text
    assert "[DONE]" not in text
    for event in text.removesuffix("\n\n").split("\n\n"):
        yield json.loads(event.removeprefix("data: "))


def test_a_streamed_completion(client: TestClient, expected: Any):
    *parts, last = events(client, prompt="The capital of", n_probs=2, timings_per_token=True, **GREEDY)
    assert "".join(part["content"] for part in parts) == expected.text
    assert [part["stop"] for part in (*parts, last)] == [False] * len(parts) + [True]
    assert [token for part in parts for token in part["tokens"]] == list(expected.token_ids)
    assert all(part["timings"]["predicted_n"] for part in parts)
    probs = [each for part in parts for each in part["completion_probabilities"]]
    whole = native(client, prompt="The capital of", n_probs=2, **GREEDY)
    assert probs == whole["completion_probabilities"] and len(probs[0]["top_logprobs"]) == 2
    assert probs[0]["id"] == expected.token_ids[0] == probs[0]["top_logprobs"][0]["id"]
    assert last["content"] == "" and last["timings"]["predicted_n"] == len(expected.token_ids)


def test_an_applied_template_can_be_continued(client: TestClient, model: Model, greedy: Sampling):
    expected = model.chat(MESSAGES, greedy, GenerateOptions(max_tokens=24, drafter="none")).result()
    prompt = native(client, "/apply-template", messages=MESSAGES)["prompt"]
    assert MESSAGES[0]["content"] in prompt and "<|im_start|>" in prompt
    answer = native(client, prompt=prompt, **GREEDY)
    assert answer["content"] == expected.text
    assert answer["tokens_evaluated"] == len(expected.prompt_token_ids)
    begun = [*MESSAGES, {"role": "assistant", "content": "There is one "}]
    assert native(client, "/apply-template", messages=begun)["prompt"] == prompt + "There is one "
    tools = [{"type": "function", "function": {"name": "GetWeather", "parameters": {"type": "object"}}}]
    assert "GetWeather" in native(client, "/apply-template", messages=MESSAGES, tools=tools)["prompt"]
    assert client.post("/apply-template", json={"messages": []}).status_code == 400


def test_a_prompt_of_texts_and_ids(client: TestClient, model: Model, expected: Any):
    ids = list(expected.prompt_token_ids)
    assert native(client, prompt=ids, **GREEDY)["content"] == expected.text
    assert native(client, prompt=["The capital of"], **GREEDY)["content"] == expected.text
    mixed = native(client, prompt=[ids[0], model.decode(ids[1:])], **GREEDY)
    assert mixed["content"] == expected.text and mixed["prompt"] == "The capital of"


def test_biases_as_pairs(client: TestClient, expected: Any):
    first = expected.token_ids[0]
    biased = native(client, prompt="The capital of", logit_bias=[[first, False]], return_tokens=True, **GREEDY)
    assert biased["tokens"][0] != first


def test_biases_as_texts_and_as_an_object(client: TestClient, model: Model, expected: Any):
    """As in llama-server: the bias of a text is that of each of its tokens, and those of a token add up."""
    first = expected.token_ids[0]
    text = model.target.vocabulary.piece(first).decode()
    assert model.target.vocabulary.encode(text) == [first]
    given: tuple[Any, ...] = ([[text, False]], {text: -50}, {str(first): False}, [[first, -25], [text, -25]])
    for biases in given:
        biased = native(client, prompt="The capital of", logit_bias=biases, return_tokens=True, **GREEDY)
        assert first not in biased["tokens"], biases
    undone = native(client, prompt="The capital of", logit_bias=[[first, -50], [text, 50]], **GREEDY)
    assert undone["content"] == expected.text


def test_several_prompts_have_an_answer_each(client: TestClient, model: Model, expected: Any):
    ids = list(expected.prompt_token_ids)
    found: Any = native(client, prompt=["One two", ids, ["The capital", " of"]], **GREEDY)
    assert [each["index"] for each in found] == [0, 1, 2]
    assert found[0]["content"] == native(client, prompt="One two", **GREEDY)["content"]
    assert found[1]["content"] == found[2]["content"] == expected.text
    assert [each["prompt"] for each in found] == ["One two", "The capital of", "The capital of"]
    drawn = {"prompt": "One two", "n_predict": 12, "temperature": 1, "seed": 7, "ignore_eos": True}
    first, second = native(client, n_cmpl=2, **drawn)
    assert first["content"] != second["content"] == native(client, **drawn | {"seed": 8})["content"]
    some = [each["generation_settings"]["seed"] for each in native(client, n_cmpl=3, **drawn | {"seed": -1})]
    assert some == [some[0], some[0] + 1, some[0] + 2]


def test_what_a_client_gets_that_hangs_up(service: Service, scheduler: Scheduler):
    """Both answers end: the one that runs and the one that waits."""

    async def main() -> None:
        fields = {"prompt": "Once", "n_cmpl": 2, "ignore_eos": True, "n_indent": 2, "t_max_predict_ms": 60_000}
        for is_stream in (True, False):
            client = Client(create_app(service), "/completion", messages=None, stream=is_stream, **fields)
            await reached(lambda: scheduler.num_running == 1)
            client.leave()
            await client.task
            await reached(lambda: scheduler.num_running == scheduler.num_waiting == 0)

    asyncio.run(main())


# What SillyTavern sends to llama-server with its settings untouched but for the temperature and the length.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "The capital of", "max_new_tokens": 24, "max_tokens": 24, "logprobs": 10, "temperature": 0, "top_p": 1,
    "typical_p": 1, "typical": 1, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0,
    "top_k": 0, "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n", ":"],
    "dry_penalty_last_n": 0, "max_tokens_second": 0, "stopping_strings": ["\nUser:"], "stop": ["\nUser:"],
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True, "include_reasoning": True,
    "top_a": 0, "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "",
    "banned_strings": [], "api_type": "llamacpp", "api_server": "http://127.0.0.1:8080", "xtc_threshold": 0.1,
    "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0, "min_keep": 0, "adaptive_target": -0.01,
    "adaptive_decay": 0.9, "rep_pen": 1, "rep_pen_range": 0, "repetition_penalty_range": 0, "guidance_scale": 1,
    "negative_prompt": "", "repeat_penalty": 1, "repeat_last_n": 0, "n_predict": 24, "num_predict": 24,
    "num_ctx": 8192, "mirostat": 0, "ignore_eos": False, "n_probs": 10, "rep_pen_slope": 1, "n": 1, "logit_bias": [],
    "grammar": "", "cache_prompt": True, "model": "", "stream": False,
}  # fmt: skip


def test_what_sillytavern_sends(client: TestClient, expected: Any):
    answered = client.post("/completion", json=SILLYTAVERN)
    assert answered.status_code == 200, answered.text
    assert answered.json()["content"] == expected.text and answered.headers[NOTES].startswith("samplers: ")
    assert len(answered.json()["completion_probabilities"][0]["top_logprobs"]) == 10
    banned = client.post("/completion", json=SILLYTAVERN | {"banned_strings": ["Paris"]})
    assert "banned_strings: as in llama-server there is no such setting" in banned.headers[NOTES]
    longer = client.post("/completion", json=SILLYTAVERN | {"max_new_tokens": 25})
    assert longer.status_code == 400 and "use n_predict" in longer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a", ""]}, "prompt must not be empty"),
        ({"prompt": ["a", None]}, "prompt must be one prompt"),
        ({"prompt": ["a"] * 17}, "at most 16 are allowed"),
        ({"prompt": ["a"] * 9, "n_cmpl": 2}, "at most 16 answers"),
        ({"prompt": [True]}, "prompt must be one prompt"),
        ({"prompt": None}, "prompt is missing: give a string or a list"),
        ({"prompt": {"prompt_string": "x"}}, "prompt must be a string or a list"),
        ({"prompt": "x", "n_probs": 99}, "n_probs must be"),
        ({"prompt": "x", "mirostat": 2}, "mirostat is not supported"),
        ({"prompt": "x", "typical_p": 0.5}, "typical_p is not supported"),
        ({"prompt": "x", "logit_bias": [[1]]}, "logit_bias must be a list of pairs"),
        ({"prompt": "x", "n_predcit": 4}, "did you mean 'n_predict'"),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], words: str):
    answered = client.post("/completion", json=fields)
    assert answered.status_code == 400 and words in answered.json()["error"]["message"]


def test_paths_without_a_version(client: TestClient):
    fields = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    one, other = (client.post(f"{root}/chat/completions", json=fields).json() for root in ("", "/v1"))
    assert one["choices"] == other["choices"]
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/health").json() == client.get("/health").json()


def test_input_tokens_are_counted(client: TestClient, model: Model):
    fields = {"input": MESSAGES[0]["content"], "instructions": "Be brief."}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    counted = native(client, "/v1/responses/input_tokens", **fields)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(model.encode_chat(messages))}


def test_the_health_path_needs_no_key(service: Service):
    service.api_key = "secret"
    client = TestClient(create_app(service), base_url=BASE_URL)
    assert client.get("/v1/health").status_code == 200
    assert client.get("/props").status_code == client.post("/completion", json={}).status_code == 401


def test_a_prompt_that_is_read_tells_its_progress(client: TestClient):
    fields = {"prompt": "one two three " * 100, "return_progress": True, "stream": True, "samplers": [], **GREEDY}
    events = client.post("/completion", json=fields).text.removesuffix("\n\n").split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    told = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert told[-1]["processed"] == told[-1]["total"] == parts[-1]["tokens_evaluated"] and len(told) > 1
    assert all(part["content"] == "" for part in parts[: len(told)])
