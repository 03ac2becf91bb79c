"""The export: find the source, plan, convert, check, write the manifest, publish the pair folder.

Every file is a stage in the workspace's journal, so that an interrupted export can be resumed. The folder gets its
final name only after all files passed the check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.config.values import EngineName
from edgespec.errors import ConfigError
from edgespec.export.file_checks import check_stages
from edgespec.export.given_heads import STAGE as GIVEN_HEADS
from edgespec.export.given_heads import check_fit, check_given_heads, heads_stages
from edgespec.export.hub import find_source, source_here
from edgespec.export.maker import Model, groups_note, stages_of
from edgespec.export.manifest import card_licence, recommended_sampling, write_manifest
from edgespec.export.onnx.convert import check_architecture, require_exporter
from edgespec.export.plan import Facts, needs_of, read_facts
from edgespec.export.reference import require_packages
from edgespec.export.request import ExportRequest, Format
from edgespec.export.resources import check_room, human
from edgespec.export.stages import Artefact, Reporter, run_stages
from edgespec.export.tokens import check_round_trip, check_same_tokens, token_names
from edgespec.export.workspace import Workspace, check_output, opened
from edgespec.formats.checkpoint import unsupported
from edgespec.formats.manifest import read_pair

ENGINES: Mapping[Format, EngineName] = {"gguf": "llamacpp", "onnx": "onnx"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished pair: its folder, sizes in bytes by file, and the figures of the check (empty if skipped)."""

    folder: Path
    files: Mapping[str, int]
    figures: Mapping[str, Any]


def export_pair(request: ExportRequest, reporter: Reporter) -> Exported:
    """Export the pair folder that `request` describes.

    Raises UsageError and its subclasses (source, options, output), VocabularyMismatch (draft of another family),
    CapabilityError (missing package, not enough disk or memory), ExportRefused (a file differs from its source).
    """
    if is_gguf(request.source):
        from edgespec.export.conversion import convert_pair

        return Exported(request.output, *convert_pair(request, reporter))
    source_here(request.source, request.revision)  # nobody shall install torch for a folder that cannot be used
    if request.draft is not None:
        source_here(request.draft)
    require_packages(request.formats, torch=request.check or request.imatrix is not None)
    _check_quants(request)
    check_output(request.output, replace=request.force)
    with opened(request.output, replace=request.force) as workspace:
        models = _found(request, reporter)
        sources = {role: model.source.identity for role, model in models.items()}
        if workspace.begin({**request.identity(), "models": sources}):
            reporter.note(f"resuming an interrupted export: {len(workspace.finished_files)} files are finished")
        try:
            models = _fetched(request, models, workspace, reporter)
            artefacts = run_stages(
                [*stages_of(request, models, workspace), *heads_stages(request, workspace)], workspace, reporter
            )
            converted = [artefact for artefact in artefacts if artefact.stage != GIVEN_HEADS]
            figures = check_stages(request, models, converted, workspace, reporter)
            files = _described(request, models, artefacts, figures, workspace)
        finally:
            workspace.tidy()
        workspace.publish()
    return Exported(request.output, files, figures)


def is_gguf(source: str) -> bool:
    """Whether a source is a GGUF file rather than the folder or hub id of a checkpoint."""
    return source.lower().endswith(".gguf") and not Path(source).expanduser().is_dir()


def _check_quants(request: ExportRequest) -> None:
    """Raise ConfigError if a quantisation needs an importance matrix and none is given."""
    if "gguf" in request.formats:
        from edgespec.export.gguf.quantise import check_quant

        for role in ("target", "draft"):
            check_quant(request.quant_of(role, "gguf"), request.imatrix)


def _found(request: ExportRequest, reporter: Reporter) -> dict[str, Model]:
    """The models by role. Raises all errors that can be detected from the small files, before weights are fetched."""
    sources = {"target": find_source(request.source, request.revision)}
    if request.draft is not None:
        sources["draft"] = find_source(request.draft)
    models = {}
    for role, source in sources.items():
        if source.note:
            reporter.note(source.note)
        if request.output.resolve().is_relative_to(source.folder.resolve()):
            raise ConfigError(f"--output {request.output} is inside the source folder {source.folder}: choose another")
        models[role] = Model(source, read_facts(source))
        if role == "draft" and models[role].is_head:
            _check_head(request)
        else:
            token_names(source.folder)
            check_round_trip(source.folder)
    check_architectures(request, models)
    if request.derivation is not None:
        request.derivation.check(models["target"].facts.num_layers)
    if request.heads is not None:
        check_given_heads(request.heads, models["target"].facts.num_layers, models["target"].facts.vocabulary_size)
    if "draft" in models and not models["draft"].is_head:
        check_same_tokens(models["target"].source.folder, models["draft"].source.folder)
    return models


def _check_head(request: ExportRequest) -> None:
    """Raise ConfigError for a quantisation or a vocabulary that EAGLE-3 heads do not support."""
    if "onnx" in request.draft_quants:
        raise ConfigError(
            f"--draft {request.draft} is an EAGLE-3 head, which an ONNX target reads in 8 bits: omit --draft-quant"
        )
    if request.draft_vocab is not None:
        raise ConfigError(f"--draft {request.draft} is an EAGLE-3 head with its own tokens: omit --draft-vocab")
    if "gguf" in request.formats:
        from edgespec.export.gguf.eagle3 import check_head_quant

        check_head_quant(request.quant_of("draft", "gguf"))


def check_architectures(request: ExportRequest, models: Mapping[str, Model]) -> None:
    """Raise ModelFileError for an unsupported architecture, CapabilityError if the exporter's package is missing."""
    for role, model in models.items():
        if role == "draft" and model.is_head:
            continue
        name = model.facts.architecture
        if "gguf" in request.formats:
            from edgespec.export.gguf import ARCHITECTURES

            if name not in ARCHITECTURES:
                raise unsupported(model.source.name, name, "GGUF", ARCHITECTURES)
        if "onnx" in request.formats:
            _check_exporter(request, role, model)


def _check_exporter(request: ExportRequest, role: str, model: Model) -> None:
    """Raise CapabilityError for a missing package, ModelFileError for a model that edgespec cannot write."""
    exporter = request.exporter_of(role, model.facts.architecture)
    check_architecture(model.source.name, model.facts.architecture, request.exporter)
    require_exporter(exporter)
    if exporter == "edgespec":
        from edgespec.export.onnx.hub_model import check_config, open_hub
        from edgespec.export.onnx.tiled_weights import require_quantiser
        from edgespec.export.onnx.writer import check_form

        check_form(request.quant_of(role, "onnx"))
        require_quantiser(request.quant_of(role, "onnx"))
        check_config(model.source.folder)
        if not model.source.missing:
            open_hub(model.source.folder)
        if (vocabulary := request.vocabulary_of(role)) is not None:
            vocabulary.check(model.facts.vocabulary_size)
    elif role == "draft" and request.draft_vocab is not None:
        raise ConfigError(
            f"--draft-vocab is for edgespec's own ONNX writer; {model.source.name} is made by the exporter {exporter!r}"
        )
    elif request.grouped is not None:
        raise ConfigError(
            f"--in-groups is for edgespec's own ONNX writer; {model.source.name} is made by the exporter {exporter!r}"
        )


def _fetched(
    request: ExportRequest, models: Mapping[str, Model], workspace: Workspace, reporter: Reporter
) -> dict[str, Model]:
    """The models with their weights fetched, after checking that disk and memory suffice."""
    finished = sum(facts["bytes"] for facts in workspace.file_facts().values())
    planned = {role: (model.source, model.facts) for role, model in models.items()}
    if request.derivation is not None and request.derivation.kind == "prune":
        target = models["target"]
        planned["draft"] = (target.source, pruned_facts(target.facts, len(request.derivation.kept)))
    needs = needs_of(request, planned)
    check_room(needs, request.output, models["target"].source.folder, finished)
    reporter.note(
        f"{models['target'].source.name}: {models['target'].facts.architecture}, "
        f"{models['target'].facts.num_parameters / 1e6:.1f} M parameters; the export needs "
        f"{human(needs.output_bytes + needs.temporary_bytes)} of disk and {human(needs.memory_bytes)} of memory"
    )
    if request.quants.get("onnx") == "w8a8" and (
        request.exporter_of("target", models["target"].facts.architecture) == "edgespec"
    ):
        reporter.note(groups_note(request))
    complete = {}
    for role, model in models.items():
        if model.source.missing:
            model.source.fetch(lambda name, size: reporter.note(f"fetching {name}, {human(size)}"))
            source = dataclasses.replace(model.source, missing={})
            model = Model(source, read_facts(source))
        complete[role] = model
    return complete


def pruned_facts(facts: Facts, num_kept: int) -> Facts:
    """Estimated facts of a model pruned to `num_kept` layers."""
    outside = min(facts.table_parameters, facts.num_parameters)
    kept = (facts.num_parameters - outside) * num_kept // max(facts.num_layers, 1)
    return dataclasses.replace(facts, num_parameters=outside + kept, num_layers=num_kept)


def _described(
    request: ExportRequest,
    models: Mapping[str, Model],
    artefacts: list[Artefact],
    figures: Mapping[str, Any],
    workspace: Workspace,
) -> dict[str, int]:
    """Write the manifest and check that it can be read; returns sizes in bytes by file."""
    target = models["target"]
    facts = workspace.file_facts()
    values: dict[str, Any] = {
        "name": request.name or target.source.name,
        "description": _description(request, models),
        "licence": request.licence or card_licence(target.source.folder),
    }
    if target.facts.context_length:
        values["context_length"] = target.facts.context_length
    for artefact in artefacts:
        values.setdefault(artefact.table, {})[artefact.role] = artefact.manifest_entry(facts)
    if sampling := recommended_sampling(target.source.folder):
        values["sampling"] = sampling
    values["figures"] = {"check": dict(figures)}
    write_manifest(workspace.pair, values)
    for wanted in request.formats:
        read_pair(workspace.pair, ENGINES[wanted])
        check_fit(request, workspace.pair, ENGINES[wanted])
    return {name: facts[name]["bytes"] for name in sorted(facts)}


def _description(request: ExportRequest, models: Mapping[str, Model]) -> str:
    target = models["target"]
    kinds = ", ".join(f"{wanted} {request.quants[wanted]}" for wanted in request.formats)
    draft_name = models["draft"].source.name if "draft" in models else request.derivation
    draft = f"; draft: {draft_name}" if draft_name else ""
    draft += f"; heads: {request.heads.name}" if request.heads else ""
    draft += f" with {request.draft_vocab} tokens" if request.draft_vocab else ""
    size = f"{target.facts.num_parameters / 1e6:.1f} M parameters"
    return f"{target.source.name} ({target.facts.architecture}, {size}) as {kinds}{draft}; by {request.made_by}"
