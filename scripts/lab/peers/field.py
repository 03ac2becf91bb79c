"""The field: who takes part, with which files, and what a sweep may choose for each.

A contestant is one way of decoding with one library. What is tuned for a library's plain decoding (threads, number
type) holds for its speculation too; the first value of an axis is the library's own default or the usual advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from edgespec.formats.manifest import MANIFEST, read_pair

Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Contestant:
    """`name` is unique; `process` is the child that runs it; `engine` is edgespec's engine that it is compared with.

    `plain` names the contestant whose text must come out again and whose speed is the base of its speedup.
    """

    name: str
    process: str
    variant: str
    engine: str
    plain: str
    axes: Axes = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.plain == self.name


@dataclass(frozen=True, slots=True)
class Library:
    """One child process of the field: the peer's name, its files, or why it cannot take part."""

    peer: str
    files: Mapping[str, str]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """Libraries by the name of their child process, and the contestants, edgespec first."""

    libraries: dict[str, Library]
    contestants: tuple[Contestant, ...]

    def only(self, peers: Sequence[str]) -> Field:
        """The peers that are named, and edgespec on the engines that they are compared with."""
        chosen = [c for c in self.contestants if self.libraries[c.process].peer in peers]
        engines = {c.engine for c in chosen}
        own = [c for c in self.contestants if self.libraries[c.process].peer == "edgespec" and c.engine in engines]
        kept = tuple(dict.fromkeys((*own, *chosen)))
        names = {contestant.process for contestant in kept}
        return Field({name: library for name, library in self.libraries.items() if name in names}, kept)


NO_CHECKPOINT = (
    "the pair has no Hugging Face checkpoints: build it with scripts/lab/make_bench_pair.py --keep-checkpoints"
)
WIDE = (4, 2, 3, 6, 8)


def make_field(
    pair: PairFiles,
    threads: Sequence[int],
    context_length: int,
    work: Path,
    llama_server: str | None,
    heads: Path | None = None,
) -> Field:
    """Everyone who could run on these files; a library whose files are lacking says so in `missing`.

    `heads`: of the target, with which edgespec on ONNX Runtime takes part once more, without the pair's draft model.
    """
    libraries: dict[str, Library] = {}
    contestants: list[Contestant] = []
    context = {"context_length": str(context_length)}
    for engine in ENGINES:
        folder = pair.folder(engine)
        if folder is not None:
            process = f"edgespec {engine}"
            files = {"folder": str(folder), "engine": engine, **context}
            contestants += _own(process, engine, threads)
            if heads is not None and engine == "onnx":
                files |= {"heads": str(heads), "target": str(pair.models(engine)["target"])}
                contestants.append(Contestant(f"{process} heads", process, "heads", engine, f"{process} plain"))
            libraries[process] = Library("edgespec", files)
    if pair.gguf is not None:
        gguf = {role: str(path) for role, path in pair.models("llamacpp").items()} | context
        server = {**gguf, "log": str(work / "llama-server"), **({"program": llama_server} if llama_server else {})}
        libraries["llama-cpp-python"] = Library("llama-cpp-python", gguf)
        libraries["llama-server"] = Library("llama-server", server)
        contestants += [*_llama_cpp_python(threads), *_llama_server(threads)]
    if pair.onnx is not None:
        onnx = {role: str(path) for role, path in pair.models("onnx").items()}
        libraries["onnxruntime-genai"] = Library("onnxruntime-genai", onnx)
        contestants += _genai(threads)
    checkpoints = {role: str(path) for role, path in pair.checkpoints.items()}
    why = "" if checkpoints else NO_CHECKPOINT
    libraries["openvino-genai"] = Library("openvino-genai", {**checkpoints, "exports": str(work / "openvino")}, why)
    libraries["transformers"] = Library("transformers", checkpoints, why)
    engine = "llamacpp" if pair.onnx is None else "onnx"
    contestants += [*_openvino(threads, engine), *_transformers(threads, engine)]
    can_draft = {process for process, library in libraries.items() if "draft" in library.files or library.missing}
    return Field(libraries, tuple(c for c in contestants if c.variant != "draft" or c.process in can_draft))


def _own(process: str, engine: str, threads: Sequence[int]) -> list[Contestant]:
    made = []
    for mode in ("", " reproducible"):
        plain = f"{process} plain{mode}"
        made.append(Contestant(plain, process, f"plain{mode}", engine, plain, {"threads": threads}))
        made.append(Contestant(f"{process} auto{mode}", process, f"auto{mode}", engine, plain))
    return made


def _variants(process: str, engine: str, plain: Axes, others: Mapping[str, Axes]) -> list[Contestant]:
    name = f"{process} plain"
    made = [Contestant(name, process, "plain", engine, name, plain)]
    return made + [Contestant(f"{process} {v}", process, v, engine, name, axes) for v, axes in others.items()]


def _llama_cpp_python(threads: Sequence[int]) -> list[Contestant]:
    plain = {"threads": threads, "flash_attention": (False, True)}
    return _variants(
        "llama-cpp-python", "llamacpp", plain, {"lookup": {"num_tokens": (10, 2, 4, 7), "max_ngram": (2, 3, 4)}}
    )


def _llama_server(threads: Sequence[int]) -> list[Contestant]:
    plain = {"threads": threads, "flash_attention": ("auto", "off")}
    draft = {"max_tokens": (3, 1, 2, 5, 7, 10, 16), "min_probability": (0.0, 0.4, 0.75, 0.9)}
    lookup = {"ngram": (12, 6, 3, 2), "max_tokens": (48, 16, 8, 4)}
    return _variants("llama-server", "llamacpp", plain, {"draft": draft, "lookup": lookup})


def _genai(threads: Sequence[int]) -> list[Contestant]:
    draft = {"max_draft_tokens": WIDE, "min_adaptive_k": (0, 2)}
    lookup = {"ngram_size": (3, 2, 4), "max_draft_tokens": WIDE, "chained": (False, True)}
    return _variants("onnxruntime-genai", "onnx", {"threads": threads}, {"draft": draft, "lookup": lookup})


def _openvino(threads: Sequence[int], engine: str) -> list[Contestant]:
    plain = {"threads": threads, "precision": ("default", "f32")}
    lookup = {"num_tokens": WIDE, "max_ngram": (3, 2)}
    return _variants("openvino-genai", engine, plain, {"draft": {"num_tokens": WIDE}, "lookup": lookup})


def _transformers(threads: Sequence[int], engine: str) -> list[Contestant]:
    plain = {"threads": threads, "dtype": ("bfloat16", "float32")}
    draft = {"num_tokens": (5, 3, 8, 12), "confidence_threshold": (0.4, 0.0)}
    return _variants("transformers", engine, plain, {"draft": draft, "lookup": {"num_tokens": (10, 3, 5)}})


# -- Where the models of one pair lie: the same weights as GGUF, as ONNX and as Hugging Face checkpoints.


@dataclass(frozen=True, slots=True)
class PairFiles:
    """Folders that edgespec loads by engine, and the checkpoint folder of each role; what is not there is None."""

    name: str
    gguf: Path | None
    onnx: Path | None
    checkpoints: dict[str, Path]

    def folder(self, engine: str) -> Path | None:
        return self.gguf if engine == "llamacpp" else self.onnx

    def models(self, engine: str) -> dict[str, Path]:
        """By role the GGUF file, or the folder with model.onnx. Raises ModelFileError for one that is not described."""
        folder = self.folder(engine)
        assert folder is not None
        files = {role: file.path for role, file in read_pair(folder, engine, check_hashes=False).files.items()}
        return {role: path if engine == "llamacpp" else path.parent for role, path in files.items() if role in ROLES}


def find_files(folder: Path, gguf: str, onnx: str, demo: Path, drafts: Path | None = None) -> PairFiles:
    """The files of a pair folder: one with a manifest of its own, or what make_bench_pair.py wrote.

    `gguf`, `onnx` name the formats to take from the latter; `drafts` is the draft's checkpoint where it does not lie
    in the folder, by default that of the pair in `demo`, which is what it was built from.
    Raises ConfigError when neither format is there.
    """
    if (folder / MANIFEST).is_file():
        engines = read_pair(folder, check_hashes=False).engines
        found: dict[str, Path | None] = {engine: folder if engine in engines else None for engine in ENGINES}
        roots = [folder / "hf"]
    else:
        formats = dict(zip(ENGINES, (gguf, onnx), strict=True))
        found = {e: folder / name if (folder / name / MANIFEST).is_file() else None for e, name in formats.items()}
        roots = [folder / "checkpoints"]
    if not any(found.values()):
        raise ConfigError(
            f"{folder} holds neither a pair ({MANIFEST}) nor the formats {gguf} or {onnx}: give a folder that "
            "scripts/lab/make_bench_pair.py wrote, or other --gguf and --onnx formats"
        )
    read = [read_pair(path, engine, check_hashes=False) for engine, path in found.items() if path is not None]
    if any("draft" in pair.files for pair in read):
        roots += [demo / "hf"]
    checkpoints = {}
    if (roots[0] / "target" / "config.json").is_file():
        places = {"target": [roots[0] / "target"], "draft": [root / "draft" for root in roots]}
        places["draft"][:0] = [] if drafts is None else [drafts]
        for role, folders in places.items():
            if found_there := [path for path in folders if (path / "config.json").is_file()]:
                checkpoints[role] = found_there[0]
    return PairFiles(folder.resolve().name, found["llamacpp"], found["onnx"], checkpoints)


ENGINES, ROLES = ("llamacpp", "onnx"), ("target", "draft")
