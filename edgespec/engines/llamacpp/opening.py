"""Opens a GGUF file as a model with a context of its own, before there is an engine over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.engines.llamacpp.devices import handles_of
from edgespec.engines.llamacpp.facts import will_be_reproducible
from edgespec.engines.llamacpp.library import CancelFlag, library, open_model
from edgespec.engines.llamacpp.running_state import keeps_running_state
from edgespec.engines.llamacpp.settings import ContextSettings, create_context, has_streams, require_generator
from edgespec.engines.model_use import ModelUse
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.check import HEAD_NAMES, check_gguf, head_kind, require_language_model
from edgespec.formats.gguf.header import GgufHeader


class OpenModel(NamedTuple):
    """A model and a context for it, with the settings that the context was made with."""

    model: Any
    context: Any
    settings: ContextSettings
    cancel: CancelFlag


@dataclass(frozen=True, slots=True)
class ModelOpener:
    """Opens `path`, as often as other settings of the context are tried."""

    path: Path
    use: ModelUse

    def open(self, settings: ContextSettings) -> OpenModel:
        """Raises ModelFileError, CapabilityError."""
        model = open_model(
            self.path,
            gpu_layers=self.use.gpu_layers,
            devices=None if self.use.devices is None else handles_of(self.use.devices),
            check_tensors=self.use.check_tensors,
            is_repacked=self.use.is_repacked,
            has_mtp=self.use.has_mtp,
        )
        settings = settings.with_state() if keeps_running_state(model) else replace(settings, snapshots=0)
        has_window = library().llama_model_n_swa(model) > 0
        is_reproducible = partial(will_be_reproducible, self.path, settings)
        if has_streams(settings, has_window=has_window, is_reproducible=is_reproducible):
            settings = replace(settings, max_branches=0, streams=True)
        cancel = CancelFlag()
        try:
            require_generator(model, self.path)
            return OpenModel(model, create_context(model, self.path, settings, cancel), settings, cancel)
        except BaseException:
            library().llama_model_free(model)
            raise


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
