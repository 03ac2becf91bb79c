"""A race: both sides decode the same text, each alone, and what is said of them follows from what was measured."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.bench import offer as offer_module
from edgespec.bench import race as race_module
from edgespec.bench.expanded_pair import ExpandedPair
from edgespec.bench.expansion import Shape
from edgespec.bench.race import Lap, Mark, Outcome, Race
from edgespec.bench.race_reasons import break_even, prices, proof, reasons, speed
from edgespec.cli import race_pair, race_view
from edgespec.cli.main import cli
from edgespec.cli.race_view import Side, coloured, frame, legend, recorder, svg
from edgespec.control.cost import CostCurve
from edgespec.control.draft_cost import DraftCost
from edgespec.control.length import expected_speedup
from edgespec.engines.disk_cache import cache_folder
from edgespec.errors import Cancelled, CapabilityError, ModelNotFound, PromptError
from edgespec.reports import RoundRecord, Stats, TokenEvent
from edgespec.tuning.verify import Divergence

GREEDY = Sampling(temperature=0.0)
FEW = GenerateOptions(max_tokens=24)
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has neither signals for one child nor pseudo terminals")


pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["race", *arguments], input=stdin)


def load(**options: object) -> edgespec.Model:
    return edgespec.load("demo", engine="llamacpp", threads=1, **options)


def finished(race: Race) -> Outcome:
    race.get_ready()
    for _ in race.plain_lap():
        pass
    race.change_sides()
    for _ in race.drafted_lap():
        pass
    return race.outcome()


def lap(drafters: list[str | None], token_s: float, rounds: list[RoundRecord]) -> Lap:
    """A made-up lap: one token every `token_s`, the first with the prompt at 1 s."""
    marks = [
        Mark(TokenEvent(i, f"t{i} ", i, drafter, -1.0, None), 1.0 + i * token_s) for i, drafter in enumerate(drafters)
    ]
    stats = Stats(
        prompt_tokens=8,
        new_tokens=len(marks),
        rounds=len(rounds),
        drafted_tokens=sum(r.drafted_tokens for r in rounds),
        accepted_tokens=sum(r.accepted_tokens for r in rounds),
        prefill_s=1.0,
        draft_s=sum(r.draft_s for r in rounds),
        verify_s=sum(r.verify_s for r in rounds),
        wall_s=marks[-1].at_s,
        finish_reason="length",
    )
    return Lap(marks, rounds, stats)


@pytest.fixture
def outcome() -> Outcome:
    """13 tokens: plainly 0.1 s each; with speculation three rounds of 4 tokens, each of 0.2 s."""
    plain = lap([None] * 13, 0.1, [RoundRecord(9 + i, None, 0, 0, (), 0.0, 0.1) for i in range(12)])
    rounds = [RoundRecord(9 + 4 * i, "model", 3, 3, (0.9,) * 3, 0.03, 0.15) for i in range(3)]
    drafted = lap([None, *(["model"] * 3 + [None]) * 3], 0.05, rounds)
    curve = CostCurve({1: 0.1, 2: 0.12, 4: 0.15, 5: 0.5, 16: 2.0})
    return Outcome(plain, drafted, None, True, True, 1.0, None, curve, {"model": DraftCost(0.01, 0.001)})


# the laps


def test_both_sides_write_the_same_tokens_and_the_events_say_who_drafted():
    with load(drafter="model", draft_length=4) as model:
        prompt_ids = model.encode_chat([{"role": "user", "content": "I need a bus to Fresno."}])
        expected = model.generate(prompt_ids, GREEDY, FEW).token_ids
        with Race(model, prompt_ids, GREEDY, FEW) as race:
            found = finished(race)
    assert found.divergence is None
    assert found.plain.token_ids == found.drafted.token_ids == expected
    assert {mark.event.drafter for mark in found.plain.marks} == {None}
    names = [mark.event.drafter for mark in found.drafted.marks]
    assert names.count("model") == found.drafted.stats.accepted_tokens > 0
    assert found.plain.stats.drafted_tokens == 0 < found.drafted.stats.drafted_tokens
    assert len(found.drafted.rounds) == found.drafted.stats.rounds < len(found.plain.rounds)
    for one in (found.plain, found.drafted):
        times = [mark.at_s for mark in one.marks]
        assert times == sorted(times)
        assert times[-1] <= one.stats.wall_s
        assert one.stats.reused_tokens < 4  # the warm-up left nothing of the prompt


def test_reproducible_mode_is_compared_with_the_fastest(monkeypatch: pytest.MonkeyPatch):
    opened: list[edgespec.Model] = []

    def load_alone(**options: object) -> edgespec.Model:
        assert all(each._executor.turn.is_shut for each in opened), "two models are in memory"
        opened.append(edgespec.load(**options))
        return opened[-1]

    monkeypatch.setattr(race_module, "load", load_alone)
    given = load_alone(model="demo", engine="llamacpp", threads=1, reproducible=True)
    with Race(given, given.encode("A bus"), GREEDY, FEW) as race:
        found = finished(race)
        assert race.model is opened[-1] and race.model.reproducible
        assert race.model.target.vocabulary.token_name(found.plain.token_ids[0])
    assert [each.reproducible for each in opened] == [True, False, True]
    assert opened[1].drafter_name == "none"
    assert all(each._executor.turn.is_shut for each in opened)
    assert found.is_reproducible and found.divergence is None
    assert found.fastest is not None and found.fastest > 0


def test_a_race_that_is_cancelled_while_it_gets_ready_does_not_go_on():
    with load(reproducible=True) as model, Race(model, model.encode("A bus"), GREEDY, FEW) as race:
        race.cancel()
        with pytest.raises(Cancelled):
            race.get_ready()
    assert not race.plain.marks


def test_without_reproducible_there_is_no_other_mode():
    with load(reproducible=False) as model, Race(model, model.encode("A bus"), GREEDY, FEW) as race:
        found = finished(race)
        assert race.model is model
    assert not found.is_reproducible
    assert found.fastest is None
    assert found.pace is not None


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs():
    with load(context_length=32) as model, pytest.raises(PromptError, match="context holds only 32"):
        Race(model, [5] * 40, GREEDY, FEW)


# what is said


def test_the_balance_is_exact(outcome: Outcome):
    costs = prices(outcome)
    assert costs.round == pytest.approx(2.0)
    assert (costs.verify, costs.draft, costs.rest) == pytest.approx((1.5, 0.3, 0.2))
    assert (costs.drafter, costs.width) == ("model", 4)
    assert costs.pass_ == pytest.approx(1.5)
    assert outcome.speed_ratio == pytest.approx(outcome.drafted.stats.mean_accepted_length / costs.round)
    # with every token right, 3 drafted at a time: 4 tokens for a pass of .15 s, .02 s of ours and 3 drafted ones
    assert costs.best[0] == 3
    assert costs.best[1] == pytest.approx(0.4 / (0.17 + 3 * 0.01), rel=1e-6)


def test_drafting_pays_from_where_it_says():
    pass_s = [0.0, 1.0, *(1.5 + 0.25 * extra for extra in range(15))]
    share, length = break_even(pass_s, 0.05)
    assert share is not None
    speedups = {
        rate: max(expected_speedup(rate, k, pass_s, 0.05) for k in range(1, 16)) for rate in (share, share - 1e-3)
    }
    assert speedups[share] > 1 > speedups[share - 1e-3]
    assert expected_speedup(share, length, pass_s, 0.05) == speedups[share]
    assert break_even([0.0, *(float(width) for width in range(1, 17))], 0.05)[0] is None


def test_the_reasons_name_the_figures(outcome: Outcome):
    assert speed(outcome).startswith("2.00x: 20.0 tokens/s with speculation, 10.0 without")
    balance, limit, choice, noise = reasons(outcome, "auto", is_automatic=True)
    assert balance.startswith("Faster: a round emitted 4.00 tokens (100% of 9 draft tokens accepted)")
    assert "time of 2.00 plain tokens: target pass 1.50, drafting 0.30, other 0.20" in balance
    assert "a pass over 4 tokens costs 1.50 plain ones" in limit
    assert "gains at most 2.00x" in limit
    assert choice == "auto drafted in 3 of 3 rounds (model 3), 3.0 tokens per draft."
    assert noise.startswith("Noise: plain decoding, run twice, reached 100% of its first speed")
    assert "fixed, up to 3" in reasons(outcome, "model", is_automatic=False)[2]


def test_slower_nothing_drafted_and_a_changed_pace_are_told(outcome: Outcome):
    plain_rounds = outcome.plain.rounds
    slow = dataclasses.replace(outcome, drafted=lap([None] * 13, 0.15, outcome.drafted.rounds), pace=0.7)
    said = reasons(slow, "auto", is_automatic=True)
    assert said[0].startswith("Slower: ")
    assert "reached 70% of its first speed" in said[-1]
    assert "--draft-length auto" in reasons(slow, "model", is_automatic=False)[2]
    idle = dataclasses.replace(outcome, drafted=lap([None] * 13, 0.1, plain_rounds))
    assert speed(idle) == ("no ratio: nothing was drafted, so both sides decoded plainly (10.0 and 10.0 tokens/s)")
    said = reasons(dataclasses.replace(idle, pace=0.98), "auto", is_automatic=True)
    assert said[-2].endswith("decoded plainly throughout.") and not any("Faster" in line for line in said)
    assert said[-1].startswith("Noise: plain decoding, run twice, reached 98%")
    assert reasons(dataclasses.replace(slow, pace=0.4), "auto", is_automatic=True)[0].startswith("About as fast")
    other = reasons(dataclasses.replace(outcome, fastest=1.25), "auto", is_automatic=True)
    assert "plain decoding is 1.25x as fast; against that, speculation reached 1.60x" in other[-1]
    free = reasons(dataclasses.replace(outcome, fastest=0.9), "auto", is_automatic=True)
    assert free[-1] == "Both sides ran in reproducible mode, which costs plain decoding nothing here."
    stuck = dataclasses.replace(outcome, curve=None, draft_costs={})
    assert reasons(stuck, "auto", is_automatic=True) == [
        "This model cannot roll back its KV cache, so speculation is impossible."
    ]
    short = dataclasses.replace(outcome, plain=lap([None], 0.1, []))
    assert "larger -n" in speed(short)
    assert reasons(short, "auto", is_automatic=True) == []


def test_the_proof_is_honest_about_each_case(outcome: Outcome):
    def said(**changes: object) -> str:
        return proof(dataclasses.replace(outcome, **changes), "<{}>".format)

    parting = Divergence(6, 1, 2, 0.01)
    assert said() == "identical: all 13 tokens, compared one by one"
    assert said(divergence=parting).startswith(
        "DIFFERENT, although reproducible mode guarantees the same text: outputs differ at token 7"
    )
    allowed = said(divergence=parting, is_reproducible=False)
    assert allowed.startswith("different, which the fastest mode allows")
    assert "outputs differ at token 7: '<1>' plain, '<2>' with speculation, 0.01 apart in logits. " in allowed
    assert "apart" not in said(divergence=parting, is_reproducible=False, is_greedy=False)
    assert "'<1>' plain, the end with" in said(divergence=Divergence(3, 1, None, None), is_reproducible=False)


# the picture


def test_a_side_shows_what_had_come_by_its_clock(outcome: Outcome):
    side = Side("plain", outcome.plain, 1.45)
    assert len(side.marks) == 5
    assert not side.is_over
    assert side.figures() == "10.0 tokens/s, 5 in 1.45 s"
    done = Side("plain", outcome.plain, 99.0)
    assert done.is_over
    assert done.figures() == "10.0 tokens/s, 13 in 2.20 s"
    assert Side("speculative", Lap(), 0.0, "runs next").figures() == "runs next"


def test_tokens_have_the_colour_of_their_drafter():
    names = [None, "model", "ngram", "suffix", "medusa"]
    text = coloured(lap(names, 0.1, []).marks)
    styles = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    assert styles == {"t1": "cyan", "t2": "yellow", "t3": "magenta", "t4": race_view.OTHER_COLOUR}
    hostile = Mark(TokenEvent(0, "a\x1b[2Jb\r", 0, None), 0.0)
    assert coloured([hostile]).plain == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}"


def test_the_legend_counts_the_speculative_side(outcome: Outcome):
    sides = Side("plain", outcome.plain, 99.0), Side("speculative", outcome.drafted, 99.0)
    assert legend(sides).plain == "tokens: 4 the target's own, 9 drafted by model"


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 12), (20, 10), (10, 5)])
def test_a_frame_fits_the_terminal_and_shows_the_end_of_a_long_text(outcome: Outcome, size: tuple[int, int]):
    long = lap([None, *["model", None] * 400], 0.01, outcome.drafted.rounds)
    console = Console(width=size[0], height=size[1], file=io.StringIO(), force_terminal=True)
    sides = Side("plain", long, 99.0), Side("speculative", long, 99.0)
    lines = console.render_lines(frame(sides, "demo on onnx", "how it runs", console), pad=False)
    shown = ["".join(segment.text for segment in line) for line in lines]
    assert all(len(line) <= size[0] for line in shown)
    if size[0] >= 40:
        assert len(shown) <= size[1]
        assert "t800" in "".join(shown)
        assert ("t0 " in "".join(shown)) is (size[0] == 200)  # where there is room for all of it


def test_the_picture_is_small_coloured_and_asks_for_nothing_from_elsewhere(outcome: Outcome, tmp_path: Path):
    canvas = recorder()
    sides = Side("plain", outcome.plain, 1.6), Side("speculative", outcome.drafted, 1.6)
    canvas.print(race_view.result(sides, canvas))
    svg(canvas, tmp_path / "race.svg", "a race")
    drawn = (tmp_path / "race.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<svg") and drawn.rstrip().endswith("</svg>")
    assert len(drawn) < 60_000
    assert "font-face" not in drawn
    assert set(re.findall(r"https?://[^\"' )]+", drawn)) == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}


# the command


def test_the_small_pair_races_through_a_pipe_without_control_codes():
    result = run("--no", "-n", "16", "--seed", "7", "--drafter", "model", "--draft-length", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "--- plain and speculative, 16 tokens"
    after = lines[lines.index("---", 1) + 1 :]
    assert re.match(r"\d+\.\d\dx: ", after[0])
    assert after[1] == "identical: all 16 tokens, compared one by one"
    assert any(line.startswith("The draft length was fixed, up to ") for line in after)
    assert "\x1b" not in result.stdout
    assert "seed 7" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (["--no"], "onnx on cpu, .*reproducible"),
        (["--no", "--no-reproducible"], "onnx on cpu, .*fastest mode"),
        (["--no", "--engine", "llamacpp"], "llamacpp on cpu, .*reproducible"),
        (["--no", "--verify", "rejection"], "not reproducible"),
        (["demo", "--engine", "llamacpp"], "llamacpp on cpu, .*fastest mode"),
    ],
)
def test_our_own_pair_races_in_reproducible_mode(arguments: list[str], mode: str):
    result = run(*arguments, "-n", "8")
    assert result.exit_code == 0, result.output
    assert re.search(mode, result.stderr)


def test_where_no_widths_have_equal_bits_our_pair_races_in_the_fastest_mode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.engines.widths.choose_class", lambda found: None)
    result = run("--no", "-n", "8")
    assert result.exit_code == 0, result.output
    assert "this model cannot be reproducible on this machine" in result.stderr
    assert "fastest mode" in result.stderr
    assert run("--no", "-n", "8", "--reproducible").exit_code == 2


def test_json_holds_both_sides_token_by_token():
    result = run(
        "demo",
        "-n",
        "16",
        "--seed",
        "7",
        "-p",
        "A bus to Fresno, please.",
        "--draft-length",
        "3",
        "--ignore-eos",
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    plain, drafted = found["plain"], found["speculative"]
    assert found["identical"] is True
    assert found["divergence"] is None
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"]
    assert len(drafted["drafters"]) == len(drafted["at_s"]) == len(drafted["token_ids"]) == 16
    assert drafted["drafters"].count("model") == drafted["stats"]["accepted_tokens"] > 0
    assert set(plain["drafters"]) == {None}
    assert found["speed_ratio"] == pytest.approx(
        drafted["stats"]["tokens_per_second"] / plain["stats"]["tokens_per_second"]
    )
    assert found["prices"]["round"] > 0
    assert found["explanation"][1] == "identical: all 16 tokens, compared one by one"


def test_the_text_is_what_generate_says():
    options = ["demo", "-n", "16", "--seed", "7", "-p", "A bus to Fresno, please.", "--json"]
    answer = json.loads(CliRunner().invoke(cli, ["generate", *options]).stdout)
    found = json.loads(run(*options).stdout)
    assert found["speculative"]["token_ids"] == answer["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--drafter", "none"], "--drafter none"),
        (["demo", "--draft-length", "0"], "--draft-length 0"),
        (["demo", "--yes"], "leave them out where a model is named"),
        (["demo", "--demo"], "leave them out where a model is named"),
        (["nothing-like-it"], "no model"),
        (["demo", "-p", " "], "the prompt is empty"),
        (["demo", "-s", "Be brief.", "--no-chat-template"], "--system needs the chat template"),
        (["demo", "--show-draft"], "no such option"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path):
    result = run("demo", "-n", "4", "--svg", str(tmp_path / "missing" / "race.svg"))
    assert result.exit_code == 2
    assert "race.svg: its folder does not exist" in result.stderr
    assert not result.stdout and not (tmp_path / "missing").exists()  # before the race


def test_the_finish_is_drawn(tmp_path: Path):
    picture = tmp_path / "race.svg"
    result = run("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8").replace("&#160;", " ")
    assert "identical: all" in drawn
    assert "drafted by model" in drawn
    assert list(tmp_path.iterdir()) == [picture]


RACE_ALOUD = """
import sys
from edgespec.bench.race import Race
from edgespec.cli.main import main
plain_lap = Race.plain_lap
def said(race):
    for mark in plain_lap(race):
        print("a token", file=sys.stderr, flush=True)
        yield mark
Race.plain_lap = said
main()
"""


@POSIX
def test_an_interrupt_ends_it_with_130_and_no_result():
    arguments = [sys.executable, "-c", RACE_ALOUD, "race", "demo", "--ignore-eos", "-n", "2000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while process.stderr.readline() != b"a token\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=120)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said
    assert output == b""
    assert b"stopped before the end" in said


# the pair that is built for it


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shape that takes a second to build stands for the 1B one; the folder of the pair that is built."""
    shape = Shape(512, 1024, 10, 8, 2, vocab_size=4352)
    monkeypatch.setattr(offer_module, "ExpandedPair", partial(ExpandedPair, shape=shape))
    built = cache_folder() / "race"
    yield built / "demo-1b-w8a8"
    shutil.rmtree(built, ignore_errors=True)


def model_of(result: Result) -> str:
    assert result.exit_code == 0, result.output
    name: str = json.loads(result.stdout)["model"]
    return name


def test_the_pair_is_built_once_and_used_again(little: Path):
    assert model_of(run("-n", "8", "--json")) == "demo"
    assert not little.exists()
    built = run("--yes", "-n", "8", "--json")
    assert model_of(built) == "demo-1b-w8a8"
    assert json.loads(built.stdout)["engine"].startswith("onnx")
    assert "expanding the demo target" in built.stderr
    changed = (little / "manifest.toml").stat().st_mtime_ns
    again = run("-n", "8", "--json")
    assert model_of(again) == "demo-1b-w8a8"
    assert "expanding" not in again.stderr
    assert (little / "manifest.toml").stat().st_mtime_ns == changed
    assert model_of(run("--demo", "-n", "8", "--json")) == "demo"


def test_where_nobody_can_answer_the_small_pair_runs_and_it_is_said(little: Path):
    result = run("-n", "8", "--json")
    assert model_of(result) == "demo"
    assert "using the small demo pair" in result.stderr
    assert re.search(r"billion \(w8a8\).* takes 0\.\d GB of disk in .*demo-1b-w8a8, ", result.stderr)
    assert "edgespec race --yes" in result.stderr


@pytest.mark.parametrize(("answer", "model"), [("\n", "demo-1b-w8a8"), ("y\n", "demo-1b-w8a8"), ("n\n", "demo")])
def test_a_person_is_asked(little: Path, monkeypatch: pytest.MonkeyPatch, answer: str, model: str):
    monkeypatch.setattr(race_pair, "is_interactive", lambda: True)
    result = run("-n", "8", "--json", stdin=answer)
    assert model_of(result) == model
    assert "of disk" in result.stderr and re.search(r"GB of memory and about \d+ s\.", result.stderr)
    assert "Expand it now? [Y/n]" in result.stderr


def test_an_interrupted_build_leaves_nothing(little: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgespec.bench.expanded_pair.expand_heads", stop)
    result = run("--yes")
    assert result.exit_code == 130
    assert not list(little.parent.iterdir())


def test_what_the_machine_lacks_is_said(little: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.bench.offer.free_memory", lambda: 10**6)
    result = run("-n", "8", "--json")
    assert model_of(result) == "demo"
    assert re.search(r"for onnx: needs .* of memory, 1 MB are available", result.stderr)
    demanded = run("--yes", "-n", "8")
    assert demanded.exit_code == 2
    assert demanded.stderr.splitlines()[-1].startswith("error: the demo pair cannot be expanded here: for onnx: ")
    monkeypatch.setattr("edgespec.export.resources.free_bytes", lambda place: 10**6)
    assert re.search(r"for onnx: needs .* of disk in .*, 1 MB are free", run("--yes").stderr)
    monkeypatch.setattr(offer_module, "find_spec", lambda name: None)
    assert re.search(r"for onnx: needs onnxruntime, .*; for llamacpp: needs llama_cpp, gguf", run("--yes").stderr)


def test_without_the_demo_a_model_is_asked_for(little: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offer_module, "registered_folders", dict)
    with pytest.raises(ModelNotFound, match="name a MODEL"):
        offer_module.find_offer("auto")


def test_the_engine_decides_which_pair_is_offered(little: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gguf", reason="the GGUF is offered where the package gguf is")
    assert offer_module.find_offer("auto").engine == offer_module.find_offer("onnx").engine == "onnx"
    assert offer_module.find_offer("llamacpp").folder.name == "demo-1b-q8_0"
    have = find_spec
    monkeypatch.setattr(offer_module, "find_spec", lambda name: None if name == "onnxruntime" else have(name))
    assert offer_module.find_offer("auto").engine == "llamacpp"
    with pytest.raises(CapabilityError, match=r"for onnx: needs onnxruntime: .* install "):
        offer_module.find_offer("onnx")


# the terminal


def terminal(
    *arguments: str, size: tuple[int, int] = (80, 24), interrupt_at: str = "", **environ: str
) -> tuple[int, str]:
    """Run the command in a terminal of its own; (exit code, all that it wrote there).

    `interrupt_at`: as soon as this is shown, Ctrl-C is pressed.
    """
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgespec", "race", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environ},
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
        if interrupt_at and interrupt_at.encode() in written:
            process.send_signal(signal.SIGINT)
            interrupt_at = ""
    os.close(ours)
    return process.wait(60), written.decode(errors="replace")


@POSIX
def test_a_terminal_sees_the_race_and_keeps_the_result():
    code, shown = terminal("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--seed", "7")
    assert code == 0
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1  # the other screen, and back
    live, kept = shown.split("\x1b[?1049l")
    assert "each side runs alone" in live
    assert "runs next, alone" in live
    assert "identical: all 24 tokens" in kept
    assert "\x1b[36m" in kept  # cyan


@POSIX
def test_no_colour_and_a_dumb_terminal_are_heeded():
    code, shown = terminal("demo", "-n", "8", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
    code, shown = terminal("demo", "-n", "8", TERM="dumb")
    assert code == 0
    assert "\x1b[?" not in shown
    assert "--- plain and speculative, 8 tokens" in shown


@POSIX
def test_a_narrow_terminal_has_the_sides_below_each_other():
    code, shown = terminal("demo", "-n", "16", size=(40, 20))
    assert code == 0
    kept = re.sub(r"\x1b\[[0-9;?]*[a-z]", "", shown.split("\x1b[?1049l")[1])
    assert max(len(line) for line in kept.splitlines()) <= 40
    assert kept.index(" plain ") < kept.index(" speculative ")


@POSIX
def test_an_interrupt_gives_the_terminal_back():
    code, shown = terminal("demo", "-n", "2000", "--ignore-eos", interrupt_at="runs next, alone")
    assert code == 130
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back
    kept = shown.split("\x1b[?1049l")[1]
    assert "stopped before the end" in kept
    assert "Traceback" not in shown and "identical" not in shown
