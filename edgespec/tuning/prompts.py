"""The prompts that `tune` and `plan-speedup` decode: the user's, or the built-in ones."""

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
    """The prompts to decode, in order. `are_own`: from the user's file, not built in."""

    chosen: tuple[BenchPrompt, ...]
    num_given: int
    are_own: bool
    chat_template: bool = True

    def encode(self, model: Model, max_tokens: int) -> list[list[int]]:
        """Token ids of each prompt. Raises PromptError, naming the first prompt that leaves no room for its answer."""
        encoded = []
        for number, prompt in enumerate(self.chosen, 1):
            ids = prompt.encode(model, chat_template=self.chat_template)
            if len(ids) + max_tokens > model.context_length:
                raise PromptError(
                    f"prompt {number} of {len(self.chosen)} ({prompt.text[:40]!r}) has {len(ids)} tokens and its "
                    f"answer {max_tokens}, but the context holds only {model.context_length}: shorten it, or give a "
                    "larger --ctx-size"
                )
            encoded.append(ids)
        return encoded


def choose_prompts(path: Path | None, most: int, *, chat_template: bool = True) -> Prompts:
    """Up to `most` prompts, spread evenly over the file's (None: the built-in ones).

    Raises PromptError for a file that cannot be read or has no prompt, naming the line.
    """
    domains = built_in() if path is None else read_prompts(path)
    prompts = [prompt for prompts in domains.values() for prompt in prompts]
    return Prompts(tuple(_spread_evenly(prompts, most)), len(prompts), path is not None, chat_template)


def _spread_evenly(prompts: Sequence[BenchPrompt], most: int) -> Sequence[BenchPrompt]:
    if len(prompts) <= most:
        return prompts
    return [prompts[index * len(prompts) // most] for index in range(most)]
