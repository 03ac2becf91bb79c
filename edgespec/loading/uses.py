"""How the models of a pair are opened under given options: the same for the plan of their memory and for the load."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config import MAX_DRAFT_LENGTH, LoadOptions
from edgespec.drafters.spec import SPECS
from edgespec.engines.model_use import MAX_BRANCHES, ModelUse
from edgespec.formats.manifest import ModelFile
from edgespec.loading.requirements import Chosen, verifies_drafts

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
        cache_type_k=options.draft_cache_type_k,
        cache_type_v=options.draft_cache_type_v,
        gpu_layers=layers,
        devices=options.draft_devices,
        reproducible=False,
        speculates=False,
    )


def _use(options: LoadOptions, *, is_elsewhere: bool) -> ModelUse:
    """What all models of a run have in common."""
    # Trees need cells that sequences share. Else a row would read what all other chats hold, too: with eight chats of
    # 100 tokens and a draft a 1B model wrote .82 of what it writes plainly, while drafts of several chats in one pass
    # gain .1 at two.
    shares_cells = options.parallel == 1 or is_elsewhere or _drafts_trees(options)
    return ModelUse(
        threads=options.threads,
        max_sequences=options.parallel,
        max_branches=MAX_BRANCHES if shares_cells else 0,
        kv_offload=options.kv_offload,
        provider=options.provider,
    )


def _drafts_trees(options: LoadOptions) -> bool:
    """Whether there is room for branches of trees on the processor: for drafters asked for by name.

    Rows are too dear there for trees that nobody asked for, and several chats would pay for the room.
    """
    asked = SPECS.get(options.drafter)
    return asked is not None and asked.cost == "rows"
