"""The finished folder: weights, config, the target's tokenizer, the rounds, and what all of it was made from."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edgespec import __version__
from edgespec.export.training.journal import ROUNDS, RoundResult, best_round, rounds_csv
from edgespec.export.training.request import DistillRequest, file_hash
from edgespec.export.training.students import StudentShape
from edgespec.export.training.target import TOKENIZER_FILES, TargetFacts

_LOSS_NAMES = {"tv": "total variation", "kl": "Kullback-Leibler divergence"}


def write_folder(
    folder: Path,
    student: Any,
    request: DistillRequest,
    facts: TargetFacts,
    shape: StudentShape,
    rounds: Sequence[RoundResult],
) -> None:
    """Write all files to `folder`, replacing an earlier attempt. Raises OSError when the disk refuses."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    student.to(torch.float16 if request.weights == "f16" else torch.float32)
    student.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    for name in TOKENIZER_FILES:
        if (facts.folder / name).is_file():
            shutil.copyfile(facts.folder / name, folder / name)
    name = request.output.name
    texts = {"README.md": model_card(name, request, facts, shape, rounds), "NOTICE": notice(name, request, facts)}
    for file, text in {ROUNDS: rounds_csv(rounds), **texts}.items():
        (folder / file).write_text(text, encoding="utf-8")


def model_card(
    name: str, request: DistillRequest, facts: TargetFacts, shape: StudentShape, rounds: Sequence[RoundResult]
) -> str:
    """README.md: for which target, how made, what was measured."""
    parameters = shape.parameters(facts.size("vocab_size"))
    what = (
        f"A small model for speculative decoding: it proposes tokens that {facts.name} accepts or rejects, and is of "
        f"little use alone. {parameters / 1e6:.1f} million parameters: layers {shape.layers}, width {shape.hidden}, "
        f"heads {shape.heads} (for keys and values {shape.kv_heads}), feed-forward {shape.ffn}. Vocabulary and "
        "tokenizer are the target's."
    )
    table = "\n".join(f"| {r.index} | {r.tokens} | {r.greedy:.3f} | {r.sampled:.3f} |" for r in rounds)
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft-model, edgespec]
---
# {name}: a draft for {facts.name}

{_filled(what)}

## How it was made

{_filled(_how(request, shape, rounds))}

## Acceptance on held-out prompts

Along text that the target wrote itself: the share of positions where both choose the same token (greedy), and 1 minus
the total variation distance at temperature 1 (sampled). Round 0 is the untrained student.

| round | tokens learnt from | greedy | sampled |
|---|---|---|---|
{table}
"""


def _how(request: DistillRequest, shape: StudentShape, rounds: Sequence[RoundResult]) -> str:
    if shape.layers_of_target:
        start = f"layers {', '.join(map(str, shape.layers_of_target))} of the target"
    else:
        start = "random layers and the principal directions of the target's embedding"
    prompts = "prompts from the texts named in NOTICE" if request.data else "its own begin token"
    return (
        f"With edgespec {__version__} (`edgespec distill`), seed {request.seed}. It began with {start}. In every round "
        f"the target continued {prompts}, {request.round_prompts} times by up to {request.reply_tokens} tokens at "
        f"temperatures from 0 to 1; the student then learnt the target's distribution on {request.tokens_per_round} "
        f"tokens, with {request.share:g} cross-entropy and {1 - request.share:g} {_LOSS_NAMES[request.loss]} as its "
        "loss (Leviathan et al. 2211.17192, DistillSpec 2310.08461). These weights are those of round "
        f"{best_round(rounds).index}, the best in acceptance of the {rounds[-1].index} that were run."
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def notice(name: str, request: DistillRequest, facts: TargetFacts) -> str:
    """What went into the weights, file by file: whether they may be passed on depends on these."""
    lines = [
        f"{name}: what these weights were made from",
        "",
        f"* Target: {facts.name}. Its outputs were learnt from and its tokenizer is copied here: its",
        "  licence applies to this folder too.",
    ]
    lines += [f"* Text: {path.name} (sha256 {file_hash(path)})" for path in request.data]
    if request.data:
        lines += [
            "",
            "No text is copied here. Whoever publishes the weights must read these files' licences.",
        ]
    return "\n".join(lines) + "\n"
