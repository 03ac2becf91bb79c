"""Heads in GGUF and their targets on either engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo import TEST_THREADS
from edgespec.config.values import EngineName
from edgespec.engines.head import DraftHead
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.model_use import BYTES_PER_FEATURE, WINDOW, ModelUse
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.footprint import SESSION_BYTES, footprint
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.engines.onnx.kernel_head import KernelHead, load_drafter
from edgespec.types import Batch, TokenIds


def opened(
    name: EngineName, path: Path, layers: Sequence[int], context_length: int = 128
) -> LlamaCppEngine | KernelEngine:
    """A target that gives the inputs of these layers."""
    if name == "llamacpp":
        return LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=context_length, reproducible=False)
    given = tuple(sorted(layers))
    use = ModelUse(context_length, threads=TEST_THREADS, max_sequences=2, hidden_states=True, state_layers=given)
    found = OnnxEngine.load(path, use)
    assert isinstance(found, KernelEngine)
    return found


def head_of(target: LlamaCppEngine | KernelEngine, path: Path, context_length: int | None = None) -> DraftHead:
    if isinstance(target, LlamaCppEngine):
        return target.load_head(path, context_length=context_length)
    return load_drafter(target, path, context_length)


def features_of(target: LlamaCppEngine | KernelEngine, layers: tuple[int, ...], tokens: TokenIds) -> np.ndarray:
    """What a target gives for `tokens`, behind an empty cache that is left empty."""
    if isinstance(target, LlamaCppEngine):
        target.read_layers_alone(layers)
    target.give_hidden_states(True)
    target.forward(Batch.chain(tokens, last_only=True))
    found = target.hidden_states().copy()
    target.rollback(0)
    target.give_hidden_states(False)
    return found


def assert_plan_is_what_it_takes(target: Path, layers: Sequence[int], path: Path) -> None:
    """Weights and cache of a head on the kernels, with rotary tables and vectors, are planned within 3%."""
    need = footprint(path, ModelUse(60, is_draft=True, max_sequences=2))
    with opened("onnx", target, layers) as engine:
        assert isinstance(engine, KernelEngine)
        with head_of(engine, path, 60) as head:
            assert isinstance(head, KernelHead) and head._encoder is not None
            sessions = [head._engine._bindings.session, head._encoder, getattr(head, "_chain", None)]
            whole = list(engine._bindings.session.edgespec_weights.values())
            arrays = {each.ctypes.data: each for session in sessions if session for each in _weights_of(session)}
            held = sum(each.nbytes for each in arrays.values() if not any(np.shares_memory(each, a) for a in whole))
            assert abs(need.packed - SESSION_BYTES - held) < 0.03 * held + 4000  # small vectors lie in the graph
            assert need.cache == head._engine._cache._chunks.nbytes
            kept = 2 * BYTES_PER_FEATURE * WINDOW * head.facts.feature_width
            assert need.compute > kept + 4 * 512 * head.facts.feature_width


def _weights_of(session: Any) -> list[NDArray[Any]]:
    return list(session.edgespec_weights.values())
