"""The prompts of a benchmark, by domain: the user's, built-in ones, generated ones.

Generated domains: `copying` asks to repeat a text with a small change; `random_text` continues random tokens, which
nothing predicts: it shows what speculation costs at worst.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.config.table import did_you_mean
from edgespec.errors import ConfigError, PromptError
from edgespec.loading.drafts import PROMPTS
from edgespec.platform.files import read_text
from edgespec.runtime import Model
from edgespec.vocabulary import Vocabulary

OWN_DOMAIN = "prompts"  # for lines without a domain
NUM_GENERATED = 4  # prompts of a generated domain
_RANDOM_TOKENS = 48
_MOST_COPIED_CHARACTERS = 1500
_WORD = re.compile(r"\b[A-Za-z_]{4,}\b")
_NEW_WORDS = ("harbour", "velvet", "lantern", "meadow", "copper", "orchard")
Domains = dict[str, list["BenchPrompt"]]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt. `is_raw`: encoded without chat template."""

    domain: str
    text: str
    is_raw: bool = False

    def encode(self, model: Model, *, chat_template: bool = True) -> list[int]:
        """Token ids for `model`. Raises PromptError."""
        if self.is_raw or not chat_template or model.target.vocabulary.chat_template is None:
            return model.encode(self.text)
        return model.encode_chat([{"role": "user", "content": self.text}])


def built_in() -> Domains:
    domains: Domains = {}
    for prompt in PROMPTS:
        domains.setdefault(prompt.domain, []).append(BenchPrompt(*prompt))
    return domains


def with_generated(found: Mapping[str, Sequence[BenchPrompt]], vocabulary: Vocabulary, seed: int) -> Domains:
    """`found` plus the generated domains; existing prompts of these come first."""
    rng = random.Random(f"{seed} made")
    texts = [prompt.text for prompts in found.values() for prompt in prompts]
    edits = filter(None, (copy_edit(text, rng) for text in rng.sample(texts, len(texts))))
    domains = {name: list(prompts) for name, prompts in found.items()}
    copies = [prompt for prompt, _ in zip(edits, range(NUM_GENERATED), strict=False)]
    if copies:
        domains.setdefault("copying", []).extend(copies)
    domains.setdefault("random_text", []).extend(random_text(vocabulary, rng) for _ in range(NUM_GENERATED))
    return domains


def copy_edit(text: str, rng: random.Random) -> BenchPrompt | None:
    """A request to repeat `text` with one word replaced everywhere; None if it has no such word or is too long."""
    words = sorted(set(_WORD.findall(text)) - set(_NEW_WORDS))
    if not words or len(text) > _MOST_COPIED_CHARACTERS:
        return None
    old, new = rng.choice(words), rng.choice(_NEW_WORDS)
    request = f"Repeat the text below word for word, with '{old}' replaced by '{new}' everywhere."
    return BenchPrompt("copying", f"{request}\n\n{text}")


def random_text(vocabulary: Vocabulary, rng: random.Random) -> BenchPrompt:
    """A prompt of random tokens, control tokens excluded."""
    printing = [token_id for token_id, piece in enumerate(vocabulary.pieces) if piece]
    return BenchPrompt("random_text", vocabulary.decode(rng.choices(printing, k=_RANDOM_TOKENS)), is_raw=True)


def choose(
    domains: Mapping[str, Sequence[BenchPrompt]],
    names: Collection[str],
    fits: Callable[[BenchPrompt], bool],
    *,
    one_each: bool = False,
) -> list[BenchPrompt]:
    """The prompts that `fits` allows, of the domains in `names` (empty: of all), in turns; or the first one of each.

    Raises ConfigError for an unknown domain, PromptError if no prompt is left.
    """
    for name in names:
        if name not in domains:
            hint = did_you_mean(name, domains) or f"; known here: {', '.join(domains)}"
            raise ConfigError(f"--domain {name!r} is not known{hint}")
    rows = [list(filter(fits, dict.fromkeys(domains[name]))) for name in dict.fromkeys(names) or domains]
    longest = 1 if one_each else max(map(len, rows), default=0)
    chosen = [row[index] for index in range(longest) for row in rows if index < len(row)]
    if not chosen:
        raise PromptError(
            "no prompt fits the context together with its answer: give a larger --ctx-size or a smaller -n"
        )
    return chosen


def read_prompts(path: Path) -> Domains:
    """Prompts of a file, by domain: one plain prompt per line, or (.jsonl) an object with "text" and optional "domain".

    Raises PromptError, naming the file and the line.
    """
    try:
        lines = list(io.StringIO(read_text(path), newline=None))  # splitlines cuts at marks that JSON allows, too
    except OSError as exc:
        raise PromptError(f"--prompts {path} cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise PromptError(f"--prompts {path} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    domains: Domains = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            place, is_json = f"--prompts {path} line {number}", path.suffix == ".jsonl"
            prompt = _prompt_of(line, place) if is_json else BenchPrompt(OWN_DOMAIN, line.rstrip("\n"))
            domains.setdefault(prompt.domain, []).append(prompt)
    if not domains:
        raise PromptError(f"--prompts {path} has no prompt: give one per line")
    return domains


def _prompt_of(line: str, place: str) -> BenchPrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:  # ValueError: also a whole number of too many digits
        raise PromptError(f"{place} is not JSON: {exc}") from exc
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f'{place} needs a non-empty "text", got {line[:60]!r}')
    domain = record.get("domain", OWN_DOMAIN)
    if not isinstance(domain, str) or not domain.strip():
        raise PromptError(f'{place}: "domain" must be a name, got {domain!r}')
    return BenchPrompt(domain, text)
