"""A llama.cpp model that runs in a child process, because ggml ends a process whose RPC server is lost.

The child (`python -m edgespec.engines.remote`) is only a cache: this class knows the tokens of every sequence. When the
child is lost, the pass that noticed fails with Unreachable; the next one starts another child, which loads the model
again and reads the tokens of all sequences. Messages are pickled over two pipes: both ends are ours.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.config.values import split_endpoint
from edgespec.engines import progress
from edgespec.engines.base import Engine, EngineFacts, check_threads
from edgespec.engines.booked import BookedEngine
from edgespec.engines.llamacpp.rpc import add_servers, ask_all, keep_alive, require_rpc
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.model_files import StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.engines.proof import EVERY_WIDTH_TO
from edgespec.engines.rows import SequenceBook, SequenceRows
from edgespec.errors import Cancelled, EdgespecError, EngineError, StateError, Unreachable
from edgespec.formats.gguf.check import model_files
from edgespec.installation import child_environment
from edgespec.types import Batch, Logits, TokenIds

CANCEL_S = 4.0  # a pass that was cancelled and still runs then waits for a server that hangs
_DIAGNOSIS_S = 1.0  # for each server, when the child has ended
_ERROR_BYTES = 4000
_LOAD, _CANCEL = "load", "cancel"


class _Call(NamedTuple):
    """A method of the engine to call; a cancellation repeats its `number`, which counts up."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class _Report(NamedTuple):
    """Progress of a load, as the arguments of `Progress`."""

    done: int
    total: int
    what: str


class _Loaded(NamedTuple):
    """What the parent has to know of the engine: the answer to _LOAD."""

    facts: EngineFacts
    class_key: str
    most_branches: int


class RemoteEngine(BookedEngine):
    """A GGUF model on RPC servers. Make it with `load`. Logits stay valid until the next `forward`.

    Every method raises Unreachable when a server is lost, after which the engine can be used again: the caches are as
    before the call, and whatever needs the servers connects to them first.
    """

    vocabulary: VocabularyFile

    def __init__(self, path: Path, use: ModelUse) -> None:
        self._path, self._use = path, use
        self.state_layers = use.state_layers
        self._child: _Child | None = None
        self._gives_states = False
        self._ids: list[TokenIds] = []  # tokens by sequence
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

        Without servers the child computes itself. Raises what `LlamaCppEngine.load` does, Unreachable for a server that
        does not answer, and CapabilityError where this build of llama.cpp has no RPC.
        """
        use = replace(use or ModelUse(), **changes)
        if use.endpoints:
            require_rpc("--rpc")
        return cls(path, use)

    def _start(self) -> _Loaded:
        """Load the model in a new child, and have it read all sequences. Raises as `load`."""
        ask_all(self._use.endpoints)
        self._child = child = _Child()
        try:
            loaded: _Loaded = child.call(_LOAD, self._path, self._use)
            if self._gives_states:
                child.call("give_hidden_states", True)
            # in reproducible mode the class has all these widths
            step = min(loaded.facts.max_batch, EVERY_WIDTH_TO)
            for sequence, ids in enumerate(self._ids):
                for start in range(0, ids.size, step):
                    part = ids[start : start + step]
                    child.call("forward", Batch.chain(part, sequence=sequence, last_only=True))
        except _ChildEnded as exc:
            self._raise_lost(exc)
        except BaseException:
            self._drop_child()
            raise
        return loaded

    def _raise_lost(self, ended: _ChildEnded) -> NoReturn:
        """Find out which server is gone."""
        self._drop_child()
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

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the child; in another one if it was lost."""
        self._require_open()
        if self._child is None:
            loaded = self._start()
            self.facts = replace(_facts(loaded), notes=self.facts.notes)
            self.class_key = loaded.class_key
        assert self._child is not None
        try:
            return self._child.call(method, *arguments)
        except _ChildEnded as exc:
            self._raise_lost(exc)
        except (EdgespecError, MemoryError):
            raise
        except BaseException:  # an interrupt has ended it
            self._drop_child()
            raise

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        try:
            logits: Logits = self._call("forward", batch)
        except Cancelled:
            self._is_cancelled = False
            raise
        for sequence, part in placed.items():
            if not part.is_tree:
                self._ids[sequence] = np.concatenate((self._ids[sequence], part.token_ids))
        return logits

    def _truncate(self, to_length: int, sequence: int) -> None:
        if self._child is not None:
            self._call("rollback", to_length, sequence)
        self._ids[sequence] = self._ids[sequence][:to_length]

    def checkpoint(self, sequence: int = 0) -> None:
        if self.facts.has_checkpoints and self.length(sequence) and self._child is not None:
            self._call("checkpoint", sequence)

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        may_lack = self.facts.state_window or not self.facts.can_rollback
        if not may_lack or self._child is None:
            return super().reachable(to_length, sequence)
        found: int = self._call("reachable", to_length, sequence)
        return found

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        if self._child is not None:
            self._call("keep_path", tuple(part.rows[place] for place in path), sequence)
        self._ids[sequence] = np.concatenate((self._ids[sequence][: part.base], part.token_ids[path]))

    def _copy(self, source: int, destination: int) -> None:
        self._call("fork", source, destination)
        self._ids[destination] = self._ids[source]

    def _state(self, sequence: int) -> bytes:
        state: bytes = self._call("save_state", sequence)
        return self._ids[sequence].tobytes() + state

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        ids = np.frombuffer(state, np.int32, length)
        try:
            self._call("load_state", bytes(state[ids.nbytes :]), sequence)
        except StateError:
            self._drop_child()  # the library may have emptied the sequence
            raise
        self._ids[sequence] = ids

    def give_hidden_states(self, wanted: bool) -> None:
        self._require_open()
        if wanted != self._gives_states:
            self._call("give_hidden_states", wanted)
            self._gives_states = wanted

    def hidden_states(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._call("hidden_states")
        return found

    def drop_class(self) -> None:
        super().drop_class()
        self._use = replace(self._use, reproducible=False)  # for a later child
        if self._child is not None:
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
        if self._child is not None:
            self._child.cancel()

    def _free(self) -> None:
        self._drop_child()
        self.vocabulary.close()


def _facts(loaded: _Loaded) -> EngineFacts:
    """What the child says, but for blocks of prompts: a new child is told the tokens again, not how they were cut."""
    return replace(loaded.facts, prompt_block=0)


class _ChildEnded(Exception):
    """The child has ended. The message is the end of what its libraries wrote."""


class _Child:
    """The parent's handle of a child. `call` from one thread at a time, `cancel` from any."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgespec.engines.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(),
        )
        self._sending = threading.Lock()
        self._number = 0
        self._running = 0  # the number of the call that is being waited for

    def call(self, method: str, *arguments: Any) -> Any:
        """What the engine's method returns. Raises what it raises, and _ChildEnded; an interrupt ends the child."""
        self._number += 1
        self._running = self._number
        try:
            self._send(_Call(self._number, method, arguments))
            answer = self._answer()
        except (OSError, EOFError, pickle.UnpicklingError) as exc:
            raise _ChildEnded(self._last_words()) from exc
        except BaseException:  # half a message may be unread
            self._process.kill()
            raise
        finally:
            self._running = 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, call: _Call) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with self._sending:
            pickle.dump(call, stdin, protocol=5)
            stdin.flush()

    def _answer(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        while isinstance(message := pickle.load(stdout), _Report):
            progress.report(*message)
        return message

    def cancel(self) -> None:
        """Cancel the running call, if there is one. Safe in a signal handler, which may interrupt a `_send`."""
        if number := self._running:
            threading.Thread(target=self._cancel, args=(number,), daemon=True).start()

    def _cancel(self, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._send(_Call(number, _CANCEL))
        time.sleep(CANCEL_S)
        if self._running == number:
            self._process.kill()

    def close(self) -> None:
        """End the child. Closing twice is allowed."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what was not sent
                if pipe is not None:
                    pipe.close()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
        lines = self._errors.read().decode("utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
        return f"status {status}: {last}"


class _Server:
    """In the child: the engine and the calls that wait for it."""

    def __init__(self, calls: BinaryIO, answers: BinaryIO) -> None:
        self._received, self._answers = calls, answers
        self._engine: Engine | None = None
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._current = self._cancelled = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Receive calls, and act on a cancellation at once. Ends the process when the parent is gone."""
        while True:
            try:
                call: _Call = pickle.load(self._received)
            except (EOFError, OSError, pickle.UnpicklingError):
                os._exit(0)
            if call.method != _CANCEL:
                self._calls.put(call)
                continue
            with self._guard:
                self._cancelled = call.number
                if self._engine is not None and self._current == call.number:
                    self._engine.cancel()

    def run(self) -> None:
        while True:
            call = self._calls.get()
            self._begin(call.number)
            try:
                answer = self._result(call)
            except (EdgespecError, MemoryError) as exc:
                answer = exc
            except Exception as exc:
                answer = EngineError(f"{type(exc).__name__}: {exc}")
            self._send(answer)

    def _send(self, message: object) -> None:
        pickle.dump(message, self._answers, protocol=5)
        self._answers.flush()

    def _begin(self, number: int) -> None:
        with self._guard:
            self._current = number
            if self._engine is not None:
                self._engine.clear_cancel()
                if self._cancelled == number:
                    self._engine.cancel()

    def _result(self, call: _Call) -> Any:
        if call.method == _LOAD:
            self._engine = self._loaded(*call.arguments)
            return _Loaded(self._engine.facts, self._engine.class_key, self._engine.most_branches)
        assert self._engine is not None
        return getattr(self._engine, call.method)(*call.arguments)

    def _loaded(self, path: Path, use: ModelUse) -> Engine:
        """The model at `path`, on the devices of the servers of `use`. Raises as `LlamaCppEngine.load`."""
        from edgespec.engines.llamacpp import LlamaCppEngine
        from edgespec.engines.llamacpp.library import library, listening

        library()
        with listening(partial(print, file=sys.stderr, flush=True)):  # should ggml end this process, they say why
            if use.endpoints:
                keep_alive([split_endpoint(endpoint)[1] for endpoint in use.endpoints])
                add_servers(use.endpoints)
            with progress.reporting_to(lambda done, total, what: self._send(_Report(done, total, what))):
                return LlamaCppEngine.load(path, use)


def _main() -> None:
    """In the child, whose classes the parent must know by the name of this module, not as `__main__`."""
    from edgespec.engines import remote

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    remote._Server(sys.stdin.buffer, answers).run()


if __name__ == "__main__":
    _main()
