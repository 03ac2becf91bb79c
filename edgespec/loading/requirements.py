"""What of a pair is opened under given options: which drafters, heads, contexts and caches; from headers alone.

Memory is planned with it before anything is loaded, so it opens no model.
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
from edgespec.engines.model_use import MAX_BRANCHES, ModelUse
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.formats.gguf.check import has_mtp
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of
from edgespec.formats.manifest import HEAD_KINDS, ModelFile, ModelPair
from edgespec.installation import has_engine
from edgespec.kernels.library import library_path
from edgespec.loading.engine_choice import why_unreadable, with_engines
from edgespec.loading.hub import head_beside
from edgespec.loading.registry import resolve
from edgespec.platform.files import expanded, is_file

logger = logging.getLogger("edgespec")


def resolve_pair(options: LoadOptions, *, check_hashes: bool = True) -> ModelPair:
    """The pair that `options` name, with the engines that run it. Raises as `resolve` and `with_engines`."""
    found = resolve(options.model, options.draft, options.engine, options.medium, check_hashes=check_hashes)
    return _with_head_beside(options, found, with_engines(options, found))


def _with_head_beside(options: LoadOptions, found: ModelPair, pair: ModelPair) -> ModelPair:
    """`pair`, which `with_engines` made of `found`, with the head that lies beside its GGUF and is named for it.

    Without one that does not fit, and in `auto` without one that would move the target from the kernels to llama.cpp.
    """
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
        both = with_engines(options, replace(found, files=MappingProxyType({**found.files, "draft": head})))
    except EdgespecError as exc:
        logger.info("%s is left out: %s", name, exc)
        return pair
    return pair if options.drafter == "auto" and both.files["target"].engine != target.engine else both


@dataclass(frozen=True, slots=True)
class Chosen:
    """What of `pair` is opened. `exit_layer`: the target's first layers that draft; `wanted`: drafters with models.

    `without_drafts`: its target alone, where memory does not suffice for more.
    """

    pair: ModelPair
    exit_layer: int | None
    wanted: tuple[DrafterName, ...]

    @classmethod
    def of(cls, options: LoadOptions, pair: ModelPair) -> Self:
        """Raises CapabilityError when the pair lacks what the options need."""
        exit_layer = exit_layer_of(options, pair)
        return cls(pair, exit_layer, wanted_drafters(options, pair, exit_layer))

    @property
    def has_own_mtp(self) -> bool:
        """Whether the layers of the target's own file draft for it."""
        return "mtp" in self.wanted and "mtp" not in _own_drafter(self.pair)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the files to open, the target first."""
        needed = (_needs(name, self.pair) for name in self.wanted)
        roles = {need.role for needs in needed for need in needs if need.role} - {"target"}
        return ("target", *sorted(roles & self.pair.files.keys()))


def verifies_drafts(options: LoadOptions, pair: ModelPair) -> bool:
    """Whether drafts will be verified that are not only of lookups which nobody asked for."""
    if options.drafter == "none" or options.rpc:
        return False
    has_more = pair.draft is not None or pair.heads or options.heads or _takes_mtp(options, pair)
    return bool(has_more or options.drafter != "auto")


def target_has_mtp(pair: ModelPair) -> bool:
    """Whether the target's own file has a layer that drafts for it."""
    target = pair.files["target"]
    return target.is_gguf and has_mtp(read_header(target.path))


def _takes_mtp(options: LoadOptions, pair: ModelPair) -> bool:
    """Whether the target's own layer drafts."""
    if options.rpc or options.drafter not in ("auto", "mtp") or not target_has_mtp(pair):
        return False
    target = pair.files["target"]
    return target.engine != "onnx" or not why_unreadable(target.path, nextn=True)


def without_drafts(options: LoadOptions, pair: ModelPair) -> tuple[LoadOptions, ModelPair]:
    """The same for the target alone; drafters without a model stay available."""
    alone = replace(pair, files=MappingProxyType({"target": pair.files["target"]}), heads=MappingProxyType({}))
    return replace(options, draft=None, medium=None, exit_layer=None, heads=None), alone


def wanted_drafters(options: LoadOptions, pair: ModelPair, exit_layer: int | None) -> tuple[DrafterName, ...]:
    """Which drafters to open with models of their own.

    `auto` opens the drafter of the pair's draft file and those that the options name files for: a pair's own medium
    would cost memory and one more load. Raises CapabilityError when the pair lacks what a drafter needs.
    """
    own = _own_drafter(pair)
    wanted = _taken_by_auto(options, pair, own) if options.drafter == "auto" else _asked_for(options, pair, own)
    if wanted == ("mtp",) and "mtp" not in own:
        return wanted  # these layers come with the target
    for name in wanted:
        _check(name, wanted, pair, has_exit=exit_layer is not None)
    return wanted


def _taken_by_auto(options: LoadOptions, pair: ModelPair, own: tuple[DrafterName, ...]) -> tuple[DrafterName, ...]:
    last = {name: spec.needs[-1] for name, spec in SPECS.items() if spec.roles}
    named = (name for name, need in last.items() if need.must_be_asked and getattr(options, need.option) is not None)
    wanted = tuple(dict.fromkeys((*own, *named)))
    return ("mtp",) if not wanted and _takes_mtp(options, pair) else wanted


def _asked_for(options: LoadOptions, pair: ModelPair, own: tuple[DrafterName, ...]) -> tuple[DrafterName, ...]:
    """What the drafter that the options name opens; nothing for one that needs no model."""
    name = options.drafter
    if name not in SPECS:
        return ()
    if name != "mtp" or "mtp" in own:
        return (name,) if name in own or SPECS[name].roles else ()
    if not _takes_mtp(options, pair):
        raise CapabilityError(
            f"drafter 'mtp' needs {MTP_LAYERS.what}, in this process, and {pair.name!r} has none: give a file that was "
            f"converted with them, such as one of Qwen3.5, or use --drafter {FALLBACK}"
        )
    return ("mtp",)


def _check(name: DrafterName, wanted: tuple[DrafterName, ...], pair: ModelPair, *, has_exit: bool) -> None:
    """Raises CapabilityError where a file is missing, the draft is of another kind, or the target on another engine."""
    needs, spec, target, own = _needs(name, pair), SPECS[name], pair.files["target"], _own_drafter(pair)
    by_exit = "early-exit" in wanted  # the exit is the draft model
    has = next((HEAD_FILES[each] for each in own if each in HEAD_FILES), DRAFT)
    missing = [need for need in needs if not (has_exit if need is EXIT else need.role in pair.files)]
    missing = [need for need in missing if not (need is DRAFT and by_exit)]
    if not missing and needs[0] not in (EXIT, has):
        missing = [needs[0]]
    if not missing and target.engine in spec.engines:
        return
    need = missing[0] if missing else needs[-1]
    draft = "no draft" if pair.draft is None else f"{pair.draft.name}, {has.what},"
    engines = " or ".join(spec.engines)
    raise CapabilityError(
        f"drafter {name!r} needs {need.what} for a target on {engines}, and {pair.name!r} has {draft} and runs on "
        f"{target.engine}: give {need.flags}{'' if missing else f', with --engine {spec.engines[0]}'}, or "
        f"use --drafter {own[0] if own else FALLBACK}"
    )


def _own_drafter(pair: ModelPair) -> tuple[DrafterName, ...]:
    """The drafter that the pair's draft file makes; none without one."""
    if pair.draft is None:
        return ()
    file = pair.files["draft"]
    head = head_kind_of(file.path) if file.is_gguf else None
    return (head or "model",)


def _needs(name: DrafterName, pair: ModelPair) -> tuple[Need, ...]:
    """What a drafter needs; a pair's own file takes the place of layers in the target's."""
    return (HEAD_FILES[name],) if name in HEAD_FILES and name in _own_drafter(pair) else SPECS[name].needs


def exit_layer_of(options: LoadOptions, pair: ModelPair) -> int | None:
    """How many first layers of the target draft for it; None: they do not.

    Raises CapabilityError where that was asked for and the kernels do not run the target.
    """
    target = pair.files["target"]
    if options.drafter not in ("auto", "early-exit") or options.exit_layer is None:
        return None
    if not target.is_gguf or target.engine != "onnx":
        what = f"runs on {target.engine}" if target.is_gguf else "is an ONNX export"
        raise CapabilityError(
            f"--exit-layer is for a GGUF on edgespec's own kernels, and {target.path.name} {what}: give such a target, "
            "or use another drafter"
        )
    return options.exit_layer


def head_paths(options: LoadOptions, pair: ModelPair) -> list[Path]:
    """The files of heads to open: the one that the options name, else those of the pair for the drafter.

    `auto` takes a pair's own heads only where it has no draft model: beside one they gain less than trying them costs;
    and EAGLE's only where the kernels are built, on which they run.
    """
    own = {kind: pair.heads[kind].path for kind in HEAD_KINDS if kind in pair.heads}
    if options.drafter == "auto" and not (library_path() and has_engine("onnx")):
        own.pop("eagle", None)
    asked = "auto" if pair.draft is None else None
    if options.heads is not None and options.drafter != "none":
        return [expanded(options.heads)]
    return [path for kind, path in own.items() if options.drafter in (kind, asked)]


_MOST_DRAFT_CONTEXT = 4096


def target_use(options: LoadOptions, chosen: Chosen) -> ModelUse:
    """Of the target, without the hidden states that heads of another file want."""
    layers, endpoints = options.target_gpu_layers, options.rpc_servers
    is_elsewhere = chosen.pair.files["target"].engine == "llamacpp" and bool(layers or endpoints)
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
        speculates=verifies_drafts(options, chosen.pair),
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
