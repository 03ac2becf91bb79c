"""Who takes part in a comparison: a contestant is one runtime with one setting, tuned by a sweep before it counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.base import Question, Refusal
from peers.process import Child, RuntimeFailure

Axes = Mapping[str, Sequence[Any]]
"""What a sweep may choose, one axis after the other; the first value is the library's default or the usual advice."""
RUNTIMES = ("edgespec", "llama-server", "llama-cpp-python", "ik_llama.cpp", "openvino-genai")
# Those that serve several clients at once.
OVER_HTTP = {"edgespec": "edgespec-serve", "llama-server": "llama-server", "ik_llama.cpp": "ik_llama.cpp"}
Failures = (Refusal, RuntimeFailure)


@dataclass(frozen=True, slots=True)
class Contestant:
    """`child`: the name of its class in the child process."""

    runtime: str
    setting: str
    child: str
    axes: Axes = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.setting}"

    @property
    def plain(self) -> str:
        """The name of its runtime's plain decoding."""
        return f"{self.runtime} plain"

    @property
    def learns(self) -> bool:
        """Whether it answers later prompts faster than its first ones."""
        return self.setting.startswith("default")

    @property
    def is_other_plain(self) -> bool:
        """Whether this is a baseline: plain decoding of another runtime than edgespec."""
        return self.setting == "plain" and self.runtime != "edgespec"


def contestants(
    chosen: Sequence[str], roles: Sequence[str], clients: int, threads: Sequence[int], *, is_cold: bool
) -> list[Contestant]:
    """All of the named runtimes, or RUNTIME/SETTING of one, that can run a model with these files (`roles`).

    `threads` to sweep, best known first. `is_cold` adds edgespec's default from an empty cache folder for every prompt.
    """
    has_draft = "draft" in roles
    own = ["plain", "default"] + ["default alone"] * (has_draft or "heads" in roles) + ["default cold"] * is_cold
    plain: dict[str, Axes] = {
        "llama-server": {"threads": threads, "flash_attention": ("auto", "off")},
        "llama-cpp-python": {"threads": threads, "flash_attention": (False, True)},
        "ik_llama.cpp": {"threads": threads, "flash_attention": ("on", "off")},
        "openvino-genai": {"threads": threads, "precision": ("default", "f32")},
    }
    lookup: dict[str, Axes] = {
        "llama-server": {
            "type": ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "default"),
            "ngram": (3, 5, None),
            "max_tokens": (8, 4, 16, None),
        },
        "ik_llama.cpp": {
            "type": ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
            "ngram": (3, 5, None),
            "max_tokens": (8, 4, 16, None),
            "autotune": (False, True),
        },
        "llama-cpp-python": {"num_tokens": (10, 5, 2), "max_ngram": (2, 3)},
        "openvino-genai": {"num_tokens": (5, 3, 8), "max_ngram": (3, 2)},
    }
    draft: dict[str, Axes] = {
        "llama-server": {"max_tokens": (3, 1, 5, 8, 16), "min_probability": (0.0, 0.4, 0.75, 0.9)},
        "ik_llama.cpp": {"max_tokens": (3, 1, 5, 8, 16), "min_probability": (0.0, 0.4, 0.75, 0.9)},
        "openvino-genai": {"num_tokens": (5, 3, 8)},
    }
    made = [Contestant("edgespec", setting, "edgespec") for setting in own]
    for runtime, axes in plain.items():
        made.append(Contestant(runtime, "plain", runtime, axes))
        if runtime in lookup:
            made.append(Contestant(runtime, "lookup", runtime, lookup[runtime]))
        if has_draft and runtime in draft:
            made.append(Contestant(runtime, "draft", runtime, draft[runtime]))
    if clients > 1:
        made = [Contestant(c.runtime, c.setting, OVER_HTTP[c.runtime], c.axes) for c in made if c.runtime in OVER_HTTP]
    return [c for c in made if c.runtime in chosen or f"{c.runtime}/{c.setting}" in chosen]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- The best settings of a contestant, on prompts that are not measured later.

Open = Callable[[Contestant, dict[str, Any]], Child]
Trial = dict[str, Any]
"""`settings`, and their `rate` in tokens per second; with the rate 0 a `failure`."""


def tune(
    contestant: Contestant,
    base: Mapping[str, Any],
    questions: Sequence[Question],
    open_child: Open,
    known: Sequence[Trial],
    tell: Callable[[Trial], None],
) -> tuple[dict[str, Any], list[Trial]]:
    """The best settings and all trials. `known`: trials of an interrupted sweep; each new one is told.

    `base`: what the runtime's plain decoding was tuned to. Raises Refusal when no settings work.
    """
    settings = {**base, "setting": contestant.setting, **{name: values[0] for name, values in contestant.axes.items()}}
    if not contestant.axes:
        return settings, []
    trials = list(known)

    def attempt(tried: dict[str, Any]) -> None:
        if any(trial["settings"] == tried for trial in trials):
            return
        try:
            trials.append({"settings": tried, "rate": _rate(open_child(contestant, tried), questions)})
            tell(trials[-1])
        except Failures as failure:
            trials.append({"settings": tried, "rate": 0.0, "failure": str(failure)})

    attempt(settings)
    for name, values in contestant.axes.items():
        for value in values[1:]:
            attempt({**settings, name: value})
        settings = max(trials, key=lambda trial: trial["rate"])["settings"]
    if not any(trial["rate"] for trial in trials):
        raise Refusal(trials[-1]["failure"])
    return settings, trials


def _rate(child: Child, questions: Sequence[Question]) -> float:
    """Tokens per second over the questions, the reading of prompts included, after a short answer that warms up."""
    tokens, seconds = 0, 0.0
    try:
        child.ask(warming(questions[0]))
        for question in questions:
            answers = child.ask(question).answers
            if not all(answer.token_ids for answer in answers):
                raise RuntimeFailure("wrote nothing where others write a text")
            tokens += sum(len(answer.token_ids) for answer in answers)
            seconds += max((answer.times_s[-1] for answer in answers if answer.times_s), default=0.0)
    finally:
        child.close()
    return tokens / seconds if seconds else 0.0


def warming(question: Question) -> Question:
    """A short answer to the beginning of its prompts: pages and buffers are touched."""
    return Question([prompt[:32] for prompt in question.prompts], 4, question.temperature, question.seed)
