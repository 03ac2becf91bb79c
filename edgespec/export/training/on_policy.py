"""Distils a draft model for any Hugging Face target (on-policy) and writes its folder.

In each round the target generates text, the student trains on it, and its acceptance is measured on held-out prompts.
It stops when acceptance no longer rises or all rounds are done; the best student is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from edgespec.errors import ModelFileError, StateError
from edgespec.export.tokens import read_tokenizer
from edgespec.export.training.card import write_folder
from edgespec.export.training.documents import Corpus, Encode
from edgespec.export.training.inherit import load_target, new_student, pick_device
from edgespec.export.training.journal import RESUME_FIX, Journal, RoundResult, best_round, stale_rounds
from edgespec.export.training.preparation import Preparation
from edgespec.export.training.request import DistillRequest
from edgespec.export.training.target import TOKENIZER_FILE, TargetFacts
from edgespec.export.training.trainer import LOGIT_COPIES, Advance, Trainer, temperatures
from edgespec.export.training.writing import write
from edgespec.platform.files import write_errors

TIMED_TOKENS = 4
STATE_COPIES = 5  # copies of the student in float32: itself, the best one, two gradient moments, one spare
Say = Callable[[str], None]


@dataclass(frozen=True)
class Distilled:
    """A finished training: its folder or file, all rounds, and why it stopped."""

    folder: Path
    rounds: tuple[RoundResult, ...]
    reason: str

    @property
    def best(self) -> RoundResult:
        return best_round(self.rounds)


def load_encoder(facts: TargetFacts) -> Encode:
    """The target's tokenizer. Raises ModelFileError if it cannot be read or has ids outside the model's vocabulary."""
    path = facts.folder / TOKENIZER_FILE
    tokenizer = read_tokenizer(facts.folder)
    assert tokenizer is not None, "require_libraries has checked it"
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= (size := facts.size("vocab_size")):
        raise ModelFileError(f"{path} has token id {last}, the model's vocabulary ends at {size - 1}")

    def encode(text: str, with_special_tokens: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=with_special_tokens).ids)

    return encode


def load_parts(prepared: Preparation) -> tuple[Any, Corpus | None, Corpus | None]:
    """(target, training corpus or None, corpus of held-out prompts or None)."""
    request, facts = prepared.request, prepared.facts
    device = pick_device(request.device)
    if device.type == "cuda":  # deterministic sums, so that the same seed gives the same weights
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    encode = load_encoder(facts)
    target = load_target(facts, device, torch.bfloat16 if request.precision == "bf16" else torch.float32)
    given = (prepared.documents, prepared.held_out)
    corpus, held_out = (Corpus(documents, facts, encode) if documents else None for documents in given)
    return target, corpus, held_out


def build_trainer(prepared: Preparation) -> tuple[Trainer, Corpus | None]:
    """Load the target and create the student; returns (trainer, corpus of held-out prompts or None)."""
    request, facts, shape = prepared.request, prepared.facts, prepared.shape
    target, corpus, held_out = load_parts(prepared)
    student = new_student(shape, facts, target, request.seed)
    return Trainer(request, facts, shape, target, student, corpus), held_out


def estimate(trainer: Trainer) -> str:
    """Remaining time and memory as text, from two training steps and a few generated tokens without side effects."""
    request, student = trainer.request, trainer.student
    shape = (request.rows, request.window)
    rng = np.random.default_rng([request.seed, 4])
    ids = torch.from_numpy(rng.integers(0, trainer.facts.size("vocab_size"), shape)).to(student.device)
    for _ in range(2):
        started = time.monotonic()
        trainer.accumulate(ids, torch.ones(shape, device=student.device), 1.0)
        step_s = time.monotonic() - started
    student.zero_grad(set_to_none=True)
    rows = min(trainer.rows_to_write(), request.round_prompts)
    prompts = rng.integers(0, trainer.facts.size("vocab_size"), (rows, min(16, request.window - request.reply_tokens)))
    started = time.monotonic()
    write(trainer.target, prompts.tolist(), TIMED_TOKENS, temperatures(rows), (), request.seed)
    text_s = (time.monotonic() - started) / TIMED_TOKENS / rows * request.reply_tokens
    # Measuring is a forward pass over about half a window per text: a quarter of the cost of training on it.
    measure_s = step_s * request.held_out_prompts / request.rows / 4 * 2
    round_s = step_s * request.steps_per_round + text_s * request.round_prompts + measure_s
    left = request.rounds - trainer.round_index
    total_s = left * round_s + (0 if trainer.rounds else 2 * text_s * request.held_out_prompts)
    return (
        f"at most {left} rounds of about {_duration(round_s)}, {_duration(total_s)} in all; memory about "
        f"{_memory_bytes(trainer) / 2**30:.1f} GiB besides Python and torch"
    )


def _memory_bytes(trainer: Trainer) -> int:
    request, facts = trainer.request, trainer.facts
    target = sum(weight.numel() * weight.element_size() for weight in trainer.target.parameters())
    student = 4 * STATE_COPIES * _parameters(trainer.student)
    scores = 4 * LOGIT_COPIES * trainer.rows_at_once * request.window * facts.size("vocab_size")
    cache = trainer.rows_to_write() * request.window * 8 * facts.size("num_hidden_layers") * facts.kv_heads
    return int(target + student + scores + cache * facts.head_dim)


def _parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def load_state(trainer: Trainer, journal: Journal) -> None:
    """Load the state after the last finished round. Raises StateError if it cannot be read."""
    try:
        trainer.load(journal)
    except (RuntimeError, KeyError, ValueError, TypeError, EOFError) as exc:
        raise StateError(f"{journal.state} cannot be read: {exc}; start over with --restart") from exc


def run_rounds(trainer: Trainer, held_out: Corpus | None, journal: Journal, say: Say, advance: Advance) -> None:
    """Run rounds until the trainer is done, resuming from the journal; the state is saved after each round."""
    request = trainer.request
    if journal.is_resumed:
        load_state(trainer, journal)
        say(f"resuming after round {trainer.round_index} of at most {request.rounds}, from {journal.folder}")
        advance(trainer.tokens_seen, "")
    if not trainer.is_done:
        say(estimate(trainer))
    if not trainer.rounds:
        started = time.monotonic()
        trainer.write_held_out(held_out, advance)
        say(round_line(trainer.measure(0, 1.0, started), None))
        trainer.save(journal)
    while not trainer.is_done:
        result = trainer.run_round(advance)
        trainer.save(journal)
        say(round_line(result, trainer.rounds[-2]))


def distill(prepared: Preparation, journal: Journal, say: Say, advance: Advance) -> Distilled:
    """Train until done and write the folder; returns the result.

    Raises CapabilityError, ModelFileError and ConfigError before work starts, StateError if a file cannot be written.
    After any exception, KeyboardInterrupt included, a call with an equal request resumes from the last finished round.
    """
    journal.need_space(8 * STATE_COPIES * prepared.shape.parameters(prepared.facts.size("vocab_size")))
    trainer, held_out = build_trainer(prepared)
    run_rounds(trainer, held_out, journal, say, advance)
    return _finish(prepared, journal, trainer)


def _finish(prepared: Preparation, journal: Journal, trainer: Trainer) -> Distilled:
    request = prepared.request
    trainer.student.load_state_dict(trainer.best)
    with write_errors(journal.result, SafetensorError, fix=RESUME_FIX):
        write_folder(journal.result, trainer.student, request, prepared.facts, prepared.shape, trainer.rounds)
    journal.publish()
    return Distilled(request.output, tuple(trainer.rounds), reason_of(request, trainer))


def reason_of(request: DistillRequest, trainer: Trainer) -> str:
    if trainer.round_index >= request.rounds:
        return f"all {request.rounds} rounds are done"
    stale = stale_rounds(trainer.rounds, request.min_rise)
    return f"acceptance has not risen by more than {request.min_rise:g} for {stale} rounds"


def round_line(result: RoundResult, before: RoundResult | None) -> str:
    """A line of text about a round: acceptance, its change, tokens, time."""
    change = "" if before is None else f" ({result.acceptance - before.acceptance:+.3f})"
    line = f"round {result.index}: acceptance {result.acceptance:.3f}{change}, greedy {result.greedy:.3f}, "
    line += f"sampled {result.sampled:.3f}"
    if before is None:
        return line + ", untrained"
    return line + f", {result.tokens} tokens, {result.own_tokens} newly generated, {_duration(result.seconds)}"
