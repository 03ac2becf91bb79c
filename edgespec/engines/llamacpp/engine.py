"""The llama.cpp engine, on the library's low-level functions.

One unified KV cache holds all sequences; in reproducible mode with several of them, each has a stream of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine, EngineFacts, check_batch, check_threads
from edgespec.engines.envelope import StateStamp
from edgespec.engines.held import HeldFiles
from edgespec.engines.llamacpp.cells import Cells
from edgespec.engines.llamacpp.eagle3 import Eagle3Head
from edgespec.engines.llamacpp.facts import keeps_running_state, measured_facts, read_facts, will_be_reproducible
from edgespec.engines.llamacpp.layers import LayerInputs
from edgespec.engines.llamacpp.library import CancelFlag, complaints, forget_complaints, library, open_model, version
from edgespec.engines.llamacpp.rows import RowBuffer, Selection
from edgespec.engines.llamacpp.settings import (
    DEFAULT_CONTEXT,
    MAX_BATCH,
    MAX_BRANCHES,
    WIDEST,
    ContextSettings,
    choose_context_length,
    create_context,
    require_generator,
)
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.rows import SequenceBook, SequenceRows, split_by_sequence
from edgespec.errors import BatchError, Cancelled, CapabilityError, ContextFull, EngineError, StateError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.eagle3 import ARCHITECTURE as EAGLE3
from edgespec.formats.gguf.split import model_files
from edgespec.types import Batch, Logits, TokenIds

NO_ROOM, ABORTED = 1, 2


class LlamaCppEngine(Engine):
    """One GGUF model in llama.cpp. Make it with `load`. Logits stay valid until the next `forward`.

    In reproducible mode the logits of a sequence depend bitwise on its tokens alone.
    """

    vocabulary: LlamaCppVocabulary

    def __init__(self, model: Any, context: Any, path: Path, settings: ContextSettings, cancel: CancelFlag) -> None:
        llama = library()
        self._model, self._context, self._cancel = model, context, cancel
        self._decode, self._get_logits = llama.llama_decode, llama.llama_get_logits
        self._rows = RowBuffer(settings.batch_capacity, settings.sequence_ids)
        self._book = SequenceBook(settings.max_sequences)
        self._cells = Cells(context, settings, self._book)
        self._scratch_id = settings.scratch_id
        self._hidden_size = int(llama.llama_model_n_embd(model))
        self._gives_hidden = False
        self._hidden_rows = 0  # of the last pass
        self._layer_inputs = LayerInputs(model, context)
        kinds = (settings.cache_type_k, settings.cache_type_v, settings.flash_attention, version())
        self._held = HeldFiles(model_files(path))
        self._stamp = StateStamp.of("llamacpp", model_files(path), *kinds)
        self.vocabulary = LlamaCppVocabulary(model)
        self._max_outputs = settings.max_outputs(self.vocabulary.size)
        self.facts: EngineFacts = read_facts(model, context, settings)
        if not self.facts.can_rollback:
            # An aborted pass could not be rolled back; `forward` still checks the flag before each pass.
            llama.llama_set_abort_callback(context, llama.ggml_abort_callback(), None)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        gpu_layers: int = 0,
        max_sequences: int = 1,
        max_batch: int = MAX_BATCH,
        max_branches: int = MAX_BRANCHES,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        flash_attention: bool | None = None,
        reproducible: bool | None = None,
        widest: int = WIDEST,
        check_tensors: bool = False,
        default_context: int = DEFAULT_CONTEXT,
    ) -> Self:
        """Load `path` and measure what it can do.

        `context_length` in tokens per sequence, None for the trained one up to `default_context`; `threads` None for
        the physical cores; `gpu_layers` -1 for all; `max_branches`, side branches of all trees in a batch;
        `cache_type_k` and `cache_type_v` None for f16, or q8_0 where reproducible mode would pad single tokens;
        `reproducible` True finds a width class, None uses one only if it costs nothing, False uses none; `widest`, the
        widest pass of a class, which then limits `facts.max_batch`, so that prompts are read inside it;
        `check_tensors` reads all weights and refuses NaN.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this
        build or model cannot do what was asked.
        """
        header = check_gguf(path)
        if header.architecture == EAGLE3:
            raise CapabilityError(
                f"{path.name} is an EAGLE-3 head, which only drafts for another model: give it with -md/--model-draft"
            )
        checked = partial(
            ContextSettings.checked,
            context_length=choose_context_length(path, header.context_length, context_length, default_context),
            threads=threads,
            gpu_layers=gpu_layers,
            max_sequences=max_sequences,
            max_batch=max_batch,
            max_branches=max_branches,
            flash_attention=flash_attention,
            reproducible=reproducible,
            widest=widest,
        )
        if reproducible and not gpu_layers and cache_type_k is cache_type_v is None and flash_attention is not False:
            settings = checked(cache_type_k="q8_0", cache_type_v="q8_0")
            found = cls._open_unpadded(path, settings, check_tensors)
            if found is not None:
                return found
        settings = checked(cache_type_k=cache_type_k or "f16", cache_type_v=cache_type_v or "f16")
        return cls._open(path, settings, check_tensors=check_tensors)

    @classmethod
    def _open_unpadded(cls, path: Path, settings: ContextSettings, check_tensors: bool) -> Self | None:
        """With the cache types of `settings`, if single-token passes then have the bits of wider ones; else None.

        With an f16 cache of 512 cells and more llama.cpp's attention has a path of its own for one row, so that single
        tokens have to be padded, which takes 1.5 to 2 times as long. With a q8_0 cache it has not.
        """
        try:
            engine = cls._open(path, settings, check_tensors=check_tensors)
        except CapabilityError:
            return None
        if engine.facts.pinned_class is not None and engine.facts.pinned_class[0] == 1:
            note = (
                "reproducible: the KV cache is q8_0, with which single-token steps need no padding (-ctk f16 -ctv f16 "
                "keeps f16, at up to twice the time per undrafted token)"
            )
            engine.facts = replace(engine.facts, notes=(*engine.facts.notes, note))
            return engine
        engine.close()
        return None

    @classmethod
    def _open(cls, path: Path, settings: ContextSettings, *, check_tensors: bool) -> Self:
        model = open_model(path, gpu_layers=settings.gpu_layers, check_tensors=check_tensors)
        if keeps_running_state(model):
            settings = replace(settings, max_branches=0)
        if settings.max_sequences > 1 and will_be_reproducible(path, settings):
            settings = replace(settings, max_branches=0, streams=True)
        cancel = CancelFlag()
        try:
            require_generator(model, path)
            context = create_context(model, path, settings, cancel)
        except BaseException:
            library().llama_model_free(model)
            raise
        engine = cls(model, context, path, settings, cancel)
        try:
            engine.facts = measured_facts(engine, path, settings, engine._state_size)
        except BaseException:
            engine.close()
            raise
        return engine

    def forward(self, batch: Batch) -> Logits:
        self._require_open()
        check_batch(batch, self.facts, self.vocabulary.size, self._book.lengths)
        if np.count_nonzero(batch.outputs) > self._max_outputs:
            raise BatchError(f"a batch may ask for at most {self._max_outputs} rows of logits; split it")
        if self._cancel.is_set:
            self._cancel.clear()
            raise Cancelled("the pass was cancelled before it began; the cache is as before")
        placed = split_by_sequence(batch, self._book.lengths)
        for sequence in placed:
            self._book.check_settled(sequence)
        with self._held:
            kept = self._run(batch, placed)
        self._book.record(placed)
        return self._logits(kept)

    def _run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Selection:
        """One pass, padded into the pinned class; the caller adds its rows to the sequences' lengths."""
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        self._rows.fill(batch, placed, self._cells.prepare(placed))
        self._rows.pad(low, self._scratch_id)
        self._choose_hidden(batch.width)
        # The last layer and the head run on rows with logits only, whose number must be in the class as well.
        kept = self._rows.widen_outputs(batch.outputs, low)
        forget_complaints()
        result = self._decode(self._context, self._rows.struct)
        if result:
            self._hidden_rows = 0
            self._layer_inputs.passed(0)
            self._raise_failed(result, batch.width)
        self._layer_inputs.passed(batch.width)
        return kept

    def _choose_hidden(self, width: int) -> None:
        """A pass with hidden states computes logits of all rows, so it must be narrow enough for them."""
        gives = self._gives_hidden and self._rows.struct.n_tokens <= self._max_outputs
        self._hidden_rows = width if gives else 0
        library().llama_set_embeddings(self._context, gives)
        if gives:
            self._rows.outputs[: self._rows.struct.n_tokens] = 1

    def _raise_failed(self, result: int, width: int) -> NoReturn:
        if result == ABORTED:
            self._cancel.clear()
            raise Cancelled("the pass was cancelled; the cache is as before")
        if result == NO_ROOM:
            raise ContextFull(f"no room for {width} more tokens in the KV cache. Give a larger --ctx-size")
        raise EngineError(f"llama.cpp failed on a pass of {width} rows (result {result}): {complaints()}")

    def _logits(self, kept: Selection) -> Logits:
        rows = kept.stop if isinstance(kept, slice) else int(kept[-1]) + 1
        logits: Logits = np.ctypeslib.as_array(self._get_logits(self._context), (rows, self.vocabulary.size))[kept]
        return logits

    def give_hidden_states(self, wanted: bool) -> None:
        self._require_open()
        self._gives_hidden = wanted

    def hidden_states(self) -> NDArray[np.float32]:
        self._require_open()
        if not self._hidden_rows:
            raise CapabilityError(
                f"the last pass gave no hidden states: call give_hidden_states(True) before a pass of at most "
                f"{self._max_outputs} rows"
            )
        states = library().llama_get_embeddings(self._context)
        last = np.ctypeslib.as_array(states, (self._hidden_rows, self._hidden_size))
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
            raise CapabilityError("an EAGLE-3 head and heads that read layers cannot be used at once: leave one out")

    def layer_inputs(self) -> NDArray[np.float32]:
        self._require_open()
        return self._layer_inputs.read()

    def load_head(self, path: Path, *, context_length: int | None = None, gpu_layers: int = 0) -> Eagle3Head:
        """The EAGLE-3 head `path` for this model; close it first. Raises as `Eagle3Head.load`."""
        self._require_open()
        return Eagle3Head.load(
            path,
            (self._model, self._context),
            self.vocabulary,
            threads=self.facts.threads,
            context_length=context_length,
            gpu_layers=gpu_layers,
        )

    def length(self, sequence: int = 0) -> int:
        self._require_open()
        self._book.check(sequence)
        return self._book.lengths[sequence]

    def rollback(self, to_length: int, sequence: int = 0) -> None:
        length = self.length(sequence)
        self._book.check_rollback(to_length, sequence)
        was_tree = self._book.forget_last(sequence)
        if to_length == length and not was_tree:
            return
        if to_length == 0:
            self._cells.forget(sequence)
            return
        if not self.facts.can_rollback:
            raise CapabilityError(
                f"{self.facts.architecture} models keep a running state that cannot be rolled back to {to_length} of "
                f"{length} tokens; use --drafter none"
            )
        self._cells.drop_from(to_length, sequence)

    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        """As in the base class. In reproducible mode an accepted side branch is decoded again as a chain."""
        self._require_open()
        part, path = self._book.chosen(rows, sequence)
        if not part.is_tree:
            self.rollback(part.base + len(path), sequence)
        elif self.facts.pinned_class and path != list(range(len(path))):
            self._decode_again(part.token_ids[path], part.base, sequence)
        else:
            self._cells.keep_branch(path, part, sequence)
        self._book.forget_last(sequence)

    def _decode_again(self, token_ids: TokenIds, base: int, sequence: int) -> None:
        """The cells of a side branch are in another order than its tokens, and attention adds in the order of cells."""
        self._cells.drop_from(base, sequence)
        self._book.forget_last(sequence)
        was_cancelled, gave_hidden = self._cancel.is_set, self._gives_hidden
        self._gives_hidden = False  # it would overwrite more rows of logits than are saved here
        self._cancel.clear()
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        scored = self._logits(slice(0, low))
        before = scored.copy()
        self.forward(Batch.chain(token_ids, sequence=sequence, last_only=True))
        scored[:] = before
        self._gives_hidden = gave_hidden
        if was_cancelled:
            self._cancel.set()

    def fork(self, source: int, destination: int) -> None:
        self._require_open()
        self._book.check_settled(source)
        self._book.check(destination)
        if source != destination:
            self._book.forget_last(destination)
            self._cells.fork(source, destination)

    def save_state(self, sequence: int = 0) -> bytes:
        self._require_open()
        self._book.check_settled(sequence)
        self._cells.trim(sequence)
        size = self._state_size(sequence)
        buffer = (ctypes.c_uint8 * size)()
        forget_complaints()
        written = library().llama_state_seq_get_data(self._context, buffer, size, sequence)
        if written != size:
            raise EngineError(f"llama.cpp wrote {written} of {size} bytes of the state: {complaints()}")
        return self._stamp.wrap(bytes(buffer), self._book.lengths[sequence])

    def load_state(self, state: bytes, sequence: int = 0) -> None:
        self._require_open()
        self._book.check(sequence)
        payload, length = self._stamp.unwrap(state)
        if length > self.facts.context_length:
            raise StateError(f"the state holds {length} tokens, this context {self.facts.context_length}")
        self._book.forget_last(sequence)
        self._cells.forget(sequence)
        if not length:
            return
        forget_complaints()
        buffer = (ctypes.c_uint8 * len(payload)).from_buffer_copy(payload)
        if not library().llama_state_seq_set_data(self._context, buffer, len(payload), sequence):
            self._cells.forget(sequence)
            raise StateError(f"llama.cpp refused the state, the sequence is now empty: {complaints()}")
        self._book.lengths[sequence] = length

    @property
    def most_branches(self) -> int:
        return self._cells.most_branches if self.facts.can_tree else 0

    def _state_size(self, sequence: int = 0) -> int:
        return int(library().llama_state_seq_get_size(self._context, sequence))

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        if self.facts.device != "cpu":
            return False
        library().llama_set_n_threads(self._context, threads, threads)
        return True

    def cancel(self) -> None:
        self._require_open()
        self._cancel.set()

    def clear_cancel(self) -> None:
        self._require_open()
        self._cancel.clear()

    def close(self) -> None:
        if self._context is None:
            return
        self._held.close()
        self.vocabulary.close()
        library().llama_free(self._context)
        library().llama_model_free(self._model)
        self._context = self._model = None

    def _require_open(self) -> None:
        if self._context is None:
            raise EngineError("this engine is closed; load the model again")
