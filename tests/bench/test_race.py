"""A race: both sides decode the same text, each alone, and what is said of them follows from what was measured."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import command_line
from command_line import POSIX, Terminal, refusal
from edgespec.cli.race import OTHER_COLOUR, Lap, Mark, coloured, legend, panels
from edgespec.reports import TokenEvent

FIXED = ("--reproducible", "-n", "24", "--drafter", "model", "--draft-length", "4", "--seed", "7")
pytestmark = pytest.mark.usefixtures("one_thread")


run = partial(command_line.run, "race")


def lap(drafters: list[str | None], token_s: float = 0.1) -> Lap:
    """A made-up lap: one token every `token_s`, the first with the prompt at 1 s."""
    events = [TokenEvent(i, f"t{i} ", i, drafter) for i, drafter in enumerate(drafters)]
    return Lap("plain", [Mark(event, 1.0 + i * token_s) for i, event in enumerate(events)], is_done=True)


# the picture


def test_tokens_have_the_colour_of_their_drafter_and_are_counted() -> None:
    marks = lap([None, *(["model"] * 3 + [None]) * 3]).marks
    assert legend(marks).plain == "tokens: 4 the target's own, 9 drafted by model"
    text = coloured(lap([None, "model", "ngram", "suffix", "medusa"]).marks)
    styles = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    assert styles == {"t1": "cyan", "t2": "yellow", "t3": "magenta", "t4": OTHER_COLOUR}
    hostile = Mark(TokenEvent(0, "a\x1b[2Jb\r", 0, None), 0.0)
    assert coloured([hostile]).plain == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_panels_fit_the_terminal_and_show_the_end_of_a_long_text(columns: int) -> None:
    side = lap([None, *["model", None] * 400], 0.01)
    console = Console(width=columns, height=24, file=io.StringIO(), force_terminal=True)
    lines = console.render_lines(panels([side, side], 99.0, columns, lines=6), pad=False)
    shown = ["".join(segment.text for segment in line) for line in lines]
    assert all(len(line) <= columns for line in shown)
    assert "t800" in "".join(shown) and "t0 " not in "".join(shown)
    assert len(shown) == 8 + 1


# the command


def test_through_a_pipe_there_are_no_control_codes() -> None:
    result = run(*FIXED)
    assert result.exit_code == 0, result.output
    _, _, below = result.stdout.partition("tokens: ")
    legend, *said, end = below.splitlines()
    assert "the target's own" in legend and "speculative" in result.stdout
    assert re.match(r"\d+\.\d\dx: ", said[0]) and "identical" in said[1]
    assert "draft tokens accepted" in said[2] and "a pass over" in said[3] and "noise" in end
    assert "\x1b" not in result.stdout and "seed 7" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--drafter", "none"], "--drafter none"),
        (["demo", "-p", " "], "the prompt is empty"),
        (["demo", "-s", "Be brief.", "--no-chat-template"], "--system needs the chat template"),
        (["demo", "--raw"], "no such option"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    refusal(run(*arguments), said)


def test_the_finish_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "race.svg"
    result = run("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8").replace("&#160;", " ")
    assert drawn.startswith("<svg") and len(drawn) < 60_000 and "font-face" not in drawn
    assert set(re.findall(r"https?://[^\"' )]+", drawn)) == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "identical to plain decoding" in drawn
    assert "drafted by model" in drawn
    assert list(tmp_path.iterdir()) == [picture]


# the terminal


def seen(*arguments: str, **environ: str) -> tuple[int, str]:
    """The exit code and all that appears."""
    with Terminal("race", *arguments, size=(80, 24), **environ) as terminal:
        shown = terminal.rest()
        return terminal.process.returncode, shown


@POSIX
def test_a_terminal_sees_the_race_and_keeps_the_result() -> None:
    code, shown = seen("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--seed", "7")
    assert code == 0
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1  # the other screen, and back
    live, kept = shown.split("\x1b[?1049l")
    assert "each side runs alone" in live
    assert "identical to plain decoding" in kept
    assert "\x1b[36m" in kept  # cyan


@POSIX
def test_no_colour_and_a_dumb_terminal_are_heeded() -> None:
    code, shown = seen("demo", "-n", "8", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
    code, shown = seen("demo", "--reproducible", "-n", "8", TERM="dumb")
    assert code == 0
    assert "\x1b[?" not in shown
    assert "speculative" in shown and "identical to plain decoding" in shown


@POSIX
def test_an_interrupt_gives_the_terminal_back() -> None:
    with Terminal("race", "demo", "-n", "2000", "--ignore-eos", size=(80, 24)) as terminal:
        begun = terminal.wait_for(" plain ")
        terminal.type("\x03")
        shown = begun + terminal.rest()
        assert terminal.process.returncode == 130
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back
    kept = shown.split("\x1b[?1049l")[1]
    assert "stopped before the end" in kept
    assert "Traceback" not in shown and "identical" not in shown
