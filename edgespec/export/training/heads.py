"""Trains Medusa or EAGLE heads for any Hugging Face target, and writes the heads file.

In each round the target generates text, the heads train on it, and their acceptance is measured on held-out prompts. It
stops like a distillation; the best heads are kept.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.export.training.documents import Corpus
from edgespec.export.training.heads_network import EagleHead, MedusaHeads
from edgespec.export.training.heads_request import HeadsRequest
from edgespec.export.training.heads_trainer import HeadsTrainer, new_heads, states_of
from edgespec.export.training.journal import RESUME_FIX, Journal, RoundResult, best_round
from edgespec.export.training.on_policy import Distilled, Say, load_parts, reason_of, run_rounds
from edgespec.export.training.preparation import Preparation
from edgespec.export.training.target import TargetFacts
from edgespec.export.training.trainer import Advance
from edgespec.formats.head_file import PROJECT, HeadFile, HeadManifest, write_head_file

PROBE_TOKENS = 12


def build_heads_trainer(prepared: Preparation) -> tuple[HeadsTrainer, Corpus | None]:
    """Load the target and create the heads; returns (trainer, corpus of held-out prompts or None)."""
    request, facts = prepared.request, prepared.facts
    assert isinstance(request, HeadsRequest)
    target, corpus, held_out = load_parts(prepared)
    heads = new_heads(request, facts, prepared.shape, target, corpus)
    return HeadsTrainer(request, facts, prepared.shape, target, heads, corpus), held_out


def train_heads(prepared: Preparation, journal: Journal, say: Say, advance: Advance) -> Distilled:
    """Train until done and write the file; returns the result. Raises and resumes as `on_policy.distill` does."""
    request = prepared.request
    assert isinstance(request, HeadsRequest)
    trainer, held_out = build_heads_trainer(prepared)
    journal.need_space(32 * sum(weight.numel() for weight in trainer.student.parameters()))
    run_rounds(trainer, held_out, journal, say, advance)
    trainer.student.load_state_dict(trainer.best)
    write_head_file(journal.result, head_file(trainer, prepared.facts), request.storage, RESUME_FIX)
    journal.publish()
    return Distilled(request.output, tuple(trainer.rounds), reason_of(request, trainer))


def head_file(trainer: HeadsTrainer, facts: TargetFacts) -> HeadFile:
    """The trained heads in the format of the runtime."""
    heads, vocabulary = trainer.student, trainer.student.vocabulary
    probe = trainer.held_out["greedy"][0].token_ids[:PROBE_TOKENS]
    with torch.no_grad():
        ids = torch.tensor([probe], device=heads.device)
        states = states_of(trainer.target, ids, trainer.request.read_layers, scaled=False)[0]
    arrays = {name.removesuffix(".weight"): weight.detach().cpu().numpy() for name, weight in heads.named_parameters()}
    if isinstance(heads, MedusaHeads):
        arrays = {
            f"{kind}.{place // heads.blocks}.{place % heads.blocks}": weight.detach().cpu().numpy()
            for kind, given in (("weight", heads.weights), ("bias", heads.biases))
            for place, weight in enumerate(given)
        } | {name: array for name, array in arrays.items() if name == PROJECT}
    return HeadFile(
        manifest(trainer, facts),
        arrays,
        vocabulary.weight.cpu().numpy(),
        vocabulary.token_ids.cpu().numpy().astype(np.int32),
        np.asarray(probe, np.int32),
        states.cpu().numpy(),
        frequent_places(trainer),
    )


def frequent_places(trainer: HeadsTrainer) -> NDArray[np.int32] | None:
    """Places in the draft vocabulary of the tokens that are always scored: the target's commonest; None: of all."""
    most, ids = trainer.request.frequent, trainer.student.vocabulary.token_ids.cpu().numpy()
    if most is None or most >= ids.size:
        return None
    written = np.concatenate([ids[own] for ids, own in trainer.pool]) if trainer.pool else ids[:0]
    counts = np.bincount(written, minlength=int(ids[-1]) + 1)[ids]
    return np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int32)


def manifest(trainer: HeadsTrainer, facts: TargetFacts) -> HeadManifest:
    heads, best = trainer.student, best_round(trainer.rounds)
    layer: dict[str, Any] = {}
    if isinstance(heads, EagleHead):
        sizes = heads.shape
        layer = {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "ffn": sizes.ffn}
    return HeadManifest(
        kind=trainer.request.kind,
        depth=heads.depth,
        hidden_size=facts.size("hidden_size"),
        vocabulary_size=facts.size("vocab_size"),
        target=facts.name,
        target_sha256=weights_hash(facts),
        scale=heads.vocabulary.scale,
        blocks=heads.blocks if isinstance(heads, MedusaHeads) else 0,
        rope_theta=heads.rope_theta if isinstance(heads, EagleHead) else 10_000.0,
        layers=trainer.request.read_layers,
        figures=figures(best, heads.depth),
        **layer,
    )


def figures(best: RoundResult, depth: int) -> dict[str, float]:
    """Figures of the best round, as mean accepted length at draft length `depth`."""
    return {
        "greedy_mean_accepted_length": round(1 + depth * best.greedy, 4),
        "sampled_mean_accepted_length": round(1 + depth * best.sampled, 4),
        "tokens": best.tokens,
    }


def weights_hash(facts: TargetFacts) -> str:
    """SHA-256 over the hashes of the target's weight files."""
    digest = hashlib.sha256()
    for path in facts.weight_files:
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
