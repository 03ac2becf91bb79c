"""A llama.cpp model that runs in a child process, because ggml ends a process whose RPC server is lost.

The child is only a cache: this class knows the tokens of every sequence. When the child is lost, the pass that noticed
fails with Unreachable; the next one starts another child, which loads the model again, and lets it read the tokens of
each sequence before that sequence is used. Logits come back over a pipe.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import EngineFacts, check_threads
from edgespec.engines.booked import BookedEngine
from edgespec.engines.envelope import StateStamp
from edgespec.engines.llamacpp.devices import require_rpc
from edgespec.engines.llamacpp.rpc_probe import ask_all
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.model_use import ModelUse
from edgespec.engines.proof import EVERY_WIDTH_TO
from edgespec.engines.remote_pipe import LOAD, Loaded
from edgespec.engines.remote_process import EngineProcess, ProcessEnded
from edgespec.engines.rows import SequenceBook, SequenceRows
from edgespec.errors import Cancelled, EdgespecError, StateError, Unreachable
from edgespec.formats.gguf.check import model_files
from edgespec.types import Batch, Logits, TokenIds

_DIAGNOSIS_S = 1.0  # for each server, when the child has ended


class RemoteEngine(BookedEngine):
    """A GGUF model on RPC servers. Make it with `load`. Logits stay valid until the next `forward`.

    Every method raises Unreachable when a server is lost, after which the engine can be used again: the caches are as
    before the call, and whatever needs the servers connects to them first.
    """

    vocabulary: VocabularyFile

    def __init__(self, path: Path, use: ModelUse) -> None:
        self._path, self._use = path, use
        self.state_layers = use.state_layers
        self._process: EngineProcess | None = None
        self._settings: dict[str, tuple[Any, ...]] = {}  # methods to call again in a new child, with their arguments
        self._ids: list[TokenIds] = []  # tokens by sequence
        self._unread: set[int] = set()  # sequences of which the child may have other tokens
        loaded = self._start()
        self.facts: EngineFacts = _facts(loaded)
        self.class_key, self._most_branches = loaded.class_key, loaded.most_branches
        self._book = SequenceBook(self.facts.max_sequences)
        self._ids = [np.zeros(0, np.int32)] * self.facts.max_sequences
        self._stamp = StateStamp.of("llamacpp over RPC", model_files(path), self.facts.kv_bytes_per_token)
        try:
            self.vocabulary = VocabularyFile(path)
        except BaseException:
            self._drop_child()
            raise

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> Self:
        """Load `path` onto the servers of `use`; `changes`: of it.

        Without servers the child computes itself. Raises what
        `LlamaCppEngine.load` does, Unreachable for a server that does not answer, and CapabilityError where this build
        of llama.cpp has no RPC.
        """
        use = replace(use or ModelUse(), **changes)
        if use.endpoints:
            require_rpc("--rpc")
        return cls(path, use)

    def _start(self) -> Loaded:
        """Load the model in a new child. Raises as `load`."""
        servers = ask_all(self._use.endpoints)
        self._process = process = EngineProcess()
        try:
            loaded: Loaded = process.call(LOAD, self._path, servers, self._use)
            for method, arguments in self._settings.items():
                process.call(method, *arguments)
        except ProcessEnded as exc:
            self._drop_child()
            self._raise_lost(exc)
        except BaseException:
            self._drop_child()
            raise
        return loaded

    def _raise_lost(self, ended: ProcessEnded) -> NoReturn:
        """Find out which server is gone."""
        try:
            ask_all(self._use.endpoints, _DIAGNOSIS_S)
        except Unreachable as exc:
            raise Unreachable(f"{exc}. The target was lost with it; the next answer connects again") from ended
        if self._is_cancelled:
            self._is_cancelled = False
            raise Cancelled("the pass was cancelled, and its process was ended; the caches are as before") from ended
        servers = f". All RPC servers ({', '.join(self._use.endpoints)}) answer now" if self._use.endpoints else ""
        raise Unreachable(
            f"the process with the target ended ({ended}){servers}: the next answer loads the model again"
        ) from ended

    def _call(self, method: str, *arguments: Any, sequences: tuple[int, ...] = ()) -> Any:
        """Call a method in the child. `sequences`: those that it changes."""
        process = self._running()
        try:
            return process.call(method, *arguments)
        except ProcessEnded as exc:
            self._drop_child()
            self._raise_lost(exc)
        except (EdgespecError, MemoryError):
            raise
        except BaseException:  # interrupted while it waited
            self._unread.update(sequences)
            raise

    def _drop_child(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
        self._unread = {sequence for sequence, ids in enumerate(self._ids) if ids.size}

    def _running(self) -> EngineProcess:
        """The child; another one if it was lost."""
        self._require_open()
        if self._process is None:
            loaded = self._start()
            self.facts = replace(_facts(loaded), notes=self.facts.notes)
            self.class_key = loaded.class_key
        assert self._process is not None
        return self._process

    def _bring_up_to_date(self, sequence: int) -> None:
        """Let the child's cache of a sequence hold its tokens."""
        self._running()
        ids = self._ids[sequence]
        if sequence in self._unread:
            self._call("rollback", 0, sequence)
            step = min(self.widest_pass, EVERY_WIDTH_TO)  # in reproducible mode the class has all these widths
            for start in range(0, ids.size, step):
                self._call("forward", Batch.chain(ids[start : start + step], sequence=sequence, last_only=True))
        self._unread.discard(sequence)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        try:
            for sequence in placed:
                self._bring_up_to_date(sequence)
            logits: Logits = self._call("forward", batch, sequences=tuple(placed))
        except Cancelled:
            self._is_cancelled = False
            raise
        for sequence, part in placed.items():
            if not part.is_tree:
                self._ids[sequence] = np.concatenate((self._ids[sequence], part.token_ids))
        return logits

    def _truncate(self, to_length: int, sequence: int) -> None:
        if self._has_read(sequence):
            self._call("rollback", to_length, sequence, sequences=(sequence,))
        self._ids[sequence] = self._ids[sequence][:to_length]

    def checkpoint(self, sequence: int = 0) -> None:
        if self.facts.has_checkpoints and self.length(sequence) and self._has_read(sequence):
            self._call("checkpoint", sequence)

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        may_lack = self.facts.state_window or not self.facts.can_rollback
        if not (may_lack and self._has_read(sequence)):
            return super().reachable(to_length, sequence)
        found: int = self._call("reachable", to_length, sequence)
        return found

    def _has_read(self, sequence: int) -> bool:
        """Whether there is a child whose cache holds the sequence."""
        return self._process is not None and sequence not in self._unread

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        if self._has_read(sequence):
            rows = tuple(part.rows[place] for place in path)
            self._call("keep_path", rows, sequence, sequences=(sequence,))
        self._ids[sequence] = np.concatenate((self._ids[sequence][: part.base], part.token_ids[path]))

    def _copy(self, source: int, destination: int) -> None:
        self._bring_up_to_date(source)
        self._call("fork", source, destination, sequences=(destination,))
        self._unread.discard(destination)
        self._ids[destination] = self._ids[source]

    def _state(self, sequence: int) -> bytes:
        self._bring_up_to_date(sequence)
        state: bytes = self._call("save_state", sequence)
        return self._ids[sequence].tobytes() + state

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        ids = np.frombuffer(state, np.int32, length)
        try:
            self._call("load_state", bytes(state[ids.nbytes :]), sequence, sequences=(sequence,))
        except StateError:
            self._unread.add(sequence)  # the library may have emptied it
            raise
        self._unread.discard(sequence)
        self._ids[sequence] = ids

    def give_hidden_states(self, wanted: bool) -> None:
        self._set("give_hidden_states", wanted)

    def give_layer_inputs(self, layers: tuple[int, ...]) -> None:
        self._set("give_layer_inputs", layers)

    def _set(self, method: str, argument: Any) -> None:
        """Call a method whose effect lasts, unless it would change nothing."""
        self._require_open()
        if self._settings.get(method) != (argument,) and (argument or method in self._settings):
            self._call(method, argument)
            self._settings[method] = (argument,)

    def hidden_states(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._call("hidden_states")
        return found

    def layer_inputs(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._call("layer_inputs")
        return found

    def drop_class(self) -> None:
        super().drop_class()
        self._use = replace(self._use, reproducible=False)  # for a later child
        if self._process is not None:
            self._call("drop_class")

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        return False  # the servers' threads are theirs

    @property
    def most_branches(self) -> int:
        return self._most_branches

    def cancel(self) -> None:
        super().cancel()
        if self._process is not None:
            self._process.cancel()

    def _free(self) -> None:
        if self._process is not None:
            self._process.close()
        self.vocabulary.close()


def _facts(loaded: Loaded) -> EngineFacts:
    """What the child says, but for blocks of prompts: a new child is told the tokens again, not how they were cut."""
    return replace(loaded.facts, prompt_block=0)
