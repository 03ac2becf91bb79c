"""Prompts that fill a gap: the text before it, the text behind it and other files, between the model's FIM tokens.

In llama-server's order: other files, what is before the gap, what is behind it, then the token behind which the model
writes. The texts are a user's files: control tokens that they spell out are read as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.server.http_errors import HttpError
from edgespec.server.service import Loaded
from edgespec.vocabulary import FimTokens, Vocabulary

_REPOSITORY, _FILE, _SNIPPET = "repository\n", "file\n", "\n\n--- snippet ---\n\n"
_PREFIX_SHARE = 0.75  # of the room, for the text before a gap where both texts are too long


@dataclass(frozen=True, slots=True)
class ExtraFile:
    """Another file, or a part of one, that is shown before the gap."""

    name: str
    text: str


def require_fim(loaded: Loaded, where: str) -> FimTokens:
    """The model's FIM tokens. Raises HttpError 501, which names the field `where`, for a model without them."""
    found = loaded.model.target.vocabulary.fim
    if found is None:
        raise HttpError(
            501,
            f"{where}: this model cannot fill a gap: its vocabulary has no tokens for prefix, suffix and middle, as "
            "those of models of code have (Qwen2.5-Coder, StarCoder2, Granite, DeepSeek-Coder, CodeLlama)",
            param=where,
            code="not_supported",
        )
    return found


def fill_prompt(
    vocabulary: Vocabulary,
    tokens: FimTokens,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    files: Sequence[Sequence[int]] = (),
) -> list[int]:
    """The prompt after which the model writes what is between `prefix_ids` and `suffix_ids`.

    `files`: other files, each encoded by `encoded_file`.
    """
    found = [vocabulary.bos_id] if vocabulary.adds_bos and vocabulary.bos_id is not None else []
    if files and tokens.repository is not None:
        found += [tokens.repository, *vocabulary.encode(_REPOSITORY)]
    for file_ids in files:
        found += file_ids
    if files and tokens.file is not None:
        found += [tokens.file, *vocabulary.encode(_FILE)]
    return [*found, tokens.prefix, *prefix_ids, tokens.suffix, *suffix_ids, tokens.middle]


def fitted(
    vocabulary: Vocabulary,
    tokens: FimTokens,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    files: Sequence[ExtraFile],
    room: int,
) -> tuple[list[int], bool]:
    """(`fill_prompt` in at most `room` tokens, whether anything had to be left out for that).

    What is nearest to the gap is kept: first the texts around it, then whole files, the last ones before the others.
    """
    around = room - len(fill_prompt(vocabulary, tokens, [], []))
    is_cut = len(prefix_ids) + len(suffix_ids) > around
    if is_cut:
        num_before = min(len(prefix_ids), max(int(_PREFIX_SHARE * around), around - len(suffix_ids)))
        prefix_ids = prefix_ids[len(prefix_ids) - num_before :]
        suffix_ids = suffix_ids[: around - num_before]
    rest = room - len(fill_prompt(vocabulary, tokens, prefix_ids, suffix_ids, [[]]))
    encoded = [encoded_file(vocabulary, tokens, file) for file in files]
    kept: list[list[int]] = []
    while encoded and len(encoded[-1]) <= rest:
        kept.insert(0, encoded.pop())
        rest -= len(kept[0])
    return fill_prompt(vocabulary, tokens, prefix_ids, suffix_ids, kept), is_cut or bool(encoded)


def encoded_file(vocabulary: Vocabulary, tokens: FimTokens, file: ExtraFile) -> list[int]:
    """A file as models read those of a repository, behind its name; without a token for that, behind a line."""
    if tokens.file is None:
        return vocabulary.encode(_SNIPPET + file.text)
    text = file.text if file.text.endswith("\n") else file.text + "\n"
    return [tokens.file, *vocabulary.encode(f"{file.name}\n{text}")]
