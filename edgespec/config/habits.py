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
        "server start": "serve",
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
        "spec-type": "drafter",
        "sys system-prompt": "system",
        "kv-bits kv-cache-type": "cache-type-k",
        "reasoning chat-template-kwargs": "thinking",
        "nothink no-think reasoning-budget": "no-thinking",
        "num-thread": "threads",
        "grammar-file": "grammar",
        "prompt-cache": "session",
        "reverse-prompt r": "stop",
        "nowordwrap": "raw",
    }
)
_ROPE = "a model is run with its own rope settings, up to the context that it was trained for (-c max)"
_POOLING = "embedding models need no flag; --pooling mean asks for embeddings of one that generates text"
_ADAPTERS = "adapters are not applied here: merge them into the model (llama.cpp's llama-export-lora)"
_NOTES = "notes go to standard error: 2> FILE keeps them, -v shows more, -q none"
_LENGTHS = "drafts are as long as is expected to pay off; --draft-length N fixes their length"
_SHIFTS = "text is never shifted out silently; chat drops the oldest exchanges and says so"
_SAMPLERS = "the samplers are --temp, --top-k, --top-p, --min-p and the penalties"
# What is done in another way here.
INSTEAD = _by_word(
    {
        "f file prompt-file": "-p - < FILE reads the prompt from a file",
        "cnv conversation i": "edgespec chat holds a conversation, run answers once",
        "no-cnv no-conversation": "edgespec run answers once",
        "hf hf-repo": "edgespec pull gets a model from the hub",
        "fa flash-attn": "llama.cpp uses flash attention automatically where it can",
        "no-warmup warmup": "there is no warm-up run: leave it out",
        "mlock mmap no-mmap": "weights are always mapped from their file and not locked",
        "cpu-moe cmoe": "-ncmoe 999 keeps all experts on the processor",
        "rope-scaling rope-scale rope-freq-base rope-freq-scale yarn-orig-ctx": _ROPE,
        "samplers sampling-seq sampler-seq": "the order is fixed: --temp, --top-k, --top-p, --min-p",
        "typical mirostat xtc-probability dry-multiplier top-nsigma dynatemp-range": _SAMPLERS,
        "embedding embeddings": _POOLING,
        "log-file log-disable log-verbosity verbosity": _NOTES,
        "lora lora-scaled adapter": _ADAPTERS,
        "draft-p-min draft-p-split": _LENGTHS,
        "context-shift no-context-shift keep": _SHIFTS,
        "b batch-size ub ubatch-size": "the size of passes is chosen: leave it out",
        "tb threads-batch": "-t is for all passes",
        "jinja no-jinja": "chat templates are always read as Jinja",
        "keepalive keep-alive": "a model stays loaded for as long as its command runs",
        "format": """--json-schema '{"type": "object"}' answers with any JSON object""",
        "cp": "edgespec add FILE --name NAME gives a model another name",
        "push": "edgespec publishes nothing",
        "version": "edgespec --version",
        "create": "edgespec add FILE --name NAME; what a Modelfile sets are options, or lines of config.toml",
        "ps stop": "nothing stays loaded when a command ends; edgespec ls lists models",
    }
)
# Two letters of four that are swapped (temp, tmep) are .75 alike; what is less alike mostly means something else.
_LEAST_ALIKE = 0.7


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' with the nearest of `known`, or nothing when none is near.

    A word of another program has its name here, or says how the same is done, before any that looks alike.
    """
    options = sorted(set(known))
    habit = name.lstrip("-/").lower().replace("_", "-")
    for option in options:
        if CALLED.get(habit) == option.lstrip("-/").replace("_", "-"):
            return f"; did you mean '{option}'?"
    if habit in INSTEAD and not {"chat", "--ctx-size"}.isdisjoint(options):
        return f"; {INSTEAD[habit]}"
    by_bare = {option.lstrip("-/").lower().replace("_", "-"): option for option in options}
    begun = [option for option in by_bare if min(len(option), len(habit)) > 2 and _share_beginning(option, habit)]
    # 'draft-lenght' begins with 'draft', too; 'temprature' is nearer to 'chat-template' by letters than to 'temp'
    surely, perhaps = (difflib.get_close_matches(habit, by_bare, n=1, cutoff=cutoff) for cutoff in (0.88, _LEAST_ALIKE))
    near = surely or sorted((o for o in begun if len(o) > 3), key=len, reverse=True) or perhaps or begun
    return f"; did you mean '{by_bare[near[0]]}'?" if near else ""


def _share_beginning(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
