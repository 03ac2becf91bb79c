"""Bad requests: one clear 4xx each, in the protocol's shape, without a path or a traceback; and who may ask at all."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.config.options import ServeOptions
from edgespec.errors import EngineError, ModelFileError, Unreachable
from edgespec.server import facts
from edgespec.server.http_errors import as_http_error
from edgespec.server.run import hosts_of
from edgespec.server.service import RequestLimits, Service
from edgespec.server.web import NOTES
from serving import BASE_URL, client_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


BAD = {"type": "string", "pattern": "("}
BAD_FORM = {"type": "json_schema", "schema": BAD}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"messages": MESSAGES},
}
# Fields, which one is named, and what is said of it: what both of OpenAI's older protocols refuse alike, then each.
ALIKE: list[tuple[dict[str, Any], str | None, str]] = [
    ({"mirostat": 2}, "mirostat", "0 turns it off"),
    ({"dry_multiplier": 0.8}, "dry_multiplier", "not built in"),
    ({"max_tokens": 4, "n_predict": 5}, "max_tokens", "give one"),
]
WRONG: dict[str, list[tuple[dict[str, Any], str | None, str]]] = {
    "/v1/completions": ALIKE,
    CHAT: [
        *ALIKE,
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, None, "empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, None, "allowed: system, user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "only text is"),
        ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
        ({"n": 6}, "n", "at most 5"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "digits"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "vocabulary"),
        ({"top_logprobs": 5}, "top_logprobs", "logprobs: true"),
        ({"ignore_eos": True, "grammar": "start: /a+/"}, "grammar", "ignore_eos contradicts"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "did you mean"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"speculative": 4}, "speculative", "must be a boolean or an object"),
        ({"speculative": {"drafters": "x"}}, "speculative.drafters", "did you mean 'drafter'"),
        ({"speculative": {"draft_length": 65}}, "draft_length", "from 0 to 64"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "parts of text"),
    ],
    "/v1/responses": [
        ({}, "input", "missing"),
        ({"input": ["x"]}, "input.0", "must be a message"),
        ({"input": [{"type": "reasoning"}]}, None, "empty"),
        ({"input": "x", "previous_response_id": "a"}, "previous_response_id", "stores no responses"),
        ({"input": "x", "tools": [{"type": "local_shell"}]}, "tools.0", "function"),
        ({"input": "x", "text": {"format": BAD_FORM}}, "text.format.schema", "text.format.schema cannot be used"),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, None, "max_tokens is missing"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, None, "prompt is too long: the prompt has"),
        ({"tools": [{"name": "f"}]}, None, "input_schema"),
        ({"tool_choice": {"type": "any"}}, None, "no tools are given"),
        ({"thinking": {"type": "on"}}, None, "adaptive, disabled, enabled"),
        ({"mcp_servers": [{"type": "url"}]}, None, "runs no tools itself"),
        ({"thread": {"type": "create"}}, None, "thread is not supported: no conversation is stored"),
    ],
    "/api/chat": [
        ({"format": "xml"}, None, "json or a JSON schema"),
        ({"think": True}, None, "not supported"),
        ({"options": {"num_ctx": 10**6}, "messages": [{"role": "user", "content": "x " * 5000}]}, None, "--ctx-size"),
        ({"options": {"typical_p": 0.5}}, None, "options.typical_p is not supported"),
        ({"top_logprobs": 3}, None, "use /v1/chat/completions"),
        ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, None, "only text is"),
        ({"format": BAD}, None, "format cannot be used"),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"), [(path, *case) for path, cases in WRONG.items() for case in cases]
)
def test_a_bad_field_is_named_in_the_shape_of_its_protocol(
    client: TestClient, path: str, fields: dict[str, Any], param: str | None, words: str
):
    answered = client.post(path, json=BODIES[path] | fields)
    body, error = answered.json(), answered.json()["error"]
    assert answered.status_code == 400, error
    if path == "/api/chat":
        assert words in error
        return
    assert error["type"] == "invalid_request_error" and words in error["message"]
    if path == "/v1/messages":
        assert body["type"] == "error"
        # At this code Anthropic's SDK (its tool runner) sends whole conversations instead.
        unthreaded = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error.get("details") == (unthreaded if "thread" in fields else None)
    else:
        assert error.keys() == {"message", "type", "param", "code"} and error["param"] == param


def test_null_and_harmless_fields_are_accepted(client: TestClient):
    fields = {"stop": None, "tools": None, "logit_bias": None, "user": "me", "metadata": {"a": "b"}, "n": None}
    answered = client.post(
        CHAT, json={"messages": MESSAGES, "max_tokens": 1, "response_format": {"type": "text"}} | fields
    )
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    ("path", "fields", "note"),
    [
        (CHAT, {"temprature": 1, "max_tokens": 1}, "'temprature': unknown field; did you mean 'temperature'?"),
        ("/v1/responses", {"input": "x", "max_tokens": 1, "max_output_tokens": 1}, "'max_tokens': unknown field"),
        ("/api/chat", {"stream": False, "options": {"top_q": 1, "num_predict": 1}}, "'options.top_q': unknown field"),
        ("/completion", {"prompt": "x", "n_predict": 1, "return_token": 1}, "did you mean 'return_tokens'"),
    ],
)
def test_an_unknown_field_is_a_note(client: TestClient, path: str, fields: dict[str, Any], note: str):
    answered = client.post(path, json=BODIES.get(path, {}) | fields)
    assert answered.status_code == 200 and note in answered.headers[NOTES]


def test_a_model_that_is_alone_answers_to_any_name(service: Service):
    service.aliases = ("gpt-5", "demo", "mine")
    client = client_of(service)
    ids = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert ids == ["demo", "gpt-5", "mine"] and client.get("/v1/models/mine").json()["id"] == "mine"
    fields = {"messages": MESSAGES, "max_tokens": 1}
    answered = client.post(CHAT, json={"model": "gpt-5"} | fields)
    assert (answered.status_code, answered.json()["model"]) == (200, "demo") and NOTES not in answered.headers
    ollama = {"model": "mine:latest", "messages": MESSAGES, "options": {"num_predict": 1}, "stream": False}
    assert client.post("/api/chat", json=ollama).status_code == 200
    for path, other in ((CHAT, fields), ("/api/chat", ollama)):
        answered = client.post(path, json=other | {"model": "../other"})
        assert (answered.status_code, answered.json()["model"]) == (200, "demo")
        assert answered.headers[NOTES] == "model: demo answers, the only model here"
    assert client.get("/v1/models/other").json()["id"] == "demo"
    assert client.get("/openapi.json").json()["components"]["schemas"]["Model"]["type"] == ["string", "null"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("POST", "/v1/embeddings", 501),
     ("GET", "/v1/chat/completions/", 404)],
)  # fmt: skip
def test_what_is_not_there(client: TestClient, method: str, path: str, status: int):
    answered = client.request(method, path, json={"input": "x", "model": "demo"})
    assert answered.status_code == status and answered.json()["error"]["message"]
    if status == 405:  # RFC 9110, 15.5.6
        assert {*answered.headers["Allow"].split(", ")} == ({"POST"} if path == CHAT else {"GET", "HEAD"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object, got an array"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "invalid character"),
        (b'{"messages": NaN}', "invalid character (byte 13)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "levels deep"),
        (b"[" * 100_000, "levels deep"),
        (b"[" * 200_000, "more than 131072 lists"),
        (b'{"messages": "\\ud800"}', "surrogate"),
    ],
)
def test_a_body_that_is_no_request(client: TestClient, body: bytes, words: str):
    answered = client.post(CHAT, content=body)
    assert answered.status_code == 400 and words in answered.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 3000}, "3000 messages but the context holds only 2048"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5_000_000}]}, "characters but the context holds only"),
        ("/v1/completions", {"prompt": "a" * 5_000_000}, "5000000 characters but the context"),
        ("/completion", {"prompt": "a" * 5_000_000}, "5000000 characters but the context"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 5_000_000}], "max_tokens": 1}, "characters"),
    ],
)
def test_what_no_context_holds_is_refused_before_it_is_encoded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], words: str
):
    monkeypatch.setattr("edgespec.runtime.encode_messages", lambda *_: pytest.fail("it was encoded"))
    answered = client.post(path, json={"model": "demo"} | fields)
    assert answered.status_code == 400 and words in answered.text and "--ctx-size" in answered.text


def test_a_list_of_tokens_has_a_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(facts, "MOST_TOKENS", 3)
    assert client.post("/tokenize", json={"content": "a b"}).status_code == 200
    answered = client.post("/tokenize", json={"content": "a b c d e"})
    assert answered.status_code == 400 and "tokens; at most 3 are listed" in answered.json()["error"]["message"]


def test_a_large_body_is_refused_and_a_compressed_one_names_its_encoding(service: Service):
    service.limits = RequestLimits(max_body_bytes=1000)
    client = client_of(service)
    assert client.post(CHAT, content=b"x" * 1001).status_code == 413
    answered = client.post(CHAT, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answered.status_code == 415 and "'gzip'" in answered.json()["error"]["message"]


PATHS = (
    *(CHAT, "/v1/completions", "/tokenize", "/detokenize", "/v1/messages", "/api/chat", "/api/generate"),
    *("/completion", "/v1/responses"),
)
VALID: dict[str, Any] = {
    "model": "demo", "messages": MESSAGES, "prompt": "x", "content": "x", "tokens": [1], "max_tokens": 1, "n": 1,
    "stop": ["a"], "temperature": 0.5, "seed": 1, "logit_bias": {"1": 1}, "stream": False, "tools": [TOOL],
    "speculative": {"drafter": "none"}, "response_format": {"type": "text"}, "stream_options": None, "top_p": 0.5,
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, "", "\0", "<|im_end|>", "𝄞" * 99, [], [[]], [None], {}, {"a": {}}, [1, "a"],
    {"role": "user"}, [{"role": "user", "content": {}}], [{"role": "tool", "content": "x"}], ["x", [1, -1]], [10**9],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
)  # fmt: skip


def malformed(draw: random.Random) -> bytes:
    """A request with some fields broken, some missing, one unknown within another; or broken as bytes."""
    fields = {name: value for name, value in VALID.items() if draw.random() < 0.6}
    for name in draw.sample(sorted(VALID), draw.randint(1, 3)):
        fields[name] = draw.choice(VALUES)
    fields["speculative"] = {"x" * draw.randint(1, 9): draw.choice(VALUES[1:])}
    body = json.dumps(fields).encode()
    if draw.random() < 0.3:
        cut = draw.randrange(len(body))
        body = body[:cut] + bytes(draw.choices(range(256), k=draw.randint(0, 8))) + body[cut + draw.randint(1, 8) :]
    return body


def test_malformed_bodies_are_4xx(client: TestClient):
    draw = random.Random(20)
    for _ in range(240):
        path, body = draw.choice(PATHS), malformed(draw)
        answered = client.post(path, content=body)
        if "token" in path and answered.status_code == 200:  # which know no such field
            continue
        assert 400 <= answered.status_code < 500, (path, body, answered.text)
        error = answered.json()["error"]
        assert error if path.startswith("/api/") else error["message"], body


FIRST_READS = """
import sys, threading
from edgespec.server.requests import Fields, read
sys.setswitchinterval(1e-6)
for number in range(300):
    inner = type("Inner", (Fields,), {"__annotations__": {"a": int}, "a": 0})
    outer = type("Outer", (Fields,), {"__annotations__": {f"x{n}": inner | None for n in range(9)},
                                      **{f"x{n}": None for n in range(9)}})
    start = threading.Barrier(4)
    def ask():
        start.wait()
        assert read(outer, {"x3": {"a": 5}}, []).x3.a == 5
    threads = [threading.Thread(target=ask) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print("read")
"""


def test_first_requests_of_many_clients_at_once_are_read():
    ended = subprocess.run([sys.executable, "-c", FIRST_READS], capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"read\n", b"")


# -- who may ask


def test_a_key_is_demanded_everywhere_but_for_health(service: Service):
    client = client_of(service, "secret-äß")
    assert client.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/props", "/nothing"):
        answered = client.get(path)
        assert (answered.status_code, answered.json()["error"]["code"]) == (401, "invalid_api_key")
    for wrong in ({"Authorization": "Bearer x"}, {"Authorization": "secret"}, {"x-api-key": ""}):
        assert client.get("/v1/models", headers=wrong).status_code == 401
    written = {"Authorization": "Bearer secret-äß".encode()}  # as curl sends it
    assert client.get("/v1/models", headers=written).status_code == 200
    client = client_of(service, "secret")
    for right in ({"Authorization": "Bearer secret"}, {"authorization": "bearer secret"}, {"x-api-key": "secret"}):
        assert client.get("/v1/models", headers=right).status_code == 200


def test_pages_of_other_sites_are_refused(service: Service):
    evil, good = {"Origin": "https://evil.example"}, {"Origin": "https://good.example"}
    client = client_of(service)
    assert client.get("/v1/models", headers=evil).json()["error"]["code"] == "wrong_origin"
    assert client.get("/v1/models", headers={"Origin": BASE_URL}).status_code == 200
    assert client.get("/v1/models", headers={"Origin": "http://[x"}).json()["error"]["code"] == "wrong_origin"
    assert "access-control-allow-origin" not in client.get("/v1/models").headers
    client = client_of(service, origins=("https://good.example",))
    assert client.get("/v1/models", headers=evil).status_code == 403
    answered = client.get("/v1/models", headers=good)
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == good["Origin"]
    asked = good | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert client.options(CHAT, headers=asked).status_code == 200
    assert answered.headers["access-control-expose-headers"] == "X-Edgespec-Note"


@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "https://127.0.0.1:3000", "http://[::1]:3000", "http://tauri.localhost",
     "vscode-webview://1hq9", "app://obsidian.md", "tauri://localhost", "file://"],
)  # fmt: skip
def test_pages_and_apps_of_this_machine_may_call(client: TestClient, origin: str):
    answered = client.get("/v1/models", headers={"Origin": origin})
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == origin
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    assert client.options(CHAT, headers=asked).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["null", "http://127.0.0.1.evil.example", "http://localhost@evil.example", "http://evil.example/localhost",
     "https://evil.localhost.example", "chrome-extension://abc", "file://\nhttp://x"],
)  # fmt: skip
def test_what_only_looks_local_is_refused(client: TestClient, origin: str):
    answered = client.get("/v1/models", headers={"Origin": origin})
    assert answered.json()["error"]["code"] == "wrong_origin"
    assert "access-control-allow-origin" not in answered.headers


@pytest.mark.parametrize(
    "host",
    ["host.docker.internal:8080", "box.local", "a.localhost", "LOCALHOST", socket.gethostname(), "192.168.1.7:80",
     "[::1]:8", "8.8.8.8", "localhost."],
)  # fmt: skip
def test_a_local_name_is_allowed(client: TestClient, host: str):
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_further_names_are_allowed(service: Service, address: str):
    options = ServeOptions(host=address, allowed_host=("models.example", "b.example"))
    client = client_of(service, hosts=hosts_of(options))
    assert client.get("/v1/models", headers={"Host": "b.example"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "Models.example:8080"}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "other.example"}).status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "[::1", "127.0.0.1.evil.example", "local", "box.local.example"]
)
def test_a_name_that_points_here_is_refused(client: TestClient, host: str):
    assert client.get("/v1/models", headers={"Host": host}).json()["error"]["code"] == "wrong_host"


def test_a_page_under_a_rented_name_is_not_our_own(service: Service):
    """Also where any host may call: its owner points the name to this machine once the page is loaded."""
    page = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
    assert client_of(service, hosts=()).get("/v1/models", headers=page).json()["error"]["code"] == "wrong_origin"
    assert client_of(service, hosts=("evil.example",)).get("/v1/models", headers=page).status_code == 200
    for own in ("192.168.1.7:8080", "box.local:8080"):
        headers = {"Host": own, "Origin": f"http://{own}"}
        assert client_of(service, hosts=()).get("/v1/models", headers=headers).status_code == 200
    assert client_of(service, "secret", hosts=()).get("/v1/models", headers=page).status_code == 401
    known = page | {"Authorization": "Bearer secret"}
    assert client_of(service, "secret", hosts=()).get("/v1/models", headers=known).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unreachable("the RPC server /home/me:50052 does not answer"), 503),
        (EngineError("/home/me/model.gguf broke"), 500),
        (KeyError("/home/me"), 500),
        (ModelFileError("/home/me/draft.gguf is cut"), 400),
    ],
)
def test_errors_inside_show_neither_paths_nor_addresses(error: Exception, status: int):
    known = as_http_error(error)
    assert known.status == status and "/home" not in json.dumps(known.body("/v1/models"))
