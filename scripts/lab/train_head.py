"""Train an EAGLE head for a small Llama given as GGUF, on text that it writes.

    python scripts/lab/train_head.py write MODEL.gguf --tokenizer tokenizer.json --data DATA --work WORK --minutes 60
    python scripts/lab/train_head.py train MODEL.gguf --work WORK --minutes 14 --depth 1 --rate .003 --decay .1
    python scripts/lab/train_head.py train MODEL.gguf --work WORK --minutes 35 --depth 3 --rate .002 --decay .8
    python scripts/lab/train_head.py pack MODEL.gguf --tokenizer tokenizer.json --work WORK --output eagle.npz

Needs the extras `train` and `convert`, and 5 KB of disk for a token. `write` adds a folder of texts with each run, for
which it takes the next seed; `train` goes on from what an earlier one has left. For SmolLM2-135M on two cores with
bfloat16: 350 tokens of answers a second, 1,300 drafts learnt a second with depth 1, 700 with depth 3.
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
from head_training.texts import counts_of, figures_of, read
from head_training.training import START_TEXTS, Course, Trainer, save_weights
from head_training.writing import Writer

PLACES, ROOM, LONGEST = 160, 384, 256
SCORED, ALL = 12_288, 24_576  # tokens that the loss is over, and that have an embedding
PACKED, FREQUENT = 24_576, 8192
READ_LAYERS = (3, 14, 24)
HEAD = "head.pt"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("write", "train", "pack"))
    parser.add_argument("model", type=Path, help="GGUF of a Llama")
    parser.add_argument("--work", type=Path, required=True, help="texts and checkpoints")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model, such as `edgespec export` writes")
    parser.add_argument("--data", type=Path, help="folder with instructions, gsm8k_train and sgd_train (.jsonl.xz)")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--depth", type=int, default=3, help="drafted tokens that are learnt (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.002, help="of the matrices (default %(default)s)")
    parser.add_argument("--decay", type=float, default=0.8, help="share of the time in which it falls (%(default)s)")
    parser.add_argument("--ffn", type=int, default=1536)
    parser.add_argument("--name", default="SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("eagle.npz"))
    return parser.parse_args()


def tokenizer_of(given: argparse.Namespace) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(given.tokenizer))


def write(given: argparse.Namespace) -> None:
    seed = len(list(given.work.glob("texts-*")))
    torch.manual_seed(seed)
    target = Llama(Weights(given.model), PLACES, ROOM, READ_LAYERS)
    writer = Writer(target, PLACES, tokenizer_of(given), given.work / f"texts-{seed}", LONGEST, seed)
    writer.write(given.data, seed, 60 * given.minutes)
    print(f"{writer.num_written} tokens of answers")


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    target, path = Weights(given.model), given.work / HEAD
    texts, held_out = read(sorted(given.work.glob("texts-*")), target.sizes.hidden * (len(READ_LAYERS) + 1))
    print(figures_of(texts))
    before = torch.load(path) if path.exists() else None
    counts = torch.from_numpy(counts_of(texts, target.sizes.vocabulary)) if before is None else before["counts"]
    order = torch.argsort(-counts, stable=True)
    all_ids, scored_ids = (torch.sort(order[:count]).values for count in (ALL, SCORED))
    head = Head(target.sizes, target.head[all_ids], all_ids, len(READ_LAYERS), given.ffn)
    trainer = Trainer(head, target.head[scored_ids], target.head[all_ids], all_ids, target.head)
    if before is None:
        trainer.start(random.Random(0).sample(texts, min(START_TEXTS, len(texts))))
    else:
        head.load_state_dict(before["head"])
    seen = 0 if before is None else before["runs"]
    course = Course(60 * given.minutes, given.depth, given.rate, given.decay)

    def save() -> None:
        save_weights(path, {"head": head.state_dict(), "counts": counts, "runs": seen + 1})

    trainer.train(texts, course, print, save, seed=seen)
    save()
    for is_greedy in (True, False):
        print("greedy:" if is_greedy else "sampled:", trainer.accepted(held_out, is_greedy=is_greedy))


def pack(given: argparse.Namespace) -> None:
    found = torch.load(given.work / HEAD)
    sizes = PACKED, FREQUENT
    tokenizer, weights, counts = tokenizer_of(given), found["head"], found["counts"]
    write_heads(given.output, given.model, given.name, weights, counts, READ_LAYERS, tokenizer, sizes, {})
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    given = parsed()
    {"write": write, "train": train, "pack": pack}[given.stage](given)
