"""Which format of one model is fastest here, plainly and with its drafts: ratios to the first file in one run.

    python scripts/lab/measure_formats.py FILE[=DRAFT] [FILE[=DRAFT] ...] --data DATA [--seconds N] [--temp T]

Each FILE is the same model in another format, a GGUF or an ONNX folder, DRAFT the model or the heads (.npz) that its
default drafts with. Base line: plain decoding of the first file in the fastest mode. Of each of Spec-Bench's prompts
(DATA), cut at `--prompt-tokens`, all settings write as many tokens as the first file's own answer has, at most
`--tokens`, past their own end if need be; whole answers, with reading the prompt, each from an empty KV cache and in
random order. An error is the standard error of the mean over prompts. Everything is loaded at once: mind the memory.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import edgespec
from code_edits import edits
from edgespec import GenerateOptions, Model, Sampling
from edgespec.reports import Stats
from measure_default import fresh_home, prompts_of

PLAIN, DEFAULT = "plain", "default"
WARM_TOKENS, MOST_PROMPTS = 8, 1000
Setting = tuple[str, str]  # the file's name, and PLAIN or DEFAULT


def load(path: str, *, draft: str, is_plain: bool, context: int) -> Model:
    chosen: dict[str, Any] = {"reproducible": False, "drafter": "none"} if is_plain else {}
    if draft and not is_plain:
        chosen["heads" if draft.endswith(".npz") else "draft"] = draft
    return edgespec.load(path, context_length=context, **chosen)


def measure(chosen: argparse.Namespace) -> None:
    began_s = monotonic()
    sampling, draw = Sampling(temperature=chosen.temp, seed=1), random.Random(0)
    found: dict[Setting, list[Stats]] = defaultdict(list)
    with fresh_home(), ExitStack() as stack:
        models: dict[Setting, Model] = {}
        for path, draft in chosen.files:
            for kind in (PLAIN, DEFAULT):
                model = load(path, draft=draft, is_plain=kind == PLAIN, context=chosen.context)
                models[Path(path).name, kind] = stack.enter_context(model)
        base = next(iter(models))

        def answer(setting: Setting, ids: list[int], tokens: int, *, to_the_end: bool = False) -> Stats:
            models[setting].forget()
            options = GenerateOptions(max_tokens=tokens, ignore_eos=not to_the_end)
            return models[setting].generate(ids, sampling, options).stats

        asked = edits(MOST_PROMPTS) if chosen.edits else prompts_of(chosen.data, MOST_PROMPTS)
        for number, (kind, text) in enumerate(asked):
            ids = models[base].encode_chat([{"role": "user", "content": text}])[: chosen.prompt_tokens]
            if not number:
                for setting in models:  # pages and buffers are touched before anything counts
                    answer(setting, ids[:20], WARM_TOKENS)
            if number and monotonic() - began_s > chosen.seconds:
                break
            tokens = answer(base, ids, chosen.tokens, to_the_end=True).new_tokens
            for setting in draw.sample(list(models), len(models)):
                found[setting].append(answer(setting, ids, tokens))
            ratios = (f"{found[base][-1].wall_s / found[setting][-1].wall_s:.2f}" for setting in models)
            print(f"  {kind:14} {tokens:3} tokens  {' '.join(ratios)}", file=sys.stderr, flush=True)
    report(found, base)


def report(found: dict[Setting, list[Stats]], base: Setting) -> None:
    plain = found[base]
    print(f"{len(plain)} prompts, {sum(stats.new_tokens for stats in plain)} tokens")
    for (name, kind), all_stats in found.items():
        ratios = [own.wall_s / stats.wall_s for own, stats in zip(plain, all_stats, strict=True)]
        error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        total_s, tokens = sum(stats.wall_s for stats in all_stats), sum(stats.new_tokens for stats in all_stats)
        drafted, accepted = (sum(getattr(s, f"{what}_tokens") for s in all_stats) for what in ("drafted", "accepted"))
        passes = sum(stats.rounds for stats in all_stats)
        print(
            f"{name:32} {kind:8} {tokens / total_s:6.1f} tokens/s  {sum(s.wall_s for s in plain) / total_s:.3f} of all "
            f"time, mean {mean(ratios):.3f} +- {error:.3f}, worst {min(ratios):.2f}; "
            f"accepted {accepted / drafted if drafted else 0:.2f}, per pass {(tokens - len(all_stats)) / passes:.2f}"
        )


def file_and_draft(text: str) -> tuple[str, str]:
    path, _, draft = text.partition("=")
    return path, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=file_and_draft, metavar="FILE[=DRAFT]")
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench_dev.jsonl.xz")
    parser.add_argument("--edits", action="store_true", help="requests to edit code")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="longer prompts are cut (default %(default)s)")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=500, help="no prompt begins later, loading included")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
