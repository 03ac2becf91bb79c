"""Requests as llama.cpp's page and its clients send them: what asks for nothing else is accepted, the rest refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.server.answer import Exchange
from edgespec.server.app import ENDPOINTS
from edgespec.server.native import File, fitted
from edgespec.server.service import Loaded, Service
from edgespec.server.web import NOTES
from edgespec.vocabulary import FimTokens
from serving import client_of, post, serving, streamed
from tiny_gguf import SPECIALS, Shape, write_model

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


def ask(client: TestClient, path: str, **fields: Any) -> Any:
    return post(client, path, BODIES[path] | {"max_tokens": 4, "temperature": 0} | fields)


def test_what_the_page_sends(client: TestClient):
    answered = client.post(CHAT, json=BODIES[CHAT] | PAGE | {"max_tokens": 4})
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
        ({"adaptive_target": -1.0, "adaptive_decay": 0.9, "n_keep": 5}, ""),
    ],
)
def test_fields_that_change_nothing(client: TestClient, path: str, fields: dict[str, Any], noted: str):
    answered = client.post(path, json=BODIES[path] | {"max_tokens": 4, "temperature": 0} | fields)
    assert answered.headers.get(NOTES, "").partition(":")[0] == noted
    assert text_of(answered.json()) == text_of(ask(client, path))


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_n_predict_is_the_limit(client: TestClient, path: str):
    answer = ask(client, path, max_tokens=None, n_predict=2)
    assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["finish_reason"] == "length"
    assert ask(client, path, n_predict=-1)["usage"]["completion_tokens"] == 4
    assert ask(client, path, max_tokens=None, n_predict=0)["usage"]["completion_tokens"] == 1, "as 1"


def test_a_prompt_that_does_not_fit_is_told_in_numbers(client: TestClient):
    for times in (5000, 200_000):  # of the longer one that it cannot fit is known before it is read
        error = client.post(CHAT, json={"messages": [{"role": "user", "content": "x " * times}]}).json()["error"]
        assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
        assert error["n_prompt_tokens"] > error["n_ctx"] == 2048


# -- llama-server's own paths: /completion, and those without /v1


GREEDY = {"temperature": 0, "n_predict": 24}


@pytest.fixture
def expected(model: Model, greedy: Sampling, plain: GenerateOptions) -> Any:
    return model.generate("The capital of", greedy, plain)


def test_a_completion(client: TestClient, expected: Any):
    answer = post(client, "/completions", prompt="The capital of", return_tokens=True, cache_prompt=True, **GREEDY)
    assert (answer["content"], answer["tokens"]) == (expected.text, list(expected.token_ids))
    assert (answer["stop"], answer["truncated"], answer["prompt"]) == (True, False, "The capital of")
    assert answer["stop_type"] == {"length": "limit", "stop": "eos"}[expected.finish_reason]
    assert answer["tokens_predicted"] == len(expected.token_ids) == answer["timings"]["predicted_n"]
    assert answer["tokens_evaluated"] == len(expected.prompt_token_ids)
    assert answer["model"] == "demo"


def test_a_prompt_of_ids_and_several_have_an_answer_each(client: TestClient, expected: Any):
    ids = list(expected.prompt_token_ids)
    assert post(client, "/completion", prompt=ids, **GREEDY)["content"] == expected.text
    found: Any = post(client, "/completion", prompt=["One two", ids], **GREEDY)
    assert [each["index"] for each in found] == [0, 1]
    assert found[0]["content"] == post(client, "/completion", prompt="One two", **GREEDY)["content"]
    assert [each["prompt"] for each in found] == ["One two", "The capital of"]
    drawn = {"prompt": "One two", "n_predict": 12, "temperature": 1, "ignore_eos": True}
    first, second = post(client, "/completion", n=2, seed=7, **drawn)
    assert first["content"] != second["content"] == post(client, "/completion", **drawn, seed=8)["content"]
    some = [each["seed"] for each in post(client, "/completion", n=3, seed=-1, **drawn)]
    assert some == [some[0], some[0] + 1, some[0] + 2]


def test_biases_as_texts_and_as_an_object(client: TestClient, model: Model, expected: Any):
    first = expected.token_ids[0]
    text = model.target.vocabulary.piece(first).decode()
    for biases in ([[text, False]], {str(first): False}, [[first, -50]]):
        biased = post(client, "/completion", prompt="The capital of", logit_bias=biases, return_tokens=True, **GREEDY)
        assert first not in biased["tokens"], biases


# A part of what SillyTavern sends to llama-server with its settings untouched but for the temperature and the length.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "The capital of", "max_new_tokens": 24, "max_tokens": 24, "n_predict": 24, "temperature": 0, "top_p": 1,
    "typical_p": 1, "typical": 1, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1, "rep_pen": 1, "top_k": 0,
    "dry_multiplier": 0, "dry_sequence_breakers": ["\n", ":"], "stopping_strings": ["\nUser:"], "stop": ["\nUser:"],
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "banned_strings": [], "api_type": "llamacpp", "adaptive_target": -0.01, "n_probs": 10, "logprobs": 10, "n": 1,
    "logit_bias": [], "grammar": "", "model": "", "cache_prompt": True, "stream": False,
}  # fmt: skip


def test_what_sillytavern_sends(client: TestClient, expected: Any):
    answered = client.post("/completion", json=SILLYTAVERN)
    assert answered.status_code == 200, answered.text
    assert answered.json()["content"] == expected.text
    noted = [note.partition(":")[0] for note in answered.headers[NOTES].split("; ")]
    assert "samplers" in noted and "'rep_pen'" in noted and "'banned_strings'" not in noted
    assert len(answered.json()["completion_probabilities"][0]["top_logprobs"]) == 10


def test_paths_without_a_version(client: TestClient):
    fields = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
    one, other = (client.post(f"{root}/chat/completions", json=fields).json() for root in ("", "/v1"))
    assert one["choices"] == other["choices"]
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/health").json() == client.get("/health").json()


# -- Filling gaps, as editors ask for it: `suffix` of completions, `/infill`; and control tokens in raw prompts


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GAP: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER}


@pytest.fixture(scope="module")
def coder_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(tmp_path_factory.mktemp("fim") / "coder.gguf", Shape(specials=(*SPECIALS, *FIM)))
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def coder_service(coder_model: Model) -> Iterator[Service]:
    with serving(coder_model, "coder") as service:
        yield service


@pytest.fixture
def loaded(coder_service: Service) -> Loaded:
    return coder_service.require()


@pytest.fixture
def coder(coder_service: Service) -> TestClient:
    return client_of(coder_service)


def writing(text: str) -> str:
    """A grammar of exactly one answer."""
    return f"start: {json.dumps(text)}"


def shown(coder_model: Model, ids: list[int]) -> str:
    """A prompt with its control tokens spelled out."""
    vocabulary = coder_model.target.vocabulary
    pieces = (vocabulary.piece(token_id) or vocabulary.token_name(token_id).encode() for token_id in ids)
    return b"".join(pieces).decode()


def control(coder_model: Model, ids: list[int]) -> list[str]:
    vocabulary = coder_model.target.vocabulary
    return [vocabulary.token_name(token_id) for token_id in ids if not vocabulary.piece(token_id)]


def prompts(path: str, loaded: Loaded, **fields: Any) -> list[list[int]]:
    """The token ids of the prompts that a request asks to go on from."""
    found = ENDPOINTS[path].read(loaded, fields, [])
    assert isinstance(found, Exchange)
    return [[*job.prompt_ids] for job in found.jobs]


def test_a_suffix_makes_a_gap(loaded: Loaded, coder_model: Model) -> None:
    (read,) = prompts(COMPLETION, loaded, prompt=BEFORE, suffix=AFTER)
    assert shown(coder_model, read) == f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    assert prompts(COMPLETION, loaded, prompt=coder_model.encode(BEFORE), suffix=AFTER) == [read]
    _, second = prompts(COMPLETION, loaded, prompt=[BEFORE, "x"], suffix="y")
    assert shown(coder_model, second) == f"{FIM[0]}x{FIM[1]}y{FIM[2]}"
    (first,) = prompts(COMPLETION, loaded, prompt="", suffix=AFTER)
    assert shown(coder_model, first) == f"{FIM[0]}{FIM[1]}{AFTER}{FIM[2]}"
    for is_raw in (True, False):
        assert prompts("/api/generate", loaded, model="coder", prompt=BEFORE, suffix=AFTER, raw=is_raw) == [read]


def test_control_tokens_are_read_in_a_raw_prompt_and_not_in_the_texts_around_a_gap(
    loaded: Loaded, coder_model: Model
) -> None:
    """Editors write the tokens themselves, and other programs the marks of a chat template."""
    (read,) = prompts(COMPLETION, loaded, prompt=f"a{FIM[2]}", suffix=f"{FIM[0]}b<|end|>")
    assert control(coder_model, read) == [*FIM[:3]]
    text = f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    (read,) = prompts(COMPLETION, loaded, prompt=text)
    assert control(coder_model, read) == [*FIM[:3]]
    assert prompts("/api/generate", loaded, model="coder", prompt=text, raw=True) == [read]
    (chat,) = prompts("/api/generate", loaded, model="coder", prompt=text)
    assert not {*control(coder_model, chat)} & {*FIM}, "a chat's message is text"


def test_a_prompt_that_begins_the_text_itself_has_one_begin(tmp_path: Path) -> None:
    path = write_model(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    with serving(path) as service:
        loaded = service.require()
        for path, text in ((COMPLETION, "hi"), (COMPLETION, "<|end|>hi"), ("/completion", "<|end|>hi")):
            assert prompts(path, loaded, prompt=text) == [loaded.model.encode("hi")]


def test_other_files_come_first(loaded: Loaded, coder_model: Model) -> None:
    extra = [{"filename": "a.py", "text": "import b"}, {"filename": "b.py", "text": f"x = 1{FIM[2]}\n"}]
    (read,) = prompts("/infill", loaded, **GAP, input_extra=extra, prompt="a +")
    assert control(coder_model, read) == [FIM[3], FIM[4], FIM[4], FIM[4], *FIM[:3]]
    assert shown(coder_model, read) == (
        f"{FIM[3]}repository\n{FIM[4]}a.py\nimport b\n{FIM[4]}b.py\nx = 1{FIM[2]}\n{FIM[4]}file\n"
        f"{FIM[0]}{BEFORE}a +{FIM[1]}{AFTER}{FIM[2]}"
    )


def test_a_model_without_tokens_for_files_gets_lines_between_them(coder_model: Model) -> None:
    tokens = FimTokens(1, 2, 3)
    ids, is_cut = fitted(coder_model.target.vocabulary, tokens, [7], [8], [File(filename="a.py", text="x")], 100)
    assert not is_cut and ids[-5:] == [1, 7, 2, 8, 3]
    assert coder_model.decode(ids[:-5]) == "\n\n--- snippet ---\n\nx"


@pytest.mark.parametrize("room", range(40, 250, 35))
def test_what_is_nearest_to_the_gap_is_kept(coder_model: Model, room: int) -> None:
    vocabulary = coder_model.target.vocabulary
    tokens = vocabulary.fim
    assert tokens is not None
    before, after = [*range(100)], [*range(100, 150)]
    files = [File(filename=name, text="xyz" * 5) for name in ("far", "near")]
    ids, is_cut = fitted(vocabulary, tokens, before, after, files, room)
    assert len(ids) <= room and is_cut == (room < len(fitted(vocabulary, tokens, before, after, files, 999)[0]))
    start, middle = ids.index(tokens.prefix), ids.index(tokens.suffix)
    kept_before, kept_after = ids[start + 1 : middle], ids[middle + 1 : -1]
    assert before[100 - len(kept_before) :] == kept_before and after[: len(kept_after)] == kept_after
    if len(kept_before) + len(kept_after) < 150:
        assert len(ids) == room and start == 0
        assert len(kept_before) == 100 or len(kept_before) >= 0.7 * (room - 3)
    text = coder_model.decode(ids[:start])
    assert "near" in text or "far" not in text
    assert ("far" in text) is not is_cut


def test_an_answer_in_llama_servers_form(coder: TestClient) -> None:
    answer = post(
        coder, "/infill", **GAP, grammar=writing("a + b"), n_predict=32, seed=-1, samplers=["infill"], cache_prompt=True
    )
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("a + b", True, "eos")
    assert answer["tokens_evaluated"] > 20 and answer["tokens_predicted"] >= 5
    assert not answer["truncated"] and not answer["has_new_line"] and answer["timings"]["predicted_n"] >= 5
    cut = post(coder, "/infill", **GAP, grammar=writing("a + b"), n_predict=2)
    assert cut["stop_type"] == "limit" and "a + b".startswith(cut["content"])
    word = post(coder, "/infill", **GAP, grammar=writing("a + b"), stop=[" +"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("a", "word", " +")


FORMS: dict[str, dict[str, Any]] = {"/completion": {"prompt": "a = "}, "/infill": GAP}


@pytest.mark.parametrize("path", FORMS)
def test_both_paths_take_the_same_fields_and_answer_in_one_form(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"grammar": writing("a + b"), "seed": 5, "n_predict": 32, "lora": [], "t_max_prompt_ms": 500}
    body |= {"n_probs": 2, "return_tokens": True, "logit_bias": [[5, -1.5]], "post_sampling_probs": False, "n": 1}
    whole = coder.post(path, json=body)
    assert "t_max_prompt_ms: the whole prompt is read" in whole.headers[NOTES]
    answer = whole.json()
    parts = streamed(coder, path, **body, timings_per_token=True)
    probs, tokens = answer.pop("completion_probabilities"), answer["tokens"]
    assert answer.keys() == parts[-1].keys() and answer["seed"] == parts[-1]["seed"] == 5
    assert len(probs) == len("a + b") and all(len(each["top_logprobs"]) == 2 for each in probs)
    same = [each for part in parts[:-1] for each in part["completion_probabilities"]]
    assert [each["id"] for each in same] == [each["id"] for each in probs]
    sent = [token for part in parts[:-1] for token in part["tokens"]]
    assert sent == tokens[:-1] and [each["id"] for each in probs] == tokens[: len(probs)]
    assert all(part["timings"]["predicted_n"] for part in parts)
    assert answer["prompt"] == FORMS[path].get("prompt", f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}")


@pytest.mark.parametrize("path", FORMS)
def test_both_paths_end_with_a_block_and_choose_fields(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"grammar": writing("a\n    b\nc"), "n_indent": 4, "response_fields": ["content", "stop_type"]}
    assert post(coder, path, body) == {"content": "a\n    b\n", "stop_type": "limit"}
    assert "[DONE]" not in coder.post(path, json=body | {"stream": True}).text
    *parts, last = streamed(coder, path, **body)
    assert "".join(part["content"] for part in parts) == "a\n    b\n"
    assert last == {"content": "", "stop_type": "limit"}
    long = FORMS[path] | {"grammar": writing("a\n" + "b" * 200), "t_max_predict_ms": 1}
    answer = post(coder, path, long)
    assert len(answer["content"]) < 200 and (answer["stop_type"], answer["truncated"]) == ("limit", False)


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"lora": [{"id": 0, "scale": 0.5}]}, "lora is not supported: this server applies no adapters"),
    ({"n_predict": 4, "max_tokens": 5}, "the same setting"),
    ({"t_max_predict_ms": 2**40}, "t_max_predict_ms must be an integer <="),
    ({"response_fields": "content"}, "response_fields must be an array"),
    ({"logit_bias": [5]}, "number or false"),
    ({"logit_bias": [[-1, 1]]}, "token ids"),
]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        *((path, body | fields, said) for path, body in FORMS.items() for fields, said in BOTH),
        ("/completion", {"prompt": ["a", ""]}, "not empty"),
        ("/completion", {"prompt": [1, "a"]}, "prompt must be a text"),
        ("/completion", {"prompt": ["a"] * 17}, "at most 16 are allowed"),
        ("/completion", {"prompt": ["a"] * 9, "n": 2}, "at most 16 answers"),
        ("/completion", {"prompt": None}, "prompt is missing"),
        ("/infill", {"input_prefix": "a"}, "input_suffix is missing"),
        ("/infill", GAP | {"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
    ],
)
def test_a_wrong_request_names_its_field(coder: TestClient, path: str, fields: dict[str, Any], said: str) -> None:
    answered = coder.post(path, json=fields)
    assert answered.status_code == 400 and said in answered.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("  a\nb", "  a\n"),
        ("a\n    b\n\n\tc", "a\n    b\n\n\t"),
        ("a\n    b\n", "a\n    b\n"),
        ("a\n     b\n    c\n   d", "a\n     b\n    c\n   "),
    ],
)
def test_where_a_block_ends(coder: TestClient, text: str, kept: str) -> None:
    assert post(coder, "/infill", **GAP, grammar=writing(text), n_indent=4)["content"] == kept


def test_ollama_names_the_capability(coder: TestClient, client: TestClient) -> None:
    assert "insert" in post(coder, "/api/show", model="coder")["capabilities"]
    body = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "stream": False, "options": {"num_predict": 3}}
    assert post(coder, "/api/generate", body)["done_reason"] in ("length", "stop")
    refused = coder.post("/api/generate", json=body | {"system": "Be brief."})
    assert refused.status_code == 400 and "system" in refused.json()["error"]


def test_other_models_refuse_by_name(client: TestClient) -> None:
    for path, body in (
        ("/infill", GAP),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "demo", "prompt": "a", "suffix": "b"}),
    ):
        answered = client.post(path, json=body)
        assert answered.status_code == 501, answered.text
        assert "Qwen2.5-Coder" in json.dumps(answered.json())
    assert client.post("/v1/completions", json={"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200
