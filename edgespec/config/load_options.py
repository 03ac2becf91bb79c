"""Typed options of loading a pair (`LoadOptions`), and its keywords."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from edgespec.config.checks import (
    as_path,
    at_least,
    check_context_length,
    check_draft_length,
    check_draft_temperature,
    check_gpu_layers,
    check_share,
    device_names,
    one_of,
    optional_text,
    refuses_unknown,
    switches,
    whole,
)
from edgespec.config.endpoints import parse_endpoints
from edgespec.config.names import (
    CACHE_TYPES,
    DRAFTERS,
    ENGINES,
    MAX_PARALLEL,
    POOLINGS,
    PROVIDERS,
    RULES,
    CacheType,
    ContextLength,
    DrafterName,
    DraftLength,
    EngineName,
    GpuLayers,
    PoolingName,
    ProviderName,
    RuleName,
)
from edgespec.config.sizes import parse_budget
from edgespec.errors import ConfigError, shown

Location = str | os.PathLike[str]


class LoadKeywords(TypedDict, total=False):
    """Keywords of `load`: the fields of `LoadOptions` except `model`. Paths may be str."""

    draft: Location | None
    medium: Location | None
    exit_layer: int | None
    heads: Location | None
    chat_template_file: Location | None
    pooling: PoolingName | None
    engine: EngineName
    drafter: DrafterName
    draft_length: DraftLength
    draft_temperature: float
    max_slowdown: float
    verify: RuleName
    reproducible: bool | None
    context_length: ContextLength | None
    draft_context_length: int | None
    threads: int | None
    parallel: int
    gpu_layers: GpuLayers | None
    draft_gpu_layers: int | None
    device: str | None
    draft_device: str | None
    kv_offload: bool
    rpc: str | None
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    draft_cache_type_k: CacheType | None
    draft_cache_type_v: CacheType | None
    memory: str | int | None
    provider: ProviderName
    corpus: bool
    recall: bool
    learn: bool


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which models to load, and how. None means: choose by model and machine.

    Models. `model`: registry name or path of the target's pair; paths may be str. `draft`: draft model; None: the
    pair's own. `medium`: model between target and draft, loaded for drafter hierarchical only; None: the pair's own.
    `heads`: heads file for drafter medusa or eagle; None: the pair's own, which drafter auto uses if there is no draft
    model. `exit_layer`: number of layers of an ONNX target that draft; None: as the pair was exported. `engine`: which
    files of the pair to use. `chat_template_file`: a Jinja template to use instead of the model's own.
    `pooling`: which hidden states of a text are its embedding (`Model.embed`); None: as the model's file says.

    Speculation. `drafter`: auto chooses the drafter with the best expected speed, every round. `draft_length`: tokens,
    or nodes for a drafter that drafts trees if the target can score trees; auto chooses every round; a number with
    drafter auto selects the pair's own draft, or ngram without one. `draft_temperature`: factor on the target's
    temperature for sampling from the draft model. `verify`: the acceptance rule. `max_slowdown`: the fraction of plain
    decoding time that speculation may lose at most.
    `reproducible`: same tokens with and without speculation; None: where model and rule allow it; True: required, else
    CapabilityError; False: off, for speed.

    Machine. `context_length`, `draft_context_length`: tokens; of the target 0 for as many as it was trained for, "auto"
    for the most that fit into memory with nothing else given up, None for the model's own, but at most 4096.
    `parallel`: generations that can run at once (`Model.batch`), each with a context of that length. `gpu_layers`,
    `draft_gpu_layers`: layers that llama.cpp places on the GPU, -1 for all; "auto": as many of the target as its free
    memory holds, and the draft if it fits beside them; None: auto where this machine and llama.cpp's build have a GPU,
    unless the mode is to be reproducible. `device`, `draft_device`: names of llama.cpp's devices for these layers,
    separated by commas, or "none"; without `gpu_layers`, all layers go there. `kv_offload`: the KV cache of these
    layers, too.
    `rpc`: "HOST:PORT[,HOST:PORT...]" of RPC servers (`edgespec rpc-server`) that hold the layers of a GGUF target, all
    of them unless `gpu_layers` is given; the draft stays on this machine. `provider`: ONNX Runtime's device.
    `cache_type_k`, `cache_type_v`: KV cache formats, `draft_cache_type_k`, `draft_cache_type_v` those of the draft
    model. `memory`: budget for all that is loaded, as "6GiB", "80%" of the free memory, "auto" for all of it, or
    bytes; options that are not given are reduced to stay within it. None: the free memory, and only the draft model is
    reduced or left out.

    Texts to draft from. `corpus`: drafter suffix also searches the user's corpus. `recall`: drafter cache reads what it
    learnt in earlier runs. `learn`: this run's answers are added to that file. Both are off by default: a benchmark
    that decodes the same prompt twice would otherwise draft from its own earlier answer.

    Raises ConfigError for a value that is not allowed.
    """

    model: str = "demo"
    draft: Path | None = None
    medium: Path | None = None
    exit_layer: int | None = None
    heads: Path | None = None
    chat_template_file: Path | None = None
    pooling: PoolingName | None = None
    engine: EngineName = "auto"
    drafter: DrafterName = "auto"
    draft_length: DraftLength = "auto"
    draft_temperature: float = 1.0
    max_slowdown: float = 0.02
    verify: RuleName = "coupled"
    reproducible: bool | None = None
    context_length: ContextLength | None = None
    draft_context_length: int | None = None
    threads: int | None = None
    parallel: int = 1
    gpu_layers: GpuLayers | None = None
    draft_gpu_layers: int | None = None
    device: str | None = None
    draft_device: str | None = None
    kv_offload: bool = True
    rpc: str | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    draft_cache_type_k: CacheType | None = None
    draft_cache_type_v: CacheType | None = None
    memory: str | int | None = None
    provider: ProviderName = "auto"
    corpus: bool = True
    recall: bool = False
    learn: bool = False

    def __post_init__(self) -> None:
        switches(
            self,
            "corpus",
            "recall",
            "learn",
            "kv_offload",
            *(("reproducible",) if self.reproducible is not None else ()),
        )
        if self.gpu_layers is not None:
            check_gpu_layers(self.gpu_layers)
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(f"model must be a registry name or a path, got {shown(self.model)}")
        object.__setattr__(self, "model", os.fsdecode(self.model))
        for name in ("draft", "medium", "heads", "chat_template_file"):
            object.__setattr__(self, name, as_path(name, getattr(self, name)))
        one_of("engine", self.engine, ENGINES)
        one_of("drafter", self.drafter, DRAFTERS)
        one_of("verify", self.verify, RULES)
        if self.memory is not None:
            parse_budget(self.memory)
        for kind in (self.cache_type_k, self.cache_type_v, self.draft_cache_type_k, self.draft_cache_type_v):
            if kind is not None:
                one_of("cache type", kind, CACHE_TYPES)
        if self.pooling is not None:
            one_of("pooling", self.pooling, POOLINGS)
        one_of("provider", self.provider, PROVIDERS)
        at_least("threads", self.threads, 1, "leave it out to use the free fast cores")
        if not 1 <= whole("parallel", self.parallel) <= MAX_PARALLEL:
            raise ConfigError(f"parallel must be from 1 to {MAX_PARALLEL}, got {shown(self.parallel)}")
        at_least("draft gpu-layers", self.draft_gpu_layers, -1)
        for name in ("device", "draft_device"):
            optional_text(name, getattr(self, name))
            device_names(name.replace("_", "-"), getattr(self, name))
        if self.rpc is not None:
            parse_endpoints(self.rpc)
        at_least("exit-layer", self.exit_layer, 1)
        check_context_length(self.context_length)
        at_least("draft ctx-size", self.draft_context_length, 16)
        check_draft_length(self.draft_length)
        check_draft_temperature(self.draft_temperature)
        check_share(self.max_slowdown)
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.reproducible and self.verify != "coupled":
            raise ConfigError(
                f"--reproducible does not work with --verify {self.verify}, whose text depends on the "
                "draft. Use --verify coupled, or --no-reproducible"
            )
        if self.reproducible and self.gpu_layers == "auto":
            raise ConfigError(
                "--reproducible does not work with -ngl auto, which depends on how much memory is free: results "
                "depend on which layers are on the GPU. Give their number; edgespec plan -ngl auto prints it"
            )
        if self.context_length == "auto" and (self.target_gpu_layers or self.provider not in ("auto", "cpu")):
            raise ConfigError(
                "ctx-size auto is chosen by this machine's memory, which a GPU, another device or an RPC server does "
                "not share: give a number"
            )

    @property
    def context_tokens(self) -> int | None:
        """`context_length` once it is a number, which `memory.fit` makes of 0 and "auto"; None: the default."""
        found = self.context_length
        assert found != "auto" and found != 0, "the context is chosen before a model is planned or opened"
        return found

    @property
    def rpc_servers(self) -> tuple[str, ...]:
        """The RPC servers for the target, HOST:PORT each."""
        return () if self.rpc is None else parse_endpoints(self.rpc)

    @property
    def target_devices(self) -> tuple[str, ...] | None:
        """Names of the devices for the target's layers; None: llama.cpp's choice."""
        return device_names("device", self.device)

    @property
    def draft_devices(self) -> tuple[str, ...] | None:
        """The same for draft models, which are placed as the target where nothing is said, but never on RPC servers."""
        if self.draft_device is not None or self.rpc is not None:
            return device_names("draft-device", self.draft_device)
        return self.target_devices

    @property
    def target_gpu_layers(self) -> int:
        """Layers of the target that are not the processor's, -1 for all; "auto" counts as all until it is chosen."""
        if self.gpu_layers == "auto":
            return -1
        return self.gpu_layers or (-1 if self.rpc or self.target_devices else 0)

    @property
    def draft_model_gpu_layers(self) -> int:
        """The same for draft models."""
        if self.draft_gpu_layers is not None:
            return self.draft_gpu_layers
        if self.draft_device is not None:
            return -1 if self.draft_devices else 0
        return 0 if self.rpc is not None else self.target_gpu_layers


def keywords_of(options: LoadOptions) -> dict[str, Any]:
    """The keywords with which `edgespec.load` makes these options again."""
    return {field.name: getattr(options, field.name) for field in fields(options)}
