"""The pair that a race without a model takes: the demo, expanded once to a cost at which speculation can gain.

A pass of the 8M demo target takes about as long as a round's own bookkeeping. Expanded it says the same words at the
cost of a model a hundred times its size. On x86 processors w8a8 graphs gain most, and building one needs nothing that
is not installed; a GGUF needs the package gguf and llama.cpp, and is what `--engine llamacpp` asks for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

from edgespec.bench.expanded_pair import WEIGHT_TYPES, Engine, ExpandedPair
from edgespec.errors import CapabilityError, ModelNotFound
from edgespec.export import resources
from edgespec.installation import install_command
from edgespec.loading.registry import registered_folders
from edgespec.platform.disk_cache import cache_folder
from edgespec.platform.memory import free_memory

PACKAGES: dict[Engine, tuple[str, ...]] = {
    "onnx": ("onnxruntime", "onnx", "tokenizers"),
    "llamacpp": ("llama_cpp", "gguf"),
}
EXTRAS = {"llama_cpp": "llamacpp", "gguf": "export"}  # the other packages come with edgespec


def find_offer(engine: str) -> ExpandedPair:
    """The pair for `engine` ("auto": that of ONNX Runtime, or of llama.cpp where only that can be had).

    Raises CapabilityError saying what the machine lacks, ModelNotFound without the demo pair.
    """
    source = registered_folders().get("demo")
    if source is None:
        raise ModelNotFound("the demo pair is not installed, so there is nothing to expand: name a MODEL")
    engines = [name for name in get_args(Engine) if engine in ("auto", name)]
    lacks = []
    for name in engines:
        pair = ExpandedPair(source, name, cache_folder() / "race" / f"demo-1b-{WEIGHT_TYPES[name]}")
        lack = _lack(pair)
        if lack is None:
            return pair
        lacks.append(f"for {name}: {lack}")
    raise CapabilityError(f"the demo pair cannot be expanded here: {'; '.join(lacks)}")


def _lack(pair: ExpandedPair) -> str | None:
    """What this machine lacks to build and run it; None: nothing."""
    missing = [name for name in PACKAGES[pair.engine] if find_spec(name) is None]
    if missing:
        commands = dict.fromkeys(install_command(EXTRAS.get(name, "")) for name in missing)
        return f"needs {', '.join(missing)}: {' and '.join(commands)}"
    if pair.is_built():
        return None
    needs = pair.needs()
    place = next(folder for folder in (pair.folder, *pair.folder.parents) if folder.exists())
    if needs.disk_bytes > (free := resources.free_bytes(place)):
        return f"needs {resources.human(needs.disk_bytes)} of disk in {place}, {resources.human(free)} are free"
    available = free_memory()
    if available is not None and needs.memory_bytes > available:
        return f"needs {resources.human(needs.memory_bytes)} of memory, {resources.human(available)} are available"
    return None
