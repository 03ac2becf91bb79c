"""Checks that a GGUF tokenises text like its Hugging Face folder: llama.cpp silently accepts a wrong pre-tokenizer.

Three known differences of llama.cpp are ignored: it does not compose characters (NFC), with Metaspace tokenizers
(newer Mistral) it adds a space before text that begins with one or follows a special token, and with the splitters
"tekken" and "gpt-4o" (Mistral Nemo, Llama 4) it ends a word at a combining mark, as in Hindi.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.gguf.tokenizer import adds_bos, read_settings
from edgespec.export.tokens import read_tokenizer
from edgespec.formats.gguf.tokenizer import SPLIT_AT_MARKS, flatten, is_spm, pre_tokenizer_name
from edgespec.formats.hub_folder import read_json
from edgespec.installation import install_command

PROBES = (
    "Hello, world! It's the 1st of 12345678 days; we'll see, I'VE said.",
    "  two spaces,   three,\ttab\t\ttabs, end  ",
    "line\nline\n\nparagraph\r\n\r\n  indented\n\n\n",
    "def f(x: int) -> str:\n    return f'{x!r}'  # 3.14e-10\n",
    "CamelCaseHTTPServer snake_case_name kebab-case 0x1F",
    "Žluťoučký kůň, naïve café, Straße, ÅNGSTRÖM",
    "Съешь ещё этих мягких булок",
    "敏捷的棕色狐狸跳过了懒狗。日本語のテキスト、한국어 텍스트",
    "نص عربي ١٢٣ עברית हिन्दी ไทย",
    "emoji 🙂👩‍👩‍👧🏽 ½ ² Ⅷ €100 £5 — “quotes” …",
    "<tag attr='v'>&amp;</tag> [INST] {{ x }} $%^&*()_+|~`",
    "a",
)
SAMPLED_TOKENS = 400
SAMPLED_SPECIALS = 8


def check_tokenizer(folder: Path, gguf_path: Path) -> int:
    """Check all probe texts; returns their number.

    Raises ModelFileError, naming the first text that differs, and CapabilityError without the package tokenizers.
    """
    theirs, source = read_tokenizer(folder), read_json(folder / "tokenizer.json")
    if theirs is None:
        raise CapabilityError(f"checking a tokenizer needs the package tokenizers: {install_command()}")
    with VocabularyFile(gguf_path) as ours:
        checked = 0
        for text in probes(theirs, source, ours.size):
            wanted, given = theirs.encode(text, add_special_tokens=False).ids, ours.encode(text, parse_special=True)
            if wanted != given:
                raise ModelFileError(
                    f"{gguf_path} does not tokenise as {folder}: {text[:80]!r} becomes {given[:12]}, "
                    f"expected {wanted[:12]}. This tokenizer is not supported"
                )
            checked += 1
        wants_bos = adds_bos(source, read_settings(folder))
        if wants_bos != ours.adds_bos:
            raise ModelFileError(f"{gguf_path}: add_bos is {ours.adds_bos}, {folder} says {wants_bos}")
    return checked


def probes(tokenizer: Any, source: dict[str, Any], vocab_size: int) -> Iterator[str]:
    """The probe texts: fixed ones, single tokens of the vocabulary, and texts around special tokens."""
    splitters = [node.get("type") for node in flatten(source.get("pre_tokenizer"), "pretokenizers")]
    composes = bool(flatten(source.get("normalizer"), "normalizers"))
    has_metaspace = "Metaspace" in splitters
    splits_marks = not is_spm(source) and pre_tokenizer_name(source) in SPLIT_AT_MARKS
    size = min(tokenizer.get_vocab_size(with_added_tokens=False), vocab_size)
    sampled = range(0, size, max(size // SAMPLED_TOKENS, 1))
    tokens = (tokenizer.decode([index], skip_special_tokens=False) for index in sampled)
    for text in (*PROBES, *tokens):
        is_whole = text and "\ufffd" not in text
        is_stable = not composes or unicodedata.normalize("NFC", text) == text
        is_split = splits_marks and any(unicodedata.category(letter).startswith("M") for letter in text)
        if is_whole and is_stable and not is_split and not (has_metaspace and text.startswith(" ")):
            yield text
    if has_metaspace:
        return
    for added in source.get("added_tokens", [])[:SAMPLED_SPECIALS]:
        if added["id"] < vocab_size and added["special"]:
            yield f"{added['content']}Hello{added['content']}\nworld"
