"""A draft model with a draft model of its own: the small one looks ahead, the medium filters, the target verifies.

What is drafted is the medium's own text, as if the medium had drafted alone: under the coupled rule its picks with the
target's noise, under a rule that compares distributions its samples with the draft noise, each with the medium's
distribution. The small model changes how many passes of the medium that takes, and nothing else (staged speculation,
arXiv 2308.04623, with the coupled rule between the stages). So it is the medium whose temperature may differ from the
target's, and the small model, which has to agree with the medium, samples at the medium's.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.chain import DrawnChain
from edgespec.drafters.inner_length import InnerLength
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.temperature import Factor
from edgespec.engines.base import Engine
from edgespec.engines.sequence import restored_on_failure
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds, Verdict

_READ_ALONG = 4  # committed tokens that share the medium's first pass with small ones; more are read before it


class HierarchicalDrafter(ModelDrafter):
    """Drafts with the engine `medium`, which it owns and closes, ahead of which `small` looks: borrowed, as its bytes.

    A full window of the medium slides as a draft model's does. `temperature`: what both sample at over the target's, or
    "auto".
    """

    name = "hierarchical"

    def __init__(self, small: ModelDrafter, medium: Engine, temperature: Factor = 1.0) -> None:
        super().__init__(medium, temperature=temperature)
        self._small = small
        self._lengths: dict[bool, InnerLength] = {}  # by whether the text is sampled
        self._unlearnt: list[tuple[InnerLength, int, int, int]] = []  # with tokens drafted before, agreed, tried

    def begin(self, prompt_ids: TokenIds) -> None:
        super().begin(prompt_ids)
        self._small.begin(prompt_ids)

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of the medium's tokens, as ModelDrafter's."""
        most = min(request.max_tokens, self._engine.facts.context_length // 4)
        if most < 1:
            return EMPTY_DRAFT
        self._unlearnt = []
        self.temperature.learn(request.sampler, request.token_ids)
        lengths = self._lengths.setdefault(request.sampler.sampling.temperature > 0, InnerLength())
        sampler = self.temperature.sampler(request.sampler)
        chain = DrawnChain(request, most, self._engine.vocabulary.end_ids, sampler)
        with restored_on_failure(self._cache):
            missing = self._missing(request.token_ids, most)
            while chain.is_open:
                missing = self._inner_round(chain, missing, lengths)
        if not request.needs_distributions:
            self.temperature.drafted(request.token_ids.size, chain.token_ids, chain.distributions)
        return chain.as_draft()

    def _missing(self, token_ids: TokenIds, most: int) -> TokenIds:
        """The few last tokens of the window that the medium still lacks; what it lacked before them is read."""
        window = self._window(token_ids, most)
        self._cache.reuse(window)
        missing = window[self._cache.length :]
        if missing.size > _READ_ALONG:
            self._cache.feed(missing[:-1])
            return missing[-1:]
        return missing

    def _inner_round(self, chain: DrawnChain, missing: TokenIds, lengths: InnerLength) -> TokenIds:
        """The small model looks ahead, the medium reads `missing` and verifies in one pass; what it lacks then."""
        before = len(chain.token_ids)
        ahead = self._look_ahead(chain, lengths)
        fed = Draft.chain(np.concatenate((missing[1:], ahead.token_ids)))
        started_s = perf_counter()
        logits = self._cache.score(int(missing[0]), fed)[missing.size - 1 :]
        lengths.passed(1 + fed.num_tokens, perf_counter() - started_s)
        agreed, agrees = 0, True
        while agrees:
            is_room_left = chain.add(logits[agreed])
            agrees = agreed < ahead.num_tokens and chain.token_ids[-1] == ahead.token_ids[agreed]
            if not (agrees and is_room_left):
                break
            agreed += 1
        self._cache.keep(int(missing[0]), fed, tuple(range(missing.size - 1 + agreed)))
        hits, tried = agreed + agrees, min(agreed + 1, ahead.num_tokens)
        if chain.request.needs_distributions:
            # What is behind a refused token must decide nothing: its noise is used again.
            self._unlearnt.append((lengths, before, hits, tried))
        else:
            lengths.outcome(hits, tried)
        return np.array(chain.token_ids[-1:], np.int32)

    def _look_ahead(self, chain: DrawnChain, lengths: InnerLength) -> Draft:
        """Tokens of the small model behind those of the chain, drawn with the noise that the medium's will be."""
        count = lengths.best(chain.most - len(chain.token_ids) - 1)
        if not count:
            return EMPTY_DRAFT
        request = DraftRequest(
            chain.text,
            count,
            chain.sampler,
            chain.request.needs_distributions,
            num_drafted=len(chain.token_ids),
        )
        num_uncached, started_s = self._small.num_uncached(request.token_ids), perf_counter()
        ahead = self._small.look_ahead(request)
        if ahead.num_tokens and num_uncached <= _READ_ALONG:
            lengths.drafted(ahead.num_tokens, perf_counter() - started_s)
        return ahead

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        for lengths, before, agreed, tried in self._unlearnt:
            known = max(len(verdict.accepted_nodes) + 1 - before, 0)
            lengths.outcome(min(agreed, known), min(tried, known))
        self._unlearnt = []

    def reset_engine(self) -> Engine | None:
        self._small.reset_engine()
        return super().reset_engine()

    def set_threads(self, threads: int) -> None:
        self._small.set_threads(threads)
        super().set_threads(threads)

    def cancel(self) -> None:
        self._small.cancel()
        super().cancel()

    def clear_cancel(self) -> None:
        self._small.clear_cancel()
        super().clear_cancel()
