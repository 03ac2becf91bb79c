"""`edgespec race`: plain and speculative decoding of one prompt, side by side, and why one of them was faster.

Each side runs alone; the plain one comes first and is shown again beside the other, by the same clock. Why so and not
at the same time or in turns: `edgespec.bench.race`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from edgespec.bench.output import check_file
from edgespec.bench.race import Race
from edgespec.bench.race_reasons import proof, reasons, speed
from edgespec.cli import FilePath
from edgespec.cli.generate import encode_prompt, read_prompt
from edgespec.cli.help import SettingsCommand
from edgespec.cli.interrupt import Interruption, stops
from edgespec.cli.main import FAILED, INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.race_pair import SOURCE, choose_pair, demonstrating, names_model
from edgespec.cli.race_report import print_json, print_plainly
from edgespec.cli.race_view import Side, frame, recorder, result, svg
from edgespec.cli.session import Session, open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config import SessionOptions
from edgespec.config.options import PRINTING, REMEMBERING, STRUCTURE
from edgespec.config.sources import Settings
from edgespec.errors import Cancelled, CapabilityError, ConfigError
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.tuning.profiles import with_profile

DEFAULT_TOKENS = 128
FRAMES_PER_SECOND = 12
PLAIN, DRAFTED = "plain", "speculative"
HOW = "each side runs alone, so that neither slows the other; the left one ran first and is replayed by the same clock"


@click.command(cls=SettingsCommand, short_help="Plain and speculative decoding of one prompt, side by side.")
@settings_options("load", "generate", "sampling", "session", leave_out=(*STRUCTURE, *PRINTING, *REMEMBERING))
@click.option("-p", "--prompt", metavar="TEXT|-", help="The prompt; - reads it from standard input.")
@click.option(
    "-y/--no",
    "--yes/--demo",
    "expands",
    default=None,
    help="Without MODEL: expand the demo pair without asking, or race the small one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the race.")
@click.option("--svg", "picture", type=FilePath(), metavar="FILE", help="Draw the finish as an image.")
def command(
    model_name: str | None,
    config_file: Path | None,
    prompt: str | None,
    expands: bool | None,
    as_json: bool,
    picture: Path | None,
    **given: Any,
) -> int:
    """Decode one prompt plainly and with speculation, side by side, and say why one of them is faster.

    MODEL is a registry name or the path of a model. Without it the demo pair runs, expanded once to the cost of
    a 1B model if you agree; the small one is too cheap for speculation to gain. That race runs in reproducible
    mode, in which both sides write the same text, unless --no-reproducible is given. Exit code 1 when the texts
    differ in that mode.
    """
    # without a profile yet: the pair may change, and takes the one of its own
    settings = resolve_settings({**given, "no_profile": True}, model_name, config_file, speculates=True)
    _check(settings.part("load"), settings.part("session"))
    if picture is not None:
        check_file("--svg", picture)
    text = PROMPTS[0].text if prompt is None else read_prompt(prompt)
    is_own_choice = names_model(settings)
    settings = choose_pair(settings, expands)
    if not given["no_profile"]:  # that of the pair which was chosen
        settings = with_profile(settings, leaves_plain=True)
    session = open_session(settings) if is_own_choice else _open_demonstration(settings)
    if session.options.max_tokens is None:
        session.options = dataclasses.replace(session.options, max_tokens=DEFAULT_TOKENS)
    with session.model:
        show_configuration(session)
        with Race(session.model, encode_prompt(session, text), session.sampling, session.options) as race:
            return _run(session, race, as_json=as_json, picture=picture)


def _open_demonstration(settings: Settings) -> Session:
    """Our own pair in reproducible mode; in the fastest one where this machine has no widths of equal bits."""
    chosen = demonstrating(settings)
    try:
        return open_session(chosen)
    except CapabilityError as exc:
        if chosen.sources.get("reproducible") != SOURCE:
            raise
        note(f"note: {exc}")
        return open_session(demonstrating(settings.below({"reproducible": False}, SOURCE)))


def _check(load: dict[str, Any], shown: dict[str, Any]) -> None:
    if load.get("drafter") == "none" or load.get("draft_length") == 0:
        raise ConfigError(
            "a race is between plain decoding and speculation, which --drafter none and --draft-length 0 turn off"
        )
    options = SessionOptions(**shown)
    if options.system and not options.chat_template:
        raise ConfigError("--system needs the chat template, which --no-chat-template switches off: keep one")


def _run(session: Session, race: Race, *, as_json: bool, picture: Path | None) -> int:
    console = Console(highlight=False)
    is_live = sys.stdout.isatty() and not as_json and not console.is_dumb_terminal
    with stops(race.cancel) as interruption:
        try:
            if is_live:
                _race_live(session, race, interruption, console)
            else:
                _race_quietly(race, interruption)
            outcome = race.outcome(checks_pace=not interruption.happened)
        except Cancelled:
            note("stopped before the end, so there is no result")
            return INTERRUPTED
    model = race.model
    name, is_automatic = model.target.vocabulary.token_name, model.options.draft_length == "auto"
    lines = [speed(outcome), proof(outcome, name), *reasons(outcome, model.drafter_name, is_automatic=is_automatic)]
    if as_json:
        print_json(session, outcome, lines)
    elif is_live:
        _print_result(race, lines, console)
    else:
        print_plainly(outcome, lines)
    if picture is not None:
        _draw(race, lines, picture)
    if interruption.happened:
        return INTERRUPTED
    return FAILED if outcome.is_reproducible and outcome.divergence is not None else 0


def _race_quietly(race: Race, interruption: Interruption) -> None:
    """Both laps without a picture. Raises Cancelled."""
    race.get_ready()
    _check_going(interruption)
    for _ in race.plain_lap():
        pass
    _check_going(interruption)
    race.change_sides()
    for _ in race.drafted_lap():
        pass
    _check_going(interruption)


def _race_live(session: Session, race: Race, interruption: Interruption, console: Console) -> None:
    """Both laps in the terminal's other screen, then what is left of the plain one. Raises Cancelled."""
    note("warming up")
    race.get_ready()
    _check_going(interruption)
    head = f"{session.model.pair.name} on {session.model.target.facts.name}, seed {session.sampling.seed}"
    with Live(console=console, screen=True, auto_refresh=False) as live:
        show = _Picture(race, live, console, head)
        for _ in race.plain_lap():
            show.maybe(race.plain.stats.wall_s, "runs next, alone")
        _check_going(interruption)
        show.now(race.plain.stats.wall_s, "gets ready")
        race.change_sides()
        for _ in race.drafted_lap():
            show.maybe(race.drafted.stats.wall_s)
        _check_going(interruption)
        _replay(race, show, interruption)


def _check_going(interruption: Interruption) -> None:
    if interruption.happened:
        raise Cancelled("Ctrl-C")


def _replay(race: Race, show: _Picture, interruption: Interruption) -> None:
    """The rest of the recorded plain lap at its own speed; Ctrl-C goes on to the result."""
    began_s, clock_s = perf_counter(), race.drafted.stats.wall_s
    while clock_s < race.plain.stats.wall_s and not interruption.happened:
        show.now(clock_s)
        sleep(1 / FRAMES_PER_SECOND)
        clock_s = race.drafted.stats.wall_s + perf_counter() - began_s
    show.now(max(race.plain.stats.wall_s, race.drafted.stats.wall_s))


class _Picture:
    """Draws the race at a moment of its clock, no more often than eyes can use."""

    def __init__(self, race: Race, live: Live, console: Console, head: str) -> None:
        self._race, self._live, self._console, self._head = race, live, console, head
        self._drawn_s = 0.0

    def maybe(self, clock_s: float, waiting: str = "") -> None:
        if perf_counter() - self._drawn_s >= 1 / FRAMES_PER_SECOND:
            self.now(clock_s, waiting)

    def now(self, clock_s: float, waiting: str = "") -> None:
        sides = _sides(self._race, clock_s, waiting)
        self._live.update(frame(sides, self._head, HOW, self._console), refresh=True)
        self._drawn_s = perf_counter()


def _sides(race: Race, clock_s: float, waiting: str = "") -> tuple[Side, Side]:
    return Side(PLAIN, race.plain, clock_s), Side(DRAFTED, race.drafted, clock_s, waiting)


def _print_result(race: Race, lines: list[str], console: Console) -> None:
    console.print(result(_sides(race, float("inf")), console))
    for style, line in zip(("bold", "green" if "DIFFERENT" not in lines[1] else "red"), lines, strict=False):
        console.print(Text(line, style=style))
    for line in lines[2:]:
        console.print(Text(line))


def _draw(race: Race, lines: list[str], path: Path) -> None:
    """The moment at which the first side was done, and the result under it."""
    canvas = recorder()
    moment_s = min(race.plain.stats.wall_s, race.drafted.stats.wall_s)
    canvas.print(result(_sides(race, moment_s), canvas))
    canvas.print(Group(*(Text(line, style="bold" if line is lines[0] else "") for line in lines)))
    svg(canvas, path, f"edgespec race, the moment {_first(race)} is done")
    note(f"drew {path}")


def _first(race: Race) -> str:
    return DRAFTED if race.drafted.stats.wall_s <= race.plain.stats.wall_s else PLAIN
