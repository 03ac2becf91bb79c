"""A target in transformers: the texts it is given, what it writes, and how often a student is right about that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError

from edgespec.errors import ConfigError, ModelFileError
from edgespec.export.hub import find_source
from trainlib.documents import Document

MOST_REFUSALS = 100


@dataclass(frozen=True)
class OwnText:
    """Text that the target wrote. `token_ids` include the prompt; `start` (>= 1): index of the first other token."""

    token_ids: list[int]
    start: int


def folder_of(source: str) -> Path:
    """The folder of a model, whose weights are fetched if `source` is a hub id."""
    found = find_source(source)
    found.fetch()
    return found.folder


def save_model(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a model of transformers, which is of that type from now on."""
    model.to(dtype).save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read


class Target:
    """The frozen model of a folder and its tokenizer. Raises ModelFileError if transformers cannot load them."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        transformers.utils.logging.disable_progress_bar()
        try:
            found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as exc:
            raise ModelFileError(f"{folder} cannot be loaded by transformers: {exc}") from exc
        self.folder, self.device = folder, device
        self.model = found.to(device).eval().requires_grad_(False)
        self.config = found.config.get_text_config()
        ends = found.generation_config.eos_token_id
        named = ends if isinstance(ends, list) else [ends]
        self.stop_ids = sorted({end for end in (*named, self.tokenizer.eos_token_id) if end is not None})
        # What the folder recommends for sampling, such as a repetition penalty, changes the distribution.
        pad = self.stop_ids[0] if self.stop_ids else 0
        self.model.generation_config = transformers.GenerationConfig(eos_token_id=self.stop_ids, pad_token_id=pad)

    def encode(self, document: Document, *, opens_answer: bool = False) -> list[int]:
        """Token ids; of a conversation by the chat template, up to where the next answer begins if `opens_answer`."""
        if isinstance(document, str):
            ids: list[int] = self.tokenizer(document).input_ids
            begin = self.tokenizer.bos_token_id
            return ids if begin is None or ids[:1] == [begin] else [begin, *ids]
        text = self.tokenizer.apply_chat_template(document, add_generation_prompt=opens_answer, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, documents: Sequence[Document], rng: np.random.Generator, most: int) -> list[int]:
        """The last `most` tokens of a conversation up to one of its answers, or of the beginning of a text."""

        def use(document: Document) -> list[int]:
            if isinstance(document, str):
                ids = self.encode(document)
                return ids[: int(rng.integers(1, max(2, min(len(ids), most))))]
            answers = [place for place, each in enumerate(document) if place and each["role"] == "assistant"]
            end = int(rng.choice(answers)) if answers else len(document)
            return self.encode(document[:end], opens_answer=True)

        return _drawn(documents, rng, use, 1)[-most:]

    def window(self, documents: Sequence[Document], rng: np.random.Generator, length: int) -> NDArray[np.int32]:
        """Token ids [length] of documents one after another; a longer one starts at a random position."""
        found: list[int] = []
        while len(found) < length:
            ids = _drawn(documents, rng, self.encode, 2)
            start = int(rng.integers(0, max(1, len(ids) - length + 1)))
            found += ids[start : start + length - len(found)]
        return np.asarray(found, np.int32)

    @torch.no_grad()
    def write(self, prompts: Sequence[list[int]], most: int, temperature: float, seed: int) -> list[OwnText]:
        """Each prompt with up to `most` tokens, to the first that ends a text. The same for a seed and a machine."""
        torch.manual_seed(seed)
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        heat = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        found = self.model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=most,
            **heat,
        )
        return [
            OwnText(list(prompt) + self._ended(row), len(prompt))
            for prompt, row in zip(prompts, found[:, longest:].tolist(), strict=True)
        ]

    def _ended(self, token_ids: list[int]) -> list[int]:
        end = next((place for place, token_id in enumerate(token_ids, 1) if token_id in self.stop_ids), None)
        return token_ids[:end]


def _drawn(
    documents: Sequence[Document], rng: np.random.Generator, use: Callable[[Document], list[int]], least: int
) -> list[int]:
    """`use` of a random document that gives at least `least` tokens; passes over those that the template refuses."""
    reason = "they are too short"
    for _ in range(MOST_REFUSALS):
        try:
            ids = use(documents[int(rng.integers(len(documents)))])
        except (jinja2.TemplateError, ValueError, TypeError) as exc:  # by the template, or for want of one
            reason = str(exc)
            continue
        if len(ids) >= least:
            return ids
    raise ConfigError(f"--data: {MOST_REFUSALS} documents in a row cannot be used: {reason}")


def batches(texts: Sequence[OwnText], most: int) -> Iterator[Sequence[OwnText]]:
    """Batches of texts of similar length, at most `most` tokens each including padding, but at least one text."""
    ordered = sorted(texts, key=lambda text: len(text.token_ids))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end - start + 1) * len(ordered[end].token_ids) > most:
            yield ordered[start:end]
            start = end


@torch.no_grad()
def agreement(target: Any, student: Any, texts: Sequence[OwnText], most: int) -> tuple[float, float]:
    """Along the tokens that the target wrote: (share that are the student's choice, mean sum of min(p, q) at T=1).

    A draft token is tested only if all earlier ones were accepted, so this is the probability that one more is. `most`:
    tokens of a batch, padding included.
    """
    hits = overlap = 0.0
    count = 0
    for batch in batches(texts, most):
        longest = max(len(text.token_ids) for text in batch)
        ids = torch.tensor([t.token_ids + [0] * (longest - len(t.token_ids)) for t in batch], device=student.device)
        places = [(row, c) for row, t in enumerate(batch) for c in range(t.start - 1, len(t.token_ids) - 1)]
        rows, columns = torch.tensor(places, device=student.device).T
        ours, theirs = (model(ids, use_cache=False).logits[rows, columns].float() for model in (target, student))
        hits += float((theirs.argmax(dim=-1) == ids[rows, columns + 1]).sum())
        overlap += float(torch.minimum(ours.softmax(dim=-1), theirs.softmax(dim=-1)).sum())
        count += len(places)
    return hits / max(count, 1), overlap / max(count, 1)
