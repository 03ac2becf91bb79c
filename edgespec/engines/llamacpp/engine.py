"""The llama.cpp engine, on the library's low-level functions.

One unified KV cache holds all sequences; where they need no branches, and in reproducible mode, which scores chains
only, each has a stream of its own. A cache of keys and values is shortened by dropping cells. A running state
is not: it can drop the last rows of a pass where the library has snapshots of it, and return to
copies of it at lengths that a caller chose. Layers with a sliding window keep all their cells, but llama.cpp saves only
those in the window: a text that was loaded can be continued, not shortened.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.closing import closed_on_failure
from edgespec.engines.base import EngineFacts, check_threads
from edgespec.engines.booked import BookedEngine, Checkpoints, SequenceBook, SequenceRows, check_text
from edgespec.engines.llamacpp.cells import RUNNING_STATE_ONLY, Cells
from edgespec.engines.llamacpp.embeddings import Embedder
from edgespec.engines.llamacpp.footprint import HEAD_CONTEXT, ONLY_ASKED, num_snapshots
from edgespec.engines.llamacpp.heads import MTP_STATES, Head, load_head
from edgespec.engines.llamacpp.library import CancelFlag, check_pass, forget_complaints, library, version
from edgespec.engines.llamacpp.rows import RowBuffer, Selection
from edgespec.engines.llamacpp.settings import ContextSettings, create_context, open_model, placement_of, read_facts
from edgespec.engines.llamacpp.states import HiddenStates
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_files import HeldFiles, StateStamp
from edgespec.engines.model_use import ModelUse
from edgespec.engines.widths import METHOD, PREFIX, pinned_facts
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import (
    HEAD_NAMES,
    check_gguf,
    head_kind,
    is_gemma4_drafter,
    model_files,
    require_language_model,
)
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.gguf.heads import check_cache
from edgespec.platform.disk_cache import file_key, key_of
from edgespec.types import Batch, Logits, PoolingName, TokenIds


class LlamaCppEngine(BookedEngine):
    """One GGUF model in llama.cpp. Make it with `load`. Logits stay valid until the next `forward`.

    In reproducible mode the logits of a sequence depend bitwise on its tokens alone.
    """

    vocabulary: LlamaCppVocabulary

    def __init__(
        self, path: Path, header: GgufHeader, model: Any, context: Any, settings: ContextSettings, cancel: CancelFlag
    ) -> None:
        llama = library()
        self._path, self._settings, self._cancel = path, settings, cancel
        self._embedder: Embedder | None = None
        self._model, self._context = model, context
        self._decode, self._get_logits = llama.llama_decode, llama.llama_get_logits
        self._rows = RowBuffer(settings.max_rows, settings.sequence_ids)
        self._book = SequenceBook(settings.max_sequences)
        self._cells = Cells(context, settings, self._book)
        self._place = 0, 0  # address and rows of the logits
        self._all_logits = np.zeros((0, 0), np.float32)
        self._checkpoints = Checkpoints()
        self._least: dict[int, int] = {}  # by sequence, the length below which a loaded text lacks cells
        kinds = (settings.cache_type_k, settings.cache_type_v, settings.flash_attention, version())
        self._held = HeldFiles(model_files(path))
        self._stamp = StateStamp.of("llamacpp", model_files(path), *kinds)
        self.vocabulary = LlamaCppVocabulary(model)
        self._max_outputs = settings.max_outputs(self.vocabulary.size)
        self.facts: EngineFacts = read_facts(model, header, settings, context)
        self._hidden_states = HiddenStates(model, context, self.facts.architecture, self._max_outputs)
        if not self.facts.can_rollback:
            # An aborted pass could not be rolled back; `forward` still checks the flag before each pass.
            llama.llama_set_abort_callback(context, llama.ggml_abort_callback(), None)

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, cancel: CancelFlag | None = None, **changes: Any) -> Self:
        """Load `path` and measure what it can do; `changes`: of `use`; `cancel`: ends its passes.

        RPC servers, whose devices this process must have (see `RemoteEngine`), hold all layers unless `gpu_layers` says
        how many. The widest pass of a width class limits `facts.max_batch`, so that prompts are read inside it.

        Raises ModelNotFound, ModelFileError, ConfigError for an option out of range, CapabilityError when this
        build or model cannot do what was asked.
        """
        use, cancel = replace(use or ModelUse(), **changes), cancel or CancelFlag()
        if use.endpoints and not use.gpu_layers:
            use = replace(use, gpu_layers=-1)
        header = checked_target(path)
        length = use.length_for(path.name, header.context_length)
        snapshots = num_snapshots(header, speculates=use.speculates)
        settings = ContextSettings.checked(use, length, snapshots=snapshots)
        llama, model = library(), open_model(path, settings)
        keeps_state = llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
        settings = settings.for_model(keeps_state=keeps_state, has_window=llama.llama_model_n_swa(model) > 0)
        try:
            context = create_context(model, path, settings, cancel)
        except BaseException:
            llama.llama_model_free(model)
            raise
        engine = cls(path, header, model, context, settings, cancel)
        with closed_on_failure(engine):
            engine._measure(path, settings)
            if num_snapshots(header, speculates=True) and not snapshots and not use.endpoints:
                engine.facts = replace(engine.facts, why_no_speculation=ONLY_ASKED)
            engine._read_layers(use.state_layers)
        return engine

    def _measure(self, path: Path, settings: ContextSettings) -> None:
        """Complete the facts of an empty engine, which is left empty.

        Raises CapabilityError when it cannot be reproducible: of a running state, which cannot be rolled back, no width
        class can be proved.
        """
        if settings.reproducible and settings.keeps_state:
            raise CapabilityError(
                f"{path.name} cannot be reproducible: {self.facts.architecture} models keep a running state, whose "
                "bits depend on how many tokens a pass has. Use --no-reproducible"
            )
        sizes = []
        for _ in range(2):
            self.forward(Batch.chain([0]))
            sizes.append(library().llama_state_seq_get_size(self._context, 0))
        self.rollback(0)
        self.facts = replace(self.facts, kv_bytes_per_token=sizes[1] - sizes[0])
        if settings.reproducible:
            advice = f"Use a Q8_0 file in place of {path.name}, or --no-reproducible"
            self.facts = pinned_facts(self, _widths_key(path, settings), widest=settings.widest, advice=advice)

    def _score(self, batch: Batch, placed: dict[int, SequenceRows]) -> Logits:
        self._held.check()
        return self._logits(self._run(batch, placed))

    def _run(self, batch: Batch, placed: dict[int, SequenceRows]) -> Selection:
        """One pass, padded into the pinned class; the caller adds its rows to the sequences' lengths."""
        low = self.facts.pinned_class[0] if self.facts.pinned_class else 1
        self._rows.fill(batch, placed, self._cells.prepare(placed))
        self._rows.pad(low)
        self._hidden_states.prepare(self._rows, batch.width)
        # The last layer and the head run on rows with logits only, whose number must be in the class as well.
        kept = self._rows.widen_outputs(batch.outputs, low)
        forget_complaints()
        result = self._decode(self._context, self._rows.struct)
        if result:
            self._hidden_states.forget()
            check_pass(result, self._cancel, f"a pass of {batch.width} rows")
        return kept

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
        return self._hidden_states.read()

    def _read_layers(self, layers: tuple[int, ...]) -> None:
        """Make `layers` the `state_layers`. Raises CapabilityError where llama.cpp does not give their inputs."""
        self._hidden_states.read_layers(layers)
        self.state_layers = layers

    def read_layers_alone(self, layers: tuple[int, ...]) -> None:
        """Have hidden states be the inputs of `layers` of all rows from the next pass on, without the last states.

        Raises CapabilityError where llama.cpp does not give them, and where another head reads the last states.
        """
        self._require_open()
        if self._settings.hidden_states or self._settings.has_mtp:
            raise CapabilityError("a head that reads layers cannot be used with heads of a file or MTP: leave one out")
        self._read_layers(layers)
        self._hidden_states.has_last, self.states_of = False, "all rows"

    def embed(self, token_ids: TokenIds, pooling: PoolingName) -> NDArray[np.float32]:
        self._require_open()
        check_text(token_ids, self.facts.context_length, self.vocabulary.size)
        if self._embedder is None:
            self._embedder = Embedder(self._model, self._settings, self._cancel, self.facts.kv_bytes_per_token)
        self._held.check()
        return self._embedder.embed(token_ids, pooling)

    def load_head(self, path: Path | None = None, *, context_length: int | None = None, gpu_layers: int = 0) -> Head:
        """The head `path` for this model, or its own multi-token prediction layers; close it first.

        Where its target's keys and values are on a GPU, a gemma4's layers must be there too. Raises as
        `heads.load_head`.
        """
        self._require_open()
        length = context_length or HEAD_CONTEXT
        if path is None:
            length = min(length, self.facts.context_length)
        elif is_gemma4_drafter(header := read_header(path)):
            check_cache(path.name, header, read_header(self._path))
            gpu_layers = 0 if self.facts.device == "cpu" else -1
        models, threads = (self._model, self._context), self.facts.threads
        found = load_head(path, models, self.vocabulary, threads, length, gpu_layers)
        with closed_on_failure(found):
            if found.facts.layers:
                self.read_layers_alone(found.facts.layers)
            else:
                self.states_of = MTP_STATES[found.form]
                self._hidden_states.give_of(self.states_of)
        return found

    def _truncate(self, to_length: int, sequence: int) -> None:
        facts, length = self.facts, self._book.lengths[sequence]
        if 0 < to_length < (least := self._least.get(sequence, 0)):
            raise CapabilityError(
                f"a saved state of a {facts.architecture} model holds the last {facts.state_window} tokens of layers "
                f"with a sliding window; this one, loaded with {least} tokens, cannot be rolled back to {to_length}: "
                "roll back to 0"
            )
        droppable = self._droppable(sequence)
        was_tree = self._book.forget_last(sequence)
        self._checkpoints.shorten(to_length, sequence)
        if to_length == 0:
            self._least.pop(sequence, None)
            if length or was_tree or not facts.can_rollback:
                self._cells.forget(sequence)
        elif to_length == length and not was_tree:
            if not facts.can_rollback:  # report now that an aborted pass cannot be undone; else the next one trims
                self._cells.trim(sequence)
        elif facts.can_rollback or length - to_length <= droppable:
            self._cells.drop_from(to_length, sequence)
        elif (state := self._checkpoints.at(to_length, sequence)) is not None:
            self._cells.return_to(state, to_length, sequence)
        else:
            raise CapabilityError(
                f"{facts.architecture} models keep a running state that cannot be rolled back to {to_length} of "
                f"{length} tokens; use --drafter none"
            )

    def _droppable(self, sequence: int) -> int:
        """Rows of the last pass that a model with a running state can drop."""
        return min(self._book.droppable(sequence), self.facts.rollback_rows)

    def checkpoint(self, sequence: int = 0) -> None:
        if self.facts.has_checkpoints and (length := self.length(sequence)):
            self._checkpoints.add(length, sequence, lambda: self._cells.state(sequence, RUNNING_STATE_ONLY))

    def reachable(self, to_length: int, sequence: int = 0) -> int:
        dropped = self.length(sequence) - to_length
        if to_length < self._least.get(sequence, 0):
            return 0
        if self.facts.can_rollback or 0 <= dropped <= self._droppable(sequence):
            return to_length
        return self._checkpoints.latest(to_length, sequence)

    def _keep(self, part: SequenceRows, path: list[int], sequence: int) -> None:
        if part.is_tree:
            self._cells.keep_branch(path, part, sequence)
        else:
            self._truncate(part.base + len(path), sequence)

    def _copy(self, source: int, destination: int) -> None:
        self._book.forget_last(destination)
        self._cells.fork(source, destination)
        self._checkpoints.fork(source, destination)
        self._least[destination] = self._least.get(source, 0)

    def _state(self, sequence: int) -> memoryview:
        return self._cells.state(sequence).data

    def _restore(self, state: memoryview, length: int, sequence: int) -> None:
        self._book.forget_last(sequence)
        self._checkpoints.shorten(0, sequence)
        self._least.pop(sequence, None)
        self._cells.load(state, length, sequence)
        self._least[sequence] = self.facts.loaded_reach(length)

    def set_threads(self, threads: int) -> bool:
        self._require_open()
        check_threads(threads, self.facts)
        if self.facts.device != "cpu":
            return False
        library().llama_set_n_threads(self._context, threads, threads)
        return True

    def _free(self) -> None:
        self._held.close()
        self.vocabulary.close()
        if self._embedder is not None:
            self._embedder.close()
        library().llama_free(self._context)
        library().llama_model_free(self._model)


def checked_target(path: Path) -> GgufHeader:
    """The header of a model that generates text. Raises ModelNotFound, ModelFileError, CapabilityError for a head."""
    header = check_gguf(path)
    require_language_model(path, header)
    kind = head_kind(header)
    if kind is not None:
        raise CapabilityError(
            f"{path.name} is {HEAD_NAMES[kind]}, which only drafts for another model: give it with -md/--model-draft"
        )
    return header


def _widths_key(path: Path, settings: ContextSettings) -> str:
    """The cache key: files, machine, library and settings."""
    kernels = (
        settings.threads,
        settings.gpu_layers,
        settings.cache_type_k,
        settings.cache_type_v,
        *placement_of(settings),
    )
    measured = (settings.flash_attention_type, settings.widest, settings.context_length > PREFIX + settings.widest)
    files = tuple(map(file_key, model_files(path)))
    return key_of(METHOD, files, version(), library().llama_print_system_info(), kernels, measured)
