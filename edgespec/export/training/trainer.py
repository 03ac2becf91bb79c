"""One student learning from one Hugging Face target, on text that the target wrote: the parts of a round.

What counts is agreement along the target's own text, since a draft token is judged only while every earlier one was
accepted (DistillSpec 2310.08461); the loss is the total variation distance, 1 minus the acceptance of rejection
sampling (Leviathan 2211.17192), with a share of cross-entropy that carries the start, where the distance alone has
hardly any gradient.

Every random choice is drawn from (seed, purpose, round or step), so a run that goes on from a saved round gives the
weights of one that was never stopped, on the same machine with the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.errors import CapabilityError
from edgespec.export.training.acceptance import OwnText, agreement
from edgespec.export.training.documents import Corpus
from edgespec.export.training.journal import Journal, RoundResult, best_round, stale_rounds
from edgespec.export.training.optimise import Schedule, make_optimizers, save_checkpoint, set_rate
from edgespec.export.training.request import DistillRequest
from edgespec.export.training.students import StudentShape
from edgespec.export.training.target import TargetFacts
from edgespec.export.training.writing import write
from edgespec.installation import install_command

ROW_TEMPERATURES = (1.0, 0.8, 0.3, 0.0)  # of generated texts, by turns
LOSS_TEMPERATURES = (1.0, 0.6)  # of the compared distributions, by turns: 0.6 weighs the likeliest tokens more
CONTEXT_WEIGHT = 0.3  # of a position whose next token is not the target's own, where an own one counts 1
POOL_ROUNDS = 8  # generated text older than this is forgotten
OPENING_TOKENS = 8  # drawn at temperature 1 when nothing but a begin token stands before
MAX_ROWS = 64  # texts written at a time
CACHE_BYTES = 2**30  # most that their KV cache takes
LOGIT_BYTES = 2**30  # most that the scores of one forward pass take, of both models with their gradients
LOGIT_COPIES = 6
STALE_RATE = 0.7  # what a round without a rise leaves of the learning rate
LAYERS_RATE = 0.1  # of the learning rate, when the student starts from layers that are trained already
Text = tuple[NDArray[np.int32], NDArray[np.bool_]]  # a round's token ids, and which of them the target wrote
Advance = Callable[[int, str], None]  # (tokens learnt from or written, what is going on)


def temperatures(count: int) -> list[float]:
    return [ROW_TEMPERATURES[index % len(ROW_TEMPERATURES)] for index in range(count)]


class Trainer:
    """All that a distillation carries from round to round; `save` and `load` make it resumable there."""

    def __init__(
        self,
        request: DistillRequest,
        facts: TargetFacts,
        shape: StudentShape,
        target: Any,
        student: Any,
        corpus: Corpus | None,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise CapabilityError(
                f"distilling needs torch 2.9 or newer, this is {torch.__version__}: {install_command('train')}"
            )
        self.request, self.facts, self.target, self.student, self.corpus = request, facts, target, student, corpus
        self.schedule = Schedule(request.total_tokens)
        self.base_rate = request.rate * (LAYERS_RATE if shape.layers_of_target else 1.0)
        self.optimizers = make_optimizers(student, self.schedule)
        self.pool: list[Text] = []
        self.held_out: dict[str, list[OwnText]] = {}
        self.rounds: list[RoundResult] = []
        self.best: dict[str, Tensor] = {}
        self.tokens_seen = self.step_index = 0
        # A position costs LOGIT_COPIES rows of float32 scores: two models, their probabilities, the gradients.
        position_bytes = 4 * LOGIT_COPIES * facts.size("vocab_size")
        self.rows_at_once = max(1, min(request.rows, LOGIT_BYTES // (request.window * position_bytes)))

    @property
    def round_index(self) -> int:
        """Rounds that are finished; measuring the untrained student is none."""
        return max(0, len(self.rounds) - 1)

    @property
    def is_done(self) -> bool:
        stale = stale_rounds(self.rounds, self.request.min_rise)
        return bool(self.rounds) and (self.round_index >= self.request.rounds or stale >= self.request.patience)

    def save(self, journal: Journal) -> None:
        state = {
            "student": self.student.state_dict(),
            "best": self.best,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "pool": [(torch.from_numpy(ids), torch.from_numpy(own)) for ids, own in self.pool],
            "held_out": {kind: [(t.token_ids, t.start) for t in texts] for kind, texts in self.held_out.items()},
            "rounds": [tuple(getattr(r, name) for name in RoundResult.__dataclass_fields__) for r in self.rounds],
            "counters": [self.tokens_seen, self.step_index],
        }
        save_checkpoint(state, journal.state)
        journal.write_rounds(self.rounds)

    def load(self, journal: Journal) -> None:
        state = torch.load(journal.state, weights_only=True, map_location="cpu")
        self.student.load_state_dict(state["student"])
        self.best = state["best"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.pool = [(ids.numpy(), own.numpy()) for ids, own in state["pool"]]
        self.held_out = {kind: [OwnText(*text) for text in texts] for kind, texts in state["held_out"].items()}
        self.rounds = [RoundResult(*values) for values in state["rounds"]]
        self.tokens_seen, self.step_index = state["counters"]

    def autocast(self) -> Any:
        if self.request.precision == "f32":
            return nullcontext()
        return torch.autocast(self.student.device.type, dtype=torch.bfloat16)

    def rows_to_write(self) -> int:
        """Texts in one batch of generation, so that the target's KV cache stays within CACHE_BYTES."""
        facts, request = self.facts, self.request
        token_bytes = 2 * 4 * facts.size("num_hidden_layers") * facts.kv_heads * facts.head_dim
        return int(max(1, min(MAX_ROWS, CACHE_BYTES // (request.window * token_bytes))))

    def let_write(
        self, corpus: Corpus | None, count: int, heat: list[float], stream: tuple[int, ...], advance: Advance
    ) -> list[OwnText]:
        """`count` texts of the target, prompts of `corpus` or the begin token before them, temperatures `heat`."""
        request = self.request
        rng = np.random.default_rng([request.seed, *stream])
        prompts = [self._prompt(corpus, rng) for _ in range(count)]
        order = sorted(range(count), key=lambda index: len(prompts[index]))  # little padding in a batch
        texts: list[OwnText] = []
        rows = self.rows_to_write()
        for start in range(0, count, rows):
            chosen = order[start : start + rows]
            written = write(
                self.target,
                [prompts[index] for index in chosen],
                request.reply_tokens,
                [heat[index] for index in chosen],
                self.facts.stop_ids,
                int(rng.integers(2**62)),
                opening=0 if corpus else OPENING_TOKENS,
            )
            texts += [OwnText(ids, len(prompts[index])) for ids, index in zip(written, chosen, strict=True)]
            advance(0, f"target writes, {len(texts)} of {count} texts")
        return texts

    def _prompt(self, corpus: Corpus | None, rng: np.random.Generator) -> list[int]:
        if corpus is None:
            assert self.facts.begin_id is not None
            return [self.facts.begin_id]
        return corpus.prompt(rng, self.request.window - self.request.reply_tokens)

    def write_held_out(self, corpus: Corpus | None, advance: Advance) -> None:
        """The texts on which every round is measured: greedy ones and ones at temperature 1."""
        count = self.request.held_out_prompts
        for index, (kind, heat) in enumerate((("greedy", 0.0), ("sampled", 1.0))):
            self.held_out[kind] = self.let_write(corpus, count, [heat] * count, (0, index), advance)

    def write_pool(self, advance: Advance) -> int:
        """Let the target write this round's text; returns how many tokens of it are its own."""
        count = self.request.round_prompts
        texts = self.let_write(self.corpus, count, temperatures(count), (1, self.round_index), advance)
        order = np.random.default_rng([self.request.seed, 2, self.round_index]).permutation(count)
        ids = np.concatenate([np.asarray(texts[i].token_ids, np.int32) for i in order])
        own = np.concatenate([np.arange(len(texts[i].token_ids)) >= texts[i].start for i in order])
        self.pool = [*self.pool, (ids, own)][-POOL_ROUNDS:]
        return int(own.sum())

    def draw_batch(self) -> tuple[Tensor, Tensor]:
        """Token ids [rows, window] of the pool and the data by the asked shares, and each next token's weight."""
        request, rng = self.request, np.random.default_rng([self.request.seed, 3, self.step_index])
        pool_ids = np.concatenate([ids for ids, _ in self.pool])
        pool_own = np.concatenate([own for _, own in self.pool])
        if pool_ids.size < request.window:  # a begin token and a stop token alone can be all that a target writes
            pool_ids, pool_own = np.resize(pool_ids, request.window), np.resize(pool_own, request.window)
        rows, weights = [], []
        for _ in range(request.rows):
            if self.corpus is None or rng.random() < request.generated_share:
                start = int(rng.integers(0, pool_ids.size - request.window + 1))
                rows.append(pool_ids[start : start + request.window])
                own = pool_own[start : start + request.window]
            else:
                rows.append(self.corpus.window(rng, request.window))
                own = np.zeros(request.window, np.bool_)
            weights.append(np.where(own, 1.0, CONTEXT_WEIGHT).astype(np.float32))
        device = self.student.device
        return (
            torch.from_numpy(np.stack(rows).astype(np.int64)).to(device),
            torch.from_numpy(np.stack(weights)).to(device),
        )

    def distance(self, ids: Tensor, weights: Tensor, cooling: float) -> tuple[Tensor, Tensor]:
        """(loss, total variation) of the student to the target, both summed over positions by weight.

        `ids`, `weights` [rows, window]; a position is weighed by the token that follows it.
        """
        with torch.no_grad():
            logits = self.target(input_ids=ids, use_cache=False).logits[:, :-1]
            wanted = (logits.float() / cooling).softmax(dim=-1)
        with self.autocast():
            logits = self.student(input_ids=ids, use_cache=False).logits[:, :-1]
        log_probs = (logits.float() / cooling).log_softmax(dim=-1)
        share, following = self.request.share, weights[:, 1:]
        entropy = -(wanted * log_probs).sum(dim=-1)
        variation = 0.5 * (log_probs.exp() - wanted).abs().sum(dim=-1)
        # The target's entropy is no function of the student: cross-entropy has the gradient of the divergence.
        other = variation if self.request.loss == "tv" else entropy
        loss = share * entropy + (1 - share) * other
        return (loss * following).sum(), (variation.detach() * following).sum()

    def accumulate(self, ids: Tensor, weights: Tensor, cooling: float) -> float:
        """Add the batch's gradient, a few rows at a time; returns its mean total variation."""
        total = weights[:, 1:].sum()
        variation = 0.0
        for start in range(0, len(ids), self.rows_at_once):
            part = slice(start, start + self.rows_at_once)
            loss, distance = self.distance(ids[part], weights[part], cooling)
            (loss / total).backward()
            variation += float(distance / total)
        return variation

    def rate_now(self) -> float:
        """Warm-up, plateau and decay by tokens; every round that brought no rise lowers it for good."""
        stale = sum(
            stale_rounds(self.rounds[: end + 1], self.request.min_rise) > 0 for end in range(1, len(self.rounds))
        )
        return self.base_rate * self.schedule.rate_factor(self.tokens_seen) * STALE_RATE**stale

    def step(self) -> float:
        """One batch; returns the mean total variation distance to the target."""
        ids, weights = self.draw_batch()
        variation = self.accumulate(ids, weights, LOSS_TEMPERATURES[self.step_index % len(LOSS_TEMPERATURES)])
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        set_rate(self.optimizers, self.rate_now())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_index += 1
        self.tokens_seen += ids.numel()
        return variation

    def learn(self, advance: Advance) -> float:
        """The training steps of one round; returns their mean total variation."""
        variations = []
        for _ in range(self.request.steps_per_round):
            variations.append(self.step())
            advance(self.request.rows * self.request.window, f"student learns, distance {variations[-1]:.3f}")
        return float(np.mean(variations))

    def measure(self, own_tokens: int, variation: float, started: float) -> RoundResult:
        """Measure the student on held-out text, which ends the round."""
        at_once = self.rows_at_once * self.request.window
        with self.autocast():
            greedy, _ = agreement(self.target, self.student, self.held_out["greedy"], at_once, with_target=False)
            _, sampled = agreement(self.target, self.student, self.held_out["sampled"], at_once, with_target=True)
        return self.add_result(own_tokens, variation, started, greedy, sampled)

    def add_result(
        self, own_tokens: int, variation: float, started: float, greedy: float, sampled: float
    ) -> RoundResult:
        """Append the result of the round that began at `started`; the student is kept when it is the best so far."""
        result = RoundResult(
            index=len(self.rounds),
            tokens=self.tokens_seen,
            own_tokens=own_tokens,
            greedy=round(greedy, 6),
            sampled=round(sampled, 6),
            variation=round(variation, 6),
            rate=self.rate_now(),
            seconds=round(time.monotonic() - started, 2),
        )
        self.rounds.append(result)
        if best_round(self.rounds) is result:
            self.best = {name: value.detach().cpu().clone() for name, value in self.student.state_dict().items()}
        return result

    def run_round(self, advance: Advance) -> RoundResult:
        """Write, learn, measure."""
        started = time.monotonic()
        own_tokens = self.write_pool(advance)
        variation = self.learn(advance)
        return self.measure(own_tokens, variation, started)
