"""The pair that a race without a model takes: the demo, expanded once to a cost at which speculation can gain.

A pass of the 8M demo target takes about as long as a round's own bookkeeping. Expanded it says the same words at the
cost of a model a hundred times its size. On x86 processors int8 graphs gain most; building them takes the most memory,
so a smaller shape and a GGUF, which needs the package gguf alone, come after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from edgespec.bench.pair import Builder, Progress, check_packages
from edgespec.bench.request import FORMATS, BenchRequest, Needs
from edgespec.engines.disk_cache import cache_folder
from edgespec.errors import CapabilityError, ModelNotFound
from edgespec.export import resources as room
from edgespec.formats.manifest import MANIFEST
from edgespec.loading.registry import registered_folders

CANDIDATES = (("1b", "int8"), ("300m", "int8"), ("1b", "q8_0"))


@dataclass(frozen=True, slots=True)
class Offer:
    """One pair that can be built into `output`, or is: `needs` None. `missed`: why better ones cannot be."""

    request: BenchRequest
    source: Path
    output: Path
    needs: Needs | None
    missed: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        return self.request.formats[0]

    @property
    def folder(self) -> Path:
        """What `edgespec.load` takes once it is built."""
        return self.output / self.format

    @property
    def is_built(self) -> bool:
        """The manifest comes last, so what an interrupted build left is not taken for a pair."""
        return self.needs is None and (self.folder / MANIFEST).is_file()

    def build(self, progress: Progress | None = None) -> Path:
        """Build it, or finish what an interrupted build began. Raises as `Builder.build`."""
        (folder,) = Builder(self.request, self.source, self.output, progress).build()
        return folder


def find_offer(engine: str) -> Offer:
    """The best pair for `engine` ("auto": any) that is built already, else the best that this machine can build.

    Raises CapabilityError saying for each what it lacks.
    """
    source = registered_folders().get("demo")
    if source is None:
        raise ModelNotFound("the demo pair is not installed, so there is nothing to expand: give a MODEL")
    if not (source / "hf" / "target").is_dir():
        raise CapabilityError(
            f"the demo pair in {source} comes without the checkpoint that is expanded; a source checkout has it"
        )
    offers = [_offer(source, size, name) for size, name in CANDIDATES if engine in ("auto", FORMATS[name][0])]
    built = next((offer for offer in offers if offer.is_built and _can_run(offer)), None)
    if built is not None:
        return built
    missed: dict[str, str] = {}
    for offer in offers:
        lack = _lack(offer)
        if lack is None:
            return replace(offer, missed=tuple(f"{names}: {reason}" for reason, names in missed.items()))
        name = f"{offer.request.size} {offer.format}"
        missed[lack] = f"{missed[lack]}, {name}" if lack in missed else name
    raise CapabilityError(
        "the demo pair cannot be expanded here: " + "; ".join(f"{names}: {reason}" for reason, names in missed.items())
    )


def _offer(source: Path, size: str, name: str) -> Offer:
    request = BenchRequest(size, (name,))
    output = cache_folder() / "bench" / request.name
    return Offer(request, source, output, Builder(request, source, output).needs())


def _can_run(offer: Offer) -> bool:
    return FORMATS[offer.format][0] != "onnx" or find_spec("onnxruntime") is not None


def _lack(offer: Offer) -> str | None:
    """What this machine lacks to build and run it; None: nothing."""
    if not _can_run(offer):
        return "needs pip install 'edgespec[onnx]'"
    try:
        check_packages(offer.request.engines)
    except CapabilityError as exc:
        return str(exc)
    if offer.needs is None:
        return None
    place = next(folder for folder in (offer.output, *offer.output.parents) if folder.exists())
    if (needed := offer.needs.disk_bytes) > (free := room.free_bytes(place)):
        return f"needs {room.human(needed)} of disk in {place}, {room.human(free)} are free"
    available = room.available_memory()
    if available is not None and (needed := offer.needs.memory_bytes) > available:
        return f"needs {room.human(needed)} of memory, {room.human(available)} are available"
    return None
