"""The contract of a runtime under comparison, and the child process around it: JSON lines in and out.

{"do": "open", "files": {...}, "settings": {...}} -> {"ok": "library 1.2"}
{"do": "ask", "question": {...}}                  -> {"ok": {"answers": [...], "peak_bytes": ...}}
{"do": "encode", "texts": [...]}                  -> {"ok": [[ids], ...]}

`Refusal` becomes {"refused": text}. Any other exception ends the process: what a library's failure leaves behind is not
to be trusted. The end of standard input ends it too. Nothing here imports edgespec: other runtimes have environments of
their own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

Files = Mapping[str, str]
"""`target`, where given `draft` and `heads` (paths), `context` and `clients` (numbers as text), `log`, `program`."""
Settings = Mapping[str, Any]
"""`setting` (plain, lookup, draft, ...) and what a sweep chose: `threads`, `flash_attention`, ..."""

TOP_K, TOP_P, MIN_P = 40, 0.95, 0.05  # filters at temperatures above 0: what llama.cpp and edgespec do by default

CLASSES = {
    "edgespec": "in_process:Edgespec",
    "edgespec-serve": "over_http:EdgespecServer",
    "llama-server": "over_http:LlamaServer",
    "llama-cpp-python": "in_process:LlamaCppPython",
    "ik_llama.cpp": "over_http:IkServer",
    "openvino-genai": "openvino:OpenvinoGenai",
}


class Refusal(Exception):
    """The runtime cannot do what was asked; the text names the reason and the fix."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompts (token ids); each client asks the next one when it has its answer."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids without the end token, and the seconds from the first question until each came."""

    token_ids: Sequence[int]
    times_s: Sequence[float]


class Runtime(ABC):
    """One library with one model and one setting. `open` comes first and once; questions follow one at a time."""

    @abstractmethod
    def open(self, files: Files, settings: Settings) -> str:
        """Load; returns name and version. Raises Refusal when the library is missing or refuses the model."""

    @abstractmethod
    def ask(self, question: Question) -> list[Answer]:
        """An answer to each prompt, none read from a cache. They end where the model ends them."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Prompts in the model's chat format; only edgespec is asked, so that all get the same ids."""
        raise Refusal(f"{type(self).__name__} does not encode prompts")

    def process_ids(self) -> list[int]:
        """Processes that hold the model."""
        return [os.getpid()]

    def close(self) -> None:
        """End what would outlive this process."""


def library(module: str, package: str, install: str = "") -> tuple[Any, str]:
    """The imported module, and its name with version. Raises Refusal with the command that installs it."""
    try:
        return importlib.import_module(module), f"{package} {version(package)}"
    except ImportError as exc:
        raise Refusal(f"{package} is not installed ({exc}): pip install {install or package}") from exc


def peak_bytes(process_ids: Sequence[int]) -> int | None:
    """Most memory that the processes had resident, mapped files included; None where the system does not tell."""
    total = 0
    for process_id in process_ids:
        status = Path(f"/proc/{process_id}/status")
        if not status.is_file():
            return None
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        total += 1024 * int(lines["VmHWM"].split()[0])
    return total


def respond(runtime: Runtime, message: Mapping[str, Any]) -> Any:
    """The value that answers one message."""
    if message["do"] == "open":
        return runtime.open(message["files"], message["settings"])
    if message["do"] == "ask":
        answers = [asdict(answer) for answer in runtime.ask(Question(**message["question"]))]
        return {"answers": answers, "peak_bytes": peak_bytes(runtime.process_ids())}
    if message["do"] == "encode":
        return runtime.encode(message["texts"])
    raise Refusal(f"no order {message['do']!r}; allowed: open, ask, encode")


def serve(runtime: Runtime, lines: TextIO, replies: TextIO) -> None:
    """Answer every line until there are no more, then close the runtime."""
    try:
        for line in lines:
            try:
                reply = {"ok": respond(runtime, json.loads(line))}
            except Refusal as refusal:
                reply = {"refused": str(refusal)}
            print(json.dumps(reply), file=replies, flush=True)
    finally:
        runtime.close()


def main(name: str) -> None:
    """The child process of one runtime."""
    module, _, attribute = CLASSES[name].partition(":")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output; the replies must stay clean
    serve(getattr(importlib.import_module(f"peers.{module}"), attribute)(), sys.stdin, replies)
