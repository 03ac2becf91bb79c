"""The export: find the sources, plan, convert, check, write the manifest, publish the pair folder.

Sources are checkpoints (a folder or a hub id), which become GGUFs and ONNX graphs, or GGUF files, which become graphs.
Layout of a pair:

    target-QUANT.gguf  draft-QUANT.gguf  onnx/target/model.onnx ...  onnx/draft/model.onnx ...  heads/eagle.npz

The folder gets its final name only after all files passed the check; what an interrupted export wrote is deleted.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from edgespec.config.options import LoadOptions
from edgespec.config.values import DrafterName, EngineName
from edgespec.errors import CapabilityError, ConfigError, EdgespecError, EngineError, ModelFileError
from edgespec.export.check import (
    CHECK_CONTEXT,
    FLOAT,
    Checked,
    ExportRefused,
    Figures,
    GraphCheck,
    compare,
    limits_of,
    open_engine,
)
from edgespec.export.hub import Source, card_licence, find_source, recommended_sampling, source_here
from edgespec.export.reference import (
    Reference,
    check_round_trip,
    check_same_names,
    has_transformers,
    reference_of,
    require_packages,
    token_names,
)
from edgespec.export.request import DEFAULT_GROUP_SIZES, ENGINES, ExportRequest
from edgespec.export.room import STRAIGHT_GGUF, Facts, check_room, facts_of_gguf, human, needs_of, read_facts
from edgespec.export.workspace import Artefact, Workspace, check_output, opened, write_manifest
from edgespec.formats.checkpoint import unsupported
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.head_file import read_head_file
from edgespec.formats.hub_folder import eagle3_fix
from edgespec.formats.manifest import HEADS, read_pair
from edgespec.installation import has_engine, install_command, require_engine
from edgespec.loading.opening import open_models
from edgespec.platform.files import write_errors
from edgespec.types import Progress, no_progress

if TYPE_CHECKING:
    from edgespec.export.gguf.convert import OutputType
    from edgespec.export.onnx.hub_model import HubModel

EXACT_GGUF = "bf16"  # holds the range of any checkpoint
OWN_TYPES: dict[str, OutputType] = {"BF16": "bf16", "F16": "f16"}
HEADS_CONTEXT = 64  # tokens; the probe of a heads file has fewer
_WRONG = (ExportRefused, ModelFileError, EngineError)  # a wrong model, or not a model


class Reporter(Protocol):
    """The interface for an export's progress messages; the command line implements it."""

    def note(self, text: str) -> None:
        """Show one message to the user."""

    def stage(self, title: str) -> AbstractContextManager[Progress]:
        """A stage of the work; the yielded function receives its progress."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished pair: its folder, sizes in bytes by file, and the figures of the check (empty if skipped)."""

    folder: Path
    files: Mapping[str, int]
    figures: Mapping[str, Any]


class GgufFile:
    """A GGUF file. Raises all errors that its header shows."""

    def __init__(self, path: Path) -> None:
        from edgespec.export.onnx.writer import open_gguf

        self._model = open_gguf(path)
        self.name, self.path, self.facts = path.stem, path, facts_of_gguf(self._model)

    def token_names(self) -> list[str]:
        """Token text by id."""
        return [text.decode(errors="replace") for text in self._model.header.tokens]

    def opened(self) -> GgufModel:
        """What a graph is written from."""
        return self._model

    @contextmanager
    def for_llamacpp(self, temporary: Path) -> Iterator[Path | None]:
        """A GGUF of the same weights within the block; None where llama.cpp is missing or cannot read such a model."""
        yield self.path if has_engine("llamacpp") else None

    def describe(self, request: ExportRequest) -> dict[str, Any]:
        """What the manifest says of a target."""
        kinds = f"onnx {request.quants['onnx']}, made of GGUF"
        found: dict[str, Any] = {
            "name": request.name or f"{self.name}-{request.quants['onnx']}",  # those of one file can be told apart
            "description": _description(self, kinds, request),
            "licence": request.licence or str(self._model.header.metadata.get("general.license", "")),
            "context_length": self._model.config.max_positions,
        }
        try:  # the manifest beside the file
            pair = read_pair(self.path.parent, check_hashes=False)
        except EdgespecError:
            return found
        if any(file.path == self.path for file in pair.files.values()) and pair.recommended:
            found["sampling"] = dict(pair.recommended)
        return found


class HubFolder:
    """A Hugging Face folder, or what is known of one before its weights are fetched."""

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.facts = source, source.name, read_facts(source)
        self.folder = source.folder

    def token_names(self) -> list[str]:
        return token_names(self.folder)

    def opened(self) -> HubModel:
        from edgespec.export.onnx.hub_model import open_hub

        return open_hub(self.folder)

    @contextmanager
    def for_llamacpp(self, temporary: Path) -> Iterator[Path | None]:
        """The weights in their own type. Only they are compared: a tokenizer that llama.cpp lacks is no fault."""
        if not has_engine("llamacpp") or find_spec("gguf") is None:
            yield None
            return
        from edgespec.export.gguf.convert import convert
        from edgespec.formats.onnx.forms import EMBEDDING

        model, path = self.opened(), temporary / "reference.gguf"
        stored = model.checkpoint.tensors[model.tensors[EMBEDDING][0]].dtype
        with suppress(ModelFileError):
            convert(model.checkpoint, path, OWN_TYPES.get(stored, "f32"))
        try:
            yield path if path.exists() else None
        finally:
            path.unlink(missing_ok=True)

    def describe(self, request: ExportRequest) -> dict[str, Any]:
        kinds = ", ".join(f"{wanted} {request.quants[wanted]}" for wanted in request.formats)
        found: dict[str, Any] = {
            "name": request.name or self.name,
            "description": _description(self, kinds, request),
            "licence": request.licence or card_licence(self.folder),
        }
        if self.facts.context_length:
            found["context_length"] = self.facts.context_length
        if sampling := recommended_sampling(self.folder):
            found["sampling"] = sampling
        return found


ModelSource = GgufFile | HubFolder


def _write_graph(
    model: ModelSource, folder: Path, quant: str, group_size: int | None = None, progress: Progress = no_progress
) -> Path:
    """Write a graph of edgespec's own writer and its companions into the empty `folder`; the path of the graph."""
    from edgespec.export.onnx.writer import convert_gguf, convert_hub

    if isinstance(model, GgufFile):
        return convert_gguf(model.opened(), folder, quant, group_size, progress)
    return convert_hub(model.opened(), folder, quant, group_size, progress)


def _description(target: ModelSource, kinds: str, request: ExportRequest) -> str:
    draft = f"; draft: {Path(request.draft).name}" if request.draft else ""
    draft += f"; heads: {request.heads.name}" if request.heads else ""
    size = f"{target.facts.num_parameters / 1e6:.1f} M parameters"
    return f"{target.name} ({target.facts.architecture}, {size}) as {kinds}{draft}; by {request.made_by}"


def export_pair(request: ExportRequest, reporter: Reporter) -> Exported:
    """Export the pair folder that `request` describes.

    Raises UsageError and its subclasses (source, options, output), VocabularyMismatch (draft of another family),
    CapabilityError (missing package, not enough disk or memory), ExportRefused (a file differs from its source).
    """
    _require(request)
    check_output(request.output, replace=request.force)
    with keeping_headers(), opened(request.output, replace=request.force) as workspace:
        models = _found(request, reporter)
        models = _fetched(request, models, reporter)
        export = _Export(request, models, workspace, reporter)
        artefacts = export.make()
        figures = export.check(artefacts)
        files = export.describe(artefacts, figures)
        workspace.publish()
    return Exported(request.output, files, figures)


# before work starts


def _require(request: ExportRequest) -> None:
    """Raise the errors of sources that cannot be used, then CapabilityError for what is missing."""
    if request.is_gguf:
        if find_spec("gguf") is None:
            raise CapabilityError(f"converting a GGUF needs gguf: {install_command('convert')}")
        if request.check:
            require_engine("onnx", "checking the conversion")
    else:
        source_here(request.source, request.revision)  # nobody shall install torch for a folder that cannot be used
        if request.draft is not None:
            source_here(request.draft)
        require_packages(request.formats, torch=request.check)
    for role in request.roles:
        if "gguf" in request.formats:
            from edgespec.export.gguf.convert import check_quant

            check_quant(request.quant_of(role, "gguf"))
        if "onnx" in request.formats and request.exporter == "edgespec":
            from edgespec.export.onnx.writer import check_form

            check_form(request.quant_of(role, "onnx"))


def _found(request: ExportRequest, reporter: Reporter) -> dict[str, ModelSource]:
    """The models by role. Raises all errors that can be detected from headers, before weights are fetched."""
    models: dict[str, ModelSource] = {}
    for role in request.roles:
        given = request.source if role == "target" else cast(str, request.draft)
        models[role] = _gguf(request, given) if request.is_gguf else _checkpoint(request, role, given, reporter)
    if "draft" in models:
        check_same_names(models["target"].token_names(), models["draft"].token_names())
    if request.heads is not None:
        check_given_heads(request.heads, models["target"].facts)
    return models


def _gguf(request: ExportRequest, given: str) -> GgufFile:
    if not given.lower().endswith(".gguf"):
        other = f"--draft {given}: the draft of a GGUF must be a .gguf file, too, or trained heads (.npz)"
        raise ConfigError(eagle3_fix(Path(given)) or other)
    return GgufFile(Path(given).expanduser())


def _checkpoint(request: ExportRequest, role: str, given: str, reporter: Reporter) -> HubFolder:
    source = find_source(given, request.revision if role == "target" else None)
    if source.note:
        reporter.note(source.note)
    if request.output.resolve().is_relative_to(source.folder.resolve()):
        raise ConfigError(f"--output {request.output} is inside the source folder {source.folder}: choose another")
    if (fix := eagle3_fix(source.folder)) is not None:
        raise ConfigError(fix)
    found = HubFolder(source)
    found.token_names()
    check_round_trip(source.folder)
    architecture = found.facts.architecture
    if "gguf" in request.formats:
        from edgespec.formats.architectures import ARCHITECTURES

        if architecture not in ARCHITECTURES:
            raise unsupported(source.name, architecture, "GGUF", ARCHITECTURES)
    if "onnx" in request.formats and request.exporter == "edgespec":
        from edgespec.export.onnx.hub_model import check_config
        from edgespec.export.onnx.writer import require_quantiser

        require_quantiser(request.quant_of(role, "onnx"))
        check_config(source.folder)
        if not source.missing:
            found.opened()
    return found


def check_given_heads(path: Path, target: Facts) -> None:
    """Raises ModelNotFound and ModelFileError for a file that holds no heads, ConfigError for a larger target's."""
    manifest = read_head_file(path).manifest
    size, num_layers = target.vocabulary_size, target.num_layers
    if manifest.vocabulary_size > size or max(manifest.layers, default=0) >= num_layers:
        reads = f", layers {', '.join(map(str, manifest.layers))}" if manifest.layers else ""
        raise ConfigError(
            f"--draft {path} holds heads for another target ({manifest.target}: {manifest.vocabulary_size} tokens"
            f"{reads}), and this one has {size} tokens and {num_layers} layers: give the file that was trained for it"
        )


def _fetched(request: ExportRequest, models: Mapping[str, ModelSource], reporter: Reporter) -> dict[str, ModelSource]:
    """The models with their weights fetched, after checking that disk and memory suffice."""
    checkpoints = [model for model in models.values() if isinstance(model, HubFolder)]
    download = sum(model.source.missing_bytes for model in checkpoints)
    needs = needs_of(request, {role: model.facts for role, model in models.items()}, download)
    check_room(needs, request.output, checkpoints[0].folder if checkpoints else None)
    target = models["target"]
    reporter.note(
        f"{target.name}: {target.facts.architecture}, {target.facts.num_parameters / 1e6:.1f} M parameters; the export "
        f"needs {human(needs.output_bytes + needs.temporary_bytes)} of disk and {human(needs.memory_bytes)} of memory"
    )
    complete = dict(models)
    for role, model in models.items():
        if isinstance(model, HubFolder) and model.source.missing:
            model.source.fetch(lambda name, size: reporter.note(f"fetching {name}, {human(size)}"))
            complete[role] = HubFolder(dataclasses.replace(model.source, missing={}))
    return complete


@dataclass(frozen=True)
class _Export:
    """The work on one request in one workspace."""

    request: ExportRequest
    models: Mapping[str, ModelSource]
    workspace: Workspace
    reporter: Reporter

    # making the files

    def make(self) -> list[Artefact]:
        """All files."""
        found = []
        for wanted in self.request.formats:
            write = self._gguf if wanted == "gguf" else self._onnx
            for role in self.request.roles:
                title = f"{role} to {wanted.upper()} {self.request.quant_of(role, wanted)}"
                found.append(self._made(title, partial(write, role)))
        if self.request.heads is not None:
            kind = read_head_file(self.request.heads).manifest.kind
            found.append(self._made(f"{kind} heads", partial(self._heads, self.request.heads, kind)))
        return found

    def _made(self, title: str, write: Callable[[Progress], Artefact]) -> Artefact:
        with self.reporter.stage(title) as progress:
            found = write(progress)
        self.workspace.finish(found)
        return found

    def _gguf(self, role: str, progress: Progress) -> Artefact:
        quant, model = self.request.quant_of(role, "gguf"), self.models[role]
        path = self.workspace.pair / f"{role}-{quant}.gguf"
        self._write_gguf(role, quant, path, progress)
        return Artefact("gguf", role, quant, path.name, (), model.facts.num_parameters)

    def _write_gguf(self, role: str, quant: str, path: Path, progress: Progress) -> None:
        from edgespec.export.gguf.convert import export_gguf

        request, model = self.request, self.models[role]
        assert isinstance(model, HubFolder)
        name = request.name or self.models["target"].name
        export_gguf(
            model.folder,
            path,
            quant,
            name=name if role == "target" else f"{name} {role}",
            licence=request.licence,
            threads=request.threads,
            progress=progress,
        )

    def _onnx(self, role: str, progress: Progress) -> Artefact:
        quant, model = self.request.quant_of(role, "onnx"), self.models[role]
        output = self.workspace.pair / "onnx" / role
        with write_errors(output):
            output.mkdir(parents=True)
            if self.request.exporter == "optimum":
                from edgespec.export.onnx.optimum import export_with_optimum

                assert isinstance(model, HubFolder)
                size = self.request.group_size or DEFAULT_GROUP_SIZES.get(quant, 0)
                export_with_optimum(model.folder, output, quant, size, progress)
            else:
                _write_graph(model, output, quant, self.request.group_size, progress)
        files = sorted(f"onnx/{role}/{file.name}" for file in output.iterdir())
        graph = f"onnx/{role}/model.onnx"
        files.remove(graph)
        return Artefact("onnx", role, quant, graph, tuple(files), model.facts.num_parameters)

    def _heads(self, source: Path, kind: str, _progress: Progress) -> Artefact:
        path = self.workspace.pair / HEADS / f"{kind}.npz"
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, path)
        return Artefact(self.request.formats[0], kind, "as given", f"{HEADS}/{path.name}")

    # checking them

    def check(self, artefacts: list[Artefact]) -> dict[str, Any]:
        """Check all models; returns figures for the manifest. Raises ExportRefused."""
        figures: dict[str, Any] = {"performed": self.request.check, "tokenisation": "equal"}
        for role, model in self.models.items():
            mine = [artefact for artefact in artefacts if artefact.role == role]
            figures["tokenisation"] = self._check_vocabulary(model, mine)
            if not self.request.check:
                continue
            with self.reporter.stage(f"checking {role}") as progress:
                found = self._checked(model, mine, progress)
            figures["reference"], figures[role] = found.reference, found.figures
            if found.warning:
                self.reporter.note(f"{role}: {found.warning}")
        return figures

    def _check_vocabulary(self, model: ModelSource, artefacts: list[Artefact]) -> str:
        """Compare tokenisers with the source's; 'equal', or 'round trip' where only that could be checked."""
        for artefact in artefacts:
            path = self.workspace.pair / artefact.path
            if isinstance(model, GgufFile):
                check_round_trip(path.parent)
                if not has_engine("llamacpp"):
                    return "round trip"
                folder, gguf = path.parent, model.path
            elif artefact.format == "gguf":
                folder, gguf = model.folder, path
            else:
                continue
            from edgespec.export.gguf.tokenizer import check_tokenizer

            check_tokenizer(folder, gguf)
        return "equal"

    def _checked(self, model: ModelSource, artefacts: list[Artefact], progress: Progress) -> Checked:
        graphs = [one for one in artefacts if one.format == "onnx" and self.request.exporter == "edgespec"]
        others = [one for one in artefacts if one not in graphs]
        if isinstance(model, GgufFile) or (not others and not has_transformers()):
            return self._check_graph(model, graphs[0], None, progress)
        assert isinstance(model, HubFolder)
        progress(0, 1 + len(artefacts), "transformers")
        reference = reference_of(model.folder, self.request.threads)
        figures = self._compared(model, others, reference, progress)
        if not graphs:
            return Checked(f"{reference.version}, float32", figures)
        found = self._check_graph(model, graphs[0], reference, progress)
        return Checked(f"{reference.version}, float32", {**figures, **found.figures}, found.warning)

    def _check_graph(
        self, model: ModelSource, artefact: Artefact, reference: Reference | None, progress: Progress
    ) -> Checked:
        """Compare a graph of edgespec's own writer with transformers, with llama.cpp, or with itself in float32."""
        temporary = self.workspace.temporary
        with nullcontext(None) if reference is not None else model.for_llamacpp(temporary) as gguf:
            return GraphCheck(
                graph=self.workspace.pair / artefact.path,
                quant=artefact.quant,
                config=model.opened().config,
                num_parameters=model.facts.num_parameters,
                write_float=lambda folder: _write_graph(model, folder, FLOAT),
                temporary=temporary,
                gguf=gguf,
                transformers=reference,
                threads=self.request.threads,
                progress=progress,
            ).run()

    def _compared(
        self, model: HubFolder, artefacts: list[Artefact], reference: Reference, progress: Progress
    ) -> Figures:
        """Figures by format of files that edgespec's ONNX writer has not made.

        Coarse quantisations would hide small errors of the conversion, so for these a temporary 16-bit GGUF of the same
        conversion is compared, too.
        """
        files = [(one, one.quant, self.workspace.pair / one.path) for one in artefacts]
        rounded = [one for one in artefacts if one.format == "gguf" and one.quant not in STRAIGHT_GGUF]
        total, figures = 1 + len(files) + len(rounded), Figures()
        for one in rounded:
            progress(1, total, f"{one.role} gguf {EXACT_GGUF}")
            path = self.workspace.temporary / f"{one.role}-{EXACT_GGUF}.gguf"
            self._write_gguf(one.role, EXACT_GGUF, path, no_progress)
            files.append((one, EXACT_GGUF, path))
        context_length = min(CHECK_CONTEXT, model.facts.context_length or CHECK_CONTEXT)
        for done, (artefact, quant, path) in enumerate(files, 1 + len(rounded)):
            progress(done, total, f"{artefact.role} {artefact.format} {quant}")
            try:
                with open_engine(artefact.format, path, context_length, self.request.threads) as engine:
                    found = compare(reference, engine)
                complaint = found.complaint(limits_of(quant))
            except _WRONG as error:
                complaint = str(error)
            if complaint:
                what = "" if quant == artefact.quant else f"before quantisation, as {quant}, "
                raise ExportRefused(
                    f"the export of {artefact.label} is wrong and was removed: {what}{complaint}. Try another --quant "
                    "or --exporter, and please report this with the model's name"
                )
            figures[artefact.format if quant == artefact.quant else f"{artefact.format}_{quant}"] = found.figures()
        return figures

    # the manifest

    def describe(self, artefacts: list[Artefact], figures: Mapping[str, Any]) -> dict[str, int]:
        """Write the manifest and check that it can be read; returns sizes in bytes by file."""
        values, facts = self.models["target"].describe(self.request), self.workspace.file_facts
        for artefact in artefacts:
            values.setdefault(artefact.table, {})[artefact.role] = artefact.manifest_entry(facts)
        values["figures"] = {"check": dict(figures)}
        if self.request.is_gguf:
            paths = {role: cast(GgufFile, model).path for role, model in self.models.items()}
            made_of = {role: {"file": path.name, "bytes": path.stat().st_size} for role, path in paths.items()}
            values["figures"]["made_of"] = made_of
        write_manifest(self.workspace.pair, values)
        for wanted in self.request.formats:
            read_pair(self.workspace.pair, ENGINES[wanted])
            self._check_heads_fit(ENGINES[wanted])
        return {name: facts[name]["bytes"] for name in sorted(facts)}

    def _check_heads_fit(self, engine: EngineName) -> None:
        """Raises ExportRefused unless the heads in the finished folder read the states of its target."""
        if self.request.heads is None or not self.request.check:
            return
        drafter: DrafterName = read_head_file(self.request.heads).manifest.kind
        options = LoadOptions(
            model=str(self.workspace.pair),
            engine=engine,
            drafter=drafter,
            context_length=HEADS_CONTEXT,
            reproducible=False,
        )
        try:
            _, target, drafters = open_models(options)
        except ModelFileError as exc:
            raise ExportRefused(
                f"--draft {self.request.heads} does not fit what was made of {self.request.source}: {exc}"
            ) from exc
        for made in drafters.values():
            made.close()
        target.close()
