"""What a GGUF would gain in ONNX Runtime on this machine, measured before it is converted.

Some layers of the file's own weights, from its middle, and a part of its head become a graph, whose time grows to that
of the whole by the bytes of the weights. A child process does it (`python -m edgespec.export.conversion_gain ORDER`),
so that the memory it takes is given back. The file itself is timed before and after that: a load that comes or goes in
between would pass for a gain. Compared with whole conversions of a model of 135M and one of 1B on two x86 cores: int8
within 6%, w8a8 7 to 12% too fast, int4 10 to 18%.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.control import constants as c
from edgespec.control.measure import quick_costs
from edgespec.control.threads import Started
from edgespec.engines.base import Engine
from edgespec.engines.onnx.sessions import open_session
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.onnx.child import follow_parent, run_child
from edgespec.export.onnx.from_gguf import open_gguf
from edgespec.export.onnx.gguf_weights import GgufWeights
from edgespec.export.onnx.writer import write_graph
from edgespec.formats.gguf.model import GgufModel
from edgespec.formats.onnx import DATA
from edgespec.formats.onnx.forms import EMBEDDING, HEAD, Floats
from edgespec.formats.onnx.four_bits import STORED_TYPES, FourBits
from edgespec.formats.onnx.llama_config import LlamaConfig
from edgespec.loading.own_models import fits

ACCEPTED = 0.5  # of drafted tokens, in what is said of a gain
WIDTHS = (1, 2, 4, 6)
# Weights of layers and of the head, if there are as many: fewer would stay in a processor's cache from pass to pass.
WRITTEN, HEAD_WRITTEN = 128 << 20, 32 << 20
LARGEST_LAYER = 300 << 20  # weights; a layer of an 8B model has 218 million
QUANTS = ("int8", "w8a8", "int4")
_BYTES_OF_A_WEIGHT = 5  # of memory while all types are timed
_TABLE_BYTES = 1 + 4 / 64  # a weight of the head or of the embeddings
_TURNS, _MOST_S = 15, 1.0  # for each type
MOST_LACKING = c.CONTENDED  # cores that other programs took
MOST_APART = 1.2  # the file's own times before and after, where the machine did the same all the while
_BUSY = "other programs keep this machine busy: what a conversion would gain cannot be measured now"
_LAYER = re.compile(r"(?<=model\.layers\.)\d+")
Costs = Mapping[int, float]
OnStop = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds of a pass by width as the file is (`here`) and as ONNX weights of the type `quant` (`there`).

    `draft_share`: what drafting a token takes of a plain one. `bytes` and `seconds` of the conversion are estimates.
    """

    quant: str
    here: Costs
    there: Costs
    draft_share: float
    bytes: int
    seconds: float

    @property
    def plain(self) -> float:
        """How many times as fast a converted model decodes without drafts."""
        return self.here[1] / self.there[1]

    def drafted(self, acceptance: float = ACCEPTED) -> float:
        """The same where each drafted token is accepted with this probability, each at its best draft length."""
        return self._per_token(self.here, acceptance) / self._per_token(self.there, acceptance)

    def drafted_s(self, acceptance: float = ACCEPTED) -> float:
        """Seconds per token of the converted model then."""
        return self._per_token(self.there, acceptance)

    def _per_token(self, costs: Costs, acceptance: float) -> float:
        """Of a round of n drafted tokens (1 - a^(n+1)) / (1 - a) stay (Leviathan et al., arXiv:2211.17192, eq. 1)."""

        def of(width: int) -> float:
            kept = (1 - acceptance**width) / (1 - acceptance)
            return (costs[width] + (width - 1) * self.draft_share * costs[1]) / kept

        return min(map(of, costs))


def measure_gains(
    engine: Engine, draft: Engine | None, path: Path, threads: int, on_stop: OnStop = lambda stop: None
) -> list[Gain]:
    """The gains of the types that suit the file `path`, which `engine` holds; none if it cannot be converted.

    `draft` is its draft model's engine; a draft is converted, too, and taken to keep its share of the target's time.
    Both must be empty and are left empty. Takes seconds; a model with larger layers than `LARGEST_LAYER`, or a context
    too short for a pass, is not measured. `on_stop` takes functions that end it, from any thread, with an error.
    Raises CapabilityError where memory is short or the machine is busy, Cancelled, and as `run_child`.
    """
    try:
        model = open_gguf(path)
    except (ModelFileError, CapabilityError):
        return []
    if _layer_weights(model) > LARGEST_LAYER or engine.facts.context_length < c.PREFIX + max(WIDTHS):
        return []
    num_weights = max(WRITTEN, _layer_weights(model)) + HEAD_WRITTEN
    if fits(round(_BYTES_OF_A_WEIGHT * num_weights)) is False:
        raise CapabilityError("too little memory is free to measure what a conversion would gain")
    for each in (engine, draft):
        if each is not None:
            on_stop(each.cancel)
    before, share = _quiet_costs(engine, draft, threads)
    lines: list[str] = []
    order = {"source": str(path), "architecture": "some layers", "threads": threads}
    run_child("edgespec.export.conversion_gain", order, lines.append, lambda child: on_stop(child.kill))
    after, _ = _quiet_costs(engine, None, threads)
    here = {width: min(seconds, after[width]) for width, seconds in before.items()}  # a promise that is kept
    if any(max(before[width], after[width]) > MOST_APART * seconds for width, seconds in here.items()):
        raise CapabilityError(_BUSY)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        Gain(each["quant"], here, dict(zip(WIDTHS, each["there"], strict=True)), share, each["bytes"], each["seconds"])
        for each in found
    ]


def costs_of(engine: Engine, draft: Engine | None) -> tuple[Costs, float]:
    """Seconds of a pass of an empty engine by width, and the share of a plain one that drafting a token takes."""
    costs = quick_costs(engine, WIDTHS)
    return costs, 0.0 if draft is None else quick_costs(draft, (1,))[1] / costs[1]


def _quiet_costs(engine: Engine, draft: Engine | None, threads: int) -> tuple[Costs, float]:
    """`costs_of`; CapabilityError where other programs took processor time, or fewer threads run for their sake."""
    started = Started.now()
    found = costs_of(engine, draft)
    lacking_s = started.lacking_s(threads)
    if lacking_s is not None and lacking_s > MOST_LACKING * (perf_counter() - started.wall_s):
        raise CapabilityError(_BUSY)
    return found


def _print_estimates(path: Path, threads: int) -> None:
    """What `measure_gains` reads: a line of JSON for each type.

    All types take turns: where other programs or the processor's clock change its speed, they change that of all.
    """
    model = open_gguf(path)
    stores_four = any(tensor.kind in STORED_TYPES for tensor, _ in model.tensors.values())
    with ExitStack() as folders:
        written = [
            _write(model, quant, Path(folders.enter_context(TemporaryDirectory(prefix="edgespec-"))), threads)
            for quant in QUANTS
            if quant != "int4" or stores_four
        ]
        for each, seconds in zip(written, _times([each.session for each in written], written[0].config), strict=True):
            there = [each.scale * taken for taken in seconds]
            print(json.dumps({"quant": each.quant, "there": there, "bytes": each.bytes, "seconds": each.seconds}))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a model of some type, `scale` times as large as a whole; `bytes` and `seconds` of writing a whole."""

    quant: str
    config: LlamaConfig
    session: Any
    scale: float
    bytes: int
    seconds: float


def _write(model: GgufModel, quant: str, folder: Path, threads: int) -> _Part:
    """Some layers and a part of the head, written to `folder`; the whole is larger by the bytes of its weights."""
    config = model.config
    tables = 1 if model.is_tied and quant != "w8a8" else 2  # of the vocabulary
    number = min(math.ceil(WRITTEN / _layer_weights(model)), config.num_layers)
    first = (config.num_layers - number) // 2
    few = replace(
        config,
        num_layers=number,
        vocab_size=min(HEAD_WRITTEN // config.hidden_size, config.vocab_size),
        max_positions=min(config.max_positions, 2 * c.PREFIX + max(WIDTHS)),
        windowed_layers=_moved(config.windowed_layers, first, number),
        unrotated_layers=_moved(config.unrotated_layers, first, number),
    )
    started_s = perf_counter()
    written = _SomeLayers(GgufWeights(model), first, few.vocab_size)
    path = write_graph(folder, few, written, quant, smooths=False)
    written_s = perf_counter() - started_s
    session, _ = open_session(path.read_bytes(), folder, threads=threads, provider="cpu")
    part, whole = (_TABLE_BYTES * each.vocab_size * each.hidden_size for each in (few, config))
    layers = ((folder / DATA).stat().st_size - tables * part) * config.num_layers / number
    scale = (layers + whole) / (layers * number / config.num_layers + part)
    return _Part(quant, few, session, scale, round(layers + tables * whole), scale * written_s)


def _times(sessions: Sequence[Any], config: LlamaConfig) -> list[list[float]]:
    """Lower quartile of the seconds of a pass of each session and of each of WIDTHS."""
    past = np.zeros((1, config.num_kv_heads, c.PREFIX, config.head_dim), np.float32)
    cache = {f"past_key_values.{layer}.{kind}": past for layer in range(config.num_layers) for kind in ("key", "value")}
    feeds = {
        width: cache
        | {
            "input_ids": np.arange(width, dtype=np.int64)[None],
            "attention_mask": np.ones((1, c.PREFIX + width), np.int64),
        }
        for width in WIDTHS
    }
    taken: list[list[list[float]]] = [[[] for _ in WIDTHS] for _ in sessions]
    deadline_s = perf_counter() + _MOST_S * len(sessions)
    done = 0
    while done < 3 or (done < _TURNS and perf_counter() < deadline_s):
        for session, times in zip(sessions, taken, strict=True):
            for width, seconds in zip(WIDTHS, times, strict=True):
                started_s = perf_counter()
                session.run(["logits"], feeds[width])
                seconds.append(perf_counter() - started_s)
        done += 1
    return [[sorted(seconds)[done // 4] for seconds in times] for times in taken]


class _SomeLayers:
    """`RowWeights` and `StoredBlocks`: the layers from `first` on as if they were the first, and few tokens."""

    def __init__(self, weights: GgufWeights, first: int, tokens: int) -> None:
        self._weights, self._first, self._tokens, self.is_tied = weights, first, tokens, weights.is_tied

    def vector(self, name: str) -> Floats:
        return self._weights.vector(self._own(name))

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self._weights.shape(self._own(name))
        return (self._tokens if name in (EMBEDDING, HEAD) else outputs), inputs

    def rows(self, name: str) -> Iterator[Floats]:
        left = self.shape(name)[0]
        for rows in self._weights.rows(self._own(name)):
            yield rows[:left]
            left -= len(rows[:left])
            if not left:
                return

    def blocks(self, name: str, size: int) -> Iterator[FourBits] | None:
        return self._weights.blocks(self._own(name), size)

    def keeps_more(self, name: str) -> bool:
        return self._weights.keeps_more(self._own(name))

    def _own(self, name: str) -> str:
        return _LAYER.sub(lambda found: str(int(found[0]) + self._first), name)


def _moved(layers: frozenset[int], first: int, number: int) -> frozenset[int]:
    return frozenset(layer - first for layer in layers if 0 <= layer - first < number)


def _layer_weights(model: GgufModel) -> float:
    tables = (1 if model.is_tied else 2) * model.config.vocab_size * model.config.hidden_size
    return (model.num_parameters - tables) / model.config.num_layers


if __name__ == "__main__":
    follow_parent()
    given = json.loads(sys.argv[1])
    _print_estimates(Path(given["source"]), int(given["threads"]))
