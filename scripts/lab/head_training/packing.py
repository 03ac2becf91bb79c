"""The trained head as a heads file of edgespec, with the probe that tells its target from others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgespec.formats.head_file import HeadFile, HeadManifest, write_head_file
from head_training.llama import Llama, Weights

PROBE, PROBE_TOKENS = "The capital of France is Paris, a city on the river Seine in the north.", 12
DEPTH = 4


def write_heads(
    path: Path,
    source: Path,
    name: str,
    weights: Mapping[str, Tensor],
    learnt_ids: Tensor,
    counts: Tensor,
    read_layers: tuple[int, ...],
    tokenizer: Any,
    sizes: tuple[int, int],
    figures: Mapping[str, float],
) -> None:
    """`learnt_ids`: the draft vocabulary of the training; `counts` [vocabulary], by which tokens are chosen;
    `sizes`: tokens of the draft vocabulary that is written, and how many of them are always scored."""
    target = Weights(source, torch.float32)
    order = torch.argsort(-counts, stable=True)
    ids, frequent = torch.sort(order[: sizes[0]]).values, set(order[: sizes[1]].tolist())
    places = np.array([place for place, token in enumerate(ids.tolist()) if token in frequent], np.int32)
    probe = tokenizer.encode(PROBE, add_special_tokens=False).ids[:PROBE_TOKENS]
    states, _ = Llama(target, read_layers=read_layers, is_scaled=False).read(torch.tensor([probe]))
    facts = target.sizes
    manifest = HeadManifest(
        kind="eagle",
        depth=DEPTH,
        hidden_size=facts.hidden,
        vocabulary_size=facts.vocabulary,
        target=name,
        target_sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_size,
        ffn=len(weights["gate_proj"]),
        rope_theta=facts.rope_theta,
        norm_eps=facts.epsilon,
        layers=read_layers,
        figures=dict(figures),
    )
    arrays = {name: weight.float().numpy() for name, weight in weights.items()}
    # Embeddings are rows of unit size on average over the vocabulary, which is a smaller one now.
    shrunk = target.head[ids].square().mean().sqrt() / target.head[learnt_ids].square().mean().sqrt()
    arrays["fc"][:, facts.hidden :] *= float(shrunk)
    heads = HeadFile(
        manifest,
        arrays,
        target.head[ids].numpy(),
        ids.numpy().astype(np.int32),
        np.asarray(probe, np.int32),
        states[0].float().numpy(),
        places,
    )
    write_head_file(path, heads, "int8", "free space on the disk")
