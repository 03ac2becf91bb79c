"""The export: find the sources, plan, convert, check, write the manifest, publish the pair folder.

Sources are checkpoints (a folder or a hub id) or GGUF files. A checkpoint becomes a GGUF in its own precision first, of
which quantised GGUFs and ONNX graphs are made. Layout of a pair:

    target-QUANT.gguf  draft-QUANT.gguf  onnx/target/model.onnx ...  onnx/draft/model.onnx ...  heads/eagle.npz

The folder gets its final name only after all files passed the check; what an interrupted export wrote is deleted.
Files beside an output `NAME` while an export runs or after it was killed:

    .NAME.export.lock       file lock of the running export
    .NAME.export/pair/      becomes NAME
    .NAME.export/temporary/
    .NAME.replaced          the old output for the moment in which --force replaces it
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from filelock import FileLock, Timeout

from edgespec.config.values import as_size
from edgespec.errors import ConfigError, EngineError, ModelFileError, UsageError
from edgespec.export.check import (
    ABSURD,
    CHECK_CONTEXT,
    ExportRefused,
    check_round_trip,
    compare,
    engine_reference,
    has_transformers,
    limits_of,
    open_engine,
    reference_of,
    require_packages,
)
from edgespec.export.hub import CheckpointSource, find_source, source_here
from edgespec.export.request import ENGINES, STRAIGHT_GGUF, ExportRequest, Format
from edgespec.export.source import SourceModel, Weights, check_room, disk_bytes, memory_bytes, of_folder, of_gguf
from edgespec.formats.architectures import ARCHITECTURES
from edgespec.formats.checkpoint import full_config, named_architecture, unsupported
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.head_file import read_head_file
from edgespec.formats.manifest import HEADS, MANIFEST, read_pair, write_manifest
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.llama_config import WRITABLE
from edgespec.installation import has_engine, install_command, require_engine
from edgespec.loading.download import checksummed
from edgespec.platform.files import write_errors
from edgespec.types import Progress
from edgespec.vocabulary import check_same_names

_WRONG = (ExportRefused, ModelFileError, EngineError)  # a wrong model, or not a model
CONVERTED = (*STRAIGHT_GGUF, "fp32")  # types that keep all of a checkpoint, or nearly


class Reporter(Protocol):
    """The interface for an export's progress messages; the command line implements it."""

    def note(self, text: str) -> None:
        """Show one message to the user."""

    def stage(self, title: str) -> AbstractContextManager[Progress]:
        """A stage of the work; the yielded function receives its progress."""


class Made(NamedTuple):
    """One role in one format: its files, the one to open first."""

    format: Format
    role: str
    quant: str
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.files[0]


def export_pair(request: ExportRequest, reporter: Reporter) -> tuple[dict[str, int], dict[str, Any]]:
    """Export the pair folder that `request` describes: sizes in bytes by file, and the figures of the check.

    Raises UsageError and its subclasses (source, options, output), VocabularyMismatch (draft of another family),
    CapabilityError (missing package, not enough disk or memory), ExportRefused (a file differs from its source).
    """
    _require(request)
    with keeping_headers(), workspace(request.output, replace=request.force) as (folder, temporary):
        models = _fetched(request, _found(request, reporter), reporter)
        return _Export(request, models, folder, temporary, reporter).make()


# the working folder: locked, and renamed atomically at the end

_FIX = "choose another --output"


@contextmanager
def workspace(output: Path, *, replace: bool) -> Iterator[tuple[Path, Path]]:
    """(the folder that becomes `output` where the block ends without an error, one for what is needed meanwhile).

    Locked until then. Raises UsageError if the output exists and `replace` is False, or another export is writing it;
    StateError where nothing can be written.
    """
    check_output(output, replace=replace)
    folder = output.with_name(f".{output.name}.export")
    pair, temporary = folder / "pair", folder / "temporary"
    with _locked(output):
        check_output(output, replace=replace)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what an export that was killed left
            with write_errors(output, fix=_FIX):
                for each in (pair, temporary):
                    each.mkdir(parents=True)
            yield pair, temporary
            check_output(output, replace=replace)  # it may have appeared meanwhile
            _publish(pair, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    lock = FileLock(output.with_name(f".{output.name}.export.lock"), timeout=0)
    with write_errors(output, fix=_FIX):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"another edgespec is writing {output}: wait for it, or choose another --output"
            ) from error
    try:
        yield
    finally:
        lock.release()
        if sys.platform != "win32":  # where the lock deletes its file itself
            Path(lock.lock_file).unlink(missing_ok=True)


def _publish(pair: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.replace(replaced)
    try:
        pair.replace(output)
    except OSError:
        if replaced.exists():
            replaced.replace(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def check_output(output: Path, *, replace: bool) -> None:
    """Raise UsageError if the export must not replace what exists at `output`."""
    if output.resolve() in (here := Path.cwd(), *here.parents):
        raise UsageError(f"{output} is the current folder or holds it, and would be replaced: choose another --output")
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir() or output.is_symlink():
        raise UsageError(f"{output} exists and is not a folder: choose another --output")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST).is_file():
        raise UsageError(f"{output} holds other files and no {MANIFEST}: choose another --output")
    if not replace:
        raise UsageError(f"{output} exists: choose another --output, or replace it with --force")


# before work starts


def _require(request: ExportRequest) -> None:
    """Raise the errors of sources that cannot be used, then CapabilityError for what is missing."""
    if not request.is_gguf:
        source_here(request.source, request.revision)  # nobody shall install torch for a folder that cannot be used
        if request.draft is not None:
            source_here(request.draft)
    if request.exporter == "optimum":
        from edgespec.export.onnx.optimum import exporter

        exporter()
    if "onnx" in request.formats and request.check:
        require_engine("onnx", "checking the conversion")
    require_packages(request.formats, torch=request.check)
    for role in request.roles:
        if request.writes_graphs:
            from edgespec.export.onnx.writer import check_form

            check_form(request.quant_of(role, "onnx"))


def _found(request: ExportRequest, reporter: Reporter) -> dict[str, SourceModel]:
    """The models by role. Raises all errors that can be detected from headers, before weights are fetched."""
    models: dict[str, SourceModel] = {}
    for role in request.roles:
        given = request.source if role == "target" else cast(str, request.draft)
        models[role] = _gguf(request, role, given) if request.is_gguf else _checkpoint(request, role, given, reporter)
    if "draft" in models:
        check_same_names(models["target"].token_names, models["draft"].token_names)
    if request.heads is not None:
        check_given_heads(request.heads, models["target"])
    return models


def _gguf(request: ExportRequest, role: str, given: str) -> SourceModel:
    from edgespec.export.onnx.writer import needs_blocks, open_gguf

    if not given.lower().endswith(".gguf"):
        raise ConfigError(f"--draft {given}: the draft of a GGUF must be a .gguf file, too, or trained heads (.npz)")
    model, quant = open_gguf(Path(given).expanduser()), request.quant_of(role, "onnx")
    if needs_blocks(model, quant):
        require_engine("llamacpp", f"quantising to {quant}", "or export int8, which needs nothing")
    return of_gguf(model)


def _checkpoint(request: ExportRequest, role: str, given: str, reporter: Reporter) -> SourceModel:
    source = find_source(given, request.revision if role == "target" else None)
    if source.note:
        reporter.note(source.note)
    if request.output.resolve().is_relative_to(source.folder.resolve()):
        raise ConfigError(f"--output {request.output} is inside the source folder {source.folder}: choose another")
    if "gguf" in request.formats or request.writes_graphs:
        _check_architecture(request, source)
    found = of_folder(source)
    check_round_trip(source.folder)
    if request.writes_graphs and request.quant_of(role, "onnx") == "q4_k_m":
        require_engine("llamacpp", "quantising to q4_k_m", "or export q8_0, which needs nothing")
    return found


def _check_architecture(request: ExportRequest, source: CheckpointSource) -> None:
    from edgespec.export.gguf.convert import check_checkpoint

    kind = named_architecture(full_config(source.folder))
    graphs = [name for name, table in ARCHITECTURES.items() if table.name in WRITABLE]
    if request.writes_graphs and kind not in graphs:
        raise unsupported(source.name, kind, "ONNX by edgespec's own writer", graphs)
    check_checkpoint(source.folder, has_weights=not source.missing)


def check_given_heads(path: Path, target: SourceModel) -> None:
    """Raises ModelNotFound and ModelFileError for a file that holds no heads, ConfigError for a larger target's."""
    manifest = read_head_file(path).manifest
    size, num_layers = target.vocabulary_size, target.num_layers
    width = manifest.feature_size // (len(manifest.layers) + 1)
    fits = manifest.vocabulary_size <= size and max(manifest.layers, default=0) < num_layers
    if not fits or width * size != target.table_parameters:
        reads = f", layers {', '.join(map(str, manifest.layers))}" if manifest.layers else ""
        raise ConfigError(
            f"--draft {path} holds heads for another target ({manifest.target}: {manifest.vocabulary_size} tokens, "
            f"{width} wide{reads}), and this one has {size} tokens, {num_layers} layers and is "
            f"{target.table_parameters // max(size, 1)} wide: give the file that was trained for it"
        )


def _fetched(request: ExportRequest, models: Mapping[str, SourceModel], reporter: Reporter) -> dict[str, SourceModel]:
    """The models with their weights fetched, after checking that disk and memory suffice."""
    download = sum(sum(model.missing.values()) for model in models.values())
    disk, memory = disk_bytes(request, models), memory_bytes(request, models)
    check_room(request.output, disk + download, memory)
    target = models["target"]
    reporter.note(
        f"{target.name}: {target.architecture}, {target.num_parameters / 1e6:.1f} M parameters; the export "
        f"needs {as_size(disk)} of disk and {as_size(memory)} of memory"
    )
    complete = dict(models)
    for role, model in models.items():
        if model.checkpoint is not None and model.missing:
            reporter.note(f"fetching {', '.join(model.missing)}, {as_size(sum(model.missing.values()))}")
            model.checkpoint.fetch()
            complete[role] = of_folder(dataclasses.replace(model.checkpoint, missing={}))
    return complete


@dataclass(frozen=True)
class _Export:
    """The work on one request. `folder`: of the pair."""

    request: ExportRequest
    models: Mapping[str, SourceModel]
    folder: Path
    temporary: Path
    reporter: Reporter

    def make(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Sizes in bytes by file, and the figures of the check. Raises ExportRefused."""
        made = list[Made]()
        figures: dict[str, Any] = {"performed": self.request.check, "tokenisation": "equal"}
        for role, model in self.models.items():
            with self._weights(role, model) as weights:
                mine = [self._file(role, wanted, weights) for wanted in self.request.formats]
                figures["tokenisation"] = self._check_vocabulary(role, model, weights, mine)
                if self.request.check:
                    with self.reporter.stage(f"checking {role}") as progress:
                        figures["reference"], figures[role] = self._check(role, model, weights, mine, progress)
            made += mine
        if self.request.heads is not None:
            made.append(self._heads(self.request.heads))
        with self.reporter.stage("checksums"):
            return self._describe(made, figures), figures

    # making the files

    @contextmanager
    def _weights(self, role: str, model: SourceModel) -> Iterator[Weights | None]:
        """What the files of a role are made of, within the block: the GGUF that was given, or one of the folder.

        None where a folder is only converted, or by Optimum.
        """
        if model.folder is None or not self.request.has_gguf_between(role):
            yield model.weights
            return
        from edgespec.export.gguf.convert import own_precision

        is_enough = self.request.formats == ("onnx",) and self.request.quant_of(role, "onnx") == "q8_0"
        kind = "q8_0" if is_enough else own_precision(model.folder)
        path = self.temporary / f"{role}-{kind}.gguf"
        with self.reporter.stage(f"{role} to GGUF {kind}") as progress:
            self._convert(role, kind, path, progress)
        try:
            yield Weights(path, kind)
        finally:
            path.unlink(missing_ok=True)

    def _convert(self, role: str, quant: str, path: Path, progress: Progress) -> None:
        from edgespec.export.gguf.convert import convert

        folder = self.models[role].folder
        assert folder is not None
        name = self.request.name or self.models["target"].name
        convert(
            folder,
            path,
            quant,
            name=name if role == "target" else f"{name} {role}",
            licence=self.request.licence,
            progress=progress,
        )

    def _file(self, role: str, wanted: Format, weights: Weights | None) -> Made:
        make = self._gguf if wanted == "gguf" else self._onnx
        quant = self.request.quant_of(role, wanted)
        with self.reporter.stage(f"{role} to {wanted.upper()} {quant}") as progress:
            return make(role, quant, weights, progress)

    def _gguf(self, role: str, quant: str, weights: Weights | None, progress: Progress) -> Made:
        from edgespec.export.gguf.convert import quantise

        path = self.folder / f"{role}-{quant}.gguf"
        if quant in STRAIGHT_GGUF:
            self._convert(role, quant, path, progress)
        else:
            assert weights is not None
            quantise(weights.path, path, quant, threads=self.request.threads)
        return Made("gguf", role, quant, (path,))

    def _onnx(self, role: str, quant: str, weights: Weights | None, progress: Progress) -> Made:
        output, folder = self.folder / "onnx" / role, self.models[role].folder
        with write_errors(output):
            output.mkdir(parents=True)
            if self.request.writes_graphs:
                from edgespec.export.onnx.writer import convert_gguf, open_gguf

                assert weights is not None
                convert_gguf(open_gguf(weights.path), output, quant, progress)
            else:
                from edgespec.export.onnx.optimum import export_with_optimum

                assert folder is not None
                export_with_optimum(folder, output, quant, progress)
        files = sorted(output.iterdir(), key=lambda file: (file.name != MODEL, file.name))
        return Made("onnx", role, quant, tuple(files))

    def _heads(self, source: Path) -> Made:
        kind = read_head_file(source).manifest.kind
        path = self.folder / HEADS / f"{kind}.npz"
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, path)
        return Made(self.request.formats[0], kind, "as given", (path,))

    # checking them

    def _check_vocabulary(self, role: str, model: SourceModel, weights: Weights | None, made: list[Made]) -> str:
        """Compare tokenisers with the source's; 'equal', or 'round trip' where only that could be checked."""
        folders = [] if model.folder is None else [model.folder]
        if self.request.writes_graphs:
            folders.append(self.folder / "onnx" / role)
        ggufs = [each.path for each in made if each.format == "gguf"]
        if not ggufs and weights is None:
            return "equal"  # Optimum's, whose tokenizer is the folder's
        if not has_engine("llamacpp"):
            check_round_trip(folders[-1])
            return "round trip"
        from edgespec.export.gguf.tokenizer import check_tokenizer

        for folder in folders:
            check_tokenizer(folder, ggufs[0] if weights is None else weights.path)
        return "equal"

    def _check(
        self, role: str, model: SourceModel, weights: Weights | None, made: list[Made], progress: Progress
    ) -> tuple[str, dict[str, dict[str, float]]]:
        """The reference, and figures by format. Coarse types would hide small faults of a conversion, so that where
        transformers shows these, the GGUF between is compared, too."""
        context = min(CHECK_CONTEXT, model.said["context_length"] or CHECK_CONTEXT)
        files: list[tuple[str, Format, str, Path]] = [(one.format, one.format, one.quant, one.path) for one in made]
        progress(0, 1 + len(files), "the reference")
        is_exact = model.folder is not None and has_transformers()
        usual = []  # what llama.cpp itself loses
        if model.folder is not None and is_exact:
            reference = reference_of(model.folder, self.request.threads)
            if weights is not None:
                files.insert(0, (f"gguf_{weights.quant}", "gguf", weights.quant, weights.path))
        elif weights is not None and has_engine("llamacpp"):
            with open_engine("gguf", weights.path, context, self.request.threads) as engine:
                reference = engine_reference(engine, "llama.cpp on the same weights")
            usual = [weights.quant]
        else:
            # Optimum's graph has no GGUF
            lacking, extra = ("transformers", "export") if weights is None else ("llama.cpp", "llamacpp")
            self.reporter.note(f"{role}: not compared, which needs {lacking}: {install_command(extra)}")
            return "nothing", {}
        figures = {}
        for done, (key, wanted, quant, path) in enumerate(files, 1):
            progress(done, 1 + len(files), f"{wanted} {quant}")
            try:
                with open_engine(wanted, path, context, self.request.threads) as engine:
                    found = compare(reference, engine)
                excess = found.complaint(limits_of(quant, *usual))
                wrong = excess if is_exact and quant in CONVERTED else found.complaint(ABSURD)
            except _WRONG as error:
                wrong = str(error)
            if wrong:
                raise ExportRefused(
                    f"the export of {role} {wanted} {quant} is wrong and was removed: compared with "
                    f"{reference.version}, {wrong}. Try another --quant or --exporter, and please report this with the "
                    "model's name"
                )
            if excess:
                self.reporter.note(f"{role}: {wanted} {quant} loses more of this model than of most: {excess}")
            figures[key] = found.figures()
        return reference.version, figures

    # the manifest

    def _describe(self, made: list[Made], figures: dict[str, Any]) -> dict[str, int]:
        """Write the manifest and check that it can be read; returns sizes in bytes by file."""
        request, target, folder = self.request, self.models["target"], self.folder
        kinds = ", ".join(f"{wanted} {request.quants[wanted]}" for wanted in request.formats)
        name = target.name
        if request.is_gguf:
            kinds += ", made of GGUF"
            name = f"{name}-{request.quants['onnx']}"  # those of one file differ so
        draft = f"; draft: {Path(request.draft).name}" if request.draft else ""
        draft += f"; heads: {request.heads.name}" if request.heads else ""
        size = f"{target.num_parameters / 1e6:.1f} M parameters"
        about = f"{target.name} ({target.architecture}, {size}) as {kinds}{draft}; by {request.made_by}"
        paths = {role: model.weights.path for role, model in self.models.items() if model.weights is not None}
        made_of = {role: {"file": path.name, "bytes": path.stat().st_size} for role, path in paths.items()}
        values = {
            **target.said,
            "name": request.name or name,
            "description": about,
            "licence": request.licence or target.said["licence"],
            "figures": {"check": figures} | ({"made_of": made_of} if made_of else {}),
        }
        write_manifest(folder, values, ((one.role, checksummed(one.files)) for one in made))
        for wanted in request.formats:
            read_pair(folder, ENGINES[wanted])
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
