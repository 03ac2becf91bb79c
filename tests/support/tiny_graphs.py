"""Graphs written of tiny random GGUF files of every architecture, and how far their logits lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo import TEST_THREADS
from edgespec.engines.base import Engine
from edgespec.export.check import open_engine
from edgespec.export.gguf.convert import convert, own_precision, quantise
from edgespec.export.onnx.writer import convert_gguf, open_gguf
from edgespec.export.request import STRAIGHT_GGUF
from edgespec.types import Batch, Logits
from edgespec.vocabulary import Vocabulary
from tiny_architectures import CASES as ARCHITECTURES
from tiny_architectures import write
from tiny_checkpoints import TOKEN_IDS, write_checkpoint

CASES = ("llama", "smollm2", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3")
IDS = np.array(TOKEN_IDS, np.int32)
Floats = NDArray[np.float32]


def tiny_files(folder: Path) -> Callable[[str], Path]:
    """Files by case, each made once, in `folder`."""
    made = dict[str, Path]()

    def make(case: str) -> Path:
        if case not in made:
            made[case] = folder / f"{case}.gguf"
            if case in ARCHITECTURES:
                write(made[case], ARCHITECTURES[case])
            else:
                convert(write_checkpoint(folder / case, case), made[case], "f32")
        return made[case]

    return make


def export_gguf(folder: Path, output: Path, quant: str, threads: int | None = None) -> None:
    """A checkpoint as a GGUF of any type, as an export makes it."""
    if quant in STRAIGHT_GGUF:
        convert(folder, output, quant)
        return
    between = output.with_suffix(".between")
    convert(folder, between, own_precision(folder))
    quantise(between, output, quant, threads=threads)
    between.unlink()


def graph(source: Path, folder: Path, quant: str = "fp32") -> Path:
    """Of a GGUF or a checkpoint."""
    folder.mkdir(parents=True)
    if source.is_dir():
        between = folder.with_name(f"{folder.name}.gguf")
        source = convert(source, between, own_precision(source))
    return convert_gguf(open_gguf(source), folder, quant)


def logits(path: Path, ids: Sequence[int] | NDArray[np.int32] = IDS) -> Floats:
    with open_engine("gguf" if path.suffix == ".gguf" else "onnx", path, 128, TEST_THREADS) as engine:
        return engine.forward(Batch.chain(ids)).copy()


def scored(engine: Engine, ids: Sequence[int], step: int) -> Logits:
    """Logits of all tokens [n, vocabulary] in passes of `step` rows."""
    engine.rollback(0)
    return np.concatenate([engine.forward(Batch.chain(ids[at : at + step])).copy() for at in range(0, len(ids), step)])


def assert_same_vocabulary(ours: Vocabulary, theirs: Vocabulary, texts: Sequence[str]) -> None:
    for text in texts:
        for special in (False, True):
            assert ours.encode(text, parse_special=special) == theirs.encode(text, parse_special=special), text
    assert ours.pieces == theirs.pieces and ours.end_ids == theirs.end_ids
    assert (ours.bos_id, ours.eos_id, ours.adds_bos) == (theirs.bos_id, theirs.eos_id, theirs.adds_bos)


def difference(found: Floats, wanted: Floats) -> float:
    return float(np.abs(found - wanted).max() / wanted.std())


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def mean_kl(found: Floats, wanted: Floats) -> float:
    p, q = log_softmax(wanted), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())
