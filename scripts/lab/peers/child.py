"""The process around one peer: `python -m peers.child NAME`, JSON lines in and out.

{"do": "open", "files": {...}}        -> {"ok": "library 1.2"}
{"do": "generate", "request": {...}}  -> {"ok": {answer}}
{"do": "encode", "texts": [...]}      -> {"ok": [[ids], ...]}
An EdgespecError becomes {"refused": text}. Anything else ends the process, with its traceback on standard error: what a
library's failure leaves behind is not to be trusted. The end of standard input ends the process too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, TextIO

from edgespec.errors import ConfigError, EdgespecError
from peers.base import Peer, Request

PEERS = {
    "edgespec": "own:OwnPeer",
    "llama-cpp-python": "llama_cpp_python:LlamaCppPythonPeer",
    "llama-server": "llama_server:LlamaServerPeer",
    "onnxruntime-genai": "genai:GenaiPeer",
    "openvino-genai": "openvino:OpenvinoPeer",
    "transformers": "hugging_face:TransformersPeer",
}


def peer_of(name: str) -> Peer:
    """The peer of that name; its library is loaded when it opens. Raises ConfigError."""
    if name not in PEERS:
        raise ConfigError(f"no peer {name!r}; allowed: {', '.join(PEERS)}")
    module, _, attribute = PEERS[name].partition(":")
    made: Peer = getattr(importlib.import_module(f"peers.{module}"), attribute)()
    return made


def respond(peer: Peer, message: dict[str, Any]) -> Any:
    """The value that answers one message. Raises what the peer raises, ConfigError for an unknown order."""
    if message["do"] == "open":
        return peer.open(message["files"])
    if message["do"] == "generate":
        return peer.generate(Request.from_json(message["request"])).to_json()
    if message["do"] == "encode":
        return peer.encode(message["texts"])
    raise ConfigError(f"no order {message['do']!r}; allowed: open, generate, encode")


def serve(peer: Peer, lines: TextIO, replies: TextIO) -> None:
    """Answer every line until there are no more, then close the peer."""
    try:
        for line in lines:
            try:
                reply = {"ok": respond(peer, json.loads(line))}
            except EdgespecError as error:
                reply = {"refused": str(error)}
            print(json.dumps(reply), file=replies, flush=True)
    finally:
        peer.close()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output; the replies must stay clean
    serve(peer_of(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
