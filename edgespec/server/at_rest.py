"""What is told of a model before a request has loaded it the first time: what its files and options say."""

from __future__ import annotations

from edgespec.config import LoadOptions
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.file_facts import FileFacts
from edgespec.memory.fit import chosen_context
from edgespec.memory.plan import Room, planned
from edgespec.sampling import Sampling
from edgespec.server.facts import shared_properties
from edgespec.server.ollama_facts import Known, entry, shown
from edgespec.server.service import Described


def at_rest(
    name: str, options: LoadOptions, pair: ModelPair, sampling: Sampling, max_tokens: int | None, template: str | None
) -> Described:
    """What is told of `pair` under `options`; `template` replaces its chat template. Nobody knows its slots yet.

    Raises what a load would raise of what its files lack.
    """
    with keeping_headers():
        context_length = planned(chosen_context(options, pair, Room.now(options.memory)), pair).context_length
        found = FileFacts.read(pair)
    known = Known.of_files(name, pair, found, context_length, template, embeds=bool(options.pooling))
    more = {
        "is_sleeping": True,
        "total_slots": 0,
        "engine": found.engine,
        "device": None,
        "drafter": options.drafter,
        "verify": options.verify,
        "reproducible": options.reproducible,
        "memory": None,
    }
    properties = shared_properties(name, known.files.chat_template, context_length, sampling, max_tokens) | more
    return Described(context_length, properties, [], shown(known), entry(known))
