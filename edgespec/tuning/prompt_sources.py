"""Sources of prompts: a user's file, a folder of data files, Python's standard library, the built-in prompts.

From data that the demo models were trained on, only the held-out part is used.
"""

from __future__ import annotations

import io
import json
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, PromptError
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.platform.files import read_text
from edgespec.tuning.datasets import (
    GSM8K_FILE,
    SGD_DEV_FILE,
    function_request,
    is_held_out,
    library_functions,
    read_lines,
)
from edgespec.tuning.workload import BenchPrompt, Domains, copy_edit

SPEC_BENCH_FILE = "spec_bench_dev.jsonl.xz"
DATA_FILES = (SGD_DEV_FILE, GSM8K_FILE, SPEC_BENCH_FILE)
OWN_DOMAIN = "prompts"  # for lines without a domain
_SPEC_BENCH_DOMAINS = ("translation", "summarization", "qa", "math_reasoning", "rag")
PromptsOf = Callable[[dict[str, Any]], Iterator[BenchPrompt]]
_MULTI_TURN = "multi_turn"  # Spec-Bench's name for the categories of MT-bench


def read_prompts(path: Path) -> Domains:
    """Prompts of a file, by domain: one plain prompt per line, or (.jsonl) an object with "text" and optional "domain".

    Raises PromptError, naming the file and the line.
    """
    try:
        lines = list(io.StringIO(read_text(path), newline=None))  # splitlines cuts at marks that JSON allows, too
    except OSError as exc:
        raise PromptError(f"--prompts {path} cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise PromptError(f"--prompts {path} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"--prompts {path} has no prompt: give one per line")
    is_json = path.suffix == ".jsonl" or numbered[0][1].lstrip().startswith("{")
    domains: Domains = {}
    for number, line in numbered:
        place = f"--prompts {path} line {number}"
        prompt = _prompt_of(line, place) if is_json else BenchPrompt(OWN_DOMAIN, (line.rstrip("\n"),))
        domains.setdefault(prompt.domain, []).append(prompt)
    return domains


def _prompt_of(line: str, place: str) -> BenchPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:  # ValueError: also a whole number of too many digits
        raise PromptError(f"{place} is not JSON: {exc}") from exc
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f'{place} needs a non-empty "text", got {line[:60]!r}')
    domain = record.get("domain", OWN_DOMAIN)
    if not isinstance(domain, str) or not domain.strip():
        raise PromptError(f'{place}: "domain" must be a name, got {domain!r}')
    return BenchPrompt(domain, (text,))


def built_in() -> Domains:
    domains: Domains = {}
    for prompt in PROMPTS:
        domains.setdefault(prompt.domain, []).append(BenchPrompt(prompt.domain, (prompt.text,)))
    return domains


def read_data(folder: Path) -> Domains:
    """Held-out prompts of the data files in `folder`, by domain.

    `dialogue`: Schema-Guided Dialogue development set; `arithmetic`: GSM8K; the domains of Spec-Bench; `code` and
    `copying`: documented functions of Python's standard library, which need no file. Raises ConfigError if the folder
    has none of the files or a file is broken.
    """
    if not any((folder / name).is_file() for name in DATA_FILES):
        raise ConfigError(f"--data {folder} holds none of {', '.join(DATA_FILES)}: give the folder that holds them")
    domains: Domains = {}
    for name, prompts_of in _READERS.items():
        if (folder / name).is_file():
            for prompt in _prompts_of_file(folder / name, prompts_of):
                domains.setdefault(prompt.domain, []).append(prompt)
    for prompt in library_prompts():
        domains.setdefault(prompt.domain, []).append(prompt)
    return domains


def _prompts_of_file(path: Path, prompts_of: PromptsOf) -> Iterator[BenchPrompt]:
    for number, record in enumerate(_records(path), 1):
        try:
            yield from prompts_of(record)
        except (KeyError, TypeError, IndexError, AttributeError) as exc:
            raise ConfigError(f"--data {path} record {number} is not in this data set's format: {exc!r}") from exc


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from read_lines(path)
    except (OSError, lzma.LZMAError, EOFError) as exc:
        raise ConfigError(f"--data {path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    except ValueError as exc:  # bad JSON or bad UTF-8
        raise ConfigError(f"--data {path} is not JSON lines: {exc}") from exc


def _dialogue(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    """A conversation up to its middle user turn, counting only turns before the first tool call."""
    turns: list[str] = []
    for message in record["messages"]:
        if message.get("call") or message["role"] != ("assistant" if len(turns) % 2 else "user"):
            break
        turns.append(message["content"])
    questions = range(1, len(turns) + 1, 2)
    if questions:
        yield BenchPrompt("dialogue", tuple(turns[: questions[len(questions) // 2]]))


def _arithmetic(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    if is_held_out(record["question"]):
        yield BenchPrompt("arithmetic", (record["question"],))


def _spec_bench(record: dict[str, Any]) -> Iterator[BenchPrompt]:
    domain = record["category"] if record["category"] in _SPEC_BENCH_DOMAINS else _MULTI_TURN
    yield BenchPrompt(domain, (record["turns"][0],))


_READERS: dict[str, PromptsOf] = {
    SGD_DEV_FILE: _dialogue,
    GSM8K_FILE: _arithmetic,
    SPEC_BENCH_FILE: _spec_bench,
}


def library_prompts() -> Iterator[BenchPrompt]:
    """Requests to write documented functions of held-out library files, and to edit the short ones."""
    for _, functions in library_functions(is_held_out):
        for signature, documentation, code in functions:
            yield BenchPrompt("code", (function_request(signature, documentation),))
            edit = copy_edit(code, random.Random(signature))
            if edit is not None:
                yield edit
