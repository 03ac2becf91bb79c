"""Train an EAGLE head for a small Llama given as GGUF, on text that it writes.

    python scripts/lab/train_head.py write MODEL.gguf --tokenizer tokenizer.json --data DATA --work WORK --minutes 60
    python scripts/lab/train_head.py train MODEL.gguf --work WORK --minutes 60
    python scripts/lab/train_head.py pack MODEL.gguf --tokenizer tokenizer.json --work WORK --output eagle.npz

Needs the extras `train` and `convert`. `write` adds a file of texts with each run, for which it takes the next seed;
`train` goes on from what an earlier one has left. Both take the GPU where there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from head_training.llama import Llama, Weights
from head_training.network import Head
from head_training.packing import write_heads
from head_training.prompts import prompts
from head_training.texts import divided, read, save
from head_training.training import START_TEXTS, Course, Trainer, save_weights
from head_training.writing import Writer

SCORED, ALL = 16_384, 24_576  # tokens that the loss is over, and that have an embedding
PACKED, FREQUENT = 21_000, 8192
READ_LAYERS = (3, 14, 24)
HEAD = "head.pt"


def parsed() -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("write", "train", "pack"))
    parser.add_argument("model", type=Path, help="GGUF of a Llama")
    parser.add_argument("--work", type=Path, required=True, help="texts and checkpoints")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model, such as `edgespec export` writes")
    parser.add_argument("--data", type=Path, help="folder with instructions, gsm8k_train and sgd_train (.jsonl.xz)")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--places", type=int, default=2048 if has_gpu else 128, help="texts written at once")
    parser.add_argument("--room", type=int, default=512, help="tokens of a text (default %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--own", type=float, default=0.5, help="share of prompts that the model makes up (%(default)s)")
    parser.add_argument("--documents", type=float, default=0.0, help="share of prompts about given texts (%(default)s)")
    parser.add_argument("--batch", type=int, default=32_768 if has_gpu else 2048, help="tokens that a step learns from")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens that are learnt (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.006, help="of the matrices (default %(default)s)")
    parser.add_argument("--decay", type=float, default=0.9, help="share of the time in which it falls (%(default)s)")
    parser.add_argument("--state-weight", type=float, default=0.0, help="of the distance of states (%(default)s)")
    parser.add_argument("--ffn", type=int, default=1536)
    parser.add_argument("--packed", type=int, default=PACKED, help="tokens that it can draft (default %(default)s)")
    parser.add_argument("--frequent", type=int, default=FREQUENT, help="of them, always scored (default %(default)s)")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct")
    parser.add_argument("--head", default=HEAD, help="name of the checkpoint (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("eagle.npz"))
    return parser.parse_args()


def tokenizer_of(given: argparse.Namespace) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(given.tokenizer))


def weights_of(given: argparse.Namespace) -> Weights:
    is_fast = given.device != "cpu" or "AVX512" in torch.backends.cpu.get_cpu_capability()
    return Weights(given.model, torch.bfloat16 if is_fast else torch.float32, given.device)


def write(given: argparse.Namespace) -> None:
    seed = len(list(given.work.glob("texts-*.npz")))
    torch.manual_seed(seed)
    given.work.mkdir(parents=True, exist_ok=True)
    target = Llama(weights_of(given), given.places, given.room)
    asked = prompts(given.data, seed, given.own, given.documents)
    writer = Writer(target, given.places, tokenizer_of(given), asked, given.longest, seed)
    texts = writer.write(60 * given.minutes, say)
    save(given.work / f"texts-{seed}.npz", texts)
    print(texts.figures)


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    target, path = weights_of(given), given.work / given.head
    texts, held_out = divided(read(sorted(given.work.glob("texts-*.npz"))))
    print(texts.figures, flush=True)
    before = torch.load(path, map_location=given.device) if path.exists() else None
    counts, said = (torch.from_numpy(each).to(target.device) for each in texts.counts(target.sizes.vocabulary))
    order = torch.argsort(-counts, stable=True)
    all_ids, scored_ids = (torch.sort(order[:count]).values for count in (ALL, SCORED))
    head = Head(target.sizes, target.head[all_ids], all_ids, len(READ_LAYERS), given.ffn)
    trainer = Trainer(head, Llama(target, read_layers=READ_LAYERS), scored_ids, all_ids)
    if before is None:
        trainer.start(texts, random.Random(0).sample(range(len(texts)), min(START_TEXTS, len(texts))))
    else:
        head.load_state_dict(before["head"])
    seen = 0 if before is None else before["runs"]
    course = Course(60 * given.minutes, given.depth, given.rate, given.decay, given.batch, given.state_weight)

    figures: dict[str, float] = {}  # shares of held-out drafts of which so many tokens are accepted

    def keep() -> None:
        kept = {"head": head.state_dict(), "counts": counts, "said": said, "runs": seen + 1, "figures": figures}
        save_weights(path, kept)

    trainer.train(texts, course, say, keep, seed=seen)
    for name in ("greedy", "sampled"):
        shares = trainer.accepted(held_out, is_greedy=name == "greedy")
        say(f"{name}: {shares}")
        figures |= {f"{name}_{place}": share for place, share in enumerate(shares, 1)}
    keep()


def say(text: str) -> None:
    print(text, flush=True)


def pack(given: argparse.Namespace) -> None:
    found = torch.load(given.work / given.head, map_location="cpu")
    sizes = given.packed, given.frequent
    tokenizer, weights, counts = tokenizer_of(given), found["head"], found["counts"]
    learnt = torch.sort(torch.argsort(-counts, stable=True)[:ALL]).values
    # Tokens of a prompt are scored where they occur, so the target's own come first.
    counts = found["said"] * len(counts) + counts
    figures = found.get("figures", {})
    write_heads(given.output, given.model, given.name, weights, learnt, counts, READ_LAYERS, tokenizer, sizes, figures)
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    given = parsed()
    {"write": write, "train": train, "pack": pack}[given.stage](given)
