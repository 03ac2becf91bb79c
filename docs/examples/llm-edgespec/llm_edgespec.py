"""A plugin for `llm` (https://llm.datasette.io): the pairs of this machine, loaded into its own process.

    llm install docs/examples/llm-edgespec
    llm -m edgespec/demo "Find me a bus to Fresno."

Conversations (`llm -c`, `llm chat`), system prompts (`-s`), schemas (`--schema`) and the options below work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import llm
from pydantic import Field

import edgespec
from edgespec import GenerateOptions
from edgespec.loading.registry import registered_folders


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    for name in sorted(registered_folders()):
        register(Edgespec(name))


class Edgespec(llm.Model):
    """One pair. It is loaded with the first prompt and stays loaded, as `llm chat` needs it."""

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        temperature: float | None = Field(default=None, ge=0, description="0 for the likeliest token each time")
        top_k: int | None = Field(default=None, description="sample from this many tokens, 0 for all")
        top_p: float | None = Field(default=None, description="sample from the likeliest tokens of this probability")
        seed: int | None = Field(default=None, description="of the random numbers")
        max_tokens: int | None = Field(default=None, ge=1, description="most tokens of the answer")
        drafter: str | None = Field(default=None, description="as edgespec's --drafter; none for plain decoding")

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, f"edgespec/{name}"

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str]:
        """The answer's pieces; llm stops reading to end it early."""
        model, given = loaded(self.name), prompt.options.model_dump(exclude_none=True)
        kept = {name: given.pop(name) for name in ("max_tokens", "drafter") if name in given}
        options = GenerateOptions(json_schema=prompt.schema, **kept)
        sampling = type(model.recommended_sampling)(**{**dict(model.pair.recommended), **given})
        with model.chat(messages(prompt, conversation), sampling, options) as generation:
            for event in generation:
                yield event.text
            stats = generation.stats
            response.set_usage(input=stats.prompt_tokens, output=stats.new_tokens)
            response.response_json = {
                "tokens": stats.new_tokens,
                "tokens_per_second": stats.tokens_per_second,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
            }


@cache
def loaded(name: str) -> edgespec.Model:
    return edgespec.load(name)


def messages(prompt: llm.Prompt, conversation: llm.Conversation | None) -> list[dict[str, Any]]:
    """The conversation so far and the new prompt."""
    earlier = conversation.responses if conversation else []
    system = prompt.system or next((each.prompt.system for each in earlier if each.prompt.system), "")
    found = [{"role": "system", "content": system}] if system else []
    for each in earlier:
        found += [{"role": "user", "content": each.prompt.prompt}, {"role": "assistant", "content": each.text()}]
    return [*found, {"role": "user", "content": prompt.prompt}]
