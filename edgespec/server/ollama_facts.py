"""What clients of Ollama ask before they generate: `/api/version`, `/api/tags`, `/api/ps` and `/api/show`.

Facts of a GGUF are read from its header. Of an ONNX model only the architecture is known here.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from edgespec import __version__
from edgespec.chat.marks import reasoning_marks
from edgespec.chat.tool_forms import call_form
from edgespec.config import POOLINGS
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.header import GgufHeader, read_header
from edgespec.formats.manifest import ModelPair
from edgespec.loading.file_facts import FileFacts
from edgespec.server.fields import Fields
from edgespec.server.http_errors import bad_request
from edgespec.server.options import require_model, without_tag
from edgespec.server.service import Loaded, Names, Service
from edgespec.server.services import Services

PROTOCOL_VERSION = "0.12.11"  # of Ollama, whose requests are understood; VS Code wants 0.6.4 or more
_NEVER = "9999-12-31T23:59:59Z"
# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h: llama_ftype
_FILE_TYPES = (
    "F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS "
    "Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0 MXFP4_MOE"
)
QUANTIZATIONS = {number: name for number, name in enumerate(_FILE_TYPES.split()) if name != "-"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say of it; empty or 0 where they do not. `metadata`: single values of the GGUF header."""

    family: str
    digest: str = ""
    quantization: str = ""
    num_parameters: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """A model as the lists and `/api/show` know it, loaded or not. `embeds`: whether it gives embeddings."""

    name: str
    files: FileFacts
    facts: ModelFacts
    context_length: int
    embeds: bool

    @classmethod
    def of(cls, loaded: Loaded) -> Self:
        """Of a loaded model; reads its header the first time."""
        model = loaded.model
        files = FileFacts.of(model.target)
        return cls(loaded.name, files, _model_facts(model.pair, files), model.context_length, _embeds(loaded))

    @classmethod
    def of_files(
        cls, name: str, pair: ModelPair, files: FileFacts, context_length: int, template: str | None, *, embeds: bool
    ) -> Self:
        """Of a model that is not loaded. `template`: instead of its own; `embeds`: whether it was told to."""
        if template is not None:
            files = replace(files, chat_template=template)
        can_embed = files.engine == "llamacpp" and (embeds or files.pooling in POOLINGS)
        return cls(name, files, _model_facts(pair, files), context_length, can_embed)


def _model_facts(pair: ModelPair, files: FileFacts) -> ModelFacts:
    file = pair.files["target"]
    if not file.is_gguf:
        return ModelFacts(files.architecture, file.sha256 or "")
    try:
        found = _of_headers(pair.paths("target"))
    except (EdgespecError, OSError):  # moved or replaced while it is served
        return ModelFacts(files.architecture, file.sha256 or "")
    return found if file.sha256 is None else replace(found, digest=file.sha256)


@lru_cache(maxsize=16)
def _of_headers(paths: tuple[Path, ...]) -> ModelFacts:
    """Facts of a GGUF, which may lie in several files. Its digest is that of its header: hashing all takes minutes."""
    headers = [read_header(path) for path in paths if path.suffix == ".gguf"]
    with paths[0].open("rb") as file:
        digest = hashlib.sha256(file.read(headers[0].data_start)).hexdigest()
    return ModelFacts(
        headers[0].architecture,
        digest,
        _quantization(headers),
        sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors),
        {key: value for key, value in headers[0].metadata.items() if _is_shown(key, value)},
    )


def _is_shown(key: str, value: object) -> bool:
    is_short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 128)
    return is_short and not key.startswith(("tokenizer.", "split.")) and "://" not in str(value)


def _quantization(headers: list[GgufHeader]) -> str:
    """As the header says, else the type of most of its bytes."""
    said = headers[0].metadata.get("general.file_type")
    if isinstance(said, int) and said in QUANTIZATIONS:
        return QUANTIZATIONS[said]
    sizes: Counter[str] = Counter()
    for header in headers:
        for tensor in header.tensors:
            sizes[tensor.kind] += tensor.num_bytes
    return max(sizes, key=lambda kind: sizes[kind], default="")


def _size_label(count: int) -> str:
    """A number of parameters as Ollama writes it: 7.6B, 494.03M."""
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def require_served(names: Names, fields: Fields) -> None:
    """Check the field `model`, which may end in the tag that Ollama adds. Raises HttpError 404."""
    name = fields.text("model")
    served = {without_tag(each): each for each in names.all}
    known = None if name is None else served.get(without_tag(name), name)
    require_model(names, Fields({"model": known}, notes=fields.notes))


def version() -> dict[str, Any]:
    """`/api/version`: Ollama's, which clients compare, and ours."""
    return {"version": PROTOCOL_VERSION, "edgespec": __version__}


def listed(services: Services) -> dict[str, Any]:
    """`/api/tags`: the served models, the first one once it was loaded."""
    return {"models": [found for service in services.all if (found := _listed(service)) is not None]}


def _listed(service: Service) -> dict[str, Any] | None:
    loaded, unloaded = service.loaded, service.unloaded
    found = entry(Known.of(loaded)) if loaded is not None else None if unloaded is None else unloaded.entry
    written = _written(datetime.fromtimestamp(service.created, UTC))
    return None if found is None else found | {"modified_at": written}


def running(services: Services) -> dict[str, Any]:
    """`/api/ps`: those that are loaded, with the memory and the context that they have."""
    found = ((service, service.loaded) for service in services.all)
    return {"models": [_running(service, loaded) for service, loaded in found if loaded is not None]}


def _running(service: Service, loaded: Loaded) -> dict[str, Any]:
    model = loaded.model
    on_device = 0 if model.memory is None else model.memory.plan.device_bytes
    more = {"size_vram": on_device, "context_length": model.context_length, "expires_at": _expires_at(service)}
    return entry(Known.of(loaded)) | more


def _expires_at(service: Service) -> str:
    """When the model is unloaded if no request comes."""
    left_s = math.inf if service.residence is None else service.residence.left_s
    try:
        return _written(datetime.now(UTC) + timedelta(seconds=left_s))
    except OverflowError:
        return _NEVER


def _written(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def entry(known: Known) -> dict[str, Any]:
    """A model as both lists have it."""
    return {
        "name": known.name,
        "model": known.name,
        "size": known.files.weight_bytes,
        "digest": known.facts.digest,
        "details": _details(known),
    }


def _details(known: Known) -> dict[str, Any]:
    facts = known.facts
    return {
        "parent_model": "",
        "format": "gguf" if facts.quantization else "onnx",  # only a header says the former
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": _size_label(facts.num_parameters),
        "quantization_level": facts.quantization,
    }


def show(service: Service, fields: Fields) -> dict[str, Any]:
    """`/api/show`. Older clients call the model `name`."""
    loaded, unloaded = service.loaded, service.unloaded
    name, former = fields.text("model"), fields.text("name")
    if name is not None and former is not None and name != former:
        raise bad_request("model and name are the same setting: give one", "name")
    require_served(service.names, Fields({"model": former if name is None else name}))
    fields.flag("verbose")
    fields.finish()
    return unloaded.shown if loaded is None and unloaded is not None else shown(Known.of(loaded or service.require()))


def shown(known: Known) -> dict[str, Any]:
    """What `/api/show` answers."""
    template, facts = known.files.chat_template, known.facts
    info = facts.metadata | {
        "general.architecture": facts.family,
        f"{facts.family}.context_length": known.context_length,  # what a request may use
    }
    info |= {"general.parameter_count": facts.num_parameters} if facts.num_parameters else {}
    return {
        "template": template,
        "details": _details(known),
        "model_info": info,
        "capabilities": [
            *(["embedding"] if known.embeds else []),
            *([] if known.files.pooling else ["completion"]),
            *(["tools"] if call_form(template) else []),
            *(["thinking"] if reasoning_marks(template) else []),
            *(["insert"] if known.files.fills_gaps else []),
        ],
    }


def _embeds(loaded: Loaded) -> bool:
    try:
        loaded.model.embedder.pooling()
    except CapabilityError:
        return False
    return True
