"""The stages of an export: which files are made from which model.

A stage makes the files of one role in one format in the workspace's `pair` folder. Layout of a pair:

    target-QUANT.gguf  draft-QUANT.gguf  onnx/target/model.onnx ...  onnx/draft/model.onnx ...

An early exit shares the target's weights: its GGUF stage makes both roles, its ONNX graph is in the target's folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from edgespec.export.checkpoint import is_head_config
from edgespec.export.hub import Source, local_source
from edgespec.export.plan import Facts, read_facts
from edgespec.export.request import ExportRequest, Format
from edgespec.export.workspace import Workspace
from edgespec.formats.hub_folder import read_json
from edgespec.types import Progress

TABLES: Mapping[Format, str] = {"gguf": "files", "onnx": "onnx"}
PRUNED = "pruned"


class Reporter(Protocol):
    """The interface for an export's progress messages; the command line implements it."""

    def note(self, text: str) -> None:
        """Show one message to the user."""

    def stage(self, title: str) -> AbstractContextManager[Progress]:
        """A stage of the work; the yielded function receives its progress."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint and the facts of its headers."""

    source: Source
    facts: Facts

    @property
    def is_head(self) -> bool:
        """Whether it is an EAGLE-3 head, which reads its target's hidden states and has no tokenizer."""
        return is_head_config(read_json(self.source.folder / "config.json"))


@dataclass(frozen=True, slots=True)
class Artefact:
    """One role in one format. `path` and `parts`: relative to the pair folder; `stage`: the stage that made it."""

    stage: str
    format: Format
    role: str
    quant: str
    path: str
    parts: tuple[str, ...] = ()
    parameters: int | None = None

    @property
    def table(self) -> str:
        return TABLES[self.format]

    @property
    def label(self) -> str:
        return f"{self.role} {self.format} {self.quant}"

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Artefact:
        return Artefact(**{**entry, "parts": tuple(entry["parts"])})

    def manifest_entry(self, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The role's table in the manifest. `facts`: `bytes` and `sha256` by path."""
        entry: dict[str, Any] = {"path": self.path, **facts[self.path]}
        if self.parameters is not None:
            entry["parameters"] = self.parameters
        if self.parts:
            entry["parts"] = [{"path": part, **facts[part]} for part in self.parts]
        return entry


@dataclass(frozen=True, slots=True)
class Stage:
    """One unit of the journal. `make` writes complete files into the pair folder, or raises and writes none."""

    name: str
    title: str
    make: Callable[[Progress], list[Artefact]]
    after: str | None = None  # the stage into whose folder it writes, and with which it is deleted


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
        from edgespec.export.gguf.eagle3 import convert_head

        folder, name, licence = model.source.folder, self._name(role), self.request.licence
        if role == "draft" and model.is_head:
            target = self.models["target"].source.folder
            convert_head(folder, target, path, quant, name=name, licence=licence, progress=progress)
            return
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
        return [
            self._early("gguf.pair", "target", quant, made.target, made.target_parts, model.facts.num_parameters),
            self._early("gguf.pair", "draft", quant, made.draft, made.draft_parts, None),
        ]

    def _early(
        self, stage: str, role: str, quant: str, path: Path, parts: tuple[Path, ...], parameters: int | None
    ) -> Artefact:
        names = tuple(self._relative(part) for part in parts)
        return Artefact(stage, "gguf", role, quant, self._relative(path), names, parameters)

    def onnx(self, role: str, progress: Progress) -> list[Artefact]:
        from edgespec.export.onnx import export_onnx
        from edgespec.export.onnx.convert import Exporter, Quant

        quant, model = self.request.quant_of(role, "onnx"), self.model_of(role)
        output = self.workspace.pair / "onnx" / role
        output.parent.mkdir(exist_ok=True)
        made = export_onnx(
            model.source.folder,
            output,
            cast(Quant, quant),
            group_size=self.request.group_size,
            exporter=cast(Exporter, self.request.exporter),
            progress=progress,
        )
        path = self._relative(made.path)
        parts = tuple(name for name in (f"onnx/{role}/{file}" for file in made.files) if name != path)
        return [Artefact(f"onnx.{role}", "onnx", role, quant, path, parts, model.facts.num_parameters)]

    def onnx_early_exit(self, progress: Progress) -> list[Artefact]:
        from edgespec.export.onnx.cut import early_exit_onnx

        assert self.request.derivation is not None
        folder = self.workspace.pair / "onnx" / "target"
        draft = self._relative(early_exit_onnx(folder, self.request.derivation.exit_layer))
        graph = self._relative(folder / "model.onnx")
        names = (self._relative(f) for f in folder.rglob("*") if f.is_file())
        parts = tuple(sorted(name for name in names if name not in (draft, graph)))
        return [Artefact("onnx.draft", "onnx", "draft", self.request.quants["onnx"], draft, parts)]

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
            title = "draft graph over the target's ONNX weights"
            yield Stage("onnx.draft", title, maker.onnx_early_exit, after="onnx.target")


def _stage(make: Callable[[str, Progress], list[Artefact]], wanted: Format, role: str, request: ExportRequest) -> Stage:
    title = f"{role} to {wanted.upper()} {request.quant_of(role, wanted)}"
    return Stage(f"{wanted}.{role}", title, lambda progress: make(role, progress))


def run_stages(stages: Sequence[Stage], workspace: Workspace, reporter: Reporter) -> list[Artefact]:
    """Run all stages that are not finished yet; returns all files."""
    results: dict[str, Any] = {}
    for stage in stages:
        if stage.after is not None and results[stage.after] is None:
            workspace.forget(stage.name)
        results[stage.name] = workspace.finished(stage.name)
    workspace.drop_strays(set(workspace.file_facts()))
    for stage in stages:
        if results[stage.name] is None:
            results[stage.name] = _run(stage, workspace, reporter)
    return [Artefact.from_json(entry) for stage in stages for entry in results[stage.name]]


def _run(stage: Stage, workspace: Workspace, reporter: Reporter) -> list[dict[str, Any]]:
    with reporter.stage(stage.title) as progress:
        artefacts = stage.make(progress)
    entries = [artefact.as_json() for artefact in artefacts]
    known = set(workspace.file_facts())
    files = sorted({name for artefact in artefacts for name in (artefact.path, *artefact.parts)} - known)
    workspace.finish(stage.name, files, entries)
    return entries
