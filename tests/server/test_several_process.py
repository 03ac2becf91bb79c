"""`edgespec serve` with several models as a process: its options, its memory, files that are damaged, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from edgespec import LoadOptions
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.plan import planned
from serving import ENDS_WITHIN_S, errors_of, read_line, served
from several import DRAFT, ONNX, PATHS, second_demo
from waiting import until

CONTEXT = ("-c", "1024", "--parallel", "1", "--port", "0")


def complete(url: str, model: str | None, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "model": model} | fields
    return httpx.post(url + "/v1/completions", json=body, timeout=ENDS_WITHIN_S)


def loaded(url: str) -> list[str]:
    return [each["name"] for each in httpx.get(url + "/api/ps").json()["models"]]


def refusal(home: Path, *options: str) -> str:
    """What is said of a command line with which nothing is served."""
    with served(home, *options, "--port", "0") as process:
        assert process.wait(ENDS_WITHIN_S) not in (0, None)
        return errors_of(process)


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


def test_two_models_need_two_names(private_home: Path):
    assert "two models are called 'demo'" in refusal(private_home, "demo")
    assert "names none of the models" in refusal(private_home, PATHS[DRAFT], "--alias", "a=b")
    assert "models-max must be at least 1" in refusal(private_home, PATHS[DRAFT], "--models-max", "0")


def test_a_second_model_that_is_missing_ends_it_before_it_listens(private_home: Path, tmp_path: Path):
    assert "no file" in refusal(private_home, str(tmp_path / "absent.gguf"))
    assert "no model 'absent'" in refusal(private_home, "absent")


def test_a_second_model_that_is_damaged_or_goes_while_it_runs(private_home: Path, tmp_path: Path):
    path = second_demo(tmp_path)
    whole = path.read_bytes()
    with served(private_home, str(path), *CONTEXT) as process:
        url = read_line(process)["url"]
        text = complete(url, None).json()["choices"][0]["text"]
        for damaged in (whole[: len(whole) // 2], b"nothing", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            answer = complete(url, "second")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "load_failed"
            assert str(tmp_path) not in answer.text and loaded(url) == ["demo"]
        assert complete(url, "demo").json()["choices"][0]["text"] == text
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
        texts = [complete(url, name).json()["choices"][0]["text"] for name in ("demo", "target", "demo", "target")]
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


@pytest.mark.quiet
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_going_to_and_fro_takes_no_more_memory(private_home: Path):
    def resident(process: subprocess.Popen[bytes]) -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))

    with served(private_home, PATHS[ONNX], *CONTEXT) as process:
        url, used = read_line(process)["url"], []
        for _ in range(6):
            for name in ("target", "demo"):
                assert complete(url, name).status_code == 200
            used.append(resident(process))
        assert used[-1] < used[1] + (16 << 20), used


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_another_model_is_loaded_ends_it(private_home: Path, number: signal.Signals):
    with served(private_home, PATHS[ONNX], *CONTEXT) as process:
        url = read_line(process)["url"]
        asking = threading.Thread(target=lambda: _try(url, "target"), daemon=True)
        asking.start()
        until(lambda: loaded(url) != ["demo"], process=process)
        process.send_signal(number)
        assert process.wait(ENDS_WITHIN_S) == 0
        asking.join(ENDS_WITHIN_S)
        assert "Traceback" not in errors_of(process)


def _try(url: str, model: str) -> None:
    try:
        complete(url, model)
    except httpx.HTTPError:
        return


def test_clients_of_both_at_once(private_home: Path):
    with served(private_home, PATHS[ONNX], *CONTEXT, "--reproducible") as process:
        url = read_line(process)["url"]
        expected = {name: complete(url, name).json()["choices"] for name in ("demo", "target")}
        names = ["demo", "target", "target", "demo"] * 4
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda name: complete(url, name).json(), names))
        assert all(answer["choices"] == expected[name] for name, answer in zip(names, answers, strict=True))


def test_the_sidecar_serves_several_too(private_home: Path):
    with served(private_home, PATHS[ONNX], "--stdio", "-c", "1024") as process:
        assert process.stdin is not None
        assert [read_line(process)["event"] for _ in range(2)] == ["hello", "ready"]
        for name, error in (("target", None), ("other", "model_not_found"), ("demo", None)):
            request = {"op": "generate", "id": name, "prompt": "Once", "max_tokens": 4, "model": name}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            while (event := read_line(process))["event"] == "delta":
                pass
            assert event["event"] == ("done" if error is None else "error") and event["id"] == name
            assert error is None or event["error"]["code"] == error
        process.stdin.close()
        assert process.wait(ENDS_WITHIN_S) == 0
        process.stdin = None
