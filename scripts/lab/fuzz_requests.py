"""Cases of `fuzz.py` with odd requests: to the Python API, and on the command line."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.cli.main import COMMANDS
from edgespec.config.options import SETTINGS
from edgespec.runtime import Model
from fuzz_cases import Case, Garbage, Known, command_line
from fuzz_mutate import ODD_VALUES

_MORE: tuple[Any, ...] = (
    *(b"x", 1j, object(), np.float32(0.5), np.int64(3), np.array([1, 2]), np.zeros((2, 2)), [1.5], [True], (1, 2)),
    *("\udcff", {1: math.inf}, {1: 2.0}, {5000: 1.0}, range(5), "auto", "none", ["a"], [{"role": "user"}], lambda: 1),
)
_LIKELY: dict[str, tuple[Any, ...]] = {
    "drafter": ("none", "ngram", "suffix", "lookahead", "tree", "model", "medusa"),
    "verify": ("coupled", "rejection", "block", "typical"),
    "draft_length": (0, 1, 5, 64, "auto"),
    "temperature": (0.0, 1e-300, 1e-6, 1.0, 100.0),
    "top_k": (0, 1, 2**31 - 1),
    "top_p": (1e-9, 0.5, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "penalty_window": (0, 1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logit_bias": ({1: -math.inf}, {1: 1e30}, {1: -1e30}, dict.fromkeys(range(4096), -math.inf)),
    "stop": (("x",), ("\0",), ("e", "t")),
    "max_tokens": (1, 3, 10**6),
}
_SAMPLING = tuple(Sampling.__dataclass_fields__)
_GENERATE = tuple(GenerateOptions.__dataclass_fields__)
_MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "["}}]}],
    *("hi", None, [], ["hi"], [{}], {"role": "user"}),
    *([{"role": "x", "content": "y"}], [{"role": "user", "content": 5}]),
)
_opened: list[Model] = []  # a process that runs several requests loads once


def _model() -> Model:
    if not _opened:
        _opened.append(edgespec.load("demo", threads=1))
    return _opened[0]


def cases(rng: random.Random, index: int, texts: Known) -> Case:
    """Case `index` of this kind."""
    if index % 6 == 5:
        return _command(rng)
    if index % 6 == 4:
        return _loading(rng)
    return _request(rng)


def _value(rng: random.Random, name: str) -> Any:
    likely = _LIKELY.get(name, ())
    return rng.choice(likely) if likely and rng.random() < 0.7 else rng.choice(ODD_VALUES + _MORE)


def _given(rng: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _value(rng, name) for name in rng.sample(names, rng.choice((0, 1, 1, 2)))}


def _request(rng: random.Random) -> Case:
    sampling, options = _given(rng, _SAMPLING), {"max_tokens": 6} | _given(rng, _GENERATE)
    if options["max_tokens"] is None or (isinstance(options["max_tokens"], int) and options["max_tokens"] > 100):
        options["stop"] = ("e",)
    prompt = "Find me a " if rng.random() < 0.8 else rng.choice(ODD_VALUES + _MORE)
    messages = rng.choice(_MESSAGES) if rng.random() < 0.2 else None

    def run(folder: Path) -> None:
        model = _model()
        asked = Sampling(**sampling), GenerateOptions(**options)
        if messages is not None:
            events = list(model.chat(messages, *asked))
            logprobs = [event.logprob for event in events]
        else:
            found = model.generate(prompt, *asked)
            logprobs = list(found.logprobs)
        if any(logprob is not None and not -math.inf < logprob <= 1e-3 for logprob in logprobs):
            raise Garbage(f"log probabilities {logprobs}")

    return Case(f"requests api: {_shown(sampling)} {_shown(options)} {_shown(prompt)} {_shown(messages)}", run)


def _loading(rng: random.Random) -> Case:
    names = tuple(edgespec.LoadOptions.__dataclass_fields__)
    given = {name: _value(rng, name) for name in rng.sample(names, rng.choice((1, 1, 2)))}
    given.setdefault("threads", 1)

    def run(folder: Path) -> None:
        with edgespec.load(**given) as model:
            model.generate("Find me", Sampling(seed=1), GenerateOptions(max_tokens=4))

    return Case(f"requests load: {_shown(given)}", run)


def _command(rng: random.Random) -> Case:
    name = rng.choice(("generate", "generate", "chat", "corpus", "doctor", *COMMANDS))
    numbers, paths = ("-1", "0", "1e400", "nan", "9" * 5000), ("/nonexistent", "../..", "demo")
    texts = ("", "x", "\x1b[2J", "-", "auto", "--", *numbers, *paths)
    flags = [rng.choice(setting.flags) for setting in rng.sample(SETTINGS, rng.choice((1, 2, 3)))]
    arguments = [name, "-n", "3", "-t", "1"] if name in ("generate", "chat") else [name]
    if name == "generate":
        arguments += ["-p", rng.choice(("hi", *texts))]
    for flag in flags:
        arguments += [flag, rng.choice(texts)] if rng.random() < 0.7 else [flag]
    if name not in ("generate", "chat"):
        arguments.append("--no-such-option" if rng.random() < 0.5 else "--help")
    stdin = rng.choice(
        ("", "hi\n", '"""\n', "/set temp 9e999\n/set seed 1.5\n/spec 99\n", "/load /\n/save /\n", "\0\xff\n")
    )

    def run(folder: Path) -> None:
        command_line(arguments, stdin=stdin)

    return Case(f"requests command: {_shown(arguments)} {_shown(stdin)}", run)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:160]
    except ValueError:
        return f"a huge {type(value).__name__}"
