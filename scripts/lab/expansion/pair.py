"""The benchmark pair on disk: an expanded target in several formats, each in a folder that runs, with its draft.

    OUTPUT/checkpoints/ROLE/    the expanded Hugging Face folders, removed at the end unless they are to be kept
    OUTPUT/FORMAT/              manifest.toml, target, draft and heads: what `edgespec generate` takes
    OUTPUT/built.json           what each finished file was made from; a file made from something else is made again

Drafts stay at 8 bits in every format: at 4 bits a model of a million weights loses more agreement than it saves time.
Heads keep their own width, as a draft that is not expanded keeps its size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.bench.expanded_heads import expand_heads
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.formats.manifest import HEADS, MANIFEST, ModelFile, ModelPair, read_pair, sha256_of
from edgespec.installation import install_command
from edgespec.platform.files import atomic_file, atomic_folder, write_atomically
from edgespec.types import no_progress
from expansion.checkpoint import NoisyExpansion, expand
from expansion.request import (
    DRAFT_FORMATS,
    DRAFT_ROLES,
    FORMATS,
    BenchRequest,
    Engine,
    Needs,
    check_needs,
    needs_of,
)

if TYPE_CHECKING:
    from edgespec.export.onnx.convert import Quant

Progress = Callable[[int, int, str], None]
SUFFIXES = {"llamacpp": ".gguf", "onnx": ""}
PROBE = "USER: Hi, can you find me a restaurant in San Jose that serves Italian food?\nASSISTANT:"


class Records:
    """What each finished file or folder was made from, kept beside them."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = output / "built.json"
        try:
            self._made: dict[str, str] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._made = {}

    def has(self, path: Path, key: str) -> bool:
        return path.exists() and self._made.get(self._name(path)) == key

    def find(self, key: str) -> Path | None:
        """Any file or folder that was made from `key`."""
        paths = (self._output / name for name, made_from in self._made.items() if made_from == key)
        return next((path for path in paths if path.exists()), None)

    def add(self, path: Path, key: str) -> None:
        self._made[self._name(path)] = key
        write_atomically(self._path, json.dumps(self._made, indent=1))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._output).as_posix()


class Builder:
    """Builds one request into `output` from the models of `source`, a folder like models/demo.

    Raises ModelFileError where that folder lacks what the request needs of it.
    """

    def __init__(self, request: BenchRequest, source: Path, output: Path, progress: Progress | None = None) -> None:
        self.request, self.source, self.output = request, source, output
        self._progress = progress
        self._records = Records(output)
        self._target = self._expansion(request.target or source / "hf" / "target", request.size, request.sigma)
        for engine in dict.fromkeys(request.engines):
            self._check_draft(engine)

    def needs(self) -> Needs | None:
        """What the formats that are not there yet take; None when all are."""
        key = self._target.fingerprint()
        names = self.request.formats
        missing = tuple(n for n in names if not self._records.has(self._path("target", n), f"{key} {_made_as(n)}"))
        return needs_of(replace(self.request, formats=missing)) if missing else None

    def build(self) -> list[Path]:
        """The pair folders, one per format. What an interrupted run finished is kept.

        Raises CapabilityError for a missing package, too little disk or memory, ModelFileError for a bad source.
        """
        if (needs := self.needs()) is not None:
            check_packages(self.request.engines)
            check_needs(needs, self.output)
        folders = [self._pair(name) for name in self.request.formats]
        if not self.request.keep_checkpoints:
            shutil.rmtree(self.output / "checkpoints", ignore_errors=True)
        return folders

    def _path(self, role: str, name: str) -> Path:
        return self.output / name / f"{role}{SUFFIXES[FORMATS[name][0]]}"

    def _expansion(self, folder: Path, size: str, sigma: float = 0.0) -> NoisyExpansion:
        from edgespec.formats.checkpoint import Checkpoint

        return NoisyExpansion(Checkpoint.open(folder), self.request.shape(size), self.request.seed, sigma)

    def _pair(self, name: str) -> Path:
        folder = self.output / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # it comes last, so that it never describes half a pair
        target, draft = self._path("target", name), self._path("draft", name)
        self._expand(self._target, target, name)
        self._make_draft(draft, FORMATS[name][0])
        models = {"target": target, "draft": draft}
        if self.request.target is None and not self.request.sigma:
            check_answers(target, read_pair(self.source, FORMATS[name][0]).target)
        self._write_manifest(folder, name, models, self._make_heads(folder))
        return folder

    def _make(self, result: Path, key: str, write: Callable[[], None]) -> None:
        """Have `result` as `key` says it is: keep it, copy one from another format's folder, or write it."""
        if self._records.has(result, key):
            return
        twin = self._records.find(key)
        if twin is not None:
            _copy([twin] if twin.is_file() else list(_files(twin)), result)
        else:
            write()
        self._records.add(result, key)

    def _expand(self, expansion: NoisyExpansion, result: Path, name: str) -> None:
        role = result.stem

        def write() -> None:
            checkpoint = expand(expansion, self.output / "checkpoints" / role, self._told(f"expanding the {role}"))
            self._export(checkpoint, result, name)

        self._make(result, f"{expansion.fingerprint()} {_made_as(name)}", write)

    def _export(self, checkpoint: Path, result: Path, name: str) -> None:
        told = self._told(f"{result.parent.name}/{result.name}")
        if FORMATS[name][0] == "llamacpp":
            from edgespec.export.gguf import export_gguf

            export_gguf(checkpoint, result, name, name=f"edgespec {self.request.name} {result.stem}", progress=told)
        else:
            from edgespec.export.onnx import export_onnx

            export_onnx(checkpoint, result, cast("Quant", name), progress=told or no_progress)

    def _make_draft(self, result: Path, engine: Engine) -> None:
        """The draft: expanded, or as it ships, or exported when it ships for the other engine only."""
        role, wanted = DRAFT_ROLES[self.request.draft], DRAFT_FORMATS[engine]
        checkpoint = self.source / "hf" / role
        if self.request.draft_size is not None:
            self._expand(self._expansion(checkpoint, self.request.draft_size), result, wanted)
            return
        shipped = self._shipped(role, engine)
        if shipped is not None:
            files = shipped.all_files
            key = " ".join(file.sha256 or sha256_of(file.path) for file in files)
            self._make(result, key, partial(_copy, [file.path for file in files], result))
            return
        key = f"{sha256_of(checkpoint / 'model.safetensors')} {wanted}"
        self._make(result, key, partial(self._export, checkpoint, result, wanted))

    def _check_draft(self, engine: Engine) -> None:
        """Raises ModelFileError where the draft can neither be expanded nor copied nor exported."""
        role, size = DRAFT_ROLES[self.request.draft], self.request.draft_size
        checkpoint = self.source / "hf" / role
        if size is not None and not checkpoint.is_dir():
            raise ModelFileError(
                f"--draft {self.request.draft} cannot be expanded: {self.source} has no checkpoint of it in hf/{role}. "
                "Leave --draft-size out, or give another --draft"
            )
        if size is not None:
            self._expansion(checkpoint, size)
        elif self._shipped(role, engine) is None and not checkpoint.is_dir():
            raise ModelFileError(f"{self.source} has the {role} neither for {engine} nor as a checkpoint in hf/{role}")

    def _make_heads(self, folder: Path) -> dict[str, Path]:
        """The heads that the source has for its own target, by kind, for the expanded one."""
        made: dict[str, Path] = {}
        if self.request.target is not None:
            return made
        for kind, file in read_pair(self.source, check_hashes=False).heads.items():
            made[kind] = folder / HEADS / f"{kind}.npz"
            key = f"{file.sha256} {self._target.fingerprint()}"
            made[kind].parent.mkdir(exist_ok=True)
            self._make(made[kind], key, partial(expand_heads, file.path, self._target, made[kind]))
        return made

    def _shipped(self, role: str, engine: Engine) -> ModelFile | None:
        """The file of a role for an engine in the pair that is expanded."""
        if engine not in read_pair(self.source, check_hashes=False).engines:
            return None
        found = read_pair(self.source, engine).files.get(role)
        return found if found is not None and found.engine == engine else None

    def _write_manifest(self, folder: Path, name: str, models: dict[str, Path], heads: dict[str, Path]) -> None:
        from edgespec.export.manifest import write_manifest

        request, demo = self.request, read_pair(self.source, check_hashes=False)
        table = "files" if FORMATS[name][0] == "llamacpp" else "onnx"
        entries = {role: entry_of(folder, path) for role, path in models.items()}
        entries["target"]["parameters"] = self._target.shape.parameters(tied=self._target.is_tied)
        values: dict[str, Any] = {
            "name": f"{request.name}-{name}",
            "description": _description(request, demo),
            "licence": demo.licence,
            "context_length": demo.context_length,
            table: entries,
            HEADS: {kind: _facts(folder, path) for kind, path in heads.items()},
            "sampling": dict(demo.recommended),
            "figures": {"expansion": {"size": request.size, "sigma": request.sigma, "seed": request.seed}},
        }
        write_manifest(folder, {key: value for key, value in values.items() if value})

    def _told(self, what: str) -> Progress | None:
        if self._progress is None:
            return None
        return partial(_prefixed, self._progress, what)


def _prefixed(progress: Progress, what: str, done: int, total: int, step: str) -> None:
    progress(done, total, f"{what}: {step}")


def _made_as(name: str) -> str:
    """A format and what it stands for today: a file made by other defaults is made again."""
    from edgespec.export.onnx.convert import DEFAULT_GROUP_SIZES

    return f"{name} {DEFAULT_GROUP_SIZES[name]}" if name in DEFAULT_GROUP_SIZES else name


def _description(request: BenchRequest, demo: ModelPair) -> str:
    cost = f"the cost of a {request.size} model with {request.shape(request.size).vocab_size} tokens"
    noise = f", its head with noise of {request.sigma:g} deviations" if request.sigma else ""
    draft = f"the {request.draft} draft" + (f" at the cost of {request.draft_size}" if request.draft_size else "")
    return f"For benchmarks: what {demo.name} says at {cost}{noise}, with {draft}"


def check_packages(engines: tuple[Engine, ...]) -> None:
    """Raise CapabilityError naming the extra when an export library is missing."""
    needed = {"llamacpp": ("gguf", "llama_cpp"), "onnx": ("gguf", "onnx", "onnxruntime")}
    for engine in engines:
        missing = [name for name in needed[engine] if find_spec(name) is None]
        if missing:
            raise CapabilityError(f"building for {engine} needs {', '.join(missing)}: {install_command('export')}")


def check_answers(target: Path, source: Path) -> None:
    """Raise ModelFileError where an expanded target does not say what `source` says: speeds of it would mean nothing.

    Repeated tokens of a broken model are what lookups guess best.
    """
    options = GenerateOptions(max_tokens=32, ignore_eos=True)
    opened = partial(edgespec.load, drafter="none", reproducible=False, context_length=256)
    with opened(source) as small:
        ids = small.encode(PROBE)
        written = small.generate(ids, Sampling(temperature=0.0), options)
    texts = [ids + list(written.token_ids[:place]) for place in range(0, 32, 4)]
    expected = list(written.token_ids[::4])
    one = replace(options, max_tokens=1)
    with opened(target) as big:
        found = [big.generate(text, Sampling(temperature=0.0), one).token_ids[0] for text in texts]
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    if same < len(texts) // 2:
        raise ModelFileError(
            f"{target} writes other tokens than {source} in {len(texts) - same} of {len(texts)} places: the expansion "
            "or the conversion is wrong, and nothing measured with it would count"
        )


def _copy(files: Sequence[Path], result: Path) -> None:
    """Copy one file to the file `result`, several into the folder `result`, which appears only when it is whole."""
    if result.suffix:
        with atomic_file(result) as temporary:
            shutil.copyfile(files[0], temporary)
    else:
        with atomic_folder(result) as folder:
            for file in files:
                shutil.copyfile(file, folder / file.name)


def entry_of(folder: Path, model: Path) -> dict[str, Any]:
    """A model's table in the manifest."""
    if model.is_file():
        return _facts(folder, model)
    graph = model / "model.onnx"
    return {**_facts(folder, graph), "parts": [_facts(folder, path) for path in _files(model) if path != graph]}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _facts(folder: Path, path: Path) -> dict[str, Any]:
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
