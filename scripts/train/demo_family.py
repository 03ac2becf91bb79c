"""Train the demo family from scratch and pack it: tokenizer, target, two students, acceptance. Resumable.

    python scripts/train/demo_family.py --data DATA --work WORK

DATA holds sgd_train.jsonl.xz, sgd_dev.jsonl.xz and gsm8k_train.jsonl.xz. Each stage leaves files in WORK:
tokenizer.json, target.pt, hf/target, hf/draft and hf/medium. `pack` writes what ships.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import Tokenizer

from distill import Plan, distill
from edgespec.export.gguf.convert import convert, own_precision
from edgespec.export.onnx.writer import convert_gguf, open_gguf
from edgespec.formats.manifest import ModelFile, write_manifest
from edgespec.loading.download import checksummed
from edgespec.loading.registry import GRAPH
from edgespec.platform.files import atomic_file
from trainlib import demo_texts as texts
from trainlib.demo_network import BatchSchedule, TokenStream, network_config, pretrain, split_documents
from trainlib.hub import Target, agreement, save_model

STAGES = ("tokenizer", "target", "distill", "pack")
TARGET = network_config(256, 768, layers=9, heads=4, kv_heads=2)
STUDENTS = {
    "draft": {"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 384},
    "medium": {"layers": 5, "hidden": 192, "heads": 3, "kv_heads": 1, "ffn": 576},
}
TARGET_TOKENS, ROUNDS = 15_000_000, 90
ROUND = {"round_tokens": 150_000, "reply_tokens": 256, "batch_tokens": 8192, "patience": 12}
TOKENIZER_DIALOGUES = 6000  # of the dialogues; of the other, smaller domains all
DOMAIN_REPEATS = {"dialogue": 1, "code": 2, "arithmetic": 2}
HELD_OUT_DOCUMENTS = 60  # per domain, scored while the target learns
CONTEXT_LENGTH = 2048  # the longest window of the training schedule
LICENCE = "CC-BY-SA-4.0"
RECOMMENDED = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
DESCRIPTION = "Shows how drafting works; invents names, numbers and facts (trained on dialogues, Python, sums)"
BANNER = (
    "demo is an 8M-parameter demonstration model: it invents names, numbers and facts. "
    "A small real one: edgespec pull smollm2-135m"
)
MEASURED_PROMPTS, MEASURED_TOKENS = 32, 96  # per domain; after each prompt


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes, and its seed."""

    data: Path
    work: Path
    seed: int = 0

    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer; it is trained and kept the first time."""
        path = self.work / "tokenizer.json"
        if not path.exists():
            train, _ = texts.load_corpus(self.data, self.seed)
            train["dialogue"] = train["dialogue"][:TOKENIZER_DIALOGUES]
            found = texts.train_tokenizer((each for every in train.values() for each in every), TARGET.vocab_size)
            with atomic_file(path) as temporary:
                found.save(str(temporary))
        return Tokenizer.from_file(str(path))

    def streams(self, tokenizer: Tokenizer) -> tuple[dict[str, TokenStream], dict[str, TokenStream]]:
        """(training, held-out) token ids by domain."""
        train, held_out = texts.load_corpus(self.data, self.seed)
        few = {domain: documents[:HELD_OUT_DOCUMENTS] for domain, documents in held_out.items()}
        encoded = [
            {domain: texts.encode_documents(tokenizer, each) for domain, each in every.items()}
            for every in (train, few)
        ]
        return encoded[0], encoded[1]

    def train_target(self, total_tokens: int, template: str) -> None:
        """Train the target, or go on where the last run stopped, and write its Hugging Face folder."""
        tokenizer = self.tokenizer()
        train, held_out = self.streams(tokenizer)
        begin = texts.mark_id(tokenizer, texts.BOS)
        documents = [
            document
            for domain, stream in train.items()
            for document in split_documents(stream, begin) * DOMAIN_REPEATS[domain]
        ]
        network = pretrain(TARGET, documents, held_out, BatchSchedule(total_tokens), self.work, self.seed)
        save_target(network, tokenizer, template, self.work / "hf" / "target")

    def distill(self, rounds: int, **changes: Any) -> None:
        """Train the students that are not finished."""
        train, _ = texts.load_corpus(self.data, self.seed)
        documents = [document for domain in train.values() for document in domain]
        for name, sizes in STUDENTS.items():
            output = self.work / "hf" / name
            if not output.exists():
                plan = Plan(rounds=rounds, seed=self.seed, **{**ROUND, **sizes, **changes})
                target = Target(self.work / "hf" / "target", torch.device("cpu"))
                print(name)
                distill(plan, target, documents, output, print)


def save_target(network: Any, tokenizer: Tokenizer, chat_template: str, folder: Path) -> None:
    """Write the network in half precision and the tokenizer's files to `folder`, as transformers has them."""
    save_model(network, folder, torch.float16)
    texts.save_hf_tokenizer(tokenizer, folder, chat_template)


# what the family is worth


def evaluation_prompts(tokenizer: Tokenizer, documents: list[str], count: int) -> list[list[int]]:
    """Token ids of `count` unseen prompts: a chat up to one of its replies, a bare document's first 24 tokens."""
    header, prompts = "<|im_start|>assistant\n", []
    for index, document in enumerate(documents[:: max(1, len(documents) // count)][:count]):
        turns = document.split(header)
        if len(turns) > 1:
            kept = 1 + index % min(4, len(turns) - 1)
            prompts.append(tokenizer.encode(header.join(turns[:kept]) + header, add_special_tokens=False).ids)
        else:
            prompts.append(tokenizer.encode(document, add_special_tokens=False).ids[:24])
    return [prompt[-512:] for prompt in prompts]


def acceptance(target: Target, student: Target, prompts: Sequence[list[int]], seed: int) -> dict[str, float]:
    """Shares of the target's own tokens, along its continuations of `prompts`, all in 0..1.

    `greedy`: same argmax along greedy text; `rejection`: sum of min(p, q) along text sampled at temperature 1.
    """
    figures: dict[str, float] = {"num_tokens": 0}
    for place, (name, temperature) in enumerate((("greedy", 0.0), ("rejection", 1.0))):
        texts = target.write(prompts, MEASURED_TOKENS, temperature, seed)
        figures[name] = round(agreement(target.model, student.model, texts, ROUND["batch_tokens"])[place], 4)
        figures["num_tokens"] += sum(len(text.token_ids) - text.start for text in texts)
    return figures


def measured(run: Run) -> dict[str, Any]:
    """The manifest's figures."""
    tokenizer = run.tokenizer()
    _, held_out = texts.load_corpus(run.data, run.seed)
    models = {name: Target(run.work / "hf" / name, torch.device("cpu")) for name in ("target", *STUDENTS)}
    figures = {}
    for domain in ("dialogue", "code"):
        prompts = evaluation_prompts(tokenizer, held_out[domain], MEASURED_PROMPTS)
        figures[f"acceptance_{domain}"] = {
            name: acceptance(models["target"], models[name], prompts, run.seed) for name in STUDENTS
        }
    return figures


# what ships


def pack(run: Run, out: Path, *, with_figures: bool = True) -> None:
    """Write everything that ships to `out`, which holds `chat_template.jinja` already."""
    values: dict[str, Any] = {
        "name": "demo",
        "description": DESCRIPTION,
        "licence": LICENCE,
        "banner": BANNER,
        "context_length": CONTEXT_LENGTH,
        "sampling": RECOMMENDED,
        "figures": measured(run) if with_figures else {},
    }
    files: list[tuple[str, ModelFile]] = []
    for role in ("target", *STUDENTS):
        folder, path = run.work / "hf" / role, out / f"demo-{role}-q8_0.gguf"
        convert(folder, path, "q8_0", name=f"edgespec demo {role}", licence=LICENCE.lower())
        shutil.rmtree(out / "onnx" / role, ignore_errors=True)
        (out / "onnx" / role).mkdir(parents=True)
        exact = convert(folder, run.work / f"{role}.gguf", own_precision(folder))
        convert_gguf(open_gguf(exact), out / "onnx" / role, "int8")
        graph = sorted((out / "onnx" / role).iterdir(), key=lambda path: path.name != GRAPH)
        files += [(role, checksummed([path])), (role, checksummed(graph))]
        if role != "medium":
            shutil.copytree(folder, out / "hf" / role, dirs_exist_ok=True)
    write_manifest(out, values, files)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sgd_*.jsonl.xz and gsm8k_train.jsonl.xz")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints; a second call goes on here")
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="where the shipped files go")
    parser.add_argument("--tokens", type=int, default=TARGET_TOKENS, help="tokens the target sees (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each student (%(default)s)")
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-figures", action="store_true", help="pack without measuring acceptance")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    run = Run(given.data, given.work, given.seed)
    template = (given.out / "chat_template.jinja").read_text(encoding="utf-8")
    stages = STAGES if given.stage == "all" else (given.stage,)
    if "tokenizer" in stages:
        run.tokenizer()
    if "target" in stages:
        run.train_target(given.tokens, template)
    if "distill" in stages:
        run.distill(given.rounds)
    if "pack" in stages:
        pack(run, given.out, with_figures=not given.no_figures)


if __name__ == "__main__":
    main()
