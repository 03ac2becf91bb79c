"""Opens a GGUF file as a model with a context of its own, before there is an engine over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.engines.llamacpp.devices import handles_of
from edgespec.engines.llamacpp.facts import will_be_reproducible
from edgespec.engines.llamacpp.library import CancelFlag, library, open_model
from edgespec.engines.llamacpp.running_state import keeps_running_state
from edgespec.engines.llamacpp.settings import ContextSettings, create_context, require_generator
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import check_gguf
from edgespec.formats.gguf.header import GgufHeader
from edgespec.formats.gguf.kind import HEAD_NAMES, head_kind


class OpenModel(NamedTuple):
    """A model and a context for it, with the settings that the context was made with."""

    model: Any
    context: Any
    settings: ContextSettings
    cancel: CancelFlag


@dataclass(frozen=True, slots=True)
class ModelOpener:
    """Opens `path`, as often as other settings of the context are tried. `opened` is called before the file is used."""

    path: Path
    gpu_layers: int
    devices: tuple[str, ...] | None
    check_tensors: bool
    is_repacked: bool
    has_mtp: bool
    opened: Callable[[], None]

    def open(self, settings: ContextSettings) -> OpenModel:
        """Raises ModelFileError, CapabilityError."""
        model = open_model(
            self.path,
            gpu_layers=self.gpu_layers,
            devices=None if self.devices is None else handles_of(self.devices),
            check_tensors=self.check_tensors,
            is_repacked=self.is_repacked,
            has_mtp=self.has_mtp,
        )
        settings = settings.with_state() if keeps_running_state(model) else replace(settings, snapshots=0)
        if self._has_streams(settings, has_window=library().llama_model_n_swa(model) > 0):
            settings = replace(settings, max_branches=0, streams=True)
        cancel = CancelFlag()
        try:
            self.opened()
            require_generator(model, self.path)
            return OpenModel(model, create_context(model, self.path, settings, cancel), settings, cancel)
        except BaseException:
            library().llama_model_free(model)
            raise

    def _has_streams(self, settings: ContextSettings, *, has_window: bool) -> bool:
        """In cells that sequences share llama.cpp may overwrite those behind a window, to which a rollback returns."""
        if settings.max_sequences == 1 or settings.keeps_state:
            return False
        return has_window or not settings.max_branches or will_be_reproducible(self.path, settings)


def checked_target(path: Path) -> GgufHeader:
    """The header of a model that generates text. Raises ModelNotFound, ModelFileError, CapabilityError for a head."""
    header = check_gguf(path)
    kind = head_kind(header)
    if kind is not None:
        raise CapabilityError(
            f"{path.name} is {HEAD_NAMES[kind]}, which only drafts for another model: give it with -md/--model-draft"
        )
    return header
