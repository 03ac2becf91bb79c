"""Train the demo family from scratch and pack it: `python3 scripts/run.py install train`, then run this. Resumable."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demo_training.pack import pack, pack_edits
from demo_training.pipeline import DISTILL_TOKENS, EDIT_TOKENS, EDITS, STAGES, TARGET_TOKENS, Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with sgd_*.jsonl.xz and gsm8k_train.jsonl.xz")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and logs; a second call goes on here")
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="where the shipped files go")
    parser.add_argument("--tokens", type=int, default=TARGET_TOKENS, help="tokens the target sees (%(default)s)")
    parser.add_argument("--distill-tokens", type=int, default=DISTILL_TOKENS, help="tokens of students (%(default)s)")
    parser.add_argument("--edit-tokens", type=int, default=EDIT_TOKENS, help="tokens of --stage edits (%(default)s)")
    parser.add_argument(
        "--stage",
        choices=(*STAGES, "all", EDITS),
        default="all",
        help=f"(default: all); {EDITS}: teach the shipped target to copy, for benchmarks, into WORK/{EDITS}/hf",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-figures", action="store_true", help="pack without measuring acceptance again")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(options.data, options.work, options.seed)
    stages = STAGES if options.stage == "all" else (options.stage,)
    if "tokenizer" in stages:
        run.streams()
    if "target" in stages:
        run.train_target(options.tokens)
    if "distill" in stages:
        run.distill_students(options.distill_tokens)
    if EDITS in stages:
        pack_edits(run, options.out, options.edit_tokens)
    if "pack" in stages:
        pack(run, options.out, with_figures=not options.no_figures)


if __name__ == "__main__":
    main()
