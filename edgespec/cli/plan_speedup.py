"""`edgespec plan-speedup`: the speedup that formulas predict, beside the measured one."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edgespec.cli import FilePath, say
from edgespec.cli.bar import bar
from edgespec.cli.help import SettingsCommand
from edgespec.cli.main import INTERRUPTED
from edgespec.cli.options import resolve_settings, settings_options
from edgespec.cli.session import open_session, show_configuration
from edgespec.cli.terminal import note
from edgespec.config import DrafterName
from edgespec.config.options import PRINTING, PROMPTING, REMEMBERING
from edgespec.config.sources import Settings
from edgespec.errors import ConfigError
from edgespec.runtime import Model
from edgespec.sampling import Sampling
from edgespec.tuning.prompts import Prompts, choose_prompts
from edgespec.tuning.speedup import LENGTHS, Costs, Row, Trials, given_costs, plan, run_trials

DEFAULT_TOKENS, DEFAULT_PROMPTS = 48, 4
MEASURED_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12)
_TYPICAL_CONTEXT = 256  # where nothing is decoded
_WORTH_TELLING = 1.05
_OFTEN = 0.95  # share of rounds with a draft, from which on it goes without saying


@dataclass(frozen=True, slots=True)
class Planned:
    """All that is shown. `padding`: slowdown of single-token steps by reproducible mode, as a factor; 1 without it."""

    facts: dict[str, Any]
    rows: list[Row]
    costs: Costs
    trials: Trials | None
    padding: float = 1.0

    @property
    def best(self) -> Row:
        """The length with the highest expected speedup; 0 means plain decoding."""
        return max(self.rows, key=lambda row: row.speedup)

    @property
    def best_measured(self) -> Row | None:
        measured = [row for row in self.rows if row.measured is not None]
        return max(measured, key=lambda row: row.measured or 0.0) if measured else None


@click.command("plan-speedup", cls=SettingsCommand)
@settings_options("load", "sampling", "session", leave_out=(*PROMPTING, *PRINTING, *REMEMBERING))
@click.option("--acceptance", type=float, metavar="A", help="Assume this acceptance per token, decode nothing")
@click.option("--pass-ms", metavar="W:MS,W:MS", help="Assume these pass times, load nothing")
@click.option("--draft-ms", type=float, metavar="MS", help="Assume this time per draft token")
@click.option("--prompts", type=FilePath(), metavar="FILE", help='Lines, or JSON lines with "text"')
@click.option(
    "--max-prompts", type=int, default=DEFAULT_PROMPTS, show_default=True, help="Maximum number of prompts to decode"
)
@click.option("-n", "--max-tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Tokens per answer")
@click.option("--repeats", type=int, default=1, show_default=True, help="Runs per prompt and length")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table")
def command(
    model_name: str | None,
    config_file: Path | None,
    acceptance: float | None,
    pass_ms: str | None,
    draft_ms: float | None,
    prompts: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Speedup by draft length: by Leviathan's formula, by one that includes the cost of wide passes, and measured.

    Measures short answers to built-in or given prompts; with --acceptance it only calculates. MODEL is a name, a GGUF
    or ONNX file, or a folder with one.
    """
    counts = {name: given.pop(name) for name in ("max_prompts", "max_tokens", "repeats")}
    _check(acceptance, pass_ms, draft_ms, prompts, counts)
    try:
        if acceptance is not None and pass_ms is not None:
            costs = given_costs(pass_ms, draft_ms or 0.0)
            planned = Planned({"model": None, "acceptance": acceptance}, plan(acceptance, costs), costs, None)
        else:
            settings = resolve_settings(given, model_name, config_file, speculates=True)
            settings = settings.below({"seed": 0}, "so that a second run decodes the same")
            if acceptance is not None:
                planned = _calculated(settings, acceptance, draft_ms)
            else:
                wraps = settings.values.get("chat_template", True)
                chosen = choose_prompts(prompts, counts["max_prompts"], chat_template=wraps)
                planned = _measured(settings, chosen, counts["max_tokens"], counts["repeats"])
    except KeyboardInterrupt:
        note("interrupted: nothing was measured")
        return INTERRUPTED
    if as_json:
        click.echo(json.dumps(_as_object(planned), allow_nan=False))
    else:
        _show(planned)
    return 0


def _check(
    acceptance: float | None, pass_ms: str | None, draft_ms: float | None, prompts: Path | None, counts: dict[str, int]
) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {count}")
    if draft_ms is not None and not 0 <= draft_ms < math.inf:
        raise ConfigError(f"--draft-ms must be a number of milliseconds of at least 0, got {draft_ms:g}")
    if acceptance is None:
        if pass_ms is not None or draft_ms is not None:
            raise ConfigError("given costs need a given acceptance: add --acceptance A, or leave --pass-ms, --draft-ms")
    elif not 0 <= acceptance <= 1:
        raise ConfigError(f"--acceptance is a probability from 0 to 1, got {acceptance}")
    elif prompts is not None:
        raise ConfigError("with --acceptance nothing is decoded, so --prompts has no effect: leave one of them out")


def _calculated(settings: Settings, acceptance: float, draft_ms: float | None) -> Planned:
    """From the costs of this machine, as they were measured at first load or by calibrate."""
    session = open_session(settings)
    with session.model as model:
        show_configuration(session)
        drafter = _drafter(model)
        token_s = _token_s(model, drafter) if draft_ms is None else draft_ms / 1e3
        costs = Costs(model.cost_curve.table(min(_TYPICAL_CONTEXT, model.context_length)), token_s)
        return Planned(
            _facts(model, drafter, acceptance), plan(acceptance, costs), costs, None, model.target.facts.padding_cost
        )


def _measured(settings: Settings, prompts: Prompts, max_tokens: int, repeats: int) -> Planned:
    session = open_session(settings)
    with session.model as model:
        show_configuration(session)
        if not prompts.are_own:
            note(f"{len(prompts.chosen)} built-in prompts; --prompts FILE takes yours")
        drafter = _drafter(model)
        encoded = prompts.encode(model, max_tokens)
        lengths = [length for length in MEASURED_LENGTHS if length < model.target.widest_pass]
        sampling: Sampling = session.sampling
        with bar("decodes", len(lengths) * len(encoded) * repeats) as progress:
            trials = run_trials(model, encoded, sampling, drafter, lengths, max_tokens, repeats, progress.advance)
        rows = [
            dataclasses.replace(row, measured=trials.speedup(row.draft_length) if row.draft_length in lengths else None)
            for row in plan(trials.acceptance, trials.costs, drafting=trials.drafting)
        ]
        facts = _facts(model, drafter, trials.acceptance)
        return Planned(facts, rows, trials.costs, trials, model.target.facts.padding_cost)


def _drafter(model: Model) -> DrafterName:
    """The drafter that is planned for: the one named, else the draft model, else n-grams."""
    name = model.drafter_name
    if name == "none":
        raise ConfigError("plan-speedup needs a drafter, and --drafter none turns drafting off")
    if name != "auto":
        return name
    return "ngram" if model.draft_engine is None else model.draft_name or "ngram"


def _token_s(model: Model, drafter: DrafterName) -> float:
    return model.draft_costs[drafter].token_s if drafter in model.draft_costs else 0.0


def _facts(model: Model, drafter: DrafterName, acceptance: float) -> dict[str, Any]:
    facts = model.target.facts
    return {
        "model": model.pair.name,
        "engine": facts.name,
        "threads": facts.threads,
        "drafter": drafter,
        "acceptance": acceptance,
        "reproducible": model.reproducible,
    }


# -- what is shown


def _show(planned: Planned) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("draft length", "flat cost (Leviathan)", "with t(width)", "measured", "tokens/s"):
        table.add_column(name, justify="right")
    for row in planned.rows:
        rate = None if planned.trials is None else planned.trials.tokens_per_second(row.draft_length)
        table.add_row(
            str(row.draft_length),
            f"{row.flat_speedup:.2f}x",
            f"{row.speedup:.2f}x",
            "" if row.measured is None else f"{row.measured:.2f}x",
            f"{rate:.1f}" if rate else "",
            style="bold" if row is planned.best else None,
        )
    Console(highlight=False, markup=False).print(table)
    for line in _conclusions(planned):
        say(line)


def _conclusions(planned: Planned) -> list[str]:
    costs, best, acceptance = planned.costs, planned.best, planned.facts["acceptance"]
    lines = [
        f"acceptance {acceptance:.0%} per judged token, a drafted token costs "
        f"{costs.token_s / costs.pass_s[1]:.2f} of a plain pass ({1e3 * costs.pass_s[1]:.2f} ms)"
    ]
    if planned.trials is not None and planned.trials.drafting < _OFTEN:
        lines.append(f"the drafter proposed something in {planned.trials.drafting:.0%} of the rounds")
    if best.draft_length:
        lines.append(f"best length by t(width): {best.draft_length}, {best.speedup:.2f}x")
    else:
        lines.append("best length by t(width): 0, plain decoding: at this acceptance no draft pays for its wider pass")
    measured = planned.best_measured
    if measured is not None:
        lines.append(f"best length measured: {measured.draft_length}, {measured.measured:.2f}x")
    length, speedup = costs.ceiling(LENGTHS[-1])
    lines.append(f"ceiling: {speedup:.2f}x, if all {length} tokens were accepted")
    if planned.trials is not None:
        lines.append(
            "the formulas count only drafting and target passes, at the costs of these runs; "
            f"{planned.trials.overhead_share:.0%} of the time went into choosing tokens and bookkeeping"
        )
    if planned.padding > _WORTH_TELLING:
        lines.append(
            "all speedups are over plain decoding in reproducible mode, where a padded single token costs "
            f"{planned.padding:.2f} times as much; over plain decoding in the fastest mode the ceiling is "
            f"{speedup / planned.padding:.2f}x"
        )
    return lines


def _as_object(planned: Planned) -> dict[str, Any]:
    length, speedup = planned.costs.ceiling(LENGTHS[-1])
    measured = planned.best_measured
    return {
        **planned.facts,
        "plain_pass_s": planned.costs.pass_s[1],
        "token_s": planned.costs.token_s,
        "padding_cost": planned.padding,
        "lengths": [dataclasses.asdict(row) for row in planned.rows],
        "best_length": planned.best.draft_length,
        "best_measured_length": None if measured is None else measured.draft_length,
        "ceiling": {"draft_length": length, "speedup": speedup},
        "drafting_share": None if planned.trials is None else planned.trials.drafting,
        "overhead_share": None if planned.trials is None else planned.trials.overhead_share,
    }
