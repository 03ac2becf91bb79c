"""Train an EAGLE head or Medusa heads for a Llama, Qwen 2 or 3 or SmolLM3, on text that it writes.

    python scripts/train/heads.py write MODEL --work WORK --data texts.jsonl --minutes 30
    python scripts/train/heads.py train MODEL --work WORK --minutes 30
    python scripts/train/heads.py pack MODEL --work WORK -o heads.npz

MODEL is a GGUF or a Hugging Face folder. `write` adds a file of texts with each run, for which it takes the next seed;
`train` goes on from what an earlier one has left. Both take the GPU where there is one. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor

from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import ConfigError, EdgespecError
from edgespec.formats.head_file import HeadFile, HeadManifest
from trainlib.documents import read_documents
from trainlib.head_files import write_head_file
from trainlib.head_network import EagleHead, Heads, MedusaHeads
from trainlib.head_prompts import Turns, prompts
from trainlib.head_texts import divided, read, save
from trainlib.head_trainer import MEASURED_DEPTH, START_TEXTS, Course, Trainer
from trainlib.head_writing import Writer
from trainlib.llama import Llama, Weights, tokenizer_folder
from trainlib.optimise import save_checkpoint

SCORED, ALL = 16_384, 24_576  # tokens that the loss is over, and that have an embedding
PACKED, FREQUENT = 21_000, 8192
PROBE, PROBE_TOKENS = "The capital of France is Paris, a city on the river Seine in the north.", 12


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("write", "train", "pack"))
    parser.add_argument("model", type=Path, help="GGUF, or folder of a Hugging Face model")
    parser.add_argument("--work", type=Path, required=True, help="folder of texts and checkpoints")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--minutes", type=float, default=60.0)
    group = parser.add_argument_group("write")
    group.add_argument("--data", type=Path, action="append", default=[], help="text, .jsonl, .jsonl.xz; repeatable")
    group.add_argument("--places", type=int, default=2048 if has_gpu else 128, help="texts written at once")
    group.add_argument("--room", type=int, default=512, help="tokens of a text (default %(default)s)")
    group.add_argument("--longest", type=int, default=256, help="tokens of an answer (default %(default)s)")
    group.add_argument("--own", type=float, default=0.5, help="share of prompts that the model makes up (%(default)s)")
    group.add_argument(
        "--about", type=float, default=0.0, help="share of prompts about texts of the data (%(default)s)"
    )
    group = parser.add_argument_group("train")
    group.add_argument("--kind", choices=("eagle", "medusa"), default="eagle")
    group.add_argument("--read-layers", type=_numbers, default=(), metavar="N,N", help="layers whose inputs it reads")
    group.add_argument("--batch", type=int, default=32_768 if has_gpu else 2048, help="tokens that a step learns from")
    group.add_argument("--depth", type=int, default=4, help="drafted tokens that are learnt (default %(default)s)")
    group.add_argument("--rate", type=float, default=0.006, help="of the matrices (default %(default)s)")
    group.add_argument("--decay", type=float, default=0.9, help="share of the time in which it falls (%(default)s)")
    group.add_argument("--state-weight", type=float, default=0.0, help="of the distance of states (%(default)s)")
    group.add_argument("--ffn", type=int, help="inner width of EAGLE's layer (default: 8/3 of its width)")
    group = parser.add_argument_group("pack")
    group.add_argument("--packed", type=int, default=PACKED, help="tokens that it can draft (default %(default)s)")
    group.add_argument("--frequent", type=int, default=FREQUENT, help="of them, always scored (default %(default)s)")
    group.add_argument("-o", "--output", type=Path, default=Path("heads.npz"))
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.split(",")))


def weights_of(given: argparse.Namespace) -> Weights:
    is_fast = given.device != "cpu" or "AVX512" in torch.backends.cpu.get_cpu_capability()
    return Weights(given.model, torch.bfloat16 if is_fast else torch.float32, given.device)


def vocabulary_of(given: argparse.Namespace, size: int) -> TokenizerFile:
    return TokenizerFile(tokenizer_folder(given.model, given.work), size)


def write(given: argparse.Namespace) -> None:
    given.work.mkdir(parents=True, exist_ok=True)
    seed = len(list(given.work.glob("texts-*.npz")))
    torch.manual_seed(seed)
    documents = read_documents(given.data)
    weights = weights_of(given)
    vocabulary = vocabulary_of(given, weights.config.vocab_size)
    asked = prompts(Turns(vocabulary), documents, seed, given.own, given.about)
    target = Llama(weights, given.places, given.room)
    texts = Writer(target, given.places, vocabulary, asked, given.longest, seed).write(60 * given.minutes, say)
    save(given.work / f"texts-{seed}.npz", texts)
    print(texts.figures)


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    path = given.work / f"{given.kind}.pt"
    files = sorted(given.work.glob("texts-*.npz"))
    if not files:
        raise ConfigError(f"{given.work} has no texts: run the stage write first")
    texts, held_out = divided(read(files))
    print(texts.figures, flush=True)
    target = weights_of(given)
    before = torch.load(path, map_location=given.device) if path.exists() else None
    layers = given.read_layers if before is None else before["layers"]
    if layers and layers[-1] >= target.config.num_layers:
        raise ConfigError(f"--read-layers {layers[-1]}: the model has layers 0..{target.config.num_layers - 1}")
    counts, said = (torch.from_numpy(each).to(target.device) for each in texts.counts(target.config.vocab_size))
    order = torch.argsort(-counts, stable=True)
    all_ids, scored_ids = (torch.sort(order[:count]).values for count in (ALL, SCORED))
    heads = new_heads(given, target, all_ids, len(layers))
    trainer = Trainer(heads, Llama(target, read_layers=layers), scored_ids, all_ids)
    if before is None:
        trainer.start(texts, random.Random(0).sample(range(len(texts)), min(START_TEXTS, len(texts))))
    else:
        heads.load_state_dict(before["heads"])
    seen = 0 if before is None else before["runs"]
    course = Course(60 * given.minutes, given.depth, given.rate, given.decay, given.batch, given.state_weight)
    figures: dict[str, float] = {}  # shares of held-out drafts of which so many tokens are accepted

    def keep() -> None:
        kept = {"heads": heads.state_dict(), "counts": counts, "said": said, "runs": seen + 1, "figures": figures}
        save_checkpoint({**kept, "layers": layers, "depth": given.depth}, path)

    trainer.train(texts, course, say, keep, seed=seen)
    for name in ("greedy", "sampled"):
        shares = trainer.accepted(held_out, is_greedy=name == "greedy", depth=min(given.depth, MEASURED_DEPTH))
        say(f"{name}: {shares}")
        figures |= {f"{name}_{place}": share for place, share in enumerate(shares, 1)}
    keep()


def new_heads(given: argparse.Namespace, target: Weights, token_ids: Tensor, num_inputs: int) -> Heads:
    rows = target.head[token_ids]
    if given.kind == "medusa":
        return MedusaHeads(target.config, rows, token_ids, num_inputs, given.depth)
    ffn = given.ffn or target.config.hidden_size * 8 // 3
    return EagleHead(target.config, rows, token_ids, num_inputs, ffn)


def say(text: str) -> None:
    print(text, flush=True)


def pack(given: argparse.Namespace) -> None:
    path = given.work / f"{given.kind}.pt"
    if not path.exists():
        raise ConfigError(f"{path} is missing: run the stage train with --kind {given.kind} first")
    trained = torch.load(path, map_location="cpu")
    target = Weights(given.model, torch.float32)
    vocabulary = vocabulary_of(given, target.config.vocab_size)
    probe = vocabulary.encode(PROBE)[:PROBE_TOKENS]
    file = head_file(given.kind, trained, target, given.model, probe, (given.packed, given.frequent))
    write_head_file(given.output, file)
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")


def head_file(
    kind: Any, trained: Mapping[str, Any], target: Weights, source: Path, probe: list[int], sizes: tuple[int, int]
) -> HeadFile:
    """Trained heads in the format of the runtime. `sizes`: tokens that can be drafted, of them always scored."""
    learnt_ids = torch.sort(torch.argsort(-trained["counts"], stable=True)[:ALL]).values
    # Tokens of a prompt are scored where they occur, so the target's own come first.
    counts = trained["said"] * len(trained["counts"]) + trained["counts"]
    order = torch.argsort(-counts, stable=True)
    ids, frequent = torch.sort(order[: sizes[0]]).values, set(order[: sizes[1]].tolist())
    places = np.array([place for place, token in enumerate(ids.tolist()) if token in frequent], np.int32)
    states, _ = Llama(target, read_layers=trained["layers"], is_scaled=False).read(torch.tensor([probe]))
    arrays = {name: weight.float().numpy() for name, weight in trained["heads"].items()}
    # Embeddings are rows of unit size on average over the vocabulary, which is a smaller one now.
    shrunk = target.head[ids].square().mean().sqrt() / target.head[learnt_ids].square().mean().sqrt()
    if kind == "eagle":
        arrays["fc"][:, target.config.hidden_size :] *= float(shrunk)
    else:
        for head in range(trained["depth"]):
            arrays[f"weight.{head}.0"] = weights = arrays.pop(f"weights.{head}")
            arrays[f"bias.{head}.0"] = arrays.pop(f"biases.{head}")
            weights[:, target.config.hidden_size :] *= float(shrunk)
    return HeadFile(
        _manifest(kind, trained, target, source, arrays),
        arrays,
        target.head[ids].numpy(),
        ids.numpy().astype(np.int32),
        np.asarray(probe, np.int32),
        states[0].float().numpy(),
        places if len(frequent) < len(ids) else None,
    )


def _manifest(
    kind: Any, trained: Mapping[str, Any], target: Weights, source: Path, arrays: Mapping[str, Any]
) -> HeadManifest:
    config, layer = target.config, dict[str, Any]()
    if kind == "eagle":
        layer = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        layer |= {"ffn": len(arrays["gate_proj"]), "rope_theta": config.rope_theta, "norm_eps": config.norm_epsilon}
    else:
        layer = {"blocks": 1}
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    return HeadManifest(
        kind=kind,
        depth=trained["depth"],
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        target=source.stem if source.is_file() else source.resolve().name,
        target_sha256=_sha256(files),
        layers=tuple(trained["layers"]),
        figures=trained["figures"],
        **layer,
    )


def _sha256(files: Sequence[Path]) -> str:
    """Of a file; of several, over theirs."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256"))
    return (
        digests[0].hexdigest()
        if len(digests) == 1
        else hashlib.sha256(b"".join(d.digest() for d in digests)).hexdigest()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    try:
        {"write": write, "train": train, "pack": pack}[given.stage](given)
    except EdgespecError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
