"""What an operator sees of drafting and speed: the log line of an answer, `timings`, and /metrics."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec import GenerateOptions, Model
from edgespec.reports import RoundRecord, Stats
from edgespec.server.metrics import Histogram, Metrics, answer_line, why_not

REPEATED = {"prompt": "one two three one two three one two", "max_tokens": 40, "temperature": 0}
DRAFTING = REPEATED | {"speculative": {"drafter": "model", "draft_length": 3}}


def complete(client: TestClient, **fields: Any) -> dict[str, Any]:
    answered = client.post("/v1/completions", json=fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


def test_timings_name_the_drafter(client: TestClient):
    found = complete(client, **DRAFTING)["timings"]
    assert found["drafter"] == "model" and found["draft_n_by_drafter"] == {"model": found["draft_n"]}
    plain = complete(client, **REPEATED, speculative=False)["timings"]
    assert (plain["drafter"], plain["draft_n_by_drafter"]) == (None, {})


def test_a_log_line_tells_speed_and_drafting(client: TestClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "edgespec")
    found = complete(client, **DRAFTING)["timings"]
    complete(client, **REPEATED, speculative=False)
    drafted, plain = [line for line in caplog.messages if line.startswith("answer: ")]
    shown = f"{found['draft_n_accepted']} of {found['draft_n']} drafted tokens accepted"
    assert re.match(rf"answer: {found['predicted_n']} tokens at [\d.]+ tokens/s \(\w+\)", drafted), drafted
    assert shown in drafted and f"model {found['draft_n']}" in drafted
    assert plain.endswith("nothing drafted: the request switched it off")
    assert not any("one two" in line for line in caplog.messages)


def test_why_nothing_was_drafted(model: Model):
    facts, loaded, ran = model.target.facts, model.options, Stats(rounds=9, new_tokens=10)
    auto = replace(loaded, drafter="auto", draft_length="auto")
    for options, own, stats, words in (
        (GenerateOptions(drafter="none"), auto, ran, "the request"),
        (GenerateOptions(), replace(auto, drafter="none"), ran, "is switched off"),
        (GenerateOptions(draft_length=0), auto, ran, "is switched off"),
        (GenerateOptions(), auto, Stats(new_tokens=1), "its first token"),
        (GenerateOptions(), auto, Stats(), "had not begun"),
        (GenerateOptions(), auto, replace(ran, notes=["drafter model failed and is disabled"]), "failed"),
        (GenerateOptions(), auto, ran, "expected to save time"),
        (GenerateOptions(drafter="ngram", draft_length=4), auto, ran, "ngram proposed nothing"),
    ):
        assert words in why_not(stats, options, own, facts)
    blocked = replace(facts, can_rollback=False, rollback_rows=0)
    assert why_not(ran, GenerateOptions(), auto, blocked) == facts.why_no_speculation
    assert "failed" in answer_line(Stats(), {}, GenerateOptions(), auto, facts)


def metrics(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_by_drafter_and_position(client: TestClient):
    timings = complete(client, **DRAFTING)["timings"]
    found = metrics(client)
    assert found['edgespec_drafter_tokens_total{drafter="model"}'] == timings["draft_n"]
    assert found['edgespec_drafter_tokens_accepted_total{drafter="model"}'] == timings["draft_n_accepted"]
    drafted, accepted = (
        [found.get(f'edgespec_draft_tokens_{kind}per_position_total{{position="{i}"}}', 0) for i in range(3)]
        for kind in ("", "accepted_")
    )
    assert sum(drafted) == timings["draft_n"] and drafted[0] == found["edgespec_draft_rounds_total"]
    assert all(one >= other for one, other in zip(drafted, accepted, strict=True))


def test_positions_of_a_tree_are_counted_once():
    found = Metrics()
    found.count_round(RoundRecord(9, "tree", 5, 2, (), 0.0, 0.1, tree_depth=3))
    assert (found.drafted_at, found.accepted_at) == ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1})


def test_latencies_are_histograms(client: TestClient):
    for _ in range(2):
        complete(client, **REPEATED)
    found = metrics(client)
    for name in ("edgespec_time_to_first_token_seconds", "edgespec_request_duration_seconds"):
        buckets = [value for key, value in found.items() if key.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"{name}_count"] == 2
        assert found[f"{name}_sum"] > 0
    first, whole = (found[f"edgespec_{kind}_seconds_sum"] for kind in ("time_to_first_token", "request_duration"))
    assert first <= whole and first == found["edgespec_time_to_first_token_seconds_total"]


def test_a_bucket_holds_its_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("x", "Help"))[2:] == [
        'x_bucket{le="1.0"} 2', 'x_bucket{le="2.0"} 3', 'x_bucket{le="+Inf"} 4', "x_sum 12.0", "x_count 4"
    ]  # fmt: skip
