"""The corpus as token ids: encoded once, kept in the working folder, the same for every stage of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import load_corpus
from demo_training.pretrain import TokenStream
from demo_training.vocabulary import encode_documents
from edgespec.platform.files import atomic_file

HELD_OUT_DOCUMENTS = 60  # per domain: enough for a curve, few enough to score every five minutes


def _read(path: Path) -> dict[str, TokenStream]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def load_streams(
    tokenizer: Tokenizer, data: Path, work: Path, seed: int
) -> tuple[dict[str, TokenStream], dict[str, TokenStream]]:
    """(training, held-out) token ids by domain, from `work/streams_*.npz` or, the first time, from `data`."""
    paths = {kind: work / f"streams_{kind}.npz" for kind in ("train", "held_out")}
    if not all(path.exists() for path in paths.values()):
        train, held_out = load_corpus(data, seed)
        few = {domain: documents[:HELD_OUT_DOCUMENTS] for domain, documents in held_out.items()}
        for kind, documents in (("train", train), ("held_out", few)):
            streams = {domain: encode_documents(tokenizer, texts) for domain, texts in documents.items()}
            with atomic_file(paths[kind]) as temporary, temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **streams)
    return _read(paths["train"]), _read(paths["held_out"])
