"""Checks that an exported file is the same model as its source: compares its logits with those of a reference.

The reference is transformers in float32 where it is installed and the source is its folder, else llama.cpp on the GGUF
that everything is made of. It runs first and is freed before an engine opens the file, so that both are never in memory
together. Both get the same token ids, so tokenizer errors and weight errors are detected separately.

Limits by quantisation, on the probe texts one behind the other, are in `_LIMITS`. A file that was only converted must
keep to those of its type; one that was quantised is refused beyond `ABSURD`, and otherwise told: its type may lose more
of this model than of most. Where llama.cpp on a quantised file is the reference, the limits are at least those of that
file's type, since llama.cpp rounds inputs to 8 bits there. Top-1 agreement counts only positions where the reference's
best logit leads by a tenth of the logits' standard deviation, since any rounding may change a near-tie. The first token
is left out: where a model has no begin-of-text token, it becomes the attention sink, whatever it is, and what a model
makes of it alone is used by nobody. llama.cpp is off by 3 to 9 nats there on Qwen2.5-Coder 1.5B Q4_K_M, and by .02
elsewhere.

Measured on the demo target (KL, agreement): f32 0 and 1.00, f16 6e-7 and 1.00, bf16 8e-5 and 1.00, q8_0 and int8 9e-4
and 1.00, q6_k 0.007 and 1.00, int4 0.05 and 0.97, q4_k_m 0.06 and 0.96, q3_k_m 0.13 and 0.91. On
its draft with 0.9 M parameters, agreement falls to 0.90 with q5_k_m, 0.84 with int4 and 0.83 with iq4_nl. A rotary base
that is wrong by a factor of two gives KL 0.06, queries in the wrong order 1.0: faults that 4 bits would hide, and that
the 16-bit file of the same conversion shows, which is compared, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError
from edgespec.export.request import Format
from edgespec.installation import install_command, require_engine
from edgespec.types import Batch

DECIDED = 0.1  # of the logits' standard deviation
CHECK_CONTEXT = 320  # tokens that are compared; logits of a vocabulary of 262k tokens take 335 MB
ROWS = 32  # of a pass
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


class ExportRefused(EdgespecError):
    """An exported file differs from the model it was made from."""


@dataclass(frozen=True, slots=True)
class AllowedDifference:
    """Allowed differences; `max_kl` in nats."""

    min_agreement: float
    max_kl: float


_LIMITS = {
    ("f32", "fp32"): AllowedDifference(0.99, 1e-4),
    ("f16", "bf16"): AllowedDifference(0.98, 0.001),
    ("q8_0", "int8"): AllowedDifference(0.97, 0.005),
    ("q6_k",): AllowedDifference(0.95, 0.02),
    ("q5",): AllowedDifference(0.85, 0.1),
    ("q4", "iq4", "int4"): AllowedDifference(0.60, 0.4),
}
ABSURD = AllowedDifference(0.40, 1.5)  # and what types below 4 bits may lose


def limits_of(*quants: str) -> AllowedDifference:
    """The widest limits of some quantisations."""
    found = (next((limits for begins, limits in _LIMITS.items() if each.startswith(begins)), ABSURD) for each in quants)
    return max(found, key=lambda limits: limits.max_kl)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences over `num_tokens` positions; `mean_kl` in nats."""

    num_tokens: int
    top1_agreement: float
    mean_kl: float

    def figures(self) -> dict[str, float]:
        """By name, in four digits."""
        return {key: float(f"{value:.4g}") for key, value in asdict(self).items()}

    def complaint(self, limits: AllowedDifference) -> str:
        """The exceeded limits as text; empty if there are none."""
        wrong = []
        # `not a <= b` rather than `a > b`, so that NaN fails
        if not self.top1_agreement >= limits.min_agreement:
            wrong.append(f"top-1 agreement is {self.top1_agreement:.3f} (limit {limits.min_agreement:g})")
        if not self.mean_kl <= limits.max_kl:
            wrong.append(f"mean KL is {self.mean_kl:.3g} nats (limit {limits.max_kl:g})")
        return ", ".join(wrong)


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Token ids [n] of the probe texts, and the float32 logits [n, vocabulary] that are right for them."""

    token_ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    version: str


def compare(reference: ReferenceLogits, engine: Engine) -> Comparison:
    """Compare an open engine with the reference."""
    return compare_logits(reference.logits, _logits_of(engine, reference.token_ids))


def compare_logits(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> Comparison:
    """Compare logits [n, vocabulary], without the first row; either vocabulary may be padded."""
    width = min(found.shape[1], wanted.shape[1])
    rows = [_compare_row(*rows) for rows in zip(wanted[1:, :width], found[1:, :width], strict=True)]
    agreed = [agrees for _, agrees in rows if agrees is not None]
    agreement = float(np.mean(agreed)) if agreed else 1.0
    return Comparison(len(wanted), agreement, float(np.mean([divergence for divergence, _ in rows])))


def _compare_row(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> tuple[float, bool | None]:
    """KL divergence, and whether the best token is equal; None where it has no clear lead."""
    p, q = (np.subtract(row, row.max(), dtype=np.float64) for row in (wanted, found))
    weights = np.exp(p)
    total = weights.sum()
    divergence = float(weights @ (p - q) / total - np.log(total) + np.log(np.exp(q).sum()))
    second, best = np.partition(wanted, -2)[-2:]
    is_decided = best - second >= DECIDED * wanted.std(dtype=np.float64)
    return divergence, bool(found.argmax() == wanted.argmax()) if is_decided else None


def open_engine(wanted: Format, path: Path, context_length: int, threads: int | None) -> Engine:
    """Open a file in edgespec's engine with its most exact settings. Raises the errors of the engine's `load`."""
    if wanted == "gguf":
        from edgespec.engines.llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine.load(
            path,
            context_length=context_length,
            threads=threads,
            cache_type_k="f32",
            cache_type_v="f32",
            flash_attention=False,
            reproducible=False,
            check_tensors=True,
        )
    from edgespec.engines.onnx import OnnxEngine

    return OnnxEngine.load(path, context_length=context_length, threads=threads, reproducible=False)


def _logits_of(engine: Engine, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    engine.rollback(0)
    parts = (token_ids[start : start + ROWS] for start in range(0, token_ids.size, ROWS))
    return np.concatenate([engine.forward(Batch.chain(part)).copy() for part in parts])


# the references


def engine_reference(engine: Engine, name: str) -> ReferenceLogits:
    """What an open engine makes of the probe texts."""
    ids = _joined((engine.vocabulary.encode(text) for text in PROBE_TEXTS.values()), engine.facts.context_length)
    return ReferenceLogits(ids, _logits_of(engine, ids), name)


def require_packages(formats: tuple[Format, ...], *, torch: bool) -> None:
    """Raise CapabilityError that names the missing packages and the extra to install.

    `torch`: a GGUF is compared with transformers.
    """
    with_torch = torch and "gguf" in formats
    wanted = ["gguf", *(("torch", "transformers", "safetensors") if with_torch else ())]
    if missing := [name for name in wanted if find_spec(name) is None]:
        light = "; --to gguf --no-check needs only gguf and llama.cpp, --to onnx only gguf" if with_torch else ""
        extra = "export" if with_torch else "convert"
        raise CapabilityError(f"this export needs {', '.join(missing)}: {install_command(extra)}{light}")
    if "gguf" in formats:
        require_engine("llamacpp", "writing GGUF")


def has_transformers() -> bool:
    """Whether transformers can be the reference."""
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


def reference_of(folder: Path, threads: int | None = None) -> ReferenceLogits:
    """Run transformers in float32 on the probe texts. Raises ModelFileError if it cannot load the folder."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()  # messages and bars of its own would break our progress display
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer = read_tokenizer(folder)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelFileError(f"transformers cannot load {folder}: {error}") from error
    texts = (tokenizer.encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS.values())
    ids = _joined(texts, int(getattr(model.config.get_text_config(), "max_position_embeddings", CHECK_CONTEXT)))
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].float().numpy().copy()
    del model
    gc.collect()
    return ReferenceLogits(ids, logits, f"transformers {transformers.__version__}")


def _joined(texts: Iterable[list[int]], longest: int) -> NDArray[np.int32]:
    """One behind the other, because position errors grow with distance."""
    return np.array([token_id for text in texts for token_id in text][: min(longest, CHECK_CONTEXT)], np.int32)


# tokenizers of folders


def token_names(folder: Path) -> list[str]:
    """Token text by id; empty for missing ids. Raises as `read_tokenizer`."""
    tokenizer = read_tokenizer(folder)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return [tokenizer.id_to_token(index) or "" for index in range(size)]


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
                f"the tokenizer of {folder} does not round-trip text ({kind}): {text[:40]!r} became {back[:40]!r}; "
                "models with such a tokenizer cannot be exported"
            )
