"""Colours of drafters, for figures and the HTML page, and the page's style sheet."""

from __future__ import annotations

# The palette of Okabe and Ito, safe for colour-blind readers. `none`: rounds without a draft.
COLOURS = {"model": "#0072B2", "ngram": "#E69F00", "suffix": "#009E73", "none": "#999999", "all": "#000000"}
_OTHERS = ("#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
VERDICT_COLOURS = {"gains": "#009E73", "even": "#999999", "loses": "#D55E00", "unknown": "#BBBBBB"}
CSS = """
:root { color-scheme: light dark; --line: #8884; --panel: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.verdict { font-size: 1.15rem; border-left: .4rem solid #999; padding: .4rem .9rem; background: var(--panel); }
.verdict.gains { border-color: #009E73; } .verdict.loses { border-color: #D55E00; }
.small { font-size: .85rem; opacity: .8; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figure img { width: 100%; background: white; border-radius: .3rem; }
figcaption { font-size: .85rem; opacity: .8; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; padding: .5rem .8rem; border-radius: .3rem; }
.prompt { font-size: .85rem; opacity: .8; max-height: 9rem; overflow: auto; background: var(--panel); }
.answer { font-family: inherit; border: 1px solid var(--line); }
.token { border-bottom: 2px solid transparent; border-radius: 2px; }
p .token { padding: .1rem .5rem; margin-right: .4rem; border: 1px solid var(--line); white-space: nowrap; }
@media (prefers-color-scheme: dark) {
  figure img { filter: invert(.92) hue-rotate(180deg); }
}
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 .7rem; } h1 { font-size: 1.3rem; } ul { padding-left: 1.2rem; }
  table { font-size: .8rem; } th, td { padding: .25rem .35rem; }
  .figures { grid-template-columns: minmax(0, 1fr); } figure { overflow-x: auto; }
  figure img { width: 34rem; max-width: none; } figcaption { position: sticky; left: 0; }
}
"""


def colour(name: str) -> str:
    return COLOURS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]
