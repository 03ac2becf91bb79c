"""The benchmark report as text for a terminal: a table by domain, a verdict, and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.bench.report import Report

HEADER = ("domain", "runs", "plain", "spec", "speedup (quartiles)", "whole", "accepted", "per pass", "")
_WIDTHS = (15, 4, 7, 7, 20, 6, 8, 8, 0)
UNKNOWN = "-"
_LEAST_PASSES, _LEAST_TESTED = 8, 30  # with fewer, medians and errors are not shown


def table_lines(report: Report) -> Iterator[str]:
    yield _row(HEADER)
    domains: dict[str, Any] = report["domains"]
    for name, figures in domains.items():
        yield _row((name, *cells(figures)))
    if len(domains) > 1:
        yield _row(("all", *cells(report["total"])))
    yield (
        "plain, spec: decoding speed in tokens/s without and with speculation; whole: speedup of whole answers, "
        "prefill included; per pass: tokens per target pass"
    )
    yield ""
    yield verdict_line(report)
    yield from reason_lines(report)


def cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a table row, without the name of the domain."""
    rates = (figures[side]["tokens_per_second"] for side in ("standard", "speculative"))
    spread = figures["speedup"]
    speedup = f"{spread['median']:.2f}x" if spread else UNKNOWN
    if spread and figures["num_trials"] > 1:
        speedup += f" ({spread['q1']:.2f}-{spread['q3']:.2f})"
    return (
        str(figures["num_trials"]),
        *(f"{rate['median']:.1f}" if rate else UNKNOWN for rate in rates),
        speedup,
        shown(figures["whole_answer_speedup"], "{:.2f}x"),
        shown(figures["acceptance_rate"], "{:.0%}"),
        shown(figures["mean_accepted_length"], "{:.2f}"),
        {"unknown": "", "undrafted": "nothing drafted"}.get(figures["verdict"], figures["verdict"]),
    )


def shown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def verdict_line(report: Report) -> str:
    total, domains = report["total"], report["domains"]
    pooled = shown(total["pooled_speedup"], "{:.2f}x")
    says = {
        "gains": f"speculation is faster: {pooled} the speed of plain decoding over all prompts",
        "even": f"speculation makes no difference beyond noise: {pooled} over all prompts",
        "loses": f"speculation is slower: {pooled} the speed of plain decoding over all prompts",
        "undrafted": "nothing was drafted: both sides decoded plainly, so there is no ratio",
        "unknown": f"too few runs for a verdict: {pooled} over all prompts; give more with --repeat",
    }[total["verdict"]]
    against = "gains" if total["verdict"] == "loses" else "loses"
    others = [
        f"{name} {shown(figures['pooled_speedup'], '{:.2f}x')}"
        for name, figures in domains.items()
        if figures["verdict"] == against
    ]
    return says + (f"; it {against} on {', '.join(others)}" if others and len(domains) > 1 else "")


def reason_lines(report: Report) -> Iterator[str]:
    """One line each: baseline, equality of texts, time by phase, cost of passes, drafters, memory."""
    yield f"baseline: {report['baseline']}"
    if noise := report["total"]["noise"]:
        yield (
            f"noise: plain decoding, run twice, reached {noise['median']:.2f}x of itself (quartiles "
            f"{noise['q1']:.2f}-{noise['q3']:.2f}): smaller differences say nothing"
        )
    if report["padded_plain_speedup"] is not None:
        yield (
            f"reproducible mode without speculation: {report['padded_plain_speedup']:.2f}x; "
            "--no-reproducible disables it"
        )
    yield equality(report)
    yield f"time of speculation: {_time_split(report['total']['speculative']['time'])}"
    if report["standard_pass_s"]:
        yield f"a target pass by width: {_cost(report)}"
    if not report["drafters"]:
        yield "nothing was drafted: no draft was expected to save time"
    for name, found in report["drafters"].items():
        share, rate = shown(found["share_of_tokens"], "{:.0%}"), shown(found["acceptance_rate"], "{:.0%}")
        error = report["reliability"].get(name, {"num_tokens": 0})
        is_known = error["num_tokens"] >= _LEAST_TESTED
        trust = f", confidence off by {error['expected_calibration_error']:.3f} on average" if is_known else ""
        yield f"drafter {name}: {share} of all tokens, {rate} of its drafts accepted{trust}"
    memory = report["memory"]
    copies = " (two copies of the target are loaded)" if memory["num_target_copies"] > 1 else ""
    yield (
        f"memory: target {_mb(memory['target_weight_bytes'])} and cache {_mb(memory['target_kv_bytes'])}, drafters "
        f"{_mb(memory['drafters_bytes'])}, peak of this process {_mb(memory['peak_rss_bytes'])}{copies}"
    )


def equality(report: Report) -> str:
    same, count = report["num_identical"], report["num_prompts"]
    if report["reproducible"]:
        verdict = "identical to plain decoding in the same mode" if same == count else "DIFFERENT from plain decoding"
        return f"texts: {verdict}, {same} of {count} prompts"
    return f"texts: identical to plain decoding on {same} of {count} prompts; reproducible mode is off"


def _time_split(times: Mapping[str, float]) -> str:
    whole = times["wall_s"] or 1.0
    names = {
        "prefill_s": "prefill",
        "draft_s": "drafting",
        "verify_s": "target passes",
        "overhead_s": "other",
    }
    return ", ".join(f"{text} {times[name] / whole:.0%}" for name, text in names.items())


def _cost(report: Report) -> str:
    base, passes = report["standard_pass_s"], report["observed_passes"]
    common = {width: one["median_s"] for width, one in passes.items() if one["num_passes"] >= _LEAST_PASSES}
    ratios = ", ".join(f"{width}: {seconds / base:.2f}" for width, seconds in common.items())
    drafts = "".join(f"; a token of drafter {n}: {s / base:.3f}" for n, s in report["draft_token_s"].items())
    return f"{ratios or UNKNOWN} of plain decoding's {1000 * base:.2f} ms{drafts}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _row(values: tuple[str, ...]) -> str:
    first, *others = values
    shown_cells = [first.ljust(_WIDTHS[0])]
    shown_cells += [text.rjust(width) for text, width in zip(others, _WIDTHS[1:], strict=True)]
    return "  ".join(shown_cells).rstrip()
