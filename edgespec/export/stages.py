"""The stages of an export: each makes the files of one role in one format, and is not run again once it is finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.export.request import Format
from edgespec.export.workspace import Workspace
from edgespec.formats.manifest import HEAD_KINDS, HEADS
from edgespec.types import Progress

TABLES: Mapping[Format, str] = {"gguf": "files", "onnx": "onnx"}


class Reporter(Protocol):
    """The interface for an export's progress messages; the command line implements it."""

    def note(self, text: str) -> None:
        """Show one message to the user."""

    def stage(self, title: str) -> AbstractContextManager[Progress]:
        """A stage of the work; the yielded function receives its progress."""


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
        return HEADS if self.role in HEAD_KINDS else TABLES[self.format]

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
