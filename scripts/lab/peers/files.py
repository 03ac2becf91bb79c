"""Where the models of one pair lie: the same weights as GGUF, as ONNX and as Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.formats.manifest import MANIFEST, read_pair


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
