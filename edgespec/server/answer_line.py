"""The line that `serve -v` logs for each answer: its tokens, its speed and what drafting did. It holds no text."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.config import GenerateOptions, LoadOptions
from edgespec.engines.base import EngineFacts
from edgespec.reports import Stats


def answer_line(
    stats: Stats, drafted: Mapping[str, int], options: GenerateOptions, loaded: LoadOptions, facts: EngineFacts
) -> str:
    """`drafted`: tokens by drafter; `options`: of the request; `loaded`, `facts`: of the model."""
    read = f"{stats.prompt_tokens} prompt tokens ({stats.reused_tokens} cached) in {1000 * stats.prefill_s:.0f} ms"
    speed = f"{stats.new_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s ({stats.finish_reason or 'failed'})"
    return f"answer: {speed}, {read}, {_drafting(stats, drafted, options, loaded, facts)}"


def _drafting(
    stats: Stats, drafted: Mapping[str, int], options: GenerateOptions, loaded: LoadOptions, facts: EngineFacts
) -> str:
    if not stats.drafted_tokens:
        return f"nothing drafted: {why_not(stats, options, loaded, facts)}"
    by = ", ".join(f"{name} {count}" for name, count in sorted(drafted.items(), key=lambda pair: -pair[1]))
    return (
        f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted ({stats.acceptance_rate:.0%}; {by})"
    )


def why_not(stats: Stats, options: GenerateOptions, loaded: LoadOptions, facts: EngineFacts) -> str:
    """Why an answer has no drafted tokens, as far as it is known."""
    length = loaded.draft_length if options.draft_length is None else options.draft_length
    if options.drafter == "none":
        return "the request switched it off"
    if (options.drafter or loaded.drafter) == "none" or length == 0:
        return "it is switched off"
    if not facts.can_speculate:
        return facts.why_no_speculation
    failed = next((note for note in stats.notes if note.startswith("drafter ")), None)
    if failed is not None:
        return "a drafter failed"
    if not stats.rounds:
        return "the answer ended with its first token" if stats.new_tokens else "it had not begun"
    if length == "auto":
        return "no draft was expected to save time"
    return f"{options.drafter or loaded.drafter} proposed nothing"
