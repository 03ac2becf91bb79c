"""Checks every exported file against its source model, and rejects files that differ.

Coarse quantisations would hide small conversion errors, so for these a temporary 16-bit GGUF of the same conversion is
checked as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EngineError, ModelFileError
from edgespec.export.accuracy import ExportRefused, compare, limits_of, open_engine
from edgespec.export.conversion_check import FLOAT, Checked, Figures, Made, check_conversion
from edgespec.export.maker import Maker, Model
from edgespec.export.plan import STRAIGHT_GGUF
from edgespec.export.reference import Reference, has_transformers, reference_of
from edgespec.export.request import ExportRequest
from edgespec.export.stages import Artefact, Reporter
from edgespec.export.workspace import Workspace
from edgespec.installation import has_engine
from edgespec.types import Progress
from edgespec.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from edgespec.export.gguf.convert import OutputType
    from edgespec.export.onnx.hub_model import HubModel

CHECK_CONTEXT = 320
EXACT_GGUF = "bf16"  # holds the range of any checkpoint
OWN_TYPES: dict[str, OutputType] = {"BF16": "bf16", "F16": "f16"}


def check_stages(
    request: ExportRequest,
    models: Mapping[str, Model],
    artefacts: list[Artefact],
    workspace: Workspace,
    reporter: Reporter,
) -> dict[str, Any]:
    """Check all files; returns figures for the manifest. Raises ExportRefused after deleting the failed file."""
    maker = Maker(request, models, workspace)
    figures: dict[str, Any] = {"performed": request.check, "tokenisation": _check_vocabularies(maker, artefacts)}
    if not request.check:
        return figures
    for role in ("target", "draft"):
        mine = [artefact for artefact in artefacts if artefact.role == role]
        if mine:
            with reporter.stage(f"checking {role}") as progress:
                found = _check_role(maker, role, mine, progress)
            figures["reference"], figures[role] = found.reference, found.figures
            if found.warning:
                reporter.note(f"{role}: {found.warning}")
    return figures


def _check_role(maker: Maker, role: str, artefacts: list[Artefact], progress: Progress) -> Checked:
    model, threads = maker.model_of(role), maker.request.threads
    written = [one for one in artefacts if one.format == "onnx" and maker.is_written_here(role)]
    if written == artefacts and not has_transformers():
        return _check_written(maker, written[0], None, progress)
    progress(0, 1 + len(artefacts), "transformers")
    reference = reference_of(model.source.folder, threads)
    figures = _compared(maker, [one for one in artefacts if one not in written], reference, progress)
    version, warning = f"{reference.version}, float32", ""
    if written:
        found = _check_written(maker, written[0], reference, progress)
        figures, warning = {**figures, **found.figures}, found.warning
    return Checked(version, figures, warning)


def _compared(maker: Maker, artefacts: list[Artefact], reference: Reference, progress: Progress) -> Figures:
    """Figures by format of the files that other programs than edgespec's ONNX writer have made."""
    files = [(one, one.quant, maker.workspace.pair / one.path) for one in artefacts]
    rounded = [one for one in artefacts if one.format == "gguf" and one.quant not in STRAIGHT_GGUF]
    total = 1 + len(files) + len(rounded)
    for one in rounded:
        progress(1, total, f"{one.role} gguf {EXACT_GGUF}")
        files.append((one, EXACT_GGUF, _exact_file(maker, one.role)))
    figures: Figures = {}
    for done, (artefact, quant, path) in enumerate(files, 1 + len(rounded)):
        progress(done, total, f"{artefact.role} {artefact.format} {quant}")
        context_length = min(CHECK_CONTEXT, maker.model_of(artefact.role).facts.context_length or CHECK_CONTEXT)
        try:
            with open_engine(artefact.format, path, context_length, maker.request.threads) as engine:
                found = compare(reference, engine)
            complaint = found.complaint(limits_of(quant))
        except (ExportRefused, ModelFileError, EngineError) as error:  # a wrong model, or not a model
            complaint = str(error)
        if complaint:
            what = "" if quant == artefact.quant else f"before quantisation, as {quant}, "
            raise _refused(maker.workspace, artefact, what + complaint)
        name = artefact.format if quant == artefact.quant else f"{artefact.format}_{quant}"
        figures[name] = found.figures()
    return figures


def _check_written(maker: Maker, artefact: Artefact, reference: Reference | None, progress: Progress) -> Checked:
    """Compare a graph of edgespec's own writer with transformers, with llama.cpp, or with itself in float32."""
    from edgespec.export.onnx.from_hub import convert_hub
    from edgespec.export.onnx.hub_model import open_hub

    model = open_hub(maker.model_of(artefact.role).source.folder)
    temporary, threads = maker.workspace.temporary, maker.request.threads
    path = None if reference is not None else _gguf_of(model, temporary / "reference.gguf")
    graph, vocabulary = maker.workspace.pair / artefact.path, maker.request.vocabulary_of(artefact.role)
    made = Made(
        graph,
        artefact.quant,
        vocabulary.applied(model.config, graph.parent) if vocabulary else model.config,
        model.num_parameters,
        lambda folder: convert_hub(model, folder, FLOAT, vocabulary=vocabulary),
        path,
        reference,
    )
    try:
        return check_conversion(made, temporary, threads, progress)
    except (ExportRefused, ModelFileError, EngineError):  # a wrong model, or not a model
        maker.workspace.forget(artefact.stage)
        raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _gguf_of(model: HubModel, path: Path) -> Path | None:
    """The weights of a folder for llama.cpp, in their own type; None where that is missing or cannot read such a model.

    Only the weights are compared, so that a tokenizer that llama.cpp lacks is no fault.
    """
    if not has_engine("llamacpp") or find_spec("gguf") is None:
        return None
    from edgespec.export.gguf.convert import convert
    from edgespec.formats.onnx.forms import EMBEDDING

    stored = model.checkpoint.tensors[model.tensors[EMBEDDING][0]].dtype
    try:
        return convert(model.checkpoint, path, OWN_TYPES.get(stored, "f32")).path
    except ModelFileError:
        return None


def _exact_file(maker: Maker, role: str) -> Path:
    """A 16-bit file of the same conversion, for errors that a coarser quantisation would hide."""
    from edgespec.export.gguf import export_gguf

    path = maker.workspace.temporary / f"{role}-{EXACT_GGUF}.gguf"
    export_gguf(maker.model_of(role).source.folder, path, EXACT_GGUF)
    return path


def _check_vocabularies(maker: Maker, artefacts: list[Artefact]) -> str:
    """Check the tokenizer of every GGUF, and target against draft; returns 'equal' or 'not compared'."""
    ggufs = {artefact.role: artefact for artefact in artefacts if artefact.format == "gguf"}
    if not ggufs:
        return "equal"  # an ONNX model has the checkpoint's tokenizer
    from edgespec.engines.llamacpp.tokenizer import VocabularyFile
    from edgespec.export.gguf import check_tokenizer

    can_compare = find_spec("tokenizers") is not None
    for artefact in ggufs.values():
        if can_compare:
            try:
                check_tokenizer(maker.models["target"].source.folder, maker.workspace.pair / artefact.path)
            except ModelFileError as error:
                raise _refused(maker.workspace, artefact, str(error)) from error
    if "draft" in ggufs:
        target, draft = (maker.workspace.pair / ggufs[role].path for role in ("target", "draft"))
        with VocabularyFile(target) as ours, VocabularyFile(draft) as theirs:
            check_same_vocabulary(ours, theirs)
    return "equal" if can_compare else "not compared"


def _refused(workspace: Workspace, artefact: Artefact, complaint: str) -> ExportRefused:
    workspace.forget(artefact.stage)
    return ExportRefused(
        f"the export of {artefact.label} is wrong and was removed: {complaint}. Try another --quant or --exporter, and "
        "please report this with the model's name"
    )
