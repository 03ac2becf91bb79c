"""The llama.cpp engine, on the library's low-level functions.

One unified KV cache holds all sequences; where they need no branches, and in reproducible mode, each has a stream of
its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.engines.base import EngineFacts, check_threads
from edgespec.engines.booked import BookedEngine
from edgespec.engines.llamacpp.cached_texts import CachedTexts
from edgespec.engines.llamacpp.cells import Cells
from edgespec.engines.llamacpp.embeddings import Embedder
from edgespec.engines.llamacpp.facts import read_facts
from edgespec.engines.llamacpp.heads import DEFAULT_CONTEXT as HEAD_CONTEXT
from edgespec.engines.llamacpp.heads import FORMS, Head, load_head, own_layers
from edgespec.engines.llamacpp.library import ABORTED, NO_ROOM, complaints, forget_complaints, library, version
from edgespec.engines.llamacpp.loading import OpenModel, load_engine
from edgespec.engines.llamacpp.rows import RowBuffer, Selection
from edgespec.engines.llamacpp.rpc import RpcServer
from edgespec.engines.llamacpp.states import AllStates, HiddenStates, LayerInputs
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_files import HeldFiles, StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.engines.rows import SequenceBook, SequenceRows, check_texts
from edgespec.errors import Cancelled, CapabilityError, ContextFull, EngineError
from edgespec.formats.gguf.check import is_gemma4_drafter, model_files
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import check_cache
from edgespec.types import Batch, Logits, PoolingName, TokenIds


class LlamaCppEngine(BookedEngine):
    """One GGUF model in llama.cpp. Make it with `load`. Logits stay valid until the next `forward`.

    In reproducible mode the logits of a sequence depend bitwise on its tokens alone.
    """

    vocabulary: LlamaCppVocabulary

    def __init__(self, path: Path, found: OpenModel) -> None:
        llama = library()
        model, context, settings, self._cancel = found
        self._path, self._settings = path, settings
        self._embedder: Embedder | None = None
        self._model, self._context = model, context
        self._decode, self._get_logits = llama.llama_decode, llama.llama_get_logits
        self._rows = RowBuffer(settings.batch_capacity, settings.sequence_ids)
        self._book = SequenceBook(settings.max_sequences)
        self._cells = Cells(context, settings, self._book)
        self._scratch_id = settings.scratch_id
        self._place = 0, 0  # address and rows of the logits
        self._all_logits = np.zeros((0, 0), np.float32)
        self._texts = CachedTexts(self._cells, self._book)
        self._layer_inputs = LayerInputs(model, context)
        kinds = (settings.cache_type_k, settings.cache_type_v, settings.flash_attention, version())
        self._held = HeldFiles(model_files(path))
        self._stamp = StateStamp.of("llamacpp", model_files(path), *kinds)
        self.vocabulary = LlamaCppVocabulary(model)
        self._max_outputs = settings.max_outputs(self.vocabulary.size)
        self._hidden_states = HiddenStates(model, context, self._max_outputs)
        self.facts: EngineFacts = read_facts(model, context, settings)
        if not self.facts.can_rollback:
            # An aborted pass could not be rolled back; `forward` still checks the flag before each pass.
            llama.llama_set_abort_callback(context, llama.ggml_abort_callback(), None)

    @classmethod
    def load(
        cls,
        path: Path,
        use: ModelUse | None = None,
        *,
        servers: tuple[RpcServer, ...] = (),
        **changes: Any,
    ) -> Self:
        """Load `path` and measure what it can do; `changes`: of `use`.

        `servers`: RPC servers whose devices this process has (see `RemoteEngine`), and which hold all layers unless
        `gpu_layers` tells how many. The widest pass of a width class limits `facts.max_batch`, so that prompts are read
        inside it. Where reproducible mode would pad single tokens with keys in f16, and no type was asked for, they are
        cached in q8_0.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this
        build or model cannot do what was asked.
        """
        use = replace(use or ModelUse(), **changes)
        engine = load_engine(cls, path, use, servers)
        with closed_on_failure(engine):
            engine.read_layers(use.state_layers)
        return engine

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        self._held.check()
        return self._logits(self._run(batch, placed))

    def _run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Selection:
        """One pass, padded into the pinned class; the caller adds its rows to the sequences' lengths."""
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        self._rows.fill(batch, placed, self._cells.prepare(placed))
        self._rows.pad(low, self._scratch_id)
        self._hidden_states.prepare(self._rows, batch.width)
        # The last layer and the head run on rows with logits only, whose number must be in the class as well.
        kept = self._rows.widen_outputs(batch.outputs, low)
        forget_complaints()
        result = self._decode(self._context, self._rows.struct)
        if result >= 0:
            self._cells.ran()
        if result:
            self._hidden_states.forget()
            self._layer_inputs.passed(0)
            self._raise_failed(result, batch.width)
        self._layer_inputs.passed(batch.width)
        return kept

    def _raise_failed(self, result: int, width: int) -> NoReturn:
        if result == ABORTED:
            self._cancel.clear()
            raise Cancelled("the pass was cancelled; the cache is as before")
        if result == NO_ROOM:
            raise ContextFull(f"no room for {width} more tokens in the KV cache. Give a larger --ctx-size")
        raise EngineError(f"llama.cpp failed on a pass of {width} rows (result {result}): {complaints()}")

    def _logits(self, kept: Selection) -> Logits:
        rows = kept.stop if isinstance(kept, slice) else int(kept[-1]) + 1
        pointer = self._get_logits(self._context)
        place = ctypes.addressof(pointer.contents), rows
        if place != self._place:  # the library seldom moves them, and making an array of a pointer takes long
            self._place, self._all_logits = place, np.ctypeslib.as_array(pointer, (rows, self.vocabulary.size))
        logits: Logits = self._all_logits[kept]
        return logits

    def give_hidden_states(self, wanted: bool) -> None:
        self._require_open()
        self._hidden_states.are_wanted = wanted

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        last = self._hidden_states.read()
        return np.concatenate((self._layer_inputs.read(), last), axis=1) if self.state_layers else last

    def read_layers(self, layers: tuple[int, ...]) -> None:
        """Make `layers` the `state_layers`. Raises CapabilityError where llama.cpp does not give their inputs."""
        self._require_open()
        self._layer_inputs.ask(layers, self.facts.architecture)
        self.state_layers = layers

    def give_layer_inputs(self, layers: tuple[int, ...]) -> None:
        self._require_open()
        if not self.state_layers:
            self._layer_inputs.ask(layers, self.facts.architecture)
        elif layers:
            raise CapabilityError("a draft head and heads that read layers cannot be used at once: leave one out")

    def layer_inputs(self) -> NDArray[np.float32]:
        self._require_open()
        return self._layer_inputs.read()

    def embed(self, texts: Sequence[TokenIds], pooling: PoolingName) -> NDArray[np.float32]:
        self._require_open()
        check_texts(texts, self.facts.context_length, self.vocabulary.size)
        if self._embedder is None:
            self._embedder = Embedder(self._model, self._settings, self._cancel, self.facts.kv_bytes_per_token)
        self._held.check()
        return self._embedder.embed(texts, pooling)

    def load_head(self, path: Path, *, context_length: int | None = None, gpu_layers: int = 0) -> Head:
        """The head `path` for this model; close it first. Raises as `heads.load_head`.

        Where its target's keys and values are on a GPU, a gemma4's layers must be there too.
        """
        self._require_open()
        header = read_header(path)
        if is_gemma4_drafter(header):
            check_cache(path.name, header, read_header(self._path))
            gpu_layers = 0 if self.facts.device == "cpu" else -1
        models, threads = (self._model, self._context), self.facts.threads
        found = load_head(
            path, models, self.vocabulary, threads=threads, context_length=context_length, gpu_layers=gpu_layers
        )
        self._give_states_by(FORMS[found.form].states)
        return found

    def load_mtp(self, *, context_length: int | None = None) -> Head:
        """The model's multi-token prediction layers as a head; close it first. Raises as `own_layers`."""
        self._require_open()
        length = min(context_length or HEAD_CONTEXT, self.facts.context_length)
        found = own_layers(self._model, self.vocabulary, threads=self.facts.threads, context_length=length)
        self._give_states_by(AllStates)
        return found

    def _give_states_by(self, way: type[HiddenStates] | None) -> None:
        """Give hidden states in another way from now on."""
        if way is not None:
            self._hidden_states = way.instead_of(self._hidden_states, self._model, self._context)
            self.states_of = way.rows

    def _truncate(self, to_length: int, sequence: int) -> None:
        self._texts.rollback(to_length, sequence, self.facts)

    def checkpoint(self, sequence: int = 0) -> None:
        if self.facts.has_checkpoints and self.length(sequence):
            self._texts.checkpoint(sequence)

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        self.length(sequence)
        return self._texts.reachable(to_length, sequence, self.facts)

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        """In reproducible mode an accepted side branch is decoded again as a chain."""
        if not part.is_tree:
            self._truncate(part.base + len(path), sequence)
        elif self.facts.pinned_class and path != list(range(len(path))):
            self._decode_again(part.token_ids[path], part.base, sequence)
        else:
            self._cells.keep_branch(path, part, sequence)

    def _decode_again(self, token_ids: TokenIds, base: int, sequence: int) -> None:
        """The cells of a side branch are in another order than its tokens, and attention adds in the order of cells."""
        self._cells.drop_from(base, sequence)
        self._book.forget_last(sequence)
        was_cancelled, gave_hidden = self._is_cancelled, self._hidden_states.are_wanted
        self._hidden_states.are_wanted = False  # it would overwrite more rows of logits than are saved here
        self._is_cancelled = False
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        scored = self._logits(slice(0, low))
        before = scored.copy()
        try:
            self.forward(Batch.chain(token_ids, sequence=sequence, last_only=True))
        finally:
            scored[:] = before
            self._hidden_states.are_wanted = gave_hidden
            if was_cancelled:
                self._is_cancelled = True

    def _copy(self, source: int, destination: int) -> None:
        self._texts.fork(source, destination)

    def _state(self, sequence: int) -> memoryview:
        return self._cells.save(sequence)

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._texts.load(state, length, sequence, self.facts)

    @property
    def most_branches(self) -> int:
        return self._cells.most_branches if self.facts.can_tree else 0

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        if self.facts.device != "cpu":
            return False
        library().llama_set_n_threads(self._context, threads, threads)
        return True

    @property
    def _is_cancelled(self) -> bool:
        return self._cancel.is_set

    @_is_cancelled.setter
    def _is_cancelled(self, wanted: bool) -> None:
        if wanted:
            self._cancel.set()
        else:
            self._cancel.clear()

    def _free(self) -> None:
        self._held.close()
        self.vocabulary.close()
        if self._embedder is not None:
            self._embedder.close()
        library().llama_free(self._context)
        library().llama_model_free(self._model)
