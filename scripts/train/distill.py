"""Distil a small draft for a target: it learns from text that the target writes.

    python scripts/train/distill.py TARGET --data texts.jsonl --layers 2 --hidden 256 -o my-draft

In each round the target continues prompts from the data, the draft learns, and its acceptance is measured on held-out
prompts. Training ends when acceptance stops rising or all rounds are done, and the best round is kept. The state after
each round is in OUTPUT.partial: the same command goes on from there.

Training is on the target's own text, since a draft token is tested only if all earlier ones were accepted (DistillSpec,
arXiv 2310.08461). The loss is the total variation distance, which is 1 minus the acceptance rate of rejection sampling
(Leviathan, 2211.17192), plus a share of cross-entropy for the start, where the distance has hardly any gradient.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from edgespec.errors import CapabilityError, ConfigError, EdgespecError, StateError
from trainlib.documents import Document, read_documents, split_held_out
from trainlib.hub import OwnText, Target, agreement, folder_of, save_model
from trainlib.optimise import Schedule, make_optimizers, pick_device, save_checkpoint, update

HEAD_DIM = 64
EMBEDDING_STD, LAYER_STD = 0.05, 0.02
ROW_TEMPERATURES = (1.0, 0.8, 0.3, 0.0)  # of written texts, in equal parts
SHARE = 0.1  # of cross-entropy in the loss
OWN_SHARE = 0.5  # of the target's own text in a batch; the rest is data
MIN_RISE = 0.002  # smallest rise of acceptance that counts
LOSS_TEMPERATURES = (1.0, 0.6)  # of the compared distributions, by turns: 0.6 weighs the likeliest tokens more
CONTEXT_WEIGHT = 0.3  # of positions whose next token the target did not write; 1 for the others
POOL_ROUNDS = 8  # older text is forgotten
MOST_WRITTEN = 64  # texts at a time
LOGIT_BYTES, LOGIT_COPIES = 2**30, 6  # of one forward pass: logits of two models, their probabilities, gradients
STALE_RATE = 0.7  # factor on the learning rates after a round without a rise
LAYERS_RATE = 0.1  # factor on the learning rates if the draft starts from layers of the target
LAYERS_CAN_BE_TAKEN_FROM = ("llama", "mistral", "qwen2", "qwen3")
CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
Text = tuple[NDArray[np.int32], NDArray[np.bool_]]  # token ids, and which of them the target wrote
Say = Callable[[str], None]


def option(default: Any, text: str) -> Any:
    """A field that is an option of the command line, too."""
    return field(default=default, metadata={"help": f"{text} (default: {default or 'by the target'})"})


@dataclass(frozen=True)
class Plan:
    """One distillation. Lengths in tokens; sizes None: derived from the target's."""

    layers: int | None = option(None, "layers of the draft")
    hidden: int | None = option(None, "its width")
    heads: int | None = option(None, "its attention heads")
    kv_heads: int | None = option(None, "those for keys and values")
    ffn: int | None = option(None, "width of its feed-forward layers")
    init: tuple[int, ...] = ()  # layers of the target to start from; none: a new draft
    rounds: int = option(20, "most rounds of writing and learning")
    round_tokens: int = option(65_536, "tokens learnt from per round")
    round_prompts: int = option(128, "texts that the target writes per round")
    reply_tokens: int = option(128, "most tokens in each")
    window: int = option(512, "tokens per row of a batch")
    batch_tokens: int = option(4096, "tokens per step")
    held_out_prompts: int = option(64, "unseen prompts on which acceptance is measured")
    patience: int = option(3, "rounds without a rise before training stops")
    seed: int = 0  # the same one gives the same weights on one machine

    def __post_init__(self) -> None:
        if self.window <= self.reply_tokens or self.batch_tokens < self.window:
            raise ConfigError("--window must be longer than --reply-tokens, and no longer than --batch-tokens")

    @property
    def rows(self) -> int:
        return self.batch_tokens // self.window

    @property
    def steps_per_round(self) -> int:
        return max(1, round(self.round_tokens / (self.rows * self.window)))

    @property
    def total_tokens(self) -> int:
        return self.rounds * self.steps_per_round * self.rows * self.window


# the student


def student_config(plan: Plan, target: Any) -> Any:
    """A student of a model configured like `target`: by default half its width and a quarter of its layers.

    A new student is a Llama, which every converter supports. Raises ConfigError for sizes that do not fit together,
    CapabilityError if layers of the target cannot be taken.
    """
    if plan.init:
        return _config_of_layers(plan.init, target)
    hidden = plan.hidden or max(HEAD_DIM, target.hidden_size // 2 // HEAD_DIM * HEAD_DIM)
    heads = plan.heads or max(1, hidden // HEAD_DIM)
    kv_heads = plan.kv_heads or max(n for n in range(1, max(1, heads // 2) + 1) if heads % n == 0)
    if hidden % heads or hidden // heads % 2 or heads % kv_heads:
        raise ConfigError(
            f"--hidden {hidden} must be a multiple of --heads {heads}, with heads of even width, and --heads one of "
            f"--kv-heads {kv_heads}"
        )
    kept = {key: getattr(target, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return transformers.LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=plan.ffn or 3 * hidden,
        num_hidden_layers=plan.layers or max(1, target.num_hidden_layers // 4),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **kept,
    )


def _config_of_layers(layers: Sequence[int], target: Any) -> Any:
    if target.model_type not in LAYERS_CAN_BE_TAKEN_FROM:
        known = ", ".join(LAYERS_CAN_BE_TAKEN_FROM)
        raise CapabilityError(f"--init layers is supported for {known}; the target is {target.model_type!r}")
    if list(layers) != sorted(set(layers)) or layers[-1] >= target.num_hidden_layers:
        raise ConfigError(f"--init must name ascending layers from 0 to {target.num_hidden_layers - 1}, got {layers}")
    settings = {**target.to_dict(), "num_hidden_layers": len(layers)}
    if settings.get("layer_types"):
        settings["layer_types"] = [settings["layer_types"][layer] for layer in layers]
    return type(target)(**settings)


@torch.no_grad()
def new_student(plan: Plan, target: Target) -> Any:
    """A student in float32 on the target's device; the same for the same seed."""
    torch.manual_seed(plan.seed)
    config = student_config(plan, target.config)
    student = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if plan.init:
        source = target.model.state_dict()
        student.load_state_dict({name: source[_renamed(name, plan.init)].float() for name in student.state_dict()})
        return student.to(target.device)
    for name, weight in student.named_parameters():
        if weight.ndim == 2:  # smaller by depth for matrices that write to the residual stream
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(std=LAYER_STD / math.sqrt(2 * config.num_hidden_layers) if is_output else LAYER_STD)
    embedding = target.model.get_input_embeddings().weight
    student.get_input_embeddings().weight.copy_(principal_embedding(embedding, config.hidden_size))
    return student.to(target.device)


def _renamed(name: str, layers: Sequence[int]) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


def principal_embedding(embedding: Tensor, width: int) -> Tensor:
    """Project `embedding` [vocab, hidden] on its `width` principal directions: [vocab, width], float32 on the CPU.

    The student then keeps the target's similarities of tokens; the embedding, tied to the head, is most of a small
    student. The mean is removed, since it adds the same to every logit. The result is scaled down, because a large tied
    head would initially repeat its input. Columns beyond the target's width are noise.
    """
    centred = embedding.detach().cpu().float()
    centred = centred - centred.mean(dim=0)
    _, directions = torch.linalg.eigh(centred.double().T @ centred.double())
    projected = centred @ directions.flip(1)[:, :width].float()
    projected *= EMBEDDING_STD / projected.std().clamp(min=1e-12)
    beyond = torch.randn(len(projected), max(0, width - projected.shape[1])) * (EMBEDDING_STD / 10)
    return torch.cat((projected, beyond), dim=1)


# learning


@dataclass(frozen=True)
class Round:
    """Acceptance after a round: `greedy` on greedy text, `sampled` on text at temperature 1. Round 0: untrained."""

    index: int
    tokens: int
    greedy: float
    sampled: float
    variation: float  # total variation distance on the batches
    seconds: float

    @property
    def acceptance(self) -> float:
        return (self.greedy + self.sampled) / 2


class Distiller:
    """The state of a distillation between rounds. Every random choice is seeded by (seed, purpose, round or step)."""

    def __init__(self, plan: Plan, target: Target, documents: Sequence[Document], held_out: Sequence[Document]) -> None:
        self.plan, self.target, self.documents, self._held_out = plan, target, documents, held_out
        self.student = new_student(plan, target)
        self.schedule = Schedule(plan.total_tokens)
        self.optimizers = make_optimizers(self.student, self.schedule)
        self.pool: list[list[Text]] = []
        self.held_out: dict[str, list[OwnText]] = {}
        self.rounds: list[Round] = []
        self.best: dict[str, Tensor] = {}
        self.tokens_seen = self.step_index = 0
        row_bytes = 4 * LOGIT_COPIES * target.config.vocab_size * plan.window
        self.rows_at_once = max(1, min(plan.rows, LOGIT_BYTES // row_bytes))

    @property
    def best_round(self) -> Round:
        """The round with the highest acceptance; the earliest of equal ones."""
        return max(self.rounds, key=lambda each: (each.acceptance, -each.index))

    def stale_rounds(self, rounds: Sequence[Round] | None = None) -> int:
        """Number of rounds since acceptance last rose by more than MIN_RISE."""
        stale, level = 0, -1.0
        for each in self.rounds if rounds is None else rounds:
            rises = each.acceptance > level + MIN_RISE
            stale, level = (0, each.acceptance) if rises else (stale + 1, level)
        return stale

    def run(self, state: Path, say: Say) -> None:
        """Run rounds until all are done or acceptance no longer rises, from `state` on if it exists."""
        if state.exists():
            self._load(state)
            say(f"resuming after round {self.rounds[-1].index}, from {state}")
        else:
            for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                prompts = self._prompts(self._held_out, self.plan.held_out_prompts, [self.plan.seed, 3])
                self.held_out[kind] = self._written(prompts, temperature, self.plan.seed)
            self._end_round(1.0, time.monotonic(), state, say)
        while len(self.rounds) <= self.plan.rounds and self.stale_rounds() < self.plan.patience:
            started = time.monotonic()
            self.write_pool()
            variations = [self.step() for _ in range(self.plan.steps_per_round)]
            self._end_round(float(np.mean(variations)), started, state, say)

    def _end_round(self, variation: float, started: float, state: Path, say: Say) -> None:
        at_once = self.rows_at_once * self.plan.window
        self.student.eval()
        greedy, _ = agreement(self.target.model, self.student, self.held_out["greedy"], at_once)
        _, sampled = agreement(self.target.model, self.student, self.held_out["sampled"], at_once)
        self.student.train()
        seconds = round(time.monotonic() - started, 2)
        self.rounds.append(Round(len(self.rounds), self.tokens_seen, greedy, sampled, variation, seconds))
        if self.best_round is self.rounds[-1]:
            self.best = {name: value.detach().cpu().clone() for name, value in self.student.state_dict().items()}
        self._save(state)
        found = self.rounds[-1]
        say(
            f"round {found.index}: acceptance {found.acceptance:.3f} (greedy {greedy:.3f}, sampled {sampled:.3f}), "
            f"{found.tokens} tokens, {seconds:.0f} s"
        )

    def _prompts(self, documents: Sequence[Document], count: int, seed: list[int]) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        most = self.plan.window - self.plan.reply_tokens
        return [self.target.prompt(documents, rng, most) for _ in range(count)]

    def _written(self, prompts: Sequence[list[int]], temperature: float, seed: int) -> list[OwnText]:
        found = []
        for start in range(0, len(prompts), MOST_WRITTEN):
            part = prompts[start : start + MOST_WRITTEN]
            found += self.target.write(part, self.plan.reply_tokens, temperature, seed + start)
        return found

    def write_pool(self) -> None:
        """Let the target write this round's text."""
        plan, index = self.plan, len(self.rounds)
        prompts = self._prompts(self.documents, plan.round_prompts, [plan.seed, 1, index])
        texts: list[Text] = []
        for place, temperature in enumerate(ROW_TEMPERATURES):
            seed = plan.seed * 1_000_003 + index * 1009 + place * 101
            for text in self._written(prompts[place :: len(ROW_TEMPERATURES)], temperature, seed):
                ids = np.array(text.token_ids, np.int32)
                texts.append((ids, np.arange(ids.size) >= text.start))
        order = np.random.default_rng([plan.seed, 4, index]).permutation(len(texts))
        self.pool = [*self.pool, [texts[place] for place in order]][-POOL_ROUNDS:]

    def draw_batch(self) -> tuple[Tensor, Tensor]:
        """Token ids and weights [rows, window] of this step: the target's own text, and data."""
        plan, rng = self.plan, np.random.default_rng([self.plan.seed, 2, self.step_index])
        every = [text for texts in self.pool for text in texts]
        ids, own = (np.concatenate([text[part] for text in every]) for part in (0, 1))
        repeats = -(-plan.window // ids.size)
        ids, own = np.tile(ids, repeats), np.tile(own, repeats)
        rows, weights = [], []
        for _ in range(plan.rows):
            if rng.random() < OWN_SHARE:
                start = int(rng.integers(0, ids.size - plan.window + 1))
                rows.append(ids[start : start + plan.window])
                is_own = own[start : start + plan.window]
            else:
                rows.append(self.target.window(self.documents, rng, plan.window))
                is_own = np.zeros(plan.window, np.bool_)
            weights.append(np.where(is_own, 1.0, CONTEXT_WEIGHT).astype(np.float32))
        device = self.target.device
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device), torch.from_numpy(np.stack(weights)).to(
            device
        )

    def step(self) -> float:
        """One batch; returns the mean total variation distance to the target."""
        ids, weights = self.draw_batch()
        variation = self.accumulate(ids, weights, LOSS_TEMPERATURES[self.step_index % len(LOSS_TEMPERATURES)])
        stale = sum(self.stale_rounds(self.rounds[: end + 1]) > 0 for end in range(1, len(self.rounds)))
        start = LAYERS_RATE if self.plan.init else 1.0
        rate = start * self.schedule.rate_factor(self.tokens_seen) * STALE_RATE**stale
        update(self.student, self.optimizers, rate)
        self.step_index += 1
        self.tokens_seen += ids.numel()
        return variation

    def accumulate(self, ids: Tensor, weights: Tensor, cooling: float) -> float:
        """Add the batch's gradient, a few rows at a time; returns its mean total variation."""
        total, variation = weights[:, 1:].sum(), 0.0
        for start in range(0, len(ids), self.rows_at_once):
            part = slice(start, start + self.rows_at_once)
            loss, distance = self.distance(ids[part], weights[part], cooling)
            (loss / total).backward()
            variation += float(distance / total)
        return variation

    def distance(self, ids: Tensor, weights: Tensor, cooling: float) -> tuple[Tensor, Tensor]:
        """(loss, total variation) between student and target at the temperature `cooling`, weighted sums.

        `ids`, `weights` [rows, window]; a position has the weight of the token that follows it.
        """
        with torch.no_grad():
            wanted = (self.target.model(ids, use_cache=False).logits[:, :-1].float() / cooling).softmax(dim=-1)
        logits = self.student(ids, use_cache=False).logits[:, :-1]
        log_probs = (logits.float() / cooling).log_softmax(dim=-1)
        entropy = -(wanted * log_probs).sum(dim=-1)
        variation = 0.5 * (log_probs.exp() - wanted).abs().sum(dim=-1)
        loss, following = SHARE * entropy + (1 - SHARE) * variation, weights[:, 1:]
        return (loss * following).sum(), (variation.detach() * following).sum()

    def _save(self, state: Path) -> None:
        texts = {kind: [(text.token_ids, text.start) for text in texts] for kind, texts in self.held_out.items()}
        kept = {
            "student": self.student.state_dict(),
            "best": self.best,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "pool": [[tuple(map(torch.from_numpy, text)) for text in texts] for texts in self.pool],
            "held_out": texts,
            "rounds": [tuple(asdict(each).values()) for each in self.rounds],
            "counters": [self.tokens_seen, self.step_index],
        }
        save_checkpoint(kept, state)

    def _load(self, state: Path) -> None:
        try:
            kept = torch.load(state, weights_only=True, map_location="cpu")
            self.student.load_state_dict(kept["student"])
            for optimizer, saved in zip(self.optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except (RuntimeError, KeyError, ValueError, EOFError) as exc:
            raise StateError(f"{state} is not of a run with these options: {exc}; start over with --restart") from exc
        self.best, (self.tokens_seen, self.step_index) = kept["best"], kept["counters"]
        self.pool = [[(ids.numpy(), own.numpy()) for ids, own in texts] for texts in kept["pool"]]
        self.held_out = {kind: [OwnText(*text) for text in texts] for kind, texts in kept["held_out"].items()}
        self.rounds = [Round(*each) for each in kept["rounds"]]


# the finished folder


def write_folder(folder: Path, distiller: Distiller) -> None:
    """The best student, the target's tokenizer, and what it is."""
    shutil.rmtree(folder, ignore_errors=True)
    student, target, best = distiller.student, distiller.target, distiller.best_round
    student.load_state_dict(distiller.best)
    save_model(student, folder, torch.float16)
    for pattern in CARRIED:
        for path in target.folder.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    greedy, sampled = (f"{share:.3f}" for share in (best.greedy, best.sampled))
    (folder / "README.md").write_text(
        f"A draft for {target.folder.name}, distilled from its outputs by edgespec (distill.py), with its\n"
        "tokenizer: the target's licence applies to this folder too. Accepted on held-out prompts, of tokens that the\n"
        f"target wrote: greedily {greedy}, sampled at temperature 1 {sampled} (round {best.index}).\n",
        encoding="utf-8",
    )


def distill(plan: Plan, target: Target, documents: Sequence[Document], output: Path, say: Say) -> Distiller:
    """Train until done and write `output`. A call after an interrupted one goes on from OUTPUT.partial."""
    state = output.with_name(f"{output.name}.partial") / "state.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    distiller = Distiller(plan, target, *split_held_out(documents, plan.held_out_prompts))
    distiller.run(state, say)
    write_folder(state.parent / "result", distiller)
    (state.parent / "result").replace(output)
    shutil.rmtree(state.parent)
    return distiller


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or hub id of a Hugging Face model")
    parser.add_argument(
        "--data", type=Path, action="append", required=True, help="text, .jsonl or .jsonl.xz; repeatable"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--init", type=numbers, default=(), metavar="N,N", help="layers of the target to start from")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--restart", action="store_true", help="discard an unfinished run")
    parser.add_argument("--seed", type=int, default=0)
    for each in fields(Plan):
        if each.metadata:
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=each.default, **each.metadata)
    return parser.parse_args(arguments)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    try:
        if given.output.exists():
            raise ConfigError(f"{given.output} already exists: give another --output, or delete it")
        if given.restart:
            shutil.rmtree(given.output.with_name(f"{given.output.name}.partial"), ignore_errors=True)
        plan = Plan(**{each.name: getattr(given, each.name) for each in fields(Plan)})
        documents = read_documents(given.data)
        target = Target(folder_of(given.target), pick_device(given.device))
        done = distill(plan, target, documents, given.output, lambda text: print(text, flush=True))
    except EdgespecError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(f"{given.output}: round {done.best_round.index}. Next: edgespec export {given.target} --draft {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
