"""Compares reading a prompt with restoring it from a saved state, in a process of its own each time.

    python scripts/lab/measure_sessions.py MODEL [--engine onnx] [--tokens 2000] [--types f16,q8_0] [--rounds 3]

One child reads a prompt of `--tokens` tokens and saves its state; the next ones restore it. Loading the model is not
counted on either side, the first token of an answer is on both. The answers must be the same, token by token; they are
greedy and not speculative.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

TYPES = {"llamacpp": "f16,q8_0", "onnx": "f32,int8"}
NEW_TOKENS = 8
TEXTS = Path(__file__).resolve().parents[2] / "docs"


def run_child(options: dict[str, Any], state: Path, num_tokens: int) -> dict[str, Any]:
    """In the child: answer a prompt, read or restored; seconds until the first token, and the tokens."""
    import edgespec

    with edgespec.load(**options, drafter="none") as model:
        words = model.encode(" ".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md"))))
        prompt = (words * (num_tokens // len(words) + 1))[:num_tokens]
        model.generate(words[-32:], edgespec.Sampling(temperature=0), edgespec.GenerateOptions(max_tokens=2))
        began_s = perf_counter()
        restored = model.load_state(state) if state.exists() else 0
        restored_s = perf_counter() - began_s
        tokens, first_s = [], 0.0
        answer = edgespec.GenerateOptions(max_tokens=NEW_TOKENS, ignore_eos=True)
        for event in model.stream(prompt, edgespec.Sampling(temperature=0), answer):
            first_s = first_s or perf_counter() - began_s
            tokens.append(event.token_id)
        if not restored:
            model.save_state(state)
        found = {"first_s": first_s, "restored_s": restored_s, "restored": restored, "tokens": tokens}
        return found | {"bytes": state.stat().st_size}


def child(options: dict[str, Any], state: Path, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps([options, str(state), num_tokens])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        options, state, num_tokens = json.loads(sys.argv[2])
        print(json.dumps(run_child(options, Path(state), num_tokens)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", default="llamacpp", choices=TYPES)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--types")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("cache  read (s)  restored (s)  share    state (MB)  same answer")
    for kind in (given.types or TYPES[given.engine]).split(","):
        options = {"model": given.model, "engine": given.engine, "context_length": given.tokens + 2 * NEW_TOKENS}
        options |= {} if kind == "f32" else {"cache_type_k": kind, "cache_type_v": kind}
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder, "state")
            read = []
            for _ in range(given.rounds):
                state.unlink(missing_ok=True)
                read.append(child(options, state, given.tokens))
            restored = [child(options, state, given.tokens) for _ in range(given.rounds)]
        read_s, restored_s = (median(each["first_s"] for each in runs) for runs in (read, restored))
        is_same = all(each["tokens"] == read[0]["tokens"] for each in restored)
        megabytes = restored[0]["bytes"] / 1e6
        print(f"{kind:5}  {read_s:8.2f}  {restored_s:12.3f}  {restored_s / read_s:6.2%}  {megabytes:10.1f}  {is_same}")


if __name__ == "__main__":
    main()
