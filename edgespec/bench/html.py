"""The benchmark report as one self-contained HTML page: verdict, tables, figures, and texts coloured by drafter.

Figures are embedded PNGs. Without matplotlib the page has no figures, and says so.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from edgespec.bench.output import has_matplotlib
from edgespec.bench.report import Report
from edgespec.bench.style import CSS, colour
from edgespec.bench.table import HEADER, cells, reason_lines, verdict_line

_CAPTIONS = {
    "speedup": "Speedup by domain. Grey: no difference beyond noise, or too few runs; the line is plain decoding.",
    "acceptance": "Acceptance rate (left) and tokens per target pass (right) along the answers.",
    "accepted_lengths": "Accepted draft tokens per round, by drafter.",
    "reliability": "Confidence of draft tokens against the share that was accepted; on the line both are equal.",
    "cost_curve": "Time of a target pass by width (left), and the highest speedup possible at that width (right).",
}
_SETTINGS = (
    *("model", "engine", "device", "threads", "context_length", "drafter", "draft_length", "max_slowdown", "verify"),
    *("reproducible", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos"),
)
# Control characters other than newline and tab are replaced.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def page(report: Report) -> str:
    title = f"edgespec bench: {report['model']}"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{CSS}</style></head><body><h1>{_text(title)}</h1>",
            *_summary(report),
            *_figures(report),
            *_texts(report),
            *_settings(report),
            "</body></html>",
        )
    )


def _summary(report: Report) -> Iterator[str]:
    yield f'<p class="verdict {report["total"]["verdict"]}">{_text(verdict_line(report))}</p>'
    if not report["complete"]:
        yield f"<p>Interrupted: {report['num_trials']} of {report['num_planned_trials']} runs are included.</p>"
    rows = [(name, figures) for name, figures in report["domains"].items()]
    yield _table(HEADER, [(name, *cells(figures)) for name, figures in (*rows, ("all", report["total"]))])
    yield (
        "<p class=small>plain, spec: median decoding speed in tokens per second without and with speculation; whole: "
        "speedup of whole answers, prefill included; per pass: tokens per target pass.</p><ul>"
    )
    yield from (f"<li>{_text(line)}</li>" for line in reason_lines(report))
    yield "</ul>"


def _figures(report: Report) -> Iterator[str]:
    if not has_matplotlib():
        yield "<p class=small>Figures need matplotlib, which was not installed: edgespec doctor says how to get it.</p>"
        return
    from edgespec.bench.plots import images

    yield "<h2>Figures</h2><div class=figures>"
    for name, png in images(report).items():
        caption, data = _text(_CAPTIONS[name]), base64.b64encode(png).decode()
        picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        yield f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"
    yield "</div>"


def _texts(report: Report) -> Iterator[str]:
    drafters = sorted({drafter for prompt in report["prompts"] for _, drafter in prompt["pieces"] if drafter})
    yield "<h2>Texts</h2><p>Tokens by drafter: <span class=token>none (the target itself)</span>"
    yield from (f'<span class=token style="{_style(name)}">{_text(name)}</span>' for name in drafters)
    yield "</p>"
    for prompt in report["prompts"]:
        yield from _prompt(prompt)


def _prompt(prompt: Mapping[str, Any]) -> Iterator[str]:
    spread = prompt["speedup"]
    why_none = "nothing drafted" if prompt["verdict"] == "undrafted" else "too short for a rate"
    speedup = f"{spread['median']:.2f}x" if spread else why_none
    accepted = "" if prompt["acceptance_rate"] is None else f", {prompt['acceptance_rate']:.0%} accepted"
    same = "" if prompt["identical"] else ", differs from plain decoding in the same mode"
    turns = f", turn {(prompt['num_turns'] + 1) // 2}" if prompt["num_turns"] > 1 else ""
    heading = f"{prompt['domain']}{turns}, T={prompt['temperature']:g}: {speedup}{accepted}{same}"
    answer = "".join(_token(text, drafter) for text, drafter in prompt["pieces"])
    yield f"<section><h3>{_text(heading)}</h3><pre class=prompt>{_text(prompt['text'])}</pre>"
    yield f"<pre class=answer>{answer}</pre></section>"


def _token(text: str, drafter: str | None) -> str:
    if drafter is None:
        return f"<span class=token>{_text(text)}</span>"
    return f'<span class=token style="{_style(drafter)}" title="{_text(drafter)}">{_text(text)}</span>'


def _style(drafter: str) -> str:
    return f"background:{colour(drafter)}40;border-bottom-color:{colour(drafter)}"


def _settings(report: Report) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    rows = [(name.replace("_", " "), str(report[name])) for name in _SETTINGS]
    yield _table(("setting", "value"), [*rows, ("edgespec", report["edgespec"])])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _text(text: str) -> str:
    return escape(text.translate(_CONTROLS))
