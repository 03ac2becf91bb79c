"""Makes the files of an export: which stages there are for a request, and what each of them writes.

Layout of a pair:

    target-QUANT.gguf  draft-QUANT.gguf  onnx/target/model.onnx ...  onnx/draft/model.onnx ...

An early exit shares the target's weights: its GGUF stage makes both roles, its ONNX graph is in the target's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from edgespec.export.hub import Source, local_source
from edgespec.export.onnx.convert import Exporter
from edgespec.export.plan import Facts, read_facts
from edgespec.export.request import ExportRequest, Format
from edgespec.export.stages import Artefact, Stage
from edgespec.export.workspace import Workspace
from edgespec.types import Progress

PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint and the facts of its headers."""

    source: Source
    facts: Facts


@dataclass(frozen=True)
class Maker:
    """Makes the files of one request in one workspace."""

    request: ExportRequest
    models: Mapping[str, Model]
    workspace: Workspace

    def model_of(self, role: str) -> Model:
        """The checkpoint of a role. A pruned draft is written to the temporary folder on first use."""
        if role in self.models:
            return self.models[role]
        from edgespec.export.derive import prune

        assert self.request.derivation is not None
        folder = self.workspace.temporary / PRUNED
        if not folder.is_dir():
            prune(self.models["target"].source.folder, folder, self.request.derivation.kept)
        source = local_source(folder)
        return Model(source, read_facts(source))

    def gguf(self, role: str, progress: Progress) -> list[Artefact]:
        quant, model = self.request.quant_of(role, "gguf"), self.model_of(role)
        name = f"{role}-{quant}.gguf"
        self._write_gguf(role, model, quant, self.workspace.pair / name, progress)
        return [Artefact(f"gguf.{role}", "gguf", role, quant, name, (), model.facts.num_parameters)]

    def _write_gguf(self, role: str, model: Model, quant: str, path: Path, progress: Progress) -> None:
        from edgespec.export.gguf import export_gguf

        folder, name, licence = model.source.folder, self._name(role), self.request.licence
        importance, threads = self._importance(role, progress), self.request.threads
        export_gguf(
            folder, path, quant, importance=importance, name=name, licence=licence, threads=threads, progress=progress
        )

    def gguf_early_exit(self, progress: Progress) -> list[Artefact]:
        from edgespec.export.gguf.early_exit import early_exit_gguf

        assert self.request.derivation is not None
        quant, model = self.request.quants["gguf"], self.models["target"]
        whole = self.workspace.temporary / f"model-{quant}.gguf"
        self._write_gguf("target", model, quant, whole, progress)
        made = early_exit_gguf(whole, self.workspace.pair, self.request.derivation.exit_layer, progress=progress)
        whole.unlink()
        target, draft, shared, rest = map(self._relative, (made.target, made.draft, made.shared, made.rest))
        num_parameters = model.facts.num_parameters
        return [
            Artefact("gguf.pair", "gguf", "target", quant, target, (shared, rest), num_parameters),
            Artefact("gguf.pair", "gguf", "draft", quant, draft, (shared,)),
        ]

    def is_written_here(self, role: str) -> bool:
        """Whether edgespec's own writer makes the ONNX graph of a role."""
        return self.request.exporter_of(role, self.model_of(role).facts.architecture) == "edgespec"

    def onnx(self, role: str, progress: Progress) -> list[Artefact]:
        from edgespec.export.onnx import export_onnx
        from edgespec.export.onnx.convert import Quant

        quant, model = self.request.quant_of(role, "onnx"), self.model_of(role)
        output = self.workspace.pair / "onnx" / role
        output.parent.mkdir(exist_ok=True)
        made = export_onnx(
            model.source.folder,
            output,
            cast(Quant, quant),
            group_size=self.request.group_size,
            exporter=cast(Exporter, self.request.exporter),
            grouped=self.request.groups,
            vocabulary=self.request.vocabulary_of(role),
            progress=progress,
        )
        path = self._relative(made.path)
        parts = tuple(name for name in (f"onnx/{role}/{file}" for file in made.files) if name != path)
        return [Artefact(f"onnx.{role}", "onnx", role, quant, path, parts, model.facts.num_parameters)]

    def _importance(self, role: str, progress: Progress) -> Path | None:
        """Measure an importance matrix into the temporary folder; None if no text for it was given."""
        if self.request.imatrix is None:
            return None
        from edgespec.export.importance import measure_importance

        path = self.workspace.temporary / f"importance-{role}.npz"
        measure_importance(self.model_of(role).source.folder, self.request.imatrix, path, progress=progress)
        return path

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.workspace.pair).as_posix()

    def _name(self, role: str) -> str:
        name = self.request.name or self.models["target"].source.name
        return name if role == "target" else f"{name} {role}"


def groups_note(request: ExportRequest) -> str:
    """What a user is told of a w8a8 graph of edgespec's own writer."""
    return (
        f"w8a8 with {', '.join(request.groups) or 'nothing'} in groups of weights with a scale each, which keeps more "
        "of the model; --in-groups chooses"
    )


def stages_of(request: ExportRequest, models: Mapping[str, Model], workspace: Workspace) -> Iterator[Stage]:
    """The stages, in the order in which they run."""
    maker = Maker(request, models, workspace)
    early = request.derivation is not None and request.derivation.kind == "early-exit"
    roles = ("target", "draft") if request.has_own_draft_files else ("target",)
    if "gguf" in request.formats:
        if early:
            title = f"target and draft to GGUF {request.quants['gguf']}, sharing weights"
            yield Stage("gguf.pair", title, maker.gguf_early_exit)
        else:
            yield from (_stage(maker.gguf, "gguf", role, request) for role in roles)
    if "onnx" in request.formats:
        yield from (_stage(maker.onnx, "onnx", role, request) for role in roles)
        if early:
            yield exit_stage(request, workspace)


def _stage(make: Callable[[str, Progress], list[Artefact]], wanted: Format, role: str, request: ExportRequest) -> Stage:
    title = f"{role} to {wanted.upper()} {request.quant_of(role, wanted)}"
    return Stage(f"{wanted}.{role}", title, lambda progress: make(role, progress))


def exit_stage(request: ExportRequest, workspace: Workspace) -> Stage:
    """The stage that cuts an early exit's graph, which shares the files of the target's."""
    make = partial(_cut_exit, request, workspace)
    return Stage("onnx.draft", "draft graph over the target's ONNX weights", make, after="onnx.target")


def _cut_exit(request: ExportRequest, workspace: Workspace, _progress: Progress) -> list[Artefact]:
    from edgespec.export.onnx.cut import early_exit_onnx

    assert request.derivation is not None
    folder = workspace.pair / "onnx" / "target"
    draft = early_exit_onnx(folder, request.derivation.exit_layer)
    shared = (path for path in folder.rglob("*") if path.is_file() and path not in (draft, folder / "model.onnx"))
    path, *parts = (each.relative_to(workspace.pair).as_posix() for each in (draft, *shared))
    return [Artefact("onnx.draft", "onnx", "draft", request.quants["onnx"], path, tuple(sorted(parts)))]
