"""What every engine checks: a batch before its pass, and the logits of the first one for damaged weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.engines.base import EngineFacts
from edgespec.errors import BatchError, ContextFull
from edgespec.types import NO_PARENT, Batch, Logits, TokenIds


def check_batch(batch: Batch, facts: EngineFacts, vocabulary_size: int, lengths: list[int]) -> None:
    """Raises BatchError or ContextFull for what no engine accepts; `lengths` of the sequences now."""
    width = batch.width
    if width == 0:
        raise BatchError("a batch needs at least one row")
    if width > facts.max_batch:
        raise BatchError(f"a batch of {width} rows was given, this engine takes at most {facts.max_batch}")
    if not (batch.parents.size == batch.sequences.size == batch.outputs.size == width):
        raise BatchError("a batch needs one parent, sequence and output flag per row")
    ids, parents, sequences = batch.token_ids.tolist(), batch.parents.tolist(), batch.sequences.tolist()
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary_size:
        raise BatchError(f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocabulary_size - 1}")
    if True not in batch.outputs.tolist():
        raise BatchError("a batch needs at least one row with logits")
    for row, (parent, sequence) in enumerate(zip(parents, sequences, strict=True)):
        if not 0 <= sequence < facts.max_sequences:
            raise BatchError(f"row {row} names sequence {sequence}, this engine has 0..{facts.max_sequences - 1}")
        if parent >= row or parent < NO_PARENT:
            raise BatchError(f"row {row} follows row {parent}, which does not come before it")
        if parent >= 0 and sequences[parent] != sequence:
            raise BatchError(f"row {row} of sequence {sequence} follows a row of another sequence")
    for sequence in set(sequences):
        rows = sequences.count(sequence)
        if lengths[sequence] + rows > facts.context_length:
            raise ContextFull(
                f"sequence {sequence} holds {lengths[sequence]} tokens; {rows} more do not fit the context of "
                f"{facts.context_length}. Give a larger --ctx-size or a shorter prompt"
            )


def check_texts(texts: Sequence[TokenIds], most: int, vocabulary_size: int) -> None:
    """Raises BatchError for texts to embed that are empty, of over `most` tokens, or of unknown ones."""
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= most:
            raise BatchError(f"text {index} has {len(text)} tokens; one of 1 to {most} can be embedded")
        low, high = int(text.min()), int(text.max())
        if low < 0 or high >= vocabulary_size:
            raise BatchError(f"token id {low if low < 0 else high} is outside the vocabulary 0..{vocabulary_size - 1}")


def fault_of(logits: Logits) -> str:
    """What is wrong with the logits [rows, vocabulary] of a few different tokens; empty when nothing is.

    Weights that are all zero load without an error and give every token the same score.
    """
    if not np.isfinite(logits).all():
        return "its logits are not numbers"
    if logits.shape[1] > 1 and (logits.max(axis=1) == logits.min(axis=1)).any():
        return "it gives every token the same score, as weights that are all zero do"
    return ""
