"""Prompts that the demo family or SmolLM2 never saw, in its chat format, for the measuring scripts' --prompts FILE.

    python scripts/lab/held_out_prompts.py --data DATA --out prompts.jsonl [--domains dialogue,code,copying] [--count N]
    python scripts/lab/held_out_prompts.py --data DATA --out prompts.jsonl --domains spec-bench [--count N] [--chars N]
        [--system TEXT]
    python scripts/lab/held_out_prompts.py --data DATA --out prompts.jsonl --domains all --plain

DATA is the folder of the data files that `demo_family.py` reads: dialogues up to a question, documented functions of
this Python's own library, short functions to repeat with a word replaced. They are drawn with a seed; fewer are the
first ones of more. The file holds one JSON object per line, {"domain": ..., "text": ...}, the domains by turns.
`--plain`: the questions alone, for `edgespec bench --prompts`.

`spec-bench` has questions to SmolLM2, N in all, the kinds by turns; --chars cuts longer ones. `edits` has requests to
edit code. Both are written as for other models of this chat format, too, with their --system message.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))


from code_edits import edits
from compare import spec_bench
from edgespec.bench.prompts import BenchPrompt, choose
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from trainlib.demo_texts import BOS, TURN_START, turn
from trainlib.public_data import read_data

ROLES = ("user", "assistant")
SPEC_BENCH, EDITS = "spec-bench", "edits"
SMOLLM2 = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def rendered(prompt: BenchPrompt) -> str:
    """The conversation as the demo family reads it, up to where the answer begins."""
    said = "".join(turn(ROLES[index % 2], content) for index, content in enumerate(prompt.turns))
    return f"{BOS}{said}{TURN_START}assistant\n"


def texts(chosen: argparse.Namespace) -> list[tuple[str, str]]:
    """Domain and text of prompts to the demo family."""
    wanted = [] if chosen.domains == "all" else chosen.domains.split(",")
    prompts = choose(read_data(chosen.data), wanted, chosen.count, chosen.seed, lambda prompt: True)
    return [(prompt.domain, prompt.text if chosen.plain else rendered(prompt)) for prompt in prompts]


def questions(chosen: argparse.Namespace) -> list[tuple[str, str]]:
    """Kind and text of questions or edits."""
    asked = edits(chosen.count) if chosen.domains == EDITS else spec_bench(chosen.data)[: chosen.count]
    return [(kind, CHAT.format(chosen.system, text[: chosen.chars])) for kind, text in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--domains", default="dialogue,code", help="by commas, or all (default %(default)s)")
    parser.add_argument("--plain", action="store_true", help="questions without a chat's marks")
    parser.add_argument("--count", type=int, default=24, help="prompts of each domain (default %(default)s)")
    parser.add_argument("--chars", type=int, default=600, help="of a question or edit (default %(default)s)")
    parser.add_argument("--system", default=SMOLLM2, help="system message of questions and edits (default: SmolLM2's)")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    try:
        found = questions(chosen) if chosen.domains in (SPEC_BENCH, EDITS) else texts(chosen)
    except EdgespecError as exc:
        parser.error(str(exc))
    lines = [json.dumps({"domain": domain, "text": text}) for domain, text in found]
    write_atomically(chosen.out, "\n".join(lines) + "\n")
    print(f"{chosen.out}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
