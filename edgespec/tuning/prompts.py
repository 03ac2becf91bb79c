"""The prompts that tuning and planning decode: a user's own, or the built-in ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import PromptError
from edgespec.runtime import Model
from edgespec.tuning.prompt_sources import built_in, read_prompts
from edgespec.tuning.workload import BenchPrompt


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is decoded, in order; `are_own` tells a user's prompts from the built-in ones."""

    chosen: tuple[BenchPrompt, ...]
    num_given: int
    are_own: bool
    chat_template: bool = True

    def encode(self, model: Model, max_tokens: int) -> list[list[int]]:
        """Token ids of each. Raises PromptError naming the first one that leaves no room for its answer."""
        encoded = []
        for number, prompt in enumerate(self.chosen, 1):
            ids = prompt.encode(model, chat_template=self.chat_template)
            if len(ids) + max_tokens > model.context_length:
                raise PromptError(
                    f"prompt {number} of {len(self.chosen)} ({prompt.text[:40]!r}) has {len(ids)} tokens and its "
                    f"answer {max_tokens}, the context holds {model.context_length}: shorten it, or give a larger "
                    "--ctx-size"
                )
            encoded.append(ids)
        return encoded


def choose_prompts(path: Path | None, most: int, *, chat_template: bool = True) -> Prompts:
    """Up to `most` prompts, spread evenly over those of the file (None: over the built-in ones).

    Raises PromptError for a file that cannot be read or holds none, naming the line where there is one.
    """
    domains = built_in() if path is None else read_prompts(path)
    found = [prompt for prompts in domains.values() for prompt in prompts]
    return Prompts(tuple(_spread(found, most)), len(found), path is not None, chat_template)


def _spread(found: Sequence[BenchPrompt], most: int) -> Sequence[BenchPrompt]:
    if len(found) <= most:
        return found
    return [found[index * len(found) // most] for index in range(most)]
