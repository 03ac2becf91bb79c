"""Functions that llama.cpp exports outside its stable interface, by their C++ names.

What they do, and which input ends the process, was read in the sources of llama-cpp-python 0.3.36 and tried. A build
without one of them gives a CapabilityError; nothing else depends on them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgespec.engines.llamacpp.library import library, version
from edgespec.errors import CapabilityError

CONTEXT = ctypes.c_void_p
FLOATS = ctypes.POINTER(ctypes.c_float)
# name -> (as GCC and Clang spell it, as MSVC does, arguments, result)
FUNCTIONS: dict[str, tuple[str, str, list[Any], Any]] = {
    "set_layer_input": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        [CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "get_layer_input": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        [CONTEXT, ctypes.c_uint32],
        FLOATS,
    ),
    "set_states": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        [CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "get_states": (
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        [CONTEXT],
        FLOATS,
    ),
}


@cache
def extension(name: str) -> Any:
    """One of FUNCTIONS. Raises CapabilityError when this build does not export it."""
    itanium, msvc, arguments, result = FUNCTIONS[name]
    exports = library()._lib
    for symbol in (itanium, msvc):
        found = getattr(exports, symbol, None)
        if found is not None:
            found.argtypes, found.restype = arguments, result
            return found
    raise CapabilityError(
        f"llama-cpp-python {version()} does not export {itanium}, which draft heads need: install "
        "llama-cpp-python 0.3.36, or leave the head out"
    )
