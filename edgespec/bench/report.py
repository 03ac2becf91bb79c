"""The result of a benchmark as one JSON object with stable keys, from which table, plots and HTML page are made.

Units are seconds, bytes and joules. None: unknown on this machine, or nothing to divide by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec import __version__
from edgespec.bench.record import Trial
from edgespec.bench.rounds import acceptance_by_position, accepted_lengths, drafter_shares, observed_passes, reliability
from edgespec.bench.runner import Task, needs_second_model
from edgespec.bench.summary import Side, Summary, median_pass_s
from edgespec.config import GenerateOptions
from edgespec.runtime import Model
from edgespec.sampling import Sampling

FORMAT = 1
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The loaded models, and the settings that all generations share."""

    speculative: Model
    standard: Model
    sampling: Sampling
    options: GenerateOptions

    def describe(self) -> dict[str, Any]:
        """All settings that affect the result, as JSON."""
        model, facts = self.speculative, self.speculative.target.facts
        return {
            "model": model.pair.name,
            "engine": facts.name,
            "device": facts.device,
            "threads": facts.threads,
            "context_length": facts.context_length,
            "drafter": model.drafter_name,
            "draft_length": model.options.draft_length,
            "max_slowdown": model.options.max_slowdown,
            "verify": model.options.verify,
            "reproducible": model.reproducible,
            "baseline": _baseline(model),
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "min_p": self.sampling.min_p,
            "seed": self.sampling.seed,
            "max_tokens": self.options.max_tokens,
            "ignore_eos": self.options.ignore_eos,
        }


def _baseline(model: Model) -> str:
    if needs_second_model(model):
        return "plain decoding by a second copy of the target without reproducible mode, which would slow it down"
    return "plain decoding by the same model"


def report_of(setup: Setup, tasks: Sequence[Task], trials: Mapping[tuple[str, int], Trial]) -> Report:
    """The report of `trials` (at least one) of `tasks`; its `complete` says whether all tasks are done."""
    done = [task for task in tasks if task.key in trials]
    by_domain: dict[str, list[Trial]] = defaultdict(list)
    by_prompt: dict[str, list[Trial]] = defaultdict(list)
    for task in done:
        by_domain[task.prompt.domain].append(trials[task.key])
        by_prompt[task.prompt.digest].append(trials[task.key])
    total = Summary(trials[task.key] for task in done)
    runs = total.speculative.runs
    records = [record for run in runs for record in run.rounds]
    prompts = {task.prompt.digest: task for task in done}
    outcomes = [_is_identical(found) for found in by_prompt.values()]
    return {
        "format": FORMAT,
        "edgespec": __version__,
        **setup.describe(),
        "complete": len(done) == len(tasks),
        "num_trials": len(done),
        "num_planned_trials": len(tasks),
        "num_prompts": len(prompts),
        "num_identical": sum(outcomes),
        "num_as_standard": sum(trial.speculative.token_digest == trial.standard.token_digest for trial in total.trials),
        "padded_plain_speedup": _padded_speedup(total.trials),
        "total": total.to_json(),
        "domains": {name: Summary(found).to_json() for name, found in by_domain.items()},
        "drafters": drafter_shares(runs),
        # confidences are estimated only for automatic draft lengths
        "reliability": reliability(records) if setup.speculative.options.draft_length == "auto" else {},
        "acceptance_by_position": acceptance_by_position(runs),
        "accepted_lengths": accepted_lengths(records),
        "cost_curve": {str(width): s for width, s in setup.speculative.cost_curve.refined().items()},
        "observed_passes": observed_passes(records),
        "standard_pass_s": median_pass_s(total.standard),
        "draft_token_s": {name: cost.token_s for name, cost in setup.speculative.draft_costs.items()},
        "memory": _memory(setup, total),
        "prompts": [_prompt_object(task, by_prompt[digest]) for digest, task in prompts.items()],
    }


def _is_identical(trials: Sequence[Trial]) -> bool:
    """Whether all speculative runs have the tokens of plain decoding in the same mode."""
    plain = [trial.plain for trial in trials if trial.plain is not None] or [trial.standard for trial in trials]
    return {trial.speculative.token_digest for trial in trials} == {run.token_digest for run in plain}


def _padded_speedup(trials: Sequence[Trial]) -> float | None:
    """Speed of plain decoding in reproducible mode / that of the standard; None if the standard has the same mode."""
    pairs = [(trial.plain, trial.standard) for trial in trials if trial.plain is not None]
    plain, standard = (Side(runs).pooled_rate for runs in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return plain / standard if standard else None


def _memory(setup: Setup, total: Summary) -> dict[str, int | None]:
    facts = setup.speculative.target.facts
    return {
        "target_weight_bytes": facts.weight_bytes,
        "target_kv_bytes": facts.kv_bytes_per_token * facts.context_length,
        "drafters_bytes": setup.speculative.drafter_bytes,
        "peak_rss_bytes": max(run.stats.peak_rss_bytes for run in total.speculative.runs),
        "num_target_copies": 1 if setup.standard is setup.speculative else 2,
    }


def _prompt_object(task: Task, trials: Sequence[Trial]) -> dict[str, Any]:
    first = trials[0]
    return {
        "domain": task.prompt.domain,
        "text": task.prompt.text,
        "num_turns": len(task.prompt.turns),
        "temperature": task.sampling.temperature,
        "num_prompt_tokens": len(task.prompt_ids),
        "finish_reason": first.speculative.stats.finish_reason,
        "identical": _is_identical(trials),
        "pieces": [list(piece) for piece in first.speculative.pieces],
        **Summary(trials).to_json(),
    }
