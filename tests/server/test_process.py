"""`edgespec serve` as a process: four clients at once, clients that leave, signals, sidecars."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from command_line import refusal, run
from demo import ROOT, TEST_THREADS
from edgespec import GenerateOptions, LoadOptions, Model
from edgespec.__main__ import LARGE_PAGES
from edgespec.kernels.library import library_path
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import MOST_SEQUENCES
from edgespec.memory.plan import planned
from serving import ENDS_WITHIN_S, ends_with_input, errors_of, read_line, served
from several import DRAFT, ONNX, PATHS
from waiting import until

CHAT = "/v1/chat/completions"
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
QUESTIONS = ("Find me a bus to Fresno.", "Book a hotel in Paris.", "What is the weather?", "Play some jazz.")


@contextmanager
def started(private_home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server and its address."""
    with served(private_home, "-v", "--port", "0", "--reproducible", "--exit-with-stdin", "-np", "4") as process:
        announced = read_line(process)
        assert announced["event"] == "listening" and announced["pid"] == process.pid
        assert announced["url"].startswith("http://127.0.0.1:")
        yield process, announced["url"]


@pytest.fixture(scope="module")
def url(private_home: Path) -> Iterator[str]:
    with started(private_home) as (_, address):
        yield address


def ask(url: str, question: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    return httpx.post(url + CHAT, json={"messages": messages, "max_tokens": 32} | fields, timeout=ENDS_WITHIN_S)


def endless(url: str) -> dict[str, Any]:
    """The fields of a request that goes on until the context is full."""
    ids = httpx.post(url + "/tokenize", json={"content": "<|im_end|><|endoftext|>", "parse_special": True}).json()
    bias = {str(token_id): -100 for token_id in ids["tokens"]}
    return {"messages": [{"role": "user", "content": "Go on"}], "logit_bias": bias, "stream": True}


def test_four_clients_at_once_get_their_own_texts(url: str, model: Model):
    sampling = replace(model.recommended_sampling, temperature=1.0, seed=5)
    plain = GenerateOptions(max_tokens=32, drafter="none")
    expected = [model.chat([{"role": "user", "content": text}], sampling, plain).result().text for text in QUESTIONS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: ask(url, text, temperature=1.0, seed=5).json(), QUESTIONS))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected


def test_a_client_that_leaves_frees_the_model(url: str):
    with httpx.stream("POST", url + CHAT, json=endless(url)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert httpx.get(url + "/health").json()["running"] == 1
    until(lambda: httpx.get(url + "/health").json()["running"] == 0)
    assert 'generations_total{reason="cancelled"} 1' in httpx.get(url + "/metrics").text
    assert ask(url, "hi", max_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_names_and_places_of_the_command_line(private_home: Path):
    with served(private_home, "--alias", "mine", "--alias", "gpt-5", "--port", "0") as process:
        url = read_line(process)["url"]
        assert [each["id"] for each in httpx.get(url + "/v1/models").json()["data"]] == ["mine", "gpt-5"]
        about = httpx.get(url + "/props").json()
        has_room = library_path() is not None  # the kernels take memory as texts grow, llama.cpp at once
        assert about["total_slots"] == (MOST_SEQUENCES if has_room else 1)
        assert any("answers" in part["name"] for part in about["memory"]["parts"]) == has_room


def test_the_page_on_the_server_is_true(url: str):
    """Requests and paths of docs/server.md, sent to this server."""
    requests = re.findall(r"^curl http://127.0.0.1:8080(\S+) -d '(.+)'$", PAGE, re.MULTILINE)
    assert len(requests) == 2
    for path, body in requests:
        answered = httpx.post(url + path, content=body.encode(), timeout=ENDS_WITHIN_S)
        assert answered.status_code == (501 if path == "/v1/embeddings" else 200), "the demo writes text"
    paths = re.findall(r"`GET (/\S+)`", PAGE)
    assert len(paths) == 8
    for path in paths:
        assert httpx.get(url + path).status_code == 200


def test_the_end_of_standard_input_ends_it(private_home: Path):
    with started(private_home) as (server, address):
        for question in QUESTIONS[:2]:
            assert ask(address, question).status_code == 200
        assert server.poll() is None
        ends_with_input(server)
        log = errors_of(server)
    assert "Traceback" not in log and not any(question in log for question in QUESTIONS)
    assert re.search(r"^note: answer: \d+ tokens at [\d.]+ tokens/s", log, re.MULTILINE), log


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_answer_finish(private_home: Path, number: signal.Signals):
    with served(private_home, "--port", "0", "--verbose", EDGESPEC_API_KEY="k") as process:
        url = read_line(process)["url"]
        key = {"Authorization": "Bearer k"}
        assert httpx.get(url + "/v1/models").status_code == 401
        fields = {"prompt": "Once upon a time", "max_tokens": 300, "stream": True, "temperature": 1, "seed": 1}
        with httpx.stream("POST", url + "/v1/completions", json=fields, headers=key, timeout=ENDS_WITHIN_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait(ENDS_WITHIN_S) == 0
        log = errors_of(process)
        assert "POST /v1/completions 200" in log and "Once upon" not in log and "Traceback" not in log


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_signal_while_the_model_is_loaded_ends_it(private_home: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(private_home, "--port", str(port)) as process:

        def status() -> int:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code
            except httpx.ConnectError:
                return 0

        until(status, process=process)  # 503, or on a fast machine 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_WITHIN_S) == 0
        assert "Traceback" not in errors_of(process)


def test_an_address_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal(run("serve", "--port", str(port)), f"cannot listen on 127.0.0.1 port {port}: Address already in use")


# -- `edgespec serve` with several models as a process: its options, its memory, files that are damaged, signals


CONTEXT = ("-c", "1024", "--parallel", "1", "--port", "0")


def complete(url: str, model: str | None, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "model": model} | fields
    return httpx.post(url + "/v1/completions", json=body, timeout=ENDS_WITHIN_S)


def loaded(url: str) -> list[str]:
    return [each["name"] for each in httpx.get(url + "/api/ps").json()["models"]]


def text_of(url: str, model: str | None = None) -> str:
    return complete(url, model).json()["choices"][0]["text"]


def test_names_defaults_and_options_of_each(private_home: Path, draft_path: Path):
    options = ("--alias", "big", "--alias", f"small={PATHS[ONNX]}", "--draft-length", "2", "-md", str(draft_path))
    with served(private_home, PATHS[ONNX], *options, *CONTEXT, "--seed", "7") as process:
        url = read_line(process)["url"]
        listed = httpx.get(url + "/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["big", "small"]
        assert [each["meta"]["n_ctx"] for each in listed] == [1024, 1024]
        answers = [complete(url, name, temperature=1).json() for name in (None, "small", "big")]
        assert [answer["model"] for answer in answers] == ["big", "small", "big"]
        assert {answer["seed"] for answer in answers} == {7}
        assert answers[0]["choices"] == answers[2]["choices"]
        assert httpx.get(url + "/props?model=small").json()["engine"] == "onnx"  # to which -md would be no draft
        assert loaded(url) == ["big"]


def test_two_models_need_two_names():
    refusal(run("serve", "demo", "demo"), "two models are called 'demo'")
    refusal(run("serve", "demo", PATHS[DRAFT], "--alias", "a=b"), "names none of the models")
    refusal(run("serve", "demo", "absent"), "no model 'absent'")


def test_a_second_model_that_is_damaged_or_goes_while_it_runs(private_home: Path, tmp_path: Path):
    path, whole = tmp_path / "second.gguf", Path(PATHS[DRAFT]).read_bytes()
    path.write_bytes(whole)
    with served(private_home, str(path), *CONTEXT) as process:
        url = read_line(process)["url"]
        text = text_of(url)
        for damaged in (whole[: len(whole) // 2], b"nothing", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            answer = complete(url, "second")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "load_failed"
            assert str(tmp_path) not in answer.text and loaded(url) == ["demo"]
        assert text_of(url, "demo") == text
        path.write_bytes(whole)
        assert complete(url, "second").status_code == 200 and loaded(url) == ["second"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_WITHIN_S) == 0
        assert "cannot be loaded" in (log := errors_of(process)) and "Traceback" not in log


def planned_bytes(path: str) -> int:
    options = LoadOptions(model=path, context_length=1024, drafter="none", threads=1)
    return planned(options, resolve_pair(options)).working_bytes


@pytest.mark.parametrize("fits_both", [True, False])
def test_one_budget_is_for_all_that_are_loaded(private_home: Path, fits_both: bool):
    first, second = planned_bytes("demo"), planned_bytes(PATHS[ONNX])
    budget = first + second + (600 << 20) if fits_both else max(first, second) + (24 << 20)
    options = ("--drafter", "none", "--models-max", "2", "--memory", str(budget))
    with served(private_home, PATHS[ONNX], *options, *CONTEXT) as process:
        url = read_line(process)["url"]
        texts = [text_of(url, name) for name in ("demo", "target", "demo", "target")]
        assert texts[0] == texts[2] and texts[1] == texts[3]
        assert sorted(loaded(url)) == (["demo", "target"] if fits_both else ["target"])
        memory = httpx.get(url + "/props?model=target").json()["memory"]
        assert memory["verdict"] == "fits" and memory["given_up"] == []
        assert (memory["free_bytes"] < budget - (first >> 1)) == fits_both  # what is left for it of the budget


@pytest.mark.parametrize("context", ["max", "auto"])
def test_a_context_that_is_chosen_at_the_load(private_home: Path, context: str):
    with served(private_home, PATHS[ONNX], "-c", context, "--models-max", "2", "--port", "0") as process:
        url = read_line(process)["url"]
        for name in ("target", "demo", "target"):
            assert complete(url, name).status_code == 200
        assert loaded(url) == (["demo", "target"] if context == "max" else ["target"])


# -- `--idle-unload` in a process: its memory, its end while nothing is loaded or something is, the sidecar


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.quiet
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_its_memory_goes_back_to_the_system_each_time(private_home: Path):
    options = ("--port", "0", "--idle-unload", "0.5", "-c", "2048", "--verbose")
    with served(private_home, *options) as process:
        url = read_line(process)["url"]
        texts, used = [], []
        for _ in range(6):
            texts.append(text_of(url))
            used.append(resident_bytes(process))
            until(lambda: resident_bytes(process) < used[-1] - (8 << 20), process=process)
            assert not loaded(url)
        assert len(set(texts)) == 1
        assert used[-1] < used[3] + (8 << 20), used  # the first loads find room that others have left
        process.send_signal(signal.SIGTERM)  # while nothing is loaded
        assert process.wait(ENDS_WITHIN_S) == 0
        log = errors_of(process)
        assert log.count("note: answer: ") == 6  # from the engine's thread
        assert log.count("is unloaded") == log.count("is loaded, which took") >= 6 and "Traceback" not in log


# -- Processes that are killed: no server outlives its parent


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


THP = Path("/sys/kernel/mm/transparent_hugepage")
GLIBC = platform.libc_ver()


@pytest.mark.skipif(
    GLIBC[0] != "glibc"
    or [int(part) for part in GLIBC[1].split(".")] < [2, 35]
    or not THP.is_dir()
    or "[never]" in (THP / "enabled").read_text()
    or int((THP / "hpage_pmd_size").read_text()) != 2 << 20,
    reason="no pages of 2 MB are lent here, or not by this C library",
)
@pytest.mark.parametrize(("variables", "takes"), [({}, True), ({"PYTHONMALLOC": "pymalloc"}, False)])
def test_the_command_takes_large_pages(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], takes: bool
):
    for name in LARGE_PAGES:
        monkeypatch.delenv(name, raising=False)
    with served(private_home, "--stdio", **variables) as process:
        read_line(process)
        began_with = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert (b"GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in began_with) is takes


def test_the_openapi_document_names_every_path(url: str):
    described = httpx.get(url + "/openapi.json").json()
    assert described["openapi"].startswith("3.1") and json.dumps(described)
    for path, about in described["paths"].items():
        for method in about:
            answered = httpx.request(method.upper(), url + path.replace("{name}", "demo"), content=b"{}", timeout=60)
            assert answered.status_code not in (404, 405), path
            assert answered.status_code in (200, 400) or "embed" in path or path == "/infill", path
