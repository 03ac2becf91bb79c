"""Filling gaps, as editors ask for it: `suffix` of completions, `/infill`; and control tokens in raw prompts.

A tiny model whose vocabulary has Qwen's tokens for that; a grammar says what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import edgespec
from demo import TEST_THREADS
from edgespec import Model
from edgespec.server.app import create_app
from edgespec.server.completions import fill_prompt, read_completion
from edgespec.server.native import File, end_of_block, fitted, read_infill, read_native
from edgespec.server.ollama import read_generate_request
from edgespec.server.service import Limits, Loaded, Service
from edgespec.server.web import NOTES
from edgespec.vocabulary import FimTokens
from serving import BASE_URL
from tiny_gguf import SPECIALS, Shape, write_model

pytest.importorskip("llguidance")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GAP: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER}


@pytest.fixture(scope="module")
def coder_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_model(tmp_path_factory.mktemp("fim") / "coder.gguf", Shape(specials=(*SPECIALS, *FIM)))
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def loaded(coder_model: Model) -> Iterator[Loaded]:
    service = Service("coder", Limits(max_queued=4, timeout_s=60.0))
    service.use(coder_model)
    yield service.require()
    service.require().scheduler.close()


@pytest.fixture
def coder(coder_model: Model) -> Iterator[TestClient]:
    service = Service("coder", Limits(max_queued=4, timeout_s=60.0))
    service.use(coder_model)
    yield TestClient(create_app(service), base_url=BASE_URL)
    service.require().scheduler.close()


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


# -- prompts


def test_the_vocabulary_names_its_tokens(coder_model: Model) -> None:
    vocabulary = coder_model.target.vocabulary
    ids = [vocabulary.encode(name, parse_special=True)[0] for name in FIM]
    assert vocabulary.fim == FimTokens(*ids[:5])
    assert set(ids[3:]) <= vocabulary.end_ids, "a model that goes on with the next file has filled the gap"


def test_a_suffix_makes_a_gap(loaded: Loaded, coder_model: Model) -> None:
    read = read_completion(loaded, {"prompt": BEFORE, "suffix": AFTER}, [])
    assert shown(coder_model, read.jobs[0].prompt_ids) == f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    ids = coder_model.encode(BEFORE)
    assert read_completion(loaded, {"prompt": ids, "suffix": AFTER}, []).jobs[0].prompt_ids == read.jobs[0].prompt_ids
    two = read_completion(loaded, {"prompt": [BEFORE, "x"], "suffix": "y"}, [])
    assert shown(coder_model, two.jobs[1].prompt_ids) == f"{FIM[0]}x{FIM[1]}y{FIM[2]}"
    first = read_completion(loaded, {"prompt": "", "suffix": AFTER}, [])
    assert shown(coder_model, first.jobs[0].prompt_ids) == f"{FIM[0]}{FIM[1]}{AFTER}{FIM[2]}"
    for is_raw in (True, False):
        body = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "raw": is_raw}
        assert read_generate_request(loaded, body, []).jobs[0].prompt_ids == read.jobs[0].prompt_ids


def test_texts_around_a_gap_hold_no_control_tokens(loaded: Loaded, coder_model: Model) -> None:
    read = read_completion(loaded, {"prompt": f"a{FIM[2]}", "suffix": f"{FIM[0]}b<|end|>"}, [])
    assert control(coder_model, read.jobs[0].prompt_ids) == [*FIM[:3]]


def test_control_tokens_of_a_raw_prompt_are_read(loaded: Loaded, coder_model: Model) -> None:
    """Editors write the tokens themselves, and other programs the marks of a chat template."""
    text = f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    (job,) = read_completion(loaded, {"prompt": text}, []).jobs
    assert control(coder_model, job.prompt_ids) == [*FIM[:3]]
    raw = read_generate_request(loaded, {"model": "coder", "prompt": text, "raw": True}, [])
    assert raw.jobs[0].prompt_ids == job.prompt_ids
    chat = read_generate_request(loaded, {"model": "coder", "prompt": text}, [])
    assert not {*control(coder_model, chat.jobs[0].prompt_ids)} & {*FIM}, "a chat's message is text"


def test_a_prompt_that_begins_the_text_itself_has_one_begin(tmp_path: Path) -> None:
    path = write_model(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as opened:
        service = Service("bos", Limits())
        service.use(opened)
        plain, spelled = (read_completion(service.require(), {"prompt": p}, []) for p in ("hi", "<|end|>hi"))
        assert plain.jobs[0].prompt_ids == spelled.jobs[0].prompt_ids == opened.encode("hi")
        native = read_native(service.require(), {"prompt": "<|end|>hi"}, [])
        assert native.jobs[0].prompt_ids == opened.encode("hi")
        service.require().scheduler.close()


def test_other_files_come_first(loaded: Loaded, coder_model: Model) -> None:
    extra = [{"filename": "a.py", "text": "import b"}, {"filename": "b.py", "text": f"x = 1{FIM[2]}\n"}]
    (job,) = read_infill(loaded, GAP | {"input_extra": extra, "prompt": "a +"}, []).jobs
    assert control(coder_model, job.prompt_ids) == [FIM[3], FIM[4], FIM[4], FIM[4], *FIM[:3]]
    assert shown(coder_model, job.prompt_ids) == (
        f"{FIM[3]}repository\n{FIM[4]}a.py\nimport b\n{FIM[4]}b.py\nx = 1{FIM[2]}\n{FIM[4]}file\n"
        f"{FIM[0]}{BEFORE}a +{FIM[1]}{AFTER}{FIM[2]}"
    )


def test_a_model_without_tokens_for_files_gets_lines_between_them(coder_model: Model) -> None:
    tokens = FimTokens(1, 2, 3)
    ids, is_cut = fitted(coder_model.target.vocabulary, tokens, [7], [8], [File(filename="a.py", text="x")], 100)
    assert not is_cut and ids[-5:] == [1, 7, 2, 8, 3]
    assert coder_model.decode(ids[:-5]) == "\n\n--- snippet ---\n\nx"


@pytest.mark.parametrize("room", range(40, 250, 7))
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


# -- answers


def post(client: TestClient, path: str = "/infill", **fields: Any) -> dict[str, Any]:
    answered = client.post(path, json=fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


def test_an_answer_in_llama_servers_form(coder: TestClient) -> None:
    answer = post(coder, **GAP, grammar=writing("a + b"), n_predict=32, seed=-1, samplers=["infill"], cache_prompt=True)
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("a + b", True, "eos")
    assert answer["tokens_evaluated"] > 20 and answer["tokens_predicted"] >= 5
    assert not answer["truncated"] and not answer["has_new_line"] and answer["timings"]["predicted_n"] >= 5
    cut = post(coder, **GAP, grammar=writing("a + b"), n_predict=2)
    assert cut["stop_type"] == "limit" and "a + b".startswith(cut["content"])
    word = post(coder, **GAP, grammar=writing("a + b"), stop=[" +"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("a", "word", " +")


def test_llama_servers_fields_mean_what_they_do_elsewhere(coder: TestClient) -> None:
    off = {"min_keep": 0, "mirostat": 0, "dry_multiplier": 0, "n_keep": 0, "t_max_prompt_ms": 500}
    answered = coder.post("/infill", json=GAP | off | {"n_predict": 1, "cache_prompt": False})
    assert answered.status_code == 200 and "cache_prompt" in answered.headers["X-Edgespec-Note"]
    for wrong in ({"mirostat": 2}, {"id_slot": 99}):
        assert coder.post("/infill", json=GAP | wrong).status_code == 400


def test_drafting_is_told(coder: TestClient) -> None:
    drafting = {"drafter": "ngram", "draft_length": 4}  # what auto does depends on how quick passes are
    timings = post(coder, **GAP, grammar=writing("a" * 40), speculative=drafting)["timings"]
    assert timings["draft_n"] > 0 and sum(timings["draft_n_by_drafter"].values()) == timings["draft_n"]


def test_a_streamed_answer(coder: TestClient) -> None:
    lines = coder.post("/infill", json=GAP | {"grammar": writing("a + b"), "stream": True}).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(part["content"] for part in parts) == "a + b"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_chosen_fields_and_a_prompt_that_is_only_read(coder: TestClient) -> None:
    """llama.vim asks for a few fields, and sends its other files ahead with n_predict 0."""
    fields = ["content", "timings/prompt_n", "timings/nothing", "nothing"]
    answer = post(coder, **GAP, grammar=writing("a"), response_fields=fields)
    assert {*answer} == {"content", "timings/prompt_n"} and answer["content"] == "a"
    read = post(coder, **GAP, n_predict=0)
    assert (read["content"], read["tokens_predicted"]) == ("", 0)
    assert read["tokens_evaluated"] > 20


FORMS: dict[str, dict[str, Any]] = {"/completion": {"prompt": "a = "}, "/infill": GAP}


@pytest.mark.parametrize("path", FORMS)
def test_both_paths_take_the_same_fields_and_answer_in_one_form(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"grammar": writing("a + b"), "seed": 5, "n_predict": 32, "lora": [], "t_max_prompt_ms": 500}
    body |= {"n_probs": 2, "return_tokens": True, "logit_bias": [[5, -1.5]], "post_sampling_probs": False, "n_cmpl": 1}
    whole = coder.post(path, json=body)
    assert whole.headers[NOTES].startswith("t_max_prompt_ms: the whole prompt is read")
    answer = whole.json()
    parts = streamed(coder, path, **body, timings_per_token=True)
    probs, tokens = answer.pop("completion_probabilities"), answer["tokens"]
    assert answer.keys() == parts[-1].keys() and answer["generation_settings"] == parts[-1]["generation_settings"]
    assert len(probs) == len("a + b") and all(len(each["top_logprobs"]) == 2 for each in probs)
    same = [each for part in parts[:-1] for each in part["completion_probabilities"]]
    assert [each["id"] for each in same] == [each["id"] for each in probs]
    sent = [token for part in parts[:-1] for token in part["tokens"]]
    assert sent == tokens[: len(sent)] and [each["id"] for each in probs] == tokens[: len(probs)]
    assert all(part["timings"]["predicted_n"] for part in parts)
    shown = answer["generation_settings"]
    assert (shown["seed"], shown["n_predict"], shown["n_probs"], shown["repeat_last_n"]) == (5, 32, 2, 64)
    assert answer["prompt"] == FORMS[path].get("prompt", f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}")


def streamed(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = client.post(path, json=body | {"stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize("path", FORMS)
def test_both_paths_only_read_a_prompt(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"n_predict": 0, "return_tokens": True, "n_probs": 1}
    answer = post(coder, path, **body)
    said = ("content", "tokens", "tokens_predicted", "completion_probabilities", "stop_type", "stopping_word")
    assert [answer[name] for name in said] == ["", [], 0, [], "limit", ""]
    assert answer["generation_settings"]["n_predict"] == 0 == answer["timings"]["predicted_n"]
    assert answer["tokens_evaluated"] > 3 and not answer["truncated"]
    again = streamed(coder, path, **body, return_progress=True)
    assert [part["stop"] for part in again] == [False] * (len(again) - 1) + [True]
    assert all("prompt_progress" in part and part["content"] == "" for part in again[:-1])
    assert again[-1]["tokens_cached"] >= answer["tokens_evaluated"] - 1, "the next request finds it in the cache"


@pytest.mark.parametrize("path", FORMS)
def test_both_paths_end_with_a_block_and_choose_fields(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"grammar": writing("a\n    b\nc"), "n_indent": 4, "response_fields": ["content", "stop_type"]}
    assert post(coder, path, **body) == {"content": "a\n    b\n", "stop_type": "limit"}
    *parts, last = streamed(coder, path, **body)
    assert "".join(part["content"] for part in parts) == "a\n    b\n"
    assert last == {"content": "", "stop_type": "limit"}
    long = FORMS[path] | {"grammar": writing("a\n" + "b" * 200), "t_max_predict_ms": 1}
    answer = post(coder, path, **long)
    assert len(answer["content"]) < 200 and (answer["stop_type"], answer["truncated"]) == ("limit", False)


@pytest.mark.parametrize("path", FORMS)
def test_several_answers_are_a_list(coder: TestClient, path: str) -> None:
    body = FORMS[path] | {"n_cmpl": 2, "seed": 7, "grammar": writing("a + b")}
    found: Any = post(coder, path, **body)
    assert [(each["index"], each["content"], each["generation_settings"]["seed"]) for each in found] == [
        (0, "a + b", 7),
        (1, "a + b", 8),
    ]
    parts = streamed(coder, path, **body)
    for index in (0, 1):
        assert "".join(part["content"] for part in parts if part["index"] == index) == "a + b"
    assert [part["index"] for part in parts if part["stop"]] == [0, 1]


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora is not supported: this server applies no adapters"),
        ({"lora": {}}, "lora is not supported"),
        ({"post_sampling_probs": 1}, "post_sampling_probs must be true or false"),
        ({"n_predict": -3}, "n_predict must be a whole number from -2"),
        ({"n_predict": 1.5}, "n_predict must be"),
        ({"n_predict": False}, "n_predict must be"),
        ({"n_predict": 2**63}, "n_predict must be"),
        ({"n_predict": 4, "max_tokens": 5}, "the same setting"),
        ({"n_probs": True}, "n_probs must be"),
        ({"n_cmpl": 0}, "n_cmpl must be"),
        ({"n_cmpl": 17}, "n_cmpl must be"),
        ({"t_max_predict_ms": 2**40}, "t_max_predict_ms must be a whole number from -1 to"),
        ({"t_max_prompt_ms": "soon"}, "t_max_prompt_ms must be"),
        ({"n_indent": -1}, "n_indent must be"),
        ({"response_fields": "content"}, "response_fields must be a list"),
        ({"return_tokens": "yes"}, "return_tokens must be"),
        ({"logit_bias": 5}, "logit_bias must be a list"),
        ({"logit_bias": [["a", True]]}, "a number or false"),
        ({"logit_bias": {"5": None}}, "a number or false"),
        ({"logit_bias": [[True, 1]]}, "a number or false"),
        ({"logit_bias": [[-1, 1]]}, "token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "token ids"),
        ({"logit_bias": [[5, 1]] * 1025}, "at most 1024"),
        ({"suffix": "b"}, "unknown field 'suffix'"),
        ({"return_token": True}, "did you mean 'return_tokens'"),
        ({"rep_pen": 1.2}, "rep_pen is not supported: use repeat_penalty"),
    ],
)
def test_both_paths_refuse_the_same(coder: TestClient, path: str, fields: dict[str, Any], said: str) -> None:
    answered = coder.post(path, json=FORMS[path] | fields)
    assert answered.status_code == 400 and said in answered.json()["error"]["message"], answered.text


def test_an_answer_ends_with_its_block(coder: TestClient) -> None:
    body = GAP | {"grammar": writing("a\n    b\n\n      c\n  d\n    e"), "n_indent": 4}
    answer = post(coder, **body)
    assert (answer["content"], answer["stop_type"]) == ("a\n    b\n\n      c\n  ", "limit")
    streamed = coder.post("/infill", json=body | {"stream": True}).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in streamed if line]
    assert "".join(part["content"] for part in parts) == answer["content"]
    assert post(coder, **body | {"n_indent": 0})["content"].endswith("d\n    e")


@pytest.mark.parametrize(
    ("text", "end"), [("a", None), ("a\n", None), ("a\n  ", None), ("a\n  b", 4), ("a\n    b\n\n", None), ("\nb", 1)]
)
def test_where_a_block_ends(text: str, end: int | None) -> None:
    assert end_of_block(text, 4) == end and end_of_block(text, 0) is None
    assert end_of_block(text, 4, text.rfind("\n") + 1) == end  # the lines before it have none


def test_an_answer_may_have_a_limit_of_time_once_it_has_a_line(coder: TestClient) -> None:
    long = writing("a\n" + "b" * 200)
    assert len(post(coder, **GAP, grammar=long, t_max_predict_ms=1)["content"]) < 200
    assert len(post(coder, **GAP, grammar=writing("b" * 100), t_max_predict_ms=1)["content"]) == 100
    assert len(post(coder, **GAP, grammar=long, t_max_predict_ms=-1)["content"]) == 202


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_prefix": "a"}, "input_suffix is missing"),
        ({"input_suffix": "a"}, "input_prefix is missing"),
        (GAP | {"input_extra": ["a"]}, "input_extra.0"),
        (GAP | {"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        (GAP | {"input_extra": [{"text": "a", "path": "b"}]}, "input_extra.0.path"),
        (GAP | {"response_fields": [1]}, "response_fields"),
        (GAP | {"n_indend": 1}, "n_indent"),
        (GAP | {"t_max_predict_ms": "soon"}, "t_max_predict_ms"),
    ],
)
def test_a_wrong_request_names_its_field(coder: TestClient, fields: dict[str, Any], said: str) -> None:
    answered = coder.post("/infill", json=fields)
    assert answered.status_code == 400 and said in answered.json()["error"]["message"]


def test_ollama_names_the_capability(coder: TestClient, client: TestClient) -> None:
    assert "insert" in post(coder, "/api/show", model="coder")["capabilities"]
    body = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "stream": False, "options": {"num_predict": 3}}
    assert post(coder, "/api/generate", **body)["done_reason"] in ("length", "stop")
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


def test_the_prompt_is_the_documented_order(coder_model: Model) -> None:
    tokens = coder_model.target.vocabulary.fim
    assert tokens is not None
    expected = [tokens.prefix, 1, tokens.suffix, 2, tokens.middle]
    assert fill_prompt(coder_model.target.vocabulary, tokens, [1], [2]) == expected
