"""The demo pair at the cost of a bigger model, in a folder of its own: target, draft, heads and manifest.

All of it is made from the demo's ONNX files, which every installation has. The draft is the demo's own: a small model
beside a big one, as users have them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edgespec.bench.expanded_heads import expand_heads
from edgespec.bench.expansion import LLAMA_1B, Expansion, Shape
from edgespec.errors import CapabilityError, ModelFileError, StateError
from edgespec.export.manifest import write_manifest
from edgespec.export.workspace import opened
from edgespec.formats.manifest import HEADS, ModelFile, ModelPair, read_pair, sha256_of
from edgespec.formats.onnx import MODEL
from edgespec.formats.onnx.llama_reader import LlamaGraph
from edgespec.platform.machine import products_saturate
from edgespec.types import Progress, no_progress

Engine = Literal["onnx", "llamacpp"]

FORMAT = 1  # a change of what is written makes older pairs stale
WEIGHT_TYPES: dict[Engine, str] = {"onnx": "w8a8", "llamacpp": "q8_0"}
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of disk, bytes of memory at one time, and seconds on a quiet machine; estimates on the safe side."""

    disk_bytes: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True)
class ExpandedPair:
    """The pair of `source`, a folder like models/demo, for `engine` in `folder`, built or not."""

    source: Path
    engine: Engine
    folder: Path
    shape: Shape = LLAMA_1B

    def is_built(self) -> bool:
        """Whether it is there, made of what `source` holds today. Raises as `build` for the source."""
        try:
            figures = read_pair(self.folder, check_hashes=False).figures
        except ModelFileError:
            return False
        expansion = figures.get("expansion")
        return isinstance(expansion, dict) and expansion.get("made_from") == self._key()

    def needs(self) -> Needs:
        weights, table = self.shape.parameters(tied=False), self.shape.vocab_size * self.shape.hidden_size
        if self.engine == "onnx":
            return Needs(int(weights * 1.02) + 16 * 2**20, int(weights * 2.3) + 300 * 2**20, 15 * weights / 1e9)
        stored = int((weights - table) * 34 / 32)
        return Needs(stored + 16 * 2**20, max(stored, table * 6) + 300 * 2**20, 40 * weights / 1e9)

    def build(self, progress: Progress = no_progress) -> Path:
        """Write the folder; it appears when it is whole, in the place of an older one.

        Raises ModelFileError for a source without what is needed, CapabilityError for a missing package and for a disk
        that is full or cannot be written, UsageError while another process builds it.
        """
        demo = read_pair(self.source, "onnx")  # every file against its checksum
        try:
            with opened(self.folder, replace=True) as work:
                work.begin(self._identity())
                try:
                    self._write(work.pair, demo, progress)
                except BaseException:
                    work.discard()
                    raise
                work.publish()
        except (OSError, StateError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise CapabilityError(
                f"the expanded pair cannot be written to {self.folder}: {reason}. Make room there, or set "
                "EDGESPEC_HOME to a folder on another disk"
            ) from exc
        return self.folder

    def _identity(self) -> dict[str, Any]:
        """What the files depend on."""
        demo = read_pair(self.source, "onnx", check_hashes=False)
        files = (*demo.files["target"].all_files, *self._draft().all_files, *demo.heads.values())
        return {
            "format": FORMAT,
            "engine": self.engine,
            "shape": asdict(self.shape),
            "files": [f.sha256 for f in files],
        }

    def _key(self) -> str:
        return hashlib.sha256(json.dumps(self._identity()).encode()).hexdigest()

    def _draft(self) -> ModelFile:
        files = read_pair(self.source, self.engine, check_hashes=False).files
        if "draft" not in files:
            raise ModelFileError(f"{self.source} has no draft for {self.engine}: give a whole pair")
        return files["draft"]

    def _write(self, folder: Path, demo: ModelPair, progress: Progress) -> None:
        expansion = Expansion(LlamaGraph(demo.target.parent), self.shape)
        models = {"target": self._target(folder, expansion, progress), "draft": self._copied_draft(folder)}
        heads = {kind: folder / HEADS / f"{kind}.npz" for kind in demo.heads}
        (folder / HEADS).mkdir(exist_ok=True)
        for kind, path in heads.items():
            expand_heads(demo.heads[kind].path, expansion, path)
        write_manifest(folder, self._manifest(folder, demo, models, heads))

    def _target(self, folder: Path, expansion: Expansion, progress: Progress) -> Path:
        """Write the target; the file that opens it."""
        if self.engine == "onnx":
            return _write_graph(folder / "target", expansion, progress)
        from edgespec.bench.expanded_weights import ExpandedCheckpoint
        from edgespec.export.gguf import convert

        path = folder / "target.gguf"
        checkpoint, on_progress = ExpandedCheckpoint.of(expansion), partial(_report, progress)
        convert(checkpoint, path, "q8_0", name=self.folder.name, progress=on_progress)
        return path

    def _copied_draft(self, folder: Path) -> Path:
        draft = self._draft()
        if self.engine == "llamacpp":
            return Path(shutil.copyfile(draft.path, folder / "draft.gguf"))
        (folder / "draft").mkdir(exist_ok=True)
        for file in draft.all_files:
            shutil.copyfile(file.path, folder / "draft" / file.path.name)
        return folder / "draft" / draft.path.name

    def _manifest(
        self, folder: Path, demo: ModelPair, models: dict[str, Path], heads: dict[str, Path]
    ) -> dict[str, Any]:
        entries = {role: _entry(folder, path) for role, path in models.items()}
        entries["target"]["parameters"] = self.shape.parameters()
        return {
            "name": self.folder.name,
            "description": f"What {demo.name} says, at the cost of {self.shape.parameters() / 1e9:.2g} billion weights",
            "licence": demo.licence,
            "context_length": demo.context_length,
            "onnx" if self.engine == "onnx" else "files": entries,
            HEADS: {kind: _facts(folder, path) for kind, path in heads.items()},
            "sampling": dict(demo.recommended),
            "figures": {"expansion": {"made_from": self._key()}},
        }


def _write_graph(folder: Path, expansion: Expansion, progress: Progress) -> Path:
    """The expanded target as an ONNX export: graph, weights, configuration, tokenizer."""
    from edgespec.bench.expanded_weights import ExpandedWeights
    from edgespec.formats.onnx.forms import WholeNumbers
    from edgespec.formats.onnx.llama import write_llama
    from edgespec.formats.onnx.llama_config import LlamaConfig

    folder.mkdir(exist_ok=True)
    config = expansion.config()
    form = partial(WholeNumbers, ExpandedWeights(expansion), is_unsigned=products_saturate())
    write_llama(folder, LlamaConfig.from_hub(config), form, partial(_report, progress))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        shutil.copyfile(expansion.small.folder / name, folder / name)
    return folder / MODEL


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    """A model's table in the manifest: its file, and those beside it that belong to it."""
    parts = [other for other in sorted(path.parent.iterdir()) if path.parent != folder and other != path]
    return _facts(folder, path) | ({"parts": [_facts(folder, other) for other in parts]} if parts else {})


def _facts(folder: Path, path: Path) -> dict[str, Any]:
    return {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _report(progress: Progress, done: int, total: int, what: str = "") -> None:
    progress(done, total, "expanding the demo target")
