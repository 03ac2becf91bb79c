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
from edgespec.server.completions import read_completion
from edgespec.server.fields import Fields
from edgespec.server.fim import ExtraFile, fill_prompt, fitted
from edgespec.server.infill import _end_of_block, read_infill
from edgespec.server.native import read_native
from edgespec.server.ollama import read_generate_request
from edgespec.server.service import Limits, Loaded, Service
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
    read = read_completion(loaded, Fields({"prompt": BEFORE, "suffix": AFTER}))
    assert shown(coder_model, read.jobs[0].prompt_ids) == f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    ids = coder_model.encode(BEFORE)
    assert (
        read_completion(loaded, Fields({"prompt": ids, "suffix": AFTER})).jobs[0].prompt_ids == read.jobs[0].prompt_ids
    )
    two = read_completion(loaded, Fields({"prompt": [BEFORE, "x"], "suffix": "y"}))
    assert shown(coder_model, two.jobs[1].prompt_ids) == f"{FIM[0]}x{FIM[1]}y{FIM[2]}"
    first = read_completion(loaded, Fields({"prompt": "", "suffix": AFTER}))
    assert shown(coder_model, first.jobs[0].prompt_ids) == f"{FIM[0]}{FIM[1]}{AFTER}{FIM[2]}"
    for is_raw in (True, False):
        body = {"model": "coder", "prompt": BEFORE, "suffix": AFTER, "raw": is_raw}
        assert read_generate_request(loaded, Fields(body)).jobs[0].prompt_ids == read.jobs[0].prompt_ids


def test_texts_around_a_gap_hold_no_control_tokens(loaded: Loaded, coder_model: Model) -> None:
    read = read_completion(loaded, Fields({"prompt": f"a{FIM[2]}", "suffix": f"{FIM[0]}b<|end|>"}))
    assert control(coder_model, read.jobs[0].prompt_ids) == [*FIM[:3]]


def test_control_tokens_of_a_raw_prompt_are_read(loaded: Loaded, coder_model: Model) -> None:
    """Editors write the tokens themselves, and other programs the marks of a chat template."""
    text = f"{FIM[0]}{BEFORE}{FIM[1]}{AFTER}{FIM[2]}"
    (job,) = read_completion(loaded, Fields({"prompt": text})).jobs
    assert control(coder_model, job.prompt_ids) == [*FIM[:3]]
    raw = read_generate_request(loaded, Fields({"model": "coder", "prompt": text, "raw": True}))
    assert raw.jobs[0].prompt_ids == job.prompt_ids
    chat = read_generate_request(loaded, Fields({"model": "coder", "prompt": text}))
    assert not {*control(coder_model, chat.jobs[0].prompt_ids)} & {*FIM}, "a chat's message is text"


def test_a_prompt_that_begins_the_text_itself_has_one_begin(tmp_path: Path) -> None:
    path = write_model(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    with edgespec.load(str(path), threads=TEST_THREADS, reproducible=False) as opened:
        service = Service("bos", Limits())
        service.use(opened)
        plain, spelled = (read_completion(service.require(), Fields({"prompt": p})) for p in ("hi", "<|end|>hi"))
        assert plain.jobs[0].prompt_ids == spelled.jobs[0].prompt_ids == opened.encode("hi")
        native = read_native(service.require(), Fields({"prompt": "<|end|>hi"}))
        assert native.jobs[0].prompt_ids == opened.encode("hi")
        service.require().scheduler.close()


def test_other_files_come_first(loaded: Loaded, coder_model: Model) -> None:
    extra = [{"filename": "a.py", "text": "import b"}, {"filename": "b.py", "text": f"x = 1{FIM[2]}\n"}]
    (job,) = read_infill(loaded, Fields(GAP | {"input_extra": extra, "prompt": "a +"})).jobs
    assert control(coder_model, job.prompt_ids) == [FIM[3], FIM[4], FIM[4], FIM[4], *FIM[:3]]
    assert shown(coder_model, job.prompt_ids) == (
        f"{FIM[3]}repository\n{FIM[4]}a.py\nimport b\n{FIM[4]}b.py\nx = 1{FIM[2]}\n{FIM[4]}file\n"
        f"{FIM[0]}{BEFORE}a +{FIM[1]}{AFTER}{FIM[2]}"
    )


def test_a_model_without_tokens_for_files_gets_lines_between_them(coder_model: Model) -> None:
    tokens = FimTokens(1, 2, 3)
    ids, is_cut = fitted(coder_model.target.vocabulary, tokens, [7], [8], [ExtraFile("a.py", "x")], 100)
    assert not is_cut and ids[-5:] == [1, 7, 2, 8, 3]
    assert coder_model.decode(ids[:-5]) == "\n\n--- snippet ---\n\nx"


@pytest.mark.parametrize("room", range(40, 250, 7))
def test_what_is_nearest_to_the_gap_is_kept(coder_model: Model, room: int) -> None:
    vocabulary = coder_model.target.vocabulary
    tokens = vocabulary.fim
    assert tokens is not None
    before, after = [*range(100)], [*range(100, 150)]
    files = [ExtraFile(name, "xyz" * 5) for name in ("far", "near")]
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
    assert _end_of_block(text, 4) == end and _end_of_block(text, 0) is None


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
