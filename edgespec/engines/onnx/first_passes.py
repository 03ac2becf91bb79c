"""What the first passes of a loaded graph show: damaged weights, and whether it takes several texts at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.engines.base import Engine
from edgespec.engines.rows import fault_of
from edgespec.errors import EngineError, ModelFileError
from edgespec.types import Batch, packed

_ROUNDING = 0.1  # of the deviation of the logits: how far those of the same row may be off in another pass


def check_logits(engine: Engine, path: Path) -> None:
    """Raises ModelFileError where the weights are damaged, and closes the engine; else leaves it empty."""
    count = min(2, engine.facts.max_batch, engine.vocabulary.size)
    if fault := fault_of(engine.forward(Batch.chain(list(range(count))))):
        engine.close()
        raise ModelFileError(f"{path} is not a usable model: {fault}. Download or export it again")
    engine.rollback(0)


def batches_work(engine: Engine) -> bool:
    """Whether rows of two sequences in a batch have about the logits that they have alone; leaves both empty.

    A graph of another exporter may have been made for a batch of one.
    """
    if engine.facts.context_length < 2:
        return False
    rows = [Batch.chain([sequence], sequence=sequence) for sequence in (0, 1)]
    try:
        for row in rows:
            engine.forward(row)
        together = engine.forward(packed(rows)).copy()
        for sequence in (0, 1):
            engine.rollback(1, sequence)
        alone = np.concatenate([engine.forward(row).copy() for row in rows])
    except EngineError:
        return False
    finally:
        for sequence in (0, 1):
            engine.rollback(0, sequence)
    return bool(np.abs(together - alone).max() < _ROUNDING * alone.std())
