"""Encoders in llama.cpp: models that read a whole text at once, for its embedding, and write none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.checks import check_texts
from edgespec.engines.held import HeldFiles
from edgespec.engines.llamacpp.devices import handles_of
from edgespec.engines.llamacpp.embedder import Embedder
from edgespec.engines.llamacpp.facts import metadata, pooling_of
from edgespec.engines.llamacpp.library import CancelFlag, library, open_model
from edgespec.engines.llamacpp.settings import ContextSettings, choose_context_length
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError, EngineError
from edgespec.formats.gguf.check import check_gguf, model_files
from edgespec.types import Batch, Logits, PoolingName, TokenIds


class EncoderEngine(Engine):
    """An encoder whose file names a pooling. Make it with `load`. It has no cache: only `embed` runs a pass."""

    vocabulary: LlamaCppVocabulary

    def __init__(self, path: Path, model: Any, settings: ContextSettings) -> None:
        self._model, self._cancel, self._is_open = model, CancelFlag(), True
        self.vocabulary = LlamaCppVocabulary(model)
        self.facts = _facts(model, settings)
        self._embedder = Embedder(model, settings, self._cancel, 0, is_encoder=True)
        self._held = HeldFiles(model_files(path))

    @classmethod
    def load(cls, path: Path, use: ModelUse | None = None, **changes: Any) -> Self:
        """Load `path`; as `LlamaCppEngine.load`. Raises CapabilityError for what an encoder cannot do as well."""
        use = replace(use or ModelUse(), **changes)
        if use.reproducible:
            raise CapabilityError(f"{path.name} writes no text: leave out --reproducible")
        if use.endpoints:
            raise CapabilityError(
                f"{path.name} gives embeddings, which a model on RPC servers does not: leave out --rpc"
            )
        length = choose_context_length(path, check_gguf(path).context_length, use.context_length, use.default_context)
        settings = ContextSettings.checked(use, length)
        model = open_model(
            path,
            gpu_layers=use.gpu_layers,
            devices=None if use.devices is None else handles_of(use.devices),
            check_tensors=use.check_tensors,
            is_repacked=use.is_repacked,
        )
        try:
            return cls(path, model, settings)
        except BaseException:
            library().llama_model_free(model)
            raise

    def embed(self, texts: Sequence[TokenIds], pooling: PoolingName) -> NDArray[np.float32]:
        self._require_open()
        check_texts(texts, self.facts.context_length, self.vocabulary.size)
        self._held.check()
        return self._embedder.embed(texts, pooling)

    def forward(self, batch: Batch) -> Logits:
        self._refuse()

    def length(self, sequence: int = 0) -> int:
        self._require_open()
        return 0

    def rollback(self, to_length: int, sequence: int = 0) -> None:
        self._require_open()
        if to_length:
            self._refuse()

    def keep_path(self, rows: tuple[int, ...], sequence: int = 0) -> None:
        self._refuse()

    def fork(self, source: int, destination: int) -> None:
        self._refuse()

    def save_state(self, sequence: int = 0) -> bytes:
        self._refuse()

    def load_state(self, state: bytes | memoryview, sequence: int = 0) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._require_open()
        raise CapabilityError(f"{self.facts.architecture} models give embeddings and keep no cache: they write no text")

    def cancel(self) -> None:
        self._require_open()
        self._cancel.set()

    def clear_cancel(self) -> None:
        self._require_open()
        self._cancel.clear()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._held.close()
            self.vocabulary.close()
            self._embedder.close()
            library().llama_model_free(self._model)

    def _require_open(self) -> None:
        if not self._is_open:
            raise EngineError("this engine is closed; load the model again")


def _facts(model: Any, settings: ContextSettings) -> EngineFacts:
    return EngineFacts(
        name="llamacpp",
        architecture=metadata(model, "general.architecture"),
        context_length=settings.context_length,
        max_sequences=settings.max_sequences,
        max_batch=settings.max_batch,
        can_rollback=False,
        can_tree=False,
        weight_bytes=int(library().llama_model_size(model)),
        kv_bytes_per_token=0,
        width_classes=(),
        pinned_class=None,
        device=settings.place,
        threads=settings.threads,
        why_no_speculation="this model writes no text",
        pooling=pooling_of(model),
        writes=False,
    )


def try_encoder(path: Path) -> str | None:
    """Use an encoder as a trial does, with little memory. The reason when it cannot be used, else None."""
    with EncoderEngine.load(path, context_length=16, threads=1, is_repacked=False) as engine:
        before, behind = engine.vocabulary.embedded_ends()
        ids = np.array([*before, *engine.vocabulary.encode("a b"), *behind][:16] or [0], np.int32)
        if not np.isfinite(engine.embed([ids], "mean")).all():
            return f"{path} is not a usable model: its embeddings are not numbers. Download or export it again"
    return None
