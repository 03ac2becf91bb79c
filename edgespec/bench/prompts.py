"""The prompts of a benchmark, by domain: the user's, built-in ones, synthetic ones.

Synthetic domains: `copying` asks to repeat a text with a small change; `high_entropy` samples at a high temperature;
`random_text` continues random tokens. The last two are hard to predict and show what speculation costs at worst.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.config.options import Sampling
from edgespec.config.table import did_you_mean
from edgespec.errors import ConfigError, PromptError
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.platform.files import read_text
from edgespec.runtime import Model
from edgespec.vocabulary import Vocabulary

HOT_TEMPERATURE = 1.5
SYNTHETIC = ("copying", "high_entropy", "random_text")
OWN_DOMAIN = "prompts"  # for lines without a domain
_NUM_SYNTHETIC = 32  # number of prompts that a synthetic domain is derived from
_RANDOM_TOKENS = 48
_MOST_COPIED_CHARACTERS = 1500
_WORD = re.compile(r"\b[A-Za-z_]{4,}\b")
_NEW_WORDS = ("harbour", "velvet", "lantern", "meadow", "copper", "orchard")
Domains = dict[str, list["BenchPrompt"]]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt. `turns`: user, assistant, user, ...; the model answers the last one.

    `is_raw`: encoded without chat template; `is_hot`: always sampled at HOT_TEMPERATURE from the untruncated
    distribution.
    """

    domain: str
    turns: tuple[str, ...]
    is_raw: bool = False
    is_hot: bool = False

    @property
    def text(self) -> str:
        return self.turns[-1]

    @property
    def digest(self) -> str:
        """Identifies the prompt by content; the same in every process."""
        return hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()[:16]

    def encode(self, model: Model, *, chat_template: bool = True) -> list[int]:
        """Token ids for `model`. Raises PromptError."""
        if self.is_raw or not chat_template or model.target.vocabulary.chat_template is None:
            return model.encode(self.text)
        roles = ("user", "assistant")
        return model.encode_chat([{"role": roles[i % 2], "content": turn} for i, turn in enumerate(self.turns)])

    def sampling(self, base: Sampling) -> Sampling:
        if not self.is_hot:
            return base
        return dataclasses.replace(base, temperature=HOT_TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)


def with_synthetic(found: Mapping[str, Sequence[BenchPrompt]], vocabulary: Vocabulary, seed: int) -> Domains:
    """`found` plus the synthetic domains; existing prompts of these domains come first."""
    rng = random.Random(f"{seed} made")
    base = [prompt for prompts in found.values() for prompt in prompts if not prompt.is_raw]
    drawn = rng.sample(base, min(_NUM_SYNTHETIC, len(base)))
    synthetic: Domains = {
        "copying": [edit for prompt in drawn if (edit := copy_edit(prompt.text, rng))],
        "high_entropy": [dataclasses.replace(prompt, domain="high_entropy", is_hot=True) for prompt in drawn],
        "random_text": [random_text(vocabulary, rng) for _ in range(_NUM_SYNTHETIC)],
    }
    domains = {name: list(prompts) for name, prompts in found.items()}
    for name, prompts in synthetic.items():
        if prompts:
            domains.setdefault(name, []).extend(prompts)
    return domains


def copy_edit(text: str, rng: random.Random) -> BenchPrompt | None:
    """A request to repeat `text` with one word replaced everywhere; None if it has no such word or is too long."""
    words = sorted(set(_WORD.findall(text)) - set(_NEW_WORDS))
    if not words or len(text) > _MOST_COPIED_CHARACTERS:
        return None
    old, new = rng.choice(words), rng.choice(_NEW_WORDS)
    request = f"Repeat the text below word for word, with '{old}' replaced by '{new}' everywhere."
    return BenchPrompt("copying", (f"{request}\n\n{text}",))


def random_text(vocabulary: Vocabulary, rng: random.Random) -> BenchPrompt:
    """A prompt of random tokens, control tokens excluded."""
    printing = [token_id for token_id, piece in enumerate(vocabulary.pieces) if piece]
    return BenchPrompt("random_text", (vocabulary.decode(rng.choices(printing, k=_RANDOM_TOKENS)),), is_raw=True)


def choose(
    domains: Mapping[str, Sequence[BenchPrompt]],
    names: Collection[str],
    per_domain: int | None,
    seed: int,
    fits: Callable[[BenchPrompt], bool],
) -> list[BenchPrompt]:
    """Up to `per_domain` prompts (None: all) that `fits` allows, of each domain in `names` (empty: of all domains).

    Domains alternate. The order depends on `seed`; a smaller `per_domain` gives a prefix of a larger one. Raises
    ConfigError for an unknown domain, PromptError if no prompt is left.
    """
    for name in names:
        if name not in domains:
            hint = did_you_mean(name, domains) or f"; known here: {', '.join(domains)}"
            raise ConfigError(f"--domain {name!r} is not known{hint}")
    rows = []
    for name in dict.fromkeys(names) or domains:
        prompts = list(dict.fromkeys(domains[name]))
        if per_domain is not None:
            random.Random(f"{seed} {name}").shuffle(prompts)
        fitting = (prompt for prompt in prompts if fits(prompt))
        rows.append([prompt for _, prompt in zip(range(per_domain or len(prompts)), fitting, strict=False)])
    longest = max(map(len, rows), default=0)
    chosen = [row[index] for index in range(longest) for row in rows if index < len(row)]
    if not chosen:
        raise PromptError(
            "no prompt fits the context together with its answer: give a larger --ctx-size or a smaller -n"
        )
    return chosen


# -- sources


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
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"--prompts {path} has no prompt: give one per line")
    is_json = path.suffix == ".jsonl" or numbered[0][1].lstrip().startswith("{")
    domains: Domains = {}
    for number, line in numbered:
        place = f"--prompts {path} line {number}"
        prompt = _prompt_of(line, place) if is_json else BenchPrompt(OWN_DOMAIN, (line.rstrip("\n"),))
        domains.setdefault(prompt.domain, []).append(prompt)
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
    return BenchPrompt(domain, (text,))


def built_in() -> Domains:
    domains: Domains = {}
    for prompt in PROMPTS:
        domains.setdefault(prompt.domain, []).append(BenchPrompt(prompt.domain, (prompt.text,)))
    return domains
