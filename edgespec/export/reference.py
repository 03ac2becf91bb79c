"""What exported models are compared with: the tokens of probe texts, and what transformers in float32 makes of them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError, ModelFileError, VocabularyMismatch
from edgespec.export.request import Format
from edgespec.installation import install_command, require_engine

MAX_TOKENS = 64  # per text; a row of a 150k vocabulary takes 600 kB
LONG_TOKENS = 256  # of all texts joined, because position errors grow with distance
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
    """Token text by id; empty for missing ids. Raises as `read_tokenizer`."""
    tokenizer = read_tokenizer(folder)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return [tokenizer.id_to_token(index) or "" for index in range(size)]


def check_same_names(target: Sequence[str], draft: Sequence[str]) -> None:
    """Raise VocabularyMismatch, naming the first id whose text differs. Padding at the end may differ."""
    for index, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise VocabularyMismatch(
                f"target and draft have different vocabularies: token {index} is {ours!r} in the target and "
                f"{theirs!r} in the draft. Use a draft of the same model family"
            )


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises ModelFileError if it cannot be read."""
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: save the model's fast tokenizer beside it") from error
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"{path} is not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_round_trip(folder: Path) -> None:
    """Raise ModelFileError if encoding and decoding changes a probe text."""
    tokenizer = read_tokenizer(folder)
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


PROBE_TOKENS = 800  # in all, at most
MOST_LOGITS = 1 << 27  # 512 MB; of a larger vocabulary every second row of logits is compared, or fewer
MOST_ROWS_PER_COMPARED = 32


def rows_per_compared(vocabulary_size: int) -> int:
    """One row of logits in how many is compared, a divisor of MOST_ROWS_PER_COMPARED."""
    step = 1
    while step < MOST_ROWS_PER_COMPARED and PROBE_TOKENS * vocabulary_size > step * MOST_LOGITS:
        step *= 2
    return step


@dataclass(frozen=True, slots=True)
class Reference:
    """Per probe text the token ids [n] and float32 logits [n / step, vocabulary]: one row in `step` is compared."""

    token_ids: tuple[NDArray[np.int32], ...]
    logits: tuple[NDArray[np.float32], ...]
    begins_with: int | None
    version: str
    step: int = 1


def require_packages(formats: tuple[Format, ...], *, torch: bool) -> None:
    """Raise CapabilityError that names the missing packages and the extra to install.

    `torch`: a GGUF is compared with transformers.
    """
    if "gguf" not in formats:
        return
    wanted = ["gguf", *(("torch", "transformers", "safetensors") if torch else ())]
    if missing := [name for name in wanted if find_spec(name) is None]:
        light = "; --to gguf --no-check needs only gguf and llama.cpp, --to onnx none of these" if torch else ""
        raise CapabilityError(f"this export needs {', '.join(missing)}: {install_command('export')}{light}")
    require_engine("llamacpp", "writing GGUF")


def has_transformers() -> bool:
    """Whether transformers can be the reference."""
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


def reference_of(folder: Path, threads: int | None = None) -> Reference:
    """Run transformers in float32 on the probe texts.

    Raises CapabilityError if a package is missing, ModelFileError if transformers cannot load the folder.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"this export needs {error.name}: {install_command('export')}, or see --no-check"
        ) from error
    transformers.utils.logging.set_verbosity_error()  # messages and bars of its own would break our progress display
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = read_tokenizer(folder)
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS.values()]
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelFileError(f"transformers cannot load {folder}: {error}") from error
    ids = probe_ids(texts, int(getattr(model.config.get_text_config(), "max_position_embeddings", LONG_TOKENS)))
    step = rows_per_compared(int(model.config.get_text_config().vocab_size))
    with torch.inference_mode():
        rows = (model(torch.from_numpy(each[None].astype(np.int64))).logits[0] for each in ids)
        logits = tuple(found[::step].float().numpy().copy() for found in rows)
    begins_with = _begin_token(transformers, folder)
    del model
    gc.collect()
    return Reference(tuple(ids), logits, begins_with, f"transformers {transformers.__version__}", step)


def probe_ids(texts: list[list[int]], longest: int) -> list[NDArray[np.int32]]:
    """Each text alone and all texts joined, cut to `longest` tokens."""
    parts = [text[: min(longest, MAX_TOKENS)] for text in texts]
    together = [token_id for text in texts for token_id in text][: min(longest, LONG_TOKENS)]
    return [np.array(part, np.int32) for part in (*parts, together)]


def _begin_token(transformers: Any, folder: Path) -> int | None:
    """The begin-of-text token that the tokenizer adds, or None."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return int(full[0]) if len(full) > len(plain) and full[0] == tokenizer.bos_token_id else None
