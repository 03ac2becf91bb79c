"""Prompts that the demo family never saw, for `edgespec bench --prompts FILE`.

    python scripts/lab/held_out_prompts.py --data DATA --out prompts.jsonl [--domains dialogue,code,copying] [--count N]

DATA is the folder of the data files that `demo_family.py` reads: dialogues up to a question, documented functions of
this Python's own library, short functions to repeat with a word replaced; and Spec-Bench's questions. They are drawn
with a seed; fewer are the first ones of more. The file holds one JSON object per line, {"domain": ..., "text": ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from edgespec.bench.prompts import choose
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from trainlib.public_data import read_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--domains", default="dialogue,code", help="by commas, or all (default %(default)s)")
    parser.add_argument("--count", type=int, default=24, help="prompts of each domain (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    wanted = [] if chosen.domains == "all" else chosen.domains.split(",")
    try:
        prompts = choose(read_data(chosen.data), wanted, chosen.count, chosen.seed, lambda prompt: True)
    except EdgespecError as exc:
        parser.error(str(exc))
    lines = [json.dumps({"domain": prompt.domain, "text": prompt.text}) for prompt in prompts]
    write_atomically(chosen.out, "\n".join(lines) + "\n")
    print(f"{chosen.out}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
