"""A model of table engines whose passes cost what a test says, so that a benchmark of it runs in a second."""

from __future__ import annotations

import time
from pathlib import Path

from edgespec.config.options import LoadOptions
from edgespec.drafters.model import ModelDrafter
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.runtime import Model
from edgespec.types import Batch, Logits
from table_engine import TableEngine


class Waiting(TableEngine):
    """A table whose every pass takes `pass_s` seconds, whatever its width: where speculation gains."""

    pass_s = 0.0

    def forward(self, batch: Batch) -> Logits:
        time.sleep(self.pass_s)
        return super().forward(batch)


def table_model(folder: Path, pass_s: float = 0.0, **options: object) -> Model:
    """A model of a `Waiting` table with a draft that resembles it; `folder` holds the file that names it."""
    path = folder / "table.gguf"
    path.write_text(str(pass_s))
    target = Waiting.random(12, context_length=256, max_batch=64, spread=4.0, end_id=None)
    draft = TableEngine.random(12, context_length=256, max_batch=64, spread=4.0).related(sigma=0.5)
    target.pass_s = pass_s
    pair = ModelPair("table", {"target": ModelFile(path), "draft": ModelFile(path)})
    return Model(LoadOptions(**options), pair, target, {"model": ModelDrafter(draft)})  # type: ignore[arg-type]
