"""Words that users of llama.cpp, Ollama, LM Studio and mlx-lm type by habit, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Commands and options, without dashes in front.
CALLED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("run", "interactive", "repl"), "chat"),
        **dict.fromkeys(("complete", "completion"), "generate"),
        **dict.fromkeys(("list", "models"), "ls"),
        **dict.fromkeys(("server", "start"), "serve"),
        **dict.fromkeys(("get", "download", "install"), "pull"),
        **dict.fromkeys(("remove", "delete", "uninstall"), "rm"),
        **dict.fromkeys(("create", "import"), "add"),
        **dict.fromkeys(("convert", "quantize", "quantise"), "export"),
        "info": "show",
        "benchmark": "bench",
        **dict.fromkeys(("n-predict", "predict", "num-predict", "max-new-tokens"), "max-tokens"),
        **dict.fromkeys(("ctx", "context", "context-length", "ctx-len", "num-ctx", "max-kv-size"), "ctx-size"),
        **dict.fromkeys(("gpu", "ngl", "n-gpu-layers", "num-gpu"), "gpu-layers"),
        **dict.fromkeys(("draft", "draft-n", "draft-min", "draft-num"), "draft-length"),
        "spec-type": "drafter",
        **dict.fromkeys(("sys", "system-prompt"), "system"),
        **dict.fromkeys(("kv-bits", "kv-cache-type"), "cache-type-k"),
        **dict.fromkeys(("think", "reasoning", "chat-template-kwargs"), "thinking"),
        **dict.fromkeys(("nothink", "no-think", "reasoning-budget"), "no-thinking"),
        "num-thread": "threads",
        "grammar-file": "grammar",
        "prompt-cache": "session",
    }
)
# What is done in another way here.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("f", "file", "prompt-file"), "-p - < FILE reads the prompt from a file"),
        **dict.fromkeys(("cnv", "conversation", "i"), "edgespec chat holds a conversation, generate answers once"),
        **dict.fromkeys(("no-cnv", "no-conversation"), "edgespec generate answers once"),
        **dict.fromkeys(("hf", "hf-repo"), "edgespec pull gets a model from the hub"),
        **dict.fromkeys(("fa", "flash-attn"), "llama.cpp uses flash attention automatically where it can"),
        "version": "edgespec --version",
        "help": "edgespec --help, edgespec COMMAND --help",
        "ps": "edgespec ls lists models; nothing stays loaded when a command ends",
    }
)
