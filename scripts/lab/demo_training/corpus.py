"""Training text for the demo family: task dialogues with tool calls, arithmetic word problems, Python functions.

Every document is one string in the demo's chat format (`models/demo/chat_template.jinja` renders the same). A tool
call and its result stand inside the assistant's turn, so that a chat without any real tool still reads as one.
Nothing here copies data into the project: documents live in memory and only weights are kept.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from edgespec.bench.prompts import (
    GSM8K_FILE,
    SGD_DEV_FILE,
    function_request,
    is_held_out,
    library_functions,
    read_lines,
)

BOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
SPECIAL_TOKENS = (BOS, TURN_START, TURN_END, *TOOL_CALL, *TOOL_RESPONSE)
SYSTEM_PROMPT = "You are a helpful assistant."
SGD_TRAIN_FILE = "sgd_train.jsonl.xz"

Domains = dict[str, list[str]]


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def assistant_content(message: dict[str, Any]) -> str:
    """Tool call, tool result and reply of one assistant message, in that order."""
    parts = []
    if call := message.get("call"):
        parts.append(TOOL_CALL[0] + compact_json(call) + TOOL_CALL[1] + "\n")
        parts.append(TOOL_RESPONSE[0] + compact_json(message.get("result", {})) + TOOL_RESPONSE[1] + "\n")
    parts.append(message["content"])
    return "".join(parts)


def tool_line(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})"


def dialogue(record: dict[str, Any], tools: dict[str, list[str]], rng: random.Random) -> str:
    """One dialogue; half of them name their tools in a system turn."""
    turns = []
    if rng.random() < 0.5:
        called = sorted({m["call"]["name"] for m in record["messages"] if m.get("call")})
        lines = [tool_line(name, tools[name]) for name in called]
        system = SYSTEM_PROMPT + ("\nTools:\n" + "\n".join(lines) if lines else "")
        turns.append(turn("system", system))
    for message in record["messages"]:
        content = message["content"] if message["role"] == "user" else assistant_content(message)
        turns.append(turn(message["role"], content))
    return BOS + "".join(turns)


def dialogues(path: Path, seed: int) -> list[str]:
    records = list(read_lines(path))
    tools: dict[str, set[str]] = {}
    for record in records:
        for message in record["messages"]:
            if call := message.get("call"):
                tools.setdefault(call["name"], set()).update(call["arguments"])
    named = {name: sorted(arguments) for name, arguments in tools.items()}
    rng = random.Random(seed)
    return [dialogue(record, named, rng) for record in records]


def arithmetic(path: Path) -> tuple[list[str], list[str]]:
    """(training, held-out) word problems; calculator marks removed, the result said in words."""
    train: list[str] = []
    held_out: list[str] = []
    for record in read_lines(path):
        answer = re.sub(r"<<[^>]*>>", "", record["answer"])
        answer = re.sub(r"\n#### (.*)$", r"\nThe answer is \1.", answer)
        text = BOS + turn("user", record["question"]) + turn("assistant", answer)
        (held_out if is_held_out(record["question"]) else train).append(text)
    return train, held_out


def function_document(signature: str, documentation: str, code: str, *, as_chat: bool) -> str:
    if not as_chat:
        return BOS + code + "\n"
    request = function_request(signature, documentation)
    return BOS + turn("user", request) + turn("assistant", f"```python\n{code}\n```")


def standard_library(seed: int) -> tuple[list[str], list[str]]:
    """(training, held-out) documented functions of this Python's own library, split by file."""
    rng = random.Random(seed)
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for path, functions in library_functions():
        for signature, documentation, code in functions:
            if code in seen:
                continue
            seen.add(code)
            document = function_document(signature, documentation, code, as_chat=rng.random() < 0.5)
            (held_out if is_held_out(path) else train).append(document)
    return train, held_out


def load_corpus(data: Path, seed: int) -> tuple[Domains, Domains]:
    """(training, held-out) documents by domain; held-out dialogues are another file, partly of unseen services.

    Raises FileNotFoundError when `data` lacks one of the named files.
    """
    missing = [name for name in (GSM8K_FILE, SGD_TRAIN_FILE, SGD_DEV_FILE) if not (data / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{data} lacks {', '.join(missing)}: give the folder of the data files with --data")
    math_train, math_held_out = arithmetic(data / GSM8K_FILE)
    code_train, code_held_out = standard_library(seed)
    train = {"dialogue": dialogues(data / SGD_TRAIN_FILE, seed), "code": code_train, "arithmetic": math_train}
    held_out = {"dialogue": dialogues(data / SGD_DEV_FILE, seed), "code": code_held_out, "arithmetic": math_held_out}
    return train, held_out
