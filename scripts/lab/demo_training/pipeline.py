"""The demo family from data to shipped files, in stages that each leave a file and can be resumed.

tokenizer -> `tokenizer.json`, `streams_*.npz`; target -> `target.pt`, `target.csv`; distill -> `distill.pt`,
`distill.csv`; pack -> GGUFs, Hugging Face folders, manifest and curves in the output folder. Beside them, edits ->
`edits/hf`: the shipped target, taught to copy, which benchmarks of drafters that copy need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo_training.corpus import BOS, load_corpus
from demo_training.distill import STUDENTS, DistillPlan, distill
from demo_training.edits import edit_documents
from demo_training.network import Network, NetworkShape
from demo_training.pretrain import BatchSchedule, TokenStream, pretrain, split_documents
from demo_training.streams import load_streams
from demo_training.vocabulary import mark_id, train_tokenizer
from edgespec.platform.files import atomic_file

STAGES = ("tokenizer", "target", "distill", "pack")
EDITS = "edits"
EDIT_TOKENS = 2_400_000
TARGET = NetworkShape(4096, 256, 768, num_layers=9, num_heads=4, num_kv_heads=2)
TARGET_TOKENS = 15_000_000
DISTILL_TOKENS = 13_000_000
DISTILL_BATCH_TOKENS = 4096
TOKENIZER_DIALOGUES = 6000  # of the dialogues; of the other, smaller domains all
DOMAIN_REPEATS = {"dialogue": 1, "code": 2, "arithmetic": 2}


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes, and its seed."""

    data: Path
    work: Path
    seed: int = 0

    @property
    def tokenizer_path(self) -> Path:
        return self.work / "tokenizer.json"

    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer; it is trained and kept the first time."""
        if not self.tokenizer_path.exists():
            train, _ = load_corpus(self.data, self.seed)
            train["dialogue"] = train["dialogue"][:TOKENIZER_DIALOGUES]
            texts = (document for documents in train.values() for document in documents)
            tokenizer = train_tokenizer(texts, TARGET.vocab_size)
            with atomic_file(self.tokenizer_path) as temporary:
                tokenizer.save(str(temporary))
        return Tokenizer.from_file(str(self.tokenizer_path))

    def streams(self) -> tuple[dict[str, TokenStream], dict[str, TokenStream]]:
        return load_streams(self.tokenizer(), self.data, self.work, self.seed)

    def bos_id(self) -> int:
        return mark_id(self.tokenizer(), BOS)

    def train_target(self, total_tokens: int = TARGET_TOKENS) -> Network:
        """Pre-train the target, or go on where the last run stopped."""
        train, held_out = self.streams()
        documents = [
            document
            for domain, repeats in DOMAIN_REPEATS.items()
            for document in split_documents(train[domain], self.bos_id()) * repeats
        ]
        return pretrain(TARGET, documents, held_out, BatchSchedule(total_tokens), self.work, self.seed)

    def distill_students(self, total_tokens: int = DISTILL_TOKENS) -> dict[str, Network]:
        """Distil draft and medium from the target's checkpoint, or go on where the last run stopped."""
        train, held_out = self.streams()
        plan = DistillPlan(BatchSchedule(total_tokens, batch_tokens=DISTILL_BATCH_TOKENS))
        return distill(TARGET, train, held_out, self.bos_id(), plan, self.work, self.seed)

    def train_to_copy(self, shipped: Path, total_tokens: int = EDIT_TOKENS) -> Network:
        """Teach the target of the Hugging Face folder `shipped` to copy, or go on where the last run stopped.

        Whole documents have to fit the windows, or an answer would be apart from what it copies.
        """
        tokenizer = Tokenizer.from_file(str(shipped / "tokenizer.json"))
        work = self.work / EDITS
        work.mkdir(exist_ok=True)
        train, held_out = load_streams(tokenizer, self.data, work, self.seed)
        others = {domain: split_documents(stream, mark_id(tokenizer, BOS)) for domain, stream in train.items()}
        documents = edit_documents(tokenizer, others, total_tokens, self.seed)
        schedule = BatchSchedule(total_tokens, batch_tokens=4096, lengths=((1.0, 2048),), max_layer_dropout=0.0)
        weights = {name: value.float() for name, value in load_file(shipped / "model.safetensors").items()}
        return pretrain(TARGET, documents, held_out, schedule, work, self.seed, start=weights)

    def load_networks(self) -> dict[str, Network]:
        """target, draft and medium from their checkpoints."""
        networks = {"target": Network(TARGET), **{name: Network(shape) for name, shape in STUDENTS.items()}}
        networks["target"].load_state_dict(torch.load(self.work / "target.pt", weights_only=True)["network"])
        students = torch.load(self.work / "distill.pt", weights_only=True)["students"]
        for name in STUDENTS:
            networks[name].load_state_dict(students[name])
        return {name: network.eval() for name, network in networks.items()}
