"""Tokenizers of model folders: token texts by id, and round-trip checks on probe texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, VocabularyMismatch

PROBE_TEXTS = {
    "prose": "The quick brown fox didn't jump over the lazy dog; it's raining, and WE'LL wait till morning.",
    "dialogue": "Hello! I'd like to book a table for four people at seven o'clock tonight. Is that possible?\nYes.",
    "code": 'def area(radius: float) -> float:\n    """Of a circle."""\n    return 3.14159 * radius**2  # pi\n\n\n',
    "digits": "In 2024, 1234567 + 89 = 1234656; 50% of 3.50 is 1.75, and 1,000,000 - 1 = 999999. Call 555-0142.",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "scripts": "天地玄黄。宇宙洪荒、日本語のテキスト。 مرحبا بالعالم नमस्ते दुनिया Ελληνικά 한국어",
    "emoji": "Well done 👍🏽 🎉 family 👩‍👩‍👧‍👦 flag 🇫🇷 ok™ naïve café — “quoted” … ½",
    "layout": "a  b   c\n\n\tindented\n    four spaces\r\nend of line   \n- item\n1. first",
}


def token_names(folder: Path) -> list[str]:
    """Token text by id, from tokenizer.json; empty for missing ids. Raises ModelFileError."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of text and score
            ids = {index: str(entry[0]) for index, entry in enumerate(vocabulary)}
        else:
            ids = {int(index): str(text) for text, index in vocabulary.items()}
        ids |= {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens") or ()}
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: save the model's fast tokenizer beside it") from error
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelFileError(f"{path} is not a tokenizer of the tokenizers library: {error!r}") from error
    return [ids.get(index, "") for index in range(max(ids, default=-1) + 1)]


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raise VocabularyMismatch, naming the first id whose text differs in two model folders. Padding may differ."""
    check_same_names(token_names(target), token_names(draft))


def check_same_names(target: Sequence[str], draft: Sequence[str]) -> None:
    """`check_same_tokens` of the texts by id."""
    for index, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise VocabularyMismatch(
                f"target and draft have different vocabularies: token {index} is {ours!r} in the target and "
                f"{theirs!r} in the draft. Use a draft of the same model family, or --derive one from the target"
            )


def read_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer; None if the library is not installed. Raises ModelFileError if it cannot be read."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        return None
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"{path} is not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_round_trip(folder: Path) -> None:
    """Raise ModelFileError if encoding and decoding changes a probe text. Does nothing without `tokenizers`."""
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        return
    for kind, text in PROBE_TEXTS.items():
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back not in (text, f" {text}"):  # SentencePiece tokenizers add a leading space
            raise ModelFileError(
                f"the tokenizer of {folder} does not round-trip text ({kind}): {_first_difference(text, back)}; "
                "models with such a tokenizer cannot be exported"
            )


def _first_difference(wanted: str, found: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    return f"{wanted[max(at - 8, 0) : at + 12]!r} became {found[max(at - 8, 0) : at + 12]!r}"
