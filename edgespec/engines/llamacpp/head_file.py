"""Heads with a GGUF file of their own, which llama.cpp opens as a model that may share weights with the target's."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from edgespec.closing import closed_on_failure
from edgespec.engines.head import HeadFacts
from edgespec.engines.llamacpp.head_context import MTP_CONTEXT, ContextRequest, HeadContext, widest_step
from edgespec.engines.llamacpp.hidden_states import HiddenStates
from edgespec.engines.llamacpp.library import library, open_model
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary
from edgespec.errors import ModelFileError
from edgespec.vocabulary import Vocabulary, check_same_vocabulary

DEFAULT_CONTEXT = 2048
_TRIED_CONTEXT = 16


class HeadSizes(Protocol):
    """What every head's header says; see the sizes of each kind."""

    @property
    def width(self) -> int: ...
    @property
    def feature_width(self) -> int: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def shares_weights(self) -> bool: ...
    @property
    def weight_bytes(self) -> int: ...

    def check_fits(self, name: str, target_width: int, num_layers: int, vocabulary_size: int) -> None: ...


Sizes = TypeVar("Sizes", bound=HeadSizes)


class HeadOfFile(HeadContext, Generic[Sizes]):
    """Owns a llama.cpp model and a context; uses the target's context where the head shares weights with it.

    `what` it is called, for errors; `is_mtp`: the file's multi-token prediction layers are loaded.
    """

    what: ClassVar[str]
    is_mtp: ClassVar[bool] = False

    # How the target gives hidden states for it; None: in the way that every architecture allows.
    states: ClassVar[type[HiddenStates] | None] = None

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Sizes:
        """Raises ModelNotFound, ModelFileError, and CapabilityError for a variant that is not supported."""

    @classmethod
    def check_target(cls, path: Path, target: Path) -> None:
        """Raise CapabilityError where the head `path` cannot read the model `target`, beyond its sizes."""

    @classmethod
    @abstractmethod
    def cache_bytes(cls, sizes: Sizes, context_length: int) -> int:
        """Of a cache for `context_length` tokens of text."""

    @classmethod
    @abstractmethod
    def pass_bytes(cls, sizes: Sizes) -> int:
        """What the widest pass works with."""

    @classmethod
    def _refined(cls, request: ContextRequest, sizes: Sizes) -> ContextRequest:
        """`request`, of a context for `length` tokens of text, as this kind of head needs it."""
        return request

    @classmethod
    def _made(cls, request: ContextRequest, facts: HeadFacts, sizes: Sizes, model: Any) -> Self:
        return cls(request, facts, sizes.vocabulary_size, model)

    @classmethod
    def load(
        cls,
        path: Path,
        target: tuple[Any, Any],
        vocabulary: Vocabulary,
        *,
        threads: int,
        context_length: int | None = None,
        gpu_layers: int = 0,
    ) -> Self:
        """Load the head `path` for a loaded `target` (model, context), which must outlive it, with its `vocabulary`.

        `context_length`: most tokens it attends to, None for the trained number (at most DEFAULT_CONTEXT). Raises
        ModelNotFound, ModelFileError, VocabularyMismatch, and CapabilityError for a head of another target or of a
        variant that is not supported.
        """
        llama, sizes = library(), cls.read(path)
        sizes.check_fits(
            path.name, llama.llama_model_n_embd(target[0]), llama.llama_model_n_layer(target[0]), vocabulary.size
        )
        length = min(context_length or DEFAULT_CONTEXT, sizes.context_length)
        return cls._open(path, sizes, length, threads, gpu_layers, target[1], vocabulary)

    @classmethod
    def try_alone(cls, path: Path) -> None:
        """Load what needs no target, and run it if that is the whole head. Raises as `load`."""
        sizes = cls.read(path)
        if sizes.shares_weights:
            library().llama_model_free(open_model(path, check_tensors=True, has_mtp=cls.is_mtp))
        else:
            cls._open(path, sizes, min(_TRIED_CONTEXT, sizes.context_length), 1, 0, None, None).close()

    @classmethod
    def _open(
        cls,
        path: Path,
        sizes: Sizes,
        length: int,
        threads: int,
        gpu_layers: int,
        target_context: Any,
        vocabulary: Vocabulary | None,
    ) -> Self:
        model = open_model(path, gpu_layers=gpu_layers, check_tensors=vocabulary is None, has_mtp=cls.is_mtp)
        other = target_context if sizes.shares_weights else None
        rows, kind = widest_step(sizes.vocabulary_size), MTP_CONTEXT if cls.is_mtp else 0
        request = ContextRequest(model, path.name, length, threads, rows, other, kind)
        facts = HeadFacts(
            context_length=length,
            layers=sizes.layers,
            feature_width=sizes.feature_width,
            width=sizes.width,
            end_ids=vocabulary.end_ids if vocabulary else frozenset(),
            num_bytes=sizes.weight_bytes + cls.cache_bytes(sizes, length) + cls.pass_bytes(sizes),
        )
        try:
            if vocabulary is not None:
                check_same_vocabulary(vocabulary, LlamaCppVocabulary(model))
            head = cls._made(cls._refined(request, sizes), facts, sizes, model)
        except BaseException:
            library().llama_model_free(model)
            raise
        with closed_on_failure(head):
            if not head._is_sound():
                raise ModelFileError(
                    f"{path} is not a usable {cls.what}: its results are not numbers. Download or export it again"
                )
            head.restart(0)
        return head
