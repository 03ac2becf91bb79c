"""The prompts of a benchmark, by domain: the user's, built-in ones, and `random_text`, which continues random tokens:
nothing predicts it, so it shows what speculation costs at worst.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgespec.errors import PromptError
from edgespec.loading.drafts import PROMPTS, Prompt
from edgespec.platform.files import given_text
from edgespec.runtime import Model
from edgespec.vocabulary import Vocabulary

OWN_DOMAIN = "prompts"
NUM_RANDOM, _RANDOM_TOKENS = 4, 48  # prompts of random tokens, and how many each has
_EDIT = "Repeat the text below word for word, with 'result' replaced by 'sum' and 'lamp' by 'lantern'."
_EDITS = (
    "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result",
    "The keeper of the lighthouse climbs the stairs each night and lights the lamp. The ships see it and turn away.",
)
Domains = dict[str, list[Prompt]]


def encode(model: Model, chat_template: bool, prompt: Prompt) -> list[int]:
    """Token ids of `prompt`. `chat_template`: whether it goes through the model's, if that has one."""
    if prompt.is_raw or not chat_template or model.target.vocabulary.chat_template is None:
        return model.encode(prompt.text)
    return model.encode_chat([{"role": "user", "content": prompt.text}])


def built_in() -> Domains:
    domains: Domains = {}
    for prompt in PROMPTS:
        domains.setdefault(prompt.domain, []).append(prompt)
    domains["copying"] += [Prompt("copying", f"{_EDIT}\n\n{text}") for text in _EDITS]
    return domains


def random_text(vocabulary: Vocabulary, seed: int) -> Domains:
    """Prompts of random tokens, control tokens excluded."""
    rng = random.Random(f"{seed} made")
    printing = [token_id for token_id, piece in enumerate(vocabulary.pieces) if piece]
    texts = (vocabulary.decode(rng.choices(printing, k=_RANDOM_TOKENS)) for _ in range(NUM_RANDOM))
    return {"random_text": [Prompt("random_text", text, is_raw=True) for text in texts]}


def choose(
    domains: Mapping[str, Sequence[Prompt]], fits: Callable[[Prompt], bool], *, one_each: bool = False
) -> tuple[list[Prompt], int]:
    """The prompts that `fits` allows, the domains taking turns; or the first one of each.

    Returns how many do not fit, too. Raises PromptError if no prompt is left.
    """
    rows = [list(dict.fromkeys(prompts)) for prompts in domains.values()]
    fitting = [list(filter(fits, row)) for row in rows]
    longest = 1 if one_each else max(map(len, fitting), default=0)
    chosen = [row[index] for index in range(longest) for row in fitting if index < len(row)]
    if not chosen:
        raise PromptError(
            "no prompt fits the context together with its answer: give a larger --ctx-size or a smaller -n"
        )
    return chosen, sum(map(len, rows)) - sum(map(len, fitting))


def read_prompts(path: Path) -> Domains:
    """The prompts of a file, one per line. Raises ConfigError, PromptError."""
    lines = io.StringIO(given_text(path, "--prompts"), newline=None)  # splitlines cuts at other marks, too
    found = [Prompt(OWN_DOMAIN, line.rstrip("\n")) for line in lines if line.strip()]
    if not found or path.suffix == ".jsonl":
        raise PromptError(f"--prompts {path} must be a text file with one prompt per line, none of them JSON")
    return {OWN_DOMAIN: found}
