"""The export of a GGUF: target and draft become ONNX graphs in a pair folder, without torch.

Stages, journal and workspace are those of any export, so that an interrupted one continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import CapabilityError, ConfigError, EdgespecError, EngineError, ModelFileError
from edgespec.export.accuracy import ExportRefused
from edgespec.export.conversion_check import FLOAT, Checked, Made, check_conversion, logits_bytes
from edgespec.export.given_heads import check_fit, check_given_heads, heads_stages
from edgespec.export.maker import exit_stage, groups_note
from edgespec.export.manifest import write_manifest
from edgespec.export.onnx.convert import FORMS
from edgespec.export.onnx.from_gguf import convert_gguf, open_gguf
from edgespec.export.onnx.gguf_weights import kept_in_more
from edgespec.export.onnx.writer import check_form
from edgespec.export.plan import BITS, PROGRAM_BYTES, SPARE, Needs
from edgespec.export.request import ExportRequest
from edgespec.export.resources import check_room, human
from edgespec.export.stages import Artefact, Reporter, Stage, run_stages
from edgespec.export.tokens import check_round_trip, check_same_names
from edgespec.export.workspace import Workspace, check_output, opened
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.hub_folder import eagle3_fix
from edgespec.formats.manifest import read_pair
from edgespec.formats.onnx.llama import rotary_bytes
from edgespec.installation import has_engine, install_command, require_engine
from edgespec.platform.files import atomic_folder
from edgespec.types import Progress

PACKAGES = ("gguf", "onnx", "tokenizers")
NEEDS_A_CHECKPOINT = "give the folder or hub id of the original model for that"
_TOKENIZER_BYTES = 130  # of its file, for each token: Gemma 3's takes 128, SmolLM2's 36
Models = Mapping[str, GgufModel]


def convert_pair(request: ExportRequest, reporter: Reporter) -> tuple[dict[str, int], dict[str, Any]]:
    """Make the pair folder that `request` describes of GGUF files; (size in bytes by file, figures of the check).

    Raises ConfigError for options that need the original model, ModelFileError for a file that cannot be converted,
    VocabularyMismatch for a draft of another family, CapabilityError (missing package, not enough disk or memory),
    ExportRefused (the graph does not compute what the file does).
    """
    _check_options(request)
    _require_packages(request)
    check_output(request.output, replace=request.force)
    with keeping_headers(), opened(request.output, replace=request.force) as workspace:
        models = _opened_models(request)
        if workspace.begin(_identity(request, models)):
            reporter.note(f"resuming an interrupted export: {len(workspace.finished_files)} files are finished")
        try:
            _check_room(request, models, workspace, reporter)
            if request.quants["onnx"] == "w8a8":
                reporter.note(groups_note(request))
            artefacts = run_stages(list(_stages(request, models, workspace)), workspace, reporter)
            figures = _check(request, models, workspace, reporter)
            files = _described(request, models, artefacts, figures, workspace)
        finally:
            workspace.tidy()
        workspace.publish()
    return files, figures


def _check_options(request: ExportRequest) -> None:
    """Raise ConfigError for what a GGUF cannot give, CapabilityError without the kernels for a type."""
    source = Path(request.source).name
    if request.formats != ("onnx",):
        raise ConfigError(f"{source} is a GGUF already: give --to onnx to convert it")
    if request.revision is not None:
        raise ConfigError(f"--revision is for hub ids, and {source} is a file: omit it")
    if request.exporter not in ("auto", "edgespec"):
        raise ConfigError(f"--exporter {request.exporter} does not read GGUF: omit it, or {NEEDS_A_CHECKPOINT}")
    if request.derivation is not None and request.derivation.kind != "early-exit":
        raise ConfigError(f"--derive {request.derivation} does not work on a GGUF: {NEEDS_A_CHECKPOINT}")
    if request.draft is not None and not request.draft.lower().endswith(".gguf"):
        fix = eagle3_fix(Path(request.draft))
        raise ConfigError(
            f"--draft {request.draft}: the draft of a GGUF must be a .gguf file, too, or trained heads (.npz)"
            if fix is None
            else fix
        )
    for role in ("target", "draft"):
        if (quant := request.quant_of(role, "onnx")) not in FORMS:
            raise ConfigError(f"--quant {quant} cannot be made of a GGUF; allowed: {', '.join(FORMS)}")
        check_form(quant)


def _require_packages(request: ExportRequest) -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise CapabilityError(f"converting a GGUF needs {', '.join(missing)}: {install_command('convert')}")
    if request.check:
        require_engine("onnx", "checking the conversion")


def _opened_models(request: ExportRequest) -> dict[str, GgufModel]:
    """The models by role. Raises all errors that their headers and the file of heads show."""
    paths = {"target": request.source} | ({"draft": request.draft} if request.draft else {})
    models = {role: open_gguf(Path(path).expanduser()) for role, path in paths.items()}
    sizes = models["target"].config
    if request.derivation is not None:
        request.derivation.check(sizes.num_layers)
    if request.heads is not None:
        check_given_heads(request.heads, sizes.num_layers, sizes.vocab_size)
    if "draft" in models:
        if (vocabulary := request.vocabulary_of("draft")) is not None:
            vocabulary.check(models["draft"].config.vocab_size)
        check_same_names(*([text.decode(errors="replace") for text in m.header.tokens] for m in models.values()))
    return models


def _identity(request: ExportRequest, models: Models) -> dict[str, Any]:
    """All settings that the files depend on."""
    facts = {role: (model.path.resolve(), model.path.stat()) for role, model in models.items()}
    return {
        **request.identity(),
        "models": {role: [str(path), found.st_size, found.st_mtime_ns] for role, (path, found) in facts.items()},
    }


def _check_room(request: ExportRequest, models: Models, workspace: Workspace, reporter: Reporter) -> None:
    sizes = {role: _output_bytes(model, request.quant_of(role, "onnx")) for role, model in models.items()}
    memory = [PROGRAM_BYTES + _largest_part(model) for model in models.values()]
    # w8a8 is smoothed by what a first graph shows, which runs.
    memory += [PROGRAM_BYTES + sizes[role] for role in models if request.quant_of(role, "onnx") == "w8a8"]
    if request.check:
        memory += [
            PROGRAM_BYTES + max(sizes[role], model.header.data_bytes) + logits_bytes(model.config.vocab_size)
            for role, model in models.items()
        ]
    heads = 0 if request.heads is None else request.heads.stat().st_size
    needs = Needs(sum(sizes.values()) + heads, 0, 0, max(memory))
    finished = sum(facts["bytes"] for facts in workspace.file_facts().values())
    check_room(needs, request.output, None, finished)
    target = models["target"]
    reporter.note(
        f"{target.path.name}: {target.kind.hub}, {target.num_parameters / 1e6:.1f} M parameters; the export needs "
        f"{human(needs.output_bytes)} of disk and {human(needs.memory_bytes)} of memory"
    )


def _output_bytes(model: GgufModel, quant: str) -> int:
    """Upper limit of a graph's files: a tied embedding may be stored twice, as 8 bits or as float32."""
    table = model.config.vocab_size * model.config.hidden_size * (4 if quant == "fp32" else 1.1)
    in_eight = sum(kept_in_more(model).values()) if quant == "int4" else 0
    bits = (model.num_parameters - in_eight) * BITS[quant] + in_eight * BITS["int8"]
    beside = _TOKENIZER_BYTES * model.config.vocab_size + rotary_bytes(model.config)
    return round((bits / 8 + table) * SPARE) + beside


def _largest_part(model: GgufModel) -> int:
    """Bytes of the largest matrix as it is written, and of the rows that are being quantised, or of rotary tables."""
    matrix = 5 * model.config.hidden_size * max(model.config.vocab_size, model.config.intermediate_size)
    return max(matrix, 2 * rotary_bytes(model.config))


def _stages(request: ExportRequest, models: Models, workspace: Workspace) -> Iterator[Stage]:
    for role, model in models.items():
        quant = request.quant_of(role, "onnx")
        yield Stage(f"onnx.{role}", f"{role} to ONNX {quant}", partial(_convert, request, workspace, role, model))
    if request.derivation is not None:
        yield exit_stage(request, workspace)
    yield from heads_stages(request, workspace)


def _convert(
    request: ExportRequest, workspace: Workspace, role: str, model: GgufModel, progress: Progress
) -> list[Artefact]:
    quant, folder = request.quant_of(role, "onnx"), workspace.pair / "onnx" / role
    folder.parent.mkdir(exist_ok=True)
    with atomic_folder(folder) as partial_folder:
        convert_gguf(
            model,
            partial_folder,
            quant,
            request.group_size,
            progress,
            grouped=request.groups,
            vocabulary=request.vocabulary_of(role),
        )
    graph = f"onnx/{role}/model.onnx"
    parts = tuple(sorted(name for f in folder.iterdir() if (name := f"onnx/{role}/{f.name}") != graph))
    return [Artefact(f"onnx.{role}", "onnx", role, quant, graph, parts, model.num_parameters)]


def _check(request: ExportRequest, models: Models, workspace: Workspace, reporter: Reporter) -> dict[str, Any]:
    """Figures for the manifest. Raises ExportRefused after deleting a graph that is wrong."""
    figures: dict[str, Any] = {"performed": request.check}
    for role, model in models.items():
        graph = workspace.pair / "onnx" / role / "model.onnx"
        try:
            figures["tokenisation"] = check_vocabulary(model, graph.parent)
            if request.check:
                with reporter.stage(f"checking {role}") as progress:
                    found = _checked(request, role, model, graph, workspace, progress)
                figures["reference"], figures[role] = found.reference, found.figures
                if found.warning:
                    reporter.note(f"{role}: {found.warning}")
        except (ExportRefused, ModelFileError, EngineError):  # a wrong model, or not a model
            workspace.forget(f"onnx.{role}")
            raise
    return figures


def _checked(
    request: ExportRequest, role: str, model: GgufModel, graph: Path, workspace: Workspace, progress: Progress
) -> Checked:
    vocabulary = request.vocabulary_of(role)
    made = Made(
        graph,
        request.quant_of(role, "onnx"),
        vocabulary.applied(model.config, graph.parent) if vocabulary else model.config,
        model.num_parameters,
        lambda folder: convert_gguf(model, folder, FLOAT, vocabulary=vocabulary),
        model.path if has_engine("llamacpp") else None,
    )
    return check_conversion(made, workspace.temporary, request.threads, progress)


def check_vocabulary(model: GgufModel, folder: Path) -> str:
    """Check the tokenizer beside a graph; 'equal' to llama.cpp's, or 'round trip' without it. Raises ModelFileError."""
    check_round_trip(folder)
    if not has_engine("llamacpp"):
        return "round trip"
    from edgespec.export.gguf.tokenizer_check import check_tokenizer

    check_tokenizer(folder, model.path)
    return "equal"


def _sampling_beside(path: Path) -> dict[str, float]:
    """What the manifest beside a GGUF recommends for it; empty without one."""
    try:
        pair = read_pair(path.parent, check_hashes=False)
    except EdgespecError:
        return {}
    return dict(pair.recommended) if any(file.path == path for file in pair.files.values()) else {}


def _described(
    request: ExportRequest, models: Models, artefacts: list[Artefact], figures: Mapping[str, Any], workspace: Workspace
) -> dict[str, int]:
    """Write the manifest and check that it can be read; returns sizes in bytes by file."""
    target, facts = models["target"], workspace.file_facts()
    source, quant = target.path.stem, request.quants["onnx"]
    name = request.name or f"{source}-{quant}"  # those of one file can be told apart
    size = f"{target.num_parameters / 1e6:.1f} M parameters"
    values: dict[str, Any] = {
        "name": name,
        "description": f"{source} ({target.kind.hub}, {size}) as onnx {quant}, made of GGUF; by {request.made_by}",
        "licence": request.licence or str(target.header.metadata.get("general.license", "")),
        "context_length": target.config.max_positions,
    }
    if sampling := _sampling_beside(target.path):
        values["sampling"] = sampling
    for artefact in artefacts:
        values.setdefault(artefact.table, {})[artefact.role] = artefact.manifest_entry(facts)
    made_of = {role: {"file": model.path.name, "bytes": model.path.stat().st_size} for role, model in models.items()}
    values["figures"] = {"check": dict(figures), "made_of": made_of}
    write_manifest(workspace.pair, values)
    read_pair(workspace.pair, "onnx")
    check_fit(request, workspace.pair, "onnx")
    return {name: facts[name]["bytes"] for name in sorted(facts)}
