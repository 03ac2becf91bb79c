"""Lines beside the result, on stderr: notes, errors, counters, the configuration. Escape codes only where they work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import click

from edgespec.cli import has_escapes, printable, wrapped
from edgespec.config.options import GenerateOptions
from edgespec.config.values import LOSSY, RuleName

if TYPE_CHECKING:
    from edgespec.config.options import Sampling
    from edgespec.formats.manifest import ModelFile
    from edgespec.reports import Stats
    from edgespec.runtime import Model  # commands that load nothing do not pay for these imports

Verbosity = Literal["quiet", "normal", "verbose"]
_VERBOSITY = "edgespec.verbosity"
_in_other_threads: list[Verbosity] = ["normal"]  # click tells only the thread that runs the command which one it is


def begin_command() -> None:
    """No verbosity was chosen yet."""
    _in_other_threads[0] = "normal"


def set_verbosity(context: click.Context, chosen: Verbosity) -> None:
    """Raises UsageError where the other one was chosen before."""
    if context.meta.setdefault(_VERBOSITY, chosen) != chosen:
        raise click.UsageError("--verbose and --quiet contradict each other: keep one", context)
    _in_other_threads[0] = chosen


def verbosity() -> Verbosity:
    """That of the command that is running, in any of its threads."""
    context = click.get_current_context(silent=True)
    chosen: Verbosity = _in_other_threads[0] if context is None else context.meta.get(_VERBOSITY, "normal")
    return chosen


def reply(text: str) -> None:
    """Dimmed lines on stderr that answer what the user typed; in a terminal they are wrapped at words."""
    text = wrapped(printable(text))
    click.echo(click.style(text, dim=True) if has_escapes() else text, err=True)


def note(text: str) -> None:
    """A line beside the result, unless --quiet is given."""
    if verbosity() != "quiet":
        reply(text)


def detail(text: str) -> None:
    """A line that only --verbose shows."""
    if verbosity() == "verbose":
        reply(f"note: {text}")


def complain(text: str) -> None:
    """One error line on stderr; in a terminal it is wrapped at words."""
    click.echo(wrapped(printable(f"error: {' '.join(text.split())}")), err=True)


def counted(count: int, noun: str) -> str:
    """'1 exchange', '2 exchanges'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short_configuration(model: Model, options: GenerateOptions) -> str:
    """The model and what runs it; of the rest only what changes a text, or rules out speculation."""
    drafter = options.drafter or model.drafter_name
    rule = options.verify or model.options.verify
    device = model.target.facts.device
    parts = [f"{model.pair.name} on {runner(model.pair.files['target'])}" + (f", {device}" if device != "cpu" else "")]
    if not model.target.facts.writes:
        parts.append("embeddings only")
    elif not model.target.facts.can_speculate:
        parts.append("no speculation (the model cannot roll back)")
    elif drafter == "none":
        parts.append("drafter none")
    if rule in LOSSY:
        parts.append(f"verify {rule} (changes the text)")
    return " | ".join(parts)


def runner(file: ModelFile) -> str:
    """What runs a model file, for people."""
    return "llama.cpp" if file.engine == "llamacpp" else "edgespec's kernels" if file.is_gguf else "ONNX Runtime"


def configuration_line(model: Model, sampling: Sampling, options: GenerateOptions) -> str:
    """The whole effective configuration in one line."""
    facts, engine = model.target.facts, runner(model.pair.files["target"])
    drafter = options.drafter or model.drafter_name
    rule = options.verify or model.options.verify
    length = model.options.draft_length if options.draft_length is None else options.draft_length
    parts = (
        model.pair.name,
        f"{engine} on {facts.device}, threads {facts.threads}, context {facts.context_length}",
        f"drafter {drafter}" if drafter == "none" else f"drafter {drafter}, draft length {length}, rule {rule}",
        _mode(model, rule),
        "random seeds" if sampling.seed is None else f"seed {sampling.seed}",
    )
    return " | ".join(parts)


def _mode(model: Model, rule: RuleName) -> str:
    if rule != "coupled":
        return "not reproducible"
    return "fastest mode" if model.target.facts.pinned_class is None else "reproducible"


def length_note(stats: Stats, options: GenerateOptions, *, in_chat: bool = False) -> str | None:
    """Why the answer stops in the middle, and how to get more; None where the model ended it."""
    if stats.finish_reason != "length":
        return None
    if stats.new_tokens == options.max_tokens:
        more = "/continue goes on, /set max-tokens gives more" if in_chat else "a larger -n (--max-tokens) gives more"
        return f"cut at {counted(stats.new_tokens, 'token')}: {more}"
    return "cut: the context is full; a larger -c (--ctx-size) gives more"


def stats_lines(stats: Stats) -> Iterable[str]:
    reused = f" ({stats.reused_tokens} cached)" if stats.reused_tokens else ""
    yield (
        f"{counted(stats.new_tokens, 'token')} at {stats.tokens_per_second:.1f} tokens/s, "
        f"prompt {stats.prompt_tokens}{reused} in {stats.prefill_s:.2f} s"
    )
    if stats.drafted_tokens:
        yield (
            f"{stats.target_passes} target passes, {stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens per pass"
        )
    else:
        yield f"{stats.target_passes} target passes, nothing drafted"
    planned = f" of {stats.planned_bytes / 1e6:.0f} planned" if stats.planned_bytes else ""
    yield (
        f"draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, overhead {stats.overhead_s:.3f} s; "
        f"peak memory {stats.peak_rss_bytes / 1e6:.0f} MB{planned}"
    )
