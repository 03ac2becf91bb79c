"""Checks every exported file against its source model, and rejects files that differ.

Coarse quantisations would hide small conversion errors, so for these a temporary 16-bit GGUF of the same conversion is
checked as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import EngineError, ModelFileError
from edgespec.export.accuracy import ExportRefused, compare, compare_head, limits_of, open_engine
from edgespec.export.plan import STRAIGHT_GGUF
from edgespec.export.reference import reference_of
from edgespec.export.request import ExportRequest
from edgespec.export.stages import Artefact, Maker, Model, Reporter
from edgespec.export.workspace import Workspace
from edgespec.types import Progress
from edgespec.vocabulary import check_same_vocabulary

CHECK_CONTEXT = 320
EXACT_GGUF = "bf16"  # holds the range of any checkpoint


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
            is_head = role == "draft" and maker.model_of(role).is_head
            with reporter.stage(f"checking {role} against {'numpy' if is_head else 'transformers'}") as progress:
                reference, figures[role] = _check_role(maker, role, mine, progress)
            figures["draft_reference" if is_head else "reference"] = reference
    return figures


def _check_role(
    maker: Maker, role: str, artefacts: list[Artefact], progress: Progress
) -> tuple[str, dict[str, dict[str, float]]]:
    """(name of the reference, figures by format) for the files of one role."""
    model, threads = maker.model_of(role), maker.request.threads
    if role == "draft" and model.is_head:
        return _check_head(maker, artefacts[0])
    files = [(one, one.quant, maker.workspace.pair / one.path) for one in artefacts]
    rounded = [one for one in artefacts if one.format == "gguf" and one.quant not in STRAIGHT_GGUF]
    total = 1 + len(files) + len(rounded)
    progress(0, total, "transformers")
    reference = reference_of(model.source.folder, threads)
    context_length = min(CHECK_CONTEXT, model.facts.context_length or CHECK_CONTEXT)
    for one in rounded:
        progress(1, total, f"{role} gguf {EXACT_GGUF}")
        files.append((one, EXACT_GGUF, _exact_file(maker, role)))
    figures: dict[str, dict[str, float]] = {}
    for done, (artefact, quant, path) in enumerate(files, 1 + len(rounded)):
        progress(done, total, f"{role} {artefact.format} {quant}")
        try:
            with open_engine(artefact.format, path, context_length, threads) as engine:
                found = compare(reference, engine)
            complaint = found.complaint(limits_of(quant))
        except (ExportRefused, ModelFileError, EngineError) as error:  # a wrong model, or not a model
            complaint = str(error)
        if complaint:
            what = "" if quant == artefact.quant else f"before quantisation, as {quant}, "
            raise _refused(maker.workspace, artefact, what + complaint)
        name = artefact.format if quant == artefact.quant else f"{artefact.format}_{quant}"
        figures[name] = {key: float(f"{value:.4g}") for key, value in dataclasses.asdict(found).items()}
    progress(total, total, "done")
    return f"{reference.version}, float32", figures


def _check_head(maker: Maker, artefact: Artefact) -> tuple[str, dict[str, dict[str, float]]]:
    """Compare an EAGLE-3 head with its numpy reference, both on the exported target."""
    from edgespec.export.eagle3_reference import NumpyHead
    from edgespec.export.gguf.eagle3 import plan_head

    request, target = maker.request, maker.models["target"].source.folder
    plan = plan_head(maker.model_of("draft").source.folder, target)
    target_quant = request.quant_of("target", "gguf")
    target_path = maker.workspace.pair / f"target-{target_quant}.gguf"
    try:
        with open_engine("gguf", target_path, CHECK_CONTEXT, request.threads) as engine:
            found = compare_head(NumpyHead.of(plan, target), engine, maker.workspace.pair / artefact.path)
        complaint = found.complaint(limits_of(target_quant if plan.shares_weights else artefact.quant))
    except (ModelFileError, EngineError) as error:
        complaint = str(error)
    if complaint:
        raise _refused(maker.workspace, artefact, complaint)
    return "numpy, float32", {"gguf": {key: float(f"{value:.4g}") for key, value in dataclasses.asdict(found).items()}}


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
