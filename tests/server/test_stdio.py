"""`edgespec serve --stdio`: JSON lines in and out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import ROOT
from edgespec import GenerateOptions, Model, __version__
from serving import ENDS_WITHIN_S, ends_with_input, errors_of, events_until, read_line, send, served

QUESTION = [{"role": "user", "content": "I want a table for two in San Jose."}]


@pytest.fixture(scope="module")
def sidecar(private_home: Path) -> Iterator[subprocess.Popen[bytes]]:
    with served(private_home, "--stdio", "--reproducible", "-np", "4") as process:
        assert read_line(process) == {"event": "hello", "protocol": 1, "version": __version__}
        ready = read_line(process)
        assert (ready["event"], ready["model"]) == ("ready", "demo")
        yield process


def test_progress_of_a_prompt_is_told_when_asked_for(sidecar: subprocess.Popen[bytes]):
    fields = {"prompt": "one two " * 200, "max_tokens": 2, "return_progress": True, "cache_prompt": False}
    send(sidecar, {"op": "generate", "id": "p", **fields})
    events = events_until(sidecar, "p")
    assert [note.partition(":")[0] for note in events[-1]["notes"]] == ["cache_prompt"]
    told = [event for event in events if event["event"] == "progress"]
    assert told == events[: len(told)] and told[-1]["processed"] == told[-1]["total"] > 200


def test_two_requests_get_their_own_texts(sidecar: subprocess.Popen[bytes], model: Model):
    sampling = replace(model.recommended_sampling, temperature=1.0, seed=9)
    options = GenerateOptions(max_tokens=20, drafter="none")
    expected = {"a": model.chat(QUESTION, sampling, options).result(), "b": model.generate("Once", sampling, options)}
    fields = {"temperature": 1.0, "seed": 9, "max_tokens": 20}
    send(
        sidecar,
        {"op": "chat", "id": "a", "messages": QUESTION, **fields},
        {"op": "generate", "id": "b", "prompt": "Once", **fields},
    )
    events = events_until(sidecar, "a", "b")
    for request_id, result in expected.items():
        own = [event for event in events if event["id"] == request_id]
        assert "".join(event["text"] for event in own[:-1]) == result.text
        assert own[-1]["finish_reason"] == result.finish_reason and own[-1]["seed"] == 9
        assert own[-1]["usage"]["completion_tokens"] == len(result.token_ids)


def test_a_request_is_cancelled_while_it_runs_or_waits(sidecar: subprocess.Popen[bytes], model: Model):
    bias = {str(token_id): -100 for token_id in model.target.vocabulary.end_ids}
    send(sidecar, *({"op": "generate", "id": name, "prompt": "x", "logit_bias": bias} for name in ("a", "b")))
    while (event := read_line(sidecar))["event"] != "delta":
        pass
    begun = event["id"]
    send(sidecar, {"op": "cancel", "id": "b"}, {"op": "cancel", "id": "a"})
    events = events_until(sidecar, "a", "b")
    ends = {event["id"]: event for event in events if event["event"] == "done"}
    assert {end["finish_reason"] for end in ends.values()} == {"cancelled"} and ends.keys() == {"a", "b"}
    assert all(end.keys() >= {"usage", "timings", "seed"} for end in ends.values())
    assert ends[begun]["usage"]["completion_tokens"] == ends[begun]["timings"]["predicted_n"] > 0
    assert ends[begun]["usage"]["prompt_tokens"] > 0 and isinstance(ends[begun]["seed"], int)


def test_a_second_request_of_an_id_does_not_end_the_first(sidecar: subprocess.Popen[bytes]):
    # as long as the context allows: it cannot be over before the second line is read
    request = {"op": "generate", "id": "twice", "prompt": "x", "ignore_eos": True}
    send(sidecar, request, request)
    events = [read_line(sidecar)]
    while events[-1]["event"] != "error":
        events.append(read_line(sidecar))
    refused = events[-1]
    send(sidecar, {"op": "cancel", "id": "twice"})
    while events[-1]["event"] != "done":
        events.append(read_line(sidecar))
    assert refused["id"] is None and "'twice' is already running" in refused["error"]["message"]
    assert events[-1]["id"] == "twice"


@pytest.mark.parametrize(
    ("request_line", "words"),
    [
        (b"{", "not valid JSON"),
        ({"op": "sing", "id": "x"}, "one of cancel, chat, close, generate, hello"),
        ({"id": "x"}, "op is missing"),
        ({"op": "chat", "messages": QUESTION}, "id is missing"),
        ({"op": "chat", "id": "x", "mesages": QUESTION}, "messages is missing"),
        ({"op": "chat", "id": "x", "messages": QUESTION, "n": 2}, "leave out n"),
        ({"op": "chat", "id": "x", "messages": QUESTION, "timings_per_token": True}, "done has the timings"),
        ({"op": "cancel", "id": "nobody"}, "no request with this id"),
        ({"op": "hello", "protocol": 2}, "speaks protocol 1"),
    ],
)
def test_bad_lines_are_answered(sidecar: subprocess.Popen[bytes], request_line: Any, words: str):
    send(sidecar, request_line)
    event = read_line(sidecar)
    assert event["event"] == "error" and words in event["error"]["message"]


def test_the_lines_in_the_documentation_are_accepted(sidecar: subprocess.Popen[bytes]):
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    lines = [line.encode() for line in page.splitlines() if line.startswith('{"op"')]
    assert len(lines) == 5
    send(sidecar, *lines[:-1])  # all but close
    events = events_until(sidecar, "a", "b")
    assert {event["event"] for event in events} <= {"delta", "done"}


def test_a_sidecar_ends_with_its_parent(sidecar: subprocess.Popen[bytes]):
    """Last but one in this file: the process is gone after it. A running answer does not keep it alive."""
    send(sidecar, {"op": "generate", "id": "z", "prompt": "x"})
    ends_with_input(sidecar)
    assert "Traceback" not in errors_of(sidecar)


def test_close_ends_it(private_home: Path):
    with served(private_home, "--stdio") as process:
        send(process, {"op": "hello", "protocol": 1}, {"op": "close"})
        assert process.wait(ENDS_WITHIN_S) == 0
