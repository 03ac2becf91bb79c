"""The reference for checking exported files: logits of transformers in float32 on the probe texts. Needs torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError, ModelFileError
from edgespec.export.request import Format
from edgespec.export.tokens import PROBE_TEXTS, read_tokenizer
from edgespec.installation import install_command, require_engine

MAX_TOKENS = 64  # per text; a row of a 150k vocabulary takes 600 kB
LONG_TOKENS = 256  # of all texts joined, because position errors grow with distance


@dataclass(frozen=True, slots=True)
class Reference:
    """Per probe text the token ids [n] and transformers' float32 logits [n, vocabulary]."""

    token_ids: tuple[NDArray[np.int32], ...]
    logits: tuple[NDArray[np.float32], ...]
    begins_with: int | None
    version: str


def require_packages(formats: tuple[Format, ...], *, torch: bool) -> None:
    """Raise CapabilityError that names the missing packages and the extra to install.

    `torch`: a GGUF is compared with transformers, or the importance of its weights measured by it. What an exporter to
    ONNX needs is up to that (`require_exporter`).
    """
    wanted = ["gguf"] if "gguf" in formats else []
    if torch and "gguf" in formats:
        wanted += ["torch", "transformers", "tokenizers", "safetensors"]
    if "onnx" in formats:
        wanted += ["onnx", "onnxruntime", "tokenizers"]
    if missing := [name for name in wanted if find_spec(name) is None]:
        light = "; --to gguf --no-check needs only gguf and llama.cpp, --to onnx none of these" if torch else ""
        raise CapabilityError(f"this export needs {', '.join(missing)}: {install_command('export')}{light}")
    if "gguf" in formats:
        require_engine("llamacpp", "writing GGUF")


def has_transformers() -> bool:
    """Whether transformers can be the reference."""
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


def reference_of(folder: Path, threads: int | None = None) -> Reference:
    """Run transformers in float32 on the probe texts. Raises CapabilityError and ModelFileError."""
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS.values()]
    with in_transformers(folder, threads) as (torch, transformers, model):
        begins_with = _begin_token(transformers, folder)
        ids = probe_ids(texts, int(getattr(model.config.get_text_config(), "max_position_embeddings", LONG_TOKENS)))
        logits = [model(torch.from_numpy(row[None].astype(np.int64))).logits[0].float().numpy().copy() for row in ids]
    del model
    gc.collect()
    return Reference(tuple(ids), tuple(logits), begins_with, f"transformers {transformers.__version__}")


@contextlib.contextmanager
def in_transformers(folder: Path, threads: int | None) -> Iterator[tuple[Any, Any, Any]]:
    """(torch, transformers, the model of `folder` in float32), without log output.

    Raises CapabilityError if a package is missing, ModelFileError if transformers cannot load the folder.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"this export needs {error.name}: {install_command('export')}, or see --no-check"
        ) from error
    with _quiet(transformers), _torch_threads(torch, threads), torch.inference_mode():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
            ).eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelFileError(f"transformers cannot load {folder}: {error}") from error
        yield torch, transformers, model


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


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress transformers' log messages and progress bars, which would break our own progress display."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


@contextlib.contextmanager
def _torch_threads(torch: Any, threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
