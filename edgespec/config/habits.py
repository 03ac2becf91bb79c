"""Words that users of llama.cpp, Ollama, LM Studio and mlx-lm type by habit, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType


def _by_word(said: Mapping[str, str]) -> Mapping[str, str]:
    """By each word, what is said for the words that stand together."""
    return MappingProxyType({word: text for words, text in said.items() for word in words.split()})


# Commands and options, without dashes in front.
CALLED = _by_word(
    {
        "interactive repl": "chat",
        "complete completion ask": "run",
        "models": "ls",
        "get download install": "pull",
        "delete uninstall": "rm",
        "import": "add",
        "convert quantize quantise": "export",
        "info": "show",
        "benchmark": "bench",
        "n-predict predict num-predict max-new-tokens": "max-tokens",
        "ctx context context-length ctx-len num-ctx max-kv-size": "ctx-size",
        "gpu ngl n-gpu-layers num-gpu": "gpu-layers",
        "draft draft-n draft-min draft-num": "draft-length",
        "sys system-prompt": "system",
        "nothink no-think reasoning-budget": "no-thinking",
        "num-thread": "threads",
        "grammar-file": "grammar",
        "prompt-cache": "session",
        "reverse-prompt r": "stop",
    }
)
# What is done in another way here.
INSTEAD = _by_word(
    {
        "f file prompt-file": "-p - < FILE reads the prompt from a file",
        "cnv conversation i": "edgespec chat holds a conversation, run answers once",
        "hf hf-repo": "edgespec pull gets a model from the hub",
        "lora lora-scaled adapter": "adapters are not applied here: merge them into the model (llama.cpp's "
        "llama-export-lora)",
        "keepalive keep-alive": "a model stays loaded for as long as its command runs",
        "format": """--json-schema '{"type": "object"}' answers with any JSON object""",
        "cp create": "edgespec add FILE --name NAME; what a Modelfile sets are options, or lines of config.toml",
        "version": "edgespec --version",
        "ps stop": "nothing stays loaded when a command ends; edgespec ls lists models",
    }
)
_LEAST_ALIKE = 0.7  # two letters of four that are swapped (temp, tmep) are .75 alike


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' with the nearest of `known`, or nothing when none is near.

    A word of another program has its name here, or says how the same is done, before any that looks alike.
    """
    by_bare = {_bare(option): option for option in sorted(set(known))}
    habit = _bare(name)
    if CALLED.get(habit) in by_bare:
        return f"; did you mean '{by_bare[CALLED[habit]]}'?"
    if habit in INSTEAD and not {"chat", "ctx-size"}.isdisjoint(by_bare):
        return f"; {INSTEAD[habit]}"
    near = difflib.get_close_matches(habit, by_bare, n=1, cutoff=_LEAST_ALIKE)
    return f"; did you mean '{by_bare[near[0]]}'?" if near else ""


def _bare(name: str) -> str:
    return name.lstrip("-/").lower().replace("_", "-")
