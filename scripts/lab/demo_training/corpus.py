"""Training text for the demo family: task dialogues with tool calls, arithmetic word problems, Python functions.

Every document is one string in the demo's chat format (`models/demo/chat_template.jinja` renders the same). A tool
call and its result stand inside the assistant's turn, so that a chat without any real tool still reads as one.
Nothing here copies data into the project: documents live in memory and only weights are kept.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TOOL_CALL = ("<tool_call>", "</tool_call>")
TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
SPECIAL_TOKENS = (BOS, TURN_START, TURN_END, *TOOL_CALL, *TOOL_RESPONSE)
SYSTEM_PROMPT = "You are a helpful assistant."
HELD_OUT_FRACTION = 0.03
GSM8K_FILE, SGD_TRAIN_FILE, SGD_DEV_FILE = "gsm8k_train.jsonl.xz", "sgd_train.jsonl.xz", "sgd_dev.jsonl.xz"

Domains = dict[str, list[str]]


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """One object per line of an xz-packed JSON-lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def is_held_out(key: str) -> bool:
    """A split that depends on the document's own key alone, so it never moves when data is added."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < HELD_OUT_FRACTION * 2**32


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


def documented_functions(source: str) -> Iterator[tuple[str, str, str]]:
    """(signature, docstring, code) of every documented function of a module, dedented."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        documentation = ast.get_docstring(node)
        if not documentation or node.end_lineno is None or node.end_lineno - node.lineno > 80:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        yield f"{node.name}({ast.unparse(node.args)})", documentation, code


def function_request(signature: str, documentation: str) -> str:
    """What a user says who wants the function."""
    summary = documentation.split("\n\n")[0].replace("\n", " ")
    return f"Write a Python function `{signature}`: {summary}"


def function_document(signature: str, documentation: str, code: str, *, as_chat: bool) -> str:
    if not as_chat:
        return BOS + code + "\n"
    request = function_request(signature, documentation)
    return BOS + turn("user", request) + turn("assistant", f"```python\n{code}\n```")


def library_functions(
    is_wanted: Callable[[str], bool] = lambda path: True,
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(path, its documented functions as `documented_functions` gives them) of each file of this Python's library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in ("site-packages", "lib2to3") or not is_wanted(str(relative)):
            continue
        try:
            yield str(relative), list(documented_functions(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):  # the library's own tests hold broken files on purpose
            continue


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
