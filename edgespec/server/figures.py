"""What is told of answers in figures: token counts, times and drafting, log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.drafters.predicted import PREDICTION
from edgespec.reports import Stats, TokenEvent
from edgespec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from edgespec.server.answer import Answer


def token_logprob(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    """One token in OpenAI's shape: its text, log probability and bytes."""
    piece = vocabulary.piece(token_id)
    text = piece.decode("utf-8", errors="replace") if piece else vocabulary.token_name(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def logprobs_of(
    vocabulary: Vocabulary, events: Sequence[TokenEvent], *, with_ids: bool = False
) -> list[dict[str, Any]]:
    """Tokens with their `top_logprobs` in OpenAI's shape; `with_ids`: and with ids, as in llama-server."""
    found = []
    for event in events:
        pairs = ((event.token_id, event.logprob or 0.0), *event.top_logprobs)
        own, *top = [({"id": pair[0]} if with_ids else {}) | token_logprob(vocabulary, *pair) for pair in pairs]
        found.append(own | {"top_logprobs": top})
    return found


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Token counts of a request; the prompt counts once, however many answers it got."""
    prompt, new = answers[0].stats.prompt_tokens, sum(answer.stats.new_tokens for answer in answers)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": answers[0].stats.reused_tokens},
    }
    details = {}
    if answers[0].splits_reasoning:
        details["reasoning_tokens"] = sum(answer.num_reasoning_tokens for answer in answers)
    if answers[0].ticket.generation.request.options.prediction is not None:
        details["accepted_prediction_tokens"] = accepted = sum(answer.num_predicted for answer in answers)
        drafted = sum(answer.ticket.drafted.get(PREDICTION, 0) for answer in answers)
        details["rejected_prediction_tokens"] = drafted - accepted
    return found | ({"completion_tokens_details": details} if details else {})


def timings(stats: Stats, drafted: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Speed and drafting of one answer: llama.cpp's names, `rounds` and `mean_accepted_length`. Times in milliseconds.

    `drafted`: tokens by drafter. The mean width of a target pass is (draft_n + rounds) / rounds.
    """
    by = dict(drafted or {})
    read = stats.prompt_tokens - stats.reused_tokens
    prompt_ms, decode_ms = 1000 * stats.prefill_s, 1000 * max(stats.decode_s, 0.0)
    return {
        "prompt_n": read,
        "cache_n": stats.reused_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": read / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        "predicted_n": stats.new_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": 1000 / stats.tokens_per_second if stats.tokens_per_second else 0.0,
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "drafter": max(by, key=lambda name: by[name], default=None),
        "draft_n_by_drafter": by,
        "rounds": stats.rounds,
        "mean_accepted_length": stats.mean_accepted_length,
    }
