"""What `chat` offers for a GGUF that ONNX Runtime would run faster on this machine: to convert it, once.

What it would gain is measured on a few of its layers while the user reads the first answer, and on the converted model
afterwards; one that does not keep its promise is removed. Any key goes on with the chat instead; then, and where other
programs keep the machine busy, the next chat measures. Offered on x86 only, where ONNX Runtime's products take several
rows at little more than the price of one; elsewhere, and with options that are llama.cpp's, the file is run as it is.
The answer is remembered for this version of the file.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec import __version__
from edgespec.cli.session import Session, open_session
from edgespec.cli.skippable import Stopping, unless_skipped
from edgespec.cli.status import Stages, waiting
from edgespec.cli.stdin import is_interactive
from edgespec.cli.terminal import note, reply, verbosity
from edgespec.config.options import LoadOptions
from edgespec.config.sources import Settings
from edgespec.errors import EdgespecError
from edgespec.formats.manifest import ModelPair
from edgespec.installation import has_engine, is_importable
from edgespec.loading.own_models import fits
from edgespec.loading.registry import models_folder, registered_folders
from edgespec.loading.requirements import resolve_pair
from edgespec.platform import disk_cache
from edgespec.platform.machine import is_x86

if TYPE_CHECKING:
    from edgespec.export.conversion_gain import Gain

LEAST_GAIN, LEAST_PLAIN = 1.2, 1.0  # times as fast: with half of the drafts accepted, and without drafts
LEAST_TOKEN_S = 0.002  # a model that is faster already is not worth a question
LONG_DRAFTS = 0.7  # accepted of those that a type is chosen by: most tokens that drafts save are saved by long ones
MOST_MEASURING_S = 15.0  # on an idle machine it takes six or seven
_WITH_CHECKS = 10  # times the seconds of writing: two references and the graph read the check's texts
_AS_IT_IS = "using the file as it is"
KEEPS_GAIN = 1.05  # instead of the first, where the converted model was measured itself
# Settings that mean the same to both engines; any other was given for llama.cpp, or to look at something.
COMMON = {"model", "draft", "context_length", "threads", "reproducible", "memory", "recall", "learn", "corpus"}
QUANT_NOTES = {"int4": "its 4-bit weights stay what they are", "int8": "8 bits", "w8a8": "8 bits in whole numbers"}
logger = logging.getLogger(__name__)


def with_converted(settings: Settings) -> Settings:
    """The settings with the converted model instead of the file, where the user agreed to that before."""
    pair = _candidate(settings)
    name = None if pair is None else _answer(pair)
    if pair is None or not name or name not in registered_folders():
        return settings
    note(f"{name}, converted from {pair.target.name} (--engine llamacpp runs the file itself)")
    return _replaced(settings, name)


def offer_conversion(session: Session) -> Session:
    """The session, or one of the converted model, in which case this one's model is closed.

    For a chat whose first answer was printed: its text is kept. Raises what opening the file again raises.
    """
    pair = _candidate(session.settings)
    facts = session.model.target.facts
    runs_here = facts.name == "llamacpp" and not facts.placement
    if pair is None or verbosity() == "quiet" or not runs_here or _answer(pair) is not None:
        return session
    # Measuring, and converting even more, takes memory beyond a budget; a drafter that was set may need llama.cpp.
    if "memory" in session.settings.values or session.options.drafter is not None:
        return session
    try:
        gains = _measured(session)
    except (EdgespecError, OSError) as exc:
        logger.debug("what %s would gain was not measured: %r", pair.target, exc)
        return session
    if gains is None:
        logger.debug("what %s would gain was not measured: skipped, or too slow", pair.target)
        return session
    best = best_of(gains)
    if best is None:
        _remember(pair, "")
        return session
    click.echo(click.wrap_text(described(best, pair), shutil.get_terminal_size().columns), err=True)
    try:
        agrees = click.confirm("Convert it?", default=True, err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D: no answer, so that the next chat asks again
        note(f"\n{_AS_IT_IS}")
        return session
    if not agrees:
        _remember(pair, "")
        note(f"edgespec export {pair.target.name} --to onnx --quant {best.quant} converts it later")
        return session
    return _converted(session, pair, best)


def best_of(gains: Sequence[Gain]) -> Gain | None:
    """The type that gains most, of those that gain enough."""
    useful = [gain for gain in gains if gain.here[1] >= LEAST_TOKEN_S and gains_enough(gain, LEAST_GAIN)]
    return max(useful, key=lambda gain: gain.drafted(LONG_DRAFTS), default=None)


def gains_enough(gain: Gain, least: float) -> bool:
    """With drafts, and without them no slower than the file: where no draft is accepted, all tokens are plain ones."""
    return gain.plain >= LEAST_PLAIN and gain.drafted() >= least


def described(gain: Gain, pair: ModelPair) -> str:
    """What converting would gain, and what it takes."""
    here, plain, drafted = (f"{s * 1e3:.1f}" for s in (gain.here[1], gain.there[1], gain.drafted_s()))
    seconds = max(20, round(_WITH_CHECKS * gain.seconds, -1))
    return (
        f"{pair.target.name} takes {here} ms a token here. Converted to ONNX as {gain.quant} "
        f"({QUANT_NOTES[gain.quant]}) it would take about {plain} ms, and {drafted} ms where half of the drafted "
        f"tokens are accepted: {gain.plain:.1f} to {gain.drafted():.1f} times as fast. That takes "
        f"{gain.bytes / 1e6:.0f} MB in {models_folder()} and about {seconds:.0f} s, and is compared with the file."
    )


def _candidate(settings: Settings) -> ModelPair | None:
    """The pair of the settings, if it is a GGUF that may be converted and a person chats; pipes get what they name."""
    values = settings.values
    is_plain = "model" in values and values.get("engine", "auto") == "auto" and not values.get("reproducible")
    if not is_plain or not is_interactive() or not _is_possible():
        return None
    if settings.part("load").keys() - COMMON - {"engine", "reproducible"}:
        return None
    try:
        pair = resolve_pair(LoadOptions(**settings.part("load")))
    except EdgespecError:  # loading says it
        return None
    is_whole = pair.files.keys() <= {"target", "draft"} and not pair.heads
    return pair if is_whole and all(file.path.suffix == ".gguf" for file in pair.files.values()) else None


def _is_possible() -> bool:
    return is_x86() and has_engine("onnx") and has_engine("llamacpp") and is_importable("gguf")


def _measured(session: Session) -> list[Gain] | None:
    """The gains that there is room for; None where the user went on, or it took too long. Raises as `measure_gains`."""
    from edgespec.export.conversion_gain import measure_gains

    def measure(stopping: Stopping) -> list[Gain]:
        with session.model.measuring(keeps_text=True) as engines:
            threads = engines[0].facts.threads
            return measure_gains(*engines, session.model.pair.target, threads, stopping.add)

    with waiting("measuring what ONNX would gain, once for this file", "any key skips it"):
        found = unless_skipped(measure, MOST_MEASURING_S)
    return None if found is None else [gain for gain in found if fits(gain.bytes) is not False]


def _converted(session: Session, pair: ModelPair, promised: Gain) -> Session:
    from edgespec.cli.export import check_lines
    from edgespec.export.accuracy import ExportRefused
    from edgespec.export.pair import export_pair
    from edgespec.export.request import ExportRequest
    from edgespec.loading.engine_choice import GAINING, shipped_heads

    request = ExportRequest(
        source=str(pair.target),
        output=_new_folder(pair, promised.quant),
        draft=None if pair.draft is None else str(pair.draft),
        heads=None if pair.draft or promised.quant not in GAINING else shipped_heads(Path(pair.target)),
        quants={"onnx": promised.quant},
        made_by=f"edgespec {__version__}",
    )
    try:
        done = export_pair(request, Stages())
    except (EdgespecError, KeyboardInterrupt) as exc:
        if isinstance(exc, ExportRefused):
            _remember(pair, "")
        note(f"{str(exc) or 'stopped'}\n{_AS_IT_IS}")
        return session
    note(next(check_lines(done.figures)))
    old = session
    session.model.close()
    try:
        found = _tried(_replaced(old.settings, done.folder.name), promised)
    except EdgespecError as exc:
        note(str(exc))
        found = None
    _remember(pair, done.folder.name if found else "")
    if found is not None:
        return _going_on(found, old)
    note(_AS_IT_IS)
    shutil.rmtree(done.folder, ignore_errors=True)
    return _going_on(open_session(old.settings, remembers=True), old)


def _going_on(found: Session, old: Session) -> Session:
    """`found` with all that was set in the chat so far."""
    return replace(found, sampling=old.sampling, options=old.options, shown=old.shown, seen_notes=old.seen_notes)


def _tried(settings: Settings, promised: Gain) -> Session | None:
    """A session of the converted model, if it is as fast as it must be."""
    from edgespec.export.conversion_gain import costs_of

    found = open_session(settings, remembers=True)
    with found.model.measuring() as engines:
        there, share = costs_of(*engines)
    gain = replace(promised, there=there, draft_share=share)
    reply(f"measured: {gain.plain:.2f} to {gain.drafted():.2f} times as fast")
    if gains_enough(gain, KEEPS_GAIN):
        return found
    found.model.close()
    return None


def _new_folder(pair: ModelPair, quant: str) -> Path:
    """Where a conversion goes: two files of one name in two folders are two models."""
    found = models_folder() / f"{pair.target.stem}-{quant}"
    return found if not found.exists() else found.with_name(f"{found.name}-{_key(pair)[:8]}")


def _replaced(settings: Settings, name: str) -> Settings:
    left = settings.without({"draft"})
    return Settings({**left.values, "model": name}, {**left.sources, "model": "converted by chat"})


def _answer(pair: ModelPair) -> str | None:
    """The name of the converted model, "" after a no, None if it was never asked."""
    found: str | None = disk_cache.get("converted", _key(pair), str)
    return found


def _remember(pair: ModelPair, name: str) -> None:
    disk_cache.put("converted", _key(pair), name)


def _key(pair: ModelPair) -> str:
    files: list[Path] = sorted(file.path for file in pair.files.values())
    return disk_cache.key_of("converted", *(disk_cache.file_key(path) for path in files))
