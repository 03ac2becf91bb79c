"""`edgespec plan-speedup`: formulas against enumeration, given costs, measured speedups."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner, Result

from edgespec.cli.main import cli
from edgespec.errors import ConfigError, PromptError
from edgespec.reports import RoundRecord, Stats
from edgespec.tuning.prompts import choose_prompts
from edgespec.tuning.speedup import Costs, Trials, given_costs, plan

GIVEN = ["--acceptance", "0.7", "--pass-ms", "1:24.6,2:30,4:36,8:72"]


pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan-speedup", *arguments])


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of a round by going through every outcome of every drafted token."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=length):
        probability = 1.0
        for stands in outcome:
            probability *= acceptance if stands else 1 - acceptance
        total += probability * (1 + sum(1 for _ in itertools.takewhile(bool, outcome)))
    return total


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_both_formulas_agree_with_enumeration(acceptance):
    costs = Costs([0.0, 0.010, 0.012, 0.015, 0.015, 0.020, 0.030], 0.002)
    for row in plan(acceptance, costs, range(6)):
        k = row.draft_length
        tokens = expected_tokens(acceptance, k)
        assert row.flat_speedup == pytest.approx(tokens * 0.010 / (0.010 + k * 0.002))
        assert row.speedup == pytest.approx(tokens * 0.010 / (costs.pass_s[1 + k] + k * 0.002))


def test_rounds_in_which_nothing_is_proposed_are_plain_ones():
    costs = Costs([0.0, 0.010, 0.012, 0.015, 0.015], 0.002)
    for row in plan(0.7, costs, range(4), drafting=0.25):
        k = row.draft_length
        seconds = 0.25 * (costs.pass_s[1 + k] + k * 0.002) + 0.75 * 0.010
        assert row.speedup == pytest.approx((0.25 * expected_tokens(0.7, k) + 0.75) * 0.010 / seconds)
    trials = Trials()
    trials.observe(RoundRecord(10, "ngram", 4, 2, (), 0.004, 0.020))
    trials.add(4, 0, Stats(new_tokens=7, wall_s=1.0, rounds=4))
    trials.add(0, 0, Stats(new_tokens=7, wall_s=1.0, rounds=6))
    assert trials.drafting == 0.25


def test_given_costs_are_lines_between_the_given_widths():
    costs = given_costs("1:10,3:20, 5:20", 2.0)
    assert [1e3 * costs.pass_s[width] for width in range(1, 6)] == pytest.approx([10, 15, 20, 20, 20])
    assert costs.token_s == pytest.approx(0.002)


@pytest.mark.parametrize(
    "text", ["", "1", "1:x", "x:1", "2:10", "1:0", "1:-3", "1:nan", "1:inf", "1:2:3", "0:1,1:2", "1:1,99:2"]
)
def test_bad_costs_are_refused(text):
    with pytest.raises(ConfigError, match="--pass-ms"):
        given_costs(text, 0.0)


def test_a_negative_draft_cost_is_refused():
    with pytest.raises(ConfigError, match="--draft-ms must be at least 0"):
        given_costs("1:10", -1.0)


def test_only_tested_tokens_count_and_costs_are_medians():
    trials = Trials()
    trials.observe(RoundRecord(10, "model", 4, 2, (), 0.004, 0.020))  # two stood, one fell, one was never judged
    trials.observe(RoundRecord(13, "model", 2, 2, (), 0.004, 0.015))
    trials.observe(RoundRecord(16, None, 0, 0, (), 0.0, 0.010))
    assert trials.acceptance == pytest.approx(4 / 5)
    assert trials.costs.token_s == pytest.approx(0.0015)
    assert [trials.costs.pass_s[width] for width in (1, 3, 5)] == pytest.approx([0.010, 0.015, 0.020])


def test_speedups_are_over_all_prompts_with_medians_of_repetitions():
    trials = Trials()
    for length, prompt, seconds in ((0, 0, 1.0), (0, 1, 3.0), (2, 0, 0.5), (2, 1, 1.5), (2, 1, 9.0), (2, 1, 1.0)):
        trials.add(length, prompt, Stats(new_tokens=11, wall_s=seconds))
    assert trials.tokens_per_second(0) == pytest.approx(20 / 4.0)
    assert trials.speedup(2) == pytest.approx(4.0 / 2.0)
    assert trials.speedup(3) is None


# prompts


def test_prompts_are_spread_over_the_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"prompt {number}\n\n" for number in range(10)))
    chosen = choose_prompts(path, 5)
    assert [prompt.text for prompt in chosen.chosen] == [f"prompt {number}" for number in (0, 2, 4, 6, 8)]
    assert (chosen.num_given, chosen.are_own) == (10, True)
    assert choose_prompts(None, 3).are_own is False


@pytest.mark.parametrize("contents", [b"", b"\n \n", b"\xff\xfe\x00", b'{"text": 5}\n', b'{"text": "a"}\nno json\n'])
def test_a_bad_file_of_prompts_is_refused(tmp_path, contents):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(contents)
    with pytest.raises(PromptError, match=r"mine\.jsonl"):
        choose_prompts(path, 5)


# the command


def test_with_given_numbers_nothing_is_loaded():
    result = run("no-such-model", *GIVEN, "--draft-ms", "3", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["draft_length"] for row in told["lengths"]] == list(range(13))
    assert all(row["measured"] is None for row in told["lengths"])
    best = max(told["lengths"], key=lambda row: row["speedup"])
    assert told["best_length"] == best["draft_length"] == 3
    assert best["speedup"] == pytest.approx(expected_tokens(0.7, 3) * 24.6 / (36 + 9))
    assert told["ceiling"]["speedup"] >= best["speedup"]


def test_a_hopeless_acceptance_says_plain_decoding():
    result = run("--acceptance", "0.05", "--pass-ms", "1:10,8:80")
    assert result.exit_code == 0, result.output
    assert "0, plain decoding" in result.stdout
    assert "ceiling: 1.00x" in result.stdout


def test_a_given_acceptance_goes_with_the_costs_of_this_machine(target_path, draft_path):
    result = run(str(target_path), "-md", str(draft_path), "--acceptance", "1", "--json")
    told = json.loads(result.stdout)
    assert told["drafter"] == "model"
    assert told["token_s"] > 0
    top = max(row["speedup"] for row in told["lengths"])
    assert top == pytest.approx(told["ceiling"]["speedup"])
    assert told["acceptance"] == 1


def test_expected_stands_next_to_measured(target_path, draft_path, tmp_path):
    (tmp_path / "mine.txt").write_text("hello there\nhow are you\n")
    arguments = [str(target_path), "-md", str(draft_path), "-n", "6", "--prompts", str(tmp_path / "mine.txt")]
    told = json.loads(run(*arguments, "--ctx-size", "256", "--json").stdout)
    measured = {row["draft_length"]: row["measured"] for row in told["lengths"]}
    assert measured[0] == 1.0
    assert all(measured[length] > 0 for length in (1, 2, 4, 8))
    assert measured[5] is None
    assert told["best_measured_length"] == max((k for k in measured if measured[k]), key=lambda k: measured[k])
    assert 0 <= told["acceptance"] <= 1
    assert 0 <= told["overhead_share"] <= 1


def test_text_output_is_a_table_and_a_verdict(target_path):
    result = run(str(target_path), "--drafter", "ngram", "-n", "6", "--max-prompts", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] and line.split()[0].isdecimal()]
    assert [row[0] for row in rows] == [str(number) for number in range(13)]
    for said in ("best length by t(width)", "best length measured", "ceiling: "):
        assert said in result.stdout
    assert "built-in prompts" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--acceptance", "1.5"], "a probability from 0 to 1"),
        (["--acceptance", "nan"], "a probability from 0 to 1"),
        (["--pass-ms", "1:10"], "need a given acceptance"),
        (["--draft-ms", "1"], "need a given acceptance"),
        (["--acceptance", "0.8", "--draft-ms", "-5"], "--draft-ms must be a number of milliseconds of at least 0"),
        (["--acceptance", "0.8", "--draft-ms", "nan"], "--draft-ms must be a number of milliseconds of at least 0"),
        (["--acceptance", "0.5", "--prompts", "x"], "--prompts has no effect"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["-n", "0"], "--max-tokens must be at least 1"),
        (["no-such-model"], "no model 'no-such-model'"),
        (["--drafter", "none"], "needs a drafter"),
        (["--ctx-size", "16"], "give a larger --ctx-size"),
    ],
)
def test_bad_input_is_one_line(target_path, arguments, said):
    model = [] if "no-such-model" in arguments else ["-m", str(target_path)]
    result = run(*model, *arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert said in line
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
