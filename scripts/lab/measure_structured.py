"""JSON answers to the schemas of `structures` against free text of the same model: tokens per second of processor time.

    .venv/bin/python scripts/lab/measure_structured.py MODEL [--draft-length 4] [--drafter ngram] [--reproducible]

One thread and processor time, prefill left out, the kinds by turns: so a busy machine disturbs the ratios little. Each
ratio is the geometric mean over schemas with its standard error (of its logarithm). Every finished answer is checked
against its schema. The grammar's share is what masks, forced tokens and cut drafts take of all drafted JSON answers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from importlib import import_module
from typing import Any

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.sampling.constraint.state import Constraint, Mask
from structures import SCHEMAS

MOST_TOKENS = 400


class Grammar:
    """Counts the processor seconds that following the grammar takes."""

    seconds = 0.0
    _depth = 0

    def watch(self, kind: type, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*given: Any) -> Any:
            self._depth += 1
            started_s = time.thread_time()
            try:
                return method(*given)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - started_s

        return timed


class Answer:
    """One answer: its `text`, `tokens` behind the first, the processor `seconds` of these, `rounds`."""

    def __init__(self, model: Model, prompt: str, options: GenerateOptions) -> None:
        ids = model.encode_chat([{"role": "user", "content": prompt}])
        with model.stream(ids, Sampling(temperature=0.0), options) as generation:
            next(generation)
            started_s = time.process_time()
            self.tokens = sum(1 for _ in generation)
            self.seconds = time.process_time() - started_s
            self.rounds, found = generation.stats.rounds, generation.result()
        self.text, self.is_finished = found.text, found.finish_reason == "stop"

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def fits(self, schema: dict[str, Any]) -> bool:
        """Whether it ended by itself and is valid."""
        if not self.is_finished:
            return False
        try:
            found = json.loads(self.text)
        except ValueError:
            return False
        jsonschema: Any = import_module("jsonschema")  # it has no types
        return bool(jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS), help="how many")
    given = parser.parse_args()
    drafting: dict[str, Any] = {"drafter": given.drafter, "draft_length": given.draft_length, "logprobs": False}
    ratios: dict[str, list[float]] = {"JSON / free text, both plain": [], "JSON drafted / free text plain": []}
    ratios |= {"JSON / free text, both drafted": [], "JSON drafted / JSON plain": []}
    tokens = rounds = valid = 0
    json_s = grammar_s = 0.0
    grammar = Grammar()
    grammar.watch(Constraint, ("mask", "forced", "permitted"))
    grammar.watch(Mask, ("applied",))
    with edgespec.load(given.model, reproducible=given.reproducible, threads=1) as model:
        for name, what, schema in SCHEMAS[: given.schemas]:
            structured, free = f"Write {what} as JSON.", f"Tell me about {what}."
            drafted = GenerateOptions(max_tokens=MOST_TOKENS, json_schema=schema, **drafting)
            before_s = grammar.seconds
            json_drafted = Answer(model, structured, drafted)
            grammar_s, json_s = grammar_s + grammar.seconds - before_s, json_s + json_drafted.seconds
            count = json_drafted.tokens
            free_drafted = Answer(model, free, GenerateOptions(max_tokens=count, ignore_eos=True, **drafting))
            plain: dict[str, Any] = {"drafter": "none", "logprobs": False}
            free_plain = Answer(model, free, GenerateOptions(max_tokens=count, ignore_eos=True, **plain))
            json_plain = Answer(model, structured, GenerateOptions(max_tokens=MOST_TOKENS, json_schema=schema, **plain))
            found = (
                json_plain.rate / free_plain.rate,
                json_drafted.rate / free_plain.rate,
                json_drafted.rate / free_drafted.rate,
                json_drafted.rate / json_plain.rate,
            )
            for kind, ratio in zip(ratios, found, strict=True):
                ratios[kind].append(math.log(ratio))
            tokens, rounds = tokens + count, rounds + json_drafted.rounds
            fits = json_drafted.fits(schema)
            valid += fits
            said = "valid" if fits else "NOT VALID"
            print(f"  {name}: {count} tokens, {said}, {found[2]:.2f} of free text", flush=True)
    print(f"{given.model}: {given.schemas} schemas, {tokens} tokens in {rounds} rounds, {valid} valid")
    print(f"the grammar takes {1e3 * grammar_s / rounds:.2f} ms a round, {grammar_s / json_s:.1%} of the time")
    for name, logs in ratios.items():
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        print(f"{name:32} {math.exp(statistics.mean(logs)):.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
