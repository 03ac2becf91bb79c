"""`edgespec calibrate`: the fit recovers known costs, later runs use the result, bad input is one line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgespec
from demo import heed_interrupts
from edgespec.cli.main import cli
from edgespec.control.cost import ContextCost
from edgespec.errors import CapabilityError, ConfigError
from edgespec.installation import install_command
from edgespec.tuning import calibration as measuring
from edgespec.tuning.calibration import Sample
from edgespec.tuning.chart import bar
from table_engine import TableEngine

STAIRS = {1: 0.010, 2: 0.014, 3: 0.014, 4: 0.014, 5: 0.022, 6: 0.0221, 8: 0.0222, 16: 0.06}


pytestmark = pytest.mark.usefixtures("one_thread")


def samples(context: ContextCost, contexts: tuple[int, ...] = (10, 100, 1000)) -> list[Sample]:
    return [Sample(w, c, base + context.at(w, c), 0.1, 4) for w, base in STAIRS.items() for c in contexts]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("context", [ContextCost(2e-6, 3e-7), ContextCost(2e-6, 0.0), ContextCost(0.0, 3e-7)])
def test_the_fit_finds_the_model_that_made_the_times(context):
    found = measuring.fit_target(samples(context))
    assert found.curve.measured == pytest.approx(STAIRS, rel=1e-6)
    assert found.curve.context.fixed_s == pytest.approx(context.fixed_s, abs=1e-12)
    assert found.curve.context.row_s == pytest.approx(context.row_s, abs=1e-12)
    assert found.fit_error == pytest.approx(0, abs=1e-9)


def test_falling_times_give_a_slope_of_zero():
    found = measuring.fit_target([Sample(w, c, STAIRS[w] - 1e-6 * c, 0.0, 2) for w in STAIRS for c in (10, 1000)])
    assert found.curve.context == ContextCost(0.0, 0.0)
    assert all(seconds > 0 for seconds in found.curve.measured.values())


def test_a_single_context_gives_no_slope():
    found = measuring.fit_target(samples(ContextCost(1e-6, 0.0), (500,)))
    assert found.curve.context == ContextCost(0.0, 0.0)
    assert found.curve.at(4, 500) == pytest.approx(0.014 + 500e-6)


def test_only_widths_at_the_end_of_a_step_are_useful():
    found = measuring.fit_target(samples(ContextCost()))
    assert found.useful_widths == (1, 4, 8, 16)
    assert found.middle_context == 100


def test_the_ceiling_is_that_of_the_best_width():
    found = measuring.fit_target(samples(ContextCost()))
    assert found.ceiling(0.0) == (7, pytest.approx(8 * 0.010 / 0.0222))
    assert found.ceiling(0.008) == (3, pytest.approx(4 * 0.010 / (0.014 + 3 * 0.008)))


def test_draft_cost_is_linear_in_the_context():
    lone = [Sample(1, c, 0.001 + 1e-7 * c, 0.0, 4) for c in (10, 100, 1000)]
    wide = [Sample(32, c, 0.004, 0.0, 4) for c in (10, 100, 1000)]
    found = measuring.fit_draft([*lone, *wide], 32)
    assert (found.fixed_s, found.context_s) == (pytest.approx(0.001), pytest.approx(1e-7))
    assert (found.cost.token_s, found.cost.read_s) == (pytest.approx(0.00101), pytest.approx(0.004 / 32))


def test_measuring_reports_each_pass_and_clears_the_cache():
    engine = TableEngine.random(10, context_length=128, max_batch=8)
    widths, told = measuring.allowed_widths(engine), []
    assert widths == tuple(range(1, 9))
    contexts = measuring.allowed_contexts(engine, None, max(widths))
    assert contexts == (64, 120)
    found = measuring.measure(engine, widths, contexts, 3, told.append)
    assert sum(told) == measuring.num_passes(widths, contexts, 3) == 8 * 2 * 4
    assert engine.length() == 0
    assert {(s.width, s.context_tokens, s.num_passes) for s in found} == {(w, c, 4) for w in widths for c in contexts}
    assert all(s.median_s > 0 and s.spread >= 0 for s in found)


def test_an_interrupted_measurement_leaves_the_engine_empty():
    engine = TableEngine.random(10, context_length=128)

    def interrupt(steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring.measure(engine, (1, 4), (50,), 3, interrupt)
    assert engine.length() == 0


def test_a_model_without_rollback_is_refused():
    engine = TableEngine.random(10, can_rollback=False)
    with pytest.raises(CapabilityError, match="cannot roll back"):
        measuring.measure(engine, (1,), (4,), 2, lambda steps: None)


@pytest.mark.parametrize(("wanted", "said"), [((0,), "0 is outside 1..124"), ((64, 125), "125 is outside 1..124")])
def test_contexts_must_leave_room(wanted, said):
    with pytest.raises(ConfigError, match=said):
        measuring.allowed_contexts(TableEngine.random(10, context_length=128), wanted, 4)
    with pytest.raises(ConfigError, match="leaves no room"):
        measuring.allowed_contexts(TableEngine.random(10, context_length=16), None, 16)


@pytest.mark.parametrize(("value", "drawn"), [(0, ""), (1, "▊"), (4, "███"), (2, "█▌"), (9, "███"), (-1, "")])
def test_bars_are_exact_to_an_eighth(value, drawn):
    assert bar(value, 4, 3) == drawn


# the command


def test_measurements_are_used_by_later_runs(target_path, draft_path):
    pair = ["-m", str(target_path), "-md", str(draft_path)]
    result = run("calibrate", *pair, "--passes", "2", "--contexts", "16,48", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {sample["context_tokens"] for sample in told["samples"]} == {16, 48}
    widths = {sample["width"] for sample in told["samples"]}
    assert {1, 2, 16} <= widths
    assert set(told["useful_widths"]) <= widths
    assert max(widths) in told["useful_widths"]
    assert told["ceiling"]["speedup"] >= told["draft"]["ceiling"]["speedup"] >= 1
    with edgespec.load(str(target_path), draft=draft_path, threads=1) as model:
        kept = {str(width): seconds for width, seconds in model.cost_curve.measured.items()}
        assert kept == pytest.approx(told["base_s"])
        context = model.cost_curve.context
        assert (context.fixed_s, context.row_s) == pytest.approx((told["fixed_s"], told["row_s"]))
        assert model.draft_costs["model"].token_s == pytest.approx(told["draft"]["token_s"])
        assert model.draft_costs["model"].read_s == pytest.approx(told["draft"]["read_s"])


def test_text_output_shows_the_curve_and_conclusions(target_path):
    result = run("calibrate", str(target_path), "--passes", "2", "--contexts", "16")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r" *\d+\*? ", line)]
    assert [row[0].rstrip("*") for row in rows][:3] == ["1", "2", "3"]
    assert any(row[0].endswith("*") for row in rows)
    assert max(len(row[-1]) for row in rows if set(row[-1]) <= set("▏▎▍▌▋▊▉█")) == 20
    for said in ("useful widths: ", "ceiling of any drafter", "stored for later runs"):
        assert said in result.stdout


def test_the_price_of_the_reproducible_mode_is_measured_without_it(onnx_path):
    pytest.importorskip("onnxruntime")
    arguments = ["calibrate", str(onnx_path), "--passes", "2", "--contexts", "16", "--json"]
    told = json.loads(run(*arguments, "--reproducible").stdout)
    assert told["pinned_class"][0] > 1
    assert told["padding"]["ratio"] == pytest.approx(told["padding"]["padded_s"] / told["padding"]["lone_s"])
    without = json.loads(run(*arguments, "--no-reproducible").stdout)
    assert without["padding"] is without["pinned_class"] is None


def test_the_plot_is_a_png(target_path, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "curve.png"
    result = run("calibrate", str(target_path), "--passes", "2", "--contexts", "16,32", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in tmp_path.glob("*.png*")] == ["curve.png"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "64,x"], "not a list of whole numbers"),
        (["--contexts", "99999999"], "is outside 1.."),
        (["--passes", "1"], "--passes must be at least 2"),
        (["--plot", "curve.svg"], "must end in .png"),
        (["--plot", "a-folder.png"], "a-folder.png is a folder"),
        (["--plot", "nowhere/curve.png"], "folder nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(target_path, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-folder.png").mkdir()
    result = run("calibrate", str(target_path), *arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: ")
    assert said in line
    assert result.stdout == ""


def test_what_cannot_be_stored_is_not_said_to_be(target_path, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for home, said in ((tmp_path / "home", "stored for later runs"), (tmp_path / "file" / "home", "not stored: ")):
        monkeypatch.setenv("EDGESPEC_HOME", str(home))
        result = run("calibrate", str(target_path), "--passes", "2", "--contexts", "16")
        assert result.exit_code == 0 and said in result.stdout, result.output
        assert ("not stored" in result.stdout) == said.startswith("not")


def test_a_draft_is_measured_in_the_smallest_context(target_path, draft_path):
    result = run(
        "calibrate",
        "-m",
        str(target_path),
        "-md",
        str(draft_path),
        "-c",
        "128",
        "-cd",
        "16",
        "--passes",
        "2",
        "--contexts",
        "16",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["draft"]


def test_a_missing_matplotlib_names_the_extra(target_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("calibrate", str(target_path), "--plot", str(tmp_path / "curve.png"))
    assert result.exit_code == 2
    assert install_command("bench") in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send such a signal to one child")
def test_an_interrupt_keeps_earlier_measurements(target_path, private_home):
    run("calibrate", str(target_path), "--passes", "2", "--contexts", "16")
    kept = cost_files(private_home)
    assert kept
    arguments = [sys.executable, "-m", "edgespec", "calibrate", str(target_path), "--passes", "1000000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, preexec_fn=heed_interrupts, **pipes) as process:
        try:
            assert process.stderr is not None
            while "threads 1" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            output, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert output == ""
    assert cost_files(private_home) == kept


def cost_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "cache" / "costs").glob("*")}
