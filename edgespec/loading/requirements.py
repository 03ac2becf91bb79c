"""What of a pair is opened under given options: drafters, heads, contexts and caches, and the engine of each file.

Memory is planned with it before anything is loaded, so it opens no model and reads headers alone. On the processor our
kernels give rows of a pass that cost little and have the same bits beside any others. What they lack stays with
llama.cpp: GPUs, other architectures, caches of other types.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from edgespec.config.options import LoadOptions
from edgespec.config.values import MAX_DRAFT_LENGTH, DrafterName
from edgespec.drafters.spec import DRAFT, EXIT, FALLBACK, HEAD_FILES, MTP_LAYERS, SPECS, Need
from edgespec.engines.llamacpp.library import has_gpu
from edgespec.engines.model_use import MAX_BRANCHES, ModelUse
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.check import gives_only_embeddings, has_mtp
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import HEAD_KINDS, ModelFile, ModelPair
from edgespec.installation import IMPORT_FAILURES, has_engine, not_importable
from edgespec.kernels.library import library_path, why_missing
from edgespec.loading.download import known_sha256
from edgespec.loading.hub import head_beside
from edgespec.loading.registry import resolve
from edgespec.platform.files import expanded, is_file, shipped_models

logger = logging.getLogger("edgespec")
KERNEL_CACHE_TYPES = (None, "f16", "q8_0")
SHIPPED = "eagle.npz"
# Types of ONNX models for which the shipped heads' drafts were measured to gain.
GAINING = frozenset({"int8", "int4"})
_MOST_DRAFT_CONTEXT = 4096


def resolve_pair(options: LoadOptions) -> ModelPair:
    """The pair that `options` name, with the engines that run it, and the head that lies beside its GGUF.

    That head has the target's name. One that does not fit is left out, and in `auto` one that would move the target
    from the kernels to llama.cpp. Raises as `resolve`, and CapabilityError where `options` ask for ONNX Runtime and the
    kernels cannot run the target.
    """
    found = resolve(options.model, options.draft, options.engine, options.medium)
    pair = _with_engines(options, found)
    target = pair.files["target"]
    wants_head = options.drafter == "auto" or options.drafter in HEAD_FILES
    if not (wants_head and target.is_gguf) or pair.draft or pair.heads or options.heads or options.rpc:
        return pair
    sizes = {path.name: path.stat().st_size for path in target.path.parent.glob("*.gguf") if is_file(path)}
    if (name := head_beside(target.path.name, sizes)) is None:
        return pair
    from edgespec.loading.drafts import check_head  # imports numpy

    head = ModelFile(target.path.with_name(name))
    try:
        check_head(target, head)
        both = _with_engines(options, replace(found, files=MappingProxyType({**found.files, "draft": head})))
    except EdgespecError as exc:
        logger.info("%s is left out: %s", name, exc)
        return pair
    return pair if options.drafter == "auto" and both.files["target"].engine != target.engine else both


# The engine of each file


def _with_engines(options: LoadOptions, pair: ModelPair) -> ModelPair:
    """`pair` with an engine for each of its GGUF files, and the heads that are shipped for its very target."""
    if options.engine == "llamacpp":
        return pair
    files = dict(pair.files)
    for role, file in pair.files.items():
        if file.is_gguf and (why := _why_llamacpp(options, pair, role)):
            if role == "target" and options.engine == "onnx":
                raise CapabilityError(f"--engine onnx cannot run {file.path.name}: {why}. Use --engine auto")
            if not gives_only_embeddings(read_header(file.path)):  # of which nobody expects else
                files[role] = replace(file, note=f"llama.cpp runs {file.path.name}: {why}")
        elif file.is_gguf:
            files[role] = replace(file, runs_on="onnx")
    target, heads = files["target"], pair.heads
    is_free = not (heads or pair.draft or options.heads) and options.drafter in ("auto", "eagle")
    if is_free and target.runs_on == "onnx" and (path := shipped_heads(target.path, target.sha256)) is not None:
        heads = MappingProxyType({"eagle": ModelFile(path)})
    engines = tuple(dict.fromkeys((*pair.engines, target.engine)))
    return replace(pair, files=MappingProxyType(files), engines=engines, heads=heads)


def _why_llamacpp(options: LoadOptions, pair: ModelPair, role: str) -> str:
    """Why the kernels do not run the GGUF of a role; empty where they do. Raises ModelFileError for a damaged one."""
    path = pair.files[role].path
    if head_kind_of(path) and role == "target":
        return "it only drafts for another model"
    if head_kind_of(path):
        return _why_llamacpp(options, pair, "target")  # whose states it reads
    found = _asked_of_llamacpp(options, role)
    if found or role != "target" or options.drafter == "none":
        return found or why_unreadable(path)
    # A head in GGUF that the kernels lack reads llama.cpp's states.
    if pair.draft is not None and head_kind_of(pair.draft):
        found = f"{pair.draft.name} reads its states there" if why_unreadable(pair.draft) else ""
    elif options.drafter == "mtp" and has_mtp(read_header(path)):
        found = why_unreadable(path, nextn=True)
    return found or why_unreadable(path)


def _asked_of_llamacpp(options: LoadOptions, role: str) -> str:
    """The option that ONNX Runtime does not have, if one was given."""
    is_target = role == "target"
    layers = options.gpu_layers if is_target or options.draft_gpu_layers is None else options.draft_gpu_layers
    device = options.target_devices if is_target else options.draft_devices
    kinds = (options.cache_type_k, options.cache_type_v) if is_target else (None, None)
    is_automatic = layers == "auto" or (layers is None and not options.reproducible and device is None)
    if has_gpu() if is_automatic else layers or device:
        return "its layers go to the GPU"
    if is_target and options.override_tensor:
        return "--override-tensor places its tensors"
    if is_target and options.rpc:
        return "it is on RPC servers"
    if options.provider not in ("auto", "cpu"):
        return f"the kernels are for the processor, not for {options.provider}"
    if is_target and options.pooling:
        return "ONNX Runtime gives no embeddings"
    if other := next((kind for kind in kinds if kind not in KERNEL_CACHE_TYPES), None):
        return f"the kernels have no cache of the type {other}"
    return "the kernels keep keys and values in one type" if kinds[0] != kinds[1] else ""


def has_fast_kernels() -> bool:
    """Whether the kernels are built, and made for this processor's instructions."""
    from edgespec.kernels import interface

    return library_path() is not None and interface.path() != "portable"


def runs_on_kernels(path: Path) -> bool:
    """Whether the kernels run a model where nothing else is asked for."""
    return path.suffix != ".onnx" and not why_unreadable(path)


def why_unreadable(path: Path, *, nextn: bool = False) -> str:
    """Why the kernels do not run a GGUF, or the layer in it that predicts a further token; empty where they do."""
    if library_path() is None:
        return why_missing()
    if not has_engine("onnx"):
        return "ONNX Runtime, which the kernels are part of, is not installed"
    try:
        from edgespec.engines.onnx.source import readable_model
    except IMPORT_FAILURES as exc:
        failure = not_importable("the kernels", exc, "onnx")
        if not has_engine("llamacpp"):
            raise failure from exc
        return str(failure)
    if not has_fast_kernels() and has_engine("llamacpp"):
        return "this processor has none of the instructions that the kernels are made for"
    try:
        readable_model(path, nextn=nextn)
    except CapabilityError as exc:
        return str(exc)
    except EdgespecError:
        return ""  # a damaged file: opening it says what is wrong
    return ""


def shipped_heads(source: Path, sha256: str | None = None) -> Path | None:
    """The heads in `models/NAME` for the GGUF `source`, whose checksum is computed once where it is not given.

    None for other files. Heads that cannot be read are logged and left out.
    """
    from edgespec.formats.head_file import read_head_manifest  # imports numpy

    if source.suffix == ".onnx" or not is_file(source):
        return None
    for path in sorted(shipped_models().glob(f"*/{SHIPPED}")):
        try:
            manifest, header = read_head_manifest(path), read_header(source)
            sizes = header.value("embedding_length"), len(header.tokens)
            is_like = sizes == (manifest.hidden_size, manifest.vocabulary_size)
            if is_like and (sha256 or known_sha256(source)) == manifest.target_sha256:
                return path
        except (EdgespecError, OSError) as exc:
            logger.warning("the heads are left out: %s", exc)
    return None


# What is opened


@dataclass(frozen=True, slots=True)
class Chosen:
    """What of `pair` is opened. `exit_layer`: the target's first layers that draft; `wanted`: drafters with models.

    `own`: the drafter that the pair's draft file makes; None without one.
    """

    pair: ModelPair
    exit_layer: int | None
    own: DrafterName | None
    wanted: tuple[DrafterName, ...]

    @classmethod
    def of(cls, options: LoadOptions, pair: ModelPair) -> Self:
        """Raises CapabilityError when the pair lacks what the options need.

        `auto` opens the drafter of the pair's draft file and those that the options name files for: a pair's own medium
        would cost memory and one more load.
        """
        own, asked = _own_drafter(pair), options.drafter
        if asked == "auto":
            last = ((name, spec.needs[-1]) for name, spec in SPECS.items() if spec.roles)
            named = (name for name, need in last if need.must_be_asked and getattr(options, need.option) is not None)
            wanted = tuple(dict.fromkeys((*([own] if own else ()), *named)))
            wanted = wanted or (("mtp",) if _takes_mtp(options, pair) else ())
        else:
            wanted = (asked,) if asked in ("mtp", own) or (asked in SPECS and SPECS[asked].roles) else ()
        found = cls(pair, options.exit_layer if asked in ("auto", "early-exit") else None, own, wanted)
        for name in wanted:
            found._check(name, options)
        return found

    @property
    def has_own_mtp(self) -> bool:
        """Whether the layers of the target's own file draft for it."""
        return "mtp" in self.wanted and self.own != "mtp"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the files to open, the target first."""
        roles = {need.role for name in self.wanted for need in self._needs(name) if need.role} - {"target"}
        return ("target", *sorted(roles & self.pair.files.keys()))

    def _needs(self, name: DrafterName) -> tuple[Need, ...]:
        """What a drafter needs; a pair's own file takes the place of layers in the target's."""
        return (HEAD_FILES[name],) if name in HEAD_FILES and name == self.own else SPECS[name].needs

    def _has(self, need: Need, options: LoadOptions) -> bool:
        if need is EXIT:
            return self.exit_layer is not None and self.pair.files["target"].is_gguf
        if need is MTP_LAYERS:
            return _takes_mtp(options, self.pair)
        if need is DRAFT:
            return self.own == "model" or "early-exit" in self.wanted  # the exit is the draft model
        return need.role in self.pair.files if need not in HEAD_FILES.values() else need is self._draft

    @property
    def _draft(self) -> Need:
        """What the pair's draft file is."""
        return DRAFT if self.own is None else HEAD_FILES.get(self.own, DRAFT)

    def _check(self, name: DrafterName, options: LoadOptions) -> None:
        """Raises CapabilityError where a file is missing or of another kind, or the target on another engine."""
        needs, engines, pair = self._needs(name), SPECS[name].engines, self.pair
        runs_on = pair.files["target"].engine
        missing = next((need for need in needs if not self._has(need, options)), None)
        is_head = name in HEAD_FILES
        if missing is None and runs_on in engines and (pair.files["target"].is_gguf or not is_head):
            return
        draft = "no draft" if pair.draft is None else f"{pair.draft.name}, {self._draft.what},"
        raise CapabilityError(
            f"drafter {name!r} needs {(missing or needs[-1]).what} for a target "
            f"{'in GGUF' if is_head else 'on ' + ' or '.join(engines)}, and "
            f"{pair.name!r} has {draft} and runs on {runs_on}: give {(missing or needs[-1]).flag}"
            f"{'' if missing else f', with --engine {engines[0]}'}, or use --drafter {self.own or FALLBACK}"
        )


def _own_drafter(pair: ModelPair) -> DrafterName | None:
    if pair.draft is None:
        return None
    file = pair.files["draft"]
    return (head_kind_of(file.path) if file.is_gguf else None) or "model"


def _takes_mtp(options: LoadOptions, pair: ModelPair) -> bool:
    """Whether the layer of the target's own file drafts."""
    target = pair.files["target"]
    if options.rpc or options.drafter not in ("auto", "mtp") or not target.is_gguf:
        return False
    return has_mtp(read_header(target.path)) and (
        target.engine != "onnx" or not why_unreadable(target.path, nextn=True)
    )


def without_drafts(options: LoadOptions, pair: ModelPair) -> tuple[LoadOptions, ModelPair]:
    """The same for the target alone; drafters without a model stay available."""
    alone = replace(pair, files=MappingProxyType({"target": pair.files["target"]}), heads=MappingProxyType({}))
    return replace(options, draft=None, medium=None, exit_layer=None, heads=None), alone


def head_paths(options: LoadOptions, pair: ModelPair) -> list[Path]:
    """The files of heads to open: the one that the options name, else those of the pair for the drafter.

    `auto` takes a pair's own heads only where it has no draft model: beside one they gain less than trying them costs;
    and where the kernels are built, on which they run.
    """
    own = {kind: pair.heads[kind].path for kind in HEAD_KINDS if kind in pair.heads}
    asked = "auto" if pair.draft is None and library_path() and has_engine("onnx") else None
    if options.heads is not None and options.drafter != "none":
        return [expanded(options.heads)]
    return [path for kind, path in own.items() if options.drafter in (kind, asked)]


def target_use(options: LoadOptions, chosen: Chosen) -> ModelUse:
    """Of the target, without the hidden states that heads of another file want."""
    pair, layers, endpoints = chosen.pair, options.target_gpu_layers, options.rpc_servers
    is_elsewhere = pair.files["target"].engine == "llamacpp" and bool(layers or endpoints)
    is_asked = options.drafter not in ("auto", "none")  # lookups alone are drafted where nobody asks for anything
    return replace(
        _use(options, is_elsewhere=is_elsewhere),
        context_length=options.context_tokens,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        gpu_layers=layers,
        devices=options.target_devices,
        overrides=options.target_overrides,
        endpoints=endpoints,
        reproducible=options.reproducible if options.verify == "coupled" else False,
        speculates=not endpoints and bool(chosen.wanted or head_paths(options, pair) or is_asked),
        has_mtp=chosen.has_own_mtp,
        exit_layer=chosen.exit_layer,
    )


def draft_use(options: LoadOptions, file: ModelFile, target_context: int) -> ModelUse:
    """Of a draft model for a target with a context of so many tokens: by default no longer than it can ever use."""
    layers = options.draft_model_gpu_layers
    return replace(
        _use(options, is_elsewhere=file.engine == "llamacpp" and layers != 0),
        context_length=options.draft_context_length,
        default_context=min(target_context + MAX_DRAFT_LENGTH, _MOST_DRAFT_CONTEXT),
        gpu_layers=layers,
        devices=options.draft_devices,
        reproducible=False,
        speculates=False,
        is_draft=True,
    )


def _use(options: LoadOptions, *, is_elsewhere: bool) -> ModelUse:
    """What all models of a run have in common."""
    # Trees need cells that sequences share. Else a row would read what all other chats hold, too: with eight chats of
    # 100 tokens and a draft a 1B model wrote .82 of what it writes plainly, while drafts of several chats in one pass
    # gain .1 at two. On the processor rows are too dear for trees that nobody asked for by name.
    asked = SPECS.get(options.drafter)
    shares_cells = options.sequences == 1 or is_elsewhere or (asked is not None and asked.cost == "rows")
    return ModelUse(
        threads=options.threads,
        max_sequences=options.sequences,
        max_branches=MAX_BRANCHES if shares_cells else 0,
        provider=options.provider,
    )
