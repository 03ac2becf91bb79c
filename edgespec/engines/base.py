"""Base class of engines: one loaded model that scores batches of token rows and can roll back its KV cache.

An engine knows nothing of drafts, acceptance, sampling or text. It raises only the types of `edgespec.errors`, and
checks every input in Python, because several libraries end the process on bad input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import Closing
from edgespec.errors import CapabilityError, ConfigError
from edgespec.types import Batch, Logits, PoolingName, TokenIds
from edgespec.vocabulary import Vocabulary

EVERY_WIDTH_TO = 33  # rows of a pass: all widths up to here are tried for a class; prompts use these and the widest


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a loaded model can do."""

    name: str
    architecture: str
    context_length: int  # tokens per sequence
    max_sequences: int
    max_batch: int
    can_rollback: bool  # to any length, at any time
    weight_bytes: int
    kv_bytes_per_token: int
    # Pass widths (low, high) within which logits are bitwise equal whatever the width; None: not reproducible.
    pinned_class: tuple[int, int] | None
    device: str
    threads: int
    class_key: str = ""  # under which its classes are cached; empty: they follow from how its kernels are made
    max_branches: int = 0  # most side branches of the trees of a batch; 0: chains only, which are always allowed
    row_cost: float = 0.2  # a guess at what a further row adds to a pass over one, until passes tell
    prompt_block: int = 0  # with a narrow class, most rows of a pass that reads a prompt; 0: these keep to the class
    can_pack: bool = False  # rows of several sequences may share a pass; with a pinned class each keeps its bits
    splits_passes: bool = False  # it runs as several passes where these have different numbers of rows
    own_cells: bool = False  # each sequence has cells of its own, so that its passes do not look at others'
    notes: tuple[str, ...] = ()  # what the user should know about this load
    placement: str = ""  # devices' own names and how much of the model is on each; empty: all of it is on the CPU
    rollback_rows: int = 0  # without `can_rollback`, how many rows of the last pass can be dropped, once, and not all
    has_checkpoints: bool = False  # and what came after a checkpoint
    state_window: int = 0  # a loaded state holds only so many of the last tokens in some layers: it is not shortened
    pooling: str = ""  # of hidden states into an embedding, as the file says: mean, cls, last or another word
    writes: bool = True  # it generates text, and not embeddings alone
    why_no_speculation: str = "this model cannot roll back its state"

    def loaded_reach(self, length: int) -> int:
        """The shortest length but 0 to which a text can be shortened whose state of `length` tokens was loaded."""
        return length if 0 < self.state_window < length else 0

    @property
    def can_speculate(self) -> bool:
        """Whether the rejected end of a draft can be dropped."""
        return self.can_rollback or self.rollback_rows > 0


# Which rows of a pass have hidden states: all, and the logits of all are computed with them; those with logits only; or
# all, without further logits.
StatesOf = Literal["scored rows", "rows with logits", "all rows"]


class Engine(Closing, ABC):
    """One loaded model with KV caches for `facts.max_sequences` sequences. Not thread safe, `cancel` excepted."""

    facts: EngineFacts
    vocabulary: Vocabulary
    state_layers: tuple[int, ...] = ()  # ascending, counted from 0; their inputs come with the hidden states
    states_of: StatesOf = "scored rows"

    @abstractmethod
    def forward(self, batch: Batch) -> Logits:
        """Score all rows in one pass and append them to their sequences.

        Returns logits [number of rows with `outputs`, vocabulary size], float32, in row order: a view that the next
        call overwrites. Chain rows are in the cache afterwards (`length` grows by their number). After a tree,
        `length` is unchanged and `keep_path` must be called before anything else touches that sequence.
        In reproducible mode a batch narrower than the pinned class is padded with scratch rows, which are not kept.

        Raises BatchError for rows that no engine accepts (ids out of range, unknown sequence, empty, a parent that
        does not come first), ContextFull when they do not fit, Cancelled after `cancel()`; the caches are then as
        before the call.
        """

    @abstractmethod
    def length(self, sequence: int = 0) -> int:
        """Number of tokens in the KV cache of `sequence`."""

    @abstractmethod
    def rollback(self, to_length: int, sequence: int = 0) -> None:
        """Drop all tokens from position `to_length` on; the cache is then bitwise as if they had never been there.

        Raises BatchError when `to_length` is outside 0..length, CapabilityError when the model cannot roll back so far.
        """

    def checkpoint(self, sequence: int = 0) -> None:
        """Make the present length of a sequence one that `rollback` reaches; does nothing where it reaches all.

        Only the latest few are kept, and none beyond a length that was rolled back to.
        """

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        """The longest length that `rollback` reaches, up to `to_length`."""
        return to_length if self.facts.can_rollback or to_length == self.length(sequence) else 0

    @abstractmethod
    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        """Keep `rows` (a path from the root, ascending) of the last batch's rows of `sequence`; drop the others."""

    @abstractmethod
    def fork(self, source: int, destination: int) -> None:
        """Make `destination` hold exactly what `source` holds, whatever it held before."""

    @abstractmethod
    def save_state(self, sequence: int = 0) -> bytes:
        """The whole state of one sequence."""

    @abstractmethod
    def load_state(self, state: bytes | memoryview, sequence: int = 0) -> None:
        """Restore what `save_state` gave. Raises StateError when it is not from this model and settings."""

    def give_hidden_states(self, wanted: bool) -> None:
        """From the next pass on, give hidden states (`states_of` says of which rows), or stop; logits keep their bits.

        Raises CapabilityError where the engine or the export does not give them.
        """
        if wanted:
            raise CapabilityError(f"the {self.facts.name} engine gives no hidden states of this model")

    def hidden_states(self) -> NDArray[np.float32]:
        """Hidden states [rows, width] of the last pass, of one sequence only; a view as `forward`'s, or a copy.

        The last ones are the input of the head, after the final norm; the inputs of `state_layers` precede them, in
        their order, as wide each, or are all there is, where a head reads no others. Rows that have none (`states_of`)
        are 0. Raises CapabilityError unless `give_hidden_states` was called before that pass.
        """
        raise CapabilityError(f"the {self.facts.name} engine gives no hidden states of this model")

    def embed(self, token_ids: TokenIds, pooling: PoolingName) -> NDArray[np.float32]:
        """The embedding [hidden size] of a text of 1 to `facts.context_length` tokens, not normalised.

        Caches and hidden states of passes stay as they are. Raises BatchError for an empty or too long text or an id
        out of range, CapabilityError where the engine gives none or there is no memory, Cancelled after `cancel()`.
        """
        raise CapabilityError(
            "embeddings need a GGUF model in this process: ONNX models and models on RPC servers give none"
        )

    def drop_class(self) -> None:
        """Leave reproducible mode, because passes of the pinned class gave different bits; padding ends."""
        self.facts = replace(self.facts, pinned_class=None, class_key="", prompt_block=0)

    def set_threads(self, threads: int) -> bool:
        """Use `threads` threads from the next pass on; whether the engine can. Not to be called during a pass.

        With a pinned class the logits keep their bits. Without one they may change: llama.cpp's do for single-token
        passes over 512 cells or more. Raises ConfigError for a number outside 1..`facts.threads`.
        """
        check_threads(threads, self.facts)
        return False

    def thread_steps(self) -> tuple[int, ...]:
        """Numbers of threads worth trying, the most first."""
        return usual_steps(self.facts.threads)

    @abstractmethod
    def cancel(self) -> None:
        """End the running pass, or the next one, with Cancelled. May be called from any thread."""

    @abstractmethod
    def clear_cancel(self) -> None:
        """Drop a `cancel` that has not ended a pass yet."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; closing twice is allowed, any other call afterwards raises EngineError."""

    @property
    def widest_pass(self) -> int:
        """Most rows of a verifying pass; in reproducible mode, of the pinned class."""
        pinned = self.facts.pinned_class
        return min(pinned[1], self.facts.max_batch) if pinned else self.facts.max_batch

    @property
    def most_draft_tokens(self) -> int:
        """Most tokens of a draft: of a pass that verifies it, all rows but the first may have to be dropped."""
        facts = self.facts
        return self.widest_pass - 1 if facts.can_rollback else min(self.widest_pass - 1, facts.rollback_rows)


def usual_steps(most: int) -> tuple[int, ...]:
    """Numbers of threads to choose from, descending from `most`."""
    return tuple(sorted({most, max(most - 1, 1), max(most // 2, 1), max(most // 4, 1), 1}, reverse=True))


def check_threads(threads: int, facts: EngineFacts) -> None:
    """Raises ConfigError for a number of threads outside 1..`facts.threads`."""
    if not 1 <= threads <= facts.threads:
        raise ConfigError(f"{threads} threads were asked for, this model was loaded for 1..{facts.threads}")
