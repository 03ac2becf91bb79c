"""An expanded model as a Hugging Face folder, for exporters, and one with noise in its head."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.bench.expanded_tensors import Floats, TensorPlan
from edgespec.bench.expansion import Expansion
from edgespec.errors import ModelFileError
from edgespec.formats.manifest import sha256_of
from edgespec.platform.files import atomic_file, write_atomically

Progress = Callable[[int, int, str], None]

FORMAT = 4  # part of the fingerprint: a change of what is written makes older files stale
PLAN_FILE = "expansion.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class NoisyExpansion(Expansion):
    """`sigma` adds that many deviations of noise to the head's real weights."""

    sigma: float = 0.0

    @property
    def is_tied(self) -> bool:
        """Noise in the head must not reach the embedding, so it unties them."""
        return super().is_tied and not self.sigma

    def tables(self) -> dict[str, Floats]:
        if self.is_tied:
            return super().tables()
        embedding = self.small.weights("model.embed_tokens.weight")
        is_shared = self.small.config.get("tie_word_embeddings")
        head = embedding if is_shared else self.small.weights("lm_head.weight")
        noise = np.random.default_rng([self.seed, 1]).standard_normal(head.shape, np.float32)
        noisy: Floats = head + np.float32(self.sigma * head.std()) * noise
        return {"model.embed_tokens.weight": embedding, "lm_head.weight": noisy}

    def fingerprint(self) -> str:
        """What the files depend on, as a hash."""
        files = sorted((*self.small.folder.glob("model*.safetensors"), self.small.folder / "config.json"))
        parts = [FORMAT, asdict(self.shape), self.seed, self.sigma, [sha256_of(file) for file in files]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def expand(expansion: NoisyExpansion, output: Path, progress: Progress | None = None) -> Path:
    """Write the big model as a Hugging Face folder: matrices float16, norms float32; memory stays at a few row blocks.

    Files that an interrupted run with the same settings finished are kept; config.json comes last, so a folder that has
    it is whole. Raises ModelFileError when the small model does not fit the shape.
    """
    output.mkdir(parents=True, exist_ok=True)
    wanted = expansion.fingerprint()
    plan_file = output / PLAN_FILE
    if not plan_file.is_file() or plan_file.read_text(encoding="utf-8") != wanted:
        for stale in (*output.glob("model*.safetensors*"), output / "config.json"):
            stale.unlink(missing_ok=True)
        write_atomically(plan_file, wanted)
    total = expansion.shape.num_layers + 1
    weight_map: dict[str, str] = {}
    for number, plans in enumerate(expansion.shards(), 1):
        path = output / f"model-{number:05}-of-{total:05}.safetensors"
        if progress is not None:
            progress(number - 1, total, path.name)
        if not path.exists():
            write_shard(path, plans, expansion.seed)
        weight_map |= dict.fromkeys((plan.name for plan in plans), path.name)
    for name in TOKENIZER_FILES:
        if (expansion.small.folder / name).is_file():
            shutil.copyfile(expansion.small.folder / name, output / name)
    size = sum(path.stat().st_size for path in output.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_atomically(output / "model.safetensors.index.json", json.dumps(index, indent=1))
    write_atomically(output / "config.json", json.dumps(expansion.config(), indent=2) + "\n")
    if progress is not None:
        progress(total, total, "done")
    return output


def _dtype(shape: Sequence[int]) -> np.dtype[Any]:
    return np.dtype("<f2") if len(shape) == 2 else np.dtype("<f4")


def write_shard(path: Path, plans: Iterable[TensorPlan], seed: int) -> None:
    """One safetensors file of expanded tensors."""
    by_name = {plan.name: plan for plan in plans}
    shapes = {name: plan.shape for name, plan in by_name.items()}
    write_tensors(path, shapes, lambda name: by_name[name].blocks(seed))


def write_tensors(path: Path, shapes: Mapping[str, Sequence[int]], blocks: Callable[[str], Iterable[Floats]]) -> None:
    """One safetensors file, row block by row block: eight bytes of header length, the header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * _dtype(shape).itemsize
        kind = "F16" if _dtype(shape).itemsize == 2 else "F32"
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for block in blocks(name):
                stored = block.astype(_dtype(shape))
                if not np.isfinite(stored).all():
                    raise ModelFileError(f"a weight of {name} is too large for float16")
                file.write(stored.tobytes())


def genai_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What onnxruntime-genai wants to know of a graph of edgespec's own, given its config.json."""
    names = {
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
        "outputs": {"logits": "logits"},
    }
    for part in ("key", "value"):
        names["inputs"][f"past_{part}_names"] = f"past_key_values.%d.{part}"
        names["outputs"][f"present_{part}_names"] = f"present.%d.{part}"
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": config["head_dim"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_key_value_heads": config["num_key_value_heads"],
        **names,
    }
    length = config["max_position_embeddings"]
    return {
        "model": {
            "type": "llama",
            "vocab_size": config["vocab_size"],
            "context_length": length,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "decoder": decoder,
        },
        "search": {"max_length": length, "past_present_share_buffer": True},
    }
