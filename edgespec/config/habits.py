"""Words that users of llama.cpp, Ollama, LM Studio and mlx-lm type by habit, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

# Commands and options, without dashes in front.
CALLED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("interactive", "repl"), "chat"),
        **dict.fromkeys(("complete", "completion", "ask"), "run"),
        "models": "ls",
        **dict.fromkeys(("server", "start"), "serve"),
        **dict.fromkeys(("get", "download", "install"), "pull"),
        **dict.fromkeys(("delete", "uninstall"), "rm"),
        "import": "add",
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
        **dict.fromkeys(("reasoning", "chat-template-kwargs"), "thinking"),
        **dict.fromkeys(("nothink", "no-think", "reasoning-budget"), "no-thinking"),
        "num-thread": "threads",
        "grammar-file": "grammar",
        "prompt-cache": "session",
        **dict.fromkeys(("reverse-prompt", "r"), "stop"),
        "nowordwrap": "raw",
    }
)
# What is done in another way here.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("f", "file", "prompt-file"), "-p - < FILE reads the prompt from a file"),
        **dict.fromkeys(("cnv", "conversation", "i"), "edgespec chat holds a conversation, run answers once"),
        **dict.fromkeys(("no-cnv", "no-conversation"), "edgespec run answers once"),
        **dict.fromkeys(("hf", "hf-repo"), "edgespec pull gets a model from the hub"),
        **dict.fromkeys(("fa", "flash-attn"), "llama.cpp uses flash attention automatically where it can"),
        **dict.fromkeys(("no-warmup", "warmup"), "there is no warm-up run: leave it out"),
        **dict.fromkeys(("mlock", "mmap", "no-mmap"), "weights are always mapped from their file and not locked"),
        **dict.fromkeys(("cpu-moe", "cmoe"), "-ncmoe 999 keeps all experts on the processor"),
        **dict.fromkeys(
            ("rope-scaling", "rope-scale", "rope-freq-base", "rope-freq-scale", "yarn-orig-ctx"),
            "a model is run with its own rope settings, up to the context that it was trained for (-c max)",
        ),
        **dict.fromkeys(
            ("samplers", "sampling-seq", "sampler-seq"),
            "the order is fixed: --temp, --top-k, --top-p, --min-p",
        ),
        **dict.fromkeys(
            ("typical", "mirostat", "xtc-probability", "dry-multiplier", "top-nsigma", "dynatemp-range"),
            "the samplers are --temp, --top-k, --top-p, --min-p and the penalties",
        ),
        **dict.fromkeys(
            ("embedding", "embeddings"),
            "embedding models need no flag; --pooling mean asks for embeddings of one that generates text",
        ),
        **dict.fromkeys(
            ("log-file", "log-disable", "log-verbosity", "verbosity"),
            "notes go to standard error: 2> FILE keeps them, -v shows more, -q none",
        ),
        **dict.fromkeys(
            ("lora", "lora-scaled", "adapter"),
            "adapters are not applied here: merge them into the model (llama.cpp's llama-export-lora)",
        ),
        **dict.fromkeys(
            ("draft-p-min", "draft-p-split"),
            "drafts are as long as is expected to pay off; --draft-length N fixes their length",
        ),
        **dict.fromkeys(
            ("context-shift", "no-context-shift", "keep"),
            "text is never shifted out silently; chat drops the oldest exchanges and says so",
        ),
        **dict.fromkeys(("b", "batch-size", "ub", "ubatch-size"), "the size of passes is chosen: leave it out"),
        **dict.fromkeys(("tb", "threads-batch"), "-t is for all passes"),
        **dict.fromkeys(("jinja", "no-jinja"), "chat templates are always read as Jinja"),
        **dict.fromkeys(("keepalive", "keep-alive"), "a model stays loaded for as long as its command runs"),
        "format": """--json-schema '{"type": "object"}' answers with any JSON object""",
        "cp": "edgespec add FILE --name NAME gives a model another name",
        "push": "edgespec publishes nothing",
        "version": "edgespec --version",
        "create": "edgespec add FILE --name NAME; what a Modelfile sets are options, or lines of config.toml",
        **dict.fromkeys(("ps", "stop"), "nothing stays loaded when a command ends; edgespec ls lists models"),
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
