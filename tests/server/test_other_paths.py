"""/v1/completions, models, tokenising, health, properties and metrics."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec import GenerateOptions, Model, Sampling
from edgespec.reports import RoundRecord
from edgespec.server.app import create_app
from edgespec.server.metrics import Metrics
from edgespec.server.service import Service, Services
from serving import BASE_URL, client_of, post, serving, streamed
from waiting import until

COMPLETE = "/v1/completions"


def test_texts_are_continued(client: TestClient, model: Model, greedy: Sampling, plain: GenerateOptions):
    expected = model.generate("The capital of", greedy, plain)
    fields = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0}
    answer = client.post(COMPLETE, json=fields).json()
    assert answer["choices"][0]["text"] == expected.text and answer["object"] == "text_completion"
    ids = list(expected.prompt_token_ids)
    both = client.post(COMPLETE, json=fields | {"prompt": [ids, ids], "n": 2, "max_tokens": 4}).json()
    assert len({choice["text"] for choice in both["choices"]}) == 1
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) and both["usage"]["completion_tokens"] == 16


def test_a_streamed_completion(client: TestClient, model: Model, greedy: Sampling, plain: GenerateOptions):
    expected = model.generate("The capital of", greedy, replace(plain, top_logprobs=2))
    fields = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0, "logprobs": 2, "stream": True}
    *parts, last = streamed(client, COMPLETE, fields, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens"] == len(expected.token_ids)
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == expected.text
    assert choices[-1]["finish_reason"] == expected.finish_reason
    logprobs = [each for choice in choices[:-1] for each in choice["logprobs"]["token_logprobs"]]
    assert logprobs == list(expected.logprobs[: len(logprobs)]) and len(logprobs) >= len(expected.logprobs) - 1
    whole = client.post(COMPLETE, json=fields | {"stream": False}).json()["choices"][0]["logprobs"]
    offsets = [each for choice in choices[:-1] for each in choice["logprobs"]["text_offset"]]
    assert whole["text_offset"] == offsets and offsets[0] == 0 and offsets == sorted(set(offsets))


def test_log_probabilities_of_parts_of_characters(client: TestClient):
    fields = {"prompt": "日本語の", "max_tokens": 60, "temperature": 2, "top_k": 0, "seed": 1, "logprobs": 5}
    choice = client.post(COMPLETE, json=fields).json()["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    assert all(len(top) == 5 for top in found["top_logprobs"])
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][-1] <= len(text)


def test_an_answer_that_the_end_of_the_server_cuts_off_says_so(model: Model):
    with serving(model, "demo") as service, ThreadPoolExecutor(1) as pool:
        services = Services(service)
        client = TestClient(create_app(services), base_url=BASE_URL)
        fields = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True}
        asked = pool.submit(client.post, COMPLETE, json=fields)
        until(lambda: services.num_running == 1)
        services.end_answers()
        assert asked.result().status_code == 503 and asked.result().json()["error"]["code"] == "stopping"


def test_control_tokens_are_read_in_raw_prompts_and_where_they_are_asked_for(client: TestClient, model: Model):
    text = "a<|im_end|>"
    ids = client.post("/tokenize", json={"content": text}).json()["tokens"]
    special = client.post("/tokenize", json={"content": text, "parse_special": True}).json()["tokens"]
    assert len(special) < len(ids)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    assert client.post("/detokenize", json={"tokens": special}).json() == {"content": "a"}
    assert client.post(COMPLETE, json={"prompt": text, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(
        model.encode(text, parse_special=True)
    )


def test_the_model_is_listed(client: TestClient, model: Model):
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["id"] == "demo" and listed["meta"]["n_ctx"] == model.context_length
    assert client.get("/v1/models/demo").json() == listed
    assert (listed["type"], listed["display_name"]) == ("model", "demo")  # Anthropic's
    assert datetime.fromisoformat(listed["created_at"]).timestamp() == listed["created"]
    pages = client.get("/v1/models").json()
    assert (pages["has_more"], pages["first_id"], pages["last_id"]) == (False, "demo", "demo")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_a_chat_model_says_why_it_gives_none(client: TestClient, path: str):
    answered = client.post(path, json={"input": "x", "prompt": "x"})
    assert answered.status_code == 501
    assert "pooling_type" in answered.text and "pooling=" in answered.text
    assert "embedding" not in client.post("/api/show", json={}).json()["capabilities"]


def test_properties_hold_no_path(client: TestClient, model: Model):
    answered = client.get("/props")
    assert answered.json()["default_generation_settings"]["n_ctx"] == model.context_length
    assert str(model.pair.files["target"].path.parent) not in answered.text


def test_before_the_model_is_loaded(model: Model):
    service = Service("demo")
    client = client_of(service)
    assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "loading"})
    assert "edgespec_model_loaded 0" in client.get("/metrics").text
    service.use(model)
    assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0, "preparing": 0}
    service.require().scheduler.close()


REPEATED = {"prompt": "one two three one two three one two", "max_tokens": 40, "temperature": 0}
DRAFTING = REPEATED | {"speculative": {"drafter": "model", "draft_length": 3}}


def complete(client: TestClient, **fields: Any) -> dict[str, Any]:
    return post(client, COMPLETE, fields)


def metrics(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_tokens_and_accepted_positions_and_have_histograms_of_latencies(client: TestClient):
    answer = complete(client, **REPEATED, speculative={"draft_length": 3})
    timings, reason = answer["timings"], answer["choices"][0]["finish_reason"]
    client.get("/secret/path")
    text = client.get("/metrics").text
    assert all(re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{.+\})? [\d.e+-]+", line) for line in text.splitlines())
    found = metrics(client)
    assert found["edgespec_tokens_total"] == timings["predicted_n"]
    assert found["edgespec_draft_tokens_total"] == timings["draft_n"]
    positions = [found.get(f'edgespec_draft_tokens_accepted_per_position_total{{position="{i}"}}', 0) for i in range(3)]
    assert sum(positions) == found["edgespec_draft_tokens_accepted_total"] == timings["draft_n_accepted"] > 0
    assert positions == sorted(positions, reverse=True)
    assert found['edgespec_http_requests_total{path="/v1/completions",status="200"}'] == 1
    assert found['edgespec_http_requests_total{path="other",status="404"}'] == 1 and "secret" not in text
    assert found[f'edgespec_generations_total{{reason="{reason}"}}'] == 1
    complete(client, **REPEATED)
    found = metrics(client)
    for name in ("edgespec_time_to_first_token_seconds", "edgespec_request_duration_seconds"):
        buckets = [value for key, value in found.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"{name}_count"] == 2
        assert found[f"{name}_sum"] > 0
    first, whole = (found[f"edgespec_{kind}_seconds_sum"] for kind in ("time_to_first_token", "request_duration"))
    assert first <= whole


# -- What an operator sees of drafting and speed: the log line of an answer, `timings`, and /metrics


def test_a_log_line_tells_speed_and_drafting(client: TestClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "edgespec")
    found = complete(client, **DRAFTING)["timings"]
    complete(client, **REPEATED, speculative=False)
    drafted, plain = [line for line in caplog.messages if line.startswith("answer: ")]
    shown = f"{found['draft_n_accepted']} of {found['draft_n']} drafted tokens accepted"
    assert re.match(rf"answer: {found['predicted_n']} tokens at [\d.]+ tokens/s \(\w+\)", drafted), drafted
    assert shown in drafted and f"model {found['draft_n']}" in drafted
    assert plain.endswith("nothing drafted: off")
    assert not any("one two" in line for line in caplog.messages)


def test_positions_of_a_tree_are_counted_once():
    found = Metrics()
    found.count_round(RoundRecord(9, "tree", 5, 2, (), 0.0, 0.1, tree_depth=3))
    assert (found.drafted_at, found.accepted_at) == ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1})
