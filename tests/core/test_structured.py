"""Structured answers: valid, and the same with and without speculation, whatever the drafter knows of the grammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.reports import RoundRecord

MOST = 400
Schema = dict[str, Any]
IS_SO: Schema = {"type": "boolean"}


def record(**properties: Schema) -> Schema:
    """An object that has all of these and nothing else."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def text(most: int = 40) -> Schema:
    return {"type": "string", "maxLength": most}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def some(item: Schema, most: int = 3, least: int = 1) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, Schema] = {
    "a person": record(first_name=text(), last_name=text(), age=whole(0, 120), email=text()),
    "a recipe": record(recipe_name=text(), steps=some(record(step=text(), minutes=whole(1, 240)), 4, 2)),
    "a flight": record(day={"type": "string", "format": "date"}, cabin={"enum": ["economy", "first"]}),
    "a weather report": record(location=text(), celsius={"type": "string", "pattern": "^-?[0-9]{1,2}\\.[0-9]$"}),
    "a product": record(price=record(amount=whole(1, 9999), currency={"enum": ["EUR", "USD"]}), in_stock=IS_SO),
}


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def demo(request: pytest.FixtureRequest) -> Iterator[Model]:
    with edgespec.load("demo", engine=request.param, reproducible=True, threads=TEST_THREADS) as model:
        yield model


def prompt(model: Model, what: str) -> list[int]:
    return model.encode_chat([{"role": "user", "content": f"Write {what} as JSON."}])


def test_answers_to_schemas_are_valid(demo: Model) -> None:
    drafted = accepted = 0
    for seed, (what, schema) in enumerate(SCHEMAS.items()):
        options = GenerateOptions(max_tokens=MOST, drafter="ngram", draft_length=4, json_schema=schema, logprobs=False)
        found = demo.generate(prompt(demo, what), Sampling(temperature=seed % 2, seed=seed), options)
        assert found.finish_reason == "stop", (what, found.text)
        jsonschema.validate(json.loads(found.text), schema, format_checker=jsonschema.FormatChecker())
        drafted, accepted = drafted + found.stats.drafted_tokens, accepted + found.stats.accepted_tokens
    assert accepted > 0.6 * drafted > 50


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_neither_tokens_nor_log_probabilities(demo: Model, temperature: float) -> None:
    schema = record(name=text(12), size=whole(1, 500), colours=some({"enum": ["red", "green", "blue"]}, 3, 2))
    ids, sampling = prompt(demo, "a thing"), Sampling(temperature=temperature, seed=4)
    plain = demo.generate(ids, sampling, GenerateOptions(max_tokens=MOST, drafter="none", json_schema=schema))
    jsonschema.validate(json.loads(plain.text), schema)
    names = [*(each for each in ("ngram", "model", "tree", "medusa", "eagle") if each in demo.drafters.names), "auto"]
    for drafter, length in itertools.product(names, (3, "auto")):
        options = GenerateOptions(max_tokens=MOST, drafter=drafter, draft_length=length, json_schema=schema)
        found = demo.generate(ids, sampling, options)
        assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs), (drafter, length)
        assert found.reproducible and not found.stats.notes
        if length == 3:
            assert found.stats.rounds < 0.8 * plain.stats.rounds, (drafter, found.stats.rounds)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_answer_in_the_schema_too(demo: Model, rule: str) -> None:
    schema = SCHEMAS["a person"]
    for seed in range(3):
        options = GenerateOptions(max_tokens=MOST, drafter="model", draft_length=4, verify=rule, json_schema=schema)
        found = demo.generate(prompt(demo, "a person"), Sampling(seed=seed), options)
        jsonschema.validate(json.loads(found.text), schema)
        assert found.stats.accepted_tokens > 0 and not found.stats.notes


def test_forced_tokens_are_a_draft_of_their_own(demo: Model) -> None:
    records: list[RoundRecord] = []
    schema = record(first_name=text(10), family_name=text(10), postal_address=text(10))
    options = GenerateOptions(max_tokens=MOST, drafter="ngram", draft_length=2, json_schema=schema)
    events = list(demo.stream(prompt(demo, "a person"), Sampling(temperature=0.0), options, records.append))
    forced = [each for each in records if each.drafter == "forced"]
    assert len(forced) >= 3 and sum(each.accepted_tokens for each in forced) > 8
    assert {event.drafter for event in events} >= {"forced", None}


def test_other_grammars_and_a_free_preamble(demo: Model) -> None:
    ids, greedy = prompt(demo, "a person"), Sampling(temperature=0.0)

    def answer(**fields: str) -> str:
        return demo.generate(ids, greedy, GenerateOptions(max_tokens=60, **fields)).text

    assert answer(grammar='start: "yes" | "no"') in ("yes", "no")
    assert answer(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert answer(regex="[a-c]{3}/[0-9]")[3] == "/"
    free = demo.generate(ids, greedy, GenerateOptions(max_tokens=6, drafter="none"))
    begun, mark = demo.decode(free.token_ids[:2]), demo.decode(free.token_ids[2:5])  # what the model writes anyway
    found = answer(json_schema='{"const": {"a": 1}}', free_until=mark)
    assert found.startswith(begun + mark) and json.loads(found.removeprefix(begun + mark)) == {"a": 1}
