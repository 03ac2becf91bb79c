"""What tests of losslessness share: drafters, one run of the loop, prompts, joint laws of sampled text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import edgespec
from demo import ROOT, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.control.base import FixedLength
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import Drafter
from edgespec.drafters.heads import DFlashDrafter, Eagle3Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.mapped import MappedSequence, map_vocabulary
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft, TokenIds
from table_engine import TableEngine, Words
from tiny_heads import LAYERS, OpenBlock, OpenHead, drafter_of, table_heads

VOCABULARY = 10
DEMO = ROOT / "models" / "demo" / "manifest.toml"
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALISED_GREEDY = Sampling(temperature=0.0, repeat_penalty=1.5, presence_penalty=0.5, logit_bias={3: -2})
SAMPLINGS = (
    GREEDY,
    PLAIN,
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9),
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, logit_bias={3: -2}, seed=4),
)
PROMPTS = (
    "Find me a cheap Italian restaurant in San Jose for tonight.",
    "Write a Python function `clamp(value, low, high)`: Limit a value to a range.",
    "Tom has 12 apples and gives away a third of them. How many are left?",
)


TEMPERATURES = 0.0, 0.8, 1.2, 1.2, 0.0, 0.8  # of the prompts, each twice


def run_of(
    target: CachedSequence,
    sampling: Sampling,
    num_tokens: int,
    prompt: Sequence[int] | TokenIds = (0, 1),
    *,
    logprobs: bool = True,
) -> Run:
    """An answer of so many tokens, which nothing else ends."""
    sampler = Sampler(sampling, target.engine.vocabulary.size)
    return Run(target, np.array(prompt, np.int32), sampler, StopRules(frozenset(), (), num_tokens), logprobs)


def run_once(
    target: CachedSequence,
    drafter: Drafter | None,
    rule: str,
    length: int,
    sampling: Sampling,
    num_tokens: int,
    *,
    logprobs: bool = True,
) -> list[TokenEvent]:
    run = run_of(target, sampling, num_tokens, logprobs=logprobs)
    if drafter is None:
        return list(autoregressive(run))
    return list(speculative(run, FixedLength(drafter, length), RULES[rule]))


def assert_same_text(
    model: edgespec.Model, asked: Sequence[tuple[Any, Any]], num_tokens: int = 48
) -> dict[tuple[Any, Any], edgespec.Stats]:
    """Of (drafter, draft length) pairs: tokens and log probabilities are plain decoding's. Counters of each, summed."""
    found: dict[tuple[Any, Any], edgespec.Stats] = {}
    for seed, (prompt, temperature) in enumerate(zip(PROMPTS * 2, TEMPERATURES, strict=True)):
        has_template = model.target.vocabulary.chat_template is not None
        ids = model.encode_chat([{"role": "user", "content": prompt}]) if has_template else model.encode(prompt)
        sampling = Sampling(temperature=temperature, seed=seed)
        options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, drafter="none")
        plain = model.generate(ids, sampling, options)
        for drafter, length in asked:
            drafted = model.generate(ids, sampling, replace(options, drafter=drafter, draft_length=length))
            assert drafted.token_ids == plain.token_ids, (drafter, length, prompt, temperature)
            assert drafted.logprobs == plain.logprobs, (drafter, length, prompt, temperature)
            assert drafted.reproducible and not drafted.stats.notes
            sums = found.setdefault((drafter, length), edgespec.Stats())
            sums.drafted_tokens += drafted.stats.drafted_tokens
            sums.accepted_tokens += drafted.stats.accepted_tokens
    return found


def assert_several_draft_apart(target: str, texts: Sequence[str], drafter: Any, **options: Any) -> None:
    """Texts that are decoded together are those that they are alone, and as many of their drafts are accepted."""
    usual = GenerateOptions(max_tokens=24, drafter=drafter, draft_length=4, ignore_eos=True)
    with edgespec.load(target, reproducible=True, parallel=3, threads=TEST_THREADS, **options) as model:
        for sampling in (Sampling(temperature=0.0, seed=2), Sampling(temperature=0.9, seed=2)):
            plain, alone = [], []
            for text in texts:
                plain.append(model.generate(text, sampling, replace(usual, drafter="none")))
                model.forget()
                alone.append(model.generate(text, sampling, usual))
                model.forget()
            found = model.generate_all(texts, sampling, usual)
            for one, other, together in zip(plain, alone, found, strict=True):
                assert (together.token_ids, together.logprobs) == (one.token_ids, one.logprobs)
                assert together.stats.drafted_tokens > 24
                assert together.stats.accepted_tokens == other.stats.accepted_tokens
            model.forget()


def assert_window_changes_no_text(target: str, drafter: Any, **options: Any) -> None:
    """A text longer than what the head can see."""
    options |= {"draft_context_length": 40, "drafter": drafter, "threads": TEST_THREADS, "reproducible": True}
    with edgespec.load(target, **options) as model:
        ids = model.encode("A text that is longer than what the head can see. " * 6)
        usual, sampling = GenerateOptions(max_tokens=80, ignore_eos=True), Sampling(temperature=0.8, seed=4)
        plain = model.generate(ids, sampling, replace(usual, drafter="none"))
        found = model.generate(ids, sampling, replace(usual, draft_length=5))
        assert found.token_ids == plain.token_ids and found.stats.drafted_tokens > 300
        model.forget()
        assert model.generate(ids, sampling, usual).token_ids == plain.token_ids


def side_branches(draft: Draft) -> int:
    return sum(node not in draft.parents for node in range(draft.num_tokens)) - 1


def paths(draft: Draft) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens of the path to a node, tokens of its children in order) of all nodes with children."""
    for node in range(-1, draft.num_tokens):
        path, at = list[int](), node
        while at >= 0:
            path, at = [int(draft.token_ids[at]), *path], int(draft.parents[at])
        children = draft.token_ids[draft.children_of(node)].tolist()
        if children:
            yield path, children


# -- joint laws by chi-square: (two tokens before, token) in texts of every drafter under every lossless rule

LETTERS = 5  # of the tables whose joint laws are tested
ALPHA_1E6 = 4.75  # standard normal score
TEXT_LENGTH = 4000


def model(target: TableEngine, sigma: float = 1.0) -> ModelDrafter:
    return ModelDrafter(target.related(sigma))


def hierarchical(target: TableEngine) -> HierarchicalDrafter:
    return HierarchicalDrafter(model(target, sigma=1.5), target.related(0.7, seed=2))


def heads(kind: str, target: TableEngine) -> Drafter:
    """Heads that know the target as far as a head of one token can."""
    return drafter_of(table_heads(kind, averaged(target)), target.vocabulary.size)


def opened(head: type[OpenHead | OpenBlock], target: TableEngine) -> Any:
    target.state_layers = LAYERS
    return head(200, vocabulary=target.vocabulary.size)


def texts_like(target: TableEngine) -> list[TokenIds]:
    """What the target might have written before, and as much that it never would."""
    rng, ids = np.random.default_rng(0), [0, 1]
    for _ in range(400):
        row = target.row(ids).astype(np.float64)
        weights = np.exp(row - row.max())
        ids.append(int(rng.choice(weights.size, p=weights / weights.sum())))
    never = rng.integers(0, target.vocabulary.size, 400)
    return [np.array(each, np.int32) for each in (ids[:200], ids[200:], never)]


def remembering(target: TableEngine) -> SuffixDrafter:
    first, second, never = texts_like(target)
    drafter = SuffixDrafter(corpora=[SuffixIndex.of(joined([first, never]))])
    drafter.learn(second)
    return drafter


def mapped(target: TableEngine) -> ModelDrafter:
    """A draft that knows nothing of the target, lacks its last token, and has the others in another order."""
    size = target.vocabulary.size - 1
    draft = TableEngine.random(size, order=1, seed=4, spread=1.0, context_length=target.facts.context_length + 100)
    draft.vocabulary = Words([target.vocabulary.token_bytes(token_id) for token_id in range(size)][::-1])  # type: ignore[assignment]
    return ModelDrafter(draft, MappedSequence(draft, map_vocabulary(target.vocabulary, draft)))


MAKERS: dict[str, Callable[[TableEngine], Drafter]] = {
    "model": model,
    "mapped": mapped,
    "tree": lambda target: TreeDrafter(model(target)),
    "close tree": lambda target: TreeDrafter(model(target, sigma=0.3)),
    "hierarchical": hierarchical,
    "early-exit": lambda target: EarlyExitDrafter(target.related(1.0)),
    "medusa": lambda target: heads("medusa", target),
    "eagle": lambda target: heads("eagle", target),
    "eagle3": lambda target: Eagle3Drafter(opened(OpenHead, target), max_features=512),
    "dflash": lambda target: DFlashDrafter(opened(OpenBlock, target), max_features=512),
    "ngram": lambda target: NgramDrafter(min_ngram=1),
    "suffix": lambda target: SuffixDrafter(),
    "corpus": lambda target: SuffixDrafter(corpora=[SuffixIndex.of(joined(texts_like(target)))]),
    "kept answers": remembering,
    "lookahead": lambda target: LookaheadDrafter(ngram=3),
}


def averaged(target: TableEngine) -> TableEngine:
    """A table of order 1 that knows what the target, of order 2, does on average of the token further back."""
    ids = range(target.vocabulary.size)
    rows = np.stack([[target.row((first, last)) for first in ids] for last in ids])
    return TableEngine(rows.mean(axis=1), order=1)


def sequence_for(drafter: Drafter, target: TableEngine) -> CachedSequence:
    """The target's sequence with what the drafter reads of it."""
    cached = CachedSequence(target)
    cached.keep_features(drafter.wants_features)
    return cached


def law_score(rule: str, drafter_name: str, num_tokens: int, draft_length: int = 6) -> float:
    """How far the counts are from the law, as a standard normal score (Wilson-Hilferty)."""
    target = TableEngine.random(LETTERS, order=2, seed=3, spread=1.0, context_length=TEXT_LENGTH + 2)
    drafter = MAKERS[drafter_name](target)
    cached = sequence_for(drafter, target)
    counts = np.zeros((LETTERS,) * 3)
    num_accepted = 0
    for seed in range(math.ceil(num_tokens / TEXT_LENGTH)):
        run = run_of(cached, replace(PLAIN, seed=seed), TEXT_LENGTH, logprobs=False)
        events = speculative(run, FixedLength(drafter, draft_length), RULES[rule])
        ids = [0, 1, *(event.token_id for event in events)]
        num_accepted += run.stats.accepted_tokens
        np.add.at(counts, (ids[:-2], ids[1:-1], ids[2:]), 1)
    assert num_accepted > num_tokens / 20, "so few drafts stood that nothing was tested"
    expected = np.zeros_like(counts)
    for before in itertools.product(range(LETTERS), repeat=2):
        row = target.row(before).astype(np.float64)
        expected[before] = counts[before].sum() * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    tested = expected.min(axis=2) >= 5  # contexts too rare for the chi-square law are left out
    assert tested.sum() > LETTERS
    return chi_square_score(counts[tested], expected[tested], int(tested.sum()) * (LETTERS - 1))


def chi_square_score(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Wilson-Hilferty: the statistic as a standard normal score."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    root = math.cbrt(statistic / freedom)
    return (root - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
